//! hipBLASLt's C interface against plain loops in f64.

mod common;

use std::ffi::{c_int, c_void};

use common::Random;
use common::library::*;
use half::bf16;

const F32: c_int = 0;
const BF16: c_int = 14;
const N: c_int = 111;
const T: c_int = 112;

fn layout(element: c_int, rows: u64, columns: u64, leading: i64, batches: i32, stride: i64) -> Handle {
    let mut handle = std::ptr::null_mut();
    ok(
        c_call!(fn hipblasLtMatrixLayoutCreate(handle: *mut Handle = &mut handle, element: c_int = element, rows: u64 = rows, columns: u64 = columns, leading: i64 = leading)),
    );
    set("hipblasLtMatrixLayoutSetAttribute", handle, 0, &batches);
    set("hipblasLtMatrixLayoutSetAttribute", handle, 1, &stride);
    handle
}

fn set<V>(function: &str, handle: Handle, attribute: c_int, value: &V) {
    let function = symbol::<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int>(function);
    // SAFETY: the value is as long as its type.
    ok(unsafe { function(handle, attribute, std::ptr::from_ref(value).cast(), size_of::<V>()) });
}

/// Values of a matrix in memory: f32 exactly as bf16 would hold them.
fn values(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| bf16::from_f32(random.unit()).to_f32()).collect()
}

fn device(values: &[f32], element: c_int) -> Handle {
    match element {
        F32 => upload(values),
        _ => upload(&values.iter().map(|&value| bf16::from_f32(value).to_bits()).collect::<Vec<u16>>()),
    }
}

struct Case {
    input: c_int,
    output: c_int,
    transpose: (bool, bool),
    batches: usize,
    alpha: f32,
    beta: f32,
    bias: bool,
    workspace_bytes: usize,
}

