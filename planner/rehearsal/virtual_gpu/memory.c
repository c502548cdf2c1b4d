/* Addresses of the cards and of pinned host memory, and copies between them.
 *
 * Both are shared mappings, so that the kernel counts what is touched of them as shared memory: the rest of a process is
 * then its host RAM. Pages that nobody touches cost nothing. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* 4 TiB for each card: expandable segments reserve 9/8 of the card for every stream and pool (c10/cuda/
 * CUDACachingAllocator.cpp, ExpandableSegment). */
#define CARD_SPACE (4ULL << 40)
#define SPACE (MOST_CARDS * CARD_SPACE)
#define PAGE (2ULL << 20) /* what cudaMalloc hands out physically, and the granularity of cuMemCreate */

struct range { char *start; uint64_t bytes; int shared; };
struct ranges { struct range *items; int count, room; };
struct allocation { char *start; uint64_t bytes; int device; struct allocation *next; };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char *space;
static uint64_t next_address[MOST_CARDS]; /* offset in the card's part; below it all was handed out once */
static struct ranges released[MOST_CARDS];
static struct allocation *allocations[4096];
static struct ranges pinned, registered;

static __thread int device_of_thread;
EXPORT int vg_current_device(void) { return device_of_thread; }
EXPORT void vg_set_current_device(int device) { device_of_thread = device; }

static uint64_t round_up(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static void add_range(struct ranges *list, char *start, uint64_t bytes, int shared)
{
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 64;
        list->items = realloc(list->items, (size_t)list->room * sizeof *list->items);
        if (!list->items)
            abort();
    }
    list->items[list->count++] = (struct range){start, bytes, shared};
}

static void map_space(void)
{
    if (space)
        return;
    int protection = PROT_READ | PROT_WRITE;
    void *mapped = mmap(NULL, SPACE, protection, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) /* RAM of the process then counts what is touched of the card too */
        mapped = mmap(NULL, SPACE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        fprintf(stderr, "virtual gpu: no %llu TiB of address space (%s); is there a limit (ulimit -v)?\n",
                (unsigned long long)(SPACE >> 40), strerror(errno));
        abort();
    }
    space = (char *)(round_up((uint64_t)mapped));
}

/* A released range of exactly this size, else fresh addresses, else a part of a larger released one. */
static char *take_addresses(int card, uint64_t bytes)
{
    map_space();
    struct ranges *list = &released[card];
    for (int i = list->count - 1; i >= 0; i--)
        if (list->items[i].bytes == bytes) {
            char *start = list->items[i].start;
            list->items[i] = list->items[--list->count];
            return start;
        }
    if (next_address[card] + bytes + PAGE <= CARD_SPACE) {
        char *start = space + card * CARD_SPACE + next_address[card];
        next_address[card] += bytes;
        return start;
    }
    for (int i = 0; i < list->count; i++)
        if (list->items[i].bytes > bytes) {
            char *start = list->items[i].start;
            list->items[i].start += bytes;
            list->items[i].bytes -= bytes;
            return start;
        }
    return NULL;
}

/* MADV_REMOVE gives the touched pages of a shared mapping back; what is allocated there next reads zero. */
static void forget(void *start, uint64_t bytes)
{
    if (madvise(start, bytes, MADV_REMOVE))
        madvise(start, bytes, MADV_DONTNEED);
}

EXPORT void *vg_reserve_addresses(int device, uint64_t bytes)
{
    pthread_mutex_lock(&guard);
    void *start = take_addresses(vg_physical_card(device), round_up(bytes));
    pthread_mutex_unlock(&guard);
    return start;
}

EXPORT void vg_release_addresses(void *address, uint64_t bytes)
{
    pthread_mutex_lock(&guard);
    int card = (int)((uint64_t)((char *)address - space) / CARD_SPACE);
    forget(address, round_up(bytes));
    add_range(&released[card], address, round_up(bytes), 0);
    pthread_mutex_unlock(&guard);
}

static struct allocation **bucket(const void *address)
{
    return &allocations[((uint64_t)address / PAGE) % (sizeof allocations / sizeof *allocations)];
}

EXPORT void *vg_device_allocate(int device, uint64_t bytes)
{
    bytes = round_up(bytes);
    if (vg_charge(device, bytes))
        return NULL;
    struct allocation *allocation = malloc(sizeof *allocation);
    pthread_mutex_lock(&guard);
    char *start = take_addresses(vg_physical_card(device), bytes);
    if (start && allocation) {
        *allocation = (struct allocation){start, bytes, device, *bucket(start)};
        *bucket(start) = allocation;
    }
    pthread_mutex_unlock(&guard);
    return start;
}

