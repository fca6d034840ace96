//! Opening HIP, its errors, and the safe layer, against a fake library.

mod fake;

use std::path::Path;
use std::process::Command;

use fake::{build, lines, run};
use hip_sys::hip::ffi;
use hip_sys::{Arguments, DeviceBuffer, Error, Graph, Hip, HostBuffer, Launch, Module, Stream};

const SOURCE: &str = include_str!("fake/hip.c");

/// Runs in child processes, as [`fake::TASK`] says; a mere test otherwise.
#[test]
fn child() {
    println!(); // the harness has begun a line
    let result = match std::env::var(fake::TASK).as_deref() {
        Ok("open") => Hip::open().map(|hip| println!("opened: {}", hip.file().display())),
        Ok("call") => call(),
        _ => return,
    };
    if let Err(error) = result {
        println!("error: {error}");
    }
}

fn call() -> Result<(), Error> {
    let hip = Hip::open()?;
    println!("devices: {}", hip.device_count()?);
    println!("version: {}", hip.runtime_version()?);
    println!("pci: {}", hip.pci_bus_id(1)?);
    println!("link: {:?} {}", hip.link(4, 1)?, hip.link(4, 1)?.kind_name());
    hip.enable_peer_access(1)?;

    let mut buffer = DeviceBuffer::new(hip, 8)?;
    buffer.fill(1)?;
    buffer.write(2, &[7, 8, 9])?;
    let mut back = [0; 5];
    buffer.read(1, &mut back)?;
    println!("read: {back:?}");
    println!("beyond: {}", buffer.read(4, &mut back).unwrap_err());
    println!("host: {:?}", HostBuffer::new(hip, 3)?.as_slice());
    let error = DeviceBuffer::new(hip, 4096).unwrap_err();
    println!("big: {error} / {:?} / {}", error.code(), error.is_out_of_memory());

    let stream = Stream::new(hip)?;
    println!("done: {}", stream.is_done()?);
    // SAFETY: takes nothing.
    println!("left: {:?}", unsafe { (hip.functions().hipGetLastError)() });

    let function = Module::load(hip, &empty_elf())?.function("gemm")?;
    let shape = Launch { workgroups: [1, 2, 3], work_items: [4, 5, 6], shared_bytes: 7 };
    // SAFETY: the fake only prints the two arguments.
    unsafe { function.launch(&stream, shape, &Arguments::new().with(8i32).with(0.5f32))? };

    let failed = Graph::capture(&stream, ffi::hipStreamCaptureModeGlobal, || Err(Error::Invalid("the work failed".into())));
    println!("capture: {}", failed.unwrap_err());
    Ok(())
}

/// The header of an ELF file without sections.
fn empty_elf() -> [u8; 64] {
    let mut image = [0; 64];
    image[..6].copy_from_slice(b"\x7fELF\x02\x01");
    image
}

