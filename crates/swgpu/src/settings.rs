//! What the environment sets. Read once, when the library is first used.

use std::sync::OnceLock;

/// How strictly reads of memory that nobody wrote are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// Not checked.
    Off,
    /// An error in kernels, matrix products and collectives.
    Kernels,
    /// Also an error in copies to the host.
    All,
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// `SWGPU_DEVICES`: number of devices, 1 by default, 0 plays a machine without a GPU.
    pub devices: usize,
    /// `SWGPU_MEMORY_MIB`: memory of one device in bytes (the variable is in MiB), 4 GiB by default.
    pub memory_bytes: usize,
    /// `SWGPU_POISON`: `all` (default), `kernels` or `off`.
    pub poison: Poison,
    /// `SWGPU_MAX_INSTRUCTIONS`: instructions after which a wave counts as caught in an endless loop, 200 million by default.
    pub max_instructions: u64,
    /// `SWGPU_WAVE_ORDER=reverse`: waves of a workgroup run last to first between barriers. Results must not change.
    pub reverse_waves: bool,
    /// `SWGPU_DETAILS=1`: launches also count each mnemonic, and what passes the caches of a chiplet (`cache.rs`). Slower.
    pub details: bool,
    /// `SWGPU_TIMEOUT_S`: seconds that a collective waits for the other ranks, 60 by default.
    pub timeout_s: u64,
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    let Ok(text) = std::env::var(name) else { return default };
    text.trim().parse().unwrap_or_else(|_| {
        eprintln!("swgpu: {name}={text} is no number; the default is used");
        default
    })
}

impl Settings {
    fn from_environment() -> Self {
        let poison = match std::env::var("SWGPU_POISON").as_deref() {
            Ok("off") => Poison::Off,
            Ok("kernels") => Poison::Kernels,
            Ok("all") | Err(_) => Poison::All,
            Ok(other) => {
                eprintln!("swgpu: SWGPU_POISON={other} is none of all, kernels, off; all is used");
                Poison::All
            }
        };
        Self {
            devices: number("SWGPU_DEVICES", 1),
            memory_bytes: number("SWGPU_MEMORY_MIB", 4096usize) << 20,
            poison,
            max_instructions: number("SWGPU_MAX_INSTRUCTIONS", 200_000_000),
            reverse_waves: std::env::var("SWGPU_WAVE_ORDER").as_deref() == Ok("reverse"),
            details: std::env::var("SWGPU_DETAILS").as_deref() == Ok("1"),
            timeout_s: number("SWGPU_TIMEOUT_S", 60),
        }
    }
}

pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_environment)
}