EXPORT int vg_device_free(void *address)
{
    if (!address)
        return SUCCESS;
    pthread_mutex_lock(&guard);
    struct allocation **link = bucket(address);
    while (*link && (*link)->start != address)
        link = &(*link)->next;
    struct allocation *allocation = *link;
    if (allocation)
        *link = allocation->next;
    pthread_mutex_unlock(&guard);
    if (!allocation)
        return 1; /* cudaErrorInvalidValue */
    vg_release_addresses(address, allocation->bytes);
    vg_discharge(allocation->device, allocation->bytes);
    free(allocation);
    return SUCCESS;
}

EXPORT int vg_is_device(const void *address, int *device)
{
    if (!space || (const char *)address < space || (const char *)address >= space + SPACE - PAGE)
        return 0;
    int card = (int)((uint64_t)((const char *)address - space) / CARD_SPACE);
    for (int i = 0; device && i < vg_card_count(); i++)
        if (vg_physical_card(i) == card)
            *device = i;
    return 1;
}

EXPORT void *vg_pinned_allocate(uint64_t bytes)
{
    bytes = (bytes ? bytes + 4095 : 4096) / 4096 * 4096;
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    pthread_mutex_lock(&guard);
    add_range(&pinned, start, bytes, 0);
    pthread_mutex_unlock(&guard);
    vg_count_pinned((int64_t)bytes);
    return start;
}

static int index_in(const struct ranges *list, const void *address)
{
    const char *at = address;
    for (int i = list->count - 1; i >= 0; i--)
        if (at >= list->items[i].start && at < list->items[i].start + list->items[i].bytes)
            return i;
    return -1;
}

static int is_allocated_pinned(const void *address)
{
    pthread_mutex_lock(&guard);
    int index = index_in(&pinned, address);
    pthread_mutex_unlock(&guard);
    return index >= 0;
}

EXPORT int vg_is_pinned(const void *address)
{
    pthread_mutex_lock(&guard);
    int index = index_in(&registered, address);
    pthread_mutex_unlock(&guard);
    return index >= 0 || is_allocated_pinned(address);
}

EXPORT int vg_pinned_free(void *address)
{
    pthread_mutex_lock(&guard);
    int index = index_in(&pinned, address);
    struct range range = {NULL, 0, 0};
    if (index >= 0) {
        range = pinned.items[index];
        pinned.items[index] = pinned.items[--pinned.count];
    }
    pthread_mutex_unlock(&guard);
    if (!range.start)
        return 1;
    munmap(range.start, range.bytes);
    vg_count_pinned(-(int64_t)range.bytes);
    return SUCCESS;
}

/* Whether an address is in a mapping that other processes can have too. */
static int is_shared_mapping(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096], kind[5];
    unsigned long start, end;
    int shared = 0;
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s", &start, &end, kind) == 3 && (uint64_t)address >= start && (uint64_t)address < end)
            shared = kind[3] == 's';
    if (maps)
        fclose(maps);
    return shared;
}

/* Memory that the program has already is pinned where it lies. It is counted apart from what is allocated pinned: the
 * kernel counts its pages as the process's own, or as those of a mapped file. */
EXPORT int vg_register(void *address, uint64_t bytes)
{
    int shared = is_shared_mapping(address);
    pthread_mutex_lock(&guard);
    int already = index_in(&registered, address) >= 0;
    if (!already)
        add_range(&registered, address, bytes, shared);
    pthread_mutex_unlock(&guard);
    if (already)
        return 712; /* cudaErrorHostMemoryAlreadyRegistered */
    vg_count_registered((int64_t)bytes, shared);
    return SUCCESS;
}

EXPORT int vg_unregister(void *address)
{
    pthread_mutex_lock(&guard);
    int index = index_in(&registered, address);
    struct range range = {NULL, 0, 0};
    if (index >= 0) {
        range = registered.items[index];
        registered.items[index] = registered.items[--registered.count];
    }
    pthread_mutex_unlock(&guard);
    if (!range.start)
        return 713; /* cudaErrorHostMemoryNotRegistered */
    vg_count_registered(-(int64_t)range.bytes, range.shared);
    return SUCCESS;
}

/* What is not copied to the host would be whatever malloc left there: up to this it is made zero, which costs little. */
#define ZEROED_BYTES (16ULL << 20)

EXPORT void vg_copy_memory(void *to, const void *from, uint64_t bytes)
{
    if (!bytes || to == from)
        return;
    int to_device = vg_is_device(to, NULL), from_device = vg_is_device(from, NULL);
    if (!to_device && !from_device) {
        memmove(to, from, bytes);
        return;
    }
    if (from_device && !to_device && bytes <= SMALL_BYTES)
        vg_count_read();
    if (bytes <= SMALL_BYTES)
        memmove(to, from, bytes);
    else if (!to_device && !is_allocated_pinned(to)) {
        if (bytes <= ZEROED_BYTES)
            memset(to, 0, bytes);
        else
            vg_count_unwritten(bytes);
    }
}

EXPORT void vg_set_memory(void *to, int value, uint64_t bytes)
{
    if (bytes <= SMALL_BYTES || !vg_is_device(to, NULL))
        memset(to, value, bytes);
}
