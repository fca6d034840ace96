//! What the operating system and the processor say of themselves.

use super::Cpu;

/// This machine.
pub fn describe() -> Cpu {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = field(&cpuinfo, "model name").unwrap_or("unknown processor").to_string();
    Cpu {
        name,
        processors: std::thread::available_parallelism().map_or(1, |n| n.get()),
        arch: std::env::consts::ARCH,
        features: features(),
        l3_bytes: l3_bytes(),
        memory_bytes: meminfo("MemTotal"),
    }
}

/// The processor is one of Intel's, as far as the system says.
pub fn is_intel() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    field(&cpuinfo, "vendor_id") == Some("GenuineIntel")
}

/// Bytes that programs can still get; None where the system does not say.
pub fn available_memory() -> Option<u64> {
    meminfo("MemAvailable")
}

/// Most memory that this process ever held, in bytes; None where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    kib(field(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM")?)
}

/// Value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().filter_map(|l| l.split_once(':')).find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}

fn meminfo(name: &str) -> Option<u64> {
    kib(field(&std::fs::read_to_string("/proc/meminfo").ok()?, name)?)
}

/// "32768K" or "32768 kB" as bytes.
fn kib(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    Some(digits.parse::<u64>().ok()? << 10)
}

/// Size of the largest cache of processor 0.
pub(super) fn l3_bytes() -> Option<u64> {
    let size = |i: u32| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok();
    (0..8).filter_map(|i| kib(size(i)?.trim())).max()
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let found = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("amx_bf16", crate::tensor::cpu::packed::amx::available()),
    ];
    found.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_spellings() {
        assert_eq!(kib("32768K"), Some(32 << 20));
        assert_eq!(kib("512 kB"), Some(512 << 10));
        assert_eq!(kib("much"), None);
        assert_eq!(field("a : 1\nmodel name\t: x: y\n", "model name"), Some("x: y"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_process_holds_memory() {
        let before = peak_resident_bytes().unwrap();
        std::hint::black_box(vec![1u8; before as usize + (64 << 20)]);
        assert!(peak_resident_bytes().unwrap() >= before + (64 << 20));
    }
}
