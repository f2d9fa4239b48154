/* Tests every function of the C interface of the driver: driver SOCKET. The disk must have 16 MiB and two queues or more. */
#define _GNU_SOURCE
#include <errno.h>
#include <kickless_driver.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

#define BLOCK 4096
#define SECOND 1000000000LL

static kl_disk *opened(const char *socket, uint32_t queue_size)
{
    kl_options options = {.size = sizeof options, .socket = socket, .queues = 2};
    kl_disk *disk = NULL;
    options.queue_size = queue_size;
    options.connect_timeout_ms = 30000;
    CHECK(kl_disk_open(&options, &disk) == 0 && disk);
    return disk;
}

static void fill(void *bytes, size_t len, unsigned seed)
{
    unsigned char *at = bytes;
    for (size_t n = 0; n < len; n++)
        at[n] = (unsigned char)(seed * 31 + n / 512 * 7 + n);
}

static int has(const void *bytes, size_t len, unsigned seed)
{
    unsigned char *expected = malloc(len);
    CHECK(expected);
    fill(expected, len, seed);
    int same = memcmp(bytes, expected, len) == 0;
    free(expected);
    return same;
}

static void wrong_arguments(const char *socket)
{
    kl_options options = {.size = sizeof options, .socket = "/nowhere/to/be/found"};
    kl_disk *disk = (kl_disk *)&options;
    kl_queue *queue;
    kl_buffer *buffer;
    kl_completion done;
    char bytes[512];
    struct {
        kl_options known;
        uint64_t unknown;
    } newer = {.known = {.size = sizeof newer, .socket = socket}, .unknown = 1};

    CHECK(strcmp(kl_last_error(), "") == 0);
    REFUSED(ENOENT, "cannot connect", kl_disk_open(&options, &disk));
    CHECK(disk == NULL);
    REFUSED(E2BIG, "does not know", kl_disk_open(&newer.known, &disk));
    REFUSED(EINVAL, "options is null", kl_disk_open(NULL, &disk));
    REFUSED(EINVAL, "disk is null", kl_disk_open(&options, NULL));
    options.size = 0;
    REFUSED(EINVAL, "sizeof", kl_disk_open(&options, &disk));
    REFUSED(EINVAL, "disk is null", kl_disk_size(NULL));
    REFUSED(EINVAL, "disk is null", kl_disk_block_size(NULL));
    REFUSED(EINVAL, "disk is null", kl_disk_length_max(NULL));
    REFUSED(EINVAL, "disk is null", kl_disk_is_read_only(NULL));
    REFUSED(EINVAL, "disk is null", kl_disk_offers(NULL, KL_READ));
    REFUSED(EINVAL, "disk is null", kl_disk_queues(NULL));
    REFUSED(EINVAL, "disk is null", kl_disk_read(NULL, bytes, 512, 0));
    REFUSED(EINVAL, "disk is null", kl_disk_write(NULL, bytes, 512, 0));
    REFUSED(EINVAL, "disk is null", kl_disk_flush(NULL));
    REFUSED(EINVAL, "disk is null", kl_disk_discard(NULL, 0, 512));
    REFUSED(EINVAL, "disk is null", kl_disk_write_zeroes(NULL, 0, 512, 0));
    REFUSED(EINVAL, "disk is null", kl_disk_get_id(NULL, bytes, sizeof bytes));
    REFUSED(EINVAL, "request is null", kl_disk_run(NULL, NULL));
    REFUSED(EINVAL, "disk is null", kl_queue_open(NULL, 0, &queue));
    REFUSED(EINVAL, "disk is null", kl_buffer_alloc(NULL, 512, &buffer));
    REFUSED(EINVAL, "disk is null", kl_buffer_register(NULL, 0, 0, 4096, &buffer));
    CHECK(queue == NULL && buffer == NULL);
    REFUSED(EINVAL, "queue is null", kl_queue_submit(NULL, NULL, 0));
    REFUSED(EINVAL, "queue is null", kl_queue_poll(NULL, &done, 1));
    REFUSED(EINVAL, "queue is null", kl_queue_wait(NULL, &done, 1, 1, -1));
    REFUSED(EINVAL, "queue is null", kl_queue_in_flight(NULL));
    REFUSED(EINVAL, "queue is null", kl_queue_fd(NULL));
    REFUSED(EINVAL, "queue is null", kl_queue_arm(NULL));
    CHECK(kl_buffer_data(NULL) == NULL && kl_buffer_size(NULL) == 0);
    kl_disk_close(NULL);
    kl_queue_close(NULL);
    kl_buffer_free(NULL);
}

