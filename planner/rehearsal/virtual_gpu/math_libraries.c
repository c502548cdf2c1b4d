/* cuBLAS, cuBLASLt, cuSPARSE and cuSOLVER: handles, and cuBLASLt's choice of an algorithm. One library at a time is made of
 * this file (-DCUBLAS, ...); everything else that torch asks of them answers success without doing anything. */
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>

static int new_handle(void **handle)
{
    *handle = calloc(1, 4096);
    return SUCCESS;
}

#ifdef CUBLAS
static int math_mode;

EXPORT int cublasCreate_v2(void **handle) { return new_handle(handle); }
EXPORT int cublasSetMathMode(void *handle, int mode) { math_mode = mode; return SUCCESS; }
EXPORT int cublasGetMathMode(void *handle, int *mode) { *mode = math_mode; return SUCCESS; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return SUCCESS; } /* scalars on the host */
EXPORT int cublasGetVersion_v2(void *handle, int *version)
{
    /* 130100 for 13.1: major and minor number of CUDA */
    *version = CUDA_VERSION / 1000 * 10000 + CUDA_VERSION % 1000 / 10 * 100;
    return SUCCESS;
}
EXPORT int cublasGetProperty(int which, int *value) /* 0 major, 1 minor, 2 patch */
{
    *value = which == 0 ? CUDA_VERSION / 1000 : which == 1 ? CUDA_VERSION % 1000 / 10 : 0;
    return SUCCESS;
}
#endif

#ifdef CUBLASLT
EXPORT size_t cublasLtGetVersion(void) { return CUDA_VERSION / 1000 * 10000 + CUDA_VERSION % 1000 / 10 * 100; }
EXPORT int cublasLtCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatmulDescCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatrixLayoutCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatmulPreferenceCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatrixTransformDescCreate(void **handle) { return new_handle(handle); }

/* cublasLtMatmulHeuristicResult_t: the algorithm, the workspace it wants, and whether it can be used (0: yes). The
 * workspace itself is torch's own, of a fixed size (aten/src/ATen/cuda/CUDABlas.cpp), whatever is wanted here. */
struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                          int wanted, struct heuristic *results, int *count)
{
    memset(results, 0, sizeof *results);
    *count = 1;
    return SUCCESS;
}
#endif

#ifdef CUSPARSE
EXPORT int cusparseCreate(void **handle) { return new_handle(handle); }
#endif

#ifdef CUSOLVER
EXPORT int cusolverDnCreate(void **handle) { return new_handle(handle); }
#endif
