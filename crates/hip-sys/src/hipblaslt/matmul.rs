//! Matrix products `D = alpha op(A) op(B) + beta C`, in hipBLASLt's terms: column-major, `op` transposes or does not.

use std::ffi::{c_int, c_void};
use std::ptr::{from_ref, null_mut};

use super::HipBlasLt;
use super::ffi::{
    self, hipDataType, hipblasComputeType_t, hipblasLtEpilogue_t, hipblasLtHandle_t, hipblasLtMatmulAlgo_t,
    hipblasLtMatmulDesc_t, hipblasLtMatmulDescAttributes_t, hipblasLtMatmulHeuristicResult_t, hipblasLtMatmulPreference_t,
    hipblasLtMatrixLayout_t, hipblasLtMatrixLayoutAttribute_t,
};
use crate::{Error, Stream};

/// What kind of product it is.
#[derive(Debug)]
pub struct Product {
    library: &'static HipBlasLt,
    raw: hipblasLtMatmulDesc_t,
}

// SAFETY: a description is plain memory that belongs to no thread; it changes only through `&mut`.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

impl Product {
    /// Sums are kept as `compute` says; alpha and beta are of type `scale` and lie in the host's memory.
    ///
    /// # Errors
    /// The library refuses.
    pub fn new(library: &'static HipBlasLt, compute: hipblasComputeType_t, scale: hipDataType) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (library.functions.hipblasLtMatmulDescCreate)(&mut raw, compute, scale) };
        library.check("hipblasLtMatmulDescCreate", status, || format!("describing a product ({compute:?}, {scale:?})"))?;
        Ok(Self { library, raw })
    }

    /// Which factors are transposed.
    ///
    /// # Errors
    /// The library refuses.
    pub fn transpose(&mut self, a: bool, b: bool) -> Result<(), Error> {
        let operation = |transposed| if transposed { ffi::HIPBLAS_OP_T } else { ffi::HIPBLAS_OP_N };
        // SAFETY: both attributes are of this type.
        unsafe {
            self.set(ffi::HIPBLASLT_MATMUL_DESC_TRANSA, operation(a))?;
            self.set(ffi::HIPBLASLT_MATMUL_DESC_TRANSB, operation(b))
        }
    }

    /// What is done to the result before it is stored.
    ///
    /// # Errors
    /// The library refuses.
    pub fn epilogue(&mut self, epilogue: hipblasLtEpilogue_t) -> Result<(), Error> {
        // SAFETY: the attribute is of this type.
        unsafe { self.set(ffi::HIPBLASLT_MATMUL_DESC_EPILOGUE, epilogue) }
    }

    /// Any attribute.
    ///
    /// # Errors
    /// The library refuses.
    ///
    /// # Safety
    /// `T` must be the attribute's type, and what it points to, if it is a pointer, good when the product runs.
    pub unsafe fn set<T: Copy>(&mut self, attribute: hipblasLtMatmulDescAttributes_t, value: T) -> Result<(), Error> {
        // SAFETY: the handle is good, `value` has that size, and the caller vouches for its type.
        let status = unsafe {
            (self.library.functions.hipblasLtMatmulDescSetAttribute)(self.raw, attribute, from_ref(&value).cast(), size_of::<T>())
        };
        self.library.check("hipblasLtMatmulDescSetAttribute", status, || format!("setting {attribute:?}"))
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. There is nobody to tell of an error, and nothing depends on it.
        unsafe { (self.library.functions.hipblasLtMatmulDescDestroy)(self.raw) };
    }
}

/// How a matrix lies in memory: column-major, element `(i, j)` at `i + j * stride`.
#[derive(Debug)]
pub struct Layout {
    library: &'static HipBlasLt,
    raw: hipblasLtMatrixLayout_t,
}

// SAFETY: a layout is plain memory that belongs to no thread; it changes only through `&mut`.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

