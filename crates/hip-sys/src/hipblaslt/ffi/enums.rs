//! hipBLASLt's enumerations, and those of hipBLAS and HIP that it uses.

crate::c_enums! {
    /// What every function returns.
    hipblasStatus_t {
        HIPBLAS_STATUS_SUCCESS = 0,
        HIPBLAS_STATUS_NOT_INITIALIZED = 1,
        HIPBLAS_STATUS_ALLOC_FAILED = 2,
        HIPBLAS_STATUS_INVALID_VALUE = 3,
        HIPBLAS_STATUS_MAPPING_ERROR = 4,
        HIPBLAS_STATUS_EXECUTION_FAILED = 5,
        HIPBLAS_STATUS_INTERNAL_ERROR = 6,
        HIPBLAS_STATUS_NOT_SUPPORTED = 7,
        HIPBLAS_STATUS_ARCH_MISMATCH = 8,
        HIPBLAS_STATUS_HANDLE_IS_NULLPTR = 9,
        HIPBLAS_STATUS_INVALID_ENUM = 10,
        HIPBLAS_STATUS_UNKNOWN = 11,
    }

    /// Whether a factor is transposed.
    hipblasOperation_t {
        HIPBLAS_OP_N = 111,
        HIPBLAS_OP_T = 112,
    }

    /// What sums are kept in.
    hipblasComputeType_t {
        HIPBLAS_COMPUTE_32F = 2,
        HIPBLAS_COMPUTE_32F_FAST_16BF = 5,
        HIPBLAS_COMPUTE_32F_FAST_TF32 = 6,
    }

    /// The type of a matrix's elements, or of alpha and beta.
    hipDataType {
        HIP_R_32F = 0,
        HIP_R_16F = 2,
        HIP_R_16BF = 14,
        HIP_R_8F_E4M3 = 28,
        HIP_R_8F_E5M2 = 29,
        HIP_R_8F_E4M3_FNUZ = 1000,
        HIP_R_8F_E5M2_FNUZ = 1001,
    }

    /// What is done to the result before it is stored.
    hipblasLtEpilogue_t {
        HIPBLASLT_EPILOGUE_DEFAULT = 1,
        HIPBLASLT_EPILOGUE_BIAS = 4,
    }

    /// Where alpha and beta are.
    hipblasLtPointerMode_t {
        HIPBLASLT_POINTER_MODE_HOST = 0,
        HIPBLASLT_POINTER_MODE_DEVICE = 1,
    }

    /// How a matrix is stored.
    hipblasLtOrder_t {
        HIPBLASLT_ORDER_COL = 0,
        HIPBLASLT_ORDER_ROW = 1,
    }

    /// Attributes of a matrix layout.
    hipblasLtMatrixLayoutAttribute_t {
        HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 0,
        HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 1,
        HIPBLASLT_MATRIX_LAYOUT_TYPE = 2,
        HIPBLASLT_MATRIX_LAYOUT_ORDER = 3,
        HIPBLASLT_MATRIX_LAYOUT_ROWS = 4,
        HIPBLASLT_MATRIX_LAYOUT_COLS = 5,
        HIPBLASLT_MATRIX_LAYOUT_LD = 6,
    }

    /// Attributes of a product's description.
    hipblasLtMatmulDescAttributes_t {
        HIPBLASLT_MATMUL_DESC_TRANSA = 0,
        HIPBLASLT_MATMUL_DESC_TRANSB = 1,
        HIPBLASLT_MATMUL_DESC_EPILOGUE = 2,
        HIPBLASLT_MATMUL_DESC_BIAS_POINTER = 3,
        HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 4,
        HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER = 5,
        HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER = 6,
        HIPBLASLT_MATMUL_DESC_C_SCALE_POINTER = 7,
        HIPBLASLT_MATMUL_DESC_D_SCALE_POINTER = 8,
        HIPBLASLT_MATMUL_DESC_POINTER_MODE = 13,
        HIPBLASLT_MATMUL_DESC_AMAX_D_POINTER = 14,
    }

    /// Attributes of the search for an algorithm.
    hipblasLtMatmulPreferenceAttributes_t {
        HIPBLASLT_MATMUL_PREF_SEARCH_MODE = 0,
        HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    }
}