static void blocking(const char *socket)
{
    kl_disk *disk = opened(socket, 0);
    char id[KL_ID_SIZE], *bytes = malloc(1 << 20);
    CHECK(bytes && kl_disk_size(disk) == 16 << 20 && kl_disk_block_size(disk) >= 512);
    CHECK(kl_disk_length_max(disk) >= BLOCK && kl_disk_queues(disk) == 2 && kl_disk_is_read_only(disk) == 0);
    CHECK(kl_disk_offers(disk, KL_WRITE) == 1 && kl_disk_offers(disk, KL_FLUSH) == 1);
    REFUSED(EINVAL, "the kind of a request", kl_disk_offers(disk, 0));
    CHECK(kl_disk_get_id(disk, id, sizeof id) == (int)strlen(id));
    REFUSED(EINVAL, "KL_ID_SIZE", kl_disk_get_id(disk, id, sizeof id - 1));
    REFUSED(EINVAL, "id is null", kl_disk_get_id(disk, NULL, KL_ID_SIZE));

    fill(bytes, 1 << 20, 1);
    CHECK(kl_disk_write(disk, bytes, 1 << 20, 512) == 0 && kl_disk_flush(disk) == 0);
    memset(bytes, 0, 1 << 20);
    CHECK(kl_disk_read(disk, bytes, 1 << 20, 512) == 0 && has(bytes, 1 << 20, 1));
    CHECK(kl_disk_read(disk, NULL, 0, 0) == 0 && kl_disk_write(disk, NULL, 0, 0) == 0);
    REFUSED(EINVAL, "into is null", kl_disk_read(disk, NULL, 512, 0));
    REFUSED(EINVAL, "from is null", kl_disk_write(disk, NULL, 512, 0));
    REFUSED(EINVAL, "beyond the disk", kl_disk_read(disk, bytes, 1024, (16 << 20) - 512));
    REFUSED(EINVAL, "multiple of 512", kl_disk_write(disk, bytes, 512, 1));
    REFUSED(EINVAL, "larger than any memory", kl_disk_read(disk, bytes, SIZE_MAX, 0));

    int offered = kl_disk_offers(disk, KL_WRITE_ZEROES);
    CHECK(kl_disk_write_zeroes(disk, 512, BLOCK, KL_UNMAP) == (offered ? 0 : -EOPNOTSUPP));
    if (offered) {
        CHECK(kl_disk_read(disk, bytes, BLOCK, 512) == 0);
        for (int n = 0; n < BLOCK; n++)
            CHECK(bytes[n] == 0);
    }
    REFUSED(EINVAL, "KL_UNMAP", kl_disk_write_zeroes(disk, 0, 512, 2));
    CHECK(kl_disk_discard(disk, 0, BLOCK) == (kl_disk_offers(disk, KL_DISCARD) ? 0 : -EOPNOTSUPP));
    free(bytes);
    kl_disk_close(disk);
}

/* Takes all completions and checks that each cookie comes once. */
static void reap(kl_queue *queue, int count, int result)
{
    kl_completion done[8];
    char seen[256] = {0};
    while (count > 0) {
        int got = kl_queue_wait(queue, done, 1, 8, 30 * SECOND);
        CHECK(got > 0);
        for (int n = 0; n < got; n++) {
            CHECK(done[n].result == result && done[n].cookie < sizeof seen && !seen[done[n].cookie]);
            seen[done[n].cookie] = 1;
        }
        count -= got;
    }
    CHECK(count == 0 && kl_queue_in_flight(queue) == 0);
}

