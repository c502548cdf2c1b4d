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

/* How large a workspace is: none. Left alone, the answer would be whatever stood there, and be allocated (cuSOLVER
 * reference, "cuSolverDN Reference"; the X functions have a size on the device and one on the host). */
#define FOR_REAL_TYPES(define) define(S) define(D)
#define GEQRF(type) EXPORT int cusolverDn##type##geqrf_bufferSize( \
    void *handle, int m, int n, void *a, int lda, int *size) { *size = 0; return SUCCESS; }
#define GETRF(type) EXPORT int cusolverDn##type##getrf_bufferSize( \
    void *handle, int m, int n, void *a, int lda, int *size) { *size = 0; return SUCCESS; }
#define ORGQR(type) EXPORT int cusolverDn##type##orgqr_bufferSize( \
    void *handle, int m, int n, int k, void *a, int lda, void *tau, int *size) { *size = 0; return SUCCESS; }
#define POTRF(type) EXPORT int cusolverDn##type##potrf_bufferSize( \
    void *handle, int uplo, int n, void *a, int lda, int *size) { *size = 0; return SUCCESS; }
#define SYEVD(type) EXPORT int cusolverDn##type##syevd_bufferSize( \
    void *handle, int job, int uplo, int n, void *a, int lda, void *w, int *size) { *size = 0; return SUCCESS; }
#define GESVD(type) EXPORT int cusolverDn##type##gesvd_bufferSize( \
    void *handle, int m, int n, int *size) { *size = 0; return SUCCESS; }
#define SYEVJ(type) EXPORT int cusolverDn##type##syevjBatched_bufferSize( \
    void *handle, int job, int uplo, int n, void *a, int lda, void *w, int *size) { *size = 0; return SUCCESS; }
#define GESVDJ(type) EXPORT int cusolverDn##type##gesvdj_bufferSize( \
    void *handle, int job, int thin, int m, int n, void *a, int lda, void *s, void *u, int u_lead, void *v, int v_lead, \
    int *size) { *size = 0; return SUCCESS; }
#define GESVDJ_BATCHED(type) EXPORT int cusolverDn##type##gesvdjBatched_bufferSize( \
    void *handle, int job, int m, int n, void *a, int lda, void *s, void *u, int u_lead, void *v, int v_lead, int *size) \
    { *size = 0; return SUCCESS; }
FOR_REAL_TYPES(GEQRF)
FOR_REAL_TYPES(GETRF)
FOR_REAL_TYPES(ORGQR)
FOR_REAL_TYPES(POTRF)
FOR_REAL_TYPES(SYEVD)
FOR_REAL_TYPES(GESVD)
FOR_REAL_TYPES(SYEVJ)
FOR_REAL_TYPES(GESVDJ)
FOR_REAL_TYPES(GESVDJ_BATCHED)

static int no_workspaces(size_t *device, size_t *host)
{
    *device = *host = 0;
    return SUCCESS;
}

EXPORT int cusolverDnXgeqrf_bufferSize(void *handle, void *params, int64_t m, int64_t n, int a_type, void *a, int64_t lda,
                                       int tau_type, void *tau, int compute_type, size_t *device, size_t *host)
{
    return no_workspaces(device, host);
}
EXPORT int cusolverDnXpotrf_bufferSize(void *handle, void *params, int uplo, int64_t n, int a_type, void *a, int64_t lda,
                                       int compute_type, size_t *device, size_t *host)
{
    return no_workspaces(device, host);
}
EXPORT int cusolverDnXsyevd_bufferSize(void *handle, void *params, int job, int uplo, int64_t n, int a_type, void *a,
                                       int64_t lda, int w_type, void *w, int compute_type, size_t *device, size_t *host)
{
    return no_workspaces(device, host);
}
EXPORT int cusolverDnXsyevBatched_bufferSize(void *handle, void *params, int job, int uplo, int64_t n, int a_type, void *a,
                                             int64_t lda, int w_type, void *w, int compute_type, size_t *device,
                                             size_t *host, int64_t batch)
{
    return no_workspaces(device, host);
}
#endif
