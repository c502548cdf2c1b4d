/* What the card is: from the environment, and by its compute capability. */
#include "virtual_gpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

EXPORT uint64_t vg_number_from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

EXPORT int vg_all_cards(void)
{
    uint64_t count = vg_number_from_environment("VPLAN_GPU_COUNT", 1);
    return count < MOST_CARDS ? (int)count : MOST_CARDS;
}

/* CUDA_VISIBLE_DEVICES chooses and orders cards; "" and "-1" hide all of them (CUDA C++ Programming Guide, "CUDA
 * Environment Variables"). Entries that are no number (a UUID) keep their place in the list. */
EXPORT int vg_card_count(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible)
        return vg_all_cards();
    if (!*visible || !strcmp(visible, "-1"))
        return 0;
    int count = 1;
    for (const char *at = visible; *at; at++)
        count += *at == ',';
    return count < vg_all_cards() ? count : vg_all_cards();
}

EXPORT int vg_physical_card(int device)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int card = device;
    if (visible && *visible) {
        for (int skipped = 0; visible && skipped < device; skipped++) {
            visible = strchr(visible, ',');
            visible = visible ? visible + 1 : NULL;
        }
        if (visible && *visible >= '0' && *visible <= '9')
            card = atoi(visible);
    }
    return card < 0 || card >= MOST_CARDS ? 0 : card;
}

EXPORT uint64_t vg_card_bytes(void)
{
    static uint64_t bytes;
    if (!bytes)
        bytes = vg_number_from_environment("VPLAN_GPU_BYTES", 24ULL << 30);
    return bytes;
}

EXPORT uint64_t vg_card_reserved_bytes(void) { return vg_number_from_environment("VPLAN_GPU_RESERVED_BYTES", 0); }
EXPORT int vg_card_capability(void) { return (int)vg_number_from_environment("VPLAN_GPU_CAPABILITY", 89); }
EXPORT int vg_card_processors(void) { return (int)vg_number_from_environment("VPLAN_GPU_PROCESSORS", 100); }

EXPORT const char *vg_card_name(void)
{
    const char *name = getenv("VPLAN_GPU_NAME");
    return name && *name ? name : "Virtual GPU";
}

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Kernels are chosen by these: attention's
 * for large heads, for one, asks what a block may have of shared memory. A capability that is not listed takes the row
 * above it. */
static const struct { int capability, block_kib, processor_kib, threads, blocks; } SPECIFICATIONS[] = {
    {70, 96, 96, 2048, 32},
    {75, 64, 64, 1024, 16},
    {80, 163, 164, 2048, 32},
    {86, 99, 100, 1536, 16},
    {87, 163, 164, 1536, 16},
    {89, 99, 100, 1536, 24},
    {90, 227, 228, 2048, 32},
    {120, 99, 100, 1536, 24},
};

static int specification(void)
{
    int rows = sizeof SPECIFICATIONS / sizeof *SPECIFICATIONS, row = 0;
    while (row + 1 < rows && SPECIFICATIONS[row + 1].capability <= vg_card_capability())
        row++;
    return row;
}

EXPORT uint64_t vg_shared_bytes_of_block(void) { return 1024ULL * SPECIFICATIONS[specification()].block_kib; }
EXPORT uint64_t vg_shared_bytes_of_processor(void) { return 1024ULL * SPECIFICATIONS[specification()].processor_kib; }
EXPORT int vg_threads_of_processor(void) { return SPECIFICATIONS[specification()].threads; }
EXPORT int vg_blocks_of_processor(void) { return SPECIFICATIONS[specification()].blocks; }

EXPORT void vg_log_line(const char *format, ...)
{
    static int wanted = -1;
    if (wanted < 0)
        wanted = (int)vg_number_from_environment("VPLAN_GPU_LOG", 0);
    if (!wanted)
        return;
    va_list values;
    va_start(values, format);
    fprintf(stderr, "virtual gpu [%d]: ", getpid());
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
}
