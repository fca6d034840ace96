//! Modules, kernels and their launch.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::device::{current, device};
use super::handles::Handles;
use super::stream::stream;
use super::{
    Failure, INVALID_CONFIGURATION, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, LAUNCH_FAILURE, NO_BINARY, NOT_FOUND,
    NOT_SUPPORTED, Status, call, failure, give,
};
use crate::exec::launch::{Kernel, Launch, Module};
use crate::isa::{LoadError, code_object};

/// A kernel of a loaded module.
pub struct Function {
    module: Arc<Module>,
    kernel: Arc<Kernel>,
}

static MODULES: Handles<Module> = Handles::new("module");
static FUNCTIONS: Handles<Function> = Handles::new("function");

/// # Safety
/// HIP's: `module` points to a module handle, `image` to a whole code object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> Status {
    call("hipModuleLoadData", || {
        let device = current()?;
        device.check()?;
        if image.is_null() {
            return failure(INVALID_VALUE, "a null image");
        }
        // SAFETY: the caller's image has at least an ELF header, from which its length follows.
        let header = unsafe { &*image.cast::<[u8; 64]>() };
        let bytes = code_object::file_length(header).map_err(refuse)?;
        // SAFETY: the caller's image is a whole code object.
        let file = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), bytes) };
        let loaded = Module::load(file, device.number).map_err(refuse)?;
        // SAFETY: the caller's.
        unsafe { give(module, MODULES.add(loaded)) }
    })
}

fn refuse(error: LoadError) -> Failure {
    let status = match error {
        LoadError::WrongTarget { .. } => NO_BINARY,
        _ => INVALID_IMAGE,
    };
    Failure { status, text: error.to_string() }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipModuleUnload(module: *mut c_void) -> Status {
    call("hipModuleUnload", || {
        let module = MODULES.remove(module)?;
        // A sticky error does not keep modules.
        let _ = device(module.device as i32)?.synchronize();
        Ok(())
    })
}

/// # Safety
/// HIP's: `function` points to a function handle, `name` to a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> Status {
    call("hipModuleGetFunction", || {
        let module = MODULES.get(module)?;
        // SAFETY: the caller's.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let Some(kernel) = module.kernel(&name).cloned() else {
            let names: Vec<&str> = module.kernels.iter().map(|kernel| kernel.info.name.as_str()).collect();
            return failure(NOT_FOUND, format!("no kernel {name}; the module has {}", names.join(", ")));
        };
        // SAFETY: the caller's.
        unsafe { give(function, FUNCTIONS.add(Arc::new(Function { module, kernel }))) }
    })
}

/// # Safety
/// HIP's: `value` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipFuncGetAttribute(value: *mut c_int, attribute: c_int, function: *mut c_void) -> Status {
    call("hipFuncGetAttribute", || {
        let info = &FUNCTIONS.get(function)?.kernel.info;
        let known = match attribute {
            0 => info.max_workgroup,
            1 => info.lds_bytes,
            2 | 3 => 0, // constant and scratch memory
            4 => info.vgprs,
            other => return failure(INVALID_VALUE, format!("attribute {other} is not known to swgpu")),
        };
        // SAFETY: the caller's.
        unsafe { give(value, known as c_int) }
    })
}

/// The explicit arguments at their offsets, from either form in which a caller can pass them.
///
/// # Safety
/// HIP's: `parameters` has a pointer per argument, or `extra` is the list of a packed buffer.
unsafe fn arguments(kernel: &Kernel, parameters: *mut *mut c_void, extra: *mut *mut c_void) -> Result<Vec<u8>, Failure> {
    const BUFFER_POINTER: usize = 1;
    const BUFFER_SIZE: usize = 2;
    const END: usize = 3;
    let explicit = || kernel.info.arguments.iter().filter(|argument| !argument.is_hidden());
    let mut bytes = vec![0; kernel.info.kernarg_bytes];
    if !parameters.is_null() {
        for (index, argument) in explicit().enumerate() {
            // SAFETY: the caller's list has a pointer to `size` bytes for each argument.
            let source = unsafe { *parameters.add(index) };
            if source.is_null() {
                return failure(INVALID_VALUE, format!("argument {index} of {} is a null pointer", kernel.info.name));
            }
            // SAFETY: as above.
            let value = unsafe { std::slice::from_raw_parts(source.cast::<u8>(), argument.size) };
            bytes[argument.offset..argument.offset + argument.size].copy_from_slice(value);
        }
        return Ok(bytes);
    }
    let needed = explicit().map(|argument| argument.offset + argument.size).max().unwrap_or(0);
    let (mut buffer, mut length) = (std::ptr::null::<u8>(), 0);
    let mut entry = extra;
    while !entry.is_null() {
        // SAFETY: the caller's list is pairs of a key and a value, closed by `END`.
        let (key, value) = unsafe { (*entry as usize, entry.add(1)) };
        match key {
            END => break,
            // SAFETY: as above.
            BUFFER_POINTER => buffer = unsafe { *value }.cast(),
            // SAFETY: as above; the value points to the size.
            BUFFER_SIZE => length = unsafe { *(*value).cast::<usize>() },
            other => return failure(INVALID_VALUE, format!("key {other} in the launch's extra list")),
        }
        // SAFETY: as above.
        entry = unsafe { entry.add(2) };
    }
    if length < needed || needed > 0 && buffer.is_null() {
        return failure(INVALID_VALUE, format!("{} takes {needed} bytes of arguments, {length} were given", kernel.info.name));
    }
    let length = length.min(bytes.len());
    if length > 0 {
        // SAFETY: the caller's buffer has `length` bytes.
        bytes[..length].copy_from_slice(unsafe { std::slice::from_raw_parts(buffer, length) });
    }
    Ok(bytes)
}

/// # Safety
/// HIP's: arguments are as the kernel's signature says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn hipModuleLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    dynamic_lds_bytes: c_uint,
    handle: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    call("hipModuleLaunchKernel", || {
        let function = FUNCTIONS.get(function)?;
        let stream = stream(handle)?;
        if stream.device != function.module.device {
            return failure(
                INVALID_HANDLE,
                format!("module of device {} on a stream of device {}", function.module.device, stream.device),
            );
        }
        if !parameters.is_null() && !extra.is_null() {
            return failure(INVALID_VALUE, "arguments given both ways");
        }
        let launch = Launch {
            module: function.module.clone(),
            kernel: function.kernel.clone(),
            grid: [grid_x, grid_y, grid_z],
            workgroup: [block_x, block_y, block_z],
            dynamic_lds_bytes: dynamic_lds_bytes as usize,
            // SAFETY: the caller's.
            kernarg: unsafe { arguments(&function.kernel, parameters, extra) }?,
        };
        launch.check().or_else(|problem| failure(INVALID_CONFIGURATION, format!("{}: {problem}", function.kernel.info.name)))?;
        stream.push(Arc::new(move |device| {
            if device.check().is_ok() {
                let _turn = device.running();
                if let Err(fault) = launch.run(|owner| device.may_access(owner)) {
                    device.fail(LAUNCH_FAILURE, &fault.to_string());
                }
            }
        }))
    })
}

/// Kernels of the `<<<>>>` syntax are not registered with this library.
#[unsafe(no_mangle)]
pub extern "C" fn hipLaunchKernel() -> Status {
    call("hipLaunchKernel", || failure(NOT_SUPPORTED, "only hipModuleLaunchKernel is served"))
}
