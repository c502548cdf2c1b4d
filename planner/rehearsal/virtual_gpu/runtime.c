/* CUDA's runtime library, libcudart.so.12 or 13.
 *
 * Signatures and numbers follow the public reference (docs.nvidia.com, CUDA Runtime API). Records that callers allocate
 * are filled by the place of a field, in bytes from the start, as callers were compiled to read them. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern int vg_card_attribute(int attribute);
extern int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

typedef int result;

static __thread result last_error;
static result failed(result error) { return last_error = error; }
static void *new_handle(void) { return calloc(1, 64); }

EXPORT result cudaGetLastError(void)
{
    result error = last_error;
    last_error = SUCCESS;
    return error;
}
EXPORT result cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorName(result error)
{
    switch (error) {
    case SUCCESS: return "cudaSuccess";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case NOT_SUPPORTED: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
    }
}
EXPORT const char *cudaGetErrorString(result error)
{
    switch (error) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case NOT_SUPPORTED: return "operation not supported (on a virtual GPU)";
    default: return "unknown error";
    }
}

/* ---- devices */

EXPORT result cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
EXPORT result cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
EXPORT result cudaGetDeviceCount(int *count)
{
    *count = vg_card_count();
    return *count ? SUCCESS : failed(NO_DEVICE);
}
EXPORT result cudaGetDevice(int *device) { *device = vg_current_device(); return SUCCESS; }

/* Since CUDA 12 this initialises the device's context (CUDA Runtime API, cudaSetDevice). */
EXPORT result cudaSetDevice(int device)
{
    if (device < 0 || device >= vg_card_count())
        return failed(INVALID_DEVICE);
    vg_set_current_device(device);
    vg_touch_card(device);
    return SUCCESS;
}
EXPORT result cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = vg_card_attribute(attribute);
    return SUCCESS;
}
EXPORT result cudaDeviceGetPCIBusId(char *id, int length, int device)
{
    snprintf(id, length, "0000:%02X:00.0", vg_physical_card(device) + 1);
    return SUCCESS;
}
EXPORT result cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}
EXPORT result cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return SUCCESS; }

/* Places in cudaDeviceProp. CUDA 13 dropped the fields that were deprecated in 12 (clockRate, deviceOverlap,
 * kernelExecTimeoutEnabled, computeMode and others), which moved what stands behind them. */
enum {
    NAME = 0, UUID = 256, TOTAL_GLOBAL_MEM = 288, SHARED_PER_BLOCK = 296, REGISTERS_PER_BLOCK = 304, WARP = 308,
    MEMORY_PITCH = 312, THREADS_PER_BLOCK = 320, BLOCK_SIZE = 324, GRID_SIZE = 336,
#if CUDA_VERSION >= 13000
    CONSTANT_MEMORY = 352, MAJOR = 360, MINOR = 364, TEXTURE_ALIGNMENT = 368, PROCESSORS = 384, MAPS_HOST_MEMORY = 392,
    CONCURRENT_KERNELS = 560, PCI_BUS = 568, COPY_ENGINES = 584, UNIFIED_ADDRESSES = 588, BUS_WIDTH = 592, L2_BYTES = 596,
    THREADS_PER_PROCESSOR = 604, STREAM_PRIORITIES = 608, SHARED_PER_PROCESSOR = 624, REGISTERS_PER_PROCESSOR = 632,
    MANAGED_MEMORY = 636, COOPERATIVE_LAUNCH = 668, SHARED_OPT_IN = 672, BLOCKS_PER_PROCESSOR = 688, PROPERTIES = 1008
#else
    CONSTANT_MEMORY = 352, MAJOR = 360, MINOR = 364, TEXTURE_ALIGNMENT = 368, PROCESSORS = 388, MAPS_HOST_MEMORY = 400,
    CONCURRENT_KERNELS = 576, PCI_BUS = 584, COPY_ENGINES = 600, UNIFIED_ADDRESSES = 604, BUS_WIDTH = 612, L2_BYTES = 616,
    THREADS_PER_PROCESSOR = 624, STREAM_PRIORITIES = 628, SHARED_PER_PROCESSOR = 640, REGISTERS_PER_PROCESSOR = 648,
    MANAGED_MEMORY = 652, COOPERATIVE_LAUNCH = 688, SHARED_OPT_IN = 696, BLOCKS_PER_PROCESSOR = 712, PROPERTIES = 1032
#endif
};

