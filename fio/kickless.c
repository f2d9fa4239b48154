/*
 * Lets fio use any vhost-user-blk back-end, through kickless_driver.h:
 *
 *     fio --ioengine=external:target/fio/kickless.so --socket=/tmp/scratch.sock --name=job --rw=randread ...
 *
 * A job that writes or trims destroys the data on the disk.
 *
 * Jobs that are threads (--thread) share one connection, and each has a queue. Each job that is a process has
 * a connection of its own; some back-ends accept only one connection. I/O buffers are memory that the
 * back-end shares, so nothing is copied. A trim becomes a discard, and a sync becomes a flush.
 *
 * SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fio.h"
#include "optgroup.h"

#include <kickless_driver.h>

/* Bounds of the queue size. Back-ends accept these sizes by default. */
#define QUEUE_SIZE_MIN 128
#define QUEUE_SIZE_MAX 1024
/* The size of a region of shared memory is a multiple of this. */
#define HUGE_PAGE (2UL << 20)

/* The options of a job. fio does not allow an option at offset 0. */
struct kickless_options {
    void *pad;
    char *socket;
    unsigned int queues;
    unsigned int packed;
    unsigned int event_idx;
    unsigned int indirect;
    unsigned int in_order;
    unsigned int spin_us;
    unsigned int hipri;
};

#define ENGINE_OPTION .category = FIO_OPT_C_ENGINE, .group = FIO_OPT_G_INVALID
#define FEATURE(option, what)                                                                      \
    {                                                                                              \
        .name = #option, .lname = what, .type = FIO_OPT_STR,                                       \
        .off1 = offsetof(struct kickless_options, option), .help = what,                           \
        .posval = {                                                                                \
            {.ival = "auto", .oval = KL_AUTO, .help = "As the driver does by default"},            \
            {.ival = "on", .oval = KL_ON, .help = "Insist on it"},                                 \
            {.ival = "off", .oval = KL_OFF, .help = "Do without it"},                              \
        },                                                                                         \
        .def = "auto", ENGINE_OPTION,                                                              \
    }

static struct fio_option options[] = {
    {
        .name = "socket", .lname = "Socket", .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct kickless_options, socket), .help = "The back-end's unix socket", ENGINE_OPTION,
    },
    {
        .name = "queues", .lname = "Queues", .type = FIO_OPT_INT,
        .off1 = offsetof(struct kickless_options, queues),
        .help = "Queues of a connection; 0 for as many as jobs can share it", .def = "0", .maxval = 256,
        ENGINE_OPTION,
    },
    FEATURE(packed, "The packed ring"),
    FEATURE(event_idx, "Event indices"),
    FEATURE(indirect, "Indirect descriptors"),
    FEATURE(in_order, "Requests complete in the order of their submission"),
    {
        .name = "spin", .lname = "Spin", .type = FIO_OPT_INT,
        .off1 = offsetof(struct kickless_options, spin_us),
        .help = "Microseconds to look at the ring before sleeping", .def = "0", ENGINE_OPTION,
    },
    {
        .name = "hipri", .lname = "High priority", .type = FIO_OPT_STR_SET,
        .off1 = offsetof(struct kickless_options, hipri), .help = "Never sleep", ENGINE_OPTION,
    },
    {.name = NULL},
};

/* A connection. `taken` tells for each queue whether a job has it. */
struct connection {
    struct connection *next;
    char *socket;
    kl_disk *disk;
    uint32_t queues;
    unsigned int jobs;
    bool taken[];
};

static pthread_mutex_t connections_lock = PTHREAD_MUTEX_INITIALIZER;
static struct connection *connections;

/* The state of a job. */
struct job {
    struct connection *connection;
    uint32_t index;
    kl_queue *queue;
    kl_buffer *memory;
    bool flushes;
    unsigned int depth;
    /* Requests that fio has queued and that are not submitted yet. */
    kl_request *pending;
    unsigned int pending_count;
    /* Completions of requests that could not be submitted. */
    kl_completion *failed;
    unsigned int failed_count;
    /* Completions that the last getevents found. */
    kl_completion *done;
};

