/* NCCL: ranks of one machine meet in a file of the run's folder. What fits a place of 64 KiB is really exchanged and
 * reduced (losses, norms, sizes, seeds, pickled objects); larger collectives are neither made nor waited for. What one
 * rank sends to another is a file of that folder, up to the same size.
 *
 * Signatures and numbers: NCCL's API reference, "Types" (ncclDataType_t, ncclRedOp_t). */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef NCCL_RELEASE
#define NCCL_RELEASE 22809 /* 2.28.9; the builder gives the one that torch requires */
#endif

enum { PLACE = SMALL_BYTES, MOST_RANKS = 16, NAME = 128 };
enum { INTERNAL_ERROR = 3 };

struct id { char text[NAME]; };

/* A rank writes into one of two places in turn: when it writes the same one again, everybody has met once more since, and
 * so has read it. */
struct meeting {
    volatile long arrivals[MOST_RANKS];
    volatile int pid[MOST_RANKS];
    char place[MOST_RANKS][2][PLACE];
};
struct communicator {
    struct id id;
    struct meeting *meeting; /* NULL: one rank, or more than a meeting holds */
    int rank, ranks, device, splits;
    long met, sent[MOST_RANKS], received[MOST_RANKS]; /* messages, by the other rank */
    int64_t bytes;
};

EXPORT int ncclGetVersion(int *version) { *version = NCCL_RELEASE; return SUCCESS; }
EXPORT const char *ncclGetErrorString(int error) { return error ? "internal error" : "no error"; }
EXPORT const char *ncclGetLastError(void *communicator) { return ""; }

EXPORT int ncclGetUniqueId(struct id *id)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    static int made;
    memset(id, 0, sizeof *id);
    snprintf(id->text, NAME, "%d-%lld-%ld-%d", getpid(), (long long)now.tv_sec, now.tv_nsec, made++);
    return SUCCESS;
}

static struct meeting *meeting_of(const char *name)
{
    const char *folder = getenv("VPLAN_GPU_FOLDER");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/nccl-%s", folder, name) >= (int)sizeof path)
        return NULL;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0)
        return NULL;
    void *mapped = MAP_FAILED;
    if (!ftruncate(file, sizeof(struct meeting)))
        mapped = mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}

/* A communicator of one rank connects to nobody: with the context, a process that has one takes 484 MiB of an RTX 3090
   (NVIDIA/nccl#2366). So what NCCL itself takes is charged once, and further ones take nothing. DeepSpeed's pipelines
   make seven on one GPU. */
static int alone[MOST_CARDS];

static struct communicator *new_communicator(int ranks, struct id id, int rank, int device)
{
    struct communicator *communicator = calloc(1, sizeof *communicator);
    communicator->id = id;
    communicator->rank = rank;
    communicator->ranks = ranks;
    communicator->device = device;
    communicator->bytes = (int64_t)vg_number_from_environment("VPLAN_GPU_NCCL_BYTES", 0);
    if (ranks == 1 && alone[communicator->device]++)
        communicator->bytes = 0;
    vg_touch_card(communicator->device);
    vg_charge_outside(communicator->device, communicator->bytes);
    return communicator;
}

EXPORT int ncclCommInitRank(struct communicator **made, int ranks, struct id id, int rank)
{
    struct communicator *communicator = new_communicator(ranks, id, rank, vg_current_device());
    if (ranks > 1 && ranks <= MOST_RANKS)
        communicator->meeting = meeting_of(id.text);
    if (communicator->meeting)
        communicator->meeting->pid[rank] = getpid();
    vg_log_line("communicator %s: rank %d of %d", id.text, rank, ranks);
    *made = communicator;
    return SUCCESS;
}
EXPORT int ncclCommInitRankConfig(struct communicator **made, int ranks, struct id id, int rank, void *configuration)
{
    return ncclCommInitRank(made, ranks, id, rank);
}
EXPORT int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int ids, struct id *id, void *configuration)
{
    return ncclCommInitRank(made, ranks, *id, rank);
}
EXPORT int ncclCommInitAll(struct communicator **made, int ranks, const int *devices)
{
    struct id id;
    ncclGetUniqueId(&id);
    for (int rank = 0; rank < ranks; rank++) {
        made[rank] = new_communicator(ranks, id, rank, devices ? devices[rank] : rank); /* one process: no meeting */
    }
    return SUCCESS;
}
EXPORT int ncclCommCount(struct communicator *communicator, int *ranks) { *ranks = communicator->ranks; return SUCCESS; }
EXPORT int ncclCommUserRank(struct communicator *communicator, int *rank) { *rank = communicator->rank; return SUCCESS; }
EXPORT int ncclCommCuDevice(struct communicator *communicator, int *device) { *device = communicator->device; return SUCCESS; }
EXPORT int ncclCommGetAsyncError(struct communicator *communicator, int *error) { *error = SUCCESS; return SUCCESS; }
EXPORT int ncclCommFinalize(struct communicator *communicator) { return SUCCESS; }
EXPORT int ncclCommDestroy(struct communicator *communicator)
{
    if (communicator && communicator->bytes) {
        vg_charge_outside(communicator->device, -communicator->bytes);
        communicator->bytes = 0;
    }
    return SUCCESS;
}
EXPORT int ncclCommAbort(struct communicator *communicator) { return ncclCommDestroy(communicator); }
EXPORT int ncclMemAlloc(void **start, size_t bytes)
{
    *start = vg_device_allocate(vg_current_device(), bytes);
    return *start ? SUCCESS : INTERNAL_ERROR;
}
EXPORT int ncclMemFree(void *start) { vg_device_free(start); return SUCCESS; }