static void batches(const char *socket)
{
    enum { COUNT = 64, SIZE = 16 };
    kl_disk *disk = opened(socket, SIZE);
    kl_queue *queue = NULL;
    kl_buffer *buffer = NULL;
    kl_request requests[COUNT];
    kl_completion done[COUNT];
    CHECK(kl_queue_open(disk, 1, &queue) == 0 && kl_buffer_alloc(disk, COUNT * BLOCK, &buffer) == 0);
    REFUSED(EINVAL, "no queue", kl_queue_open(disk, 2, &(kl_queue *){NULL}));
    char *bytes = kl_buffer_data(buffer);
    CHECK(bytes && kl_buffer_size(buffer) == COUNT * BLOCK);

    for (uint32_t kind = KL_WRITE; kind >= KL_READ; kind--) {
        for (unsigned n = 0; n < COUNT; n++) {
            requests[n] = (kl_request){.kind = kind, .offset = n * BLOCK, .length = BLOCK, .buffer = buffer,
                                       .buffer_offset = n * BLOCK, .cookie = n};
            if (kind == KL_WRITE)
                fill(bytes + n * BLOCK, BLOCK, n);
        }
        if (kind == KL_READ)
            memset(bytes, 0, COUNT * BLOCK);
        int submitted = 0, completed = 0, full = 0;
        while (completed < COUNT) {
            int count = kl_queue_submit(queue, requests + submitted, COUNT - submitted);
            CHECK(count >= 0 || count == -EAGAIN);
            if (count > 0)
                submitted += count;
            full += submitted < COUNT;
            CHECK(kl_queue_in_flight(queue) <= SIZE);
            count = kl_queue_wait(queue, done, 1, COUNT, 30 * SECOND);
            CHECK(count > 0);
            for (int n = 0; n < count; n++)
                CHECK(done[n].result == 0);
            completed += count;
        }
        CHECK(full > 0);
    }
    for (unsigned n = 0; n < COUNT; n++)
        CHECK(has(bytes + n * BLOCK, BLOCK, n));

    /* The queue is full and reports it. */
    int room = 0;
    while (room < COUNT && kl_queue_submit(queue, requests + room, 1) == 1)
        room++;
    CHECK(room > 0 && room <= SIZE);
    REFUSED(EAGAIN, "full", kl_queue_submit(queue, requests + room, 1));
    reap(queue, room, 0);

    /* The requests before an invalid one are submitted. */
    requests[2].offset = 1;
    CHECK(kl_queue_submit(queue, requests, 4) == 2);
    REFUSED(EINVAL, "multiple of 512", kl_queue_submit(queue, requests + 2, 2));
    reap(queue, 2, 0);
    CHECK(kl_queue_submit(queue, NULL, 0) == 0);
    REFUSED(EINVAL, "requests is null", kl_queue_submit(queue, NULL, 1));
    CHECK(kl_queue_poll(queue, done, COUNT) == 0 && kl_queue_poll(queue, NULL, 0) == 0);
    CHECK(kl_queue_wait(queue, done, 1, 1, 1000) == 0 && kl_queue_wait(queue, done, 0, 1, -1) == 0);
    REFUSED(EINVAL, "min is more", kl_queue_wait(queue, done, 2, 1, 0));
    REFUSED(EINVAL, "negative", kl_queue_wait(queue, done, 1, 1, -2));

    /* Handles may be closed in any order, also with requests in flight. */
    CHECK(kl_queue_submit(queue, requests + 3, 4) == 4);
    kl_buffer_free(buffer);
    reap(queue, 4, 0);
    kl_disk_close(disk);
    REFUSED(ENODEV, "dead", kl_queue_poll(queue, done, 1));
    REFUSED(ENODEV, "dead", kl_queue_wait(queue, done, 1, 1, -1));
    kl_queue_close(queue);
}

