/* NVRTC, CUDA's run-time compiler: torch's own kernels of that kind (jiterator) compile to nothing and run as nothing. */
#include "virtual_gpu.h"

#include <stdlib.h>

EXPORT int nvrtcVersion(int *major, int *minor)
{
    *major = CUDA_VERSION / 1000;
    *minor = CUDA_VERSION % 1000 / 10;
    return SUCCESS;
}
EXPORT int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                              const char *const *names)
{
    *program = calloc(1, 64);
    return SUCCESS;
}
EXPORT int nvrtcGetPTXSize(void *program, size_t *bytes) { *bytes = 16; return SUCCESS; }
EXPORT int nvrtcGetCUBINSize(void *program, size_t *bytes) { *bytes = 16; return SUCCESS; }
EXPORT int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return SUCCESS; }
EXPORT int nvrtcGetLoweredName(void *program, const char *expression, const char **name) { *name = "kernel"; return SUCCESS; }
EXPORT const char *nvrtcGetErrorString(int error) { return error ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }
