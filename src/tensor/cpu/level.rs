//! Which instructions this process uses, decided once at run time: one executable serves every x86-64 and every other CPU.

use std::sync::OnceLock;

use pulp::Arch;

#[cfg(target_arch = "x86_64")]
use super::packed::amx;
use crate::machine;

/// Rising: each level has what the ones before have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What the compiler's target guarantees.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, CD, DQ, VL.
    Avx512,
    /// And `vdpbf16ps`: products of bfloat16 pairs.
    Avx512Bf16,
    /// And AMX: products of bfloat16 tiles.
    Amx,
}

/// Environment variable that chooses the level, no higher than the machine's: a name of `Level::NAMES`.
pub const LEVEL_VARIABLE: &str = "ZAYA_CPU_LEVEL";

impl Level {
    pub const ALL: [Level; 5] = [Level::Portable, Level::Avx2, Level::Avx512, Level::Avx512Bf16, Level::Amx];
    pub const NAMES: [&str; 5] = ["portable", "avx2", "avx512", "avx512bf16", "amx"];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().position(|n| *n == name).map(|i| Self::ALL[i])
    }

    /// The highest level of this machine.
    pub fn detected() -> Self {
        static DETECTED: OnceLock<Level> = OnceLock::new();
        *DETECTED.get_or_init(|| match Arch::new() {
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) if std::arch::is_x86_feature_detected!("avx512bf16") && amx::available() => Level::Amx,
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) if std::arch::is_x86_feature_detected!("avx512bf16") => Level::Avx512Bf16,
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) => Level::Avx512,
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) => Level::Avx2,
            _ => Level::Portable,
        })
    }

    /// The fastest of a machine that has this one. Intel's `vdpbf16ps` has half the rate of f32 multiply-add: without AMX, products of
    /// bf16 numbers are faster on the f32 units (measured: a step takes 0.7 to 0.75 of the time).
    fn fastest(self, is_intel: impl FnOnce() -> bool) -> Self {
        if self == Level::Avx512Bf16 && is_intel() { Level::Avx512 } else { self }
    }

    /// The fastest level of this machine.
    pub fn preferred() -> Self {
        static PREFERRED: OnceLock<Level> = OnceLock::new();
        *PREFERRED.get_or_init(|| Self::detected().fastest(machine::is_intel))
    }

    /// The level in use: the fastest one, or one that `ZAYA_CPU_LEVEL` names.
    pub fn current() -> Self {
        static CURRENT: OnceLock<Level> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let asked = std::env::var(LEVEL_VARIABLE).ok().and_then(|name| Self::from_name(&name));
            asked.map_or(Self::preferred(), |level| level.min(Self::detected()))
        })
    }

    /// An error's text when the environment asks for a level by a name that there is not, or that this machine has not.
    pub fn check_variable() -> Result<(), String> {
        let Ok(name) = std::env::var(LEVEL_VARIABLE) else { return Ok(()) };
        let detected = Self::detected();
        match Self::from_name(&name) {
            Some(level) if level <= detected => Ok(()),
            Some(_) => Err(format!("{LEVEL_VARIABLE}={name}: this machine has no {name}, at most {}", detected.name())),
            None => Err(format!("{LEVEL_VARIABLE}={name} is not a level; there are {}", Self::NAMES.join(", "))),
        }
    }

    /// Levels this machine can run, lowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|level| *level <= Self::detected())
    }

    fn arch(self) -> Arch {
        match (self, Arch::new()) {
            (Level::Portable, _) => Arch::Scalar,
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, Arch::V4(_)) => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
            (_, best) => best,
        }
    }
}

/// Runs `f`, compiled for the current level: plain loops in it are vectorised with that level's instructions. What it
/// calls, and `f` itself, must be inlined (`#[inline(always)]`) to profit. Numbers do not depend on the level: the compiler never
/// contracts or reorders floating-point operations.
#[inline(always)]
pub fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    ARCH.get_or_init(|| Level::current().arch()).dispatch(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_intel_without_amx_is_faster_below_its_highest_level() {
        for level in Level::ALL {
            assert_eq!(level.fastest(|| false), level);
            let expected = if level == Level::Avx512Bf16 { Level::Avx512 } else { level };
            assert_eq!(level.fastest(|| true), expected);
        }
        assert!(Level::preferred() <= Level::detected());
    }
}