/* ---- meetings */

/* Which of the two places holds what everybody brought; -1 where nobody can be met. A rank that has died (out of memory,
 * most often) never comes: whoever waits for it ends with an error of its own. */
static int meet(struct communicator *communicator, const void *brought, size_t bytes)
{
    struct meeting *meeting = communicator->meeting;
    if (!meeting)
        return -1;
    long arrival = ++communicator->met;
    if (brought)
        memcpy(meeting->place[communicator->rank][arrival & 1], brought, bytes);
    __atomic_store_n(&meeting->arrivals[communicator->rank], arrival, __ATOMIC_RELEASE);
    for (int rank = 0; rank < communicator->ranks; rank++)
        for (long waited = 0; __atomic_load_n(&meeting->arrivals[rank], __ATOMIC_ACQUIRE) < arrival; waited++) {
            usleep(waited < 100 ? 50 : 1000);
            if (waited % 1000 == 999 && meeting->pid[rank] && kill(meeting->pid[rank], 0) && errno == ESRCH) {
                fprintf(stderr, "virtual gpu: rank %d waits for rank %d, which has ended\n", communicator->rank, rank);
                _exit(70);
            }
        }
    return (int)(arrival & 1);
}

/* ---- messages of one rank to another */

/* Nobody waits for what he sends, however much of it is on its way. Receiving waits; in a group, until its end, when all
 * that the group sends is there. A real rank would go on meanwhile: one that has to send something first for the message
 * to come stops waiting after this, and has no values. */
enum { PATIENCE_SECONDS = 60 };

struct receipt { struct communicator *communicator; void *to; size_t bytes; int from; struct receipt *next; };
static __thread struct receipt *receipts, **last_receipt;
static __thread int groups;

static int message_path(char *path, size_t room, struct communicator *communicator, int from, int to, long number)
{
    const char *folder = getenv("VPLAN_GPU_FOLDER");
    return folder && snprintf(path, room, "%s/nccl-%s-%d-%d-%ld", folder, communicator->id.text, from, to, number) < (int)room;
}

static void send_to(struct communicator *communicator, const void *from, size_t bytes, int peer)
{
    char path[4096], part[4100];
    long number = communicator->sent[peer]++;
    if (!message_path(path, sizeof path, communicator, communicator->rank, peer, number))
        return;
    snprintf(part, sizeof part, "%s~", path);
    FILE *file = fopen(part, "we");
    if (!file)
        return;
    size_t written = fwrite(from, 1, bytes, file);
    if (!fclose(file) && written == bytes)
        rename(part, path);
}

static void receive_from(struct communicator *communicator, void *to, size_t bytes, int peer)
{
    char path[4096];
    long number = communicator->received[peer]++;
    if (!message_path(path, sizeof path, communicator, peer, communicator->rank, number))
        return;
    time_t end = time(NULL) + PATIENCE_SECONDS;
    FILE *file;
    for (long waited = 0; !(file = fopen(path, "re")); waited++) {
        if (time(NULL) > end) {
            fprintf(stderr, "virtual gpu: nothing came from rank %d to rank %d in %d s\n", peer, communicator->rank,
                    PATIENCE_SECONDS);
            return;
        }
        usleep(waited < 100 ? 50 : 1000);
    }
    if (fread(to, 1, bytes, file) != bytes)
        fprintf(stderr, "virtual gpu: rank %d has sent less than rank %d receives\n", peer, communicator->rank);
    fclose(file);
    unlink(path);
}

