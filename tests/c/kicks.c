/* Submits one request, waits for a line on standard input, and submits twenty more: kicks SOCKET. Does not wait for completions. */
#include <kickless_driver.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    kl_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL, .queues = 1, .event_idx = KL_OFF};
    kl_request read = {.kind = KL_READ, .length = 512};
    kl_disk *disk;
    kl_queue *queue;
    char line[8];
    int submitted = 0;

    if (kl_disk_open(&options, &disk) < 0 || kl_queue_open(disk, 0, &queue) < 0) {
        fprintf(stderr, "%s\n", kl_last_error());
        return 1;
    }
    for (int number = 0; number <= 20; number++) {
        if (kl_buffer_alloc(disk, 512, &read.buffer) < 0 || kl_queue_submit(queue, &read, 1) != 1) {
            fprintf(stderr, "%s\n", kl_last_error());
            return 1;
        }
        if (number > 0)
            submitted++;
        else if (!fgets(line, sizeof line, stdin))
            return 1;
    }
    printf("%d submitted\n", submitted);
    fflush(stdout);
    /* The disk stays open, because closing it would wait for a back-end that does not answer. */
    _exit(0);
}
