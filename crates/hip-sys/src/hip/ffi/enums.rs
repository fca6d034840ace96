//! HIP's enumerations and flags.

use std::ffi::c_uint;

crate::c_enums! {
    /// What nearly every function returns.
    hipError_t {
        hipSuccess = 0,
        hipErrorInvalidValue = 1,
        hipErrorOutOfMemory = 2,
        hipErrorNotInitialized = 3,
        hipErrorDeinitialized = 4,
        hipErrorInvalidConfiguration = 9,
        hipErrorInvalidDevicePointer = 17,
        hipErrorInvalidMemcpyDirection = 21,
        hipErrorInsufficientDriver = 35,
        hipErrorInvalidDeviceFunction = 98,
        hipErrorNoDevice = 100,
        hipErrorInvalidDevice = 101,
        hipErrorInvalidImage = 200,
        hipErrorInvalidContext = 201,
        hipErrorNoBinaryForGpu = 209,
        hipErrorECCNotCorrectable = 214,
        hipErrorPeerAccessUnsupported = 217,
        hipErrorInvalidKernelFile = 218,
        hipErrorFileNotFound = 301,
        hipErrorSharedObjectSymbolNotFound = 302,
        hipErrorSharedObjectInitFailed = 303,
        hipErrorOperatingSystem = 304,
        hipErrorInvalidHandle = 400,
        hipErrorIllegalState = 401,
        hipErrorNotFound = 500,
        hipErrorNotReady = 600,
        hipErrorIllegalAddress = 700,
        hipErrorLaunchOutOfResources = 701,
        hipErrorLaunchTimeOut = 702,
        hipErrorPeerAccessAlreadyEnabled = 704,
        hipErrorPeerAccessNotEnabled = 705,
        hipErrorAssert = 710,
        hipErrorLaunchFailure = 719,
        hipErrorNotSupported = 801,
        hipErrorStreamCaptureUnsupported = 900,
        hipErrorStreamCaptureInvalidated = 901,
        hipErrorStreamCaptureMerge = 902,
        hipErrorStreamCaptureUnmatched = 903,
        hipErrorStreamCaptureUnjoined = 904,
        hipErrorStreamCaptureIsolation = 905,
        hipErrorStreamCaptureImplicit = 906,
        hipErrorCapturedEvent = 907,
        hipErrorStreamCaptureWrongThread = 908,
        hipErrorUnknown = 999,
        hipErrorRuntimeMemory = 1052,
        hipErrorRuntimeOther = 1053,
    }

    /// From where to where a copy goes.
    hipMemcpyKind {
        hipMemcpyHostToHost = 0,
        hipMemcpyHostToDevice = 1,
        hipMemcpyDeviceToHost = 2,
        hipMemcpyDeviceToDevice = 3,
        hipMemcpyDefault = 4,
    }

    /// Which calls of which threads may not be made while a stream is captured.
    hipStreamCaptureMode {
        hipStreamCaptureModeGlobal = 0,
        hipStreamCaptureModeThreadLocal = 1,
        hipStreamCaptureModeRelaxed = 2,
    }

    /// What can be asked of a kernel.
    hipFunction_attribute {
        HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
        HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
        HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2,
        HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
        HIP_FUNC_ATTRIBUTE_NUM_REGS = 4,
    }

    /// What can be asked of a device. `NumberOfXccs` is known from HIP 7 on.
    hipDeviceAttribute_t {
        hipDeviceAttributeClockRate = 5,
        hipDeviceAttributeConcurrentKernels = 8,
        hipDeviceAttributeConcurrentManagedAccess = 9,
        hipDeviceAttributeL2CacheSize = 19,
        hipDeviceAttributeMaxThreadsPerBlock = 56,
        hipDeviceAttributeMemoryBusWidth = 59,
        hipDeviceAttributeMemoryClockRate = 60,
        hipDeviceAttributeMultiprocessorCount = 63,
        hipDeviceAttributePciBusId = 67,
        hipDeviceAttributePciDeviceId = 68,
        hipDeviceAttributePciDomainId = 69,
        hipDeviceAttributeMaxSharedMemoryPerBlock = 74,
        hipDeviceAttributeStreamPrioritiesSupported = 78,
        hipDeviceAttributeWarpSize = 87,
        hipDeviceAttributeIsLargeBar = 10011,
        hipDeviceAttributeFineGrainSupport = 10016,
        hipDeviceAttributeWallClockRate = 10017,
        hipDeviceAttributeNumberOfXccs = 10018,
    }
}

crate::c_constants! {
    hipStreamDefault: c_uint = 0;
    hipStreamNonBlocking: c_uint = 1;
    hipEventDefault: c_uint = 0;
    hipEventBlockingSync: c_uint = 1;
    hipEventDisableTiming: c_uint = 2;
    hipHostMallocDefault: c_uint = 0;
    hipHostMallocPortable: c_uint = 1;
    hipHostMallocMapped: c_uint = 2;
    hipHostMallocNumaUser: c_uint = 0x2000_0000;
    hipHostMallocCoherent: c_uint = 0x4000_0000;
    hipHostMallocNonCoherent: c_uint = 0x8000_0000;
    hipDeviceMallocDefault: c_uint = 0;
    hipDeviceMallocFinegrained: c_uint = 1;
}
