//! Code objects, their kernels, and launches.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::ffi::{hipFunction_attribute, hipFunction_t, hipModule_t};
use super::{Hip, Stream};
use crate::Error;

/// A code object, loaded on the device that was current then. Unloaded when it and all its functions are dropped.
#[derive(Debug, Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    hip: &'static Hip,
    raw: hipModule_t,
    // What was given to HIP, which does not say when it has read it for the last time. Aligned as the structures of an ELF file.
    _image: Vec<u64>,
}

// SAFETY: HIP lets any thread use any module, several at once too.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads `image`, a code object as the compiler made it (ELF).
    ///
    /// # Errors
    /// It is not a whole ELF file, or was compiled for another device.
    pub fn load(hip: &'static Hip, image: &[u8]) -> Result<Self, Error> {
        check_elf(image)?;
        let copy = words(image);
        let mut raw = null_mut();
        // SAFETY: the library is not told the length; what it reads lies within the file that the ELF header describes.
        let status = unsafe { (hip.functions.hipModuleLoadData)(&mut raw, copy.as_ptr().cast()) };
        hip.check("hipModuleLoadData", status, || format!("loading a code object of {} bytes", image.len()))?;
        Ok(Self { loaded: Arc::new(Loaded { hip, raw, _image: copy }) })
    }

    /// The kernel `name`.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        let c_name = CString::new(name).map_err(|_| Error::Invalid(format!("{name:?} is no name of a kernel")))?;
        let (hip, module) = (self.loaded.hip, self.loaded.raw);
        let mut raw = null_mut();
        // SAFETY: the module is loaded, `c_name` ends in a zero byte, and `raw` is a place for the handle.
        let status = unsafe { (hip.functions.hipModuleGetFunction)(&mut raw, module, c_name.as_ptr()) };
        hip.check("hipModuleGetFunction", status, || format!("looking for kernel {name}"))?;
        Ok(Function { raw, name: name.into(), loaded: self.loaded.clone() })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded here, and owned. An error is that of earlier work, and was reported by who waited for it.
        unsafe { (self.hip.functions.hipModuleUnload)(self.raw) };
    }
}

/// The same bytes, aligned to eight; zeros follow.
fn words(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    };
    bytes.chunks(8).map(word).collect()
}