static int complain(struct thread_data *td, int error, const char *what)
{
    log_err("kickless: %s\n", kl_last_error());
    td_verror(td, -error, what);
    return -error;
}

/* Returns the options to open the disk of this job. */
static kl_options disk_options(struct thread_data *td, uint32_t queues)
{
    const struct kickless_options *mine = td->eo;
    uint32_t size = QUEUE_SIZE_MIN;
    while (size < td->o.iodepth && size < QUEUE_SIZE_MAX)
        size *= 2;
    return (kl_options){
        .size = sizeof(kl_options),
        .socket = mine->socket,
        .queues = queues,
        .queue_size = size,
        .packed = mine->packed,
        .event_idx = mine->event_idx,
        .indirect = mine->indirect,
        .in_order = mine->in_order,
        .spin_us = mine->hipri ? -1 : mine->spin_us,
    };
}

static int check_job(struct thread_data *td)
{
    const struct kickless_options *mine = td->eo;
    const char *wrong = NULL;
    if (!mine->socket || !*mine->socket)
        wrong = "no socket: say which with socket=PATH";
    else if (td->o.nr_files > 1)
        wrong = "a job has one disk, so it cannot have several files";
    if (!wrong)
        return 0;
    log_err("kickless: %s\n", wrong);
    td_verror(td, EINVAL, "options");
    return EINVAL;
}

/* Connects. The caller holds connections_lock. */
static struct connection *connect_to(struct thread_data *td)
{
    const struct kickless_options *mine = td->eo;
    uint32_t wanted = mine->queues ? mine->queues : td->o.use_thread ? thread_number : 1;
    kl_options opened = disk_options(td, wanted < 256 ? wanted : 256);
    struct connection *made;
    kl_disk *disk;
    int error;

    /* Buffer memory costs nothing before its first use. */
    opened.buffer_memory = (td_max_bs(td) * td->o.iodepth + 2 * HUGE_PAGE) * opened.queues;
    error = kl_disk_open(&opened, &disk);
    if (error < 0) {
        complain(td, error, "kl_disk_open");
        return NULL;
    }
    wanted = kl_disk_queues(disk);
    made = calloc(1, sizeof(*made) + wanted * sizeof(made->taken[0]));
    if (made)
        made->socket = strdup(mine->socket);
    if (!made || !made->socket) {
        free(made);
        kl_disk_close(disk);
        td_verror(td, ENOMEM, "connection");
        return NULL;
    }
    made->disk = disk;
    made->queues = wanted;
    made->next = connections;
    connections = made;
    return made;
}

/* Closes the connection if no job has it. The caller holds connections_lock. */
static void let_go(struct connection *connection)
{
    struct connection **at = &connections;
    if (connection->jobs > 0)
        return;
    while (*at != connection)
        at = &(*at)->next;
    *at = connection->next;
    kl_disk_close(connection->disk);
    free(connection->socket);
    free(connection);
}

/* Takes a free queue of the connection to the job's socket. Connects if there is no such connection. */
static int take_queue(struct thread_data *td, struct job *job)
{
    const struct kickless_options *mine = td->eo;
    struct connection *connection;
    int error = 0;

    pthread_mutex_lock(&connections_lock);
    for (connection = connections; connection; connection = connection->next)
        if (!strcmp(connection->socket, mine->socket))
            break;
    if (!connection)
        connection = connect_to(td);
    if (!connection) {
        error = td->error;
        goto out;
    }
    while (job->index < connection->queues && connection->taken[job->index])
        job->index++;
    if (job->index == connection->queues) {
        log_err("kickless: each job that is a thread needs a queue, and all %u are taken\n", connection->queues);
        td_verror(td, EBUSY, "queues");
        error = EBUSY;
        goto out;
    }
    error = kl_queue_open(connection->disk, job->index, &job->queue);
    if (error < 0) {
        error = complain(td, error, "kl_queue_open");
        let_go(connection);
        goto out;
    }
    connection->taken[job->index] = true;
    connection->jobs++;
    job->connection = connection;
out:
    pthread_mutex_unlock(&connections_lock);
    return error;
}

