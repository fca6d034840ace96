//! What the tests share: compiling kernels, and a device buffer with values.
#![allow(dead_code)]

pub mod library;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use swgpu::counters::Counts;
use swgpu::exec::launch::{Fault, Launch, Module};
use swgpu::memory::{self, Allocation, Owner};

/// A clang that can compile for AMD GPUs: `$CLANG`, or one with a usual name.
fn clang() -> Option<PathBuf> {
    let given = std::env::var_os("CLANG").map(PathBuf::from);
    let names = ["clang-19", "clang-20", "clang-21", "clang-22", "clang", "/opt/rocm/llvm/bin/clang"].map(PathBuf::from);
    given.into_iter().chain(names).find(|program| {
        let targets = Command::new(program).arg("--print-targets").output();
        targets.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
    })
}

/// Compiles `tests/kernels/NAME.hip` for gfx942. `None`, with a sentence, only if there is no clang with AMD GPUs.
pub fn compile(name: &str) -> Option<Vec<u8>> {
    static COMPILED: Mutex<Option<HashMap<String, Vec<u8>>>> = Mutex::new(None);
    let mut compiled = COMPILED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let compiled = compiled.get_or_insert_default();
    if let Some(object) = compiled.get(name) {
        return Some(object.clone());
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(format!("{name}.hip"));
    let Some(clang) = clang() else {
        eprintln!("skipped: no clang with the AMDGPU target (apt install clang-19 lld-19)");
        return None;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let object = folder.path().join("kernels.co");
    let run = Command::new(clang)
        .args(["-x", "hip", "--offload-arch=gfx942", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"])
        .args(["-std=c++17", "-O3", "-munsafe-fp-atomics", "-mcode-object-version=5", "-Wall", "-Werror", "-o"])
        .args([&object, &source])
        .output()
        .expect("clang runs");
    assert!(run.status.success(), "{}: {}", source.display(), String::from_utf8_lossy(&run.stderr));
    let object = std::fs::read(object).expect("code object");
    compiled.insert(name.to_string(), object.clone());
    Some(object)
}

pub fn load(name: &str) -> Option<Arc<Module>> {
    Some(Module::load(&compile(name)?, 0).expect("module loads"))
}

/// Plain values that may be copied as bytes.
pub trait Plain: Copy + Default {}
impl Plain for f32 {}
impl Plain for u8 {}
impl Plain for i8 {}
impl Plain for u16 {}
impl Plain for i16 {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for u64 {}
impl Plain for i64 {}

/// A live device allocation, freed at the end of its scope.
pub struct Buffer(Arc<Allocation>);

impl Buffer {
    /// `count` values that nobody has written yet.
    pub fn unwritten<T: Plain>(count: usize) -> Self {
        let allocation = Allocation::new(count * size_of::<T>(), Owner::Device(0), true).expect("memory");
        memory::register(&allocation);
        Self(allocation)
    }

    pub fn of<T: Plain>(values: &[T]) -> Self {
        let buffer = Self::unwritten::<T>(values.len());
        let segment = buffer.0.segment();
        // SAFETY: the allocation has just been made with this length.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), segment.data, size_of_val(values)) };
        segment.mark(segment.start, size_of_val(values), 1);
        buffer
    }

    pub fn address(&self) -> u64 {
        self.0.address
    }

    pub fn read<T: Plain>(&self) -> Vec<T> {
        let segment = self.0.segment();
        let mut values = vec![T::default(); self.0.bytes / size_of::<T>()];
        let bytes = size_of_val(values.as_slice());
        assert!(segment.is_written(segment.start, bytes), "the kernel left some of its result unwritten");
        // SAFETY: both are `bytes` long, and `T` is plain.
        unsafe { std::ptr::copy_nonoverlapping(segment.data, values.as_mut_ptr().cast(), bytes) };
        values
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        memory::release(self.0.address);
    }
}

/// One kernel argument.
pub enum Argument<'a> {
    Buffer(&'a Buffer),
    Address(u64),
    U32(u32),
    F32(f32),
}

/// Launches a kernel of `module` over `grid` workgroups of `workgroup` items each.
pub fn launch(
    module: &Arc<Module>,
    name: &str,
    grid: [u32; 3],
    workgroup: [u32; 3],
    arguments: &[Argument],
) -> Result<Counts, Box<Fault>> {
    let kernel = module.kernel(name).unwrap_or_else(|| panic!("no kernel {name}")).clone();
    let mut kernarg = vec![0; kernel.info.kernarg_bytes];
    let explicit: Vec<_> = kernel.info.arguments.iter().filter(|argument| !argument.is_hidden()).collect();
    assert_eq!(explicit.len(), arguments.len(), "number of arguments of {name}");
    for (place, argument) in explicit.iter().zip(arguments) {
        let bytes = match argument {
            Argument::Buffer(buffer) => buffer.address().to_le_bytes().to_vec(),
            Argument::Address(address) => address.to_le_bytes().to_vec(),
            Argument::U32(value) => value.to_le_bytes().to_vec(),
            Argument::F32(value) => value.to_le_bytes().to_vec(),
        };
        assert_eq!(bytes.len(), place.size, "size of an argument of {name}");
        kernarg[place.offset..place.offset + place.size].copy_from_slice(&bytes);
    }
    let launch = Launch { module: module.clone(), kernel, grid, workgroup, dynamic_lds_bytes: 0, kernarg };
    launch.check().expect("launch is accepted");
    launch.run(|_| true)
}

/// A repeatable stream of numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
