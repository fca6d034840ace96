//! Prints what this crate declares of RCCL as JSON, for `tests/python/check_hip_bindings.py`.

fn main() {
    println!("[{}]", rccl_sys::ffi::interface().to_json());
}