/// That `image` reaches as far as its ELF header says: the section headers, which end the file.
fn check_elf(image: &[u8]) -> Result<(), Error> {
    let invalid = |why: String| Err(Error::Invalid(format!("a code object of {} bytes {why}", image.len())));
    // Elf64_Ehdr: 64 bytes, little-endian; offset of the section headers at 40, their size at 58, their number at 60.
    let Some(header) = image.first_chunk::<64>().filter(|header| header.starts_with(b"\x7fELF\x02\x01")) else {
        return invalid("does not begin with the header of a 64-bit ELF file".into());
    };
    let offset = u64::from_le_bytes(header[40..48].try_into().expect("8 bytes"));
    let entries =
        u64::from(u16::from_le_bytes([header[58], header[59]])) * u64::from(u16::from_le_bytes([header[60], header[61]]));
    match offset.checked_add(entries) {
        Some(end) if end <= image.len() as u64 => Ok(()),
        _ => invalid(format!("is cut short: its section headers begin at {offset} and take {entries} bytes")),
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Function {
    raw: hipFunction_t,
    name: Arc<str>,
    loaded: Arc<Loaded>,
}

// SAFETY: HIP lets any thread launch any kernel, several at once too.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The shape of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Workgroups along x, y, z.
    pub workgroups: [u32; 3],
    /// Work-items of a workgroup along x, y, z.
    pub work_items: [u32; 3],
    /// Local data share (LDS) beyond what the kernel declares.
    pub shared_bytes: u32,
}

impl Function {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn attribute(&self, attribute: hipFunction_attribute) -> Result<i32, Error> {
        let hip = self.loaded.hip;
        let mut value = 0;
        // SAFETY: the handle is good while the module is loaded, and `value` is a place for the number.
        let status = unsafe { (hip.functions.hipFuncGetAttribute)(&mut value, attribute, self.raw) };
        hip.check("hipFuncGetAttribute", status, || format!("asking for {attribute:?} of kernel {}", self.name))?;
        Ok(value)
    }

    /// Queues a run of the kernel.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed. Whether this run fails shows at a later call.
    ///
    /// # Safety
    /// `arguments` must be those of the kernel, in number and types. Whatever it reads and writes through them must stay
    /// allocated, and untouched by others, until the stream has passed it.
    pub unsafe fn launch(&self, stream: &Stream, shape: Launch, arguments: &Arguments) -> Result<(), Error> {
        let Launch { workgroups: [grid_x, grid_y, grid_z], work_items: [block_x, block_y, block_z], shared_bytes } = shape;
        let mut pointers = arguments.pointers();
        let hip = self.loaded.hip;
        // SAFETY: the handles are good, the library copies the arguments before it returns, and the caller vouches for the rest.
        let status = unsafe {
            (hip.functions.hipModuleLaunchKernel)(
                self.raw,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        hip.check("hipModuleLaunchKernel", status, || format!("launching kernel {} as {shape:?}", self.name))
    }
}

/// Most arguments that a kernel may have here.
const MOST_ARGUMENTS: usize = 40;

/// Arguments of a kernel, in order; built without allocating.
#[derive(Debug, Clone)]
pub struct Arguments {
    cells: [u64; MOST_ARGUMENTS],
    count: usize,
}

impl Arguments {
    #[expect(clippy::new_without_default, reason = "reads as what it is for: Arguments::new().with(..)")]
    pub fn new() -> Self {
        Self { cells: [0; MOST_ARGUMENTS], count: 0 }
    }

    /// These and one more.
    ///
    /// # Panics
    /// A kernel has more than forty arguments.
    #[must_use]
    pub fn with(mut self, value: impl Argument) -> Self {
        assert!(self.count < MOST_ARGUMENTS, "more than {MOST_ARGUMENTS} arguments of a kernel");
        self.cells[self.count] = value.cell();
        self.count += 1;
        self
    }

    /// The arguments, each in the first bytes of a cell.
    pub fn cells(&self) -> &[u64] {
        &self.cells[..self.count]
    }

    /// A pointer to every argument, as HIP wants them.
    fn pointers(&self) -> [*mut c_void; MOST_ARGUMENTS] {
        let mut pointers = [null_mut(); MOST_ARGUMENTS];
        for (pointer, cell) in pointers.iter_mut().zip(&self.cells[..self.count]) {
            *pointer = std::ptr::from_ref(cell).cast_mut().cast();
        }
        pointers
    }
}

/// What a kernel can be given.
pub trait Argument: Copy {
    /// The value in the first bytes of a cell, where HIP reads as many as the kernel's argument has.
    fn cell(self) -> u64;
}

macro_rules! arguments {
    ($($type:ty),*) => { $(
        impl Argument for $type {
            fn cell(self) -> u64 {
                let mut cell = [0; 8];
                cell[..size_of::<$type>()].copy_from_slice(&self.to_ne_bytes());
                u64::from_ne_bytes(cell)
            }
        }
    )* };
}
arguments!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl<T> Argument for *mut T {
    fn cell(self) -> u64 {
        self as u64
    }
}

impl<T> Argument for *const T {
    fn cell(self) -> u64 {
        self as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_in_order_and_begin_their_cells() {
        let arguments = Arguments::new().with(-2i32).with(1.5f32).with(0x1234_5678_9abc_def0u64 as *mut u8);
        let pointers = arguments.pointers();
        // SAFETY: each points to a cell of eight bytes.
        unsafe {
            assert_eq!(*pointers[0].cast::<i32>(), -2);
            assert_eq!(*pointers[1].cast::<f32>(), 1.5);
            assert_eq!(*pointers[2].cast::<u64>(), 0x1234_5678_9abc_def0);
        }
        assert!(pointers[3].is_null());
    }

    #[test]
    fn an_image_is_copied_byte_for_byte() {
        let words = words(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn only_whole_elf_files_are_loaded() {
        let mut image = [0u8; 64 + 2 * 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[40..48].copy_from_slice(&64u64.to_le_bytes());
        (image[58], image[60]) = (64, 2);
        assert_eq!(check_elf(&image), Ok(()));
        let error = check_elf(&image[..191]).unwrap_err().to_string();
        assert_eq!(error, "a code object of 191 bytes is cut short: its section headers begin at 64 and take 128 bytes");
        for broken in [&b""[..], b"__CLANG_OFFLOAD_BUNDLE__", &[0; 64]] {
            assert!(check_elf(broken).unwrap_err().to_string().ends_with("the header of a 64-bit ELF file"));
        }
    }
}
