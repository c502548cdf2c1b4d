/* Checkpoints larger than the machine's RAM. torch maps a file private and writable, though nothing is written; Linux
 * takes that as memory to come, and refuses what is larger than RAM and swap together (mm/util.c, __vm_enough_memory;
 * proc_sys_vm(5), overcommit_memory). Told that no swap need be kept for it, it does not ask. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "virtual_gpu.h"

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    if (file >= 0 && (flags & MAP_PRIVATE) && (protection & PROT_WRITE))
        flags |= MAP_NORESERVE;
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

EXPORT void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));
