//! Opening RCCL, its errors, and the safe layer, against a fake library.

#[path = "../../hip-sys/tests/fake/mod.rs"]
mod fake;

use std::ffi::{CStr, c_void};
use std::path::Path;

use fake::{build, lines, run};
use hip_sys::{Hip, Stream};
use rccl_sys::{Communicator, DataType, Error, Op, Rccl, UniqueId, ffi};

/// Runs in child processes, as [`fake::TASK`] says; a mere test otherwise.
#[test]
fn child() {
    println!(); // the harness has begun a line
    let result = match std::env::var(fake::TASK).as_deref() {
        Ok("open") => Rccl::open().map(|rccl| println!("opened: {}", rccl.file().display())),
        Ok("call") => call(),
        Ok("all to all") => all_to_all(),
        _ => return,
    };
    if let Err(error) = result {
        println!("error: {error}");
    }
}

fn text(text: &'static CStr) -> *mut c_void {
    text.as_ptr().cast_mut().cast()
}

fn call() -> Result<(), Error> {
    let rccl = Rccl::open()?;
    let stream = Stream::new(Hip::open()?)?;
    println!("version: {}", rccl.version()?);
    let id = UniqueId::from_bytes(rccl.unique_id()?.to_bytes());
    let comm = Communicator::new(rccl, id, 1, 2)?;
    let part = comm.split(Some(3), 4)?.expect("a color was given");
    println!("none: {}", comm.split(None, 4)?.is_none());
    part.destroy()?;

    let background = Communicator::start(rccl, id, 0, 2)?;
    println!("state: {:?}", background.state()?);
    println!("then: {}", background.state().unwrap_err());

    // SAFETY: the fake prints the texts that the addresses point to.
    unsafe {
        comm.all_reduce(text(c"A"), text(c"B"), 5, DataType::Bf16, Op::Average, &stream)?;
        comm.reduce_scatter(text(c"A"), text(c"B"), 6, DataType::F32, Op::Max, &stream)?;
        comm.reduce(text(c"A"), text(c"B"), 4, DataType::F32, Op::Sum, 1, &stream)?;
        comm.broadcast(text(c"A"), text(c"B"), 7, DataType::U8, 1, &stream)?;
        rccl.group(|| comm.send(text(c"A"), 8, DataType::I64, 1, &stream))?;
        comm.all_gather(text(c"A"), text(c"B"), 9, DataType::I32, &stream)
    }
}

fn all_to_all() -> Result<(), Error> {
    let rccl = Rccl::open()?;
    let stream = Stream::new(Hip::open()?)?;
    let comm = Communicator::new(rccl, rccl.unique_id()?, 1, 2)?;
    // SAFETY: the fake prints the letters that the addresses point to.
    unsafe { comm.all_to_all(text(c"abcdefgh"), text(c"ABCDEFGH"), 2, DataType::Bf16, &stream)? };
    comm.abort()
}

/// What a task prints with the fake libraries; RCCL's lacks the functions `without`.
fn run_with_fakes(task: &str, without: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let hip_source = include_str!("../../hip-sys/tests/fake/hip.c");
    let hip = build(&folder.path().join("hip.so"), hip_source, &hip_sys::hip::ffi::interface(), &[]);
    let rccl = build(&folder.path().join("rccl.so"), include_str!("fake/rccl.c"), &ffi::interface(), without);
    run(task, &[("ZAYA_HIP_LIB", &hip), ("ZAYA_RCCL_LIB", &rccl)])
}

#[test]
fn a_library_that_is_not_there_is_named_with_its_variable() {
    let output = run("open", &[("ZAYA_RCCL_LIB", Path::new("/no/such/file.so"))]);
    let error = lines(&output, "error: ").join("|");
    assert!(error.starts_with("RCCL cannot be opened: ZAYA_RCCL_LIB names /no/such/file.so, but cannot open"), "{output}");
}

#[test]
fn without_a_library_the_error_says_what_was_tried_and_what_to_set() {
    let output = run("open", &[]);
    let opened = lines(&output, "opened: ").len() == 1; // this machine has ROCm
    let error = lines(&output, "error: ").join("|");
    assert!(
        opened || error.starts_with("RCCL cannot be opened. Tried librccl.so.1, librccl.so, /opt/rocm/lib/librccl.so.1,"),
        "{output}"
    );
    assert!(opened || error.ends_with("Install ROCm 6 or 7, or set ZAYA_RCCL_LIB to the file"), "{output}");
}

#[test]
fn a_missing_function_is_named_with_the_library() {
    let output = run_with_fakes("call", &["ncclCommFinalize"]);
    let error = lines(&output, "error: ").join("|");
    assert!(error.contains("/rccl.so has no function ncclCommFinalize: it is not RCCL, or too old"), "{output}");
}

#[test]
fn calls_reach_the_library_and_its_errors_come_back_with_name_and_text() {
    let output = run_with_fakes("call", &[]);
    assert_eq!(lines(&output, "version: "), ["22105"]);
    assert_eq!(lines(&output, "none: "), ["true"]);
    assert_eq!(lines(&output, "state: "), ["InProgress"]);
    assert_eq!(
        lines(&output, "then: "),
        [
            "ncclCommGetAsyncError (an operation in the background) failed: ncclSystemError (2): unhandled system error; the last error \
          was: no route to the other ranks"
        ]
    );
    // The sum of (i + 100) * (i + 1) over i < 128.
    let id: i32 = (0..128).map(|i| (i + 100) * (i + 1)).sum();
    assert_eq!(
        lines(&output, "fake: "),
        [
            "stream flags 1",
            &format!("rank 1 of 2, id {id}"),
            "split of a communicator, color 3, key 4",
            "split of a communicator, color -1, key 4",
            "destroy a part",
            "configured 96 cafebeef 23004 blocking 0 others 1, last of id 227",
            "all-reduce 5 of type 9 by 4 from A to B on a stream",
            "reduce-scatter 6 of type 7 by 2",
            "reduce 4 of type 7 by 0 for 1",
            "broadcast 7 of type 1 from 1",
            "group",
            "send 8 of type 4 to 1: A",
            "end of group",
            "all-gather 9 of type 2",
            "abort a background communicator",
            "abort a communicator",
        ]
    );
    assert_eq!(
        lines(&output, "error: "),
        [
            "ncclAllGather (9 I32 of every rank) failed: ncclSystemError (2): unhandled system error; the last error was: no route to the \
          other ranks"
        ]
    );
}

#[test]
fn all_to_all_is_a_group_of_sends_where_the_library_has_no_such_function() {
    let output = run_with_fakes("all to all", &["ncclAllToAll"]);
    assert_eq!(lines(&output, "error: "), [""; 0], "{output}");
    assert_eq!(
        lines(&output, "fake: ")[2..],
        [
            "group",
            "send 2 of type 9 to 0: a",
            "receive 2 of type 9 from 0: A",
            "send 2 of type 9 to 1: e",
            "receive 2 of type 9 from 1: E",
            "end of group",
            "abort a communicator",
        ]
    );
}
