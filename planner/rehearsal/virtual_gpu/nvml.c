/* NVML, libnvidia-ml.so.1: the cards as monitoring programs see them. A function that is not here is missing, which
 * pynvml reports as such. Signatures: NVML API reference (docs.nvidia.com/deploy/nvml-api). */
#include "virtual_gpu.h"

#include <stdio.h>
#include <string.h>

enum { INVALID_ARGUMENT = 2, NOT_SUPPORTED_BY_NVML = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

struct device { int card; };
static struct device devices[MOST_CARDS];

static int text(char *to, unsigned room, const char *value) { snprintf(to, room, "%s", value); return SUCCESS; }

EXPORT int nvmlInit_v2(void)
{
    vg_shared_table();
    for (int card = 0; card < MOST_CARDS; card++)
        devices[card].card = card;
    return SUCCESS;
}
EXPORT int nvmlInit(void) { return nvmlInit_v2(); }
EXPORT int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char *nvmlErrorString(int error)
{
    return error == SUCCESS ? "Success" : error == NOT_SUPPORTED_BY_NVML ? "Not Supported" : error == NOT_FOUND ? "Not Found" : "Error";
}
EXPORT int nvmlSystemGetDriverVersion(char *to, unsigned room) { return text(to, room, "0.0 (virtual)"); }
EXPORT int nvmlSystemGetNVMLVersion(char *to, unsigned room) { return text(to, room, "0.0 (virtual)"); }
EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ---- which card */

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)vg_all_cards(); return SUCCESS; }
EXPORT int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device)
{
    if ((int)index >= vg_all_cards())
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, struct device **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

/* As torch writes a device's uuid (16 bytes in hexadecimal), which is "vplan", zeros and the card's number. */
static void uuid_of(int card, char *to, unsigned room)
{
    snprintf(to, room, "GPU-76706c61-6e00-0000-0000-0000000000%02x", card);
}
EXPORT int nvmlDeviceGetUUID(struct device *device, char *to, unsigned room) { uuid_of(device->card, to, room); return SUCCESS; }
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **device)
{
    for (int card = 0; card < vg_all_cards(); card++) {
        char own[64];
        uuid_of(card, own, sizeof own);
        if (!strcmp(uuid, own) || !strcmp(uuid, own + 4)) {
            *device = &devices[card];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct device **device)
{
    unsigned domain = 0, bus = 1;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || bus < 1 || (int)bus > vg_all_cards())
        return NOT_FOUND;
    *device = &devices[bus - 1];
    return SUCCESS;
}
EXPORT int nvmlDeviceGetName(struct device *device, char *to, unsigned room) { return text(to, room, vg_card_name()); }
EXPORT int nvmlDeviceGetIndex(struct device *device, unsigned *index) { *index = (unsigned)device->card; return SUCCESS; }
EXPORT int nvmlDeviceGetMinorNumber(struct device *device, unsigned *number) { return nvmlDeviceGetIndex(device, number); }
EXPORT int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
    *major = vg_card_capability() / 10;
    *minor = vg_card_capability() % 10;
    return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
EXPORT int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci)
{
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)device->card + 1;
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetNvLinkState(struct device *device, unsigned link, unsigned *active) { *active = 0; return SUCCESS; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *device, unsigned link, struct pci *pci) { return NOT_SUPPORTED_BY_NVML; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *device, unsigned link, int *type) { return NOT_SUPPORTED_BY_NVML; }

