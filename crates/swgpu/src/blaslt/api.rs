//! The C functions of hipBLASLt.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use super::descriptors::{Layout, Product, Value};
use super::product::Call;
use super::{Element, Failure, INVALID_VALUE, NOT_SUPPORTED, Status, call, failure};
use crate::counters;
use crate::hip::copy::Place;
use crate::hip::handles::Handles;
use crate::hip::stream::stream;
use crate::hip::{LAUNCH_FAILURE, give};

static CONTEXTS: Handles<()> = Handles::new("hipBLASLt handle");
static LAYOUTS: Handles<Mutex<Layout>> = Handles::new("matrix layout");
static PRODUCTS: Handles<Mutex<Product>> = Handles::new("product descriptor");
/// Their only attribute that matters: the most bytes of workspace.
static PREFERENCES: Handles<Mutex<usize>> = Handles::new("preference");

/// What the only algorithm asks for, so that callers must really provide a workspace.
const WORKSPACE_BYTES: usize = 1 << 20;
const ALGORITHM: [u8; 16] = *b"swgpu algorithm1";

/// `hipblasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Algorithm {
    data: [u8; 16],
    max_workspace_bytes: usize,
}

/// `hipblasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves_count: f32,
    reserved: [c_int; 4],
}

fn value_of<T: Copy>(handles: &Handles<Mutex<T>>, handle: *mut c_void) -> Result<T, Failure> {
    Ok(*handles.get(handle)?.lock().unwrap_or_else(PoisonError::into_inner))
}

/// # Safety
/// hipBLASLt's: `handle` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtCreate(handle: *mut *mut c_void) -> Status {
    // SAFETY: the caller's.
    call("hipblasLtCreate", || Ok(unsafe { give(handle, CONTEXTS.add(Arc::new(()))) }?))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipblasLtDestroy(handle: *mut c_void) -> Status {
    call("hipblasLtDestroy", || Ok(CONTEXTS.remove(handle).map(|_| ())?))
}

/// # Safety
/// hipBLASLt's: `version` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtGetVersion(handle: *mut c_void, version: *mut c_int) -> Status {
    call("hipblasLtGetVersion", || {
        CONTEXTS.get(handle)?;
        // SAFETY: the caller's.
        Ok(unsafe { give(version, 100_000) }?)
    })
}