static void kickless_cleanup(struct thread_data *td)
{
    struct job *job = td->io_ops_data;
    if (!job)
        return;
    kl_queue_close(job->queue);
    if (job->connection) {
        pthread_mutex_lock(&connections_lock);
        job->connection->taken[job->index] = false;
        job->connection->jobs--;
        let_go(job->connection);
        pthread_mutex_unlock(&connections_lock);
    }
    free(job->pending);
    free(job->failed);
    free(job->done);
    free(job);
    td->io_ops_data = NULL;
}

static int kickless_init(struct thread_data *td)
{
    struct job *job;
    int error = check_job(td);
    if (error)
        return error;
    job = calloc(1, sizeof(*job));
    if (!job) {
        td_verror(td, ENOMEM, "job");
        return ENOMEM;
    }
    td->io_ops_data = job;
    job->depth = td->o.iodepth;
    job->pending = calloc(job->depth, sizeof(*job->pending));
    job->failed = calloc(job->depth, sizeof(*job->failed));
    job->done = calloc(job->depth, sizeof(*job->done));
    if (job->pending && job->failed && job->done) {
        error = take_queue(td, job);
    } else {
        error = ENOMEM;
        td_verror(td, error, "job");
    }
    if (error)
        kickless_cleanup(td);
    else
        job->flushes = kl_disk_offers(job->connection->disk, KL_FLUSH) == 1;
    return error;
}

/*
 * Tells fio the size of the disk. fio calls this before the jobs begin, in the process that starts them. So
 * the connection does not stay open.
 */
static int kickless_get_file_size(struct thread_data *td, struct fio_file *f)
{
    kl_options opened;
    kl_disk *disk;
    int64_t size;
    int error = check_job(td);
    if (error)
        return error;
    opened = disk_options(td, 1);
    error = kl_disk_open(&opened, &disk);
    /* After ENOENT, fio would try to create a file. */
    if (error < 0)
        return complain(td, error == -ENOENT ? -ECONNREFUSED : error, "kl_disk_open");
    size = kl_disk_size(disk);
    kl_disk_close(disk);
    if (size < 0)
        return complain(td, size, "kl_disk_size");
    f->filetype = FIO_TYPE_BLOCK;
    f->real_file_size = size;
    fio_file_set_size_known(f);
    return 0;
}

