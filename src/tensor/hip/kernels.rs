//! The code objects inside the executable, their kernels on a device, and how often each was launched.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use hip_sys::{Arguments, Function, Hip as Library, Launch, Module, Stream};

/// A code object of one architecture, as the build made it from `kernels/`.
struct CodeObject {
    arch: &'static str,
    /// Of its source.
    name: &'static str,
    /// What the kernels in it are called.
    kernels: &'static [&'static str],
    image: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/code_objects.rs"));

struct Kernel {
    function: Function,
    launches: AtomicU64,
}

/// All kernels, on the device that was current when they were loaded.
pub struct Kernels {
    kernels: BTreeMap<&'static str, Kernel>,
}

/// Architectures that this executable has kernels for.
pub fn architectures() -> Vec<&'static str> {
    let mut found: Vec<&str> = CODE_OBJECTS.iter().map(|c| c.arch).collect();
    found.sort_unstable();
    found.dedup();
    found
}

impl Kernels {
    /// Loads those of an architecture.
    ///
    /// # Errors
    /// When this executable has none for it.
    pub fn load(library: &'static Library, arch: &str) -> Result<Self> {
        let found = architectures();
        ensure!(
            !found.is_empty(),
            "this executable was built without GPU kernels, as there was no clang that compiles for AMD: install clang-19 and lld-19, \
             and build again"
        );
        ensure!(
            found.contains(&arch),
            "the device is a {arch}, and this executable has kernels for {}: kernels/build.sh says how to compile for others",
            found.join(", ")
        );
        let mut kernels = BTreeMap::new();
        for object in CODE_OBJECTS.iter().filter(|c| c.arch == arch) {
            let module =
                Module::load(library, object.image).with_context(|| format!("loading the kernels of {}", object.name))?;
            for name in object.kernels {
                let function = module.function(name).with_context(|| format!("looking for kernel {name} of {}", object.name))?;
                kernels.insert(*name, Kernel { function, launches: AtomicU64::new(0) });
            }
        }
        Ok(Self { kernels })
    }

    /// Queues a kernel.
    ///
    /// # Errors
    /// When there is no such kernel, or the library refuses it.
    ///
    /// # Safety
    /// As of [`Function::launch`].
    pub unsafe fn launch(&self, name: &'static str, stream: &Stream, shape: Launch, arguments: &Arguments) -> Result<()> {
        let kernel = self.kernels.get(name).with_context(|| format!("no kernel is called {name}"))?;
        kernel.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller vouches for the arguments.
        unsafe { kernel.function.launch(stream, shape, arguments) }?;
        Ok(())
    }

    /// How often each kernel was launched, by name.
    pub fn launches(&self) -> Vec<(&'static str, u64)> {
        self.kernels.iter().map(|(name, kernel)| (*name, kernel.launches.load(Ordering::Relaxed))).collect()
    }
}
