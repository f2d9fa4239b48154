/* Writes to a disk and reads it back: cc read_write.c $(pkg-config --cflags --libs kickless-driver) && ./a.out SOCKET */
#include <kickless_driver.h>
#include <stdio.h>
#include <string.h>

static int failed(kl_disk *disk)
{
    fprintf(stderr, "read_write: %s\n", kl_last_error());
    kl_disk_close(disk);
    return 1;
}

int main(int argc, char **argv)
{
    kl_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL};
    kl_disk *disk;
    char id[KL_ID_SIZE], written[4096];
    memset(written, 7, sizeof written);
    if (kl_disk_open(&options, &disk) < 0 || kl_disk_get_id(disk, id, sizeof id) < 0)
        return failed(disk);
    printf("%s: %lld bytes in %d queues\n", id, (long long)kl_disk_size(disk), kl_disk_queues(disk));
    if (kl_disk_write(disk, written, sizeof written, 8192) < 0 || kl_disk_flush(disk) < 0)
        return failed(disk);

    /* The same bytes without a copy, as the first of a batch that could be longer. */
    kl_queue *queue;
    kl_buffer *buffer;
    kl_completion done;
    if (kl_queue_open(disk, 0, &queue) < 0 || kl_buffer_alloc(disk, 4096, &buffer) < 0)
        return failed(disk);
    kl_request read = {.kind = KL_READ, .offset = 8192, .length = 4096, .buffer = buffer};
    if (kl_queue_submit(queue, &read, 1) < 0 || kl_queue_wait(queue, &done, 1, 1, -1) < 0)
        return failed(disk);
    int same = done.result == 0 && memcmp(kl_buffer_data(buffer), written, sizeof written) == 0;
    puts(same ? "written and read back" : "the disk has something else");
    kl_buffer_free(buffer);
    kl_queue_close(queue);
    kl_disk_close(disk);
    return !same;
}
