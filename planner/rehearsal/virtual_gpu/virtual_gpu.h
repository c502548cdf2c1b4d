/* A GPU that does not exist: what the libraries of this folder share.
 *
 * Programs find these libraries in the place of CUDA's. Device memory is address space that is counted against the
 * capacity of a card; a kernel launch is counted and does nothing. The card comes from the environment:
 *
 *   VPLAN_GPU_FOLDER          folder of this run; processes that share it share its cards
 *   VPLAN_GPU_COUNT           cards in the machine
 *   VPLAN_GPU_BYTES           what one card gives to processes (torch: total_memory)
 *   VPLAN_GPU_RESERVED_BYTES  what the driver keeps to itself; only NVML shows it
 *   VPLAN_GPU_CONTEXT_BYTES   what a process holds on a card from its first use of it on
 *   VPLAN_GPU_NCCL_BYTES      what one communicator of several ranks holds
 *   VPLAN_GPU_CUDNN_BYTES     workspace that cuDNN's plans ask for
 *   VPLAN_GPU_CAPABILITY      compute capability, 89 for 8.9
 *   VPLAN_GPU_PROCESSORS      streaming multiprocessors
 *   VPLAN_GPU_NAME            what programs print
 *   VPLAN_GPU_LOG             1: every allocation on stderr
 *
 * The version of CUDA is CUDA_VERSION (13000 for 13.0), given by the builder.
 */
#ifndef VIRTUAL_GPU_H
#define VIRTUAL_GPU_H

/* Names of our own that other libraries can see begin with vg_: a preloaded library stands before every other one. */

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#ifndef CUDA_VERSION
#define CUDA_VERSION 13000
#endif

/* Results, the same numbers in the driver and the runtime API (CUDA Driver API, "Data types": CUresult). */
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

enum { MOST_CARDS = 16, MOST_HOLDERS = 256 };

/* Copies and memsets up to this are made; larger ones are not, so that weights and activations take no memory. */
#define SMALL_BYTES 65536

/* One process that has used a card. Kept after its end: the parent reads the peaks. The layout is read by
 * planner/rehearsal/cards.py. */
struct holder {
    int32_t pid;
    int32_t ended;
    uint64_t used[MOST_CARDS];    /* with its contexts and communicators */
    uint64_t peak[MOST_CARDS];
    uint64_t outside[MOST_CARDS]; /* of `used`: contexts and communicators, which torch does not count */
    uint64_t outside_peak[MOST_CARDS];
    uint64_t pinned;
    uint64_t pinned_peak;
    uint64_t registered;          /* pinned where it lay in the process's own memory, which the kernel counts */
    uint64_t registered_shared;   /* the same of mapped files that other processes may map too */
    uint64_t unwritten;           /* bytes of large copies to ordinary host memory, which were not made */
    uint64_t reads;               /* small copies from a card to the host: values that the program looked at */
    uint64_t launches;
    uint64_t short_of;            /* bytes of the last request that found no room, 0 without one */
};

struct table {
    uint64_t magic;
    int32_t lock;                 /* pid of who holds it, or 0 */
    int32_t pad;
    uint64_t card_peak[MOST_CARDS];
    struct holder holders[MOST_HOLDERS];
};
#define TABLE_MAGIC 0x3255504756ULL /* "VGPU2" */

/* The card (card.c). */
uint64_t vg_number_from_environment(const char *name, uint64_t otherwise);
int vg_card_count(void);                 /* after CUDA_VISIBLE_DEVICES */
int vg_all_cards(void);                  /* before it: what NVML shows */
int vg_physical_card(int device);
uint64_t vg_card_bytes(void);
uint64_t vg_card_reserved_bytes(void);
int vg_card_capability(void);
int vg_card_processors(void);
const char *vg_card_name(void);
uint64_t vg_shared_bytes_of_block(void); /* the most that a kernel may ask for */
uint64_t vg_shared_bytes_of_processor(void);
int vg_threads_of_processor(void);
int vg_blocks_of_processor(void);
void vg_log_line(const char *format, ...);

/* Who holds how much (holders.c). */
struct table *vg_shared_table(void);
void vg_touch_card(int device);                    /* a context comes into being */
int vg_charge(int device, uint64_t bytes);         /* SUCCESS or OUT_OF_MEMORY */
void vg_discharge(int device, uint64_t bytes);
void vg_charge_outside(int device, int64_t bytes); /* of a library; never fails */
uint64_t vg_used_of_card(int card);                /* a physical card, all processes */
uint64_t vg_free_of_device(int device);
int vg_has_context(int device);
void vg_count_launch(void);
void vg_count_read(void);
void vg_count_unwritten(uint64_t bytes);
void vg_count_pinned(int64_t bytes);
void vg_count_registered(int64_t bytes, int shared);

/* Addresses (memory.c). */
int vg_current_device(void);
void vg_set_current_device(int device);
void *vg_reserve_addresses(int device, uint64_t bytes);
void vg_release_addresses(void *address, uint64_t bytes);
void *vg_device_allocate(int device, uint64_t bytes);
int vg_device_free(void *address);
int vg_is_device(const void *address, int *device);
void *vg_pinned_allocate(uint64_t bytes);
int vg_pinned_free(void *address);
int vg_register(void *address, uint64_t bytes);
int vg_unregister(void *address);
int vg_is_pinned(const void *address);
void vg_copy_memory(void *to, const void *from, uint64_t bytes);
void vg_set_memory(void *to, int value, uint64_t bytes);

#endif
