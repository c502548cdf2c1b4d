/* CUDA's driver library, libcuda.so.1: what PyTorch and others call of it directly.
 *
 * Signatures and numbers follow the public reference (docs.nvidia.com, CUDA Driver API). Results are ints, handles
 * pointers, addresses 64-bit numbers. A name that is asked for and not here answers success (cuGetProcAddress below). */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t address;

static void *new_handle(void) { return calloc(1, 64); }

EXPORT int cuInit(unsigned flags) { return vg_card_count() ? SUCCESS : NO_DEVICE; }
EXPORT int cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }

/* ---- devices */

EXPORT int cuDeviceGetCount(int *count) { *count = vg_card_count(); return SUCCESS; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < vg_card_count() ? SUCCESS : INVALID_DEVICE; }
EXPORT int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "%s", vg_card_name()); return SUCCESS; }
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = vg_card_bytes(); return SUCCESS; }

/* CUdevice_attribute and the runtime's cudaDeviceAttr have the same numbers. What is not listed is 1: most of the rest
 * are yes-or-no questions about features that every card of the last years has. */
EXPORT int vg_card_attribute(int attribute)
{
    switch (attribute) {
    case 1: case 2: case 3: return 1024;             /* threads of a block, and in its x and y */
    case 4: return 64;                               /* its z */
    case 5: return 2147483647;                       /* grid x */
    case 6: case 7: return 65535;                    /* grid y, z */
    case 8: return 48 * 1024;                        /* shared memory of a block unless it opts in */
    case 9: return 64 * 1024;                        /* constant memory */
    case 10: return 32;                              /* warp */
    case 12: case 82: return 65536;                  /* registers of a block, of a multiprocessor */
    case 13: case 36: return 1980000;                /* clock and memory clock, kHz */
    case 16: return vg_card_processors();
    case 18: case 20: return 0;                      /* integrated; compute mode: default */
    case 37: return 384;                             /* bus width, bits */
    case 38: return 48 << 20;                        /* L2 cache */
    case 39: return vg_threads_of_processor();
    case 75: return vg_card_capability() / 10;
    case 76: return vg_card_capability() % 10;
    case 81: return (int)vg_shared_bytes_of_processor();
    case 97: return (int)vg_shared_bytes_of_block();
    case 103: case 128: return 0;                    /* sharing memory by file descriptor, by fabric handle */
    case 106: return vg_blocks_of_processor();
    case 116: case 132: return 0;                    /* GPUDirect RDMA, multicast */
    default: return 1;
    }
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = vg_card_attribute(attribute); return SUCCESS; }

EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    memset(uuid, 0, 16);
    memcpy(uuid, "vplan", 5);
    uuid[15] = (unsigned char)vg_physical_card(device);
    return SUCCESS;
}
EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
EXPORT int cuDeviceGetPCIBusId(char *id, int length, int device)
{
    snprintf(id, length, "0000:%02X:00.0", vg_physical_card(device) + 1);
    return SUCCESS;
}

/* ---- contexts: a device's primary one, as a handle that says which */

static void *context_of(int device) { return (void *)(size_t)(device + 1); }

EXPORT int cuCtxGetCurrent(void **context)
{
    *context = vg_has_context(vg_current_device()) ? context_of(vg_current_device()) : NULL;
    return SUCCESS;
}
EXPORT int cuCtxSetCurrent(void *context)
{
    if (context)
        vg_set_current_device((int)(size_t)context - 1);
    return SUCCESS;
}
EXPORT int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : SUCCESS; }
EXPORT int cuCtxGetDevice(int *device) { *device = vg_current_device(); return SUCCESS; }
EXPORT int cuCtxGetApiVersion(void *context, unsigned *version) { *version = 3020; return SUCCESS; }
EXPORT int cuCtxCreate_v2(void **context, unsigned flags, int device)
{
    vg_touch_card(device);
    vg_set_current_device(device);
    *context = context_of(device);
    return SUCCESS;
}
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    if (flags)
        *flags = 0;
    *active = vg_has_context(device);
    return SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    vg_touch_card(device);
    *context = context_of(device);
    return SUCCESS;
}