EXPORT int ncclGroupStart(void)
{
    groups++;
    return SUCCESS;
}
EXPORT int ncclGroupEnd(void)
{
    if (groups > 0 && --groups)
        return SUCCESS;
    while (receipts) {
        struct receipt *receipt = receipts;
        receipts = receipt->next;
        receive_from(receipt->communicator, receipt->to, receipt->bytes, receipt->from);
        free(receipt);
    }
    return SUCCESS;
}

EXPORT int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **made, void *configuration)
{
    struct id id = parent->id;
    int rank = 0, ranks = 1;
    if (parent->meeting) {
        int own[2] = {color, key}, place = meet(parent, own, sizeof own);
        ranks = 0;
        for (int other = 0; other < parent->ranks; other++) {
            int theirs[2];
            memcpy(theirs, parent->meeting->place[other][place], sizeof theirs);
            if (theirs[0] != color)
                continue;
            ranks++;
            rank += theirs[1] < key || (theirs[1] == key && other < parent->rank);
        }
    }
    size_t used = strnlen(id.text, NAME - 1);
    snprintf(id.text + used, NAME - used, "-%d.%d", parent->splits++, color);
    *made = NULL;
    return color < 0 ? SUCCESS : ncclCommInitRank(made, ranks, id, rank);
}

/* ---- numbers of a collective */

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

static size_t width(int type)
{
    static const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)(sizeof WIDTHS / sizeof *WIDTHS) ? WIDTHS[type] : 1;
}

static double from_half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent ? 1 + fraction / 1024.0 : fraction / 1024.0;
    for (int power = exponent ? exponent - 15 : -14; power; power += power < 0 ? 1 : -1)
        value = power < 0 ? value / 2 : value * 2;
    return bits >> 15 ? -value : value;
}

static uint16_t to_half(double value)
{
    uint16_t sign = value < 0 ? 0x8000 : 0;
    int exponent = 15;
    value = value < 0 ? -value : value;
    if (!(value > 0))
        return sign;
    while (value >= 2 && exponent < 31) { value /= 2; exponent++; }
    while (value < 1 && exponent > 0) { value *= 2; exponent--; }
    if (exponent >= 31)
        return sign | 0x7c00;
    return exponent ? sign | (uint16_t)(exponent << 10) | (uint16_t)((value - 1) * 1024) : sign | (uint16_t)(value * 512);
}

static double get(const char *from, size_t index, int type)
{
    union { int8_t i8; uint8_t u8; int32_t i32; uint32_t u32; int64_t i64; uint64_t u64; uint16_t u16; float f; double d; } bits;
    memset(&bits, 0, sizeof bits);
    memcpy(&bits, from + index * width(type), width(type));
    switch (type) {
    case INT8: return bits.i8;
    case UINT8: return bits.u8;
    case INT32: return bits.i32;
    case UINT32: return bits.u32;
    case INT64: return (double)bits.i64;
    case UINT64: return (double)bits.u64;
    case HALF: return from_half(bits.u16);
    case FLOAT: return bits.f;
    case DOUBLE: return bits.d;
    case BFLOAT16: bits.u32 = (uint32_t)bits.u16 << 16; return bits.f;
    default: return bits.u8; /* fp8 is never reduced */
    }
}

static void put(char *to, size_t index, int type, double value)
{
    union { int8_t i8; uint8_t u8; int32_t i32; uint32_t u32; int64_t i64; uint64_t u64; uint16_t u16; float f; double d; } bits;
    memset(&bits, 0, sizeof bits);
    switch (type) {
    case INT8: bits.i8 = (int8_t)value; break;
    case INT32: bits.i32 = (int32_t)value; break;
    case UINT32: bits.u32 = (uint32_t)value; break;
    case INT64: bits.i64 = (int64_t)value; break;
    case UINT64: bits.u64 = (uint64_t)value; break;
    case HALF: bits.u16 = to_half(value); break;
    case FLOAT: bits.f = (float)value; break;
    case DOUBLE: bits.d = value; break;
    case BFLOAT16: bits.f = (float)value; bits.u32 >>= 16; break;
    default: bits.u8 = (uint8_t)value;
    }
    memcpy(to + index * width(type), &bits, width(type));
}

/* Sums of 64-bit integers stay exact up to 2**53, as counts and sizes are. Other operations than the five are torch's own
 * scaled sums, of gradients, whose values are not computed anyway. */