/* Makes a new region of shared memory, for buffers that do not fit into the disk's own memory. */
static int register_memory(kl_disk *disk, size_t len, kl_buffer **memory)
{
    int error, file = memfd_create("fio", MFD_CLOEXEC);
    len = (len + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    if (file < 0)
        return -errno;
    error = ftruncate(file, len) < 0 ? -errno : kl_buffer_register(disk, file, 0, len, memory);
    close(file);
    return error;
}

static int kickless_iomem_alloc(struct thread_data *td, size_t len)
{
    struct job *job = td->io_ops_data;
    kl_disk *disk = job->connection->disk;
    int error = kl_buffer_alloc(disk, len, &job->memory);
    if (error == -ENOMEM)
        error = register_memory(disk, len, &job->memory);
    if (error < 0)
        return complain(td, error, "memory to share");
    td->orig_buffer = kl_buffer_data(job->memory);
    return 0;
}

static void kickless_iomem_free(struct thread_data *td)
{
    struct job *job = td->io_ops_data;
    if (job) {
        kl_buffer_free(job->memory);
        job->memory = NULL;
    }
    td->orig_buffer = NULL;
}

static enum fio_q_status kickless_queue(struct thread_data *td, struct io_u *io_u)
{
    struct job *job = td->io_ops_data;
    kl_request request = {.offset = io_u->offset, .length = io_u->xfer_buflen, .cookie = (uintptr_t)io_u};

    fio_ro_check(td, io_u);
    if (job->pending_count == job->depth)
        return FIO_Q_BUSY;
    switch (io_u->ddir) {
    case DDIR_READ:
    case DDIR_WRITE:
        request.kind = io_u->ddir == DDIR_READ ? KL_READ : KL_WRITE;
        request.buffer = job->memory;
        request.buffer_offset = (char *)io_u->xfer_buf - (char *)kl_buffer_data(job->memory);
        break;
    case DDIR_TRIM:
        request.kind = KL_DISCARD;
        break;
    case DDIR_SYNC:
    case DDIR_DATASYNC:
    case DDIR_SYNC_FILE_RANGE:
        /* Without a write cache, completed writes are durable already. */
        if (!job->flushes)
            return FIO_Q_COMPLETED;
        request.kind = KL_FLUSH;
        request.offset = request.length = 0;
        break;
    default:
        io_u->error = EINVAL;
        return FIO_Q_COMPLETED;
    }
    job->pending[job->pending_count++] = request;
    return FIO_Q_QUEUED;
}

/* Tells fio that these requests were submitted now, as one batch. */
static void tell_issued(struct thread_data *td, const kl_request *requests, unsigned int count)
{
    struct timespec now;
    unsigned int at;
    io_u_mark_submit(td, count);
    if (!fio_fill_issue_time(td))
        return;
    fio_gettime(&now, NULL);
    for (at = 0; at < count; at++) {
        struct io_u *io_u = (struct io_u *)(uintptr_t)requests[at].cookie;
        io_u->issue_time = now;
        io_u_queued(td, io_u);
    }
    if (td->o.read_iolog_file)
        td->last_issue = now;
}

/* Submits the pending requests for which the ring has room. The others stay pending until the next call. */
static int kickless_commit(struct thread_data *td)
{
    struct job *job = td->io_ops_data;
    unsigned int first = 0;
    while (first < job->pending_count) {
        int count = kl_queue_submit(job->queue, job->pending + first, job->pending_count - first);
        if (count == -EAGAIN)
            break;
        if (count < 0) {
            log_err("kickless: %s\n", kl_last_error());
            job->failed[job->failed_count++] =
                (kl_completion){.cookie = job->pending[first].cookie, .result = count};
            count = 1;
        } else {
            tell_issued(td, job->pending + first, count);
        }
        first += count;
    }
    job->pending_count -= first;
    if (first && job->pending_count)
        memmove(job->pending, job->pending + first, job->pending_count * sizeof(*job->pending));
    return 0;
}

static unsigned int take_failed(struct job *job, kl_completion *place, unsigned int max)
{
    unsigned int count = 0;
    while (count < max && job->failed_count)
        place[count++] = job->failed[--job->failed_count];
    return count;
}

static int kickless_getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *t)
{
    struct job *job = td->io_ops_data;
    int64_t timeout = t ? t->tv_sec * 1000000000LL + t->tv_nsec : -1;
    unsigned int count = 0;
    if (max > job->depth)
        max = job->depth;
    if (min > max)
        min = max;
    do {
        unsigned int wanted;
        int got;
        kickless_commit(td);
        count += take_failed(job, job->done + count, max - count);
        wanted = count < min ? min - count : 0;
        /* The first completion makes room for pending requests, so the wait ends there. */
        if (wanted && job->pending_count)
            wanted = 1;
        got = kl_queue_wait(job->queue, job->done + count, wanted, max - count, timeout);
        if (got < 0)
            return count ? (int)count : -complain(td, got, "kl_queue_wait");
        count += got;
    } while (count < min && timeout < 0);
    return count;
}

static struct io_u *kickless_event(struct thread_data *td, int event)
{
    struct job *job = td->io_ops_data;
    struct io_u *io_u = (struct io_u *)(uintptr_t)job->done[event].cookie;
    io_u->error = -job->done[event].result;
    return io_u;
}

/* Does nothing. The disk stays open as long as the job runs, and a file is only its name. */
static int nothing(struct thread_data *td, struct fio_file *f)
{
    return 0;
}

struct ioengine_ops ioengine = {
    .name = "kickless",
    .version = FIO_IOOPS_VERSION,
    .flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_NO_OFFLOAD,
    .init = kickless_init,
    .cleanup = kickless_cleanup,
    .queue = kickless_queue,
    .commit = kickless_commit,
    .getevents = kickless_getevents,
    .event = kickless_event,
    .iomem_alloc = kickless_iomem_alloc,
    .iomem_free = kickless_iomem_free,
    .open_file = nothing,
    .close_file = nothing,
    .invalidate = nothing,
    .unlink_file = nothing,
    .get_file_size = kickless_get_file_size,
    .options = options,
    .option_struct_size = sizeof(struct kickless_options),
};
