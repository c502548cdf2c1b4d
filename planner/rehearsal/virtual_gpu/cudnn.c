/* cuDNN. torch asks its backend (the graph API) for one plan per operation and for the workspace that plan needs.
 *
 * Numbers of descriptors, attributes and types: cuDNN's API reference, "Enumeration Types" (cudnnBackendDescriptorType_t,
 * cudnnBackendAttributeName_t, cudnnBackendAttributeType_t). Every graph has one engine with one configuration. */
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>

#ifndef CUDNN_RELEASE
#define CUDNN_RELEASE 91900 /* 9.19.0; the builder gives the one that torch requires */
#endif

EXPORT size_t cudnnGetVersion(void) { return CUDNN_RELEASE; }
EXPORT size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
EXPORT int cudnnGetProperty(int which, int *value) /* 0 major, 1 minor, 2 patch */
{
    *value = which == 0 ? CUDNN_RELEASE / 10000 : which == 1 ? CUDNN_RELEASE / 100 % 100 : CUDNN_RELEASE % 100;
    return SUCCESS;
}
EXPORT const char *cudnnGetErrorString(int error) { return error ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_SUCCESS"; }
EXPORT void cudnnGetLastErrorString(char *text, size_t room)
{
    if (room)
        *text = 0;
}

#define CREATES(name) EXPORT int name(void **handle) { *handle = calloc(1, 256); return SUCCESS; }
CREATES(cudnnCreate)
CREATES(cudnnCreateTensorDescriptor)
CREATES(cudnnCreateFilterDescriptor)
CREATES(cudnnCreateConvolutionDescriptor)
CREATES(cudnnCreateDropoutDescriptor)
CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateRNNDescriptor)
CREATES(cudnnCreateRNNDataDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateSpatialTransformerDescriptor)
CREATES(cudnnCreateCTCLossDescriptor)
CREATES(cudnnCreateLRNDescriptor)
CREATES(cudnnCreateReduceTensorDescriptor)
EXPORT int cudnnDestroy(void *handle) { free(handle); return SUCCESS; }

enum { CONVOLUTION_FORWARD = 10, CONVOLUTION_BACKWARD_FILTER = 11, CONVOLUTION_BACKWARD_DATA = 12 };
enum { TYPE_INT64 = 3, TYPE_VOID_POINTER = 6, TYPE_DESCRIPTOR = 15 };
enum {
    HEURISTIC_RESULTS = 202,
    CONFIGURATION_ENGINE = 300, CONFIGURATION_KNOBS = 302, CONFIGURATION_WORKSPACE = 303,
    PLAN_WORKSPACE = 402, PLAN_JSON = 405,
    ENGINE_KNOBS = 1302, ENGINE_NUMERICAL_NOTES = 1303, ENGINE_LAYOUTS = 1304, ENGINE_BEHAVIOUR_NOTES = 1305,
};

struct descriptor { int convolution; };

EXPORT int cudnnBackendCreateDescriptor(int type, struct descriptor **descriptor)
{
    *descriptor = calloc(1, 256);
    (*descriptor)->convolution = type >= CONVOLUTION_FORWARD && type <= CONVOLUTION_BACKWARD_DATA;
    return SUCCESS;
}
EXPORT int cudnnBackendDestroyDescriptor(struct descriptor *descriptor) { free(descriptor); return SUCCESS; }

/* A plan holds a configuration, which holds an engine, which holds a graph, which holds operations: all of them are of a
 * convolution if the operation is. */
EXPORT int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count, const void *values)
{
    if (type == TYPE_DESCRIPTOR && values)
        for (int64_t i = 0; i < count; i++) {
            const struct descriptor *part = ((struct descriptor *const *)values)[i];
            if (part && part->convolution)
                descriptor->convolution = 1;
        }
    return SUCCESS;
}

static int64_t workspace(const struct descriptor *descriptor)
{
    return descriptor->convolution ? (int64_t)vg_number_from_environment("VPLAN_GPU_CUDNN_BYTES", 0) : 0;
}

EXPORT int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, int type, int64_t room, int64_t *count, void *values)
{
    int64_t ignored;
    if (!count)
        count = &ignored;
    *count = 1;
    switch (name) {
    case HEURISTIC_RESULTS: /* the caller's own descriptor takes the result */
        if (values && room > 0 && *(struct descriptor **)values)
            (*(struct descriptor **)values)->convolution = descriptor->convolution;
        return SUCCESS;
    case CONFIGURATION_ENGINE:
        return SUCCESS;
    case CONFIGURATION_KNOBS: case ENGINE_KNOBS: case ENGINE_NUMERICAL_NOTES: case ENGINE_LAYOUTS: case ENGINE_BEHAVIOUR_NOTES:
        *count = 0;
        return SUCCESS;
    case CONFIGURATION_WORKSPACE: case PLAN_WORKSPACE:
        if (values)
            *(int64_t *)values = workspace(descriptor);
        return SUCCESS;
    case PLAN_JSON:
        if (values)
            *(char *)values = 0;
        return SUCCESS;
    }
    if (values && (type == TYPE_INT64 || type == TYPE_VOID_POINTER))
        *(int64_t *)values = 0;
    else if (values && type != TYPE_DESCRIPTOR)
        memset(values, 0, 4);
    return SUCCESS;
}
EXPORT int cudnnBackendExecute(void *handle, void *plan, void *variables) { vg_count_launch(); return SUCCESS; }
