/*
 * Writes to a disk and reads it back.
 *
 * It writes over bytes 8192 to 12287 of the disk, so serve one that holds nothing else:
 *
 *     kickless blk --socket-path=/tmp/scratch.sock --blk-file=mem:64M
 *     cc read_write.c $(pkg-config --cflags --libs kickless-driver) -o read_write && ./read_write /tmp/scratch.sock
 */
#include <kickless_driver.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    kl_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL};
    const char written[4096] = "written by read_write";
    kl_request read = {.kind = KL_READ, .offset = 8192, .length = sizeof written};
    char id[KL_ID_SIZE];
    kl_disk *disk;
    int failed = kl_disk_open(&options, &disk) < 0 || kl_disk_get_id(disk, id, sizeof id) < 0
        || kl_disk_write(disk, written, sizeof written, 8192) < 0 || kl_disk_flush(disk) < 0
        /* Reads the same bytes without a copy. */
        || kl_buffer_alloc(disk, sizeof written, &read.buffer) < 0 || kl_disk_run(disk, &read) < 0;
    int same = !failed && memcmp(kl_buffer_data(read.buffer), written, sizeof written) == 0;
    if (failed) {
        fprintf(stderr, "read_write: %s\n", kl_last_error());
    } else {
        printf("%s: %lld bytes in %d queues\n", id, (long long)kl_disk_size(disk), kl_disk_queues(disk));
        puts(same ? "written and read back" : "the disk has other bytes");
    }
    kl_buffer_free(read.buffer);
    kl_disk_close(disk);
    return !same;
}