/* torch asks before it makes an expandable segment, and takes no answer for a failure: the card is in no fabric (state 0). */
struct fabric { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; };
EXPORT int nvmlDeviceGetGpuFabricInfoV(struct device *device, struct fabric *fabric)
{
    memset(fabric->cluster, 0, sizeof fabric->cluster);
    fabric->status = SUCCESS;
    fabric->clique = 0;
    fabric->state = 0;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetTopologyCommonAncestor(struct device *one, struct device *other, unsigned *level)
{
    *level = 30; /* through the host bridge */
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) { *current = *pending = 0; return SUCCESS; }
EXPORT int nvmlDeviceGetComputeMode(struct device *device, unsigned *mode) { *mode = 0; return SUCCESS; }
EXPORT int nvmlDeviceGetPersistenceMode(struct device *device, unsigned *mode) { *mode = 1; return SUCCESS; }
EXPORT int nvmlDeviceGetDisplayActive(struct device *device, unsigned *active) { *active = 0; return SUCCESS; }

/* ---- what is used of it */

struct memory { unsigned long long total, unused, used; };
EXPORT int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory)
{
    memory->total = vg_card_bytes() + vg_card_reserved_bytes();
    memory->used = vg_used_of_card(device->card) + vg_card_reserved_bytes();
    memory->unused = memory->total - memory->used;
    return SUCCESS;
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, unused, used; };
EXPORT int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory)
{
    memory->reserved = vg_card_reserved_bytes();
    memory->total = vg_card_bytes() + memory->reserved;
    memory->used = vg_used_of_card(device->card);
    memory->unused = vg_card_bytes() - memory->used;
    return SUCCESS;
}

struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute_instance; };
struct process_v1 { unsigned pid; unsigned long long bytes; };

static unsigned processes(int card, struct process *list, unsigned room)
{
    unsigned count = 0;
    for (int i = 0; i < MOST_HOLDERS; i++) {
        const struct holder *holder = &vg_shared_table()->holders[i];
        if (!holder->pid || holder->ended || !holder->outside[card])
            continue;
        if (count < room)
            list[count] = (struct process){(unsigned)holder->pid, holder->used[card], ~0u, ~0u};
        count++;
    }
    return count;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process *list)
{
    unsigned room = list ? *count : 0;
    *count = processes(device->card, list, room);
    return *count > room ? TOO_SMALL : SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, struct process *list)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, list);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(struct device *device, unsigned *count, struct process_v1 *list)
{
    struct process all[MOST_HOLDERS];
    unsigned room = list ? *count : 0;
    *count = processes(device->card, all, MOST_HOLDERS);
    for (unsigned i = 0; i < *count && i < room; i++)
        list[i] = (struct process_v1){all[i].pid, all[i].bytes};
    return *count > room ? TOO_SMALL : SUCCESS;
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *device, unsigned *count, void *list) { *count = 0; return SUCCESS; }
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v2(struct device *device, unsigned *count, void *list) { *count = 0; return SUCCESS; }

/* ---- what a GPU at work shows; nothing here says anything about a real one */

EXPORT int nvmlDeviceGetUtilizationRates(struct device *device, unsigned *rates) { rates[0] = rates[1] = 0; return SUCCESS; }
EXPORT int nvmlDeviceGetTemperature(struct device *device, int sensor, unsigned *degrees) { *degrees = 40; return SUCCESS; }
EXPORT int nvmlDeviceGetPowerUsage(struct device *device, unsigned *milliwatts) { *milliwatts = 100000; return SUCCESS; }
EXPORT int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned *milliwatts) { *milliwatts = 400000; return SUCCESS; }
EXPORT int nvmlDeviceGetPowerManagementLimit(struct device *device, unsigned *milliwatts) { *milliwatts = 400000; return SUCCESS; }
EXPORT int nvmlDeviceGetClockInfo(struct device *device, int clock, unsigned *megahertz) { *megahertz = 1980; return SUCCESS; }
EXPORT int nvmlDeviceGetMaxClockInfo(struct device *device, int clock, unsigned *megahertz) { *megahertz = 1980; return SUCCESS; }
EXPORT int nvmlDeviceGetEccMode(struct device *device, unsigned *current, unsigned *pending) { *current = *pending = 0; return SUCCESS; }
EXPORT int nvmlDeviceGetCurrPcieLinkGeneration(struct device *device, unsigned *value) { *value = 4; return SUCCESS; }
EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(struct device *device, unsigned *value) { *value = 4; return SUCCESS; }
EXPORT int nvmlDeviceGetCurrPcieLinkWidth(struct device *device, unsigned *value) { *value = 16; return SUCCESS; }
EXPORT int nvmlDeviceGetMaxPcieLinkWidth(struct device *device, unsigned *value) { *value = 16; return SUCCESS; }