/// # Safety
/// hipBLASLt's: `handle` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulDescCreate(handle: *mut *mut c_void, compute: c_int, scale: c_int) -> Status {
    const F32_SUMS: [c_int; 1] = [2];
    call("hipblasLtMatmulDescCreate", || {
        if !F32_SUMS.contains(&compute) || Element::from_hip(scale)? != Element::F32 {
            return failure(
                NOT_SUPPORTED,
                format!("compute type {compute} with scale type {scale}; only f32 sums and scales are served"),
            );
        }
        // SAFETY: the caller's.
        Ok(unsafe { give(handle, PRODUCTS.add(Arc::default())) }?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipblasLtMatmulDescDestroy(handle: *mut c_void) -> Status {
    call("hipblasLtMatmulDescDestroy", || Ok(PRODUCTS.remove(handle).map(|_| ())?))
}

/// # Safety
/// hipBLASLt's: `value` points to `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulDescSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    bytes: usize,
) -> Status {
    call("hipblasLtMatmulDescSetAttribute", || {
        // SAFETY: the caller's.
        let value = unsafe { Value::new(value, bytes) }?;
        PRODUCTS.get(handle)?.lock().unwrap_or_else(PoisonError::into_inner).set(attribute, &value)
    })
}

/// # Safety
/// hipBLASLt's: `handle` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatrixLayoutCreate(
    handle: *mut *mut c_void,
    element: c_int,
    rows: u64,
    columns: u64,
    leading: i64,
) -> Status {
    call("hipblasLtMatrixLayoutCreate", || {
        let layout = Layout { element: Element::from_hip(element)?, rows, columns, leading, batches: 1, stride: 0 };
        // SAFETY: the caller's.
        Ok(unsafe { give(handle, LAYOUTS.add(Arc::new(Mutex::new(layout)))) }?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipblasLtMatrixLayoutDestroy(handle: *mut c_void) -> Status {
    call("hipblasLtMatrixLayoutDestroy", || Ok(LAYOUTS.remove(handle).map(|_| ())?))
}

/// # Safety
/// hipBLASLt's: `value` points to `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatrixLayoutSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    bytes: usize,
) -> Status {
    call("hipblasLtMatrixLayoutSetAttribute", || {
        // SAFETY: the caller's.
        let value = unsafe { Value::new(value, bytes) }?;
        LAYOUTS.get(handle)?.lock().unwrap_or_else(PoisonError::into_inner).set(attribute, &value)
    })
}

/// # Safety
/// hipBLASLt's: `handle` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulPreferenceCreate(handle: *mut *mut c_void) -> Status {
    // SAFETY: the caller's.
    call("hipblasLtMatmulPreferenceCreate", || Ok(unsafe { give(handle, PREFERENCES.add(Arc::default())) }?))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipblasLtMatmulPreferenceDestroy(handle: *mut c_void) -> Status {
    call("hipblasLtMatmulPreferenceDestroy", || Ok(PREFERENCES.remove(handle).map(|_| ())?))
}

/// # Safety
/// hipBLASLt's: `value` points to `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulPreferenceSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    bytes: usize,
) -> Status {
    const MAX_WORKSPACE_BYTES: c_int = 1;
    call("hipblasLtMatmulPreferenceSetAttribute", || {
        // SAFETY: the caller's.
        let value = unsafe { Value::new(value, bytes) }?;
        let preference = PREFERENCES.get(handle)?;
        if attribute == MAX_WORKSPACE_BYTES {
            *preference.lock().unwrap_or_else(PoisonError::into_inner) = value.long()? as usize;
        }
        Ok(())
    })
}

/// Shapes that belong together, or why not.
fn check_shapes(product: &Product, a: &Layout, b: &Layout, c: &Layout, d: &Layout) -> Result<(), Failure> {
    for (name, layout) in [("A", a), ("B", b), ("C", c), ("D", d)] {
        layout.check(name)?;
    }
    let turned =
        |layout: &Layout, transpose: bool| if transpose { (layout.columns, layout.rows) } else { (layout.rows, layout.columns) };
    let ((m, k), (k_b, n)) = (turned(a, product.transpose_a), turned(b, product.transpose_b));
    if k != k_b || (d.rows, d.columns) != (m, n) || (c.rows, c.columns) != (m, n) {
        return failure(
            INVALID_VALUE,
            format!("op(A) is {m} x {k}, op(B) {k_b} x {n}, C {} x {}, D {} x {}", c.rows, c.columns, d.rows, d.columns),
        );
    }
    if [a, b, c].iter().any(|layout| layout.batches != d.batches) {
        return failure(INVALID_VALUE, "the matrices differ in their number of batches");
    }
    if a.element != b.element || c.element != d.element || a.element == Element::F32 && d.element == Element::Bf16 {
        return failure(NOT_SUPPORTED, format!("elements {:?} times {:?} into {:?}", a.element, b.element, d.element));
    }
    Ok(())
}

/// # Safety
/// hipBLASLt's: `results` has room for `requested` results.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn hipblasLtMatmulAlgoGetHeuristic(
    handle: *mut c_void,
    product: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    preference: *mut c_void,
    requested: c_int,
    results: *mut HeuristicResult,
    returned: *mut c_int,
) -> Status {
    call("hipblasLtMatmulAlgoGetHeuristic", || {
        CONTEXTS.get(handle)?;
        // SAFETY: the caller's.
        unsafe { give(returned, 0) }?;
        let product = value_of(&PRODUCTS, product)?;
        let [a, b, c, d] = [a, b, c, d].map(|layout| value_of(&LAYOUTS, layout));
        check_shapes(&product, &a?, &b?, &c?, &d?)?;
        if requested < 1 || results.is_null() {
            return failure(INVALID_VALUE, format!("{requested} results requested at {results:?}"));
        }
        let workspace_bytes = value_of(&PREFERENCES, preference)?.min(WORKSPACE_BYTES);
        let algorithm = Algorithm { data: ALGORITHM, max_workspace_bytes: workspace_bytes };
        let result = HeuristicResult { algorithm, workspace_bytes, state: 0, waves_count: 1.0, reserved: [0; 4] };
        // SAFETY: the caller's.
        unsafe {
            give(results, result)?;
            Ok(give(returned, 1)?)
        }
    })
}

/// # Safety
/// hipBLASLt's: `alpha` and `beta` point to floats on the side that the product's pointer mode says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn hipblasLtMatmul(
    handle: *mut c_void,
    product: *mut c_void,
    alpha: *const c_void,
    a: *const c_void,
    layout_a: *mut c_void,
    b: *const c_void,
    layout_b: *mut c_void,
    beta: *const c_void,
    c: *const c_void,
    layout_c: *mut c_void,
    d: *mut c_void,
    layout_d: *mut c_void,
    algorithm: *const Algorithm,
    workspace: *mut c_void,
    workspace_bytes: usize,
    queue: *mut c_void,
) -> Status {
    call("hipblasLtMatmul", || {
        CONTEXTS.get(handle)?;
        let product = value_of(&PRODUCTS, product)?;
        let layouts = [layout_a, layout_b, layout_c, layout_d].map(|layout| value_of(&LAYOUTS, layout));
        let [layout_a, layout_b, layout_c, layout_d] = layouts;
        let (layout_a, layout_b, layout_c, layout_d) = (layout_a?, layout_b?, layout_c?, layout_d?);
        check_shapes(&product, &layout_a, &layout_b, &layout_c, &layout_d)?;
        if product.device_scalars {
            return failure(NOT_SUPPORTED, "alpha and beta in device memory");
        }
        if alpha.is_null() || beta.is_null() {
            return failure(INVALID_VALUE, "alpha or beta is a null pointer");
        }
        // SAFETY: the caller's, in host memory as just checked.
        let (alpha, beta) = unsafe { (*alpha.cast::<f32>(), *beta.cast::<f32>()) };
        if !algorithm.is_null() {
            // SAFETY: the caller's.
            let algorithm = unsafe { *algorithm };
            if algorithm.data != ALGORITHM {
                return failure(INVALID_VALUE, "the algorithm is none that hipblasLtMatmulAlgoGetHeuristic gave");
            }
            if workspace_bytes < algorithm.max_workspace_bytes {
                return failure(
                    INVALID_VALUE,
                    format!("{workspace_bytes} bytes of workspace, {} are needed", algorithm.max_workspace_bytes),
                );
            }
        }
        if workspace_bytes > 0 {
            Place::device(workspace, workspace_bytes)?;
        }
        let place = |pointer: *const c_void, layout: &Layout| Place::device(pointer, layout.extent_bytes());
        let bias_element = product.bias_element.unwrap_or(layout_d.element);
        let rows = layout_d.rows as usize * bias_element.bytes();
        let call = Call {
            transpose_a: product.transpose_a,
            transpose_b: product.transpose_b,
            a: (place(a, &layout_a)?, layout_a),
            b: (place(b, &layout_b)?, layout_b),
            c: if beta == 0.0 { None } else { Some((place(c, &layout_c)?, layout_c)) },
            d: (place(d.cast_const(), &layout_d)?, layout_d),
            bias: if product.bias {
                Some((Place::device(product.bias_pointer as *const c_void, rows)?, bias_element))
            } else {
                None
            },
            alpha,
            beta,
        };
        Ok(stream(queue)?.push(Arc::new(move |device| {
            if device.check().is_err() {
                return;
            }
            let _turn = device.running();
            match call.run() {
                Ok(()) => counters::record_call("hipblasLtMatmul"),
                Err(problem) => device.fail(LAUNCH_FAILURE, &problem),
            }
        }))?)
    })
}