#[test]
fn without_a_library_the_error_says_what_was_tried_and_what_to_set() {
    let folder = tempfile::tempdir().unwrap();
    let text = run("open", &[("ROCM_PATH", folder.path())]);
    let Some(error) = lines(&text, "error: ").first().copied() else {
        assert_eq!(lines(&text, "opened: ").len(), 1, "{text}");
        return; // this machine has ROCm
    };
    let rocm = folder.path().join("lib");
    for part in [
        "HIP (libamdhip64) cannot be opened. Tried libamdhip64.so.7, libamdhip64.so.6, libamdhip64.so, ",
        &format!(", {}/libamdhip64.so.7, ", rocm.display()),
        ", /opt/rocm/lib/libamdhip64.so (cannot open shared object file: No such file or directory). Install ROCm 6 or 7, or set \
         ZAYA_HIP_LIB to the file",
    ] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

#[test]
fn a_variable_that_names_no_library_is_an_error_and_nothing_else_is_tried() {
    let folder = tempfile::tempdir().unwrap();
    // A good one where it would be found.
    std::fs::create_dir(folder.path().join("lib")).unwrap();
    build(&folder.path().join("lib/libamdhip64.so.7"), SOURCE, &ffi::interface(), &[]);
    let rocm = ("ROCM_PATH", folder.path());
    let no_library = folder.path().join("text.so");
    std::fs::write(&no_library, "this is text").unwrap();
    for (file, reason) in [
        (no_library.as_path(), "file too short"),
        (Path::new("/no/such/file.so"), "cannot open shared object file: No such file or directory"),
    ] {
        let text = run("open", &[rocm, ("ZAYA_HIP_LIB", file)]);
        let expected = format!(
            "HIP (libamdhip64) cannot be opened: ZAYA_HIP_LIB names {}, but {reason}. Correct ZAYA_HIP_LIB, or unset it to look in \
             the usual places",
            file.display()
        );
        assert_eq!(lines(&text, "error: "), [expected]);
    }
}

#[test]
fn a_library_that_needs_another_names_that_one() {
    let folder = tempfile::tempdir().unwrap();
    let needed = build(&folder.path().join("libneeded.so"), "", &ffi::interface(), &[]);
    let library = folder.path().join("hip.so");
    let code = needed.with_extension("c");
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-Wl,--no-as-needed", "-o"])
        .args([&library, &code, &needed])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    std::fs::remove_file(&needed).unwrap();
    let text = run("open", &[("ZAYA_HIP_LIB", &library)]);
    let expected = format!("but {}: cannot open shared object file: No such file or directory.", needed.display());
    assert!(lines(&text, "error: ").join("|").contains(&expected), "{text}");
}

#[test]
fn hip_is_found_where_the_variable_the_loader_and_rocm_path_say_in_this_order() {
    let folder = tempfile::tempdir().unwrap();
    let build = |name: &str| {
        let file = folder.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        build(&file, SOURCE, &ffi::interface(), &[])
    };
    let (named, loader, six) = (build("named.so"), build("loader/libamdhip64.so"), build("rocm/lib/libamdhip64.so.6"));
    let rocm = ("ROCM_PATH", six.ancestors().nth(2).unwrap());
    let loaders = ("LD_LIBRARY_PATH", loader.parent().unwrap());
    let opened = |variables: &[(&str, &Path)]| lines(&run("open", variables), "opened: ").join("|");
    assert_eq!(opened(&[rocm, loaders, ("ZAYA_HIP_LIB", &named)]), named.display().to_string());
    // An empty variable is none. On a machine with ROCm the loader may find that one before these.
    if !Path::new("/opt/rocm").exists() {
        assert_eq!(opened(&[rocm, loaders, ("ZAYA_HIP_LIB", Path::new(""))]), loader.display().to_string());
        assert_eq!(opened(&[rocm]), six.display().to_string());
    }
}

#[test]
fn a_missing_function_is_named_with_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let old = build(&folder.path().join("old.so"), SOURCE, &ffi::interface(), &["hipGetDevicePropertiesR0600"]);
    let expected = format!(
        "{} has no function hipGetDevicePropertiesR0600: it is not HIP (libamdhip64), or too old (ROCm 6 or newer is needed). \
         ZAYA_HIP_LIB can name another file",
        old.display()
    );
    assert_eq!(lines(&run("open", &[("ZAYA_HIP_LIB", &old)]), "error: "), [expected]);
}

#[test]
fn calls_reach_the_library_and_its_errors_come_back_with_name_and_text() {
    let folder = tempfile::tempdir().unwrap();
    let library = build(&folder.path().join("libamdhip64.so"), SOURCE, &ffi::interface(), &[]);
    let text = run("call", &[("ZAYA_HIP_LIB", &library)]);
    let line = |start: &str| lines(&text, start).join("|");
    assert_eq!(line("error: "), "", "{text}");
    assert_eq!(line("devices: "), "0");
    assert_eq!(line("version: "), "6.3.42134");
    assert_eq!(line("pci: "), "0000:c1:00.0");
    assert_eq!(line("link: "), "Link { kind: 4, hops: 1 } xGMI");
    assert_eq!(line("read: "), "[1, 7, 8, 9, 1]");
    assert_eq!(line("beyond: "), "cannot read 5 bytes at 4 of a device buffer of 8 bytes");
    assert_eq!(line("host: "), "[0, 0, 0]");
    assert_eq!(
        line("big: "),
        "hipMalloc (allocating 4096 bytes on the device) failed: hipErrorOutOfMemory (2): out of memory, says the fake / Some(2) / true"
    );
    assert_eq!(line("done: "), "false");
    assert_eq!(line("left: "), "hipSuccess");
    assert_eq!(line("capture: "), "the work failed");
    assert_eq!(
        line("fake: "),
        "wait for the default stream|copy 3 kind 1|wait for the default stream|copy 5 kind 2|stream flags 1|launch gemm grid 1 2 3 block 4 5 6 shared 7 on a stream: 8 0.5, extra 0|end of \
         capture|destroy a graph|unload a module|free"
    );
}