static double reduced(struct communicator *communicator, int place, size_t index, int type, int operation)
{
    double value = get(communicator->meeting->place[0][place], index, type);
    for (int rank = 1; rank < communicator->ranks; rank++) {
        double other = get(communicator->meeting->place[rank][place], index, type);
        if (operation == PRODUCT)
            value *= other;
        else if (operation == MAXIMUM)
            value = value > other ? value : other;
        else if (operation == MINIMUM)
            value = value < other ? value : other;
        else
            value += other;
    }
    return operation == AVERAGE ? value / communicator->ranks : value;
}

/* ---- collectives */

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, struct communicator *communicator,
                         void *stream)
{
    if (communicator->ranks == 1)
        vg_copy_memory(to, from, count * width(type));
    if (communicator->ranks == 1 || count * width(type) > PLACE)
        return SUCCESS;
    int place = meet(communicator, from, count * width(type));
    for (size_t i = 0; place >= 0 && i < count; i++)
        put(to, i, type, reduced(communicator, place, i, type, operation));
    return SUCCESS;
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                      struct communicator *communicator, void *stream)
{
    if (communicator->ranks == 1)
        vg_copy_memory(to, from, count * width(type));
    if (communicator->ranks == 1 || count * width(type) > PLACE)
        return SUCCESS;
    int place = meet(communicator, from, count * width(type));
    for (size_t i = 0; place >= 0 && communicator->rank == root && i < count; i++)
        put(to, i, type, reduced(communicator, place, i, type, operation));
    return SUCCESS;
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                             struct communicator *communicator, void *stream)
{
    size_t all = count * (size_t)communicator->ranks;
    if (communicator->ranks == 1)
        vg_copy_memory(to, from, count * width(type));
    if (communicator->ranks == 1 || all * width(type) > PLACE)
        return SUCCESS;
    int place = meet(communicator, from, all * width(type));
    size_t first = count * (size_t)communicator->rank;
    for (size_t i = 0; place >= 0 && i < count; i++)
        put(to, i, type, reduced(communicator, place, first + i, type, operation));
    return SUCCESS;
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *communicator, void *stream)
{
    size_t bytes = count * width(type);
    if (communicator->ranks == 1)
        vg_copy_memory(to, from, bytes);
    if (communicator->ranks == 1 || bytes > PLACE)
        return SUCCESS;
    int place = meet(communicator, from, bytes);
    for (int rank = 0; place >= 0 && rank < communicator->ranks; rank++)
        memcpy((char *)to + (size_t)rank * bytes, communicator->meeting->place[rank][place], bytes);
    return SUCCESS;
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *communicator,
                         void *stream)
{
    size_t bytes = count * width(type);
    if (communicator->ranks == 1)
        vg_copy_memory(to, from, bytes);
    if (communicator->ranks == 1 || bytes > PLACE)
        return SUCCESS;
    int place = meet(communicator, communicator->rank == root ? from : NULL, bytes);
    if (place >= 0)
        memcpy(to, communicator->meeting->place[root][place], bytes);
    return SUCCESS;
}
EXPORT int ncclBcast(void *data, size_t count, int type, int root, struct communicator *communicator, void *stream)
{
    return ncclBroadcast(data, data, count, type, root, communicator, stream);
}

EXPORT int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *communicator, void *stream)
{
    size_t bytes = count * width(type);
    if (bytes && bytes <= PLACE && communicator->meeting)
        send_to(communicator, from, bytes, peer);
    return SUCCESS;
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *communicator, void *stream)
{
    size_t bytes = count * width(type);
    if (!bytes || bytes > PLACE || !communicator->meeting)
        return SUCCESS;
    if (!groups) {
        receive_from(communicator, to, bytes, peer);
        return SUCCESS;
    }
    struct receipt *receipt = malloc(sizeof *receipt);
    if (!receipt)
        abort();
    *receipt = (struct receipt){communicator, to, bytes, peer, NULL};
    last_receipt = receipts ? last_receipt : &receipts;
    *last_receipt = receipt;
    last_receipt = &receipt->next;
    return SUCCESS;
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct communicator *communicator, void *stream)
{
    size_t bytes = count * width(type), all = bytes * (size_t)communicator->ranks;
    if (communicator->ranks == 1)
        vg_copy_memory(to, from, bytes);
    if (communicator->ranks == 1 || all > PLACE)
        return SUCCESS;
    int place = meet(communicator, from, all);
    for (int rank = 0; place >= 0 && rank < communicator->ranks; rank++)
        memcpy((char *)to + (size_t)rank * bytes,
               communicator->meeting->place[rank][place] + (size_t)communicator->rank * bytes, bytes);
    return SUCCESS;
}