static void put_int(char *record, int place, int value) { memcpy(record + place, &value, sizeof value); }
static void put_size(char *record, int place, size_t value) { memcpy(record + place, &value, sizeof value); }

static result properties(char *record, int device)
{
    if (device < 0 || device >= vg_card_count())
        return failed(INVALID_DEVICE);
    memset(record, 0, PROPERTIES);
    snprintf(record + NAME, 256, "%s", vg_card_name());
    memcpy(record + UUID, "vplan", 5);
    record[UUID + 15] = (char)vg_physical_card(device);
    put_size(record, TOTAL_GLOBAL_MEM, vg_card_bytes());
    put_size(record, SHARED_PER_BLOCK, (size_t)vg_card_attribute(8));
    put_int(record, REGISTERS_PER_BLOCK, vg_card_attribute(12));
    put_int(record, WARP, vg_card_attribute(10));
    put_size(record, MEMORY_PITCH, 2147483647);
    put_int(record, THREADS_PER_BLOCK, vg_card_attribute(1));
    for (int axis = 0; axis < 3; axis++) {
        put_int(record, BLOCK_SIZE + 4 * axis, vg_card_attribute(2 + axis));
        put_int(record, GRID_SIZE + 4 * axis, vg_card_attribute(5 + axis));
    }
    put_size(record, CONSTANT_MEMORY, (size_t)vg_card_attribute(9));
    put_int(record, MAJOR, vg_card_attribute(75));
    put_int(record, MINOR, vg_card_attribute(76));
    put_size(record, TEXTURE_ALIGNMENT, 512);
    put_int(record, PROCESSORS, vg_card_attribute(16));
    put_int(record, MAPS_HOST_MEMORY, 1);
    put_int(record, CONCURRENT_KERNELS, 1);
    put_int(record, PCI_BUS, vg_physical_card(device) + 1);
    put_int(record, COPY_ENGINES, 2);
    put_int(record, UNIFIED_ADDRESSES, 1);
    put_int(record, BUS_WIDTH, vg_card_attribute(37));
    put_int(record, L2_BYTES, vg_card_attribute(38));
    put_int(record, THREADS_PER_PROCESSOR, vg_card_attribute(39));
    put_int(record, STREAM_PRIORITIES, 1);
    put_size(record, SHARED_PER_PROCESSOR, (size_t)vg_card_attribute(81));
    put_int(record, REGISTERS_PER_PROCESSOR, vg_card_attribute(82));
    put_int(record, MANAGED_MEMORY, 1);
    put_int(record, COOPERATIVE_LAUNCH, 1);
    put_size(record, SHARED_OPT_IN, (size_t)vg_card_attribute(97));
    put_int(record, BLOCKS_PER_PROCESSOR, vg_card_attribute(106));
    return SUCCESS;
}

#if CUDA_VERSION >= 13000
EXPORT result cudaGetDeviceProperties(void *record, int device) { return properties(record, device); }
#else
EXPORT result cudaGetDeviceProperties_v2(void *record, int device) { return properties(record, device); }
#endif

/* ---- memory */

EXPORT result cudaMalloc(void **start, size_t bytes)
{
    *start = bytes ? vg_device_allocate(vg_current_device(), bytes) : NULL;
    return *start || !bytes ? SUCCESS : failed(OUT_OF_MEMORY);
}

/* cudaFree(0) is how programs ask for a context. */
EXPORT result cudaFree(void *start)
{
    if (!start)
        vg_touch_card(vg_current_device());
    return vg_device_free(start) ? failed(1) : SUCCESS;
}
EXPORT result cudaMallocAsync(void **start, size_t bytes, void *stream) { return cudaMalloc(start, bytes); }
EXPORT result cudaMallocFromPoolAsync(void **start, size_t bytes, void *pool, void *stream) { return cudaMalloc(start, bytes); }
EXPORT result cudaFreeAsync(void *start, void *stream) { return cudaFree(start); }
EXPORT result cudaMallocPitch(void **start, size_t *pitch, size_t width, size_t height)
{
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc(start, *pitch * height);
}
EXPORT result cudaHostAlloc(void **start, size_t bytes, unsigned flags)
{
    *start = vg_pinned_allocate(bytes);
    return *start ? SUCCESS : failed(OUT_OF_MEMORY);
}
EXPORT result cudaMallocHost(void **start, size_t bytes) { return cudaHostAlloc(start, bytes, 0); }
EXPORT result cudaFreeHost(void *start) { vg_pinned_free(start); return SUCCESS; }

