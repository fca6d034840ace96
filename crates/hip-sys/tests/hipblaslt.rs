//! hipBLASLt's safe layer and errors, against a fake library.

mod fake;

use std::ffi::c_void;
use std::path::Path;

use fake::{build, lines, run};
use hip_sys::hipblaslt::ffi::{self, HIP_R_16BF, HIP_R_32F, HIPBLAS_COMPUTE_32F};
use hip_sys::hipblaslt::{Handle, HipBlasLt, Layout, Layouts, Operands, Preference, Product};
use hip_sys::{Error, Hip, Stream};

/// Runs in child processes, as [`fake::TASK`] says; a mere test otherwise.
#[test]
fn child() {
    println!(); // the harness has begun a line
    let result = match std::env::var(fake::TASK).as_deref() {
        Ok("multiply") => multiply(),
        _ => return,
    };
    if let Err(error) = result {
        println!("error: {error}");
    }
}

fn multiply() -> Result<(), Error> {
    let library = HipBlasLt::open()?;
    let handle = Handle::new(library)?;
    println!("version: {}", handle.version()?);
    let mut product = Product::new(library, HIPBLAS_COMPUTE_32F, HIP_R_32F)?;
    product.transpose(true, false)?;
    let mut a = Layout::new(library, HIP_R_16BF, 4, 2, 4)?;
    a.batch(3, 8)?;
    let b = Layout::new(library, HIP_R_16BF, 4, 5, 4)?;
    let c = Layout::new(library, HIP_R_32F, 2, 5, 2)?;
    let layouts = Layouts { a: &a, b: &b, c: &c, d: &c };
    println!("layout: {}", Layout::new(library, HIP_R_16BF, 9, 2, 8).unwrap_err());

    let preference = Preference::new(library, 1 << 20)?;
    let algorithms = handle.algorithms(&product, layouts, &preference, 4)?;
    println!("algorithms: {:?}", algorithms.iter().map(|a| (a.workspace_bytes, a.waves)).collect::<Vec<_>>());
    let one = Layout::new(library, HIP_R_32F, 1, 1, 1)?;
    let none = handle.algorithms(&product, Layouts { d: &one, ..layouts }, &preference, 4);
    println!("none: {}", none.unwrap_err());

    let stream = Stream::new(Hip::open()?)?;
    let text = |text: &'static std::ffi::CStr| text.as_ptr().cast::<c_void>();
    let (a, b, c, d) = (text(c"A"), text(c"B"), text(c"C"), text(c"D").cast_mut());
    let workspace = text(c"workspace").cast_mut();
    let operands = Operands { alpha: 2.0, a, b, beta: 0.5, c, d, workspace, workspace_bytes: 100 };
    // SAFETY: the fake prints the texts that the addresses point to.
    unsafe { handle.multiply(&stream, &product, &algorithms[0], layouts, operands) }
}

#[test]
fn products_reach_the_library_and_its_statuses_come_back_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let hip = build(&folder.path().join("hip.so"), include_str!("fake/hip.c"), &hip_sys::hip::ffi::interface(), &[]);
    let blas = build(&folder.path().join("blas.so"), include_str!("fake/hipblaslt.c"), &ffi::interface(), &[]);
    let text = run("multiply", &[("ZAYA_HIP_LIB", &hip), ("ZAYA_HIPBLASLT_LIB", &blas)]);
    assert_eq!(lines(&text, "version: "), ["100202"]);
    assert_eq!(
        lines(&text, "layout: "),
        [
            "hipblasLtMatrixLayoutCreate (describing a matrix of 9 x 2 HIP_R_16BF, stride 8) failed: HIPBLAS_STATUS_INVALID_VALUE (3): \
          an argument is not allowed"
        ]
    );
    assert_eq!(lines(&text, "algorithms: "), ["[(100, 0.5)]"]);
    assert_eq!(
        lines(&text, "none: "),
        [
            "hipblasLtMatmulAlgoGetHeuristic (looking for an algorithm; none was found) failed: HIPBLAS_STATUS_NOT_SUPPORTED (7): this \
          product is not supported"
        ]
    );
    assert_eq!(
        lines(&text, "fake: "),
        [
            "product attribute 0 = 112, 4 bytes",
            "product attribute 1 = 111, 4 bytes",
            "layout attribute 0 = 3, 4 bytes",
            "layout attribute 1 = 8, 8 bytes",
            "preference attribute 1 = 1048576, 8 bytes",
            "stream flags 1",
            "a product of a handle: 2 A (4x2 type 14) B (4x5 type 14) + 0.5 C (2x5 type 0) -> D (2x5 type 0), algorithm 42, workspace \
             of 100, stream 1",
        ]
    );
    assert_eq!(
        lines(&text, "error: "),
        ["hipblasLtMatmul (queuing a matrix product) failed: HIPBLAS_STATUS_INTERNAL_ERROR (6): the library gives no reason"]
    );
}

#[test]
fn a_library_that_is_not_there_is_named_with_its_variable() {
    let text = run("multiply", &[("ZAYA_HIPBLASLT_LIB", Path::new("/no/such/file.so"))]);
    let error = lines(&text, "error: ").join("|");
    assert!(
        error.starts_with("hipBLASLt cannot be opened: ZAYA_HIPBLASLT_LIB names /no/such/file.so, but cannot open"),
        "{text}"
    );
}