impl Layout {
    /// `rows` x `columns` elements as they are stored, before any transposition; `stride` elements from column to column.
    ///
    /// # Errors
    /// The library refuses.
    pub fn new(library: &'static HipBlasLt, kind: hipDataType, rows: u64, columns: u64, stride: i64) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (library.functions.hipblasLtMatrixLayoutCreate)(&mut raw, kind, rows, columns, stride) };
        let doing = || format!("describing a matrix of {rows} x {columns} {kind:?}, stride {stride}");
        library.check("hipblasLtMatrixLayoutCreate", status, doing)?;
        Ok(Self { library, raw })
    }

    /// `count` such matrices, `stride` elements from one to the next.
    ///
    /// # Errors
    /// The library refuses.
    pub fn batch(&mut self, count: i32, stride: i64) -> Result<(), Error> {
        self.set(ffi::HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count)?;
        self.set(ffi::HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride)
    }

    fn set<T: Copy>(&mut self, attribute: hipblasLtMatrixLayoutAttribute_t, value: T) -> Result<(), Error> {
        let functions = &self.library.functions;
        // SAFETY: the handle is good, and the library is told the size of `value`, which it compares with the attribute's.
        let status = unsafe {
            (functions.hipblasLtMatrixLayoutSetAttribute)(self.raw, attribute, from_ref(&value).cast(), size_of::<T>())
        };
        self.library.check("hipblasLtMatrixLayoutSetAttribute", status, || format!("setting {attribute:?}"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. There is nobody to tell of an error, and nothing depends on it.
        unsafe { (self.library.functions.hipblasLtMatrixLayoutDestroy)(self.raw) };
    }
}

/// What an algorithm may use.
#[derive(Debug)]
pub struct Preference {
    library: &'static HipBlasLt,
    raw: hipblasLtMatmulPreference_t,
}

// SAFETY: a preference is plain memory that belongs to no thread; nothing changes it once it is made.
unsafe impl Send for Preference {}
// SAFETY: as above.
unsafe impl Sync for Preference {}

impl Preference {
    /// At most `workspace_bytes` of workspace on the device.
    ///
    /// # Errors
    /// The library refuses.
    pub fn new(library: &'static HipBlasLt, workspace_bytes: u64) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (library.functions.hipblasLtMatmulPreferenceCreate)(&mut raw) };
        library.check("hipblasLtMatmulPreferenceCreate", status, || "describing what an algorithm may use".into())?;
        let preference = Self { library, raw };
        let attribute = ffi::HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the handle is good, and the attribute is of 64 bits.
        let status = unsafe {
            (library.functions.hipblasLtMatmulPreferenceSetAttribute)(raw, attribute, from_ref(&workspace_bytes).cast(), 8)
        };
        library.check("hipblasLtMatmulPreferenceSetAttribute", status, || format!("setting {attribute:?}"))?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. There is nobody to tell of an error, and nothing depends on it.
        unsafe { (self.library.functions.hipblasLtMatmulPreferenceDestroy)(self.raw) };
    }
}

/// How the library would compute a product.
#[derive(Debug, Clone, Copy)]
pub struct Algorithm {
    raw: hipblasLtMatmulAlgo_t,
    /// Workspace that it needs on the device.
    pub workspace_bytes: usize,
    /// How many times it fills the device, by the library's estimate.
    pub waves: f32,
}

/// The layouts of a product's four matrices.
#[derive(Debug, Clone, Copy)]
pub struct Layouts<'a> {
    pub a: &'a Layout,
    pub b: &'a Layout,
    pub c: &'a Layout,
    pub d: &'a Layout,
}

/// What a product is of. The addresses are the device's; `workspace` may be null if it has no bytes.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    pub alpha: f32,
    pub a: *const c_void,
    pub b: *const c_void,
    pub beta: f32,
    pub c: *const c_void,
    pub d: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
}

/// hipBLASLt on the device that was current when it was made.
#[derive(Debug)]
pub struct Handle {
    library: &'static HipBlasLt,
    raw: hipblasLtHandle_t,
}

