//! Devices: which there are, what they can do, how they are linked.

use std::ffi::{c_char, c_int};
use std::fmt;

use super::ffi::{self, hipDeviceAttribute_t, hipDeviceProp_tR0600};
use super::{Hip, text};
use crate::Error;

/// A version of HIP: 7.15.26333.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: i32,
    pub minor: i32,
    pub patch: i32,
}

impl Version {
    /// HIP packs a version as `major * 10^7 + minor * 10^5 + patch`.
    fn unpack(packed: i32) -> Self {
        Self { major: packed / 10_000_000, minor: packed / 100_000 % 100, patch: packed % 100_000 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Memory of the current device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    pub free_bytes: usize,
    pub total_bytes: usize,
}

/// How two devices are linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// As ROCm's `hsa_amd_link_info_type_t` counts them.
    pub kind: u32,
    pub hops: u32,
}

impl Link {
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            0 => "HyperTransport",
            1 => "QPI",
            2 => "PCIe",
            3 => "InfiniBand",
            4 => "xGMI",
            _ => "unknown",
        }
    }
}

/// What HIP tells of a device.
#[derive(Clone)]
pub struct DeviceProperties {
    raw: Box<hipDeviceProp_tR0600>,
}

impl DeviceProperties {
    /// "AMD Instinct MI300X"
    pub fn name(&self) -> String {
        fixed_text(&self.raw.name)
    }

    /// The architecture with its features: "gfx942:sramecc+:xnack-".
    pub fn arch_and_features(&self) -> String {
        fixed_text(&self.raw.gcnArchName)
    }

    /// The architecture that code objects are compiled for: "gfx942".
    pub fn arch(&self) -> String {
        self.arch_and_features().split(':').next().unwrap_or_default().to_string()
    }

    pub fn memory_bytes(&self) -> usize {
        self.raw.totalGlobalMem
    }

    pub fn compute_units(&self) -> i32 {
        self.raw.multiProcessorCount
    }

    /// Work-items of a wave.
    pub fn wave_size(&self) -> i32 {
        self.raw.warpSize
    }

    /// Local data share (LDS) that a workgroup may use.
    pub fn shared_bytes_per_workgroup(&self) -> usize {
        self.raw.sharedMemPerBlock
    }

    pub fn l2_cache_bytes(&self) -> i32 {
        self.raw.l2CacheSize
    }

    pub fn core_clock_khz(&self) -> i32 {
        self.raw.clockRate
    }

    pub fn memory_clock_khz(&self) -> i32 {
        self.raw.memoryClockRate
    }

    pub fn memory_bus_bits(&self) -> i32 {
        self.raw.memoryBusWidth
    }

    /// Everything, under C names.
    pub fn raw(&self) -> &hipDeviceProp_tR0600 {
        &self.raw
    }
}

impl fmt::Debug for DeviceProperties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceProperties").field("name", &self.name()).field("arch", &self.arch_and_features()).finish()
    }
}