EXPORT result cudaHostRegister(void *start, size_t bytes, unsigned flags)
{
    int code = start && bytes ? vg_register(start, bytes) : 1;
    return code ? failed(code) : SUCCESS;
}
EXPORT result cudaHostUnregister(void *start)
{
    int code = vg_unregister(start);
    return code ? failed(code) : SUCCESS;
}

/* Managed memory may exceed the card and moves between both: host memory here (bitsandbytes' paged optimizers). */
EXPORT result cudaMallocManaged(void **start, size_t bytes, unsigned flags) { return cudaHostAlloc(start, bytes, 0); }
EXPORT result cudaHostGetDevicePointer(void **on_device, void *on_host, unsigned flags)
{
    *on_device = on_host;
    return SUCCESS;
}
EXPORT result cudaMemGetInfo(size_t *unused, size_t *all)
{
    vg_touch_card(vg_current_device());
    *all = vg_card_bytes();
    *unused = vg_free_of_device(vg_current_device());
    return SUCCESS;
}

/* cudaPointerAttributes: type (0 unregistered, 1 host, 2 device), device, address on the device, address on the host;
 * CUDA 13 has reserved room behind them. */
struct pointer_attributes {
    int type, device;
    void *on_device, *on_host;
#if CUDA_VERSION >= 13000
    long reserved[8];
#endif
};
EXPORT result cudaPointerGetAttributes(struct pointer_attributes *attributes, const void *at)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->device = vg_current_device();
    if (vg_is_device(at, &attributes->device)) {
        attributes->type = 2;
        attributes->on_device = (void *)at;
        return SUCCESS;
    }
    attributes->type = vg_is_pinned(at) ? 1 : 0;
    attributes->on_device = attributes->type ? (void *)at : NULL;
    attributes->on_host = (void *)at;
    return SUCCESS;
}

EXPORT result cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { vg_copy_memory(to, from, bytes); return SUCCESS; }
EXPORT result cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{
    return cudaMemcpy(to, from, bytes, kind);
}
EXPORT result cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream)
{
    return cudaMemcpy(to, from, bytes, 4);
}
EXPORT result cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                int kind, void *stream)
{
    for (size_t row = 0; width * height <= SMALL_BYTES && row < height; row++)
        vg_copy_memory((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return SUCCESS;
}
EXPORT result cudaMemset(void *to, int value, size_t bytes) { vg_set_memory(to, value, bytes); return SUCCESS; }
EXPORT result cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { return cudaMemset(to, value, bytes); }

/* Global variables of kernels (random number generators' tables): one place for all, which no launch reads. */
EXPORT result cudaGetSymbolAddress(void **at, const void *symbol)
{
    static void *place;
    if (!place)
        place = vg_reserve_addresses(vg_current_device(), 4 << 20);
    *at = place;
    return SUCCESS;
}

/* ---- streams and events: all work is done when it is asked for */

EXPORT result cudaStreamCreate(void **stream) { *stream = new_handle(); return SUCCESS; }
EXPORT result cudaStreamCreateWithFlags(void **stream, unsigned flags) { return cudaStreamCreate(stream); }
EXPORT result cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
EXPORT result cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return SUCCESS; }
EXPORT result cudaStreamAddCallback(void *stream, void (*call)(void *, result, void *), void *data, unsigned flags)
{
    call(stream, SUCCESS, data);
    return SUCCESS;
}
EXPORT result cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) { call(data); return SUCCESS; }

static double milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}
EXPORT result cudaEventCreate(double **event) { *event = new_handle(); return SUCCESS; }
EXPORT result cudaEventCreateWithFlags(double **event, unsigned flags) { return cudaEventCreate(event); }
EXPORT result cudaEventDestroy(double *event) { free(event); return SUCCESS; }
EXPORT result cudaEventRecord(double *event, void *stream)
{
    if (event)
        *event = milliseconds();
    return SUCCESS;
}
EXPORT result cudaEventRecordWithFlags(double *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
EXPORT result cudaEventElapsedTime(float *passed, double *start, double *end)
{
    *passed = (float)(*end - *start);
    if (*passed <= 0) /* callers divide by it */
        *passed = 0.001f;
    return SUCCESS;
}

/* ---- graphs are refused: what a graph's pool keeps is decided while kernels are captured */

EXPORT result cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
EXPORT result cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
#if CUDA_VERSION >= 13000
EXPORT result cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void **nodes,
                                       const void **edges, size_t *count)
