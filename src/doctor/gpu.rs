//! ROCm's libraries, the devices, and how they are linked.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use hip_sys::{Hip, HipBlasLt};
use rccl_sys::Rccl;

use super::{Finding, Topic, gib};
use crate::tensor::hip::architectures;

pub fn examine() -> Vec<Finding> {
    let line = |what: &str, found: String| Finding::new(Topic::Gpu, what, found);
    let kernels = architectures();
    let mut out = vec![match kernels.is_empty() {
        false => line("kernels in this executable", kernels.join(", ")),
        true => line("kernels in this executable", "none".into()).advise(
            "build it where clang compiles for AMD: apt-get install clang-19 lld-19, then `touch build.rs` and build again",
        ),
    }];
    out.push(driver());
    out.push(rocm());
    let hip = match Hip::open() {
        Ok(hip) => hip,
        Err(e) => {
            let advice =
                format!("needed only for --backend hip: install ROCm's runtime (packages hip-runtime-amd, hipblaslt). {e}");
            out.push(line("HIP", "not found".into()).advise(advice));
            return out;
        }
    };
    let version = hip.runtime_version().map_or_else(|e| format!("of unknown version ({e})"), |v| v.to_string());
    out.push(line("HIP", format!("{version}, {}", hip.file().display())));
    out.push(match HipBlasLt::open() {
        Ok(library) => line("hipBLASLt", library.file().display().to_string()),
        Err(e) => line("hipBLASLt", "not found".into())
            .advise(format!("products are zaya's own kernels without it: install hipblaslt. {e}")),
    });
    out.push(match Rccl::open() {
        Ok(library) => {
            let version = library.version().map_or_else(|e| format!("of unknown version ({e})"), version_words);
            line("RCCL", format!("{version}, {}", library.file().display()))
        }
        Err(e) => line("RCCL", "not found".into()).advise(format!("needed for several GPUs: install rccl. {e}")),
    });
    match hip.device_count() {
        Ok(0) => out.push(
            line("devices", "none".into())
                .advise("is the amdgpu driver loaded, and may you open /dev/kfd and /dev/dri (groups render, video)?"),
        ),
        Ok(n) => {
            out.extend((0..n).map(|device| of_device(hip, device, &kernels)));
            out.extend(links(hip, n));
        }
        Err(e) => out.push(line("devices", "HIP does not say".into()).advise(e.to_string())),
    }
    out
}

/// The kernel's driver, and whether this user may open its devices.
fn driver() -> Finding {
    let line = |found: String| Finding::new(Topic::Gpu, "driver (amdgpu)", found);
    if !Path::new("/sys/module/amdgpu").is_dir() {
        return line("not loaded".into())
            .advise("needed only for --backend hip: install ROCm's amdgpu-dkms, then `modprobe amdgpu`");
    }
    // Only the driver that comes with ROCm says; the kernel's own has the kernel's version.
    let version =
        fs::read_to_string("/sys/module/amdgpu/version").map_or_else(|_| "the kernel's own".into(), |v| v.trim().to_string());
    match File::options().read(true).write(true).open("/dev/kfd") {
        Ok(_) => line(version),
        Err(e) => line(version).advise(format!(
            "/dev/kfd cannot be opened ({e}): join the groups render and video, or pass the device to the container"
        )),
    }
}

/// The installed ROCm, as its own file says.
fn rocm() -> Finding {
    let line = |found: String| Finding::new(Topic::Gpu, "ROCm", found);
    let root = std::env::var_os("ROCM_PATH").map_or_else(|| PathBuf::from("/opt/rocm"), PathBuf::from);
    match fs::read_to_string(root.join(".info/version")) {
        Ok(version) => line(format!("{}, {}", version.trim(), root.display())),
        Err(_) => line(format!("none in {}", root.display()))
            .advise("needed only for --backend hip: install ROCm 6 or 7, or set ROCM_PATH"),
    }
}

fn of_device(hip: &'static Hip, device: i32, kernels: &[&str]) -> Finding {
    let what = format!("device {device}");
    let line = |found: String| Finding::new(Topic::Gpu, what.clone(), found);
    let properties = match hip.device_properties(device) {
        Ok(properties) => properties,
        Err(e) => return line("HIP does not say what it is".into()).advise(e.to_string()),
    };
    let arch = properties.arch();
    let mut words = vec![
        properties.name(),
        arch.clone(),
        format!("{} compute units", properties.compute_units()),
        gib(properties.memory_bytes() as u64),
    ];
    if let Ok(address) = hip.pci_bus_id(device) {
        let node = fs::read_to_string(format!("/sys/bus/pci/devices/{}/numa_node", address.to_lowercase()));
        words.push(format!("PCI {address}"));
        words.extend(node.ok().map(|n| format!("NUMA node {}", n.trim())));
    }
    let line = line(words.join(", "));
    if kernels.is_empty() || kernels.contains(&arch.as_str()) {
        line
    } else {
        line.advise(format!("this executable has no kernels for {arch}: build with ARCHS=\"{arch}\""))
    }
}

/// Who can read whose memory, in one line.
fn links(hip: &'static Hip, devices: i32) -> Option<Finding> {
    let mut apart = Vec::new();
    let mut kinds: Vec<String> = Vec::new();
    for a in 0..devices {
        for b in 0..devices {
            if a == b {
                continue;
            }
            match (hip.can_access_peer(a, b), hip.link(a, b)) {
                (Ok(true), Ok(link)) => {
                    kinds.push(format!("{} ({} hop{})", link.kind_name(), link.hops, if link.hops == 1 { "" } else { "s" }));
                }
                (Ok(true), Err(_)) => kinds.push("unknown".into()),
                _ => apart.push(format!("{a} and {b}")),
            }
        }
    }
    if devices < 2 {
        return None;
    }
    kinds.sort_unstable();
    kinds.dedup();
    let found = Finding::new(Topic::Gpu, "links", format!("{} between {devices} devices", kinds.join(", ")));
    let slow = kinds.iter().any(|kind| kind.starts_with("PCIe"));
    Some(if apart.is_empty() && slow {
        found.advise(
            "GPUs that reach each other over PCIe only sum gradients slowly: is xGMI there and on (`rocm-smi --showtopo`)?",
        )
    } else if apart.is_empty() {
        found
    } else {
        found.advise(format!("no direct access between devices {}", apart.join("; ")))
    })
}

/// RCCL packs a version as `major * 10^4 + minor * 100 + patch`.
fn version_words(v: i32) -> String {
    format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
}
