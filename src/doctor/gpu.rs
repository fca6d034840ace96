//! ROCm's libraries, the devices, and how they are linked.

use std::fs;

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
    let mut kinds: Vec<&str> = Vec::new();
    for a in 0..devices {
        for b in 0..devices {
            if a == b {
                continue;
            }
            match (hip.can_access_peer(a, b), hip.link(a, b)) {
                (Ok(true), Ok(link)) => kinds.push(link.kind_name()),
                (Ok(true), Err(_)) => kinds.push("unknown"),
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
    Some(if apart.is_empty() { found } else { found.advise(format!("no direct access between devices {}", apart.join("; "))) })
}

/// RCCL packs a version as `major * 10^4 + minor * 100 + patch`.
fn version_words(v: i32) -> String {
    format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
}
