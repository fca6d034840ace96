//! The table of HIP's functions.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::{
    hipDeviceAttribute_t, hipDeviceProp_tR0600, hipError_t, hipEvent_t, hipFunction_attribute, hipFunction_t, hipGraph_t,
    hipGraphExec_t, hipGraphNode_t, hipMemcpyKind, hipModule_t, hipStream_t, hipStreamCaptureMode,
};

crate::c_functions! {
    /// HIP's functions. They may be called from any thread; the current device is each thread's own.
    HipFunctions {
        fn hipInit(flags: c_uint) -> hipError_t;
        fn hipDriverGetVersion(driverVersion: *mut c_int) -> hipError_t;
        fn hipRuntimeGetVersion(runtimeVersion: *mut c_int) -> hipError_t;
        fn hipGetLastError() -> hipError_t;
        fn hipGetErrorName(hip_error: hipError_t) -> *const c_char;
        fn hipGetErrorString(hipError: hipError_t) -> *const c_char;

        fn hipGetDeviceCount(count: *mut c_int) -> hipError_t;
        fn hipSetDevice(deviceId: c_int) -> hipError_t;
        fn hipGetDevice(deviceId: *mut c_int) -> hipError_t;
        fn hipGetDevicePropertiesR0600(prop: *mut hipDeviceProp_tR0600, deviceId: c_int) -> hipError_t;
        fn hipDeviceGetAttribute(pi: *mut c_int, attr: hipDeviceAttribute_t, deviceId: c_int) -> hipError_t;
        fn hipDeviceGetPCIBusId(pciBusId: *mut c_char, len: c_int, device: c_int) -> hipError_t;
        fn hipDeviceSynchronize() -> hipError_t;
        fn hipDeviceCanAccessPeer(canAccessPeer: *mut c_int, deviceId: c_int, peerDeviceId: c_int) -> hipError_t;
        fn hipDeviceEnablePeerAccess(peerDeviceId: c_int, flags: c_uint) -> hipError_t;
        fn hipExtGetLinkTypeAndHopCount(device1: c_int, device2: c_int, linktype: *mut u32, hopcount: *mut u32) -> hipError_t;

        fn hipMalloc(ptr: *mut *mut c_void, size: usize) -> hipError_t;
        fn hipExtMallocWithFlags(ptr: *mut *mut c_void, sizeBytes: usize, flags: c_uint) -> hipError_t;
        fn hipFree(ptr: *mut c_void) -> hipError_t;
        fn hipHostMalloc(ptr: *mut *mut c_void, size: usize, flags: c_uint) -> hipError_t;
        fn hipHostFree(ptr: *mut c_void) -> hipError_t;
        fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> hipError_t;
        fn hipMemcpy(dst: *mut c_void, src: *const c_void, sizeBytes: usize, kind: hipMemcpyKind) -> hipError_t;
        fn hipMemcpyAsync(
            dst: *mut c_void, src: *const c_void, sizeBytes: usize, kind: hipMemcpyKind, stream: hipStream_t
        ) -> hipError_t;
        fn hipMemset(dst: *mut c_void, value: c_int, sizeBytes: usize) -> hipError_t;
        fn hipMemsetAsync(dst: *mut c_void, value: c_int, sizeBytes: usize, stream: hipStream_t) -> hipError_t;
        fn hipMemsetD32Async(dst: *mut c_void, value: c_int, count: usize, stream: hipStream_t) -> hipError_t;

        fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint) -> hipError_t;
        fn hipStreamCreateWithPriority(stream: *mut hipStream_t, flags: c_uint, priority: c_int) -> hipError_t;
        fn hipStreamDestroy(stream: hipStream_t) -> hipError_t;
        fn hipStreamSynchronize(stream: hipStream_t) -> hipError_t;
        fn hipStreamQuery(stream: hipStream_t) -> hipError_t;
        fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint) -> hipError_t;
        fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint) -> hipError_t;
        fn hipEventDestroy(event: hipEvent_t) -> hipError_t;
        fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> hipError_t;
        fn hipEventSynchronize(event: hipEvent_t) -> hipError_t;
        fn hipEventQuery(event: hipEvent_t) -> hipError_t;
        fn hipEventElapsedTime(ms: *mut f32, start: hipEvent_t, stop: hipEvent_t) -> hipError_t;

        fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void) -> hipError_t;
        fn hipModuleUnload(module: hipModule_t) -> hipError_t;
        fn hipModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, kname: *const c_char) -> hipError_t;
        fn hipFuncGetAttribute(value: *mut c_int, attrib: hipFunction_attribute, hfunc: hipFunction_t) -> hipError_t;
        fn hipModuleLaunchKernel(
            f: hipFunction_t,
            gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint,
            blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint,
            sharedMemBytes: c_uint, stream: hipStream_t, kernelParams: *mut *mut c_void, extra: *mut *mut c_void
        ) -> hipError_t;

        fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode) -> hipError_t;
        fn hipStreamEndCapture(stream: hipStream_t, pGraph: *mut hipGraph_t) -> hipError_t;
        fn hipGraphInstantiate(
            pGraphExec: *mut hipGraphExec_t, graph: hipGraph_t, pErrorNode: *mut hipGraphNode_t,
            pLogBuffer: *mut c_char, bufferSize: usize
        ) -> hipError_t;
        fn hipGraphLaunch(graphExec: hipGraphExec_t, stream: hipStream_t) -> hipError_t;
        fn hipGraphExecDestroy(graphExec: hipGraphExec_t) -> hipError_t;
        fn hipGraphDestroy(graph: hipGraph_t) -> hipError_t;
    }
    optional {}
}