#else
EXPORT result cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void **nodes,
                                          size_t *count)
#endif
{
    *status = 0;
    if (id)
        *id = 0;
    if (count)
        *count = 0;
    return SUCCESS;
}
EXPORT result cudaStreamBeginCapture(void *stream, int mode) { return failed(NOT_SUPPORTED); }
EXPORT result cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) { return failed(NOT_SUPPORTED); }
EXPORT result cudaIpcGetMemHandle(void *handle, void *start) { return failed(NOT_SUPPORTED); }

/* ---- kernels */

#ifndef ARCHITECTURES
#define ARCHITECTURES 0
#endif

/* The architecture that torch's kernels run as on this card: of those that torch was compiled for, the highest that the
 * card can run. Code for 8.6 runs on 8.9, and there CUB looks for the tuning of 8.6, and finds none for 8.9. */
static int architecture_of_kernels(void)
{
    static const int COMPILED[] = {ARCHITECTURES};
    int highest = 0;
    for (size_t i = 0; i < sizeof COMPILED / sizeof *COMPILED; i++)
        if (COMPILED[i] <= vg_card_capability() && COMPILED[i] > highest)
            highest = COMPILED[i];
    return highest ? highest : vg_card_capability();
}

/* The head of cudaFuncAttributes that anybody reads: bytes 24 to 47. */
EXPORT result cudaFuncGetAttributes(char *attributes, const void *function)
{
    memset(attributes, 0, 144);
    put_int(attributes, 24, 1024);                         /* threads of a block */
    put_int(attributes, 28, 32);                           /* registers */
    put_int(attributes, 32, architecture_of_kernels());       /* PTX version */
    put_int(attributes, 36, architecture_of_kernels());       /* binary version */
    put_int(attributes, 44, (int)vg_shared_bytes_of_block()); /* dynamic shared memory */
    return SUCCESS;
}
EXPORT result cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                                     unsigned flags)
{
    *blocks = threads > 0 ? vg_threads_of_processor() / threads : 1;
    if (*blocks < 1)
        *blocks = 1;
    if (*blocks > vg_blocks_of_processor())
        *blocks = vg_blocks_of_processor();
    return SUCCESS;
}
EXPORT result cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

struct size3 { unsigned x, y, z; };

EXPORT result cudaLaunchKernel(const void *function, struct size3 grid, struct size3 block, void **arguments, size_t shared,
                               void *stream)
{
    vg_count_launch();
    return SUCCESS;
}
EXPORT result __cudaLaunchKernel(void *kernel, struct size3 grid, struct size3 block, void **arguments, size_t shared, void *stream)
{
    vg_count_launch();
    return SUCCESS;
}
EXPORT result cudaLaunchKernelExC(const void *configuration, const void *function, void **arguments) { vg_count_launch(); return SUCCESS; }
EXPORT result cudaLaunchCooperativeKernel(const void *function, struct size3 grid, struct size3 block, void **arguments,
                                          size_t shared, void *stream)
{
    vg_count_launch();
    return SUCCESS;
}
EXPORT result __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return SUCCESS; }

/* `kernel<<<grid, block, shared, stream>>>(...)` pushes its configuration and pops it inside the kernel's host stub. */
static __thread struct { struct size3 grid, block; size_t shared; void *stream; } pushed;

EXPORT unsigned __cudaPushCallConfiguration(struct size3 grid, struct size3 block, size_t shared, void *stream)
{
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
EXPORT result __cudaPopCallConfiguration(struct size3 *grid, struct size3 *block, size_t *shared, void **stream)
{
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *stream = pushed.stream;
    return SUCCESS;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) { return new_handle(); }
EXPORT char __cudaInitModule(void **handle) { return 1; }

EXPORT result cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *status)
{
    return cuGetProcAddress_v2(name, function, (int)version, flags, status);
}
EXPORT result cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *status)
{
    return cuGetProcAddress_v2(name, function, CUDA_VERSION, flags, status);
}
