//! The built shared library, opened as the trainer opens it.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::{Library, Symbol};

pub type Handle = *mut c_void;
pub const HOST_TO_DEVICE: c_int = 1;
pub const DEVICE_TO_HOST: c_int = 2;

/// Opens `libswgpu.so`, which cargo builds beside the tests.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let own = std::env::current_exe().expect("own path");
        let folder = own.parent().expect("a folder");
        let candidates = [folder.join("libswgpu.so"), folder.parent().expect("a folder").join("libswgpu.so")];
        let path: PathBuf = candidates.into_iter().find(|path| path.exists()).expect("cargo builds libswgpu.so beside the tests");
        // SAFETY: the library's initialisers do nothing.
        unsafe { Library::new(&path) }.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    })
}

pub fn symbol<T>(name: &str) -> Symbol<'static, T> {
    // SAFETY: the tests give each name the type of AMD's headers.
    unsafe { library().get(name.as_bytes()) }.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Calls a C function of the library: `c_call!(fn hipFree(pointer: Handle))`; the result is its status.
#[macro_export]
macro_rules! c_call {
    (fn $name:ident($($argument:ident: $type:ty = $value:expr),* $(,)?)) => {{
        let function = $crate::common::library::symbol::<unsafe extern "C" fn($($type),*) -> std::ffi::c_int>(stringify!($name));
        // SAFETY: the types are those of AMD's headers, and the tests pass what these ask for.
        #[allow(clippy::macro_metavars_in_unsafe)] // arguments of a C call are raw pointers and numbers
        unsafe { function($($value),*) }
    }};
}

#[track_caller]
pub fn ok(status: c_int) {
    if status != 0 {
        let text = symbol::<unsafe extern "C" fn(c_int) -> *const c_char>("hipGetErrorString");
        // SAFETY: the function returns a constant string.
        let text = unsafe { CStr::from_ptr(text(status)) };
        panic!("status {status}: {text:?}");
    }
}

pub fn malloc(bytes: usize) -> Handle {
    let mut pointer = std::ptr::null_mut();
    ok(c_call!(fn hipMalloc(pointer: *mut Handle = &mut pointer, bytes: usize = bytes)));
    pointer
}

pub fn upload<T: super::Plain>(values: &[T]) -> Handle {
    let pointer = malloc(size_of_val(values));
    let source = values.as_ptr().cast::<c_void>();
    ok(
        c_call!(fn hipMemcpy(to: Handle = pointer, from: *const c_void = source, bytes: usize = size_of_val(values), kind: c_int = HOST_TO_DEVICE)),
    );
    pointer
}

pub fn download<T: super::Plain>(pointer: Handle, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    let bytes = size_of_val(values.as_slice());
    let target = values.as_mut_ptr().cast::<c_void>();
    ok(
        c_call!(fn hipMemcpy(to: Handle = target, from: *const c_void = pointer.cast_const(), bytes: usize = bytes, kind: c_int = DEVICE_TO_HOST)),
    );
    values
}

pub fn set_device(number: c_int) {
    ok(c_call!(fn hipSetDevice(device: c_int = number)));
}

pub fn stream() -> Handle {
    let mut stream = std::ptr::null_mut();
    ok(c_call!(fn hipStreamCreateWithFlags(stream: *mut Handle = &mut stream, flags: c_uint = 1)));
    stream
}

pub fn synchronize(stream: Handle) -> c_int {
    c_call!(fn hipStreamSynchronize(stream: Handle = stream))
}

/// A kernel of a freshly loaded module.
pub fn function(object: &[u8], name: &str) -> Handle {
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    let name = CString::new(name).expect("no zero in a name");
    ok(c_call!(fn hipModuleLoadData(module: *mut Handle = &mut module, image: *const c_void = object.as_ptr().cast())));
    ok(
        c_call!(fn hipModuleGetFunction(function: *mut Handle = &mut function, module: Handle = module, name: *const c_char = name.as_ptr())),
    );
    function
}

/// Launches with one pointer per argument; `arguments` are 8-byte cells.
pub fn launch(function: Handle, groups: u32, items: u32, stream: Handle, arguments: &[u64]) -> c_int {
    let mut pointers: Vec<Handle> = arguments.iter().map(|cell| std::ptr::from_ref(cell).cast_mut().cast()).collect();
    launch_with(function, groups, items, stream, pointers.as_mut_ptr(), std::ptr::null_mut())
}

pub fn launch_with(
    function: Handle,
    groups: u32,
    items: u32,
    stream: Handle,
    parameters: *mut Handle,
    extra: *mut Handle,
) -> c_int {
    c_call!(fn hipModuleLaunchKernel(
        function: Handle = function,
        grid_x: c_uint = groups, grid_y: c_uint = 1, grid_z: c_uint = 1,
        block_x: c_uint = items, block_y: c_uint = 1, block_z: c_uint = 1,
        lds: c_uint = 0, stream: Handle = stream, parameters: *mut Handle = parameters, extra: *mut Handle = extra,
    ))
}

/// Runs one ignored test of this program in a process of its own, with more environment; whether it passed, and its stderr.
pub fn child(test: &str, environment: &[(&str, &str)]) -> (bool, String) {
    let output = std::process::Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .expect("this test program starts again");
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    (output.status.success(), text)
}
