//! Lists HIP's devices and how they are linked, and copies a few bytes to the first and back.
//!
//! `ZAYA_HIP_LIB=path/to/libamdhip64.so cargo run -p hip-sys --example devices`

use hip_sys::{DeviceBuffer, Error, Hip};

fn main() {
    if let Err(error) = list() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn list() -> Result<(), Error> {
    let hip = Hip::open()?;
    let devices = hip.device_count()?;
    println!("{}: HIP {}, {devices} devices", hip.file().display(), hip.runtime_version()?);
    for device in 0..devices {
        let properties = hip.device_properties(device)?;
        println!(
            "{device}: {} ({}) at {}, {} compute units, {:.1} GiB",
            properties.name(),
            properties.arch_and_features(),
            hip.pci_bus_id(device)?,
            properties.compute_units(),
            properties.memory_bytes() as f64 / f64::from(1 << 30)
        );
        for other in 0..device {
            let link = hip.link(device, other)?;
            println!("   to {other}: {}, {} hops", link.kind_name(), link.hops);
        }
    }
    if devices > 0 {
        hip.set_device(0)?;
        let mut buffer = DeviceBuffer::new(hip, 4)?;
        buffer.write(0, &[1, 2, 3, 4])?;
        let mut back = [0; 4];
        buffer.read(0, &mut back)?;
        println!("copied to device 0 and back: {back:?}");
    }
    Ok(())
}