static void wrong_requests(const char *socket)
{
    kl_disk *disk = opened(socket, 0);
    kl_buffer *buffer = NULL, *foreign = NULL;
    char id[20];
    CHECK(kl_buffer_alloc(disk, 2 * BLOCK, &buffer) == 0);
    REFUSED(ENOMEM, "no 1099511627776 free bytes", kl_buffer_alloc(disk, 1ULL << 40, &foreign));
    REFUSED(EINVAL, "no bytes", kl_buffer_alloc(disk, 0, &foreign));
    const kl_request good = {.kind = KL_WRITE, .length = BLOCK, .buffer = buffer};
    kl_request wrong;
    CHECK(kl_disk_run(disk, &good) == 0);
#define WRONG(sentence, ...)                                                                      \
    do {                                                                                          \
        wrong = good;                                                                             \
        __VA_ARGS__;                                                                              \
        REFUSED(EINVAL, sentence, kl_disk_run(disk, &wrong));                                     \
    } while (0)
    WRONG("kind", wrong.kind = 0);
    WRONG("kind", wrong.kind = 8);
    WRONG("flags", wrong.flags = 1);
    WRONG("flags", wrong.flags = 2);
    WRONG("null", wrong.buffer = NULL);
    WRONG("beyond the end", wrong.buffer_offset = BLOCK + 1);
    WRONG("beyond the end", wrong.buffer_offset = UINT64_MAX);
    WRONG("beyond the end", wrong.length = 1ULL << 32);
    WRONG("no bytes", wrong.length = 0);
    WRONG("beyond the disk", wrong.offset = 16 << 20);
    WRONG("both", wrong.piece_count = 1);
    WRONG("pieces is null", (wrong.piece_count = 1, wrong.buffer = NULL));
    WRONG("too many", (wrong.piece_count = SIZE_MAX, wrong.buffer = NULL));
    WRONG("memory", wrong.kind = KL_FLUSH);
    WRONG("flush", (wrong.kind = KL_FLUSH, wrong.buffer = NULL));

    kl_piece pieces[] = {{buffer, BLOCK, 512}, {buffer, 0, BLOCK - 512}};
    WRONG("length", (wrong.buffer = NULL, wrong.pieces = pieces, wrong.piece_count = 1));
    fill(kl_buffer_data(buffer), 2 * BLOCK, 9);
    kl_request in_pieces = {.kind = KL_WRITE, .length = BLOCK, .pieces = pieces, .piece_count = 2};
    CHECK(kl_disk_run(disk, &in_pieces) == 0);
    char read[BLOCK], *bytes = kl_buffer_data(buffer);
    CHECK(kl_disk_read(disk, read, BLOCK, 0) == 0);
    CHECK(!memcmp(read, bytes + BLOCK, 512) && !memcmp(read + 512, bytes, BLOCK - 512));
    CHECK(kl_disk_run(disk, &(kl_request){.kind = KL_FLUSH}) == 0);
    CHECK(kl_disk_run(disk, &(kl_request){.kind = KL_GET_ID, .length = 20, .buffer = buffer}) == 0);
    memcpy(id, bytes, sizeof id);
    CHECK(kl_disk_run(disk, &(kl_request){.kind = KL_READ, .length = BLOCK, .buffer = buffer}) == 0);
    kl_buffer_free(buffer);
    kl_disk_close(disk);
}

static void registered(const char *socket)
{
    kl_disk *disk = opened(socket, 0);
    kl_queue *queue = NULL;
    kl_buffer *buffer = NULL;
    int file = memfd_create("mine", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, 4 << 20) == 0 && kl_queue_open(disk, 0, &queue) == 0);
    char *mine = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(mine != MAP_FAILED);
    REFUSED(EINVAL, "negative", kl_buffer_register(disk, -1, 0, 1 << 20, &buffer));
    REFUSED(EBADF, "register", kl_buffer_register(disk, 9999, 0, 1 << 20, &buffer));
    REFUSED(EINVAL, "file", kl_buffer_register(disk, file, 4 << 20, 1 << 20, &buffer));
    for (unsigned round = 0; round < 10; round++) {
        CHECK(kl_buffer_register(disk, file, 1 << 20, 2 << 20, &buffer) == 0);
        CHECK(kl_buffer_size(buffer) == 2 << 20);
        fill(mine + (1 << 20), BLOCK, round);
        CHECK(has(kl_buffer_data(buffer), BLOCK, round));
        kl_request request = {.kind = KL_WRITE, .offset = BLOCK, .length = BLOCK, .buffer = buffer};
        CHECK(kl_disk_run(disk, &request) == 0);
        request = (kl_request){.kind = KL_READ, .offset = BLOCK, .length = BLOCK, .buffer = buffer,
                               .buffer_offset = (2 << 20) - BLOCK};
        CHECK(kl_queue_submit(queue, &request, 1) == 1);
        if (round % 2)
            reap(queue, 1, 0);
        kl_buffer_free(buffer);
        if (round % 2 == 0)
            reap(queue, 1, 0);
        CHECK(has(mine + (3 << 20) - BLOCK, BLOCK, round));
    }
    kl_queue_close(queue);
    kl_disk_close(disk);
    munmap(mine, 4 << 20);
    close(file);
}

