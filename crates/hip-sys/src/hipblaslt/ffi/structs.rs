//! hipBLASLt's structures and handles.

use std::ffi::c_int;

use super::hipblasStatus_t;

crate::c_structs! {
    /// An algorithm, as the library keeps it.
    hipblasLtMatmulAlgo_t {
        data: [u8; 16],
        max_workspace_bytes: usize,
    }

    /// An algorithm that the library proposes.
    hipblasLtMatmulHeuristicResult_t {
        algo: hipblasLtMatmulAlgo_t,
        workspaceSize: usize,
        state: hipblasStatus_t,
        wavesCount: f32,
        reserved: [c_int; 4],
    }
}

crate::c_handles! {
    hipblasLtMatmulDesc_t = *mut hipblasLtMatmulDescOpaque_t;
    hipblasLtMatrixLayout_t = *mut hipblasLtMatrixLayoutOpaque_t;
    hipblasLtMatmulPreference_t = *mut hipblasLtMatmulPreferenceOpaque_t;
}
