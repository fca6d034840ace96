//! hipBLASLt, with the algorithm of each shape kept.

use std::collections::HashMap;
use std::hash::Hash as _;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use hip_sys::Error;
use hip_sys::hipblaslt::ffi::{HIP_R_16BF, HIP_R_32F, HIPBLAS_COMPUTE_32F, HIPBLAS_STATUS_NOT_SUPPORTED};
use hip_sys::hipblaslt::{Algorithm, Handle, HipBlasLt, Layout, Layouts, Operands, Preference, Product};

use super::{Form, Gemm};
use crate::tensor::hip::graph::Fate;
use crate::tensor::hip::{Hip, Kind};

/// Most workspace that an algorithm may ask for, in bytes.
const MOST_WORKSPACE: usize = 64 << 20;

pub struct Library {
    library: &'static HipBlasLt,
    handle: Handle,
    preference: Preference,
    /// None = the library does not do it.
    plans: Mutex<HashMap<Gemm, Option<Arc<Plan>>>>,
}

/// How a product is computed. hipBLASLt thinks of columns: what it sees of our row-major `c = a b` is `cᵀ = bᵀ aᵀ`, with b first.
struct Plan {
    product: Product,
    first: Layout,
    second: Layout,
    result: Layout,
    algorithm: Algorithm,
}

impl Library {
    /// None where it is not installed.
    ///
    /// # Errors
    /// When it is and does not work, or the file that a variable names is not it.
    pub fn open() -> Result<Option<Self>> {
        let library = match HipBlasLt::open() {
            Ok(library) => library,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error).context("opening hipBLASLt for products of matrices"),
        };
        let handle = Handle::new(library)?;
        let preference = Preference::new(library, MOST_WORKSPACE as u64)?;
        Ok(Some(Self { library, handle, preference, plans: Mutex::default() }))
    }

    /// Queues a product of bf16 operands; `false` = the library does not do it, and nothing was queued. Memory as for `Gemm::queue`.
    pub fn queue(&self, hip: &Hip, gemm: Gemm, a: *const f32, b: *const f32, c: *mut f32) -> Result<bool> {
        let (Some(plan), Some(stream)) = (self.plan(gemm)?, hip.stream()) else { return Ok(false) };
        let workspace_bytes = plan.algorithm.workspace_bytes;
        // In the stream's order: whoever gets this memory next queues its work behind this product.
        let mut workspace = hip.matrix(1, workspace_bytes.div_ceil(Kind::F32.bytes()), Kind::F32)?;
        let operands = Operands {
            alpha: 1.0,
            a: b.cast(),
            b: a.cast(),
            beta: if gemm.accumulate { 1.0 } else { 0.0 },
            c: c.cast_const().cast(),
            d: c.cast(),
            workspace: workspace.at_mut().cast(),
            workspace_bytes,
        };
        let places = [a as usize, b as usize, c as usize, operands.workspace as usize];
        if hip.fate(|to| (gemm, places, workspace_bytes).hash(to)) == Fate::Skip {
            return Ok(true);
        }
        let layouts = Layouts { a: &plan.first, b: &plan.second, c: &plan.result, d: &plan.result };
        // SAFETY: the scale type is f32. The layouts are those of `gemm`, whose caller vouches for the memory; it lies in the arena, whose
        // blocks are given out again only to what is queued later in the same stream.
        unsafe { self.handle.multiply(stream, &plan.product, &plan.algorithm, layouts, operands) }
            .with_context(|| format!("queuing {gemm:?}"))?;
        Ok(true)
    }

    fn plan(&self, gemm: Gemm) -> Result<Option<Arc<Plan>>> {
        // A plan is put in whole or not at all.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&gemm) {
            return Ok(plan.clone());
        }
        let plan = self.find(gemm).with_context(|| format!("planning {gemm:?}"))?.map(Arc::new);
        plans.insert(gemm, plan.clone());
        Ok(plan)
    }

    fn find(&self, gemm: Gemm) -> Result<Option<Plan>, Error> {
        let Gemm { form, m, n, k, strides: [lda, ldb, ldc], .. } = gemm;
        // A row-major [rows, cols] matrix is a column-major [cols, rows] one.
        let layout = |kind, [rows, cols]: [usize; 2], stride: usize| {
            Layout::new(self.library, kind, cols as u64, rows as u64, stride as i64)
        };
        let a = if form == Form::Tn { [k, m] } else { [m, k] };
        let b = if form == Form::Nt { [n, k] } else { [k, n] };
        let (first, second) = (layout(HIP_R_16BF, b, ldb)?, layout(HIP_R_16BF, a, lda)?);
        let result = layout(HIP_R_32F, [m, n], ldc)?;
        let mut product = Product::new(self.library, HIPBLAS_COMPUTE_32F, HIP_R_32F)?;
        product.transpose(form == Form::Nt, form == Form::Tn)?;
        let layouts = Layouts { a: &first, b: &second, c: &result, d: &result };
        match self.handle.algorithms(&product, layouts, &self.preference, 1) {
            Ok(found) => Ok(found.first().copied().map(|algorithm| Plan { product, first, second, result, algorithm })),
            Err(error) if error.code() == Some(HIPBLAS_STATUS_NOT_SUPPORTED.0) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
