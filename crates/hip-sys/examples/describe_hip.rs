//! Prints what this crate declares of HIP and hipBLASLt as JSON, for `tests/python/check_hip_bindings.py`.

fn main() {
    println!("[{},\n{}]", hip_sys::hip::ffi::interface().to_json(), hip_sys::hipblaslt::ffi::interface().to_json());
}
