#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int last;

const char *hipGetErrorName(int code) {
    return code == 2 ? "hipErrorOutOfMemory" : code == 100 ? "hipErrorNoDevice" : code == 600 ? "hipErrorNotReady" : NULL;
}
const char *hipGetErrorString(int code) { return code == 2 ? "out of memory, says the fake" : "no other words"; }
int hipGetLastError() {
    int code = last;
    last = 0;
    return code;
}
int hipGetDeviceCount(int *count) { return last = 100; }
int hipRuntimeGetVersion(int *version) {
    *version = 60342134;
    return 0;
}
int hipDeviceGetPCIBusId(char *to, int bytes, int device) {
    snprintf(to, bytes, "0000:c%d:00.0", device);
    return 0;
}
int hipExtGetLinkTypeAndHopCount(int first, int second, uint32_t *kind, uint32_t *hops) {
    *kind = first;
    *hops = second;
    return 0;
}
int hipDeviceEnablePeerAccess(int peer, unsigned flags) { return last = 704; }

int hipMalloc(void **to, size_t bytes) {
    if (bytes > 1000) return last = 2;
    *to = malloc(bytes);
    return 0;
}
int hipFree(void *memory) {
    printf("fake: free\n");
    free(memory);
    return 0;
}
int hipHostMalloc(void **to, size_t bytes, unsigned flags) {
    *to = memset(malloc(bytes), 0xee, bytes);
    return 0;
}
int hipHostFree(void *memory) {
    free(memory);
    return 0;
}
int hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    printf("fake: copy %zu kind %d\n", bytes, kind);
    memcpy(to, from, bytes);
    return 0;
}
int hipMemset(void *to, int value, size_t bytes) {
    memset(to, value, bytes);
    return 0;
}

int hipStreamCreateWithFlags(void **stream, unsigned flags) {
    printf("fake: stream flags %u\n", flags);
    *stream = "a stream";
    return 0;
}
int hipStreamSynchronize(void *stream) {
    printf("fake: wait for %s\n", stream ? (char *)stream : "the default stream");
    return 0;
}
int hipStreamQuery(void *stream) { return last = 600; }
int hipModuleLoadData(void **module, const void *image) {
    *module = "a module";
    return 0;
}
int hipModuleUnload(void *module) {
    printf("fake: unload %s\n", (char *)module);
    return 0;
}
int hipModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return 0;
}
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **arguments, void **extra) {
    printf("fake: launch %s grid %u %u %u block %u %u %u shared %u on %s: %d %g, extra %d\n", (char *)function, gx, gy, gz, bx, by,
           bz, shared, (char *)stream, *(int *)arguments[0], *(float *)arguments[1], extra != NULL);
    return 0;
}

int hipStreamEndCapture(void *stream, void **graph) {
    printf("fake: end of capture\n");
    *graph = "a graph";
    return 0;
}
int hipGraphDestroy(void *graph) {
    printf("fake: destroy %s\n", (char *)graph);
    return 0;
}
