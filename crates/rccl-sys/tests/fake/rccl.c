#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { char bytes[128]; } id_t_;
struct config { size_t size; unsigned magic, version; int blocking, others; };

static int background;

const char *ncclGetErrorString(int result) { return result == 2 ? "unhandled system error" : "another error"; }
const char *ncclGetLastError(void *communicator) { return communicator ? "" : "no route to the other ranks \n"; }
int ncclGetVersion(int *version) {
    *version = 22105;
    return 0;
}
int ncclGetUniqueId(id_t_ *id) {
    for (int i = 0; i < 128; i++) id->bytes[i] = i + 100;
    return 0;
}
int ncclCommInitRank(void **communicator, int ranks, id_t_ id, int rank) {
    int sum = 0;
    for (int i = 0; i < 128; i++) sum += (uint8_t)id.bytes[i] * (i + 1);
    printf("fake: rank %d of %d, id %d\n", rank, ranks, sum);
    *communicator = "a communicator";
    return 0;
}
int ncclCommInitRankConfig(void **communicator, int ranks, id_t_ id, int rank, struct config *config) {
    printf("fake: configured %zu %x %u blocking %d others %d, last of id %d\n", config->size, config->magic, config->version,
           config->blocking, config->others == INT_MIN, (uint8_t)id.bytes[127]);
    *communicator = "a background communicator";
    background = 7;
    return 7;
}
int ncclCommSplit(void *communicator, int color, int key, void **to, void *config) {
    printf("fake: split of %s, color %d, key %d\n", (char *)communicator, color, key);
    *to = color == -1 ? NULL : "a part";
    return 0;
}
int ncclCommGetAsyncError(void *communicator, int *result) {
    *result = background;
    background = 2;
    return 0;
}
int ncclCommCount(void *communicator, int *count) {
    *count = 2;
    return 0;
}
int ncclCommUserRank(void *communicator, int *rank) {
    *rank = 1;
    return 0;
}
int ncclCommAbort(void *communicator) {
    printf("fake: abort %s\n", (char *)communicator);
    return 0;
}
int ncclCommDestroy(void *communicator) {
    printf("fake: destroy %s\n", (char *)communicator);
    return 0;
}
int ncclGroupStart() {
    printf("fake: group\n");
    return 0;
}
int ncclGroupEnd() {
    printf("fake: end of group\n");
    return 0;
}
int ncclAllReduce(char *send, char *receive, size_t count, int type, int op, void *communicator, char *stream) {
    printf("fake: all-reduce %zu of type %d by %d from %s to %s on %s\n", count, type, op, send, receive, stream);
    return 0;
}
int ncclReduceScatter(char *send, char *receive, size_t count, int type, int op, void *communicator, char *stream) {
    printf("fake: reduce-scatter %zu of type %d by %d\n", count, type, op);
    return 0;
}
int ncclAllGather(char *send, char *receive, size_t count, int type, void *communicator, char *stream) {
    printf("fake: all-gather %zu of type %d\n", count, type);
    return 2;
}
int ncclReduce(char *send, char *receive, size_t count, int type, int op, int root, void *communicator, char *stream) {
    printf("fake: reduce %zu of type %d by %d for %d\n", count, type, op, root);
    return 0;
}
int ncclBroadcast(char *send, char *receive, size_t count, int type, int root, void *communicator, char *stream) {
    printf("fake: broadcast %zu of type %d from %d\n", count, type, root);
    return 0;
}
int ncclSend(char *send, size_t count, int type, int peer, void *communicator, char *stream) {
    printf("fake: send %zu of type %d to %d: %c\n", count, type, peer, *send);
    return 0;
}
int ncclRecv(char *receive, size_t count, int type, int peer, void *communicator, char *stream) {
    printf("fake: receive %zu of type %d from %d: %c\n", count, type, peer, *receive);
    return 0;
}
