/*
 * Sends frames to a network card and receives some.
 *
 *     kickless net --socket-path=/tmp/card.sock --port=null,rate=500
 *     cc card.c $(pkg-config --cflags --libs kickless-driver) -o card && ./card /tmp/card.sock
 */
#include <kickless_driver.h>
#include <stdio.h>

#define SENT 32
#define RECEIVED 10

int main(int argc, char **argv)
{
    kl_card_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL};
    /* A broadcast frame of an EtherType that no network stack answers. */
    unsigned char bytes[60] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5};
    unsigned char room[RECEIVED][2048];
    kl_frame out[SENT] = {{0}}, in[RECEIVED] = {{0}};
    kl_card *card = NULL;
    kl_pair *pair = NULL;
    int sent = 0, received = 0, failed = 0;

    for (int n = 0; n < SENT; n++)
        out[n] = (kl_frame){.data = bytes, .length = sizeof bytes};
    for (int n = 0; n < RECEIVED; n++)
        in[n] = (kl_frame){.data = room[n], .capacity = sizeof room[n]};
    failed = kl_card_open(&options, &card) < 0 || kl_pair_open(card, 0, &pair) < 0
        || (sent = kl_pair_send(pair, out, SENT)) < 0 || kl_pair_flush(pair, -1) < 0;
    while (!failed && received < RECEIVED) {
        int more = kl_pair_wait(pair, KL_WAIT_RECEIVE, -1);
        if (more >= 0)
            more = kl_pair_receive(pair, in + received, (size_t)(RECEIVED - received));
        failed = more < 0;
        received += failed ? 0 : more;
    }
    if (failed)
        fprintf(stderr, "card: %s\n", kl_last_error());
    else
        printf("%d frames sent, %d received, the first with %u bytes\n", sent, received, in[0].length);
    kl_pair_close(pair);
    kl_card_close(card);
    return failed;
}