/// The text in a field of fixed length, up to its zero byte, if it has one.
fn fixed_text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|&c| c as u8).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Hip {
    /// The version of the runtime library.
    pub fn runtime_version(&self) -> Result<Version, Error> {
        let mut packed = 0;
        // SAFETY: `packed` is a place for the number.
        let status = unsafe { (self.functions.hipRuntimeGetVersion)(&mut packed) };
        self.check("hipRuntimeGetVersion", status, || "asking the runtime's version".into())?;
        Ok(Version::unpack(packed))
    }

    /// The version of the driver, as the driver counts.
    pub fn driver_version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: `version` is a place for the number.
        let status = unsafe { (self.functions.hipDriverGetVersion)(&mut version) };
        self.check("hipDriverGetVersion", status, || "asking the driver's version".into())?;
        Ok(version)
    }

    /// How many devices there are; none is no error.
    pub fn device_count(&self) -> Result<i32, Error> {
        let mut count = 0;
        // SAFETY: `count` is a place for the number.
        let status = unsafe { (self.functions.hipGetDeviceCount)(&mut count) };
        if status == ffi::hipErrorNoDevice {
            return Ok(0);
        }
        self.check("hipGetDeviceCount", status, || "counting devices".into())?;
        Ok(count)
    }

    /// Makes `device` the current one of this thread: allocations, streams, events and modules are made on it.
    pub fn set_device(&self, device: i32) -> Result<(), Error> {
        // SAFETY: takes any number.
        let status = unsafe { (self.functions.hipSetDevice)(device) };
        self.check("hipSetDevice", status, || format!("choosing device {device}"))
    }

    /// The current device of this thread.
    pub fn device(&self) -> Result<i32, Error> {
        let mut device = 0;
        // SAFETY: `device` is a place for the number.
        let status = unsafe { (self.functions.hipGetDevice)(&mut device) };
        self.check("hipGetDevice", status, || "asking for the current device".into())?;
        Ok(device)
    }

    pub fn device_properties(&self, device: i32) -> Result<DeviceProperties, Error> {
        // SAFETY: numbers, characters and null pointers: zero is a value of every field.
        let mut raw: Box<hipDeviceProp_tR0600> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: `raw` has the layout that this very function, named after it, fills in.
        let status = unsafe { (self.functions.hipGetDevicePropertiesR0600)(&mut *raw, device) };
        self.check("hipGetDevicePropertiesR0600", status, || format!("asking for properties of device {device}"))?;
        Ok(DeviceProperties { raw })
    }

    pub fn device_attribute(&self, attribute: hipDeviceAttribute_t, device: i32) -> Result<i32, Error> {
        let mut value = 0;
        // SAFETY: `value` is a place for the number.
        let status = unsafe { (self.functions.hipDeviceGetAttribute)(&mut value, attribute, device) };
        self.check("hipDeviceGetAttribute", status, || format!("asking for {attribute:?} of device {device}"))?;
        Ok(value)
    }

    /// The PCI address, "0000:c1:00.0", under which `/sys/bus/pci/devices` knows the device.
    pub fn pci_bus_id(&self, device: i32) -> Result<String, Error> {
        let mut buffer = [0 as c_char; 64];
        // SAFETY: the library writes at most the given length and ends it with a zero byte.
        let status = unsafe { (self.functions.hipDeviceGetPCIBusId)(buffer.as_mut_ptr(), buffer.len() as c_int - 1, device) };
        self.check("hipDeviceGetPCIBusId", status, || format!("asking for the PCI address of device {device}"))?;
        // SAFETY: the last byte was withheld from the library, so a zero byte follows whatever it wrote.
        Ok(unsafe { text(buffer.as_ptr()) })
    }

    /// Memory of the current device.
    pub fn memory_info(&self) -> Result<MemoryInfo, Error> {
        let (mut free_bytes, mut total_bytes) = (0, 0);
        // SAFETY: both are places for a number.
        let status = unsafe { (self.functions.hipMemGetInfo)(&mut free_bytes, &mut total_bytes) };
        self.check("hipMemGetInfo", status, || "asking for free memory".into())?;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    /// Waits for all that the current device was given to do.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: takes nothing.
        let status = unsafe { (self.functions.hipDeviceSynchronize)() };
        self.check("hipDeviceSynchronize", status, || "waiting for the device".into())
    }

    /// Whether `device` can read and write memory of `peer`.
    pub fn can_access_peer(&self, device: i32, peer: i32) -> Result<bool, Error> {
        let mut can = 0;
        // SAFETY: `can` is a place for the number.
        let status = unsafe { (self.functions.hipDeviceCanAccessPeer)(&mut can, device, peer) };
        self.check("hipDeviceCanAccessPeer", status, || format!("asking whether device {device} reaches device {peer}"))?;
        Ok(can != 0)
    }

    /// Lets the current device read and write memory of `peer`; that it may already is no error.
    pub fn enable_peer_access(&self, peer: i32) -> Result<(), Error> {
        // SAFETY: takes any number; flags must be zero.
        let status = unsafe { (self.functions.hipDeviceEnablePeerAccess)(peer, 0) };
        if status == ffi::hipErrorPeerAccessAlreadyEnabled {
            // SAFETY: takes nothing. Clears this outcome, which is no error.
            unsafe { (self.functions.hipGetLastError)() };
            return Ok(());
        }
        self.check("hipDeviceEnablePeerAccess", status, || format!("reaching memory of device {peer}"))
    }

    /// The link between two devices.
    pub fn link(&self, first: i32, second: i32) -> Result<Link, Error> {
        let (mut kind, mut hops) = (0, 0);
        // SAFETY: both are places for a number.
        let status = unsafe { (self.functions.hipExtGetLinkTypeAndHopCount)(first, second, &mut kind, &mut hops) };
        self.check("hipExtGetLinkTypeAndHopCount", status, || format!("asking for the link of devices {first} and {second}"))?;
        Ok(Link { kind, hops })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_unpacked_as_hips_header_packs_them() {
        // HIP_VERSION and its parts as AMD's bindings 10.0 report them.
        assert_eq!(Version::unpack(71_526_333), Version { major: 7, minor: 15, patch: 26_333 });
        assert_eq!(Version::unpack(71_526_333).to_string(), "7.15.26333");
    }
}