/// Runs a product of 7 x 5 by depth 11 with padded columns; gives the call's status and checks the result if it is 0.
fn run(case: &Case) -> c_int {
    let (m, n, k, pad) = (7usize, 5usize, 11usize, 3usize);
    let mut random = Random(case.batches as u64);
    let shape_a = if case.transpose.0 { (k, m) } else { (m, k) };
    let shape_b = if case.transpose.1 { (n, k) } else { (k, n) };
    let size = |(rows, columns): (usize, usize)| (rows + pad) * columns;
    let make = |random: &mut Random, shape| values(random, size(shape) * case.batches);
    let (a, b, c) = (make(&mut random, shape_a), make(&mut random, shape_b), make(&mut random, (m, n)));
    let bias = values(&mut random, m);
    let handle_of = |(rows, columns): (usize, usize), element| {
        layout(element, rows as u64, columns as u64, (rows + pad) as i64, case.batches as i32, size((rows, columns)) as i64)
    };
    let (layout_a, layout_b) = (handle_of(shape_a, case.input), handle_of(shape_b, case.input));
    let (layout_c, layout_d) = (handle_of((m, n), case.output), handle_of((m, n), case.output));
    let (device_a, device_b) = (device(&a, case.input), device(&b, case.input));
    let (device_c, device_bias) = (device(&c, case.output), device(&bias, case.output));
    let device_d = device(&vec![0.0; c.len()], case.output);

    let (mut context, mut product, mut preference): (Handle, Handle, Handle) =
        (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    ok(c_call!(fn hipblasLtCreate(handle: *mut Handle = &mut context)));
    ok(c_call!(fn hipblasLtMatmulDescCreate(handle: *mut Handle = &mut product, compute: c_int = 2, scale: c_int = F32)));
    let describe = "hipblasLtMatmulDescSetAttribute";
    set(describe, product, 0, if case.transpose.0 { &T } else { &N });
    set(describe, product, 1, if case.transpose.1 { &T } else { &N });
    if case.bias {
        set(describe, product, 2, &4i32);
        set(describe, product, 3, &device_bias);
    }
    ok(c_call!(fn hipblasLtMatmulPreferenceCreate(handle: *mut Handle = &mut preference)));
    set("hipblasLtMatmulPreferenceSetAttribute", preference, 1, &(32usize << 20));
    // hipblasLtMatmulHeuristicResult_t: algorithm (24 bytes), workspace bytes, status, waves, 4 reserved.
    let mut result = [0u64; 7];
    let mut returned = 0;
    ok(c_call!(fn hipblasLtMatmulAlgoGetHeuristic(
        handle: Handle = context, product: Handle = product, a: Handle = layout_a, b: Handle = layout_b, c: Handle = layout_c, d: Handle = layout_d,
        preference: Handle = preference, requested: c_int = 1, results: *mut u64 = result.as_mut_ptr(), returned: *mut c_int = &mut returned,
    )));
    assert_eq!(returned, 1);
    let workspace = malloc(case.workspace_bytes.max(1));
    let status = c_call!(fn hipblasLtMatmul(
        handle: Handle = context, product: Handle = product, alpha: *const f32 = &case.alpha,
        a: Handle = device_a, layout_a: Handle = layout_a, b: Handle = device_b, layout_b: Handle = layout_b,
        beta: *const f32 = &case.beta, c: Handle = device_c, layout_c: Handle = layout_c, d: Handle = device_d, layout_d: Handle = layout_d,
        algorithm: *const u64 = result.as_ptr(), workspace: Handle = workspace, bytes: usize = case.workspace_bytes, stream: Handle = std::ptr::null_mut(),
    ));
    if status != 0 {
        return status;
    }
    ok(synchronize(std::ptr::null_mut()));
    let found: Vec<f32> = match case.output {
        F32 => download(device_d, c.len()),
        _ => download::<u16>(device_d, c.len()).into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    };
    for batch in 0..case.batches {
        for row in 0..m {
            for column in 0..n {
                let at = |values: &[f32], shape: (usize, usize), row: usize, column: usize| {
                    f64::from(values[batch * size(shape) + column * (shape.0 + pad) + row])
                };
                let sum: f64 = (0..k)
                    .map(|step| {
                        let a = if case.transpose.0 { at(&a, shape_a, step, row) } else { at(&a, shape_a, row, step) };
                        let b = if case.transpose.1 { at(&b, shape_b, column, step) } else { at(&b, shape_b, step, column) };
                        a * b
                    })
                    .sum();
                let bias = if case.bias { f64::from(bias[row]) } else { 0.0 };
                let expected = f64::from(case.alpha) * sum + f64::from(case.beta) * at(&c, (m, n), row, column) + bias;
                let tolerance = if case.output == F32 { 1e-5 } else { 0.004 * expected.abs() + 1e-5 };
                let found = at(&found, (m, n), row, column);
                assert!((found - expected).abs() <= tolerance, "batch {batch} ({row}, {column}): {found}, expected {expected}");
            }
        }
        // The rows between the columns are left alone.
        assert_eq!(found[batch * size((m, n)) + m], 0.0);
    }
    0
}

#[test]
fn products_of_all_kinds() {
    for transpose in [(false, false), (true, false), (false, true), (true, true)] {
        for (input, output) in [(F32, F32), (BF16, F32), (BF16, BF16)] {
            let case =
                Case { input, output, transpose, batches: 3, alpha: 0.5, beta: -2.0, bias: true, workspace_bytes: 32 << 20 };
            ok(run(&case));
            ok(run(&Case { batches: 1, alpha: 1.0, beta: 0.0, bias: false, ..case }));
        }
    }
}

#[test]
fn a_workspace_that_is_too_small_is_refused() {
    let case = Case {
        input: BF16,
        output: BF16,
        transpose: (false, false),
        batches: 1,
        alpha: 1.0,
        beta: 0.0,
        bias: false,
        workspace_bytes: 1000,
    };
    assert_eq!(run(&case), 3);
}