/* Sleeps on the queue's descriptor. */
static void sleeping_outside(const char *socket)
{
    kl_disk *disk = opened(socket, 0);
    kl_queue *queue = NULL;
    kl_buffer *buffer = NULL;
    CHECK(kl_queue_open(disk, 0, &queue) == 0 && kl_buffer_alloc(disk, BLOCK, &buffer) == 0);
    struct pollfd slept = {.fd = kl_queue_fd(queue), .events = POLLIN};
    CHECK(slept.fd >= 0 && kl_queue_fd(queue) == slept.fd);
    for (uint64_t round = 0; round < 100; round++) {
        kl_request request = {.kind = KL_READ, .length = BLOCK, .buffer = buffer, .cookie = round << 32};
        kl_completion done;
        int count;
        CHECK(kl_queue_submit(queue, &request, 1) == 1);
        while ((count = kl_queue_poll(queue, &done, 1)) == 0)
            if (kl_queue_arm(queue) == 1)
                CHECK(poll(&slept, 1, 30000) == 1);
        CHECK(count == 1 && done.cookie == round << 32 && done.result == 0);
    }
    kl_queue_close(queue);
    kl_buffer_free(buffer);
    kl_disk_close(disk);
}

struct sharer {
    kl_disk *disk;
    unsigned number;
};

/* Runs one of several threads per queue. A thread also takes completions of others, so it only counts them. */
static void *share(void *argument)
{
    const struct sharer *me = argument;
    kl_queue *queue = NULL;
    kl_buffer *buffer = NULL;
    long taken = 0;
    CHECK(kl_queue_open(me->disk, me->number % 2, &queue) == 0 && kl_buffer_alloc(me->disk, BLOCK, &buffer) == 0);
    for (int round = 0; round < 200; round++) {
        kl_request requests[4];
        kl_completion done[8];
        for (int n = 0; n < 4; n++)
            requests[n] = (kl_request){.kind = KL_READ, .length = 512, .buffer = buffer, .cookie = me->number};
        for (int left = 4; left > 0;) {
            int count = kl_queue_submit(queue, requests, left);
            CHECK(count > 0 || count == -EAGAIN);
            left -= count > 0 ? count : 0;
            count = kl_queue_poll(queue, done, 8);
            CHECK(count >= 0);
            taken += count;
        }
        char bytes[512];
        CHECK(kl_disk_read(me->disk, bytes, sizeof bytes, 512 * (me->number + 1)) == 0);
        REFUSED(EINVAL, "multiple of 512", kl_disk_read(me->disk, bytes, 1, 0));
    }
    kl_buffer_free(buffer);
    kl_queue_close(queue);
    return (void *)taken;
}

static void threads(const char *socket)
{
    enum { COUNT = 4 };
    struct sharer sharers[COUNT];
    pthread_t running[COUNT];
    kl_disk *disk = opened(socket, 16);
    long left = COUNT * 200 * 4;
    for (unsigned n = 0; n < COUNT; n++) {
        sharers[n] = (struct sharer){disk, n};
        CHECK(pthread_create(&running[n], NULL, share, &sharers[n]) == 0);
    }
    for (unsigned n = 0; n < COUNT; n++) {
        void *taken;
        CHECK(pthread_join(running[n], &taken) == 0);
        left -= (long)taken;
    }
    for (uint32_t n = 0; n < 2; n++) {
        kl_queue *queue = NULL;
        kl_completion done[64];
        CHECK(kl_queue_open(disk, n, &queue) == 0);
        while (kl_queue_in_flight(queue) > 0)
            left -= kl_queue_wait(queue, done, 1, 64, SECOND / 10);
        for (int count; (count = kl_queue_poll(queue, done, 64)) > 0;)
            left -= count;
        kl_queue_close(queue);
    }
    CHECK(left == 0);
    kl_disk_close(disk);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    wrong_arguments(argv[1]);
    blocking(argv[1]);
    batches(argv[1]);
    wrong_requests(argv[1]);
    registered(argv[1]);
    sleeping_outside(argv[1]);
    threads(argv[1]);
    puts("all is as it should be");
    return 0;
}