/* ---- memory */

EXPORT int cuMemGetInfo_v2(size_t *unused, size_t *all)
{
    *all = vg_card_bytes();
    *unused = vg_free_of_device(vg_current_device());
    return SUCCESS;
}
EXPORT int cuMemAlloc_v2(address *start, size_t bytes)
{
    *start = (address)vg_device_allocate(vg_current_device(), bytes);
    return *start ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT int cuMemFree_v2(address start) { return vg_device_free((void *)start); }
EXPORT int cuMemAllocManaged(address *start, size_t bytes, unsigned flags)
{
    /* Managed memory may exceed the card and moves between both: host memory here (bitsandbytes' paged optimizers). */
    *start = (address)vg_pinned_allocate(bytes);
    return *start ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT int cuMemHostAlloc(void **start, size_t bytes, unsigned flags)
{
    *start = vg_pinned_allocate(bytes);
    return *start ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT int cuMemFreeHost(void *start) { return vg_pinned_free(start); }
EXPORT int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) { return start && bytes ? vg_register(start, bytes) : 1; }
EXPORT int cuMemHostUnregister(void *start) { return vg_unregister(start); }
EXPORT int cuMemcpy(address to, address from, size_t bytes) { vg_copy_memory((void *)to, (void *)from, bytes); return SUCCESS; }
EXPORT int cuMemcpyAsync(address to, address from, size_t bytes, void *stream) { return cuMemcpy(to, from, bytes); }
EXPORT int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) { return cuMemcpy(to, (address)from, bytes); }
EXPORT int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) { return cuMemcpy((address)to, from, bytes); }
EXPORT int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) { return cuMemcpy(to, (address)from, bytes); }
EXPORT int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) { return cuMemcpy((address)to, from, bytes); }
EXPORT int cuMemsetD8_v2(address to, unsigned char value, size_t bytes) { vg_set_memory((void *)to, value, bytes); return SUCCESS; }
EXPORT int cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) { return cuMemsetD8_v2(to, value, bytes); }

/* CUpointer_attribute: 1 context, 2 memory type (1 host, 2 device), 3 and 4 the address on device and host, 9 device */
EXPORT int cuPointerGetAttribute(void *value, int attribute, address at)
{
    int device = vg_current_device(), on_device = vg_is_device((void *)at, &device);
    switch (attribute) {
    case 1: *(void **)value = context_of(device); break;
    case 2: *(unsigned *)value = on_device ? 2 : 1; break;
    case 3: case 4: *(address *)value = at; break;
    case 9: *(int *)value = device; break;
    default: *(int *)value = 0;
    }
    return SUCCESS;
}

/* ---- memory in two halves, addresses and what lies behind them (torch's expandable segments) */

struct physical { uint64_t bytes; int device; };