// SAFETY: hipBLASLt's functions may be called with one handle from several threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Begins to use the library on the current device.
    ///
    /// # Errors
    /// There is no device, or it is not supported.
    pub fn new(library: &'static HipBlasLt) -> Result<Self, Error> {
        Ok(Self { library, raw: library.create()? })
    }

    /// hipBLASLt's version: `major * 100000 + minor * 100 + patch`.
    ///
    /// # Errors
    /// The library refuses.
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the handle is good, and `version` is a place for the number.
        let status = unsafe { (self.library.functions.hipblasLtGetVersion)(self.raw, &mut version) };
        self.library.check("hipblasLtGetVersion", status, || "asking for the version".into())?;
        Ok(version)
    }

    /// At most `most` algorithms for a product, the presumably fastest first. Never empty.
    ///
    /// # Errors
    /// The library knows none.
    pub fn algorithms(
        &self,
        product: &Product,
        layouts: Layouts<'_>,
        preference: &Preference,
        most: usize,
    ) -> Result<Vec<Algorithm>, Error> {
        let none = hipblasLtMatmulHeuristicResult_t {
            algo: hipblasLtMatmulAlgo_t { data: [0; 16], max_workspace_bytes: 0 },
            workspaceSize: 0,
            state: ffi::HIPBLAS_STATUS_UNKNOWN,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut found = vec![none; most];
        let asked = c_int::try_from(most).map_err(|_| Error::Invalid(format!("{most} algorithms are too many")))?;
        let mut count: c_int = 0;
        let Layouts { a, b, c, d } = layouts;
        // SAFETY: the handles are good, and `found` has room for as many as are asked for.
        let status = unsafe {
            (self.library.functions.hipblasLtMatmulAlgoGetHeuristic)(
                self.raw,
                product.raw,
                a.raw,
                b.raw,
                c.raw,
                d.raw,
                preference.raw,
                asked,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        let function = "hipblasLtMatmulAlgoGetHeuristic";
        self.library.check(function, status, || "looking for an algorithm".into())?;
        let good: Vec<_> = found
            .iter()
            .take(usize::try_from(count).unwrap_or(0))
            .filter(|result| result.state == ffi::HIPBLAS_STATUS_SUCCESS)
            .map(|result| Algorithm { raw: result.algo, workspace_bytes: result.workspaceSize, waves: result.wavesCount })
            .collect();
        if good.is_empty() {
            self.library
                .check(function, ffi::HIPBLAS_STATUS_NOT_SUPPORTED, || "looking for an algorithm; none was found".into())?;
        }
        Ok(good)
    }

    /// Queues `d = alpha op(a) op(b) + beta c`. `c` and `d` may be the same address.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    ///
    /// # Safety
    /// The product's scale type must be `f32`. The operands must be device memory as the layouts say, and a workspace of as many
    /// bytes as is said. All must stay allocated, and untouched by others, until the stream has passed it.
    pub unsafe fn multiply(
        &self,
        stream: &Stream,
        product: &Product,
        algorithm: &Algorithm,
        layouts: Layouts<'_>,
        operands: Operands,
    ) -> Result<(), Error> {
        let Layouts { a, b, c, d } = layouts;
        // SAFETY: the handles are good, alpha and beta are read before the call returns, and the caller vouches for the memory.
        let status = unsafe {
            (self.library.functions.hipblasLtMatmul)(
                self.raw,
                product.raw,
                from_ref(&operands.alpha).cast(),
                operands.a,
                a.raw,
                operands.b,
                b.raw,
                from_ref(&operands.beta).cast(),
                operands.c,
                c.raw,
                operands.d,
                d.raw,
                &algorithm.raw,
                operands.workspace,
                operands.workspace_bytes,
                stream.raw(),
            )
        };
        self.library.check("hipblasLtMatmul", status, || "queuing a matrix product".into())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `create`, and owned. There is nobody to tell of an error, and nothing depends on it.
        unsafe { (self.library.functions.hipblasLtDestroy)(self.raw) };
    }
}
