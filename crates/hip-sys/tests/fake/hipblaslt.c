#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct algorithm { uint8_t data[16]; size_t most; };
struct found { struct algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };

int hipblasLtCreate(void **handle) {
    *handle = "a handle";
    return 0;
}
int hipblasLtGetVersion(void *handle, int *version) {
    *version = 100202;
    return 0;
}
int hipblasLtMatmulDescCreate(void **description, int compute, int scale) {
    *description = "a product";
    return 0;
}
int hipblasLtMatmulDescSetAttribute(void *description, int attribute, const void *value, size_t bytes) {
    printf("fake: product attribute %d = %d, %zu bytes\n", attribute, *(int *)value, bytes);
    return 0;
}
int hipblasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (stride < (int64_t)rows) return 3;
    char name[64];
    snprintf(name, sizeof name, "%dx%d type %d", (int)rows, (int)columns, type);
    *layout = strdup(name);
    return 0;
}
int hipblasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t bytes) {
    printf("fake: layout attribute %d = %d, %zu bytes\n", attribute, *(int *)value, bytes);
    return 0;
}
int hipblasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t bytes) {
    printf("fake: preference attribute %d = %d, %zu bytes\n", attribute, (int)*(uint64_t *)value, bytes);
    return 0;
}
int hipblasLtMatmulAlgoGetHeuristic(void *handle, void *product, char *a, char *b, char *c, char *d, void *preference, int asked,
                                    struct found *results, int *count) {
    memset(results, 0, asked * sizeof *results);
    results[0].algorithm.data[0] = 42;
    results[0].workspace = 100;
    results[0].waves = 0.5;
    results[1].state = 7;
    *count = strcmp(d, "1x1 type 0") ? 2 : 0;
    return 0;
}
int hipblasLtMatmul(void *handle, char *product, float *alpha, char *A, char *a, char *B, char *b, float *beta, char *C, char *c,
                    char *D, char *d, struct algorithm *algorithm, char *workspace, size_t bytes, char *stream) {
    printf("fake: %s of %s: %g %s (%s) %s (%s) + %g %s (%s) -> %s (%s), algorithm %d, %s of %zu, stream %d\n", product,
           (char *)handle, *alpha, A, a, B, b, *beta, C, c, D, d, algorithm->data[0], workspace, bytes, stream != NULL);
    return 6;
}
