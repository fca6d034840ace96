//! RCCL's enumerations, structures and handles.

use std::ffi::{c_char, c_int, c_uint};

hip_sys::c_enums! {
    /// What nearly every function returns.
    ncclResult_t {
        ncclSuccess = 0,
        ncclUnhandledCudaError = 1,
        ncclSystemError = 2,
        ncclInternalError = 3,
        ncclInvalidArgument = 4,
        ncclInvalidUsage = 5,
        ncclRemoteError = 6,
        ncclInProgress = 7,
        ncclTimeout = 8,
    }

    /// Types of elements.
    ncclDataType_t {
        ncclInt8 = 0,
        ncclUint8 = 1,
        ncclInt32 = 2,
        ncclUint32 = 3,
        ncclInt64 = 4,
        ncclUint64 = 5,
        ncclFloat16 = 6,
        ncclFloat32 = 7,
        ncclFloat64 = 8,
        ncclBfloat16 = 9,
    }

    /// How elements of several ranks become one.
    ncclRedOp_t {
        ncclSum = 0,
        ncclProd = 1,
        ncclMax = 2,
        ncclMin = 3,
        ncclAvg = 4,
    }
}

hip_sys::c_constants! {
    NCCL_UNIQUE_ID_BYTES: c_int = 128;
    /// The version that [`ncclConfig_v22800`] is of, 2.30.4; other versions take it for what they know of it.
    NCCL_VERSION_CODE: c_int = 23004;
}

/// In a configuration: as the library likes.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;

/// What a configuration begins with, after its size.
pub const NCCL_API_MAGIC: c_uint = 0xcafe_beef;

hip_sys::c_structs! {
    /// What ranks agree on to find each other. Functions take it by value.
    ncclUniqueId { internal: [c_char; 128] }

    /// How a communicator is to work; [`ncclConfig_v22800::new`] leaves everything to the library.
    ncclConfig_v22800 {
        size: usize,
        magic: c_uint,
        version: c_uint,
        blocking: c_int,
        cgaClusterSize: c_int,
        minCTAs: c_int,
        maxCTAs: c_int,
        netName: *const c_char,
        splitShare: c_int,
        trafficClass: c_int,
        commName: *const c_char,
        collnetEnable: c_int,
        CTAPolicy: c_int,
        shrinkShare: c_int,
        nvlsCTAs: c_int,
        nChannelsPerNetPeer: c_int,
        nvlinkCentricSched: c_int,
        graphUsageMode: c_int,
        numRmaCtx: c_int,
        maxP2pPeers: c_int,
    }
}

impl ncclConfig_v22800 {
    /// As the header's `NCCL_CONFIG_INITIALIZER`: everything is as the library likes.
    #[expect(clippy::new_without_default, reason = "the header speaks of an initializer, not of a default")]
    pub const fn new() -> Self {
        const UNDEF: c_int = NCCL_CONFIG_UNDEF_INT;
        Self {
            // By its size the library knows how much of this it may read: older ones read less.
            size: size_of::<Self>(),
            magic: NCCL_API_MAGIC,
            version: NCCL_VERSION_CODE.cast_unsigned(),
            blocking: UNDEF,
            cgaClusterSize: UNDEF,
            minCTAs: UNDEF,
            maxCTAs: UNDEF,
            netName: std::ptr::null(),
            splitShare: UNDEF,
            trafficClass: UNDEF,
            commName: std::ptr::null(),
            collnetEnable: UNDEF,
            CTAPolicy: UNDEF,
            shrinkShare: UNDEF,
            nvlsCTAs: UNDEF,
            nChannelsPerNetPeer: UNDEF,
            nvlinkCentricSched: UNDEF,
            graphUsageMode: UNDEF,
            numRmaCtx: UNDEF,
            maxP2pPeers: UNDEF,
        }
    }
}

hip_sys::c_handles! {
    ncclComm_t = *mut ncclComm;
}
