/* Counts the allocations of the driver while it only performs requests: allocations SOCKET. */
#include <errno.h>
#include <kickless_driver.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The allocator of glibc. This program replaces its functions and calls it. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_long allocations;

void *malloc(size_t size)
{
    allocations++;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    allocations++;
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    allocations++;
    return __libc_realloc(old, size);
}

int posix_memalign(void **place, size_t alignment, size_t size)
{
    allocations++;
    *place = __libc_memalign(alignment, size);
    return *place ? 0 : ENOMEM;
}

enum { BATCH = 32, ROUNDS = 500 };

/* Some rounds of a batch each, whose completions are waited for or polled. */
static int rounds(kl_queue *queue, const kl_request *requests, int waits)
{
    kl_completion done[BATCH];
    for (int round = 0; round < ROUNDS; round++) {
        if (kl_queue_submit(queue, requests, BATCH) != BATCH)
            return -1;
        for (int left = BATCH; left > 0;) {
            int count = waits ? kl_queue_wait(queue, done, 1, left, -1) : kl_queue_poll(queue, done, left);
            if (count < 0)
                return -1;
            for (int n = 0; n < count; n++)
                if (done[n].result != 0)
                    return -1;
            left -= count;
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    kl_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL, .queues = 1};
    kl_disk *disk;
    kl_queue *queue;
    kl_buffer *buffer;
    kl_request requests[BATCH];
    kl_piece pieces[2];
    if (kl_disk_open(&options, &disk) || kl_queue_open(disk, 0, &queue) || kl_buffer_alloc(disk, 8192, &buffer)) {
        fprintf(stderr, "allocations: %s\n", kl_last_error());
        return 1;
    }
    pieces[0] = (kl_piece){buffer, 0, 512};
    pieces[1] = (kl_piece){buffer, 4096, 512};
    for (int n = 0; n < BATCH; n++) {
        requests[n] = (kl_request){.kind = n % 2 ? KL_READ : KL_WRITE, .length = 1024};
        if (n % 4 < 2) {
            requests[n].buffer = buffer;
        } else {
            requests[n].pieces = pieces;
            requests[n].piece_count = 2;
        }
    }
    for (int waits = 0; waits < 2; waits++) {
        /* The first round allocates the memory that the driver keeps. */
        int failed = rounds(queue, requests, waits);
        long before = allocations;
        if (failed || rounds(queue, requests, waits)) {
            fprintf(stderr, "allocations: %s\n", kl_last_error());
            return 1;
        }
        if (allocations != before) {
            fprintf(stderr, "%ld allocations in %d rounds, %s\n", allocations - before, ROUNDS,
                    waits ? "waiting" : "polling");
            return 1;
        }
    }
    kl_buffer_free(buffer);
    kl_queue_close(queue);
    kl_disk_close(disk);
    puts("no allocations");
    return 0;
}