/* The head of CUmemAllocationProp: type, kinds of handle, then the location's type and the device. */
struct physical_request { int type, handle_types, location_type, device; };

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *request, int option)
{
    *bytes = 2 << 20;
    return SUCCESS;
}
EXPORT int cuMemAddressReserve(address *start, size_t bytes, size_t alignment, address wish, uint64_t flags)
{
    *start = (address)vg_reserve_addresses(vg_current_device(), bytes);
    return *start ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT int cuMemAddressFree(address start, size_t bytes)
{
    vg_release_addresses((void *)start, bytes);
    return SUCCESS;
}
EXPORT int cuMemCreate(address *handle, size_t bytes, const struct physical_request *request, uint64_t flags)
{
    int device = request ? request->device : vg_current_device();
    if (vg_charge(device, bytes))
        return OUT_OF_MEMORY;
    struct physical *physical = malloc(sizeof *physical);
    *physical = (struct physical){bytes, device};
    *handle = (address)physical;
    return SUCCESS;
}
EXPORT int cuMemRelease(address handle)
{
    struct physical *physical = (struct physical *)handle;
    vg_discharge(physical->device, physical->bytes);
    free(physical);
    return SUCCESS;
}
EXPORT int cuMemMap(address start, size_t bytes, size_t offset, address handle, uint64_t flags) { return SUCCESS; }
EXPORT int cuMemUnmap(address start, size_t bytes)
{
    if (madvise((void *)start, bytes, MADV_REMOVE))
        madvise((void *)start, bytes, MADV_DONTNEED);
    return SUCCESS;
}
EXPORT int cuMemSetAccess(address start, size_t bytes, const void *access, size_t count) { return SUCCESS; }

/* ---- kernels */

EXPORT int cuModuleLoadData(void **module, const void *image) { *module = new_handle(); return SUCCESS; }
EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values)
{
    return cuModuleLoadData(module, image);
}
EXPORT int cuModuleLoad(void **module, const char *path) { *module = new_handle(); return SUCCESS; }
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) { *function = new_handle(); return SUCCESS; }
EXPORT int cuLibraryLoadData(void **library, const void *code, int *a, void **b, unsigned c, int *d, void **e, unsigned f)
{
    *library = new_handle();
    return SUCCESS;
}
EXPORT int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = new_handle(); return SUCCESS; }
EXPORT int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return SUCCESS; }
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 32; return SUCCESS; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared)
{
    *blocks = 1;
    return SUCCESS;
}
EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **arguments, void **more)
{
    vg_count_launch();
    return SUCCESS;
}
EXPORT int cuLaunchKernelEx(const void *configuration, void *function, void **arguments, void **more)
{
    vg_count_launch();
    return SUCCESS;
}
EXPORT int cuStreamCreate(void **stream, unsigned flags) { *stream = new_handle(); return SUCCESS; }
EXPORT int cuEventCreate(void **event, unsigned flags) { *event = new_handle(); return SUCCESS; }
EXPORT int cuStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return SUCCESS; }
EXPORT int cuStreamBeginCapture_v2(void *stream, int mode) { return NOT_SUPPORTED; }

/* ---- errors and names */

EXPORT int cuGetErrorName(int error, const char **name)
{
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? "CUDA_ERROR" : "CUDA_SUCCESS";
    return SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char **text)
{
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == NOT_SUPPORTED ? "not possible on a virtual GPU" : error ? "error" : "no error";
    return SUCCESS;
}

static int succeed(void) { return SUCCESS; }

/* Names that stand for their second version today (cuda.h defines them so): a caller who asks for `cuMemAlloc` gets
 * `cuMemAlloc_v2`. */
static const char *const SECOND[] = {
    "cuCtxCreate", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDeviceGetUuid", "cuDeviceTotalMem", "cuGetProcAddress",
    "cuMemAlloc", "cuMemFree", "cuMemGetInfo", "cuMemcpyDtoH", "cuMemcpyDtoHAsync", "cuMemcpyHtoD", "cuMemcpyHtoDAsync",
    "cuMemsetD8", "cuStreamBeginCapture",
};

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    static void *own;
    if (!own) {
        Dl_info here;
        dladdr((void *)cuInit, &here);
        own = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    char second[128];
    snprintf(second, sizeof second, "%s_v2", name);
    *function = NULL;
    for (size_t i = 0; i < sizeof SECOND / sizeof *SECOND; i++)
        if (!strcmp(SECOND[i], name))
            *function = dlsym(own, second);
    if (!*function)
        *function = dlsym(own, name);
    if (!*function) {
        vg_log_line("%s is not here: it answers success", name);
        *function = (void *)succeed;
    }
    if (status)
        *status = 0;
    return SUCCESS;
}
EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
