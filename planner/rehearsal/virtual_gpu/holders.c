/* Who holds how much of which card: a table that all processes of a run map. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct table *table;
static int table_pid;
static struct table alone; /* without a folder a process has the machine to itself */
static struct holder *own;
static int own_pid;

EXPORT struct table *vg_shared_table(void)
{
    /* A fork looks again: it may have been given another folder (trainers/probe_server.py). */
    if (table && table_pid == getpid())
        return table;
    table_pid = getpid();
    const char *folder = getenv("VPLAN_GPU_FOLDER");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/cards", folder) >= (int)sizeof path)
        return table = &alone;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct table))) {
        fprintf(stderr, "virtual gpu: cannot open %s: %s\n", path, strerror(errno));
        abort();
    }
    void *mapped = mmap(NULL, sizeof(struct table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) {
        fprintf(stderr, "virtual gpu: cannot map %s: %s\n", path, strerror(errno));
        abort();
    }
    table = mapped;
    table->magic = TABLE_MAGIC;
    return table;
}

static int is_dead(int pid) { return kill(pid, 0) && errno == ESRCH; }

/* A process may be killed while it holds the lock: whoever finds its pid dead takes the lock over. */
static void lock(void)
{
    int32_t *owner = &vg_shared_table()->lock;
    for (;;) {
        int32_t nobody = 0;
        if (__atomic_compare_exchange_n(owner, &nobody, getpid(), 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return;
        int32_t holder = nobody;
        if (holder > 0 && is_dead(holder))
            __atomic_compare_exchange_n(owner, &holder, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        else
            sched_yield();
    }
}

static void unlock(void) { __atomic_store_n(&vg_shared_table()->lock, 0, __ATOMIC_RELEASE); }

static void end(struct holder *holder)
{
    memset(holder->used, 0, sizeof holder->used);
    memset(holder->outside, 0, sizeof holder->outside);
    holder->ended = 1;
}

static void leave(void)
{
    if (own && own_pid == getpid())
        end(own);
}

static struct holder *free_place(void)
{
    struct holder *holders = vg_shared_table()->holders;
    for (int i = 0; i < MOST_HOLDERS; i++)
        if (!holders[i].pid)
            return &holders[i];
    for (int i = 0; i < MOST_HOLDERS; i++)
        if (holders[i].ended || is_dead(holders[i].pid))
            return &holders[i];
    fprintf(stderr, "virtual gpu: more than %d processes on one machine\n", MOST_HOLDERS);
    abort();
}

/* This process's row. A forked child is a process of its own and begins with nothing. */
static struct holder *self(void)
{
    if (own && own_pid == getpid())
        return own;
    lock();
    if (!(own && own_pid == getpid())) { /* another thread may have been here first */
        struct holder *place = free_place();
        memset(place, 0, sizeof *place);
        place->pid = getpid();
        int forked = own != NULL;
        own = place;
        own_pid = getpid();
        if (!forked)
            atexit(leave);
    }
    unlock();
    return own;
}

EXPORT uint64_t vg_used_of_card(int card)
{
    uint64_t sum = 0;
    for (int i = 0; i < MOST_HOLDERS; i++) {
        struct holder *holder = &vg_shared_table()->holders[i];
        if (!holder->pid || holder->ended)
            continue;
        if (holder->pid != getpid() && is_dead(holder->pid))
            end(holder); /* killed: what it held is free again, its peaks stay */
        sum += holder->used[card];
    }
    return sum;
}

static void note_peaks(struct holder *holder, int card)
{
    uint64_t sum = vg_used_of_card(card);
    if (holder->used[card] > holder->peak[card])
        holder->peak[card] = holder->used[card];
    if (sum > vg_shared_table()->card_peak[card])
        vg_shared_table()->card_peak[card] = sum;
}

EXPORT void vg_charge_outside(int device, int64_t bytes)
{
    int card = vg_physical_card(device);
    struct holder *holder = self();
    lock();
    holder->outside[card] += (uint64_t)bytes;
    if (holder->outside[card] > holder->outside_peak[card])
        holder->outside_peak[card] = holder->outside[card];
    holder->used[card] += (uint64_t)bytes;
    note_peaks(holder, card);
    unlock();
}

EXPORT int vg_has_context(int device) { return self()->outside[vg_physical_card(device)] != 0; }

EXPORT void vg_touch_card(int device)
{
    if (vg_has_context(device))
        return;
    uint64_t bytes = vg_number_from_environment("VPLAN_GPU_CONTEXT_BYTES", 0);
    vg_charge_outside(device, bytes ? (int64_t)bytes : 1); /* 1: a context that takes nothing is there all the same */
}

EXPORT int vg_charge(int device, uint64_t bytes)
{
    int card = vg_physical_card(device);
    vg_touch_card(device);
    struct holder *holder = self();
    lock();
    int fits = vg_used_of_card(card) + bytes <= vg_card_bytes();
    if (fits) {
        holder->used[card] += bytes;
        note_peaks(holder, card);
    } else
        holder->short_of = bytes;
    unlock();
    vg_log_line("%s %llu bytes on device %d", fits ? "takes" : "no room for", (unsigned long long)bytes, device);
    return fits ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT void vg_discharge(int device, uint64_t bytes)
{
    int card = vg_physical_card(device);
    struct holder *holder = self();
    lock();
    holder->used[card] -= bytes < holder->used[card] ? bytes : holder->used[card];
    unlock();
    vg_log_line("frees %llu bytes on device %d", (unsigned long long)bytes, device);
}

EXPORT uint64_t vg_free_of_device(int device)
{
    uint64_t used = vg_used_of_card(vg_physical_card(device)), all = vg_card_bytes();
    return used < all ? all - used : 0;
}

EXPORT void vg_count_launch(void) { __atomic_fetch_add(&self()->launches, 1, __ATOMIC_RELAXED); }
EXPORT void vg_count_read(void) { __atomic_fetch_add(&self()->reads, 1, __ATOMIC_RELAXED); }
EXPORT void vg_count_unwritten(uint64_t bytes) { __atomic_fetch_add(&self()->unwritten, bytes, __ATOMIC_RELAXED); }

EXPORT void vg_count_registered(int64_t bytes, int shared)
{
    struct holder *holder = self();
    lock();
    *(shared ? &holder->registered_shared : &holder->registered) += (uint64_t)bytes;
    unlock();
}

EXPORT void vg_count_pinned(int64_t bytes)
{
    struct holder *holder = self();
    lock();
    holder->pinned += (uint64_t)bytes;
    if (holder->pinned > holder->pinned_peak)
        holder->pinned_peak = holder->pinned;
    unlock();
}
