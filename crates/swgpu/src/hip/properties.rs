//! `hipDeviceProp_tR0600`, the layout since HIP 6.0, and what an MI300X puts there.

use super::device::Device;
use crate::exec::launch::LDS_BYTES;
use crate::settings::settings;

pub const COMPUTE_UNITS: i32 = 304;
pub const CLOCK_KHZ: i32 = 2_100_000;
pub const MEMORY_CLOCK_KHZ: i32 = 1_300_000;
pub const MEMORY_BUS_BITS: i32 = 8192;
pub const L2_BYTES: i32 = 4 << 20;

/// Fields that the emulator has nothing to say about are grouped and zero.
#[repr(C)]
pub struct DeviceProperties {
    pub name: [u8; 256],
    uuid: [u8; 16],
    luid: [u8; 8],
    luid_device_node_mask: u32,
    pub total_global_mem: usize,
    shared_mem_per_block: usize,
    regs_per_block: i32,
    warp_size: i32,
    mem_pitch: usize,
    max_threads_per_block: i32,
    max_threads_dim: [i32; 3],
    max_grid_size: [i32; 3],
    clock_rate: i32,
    total_const_mem: usize,
    major: i32,
    minor: i32,
    texture_alignments: [usize; 2],
    device_overlap: i32,
    multi_processor_count: i32,
    kernel_exec_timeout_enabled: i32,
    integrated: i32,
    can_map_host_memory: i32,
    compute_mode: i32,
    texture_and_surface_sizes: [i32; 40],
    surface_alignment: usize,
    concurrent_kernels: i32,
    ecc_enabled: i32,
    pci_bus_id: i32,
    pci_device_id: i32,
    pci_domain_id: i32,
    tcc_driver: i32,
    async_engine_count: i32,
    unified_addressing: i32,
    memory_clock_rate: i32,
    memory_bus_width: i32,
    l2_cache_size: i32,
    persisting_l2_cache_max_size: i32,
    max_threads_per_multi_processor: i32,
    stream_priorities_supported: i32,
    l1_caches_supported: [i32; 2],
    shared_mem_per_multiprocessor: usize,
    regs_per_multiprocessor: i32,
    managed_memory_to_cooperative_launch: [i32; 11],
    shared_mem_per_block_optin: usize,
    page_tables_to_access_policy: [i32; 4],
    reserved_shared_mem_per_block: usize,
    registration_to_function_pointers: [i32; 13],
    reserved: [i32; 63],
    hip_reserved: [i32; 32],
    pub gcn_arch_name: [u8; 256],
    max_shared_memory_per_multi_processor: usize,
    clock_instruction_rate: i32,
    /// One bit per feature.
    arch: u32,
    hdp_flush_registers: [usize; 2],
    cooperative_multi_device_unmatched: [i32; 4],
    is_large_bar: i32,
    asic_revision: i32,
}

/// Size that HIP's headers give the structure.
const _: () = assert!(size_of::<DeviceProperties>() == 1472);

/// Bus number of a device, as in `0000:05:00.0`, `0000:15:00.0`, ...
pub fn pci_bus(device: &Device) -> i32 {
    0x05 + 0x10 * device.number as i32
}

pub fn properties(device: &Device) -> DeviceProperties {
    // SAFETY: all fields are integers, for which zero is a value.
    let mut properties: DeviceProperties = unsafe { std::mem::zeroed() };
    let copy = |field: &mut [u8], text: &str| field[..text.len()].copy_from_slice(text.as_bytes());
    copy(&mut properties.name, "swgpu (gfx942 in software)");
    copy(&mut properties.gcn_arch_name, "gfx942:sramecc+:xnack-");
    properties.uuid[0] = device.number as u8;
    properties.total_global_mem = settings().memory_bytes;
    properties.shared_mem_per_block = LDS_BYTES;
    properties.regs_per_block = 65536;
    properties.warp_size = 64;
    properties.mem_pitch = i32::MAX as usize;
    properties.max_threads_per_block = 1024;
    properties.max_threads_dim = [1024; 3];
    properties.max_grid_size = [i32::MAX, 65536, 65536];
    properties.clock_rate = CLOCK_KHZ;
    properties.total_const_mem = i32::MAX as usize;
    properties.major = 9;
    properties.minor = 4;
    properties.multi_processor_count = COMPUTE_UNITS;
    properties.can_map_host_memory = 1;
    properties.concurrent_kernels = 1;
    properties.pci_bus_id = pci_bus(device);
    properties.unified_addressing = 1;
    properties.memory_clock_rate = MEMORY_CLOCK_KHZ;
    properties.memory_bus_width = MEMORY_BUS_BITS;
    properties.l2_cache_size = L2_BYTES;
    properties.max_threads_per_multi_processor = 2048;
    properties.stream_priorities_supported = 1;
    properties.shared_mem_per_multiprocessor = LDS_BYTES;
    properties.regs_per_multiprocessor = 65536;
    properties.max_shared_memory_per_multi_processor = LDS_BYTES;
    properties.clock_instruction_rate = 100_000;
    properties.arch = 0x1_ffff;
    properties.is_large_bar = 1;
    properties
}
