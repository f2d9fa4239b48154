/* Tests every function of the C interface for network cards: card SOCKET. The card must deliver test frames, and have
 * two pairs of queues and the address 52:54:00:12:34:56. */
#define _GNU_SOURCE
#include <errno.h>
#include <kickless_driver.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#define SECOND 1000000000LL
#define COUNT 16

static unsigned char room[COUNT][1600];

/* Receives some frames. They are test frames, which begin with a broadcast address. */
static void receive(kl_pair *pair, int count)
{
    kl_frame frames[COUNT];
    memset(frames, 0, sizeof frames);
    for (int n = 0; n < COUNT; n++)
        frames[n] = (kl_frame){.data = room[n], .capacity = sizeof room[n], .checksum = 9, .ecn = 1};
    while (count > 0) {
        CHECK(kl_pair_wait(pair, KL_WAIT_RECEIVE, 30 * SECOND) == 1);
        int got = kl_pair_receive(pair, frames, COUNT);
        CHECK(got >= 0);
        for (int n = 0; n < got; n++) {
            CHECK(frames[n].length >= 60 && frames[n].length <= 1514);
            CHECK(frames[n].checksum == KL_CHECKSUM_IN_FRAME && frames[n].segment == KL_SEGMENT_NONE);
            CHECK(frames[n].ecn == 0 && memcmp(room[n], "\xff\xff\xff\xff\xff\xff", 6) == 0);
        }
        count -= got;
    }
}

static void send_frames(kl_pair *pair)
{
    unsigned char bytes[1514] = {0};
    kl_frame frames[2] = {{.data = bytes, .length = 60}, {.data = bytes, .length = 1514}};
    CHECK(kl_pair_wait(pair, KL_WAIT_SEND, -1) == 1);
    CHECK(kl_pair_send(pair, frames, 2) == 2);
    CHECK(kl_pair_flush(pair, 30 * SECOND) == 1 && kl_pair_in_flight(pair) == 0);
    CHECK(kl_pair_send(pair, frames, 0) == 0);
    frames[1].length = 13;
    REFUSED(EINVAL, "13 bytes", kl_pair_send(pair, frames + 1, 1));
    frames[1] = (kl_frame){.data = NULL, .length = 60};
    REFUSED(EINVAL, "data is null", kl_pair_send(pair, frames + 1, 1));
    frames[1] = (kl_frame){.data = bytes, .length = 60, .checksum = 3};
    REFUSED(EINVAL, "KL_CHECKSUM", kl_pair_send(pair, frames + 1, 1));
    frames[1] = (kl_frame){.data = bytes, .length = 60, .segment = 4};
    REFUSED(EINVAL, "KL_SEGMENT", kl_pair_send(pair, frames + 1, 1));
    frames[1] = (kl_frame){.data = bytes, .length = 60, .checksum = KL_CHECKSUM_PARTIAL, .checksum_start = 59};
    REFUSED(EINVAL, "not in the frame", kl_pair_send(pair, frames + 1, 1));
    /* A large packet of TCP. */
    static unsigned char large[30000];
    kl_frame packet = {.data = large, .length = sizeof large, .checksum = KL_CHECKSUM_PARTIAL};
    packet.checksum_start = 34;
    packet.checksum_offset = 16;
    packet.segment = KL_SEGMENT_TCPV4;
    packet.segment_size = 1448;
    packet.header_length = 66;
    CHECK(kl_pair_send(pair, &packet, 1) == 1 && kl_pair_flush(pair, -1) == 1);
}

static void sleep_on_descriptor(kl_pair *pair)
{
    struct pollfd watched = {.fd = kl_pair_fd(pair), .events = POLLIN};
    kl_frame frame = {.data = room[0], .capacity = 20};
    int received = 0;
    CHECK(watched.fd >= 0);
    while (received < 20) {
        int may_sleep = kl_pair_arm(pair, KL_WAIT_RECEIVE);
        CHECK(may_sleep == 0 || may_sleep == 1);
        if (may_sleep)
            CHECK(poll(&watched, 1, 30000) == 1);
        /* Only so many bytes are copied as there is room for. */
        memset(room[0], 0, sizeof room[0]);
        int got = kl_pair_receive(pair, &frame, 1);
        CHECK(got >= 0);
        received += got;
        if (got)
            CHECK(frame.length >= 60 && room[0][17] == '1' && room[0][28] == 0);
    }
    REFUSED(EINVAL, "KL_WAIT", kl_pair_arm(pair, 3));
    REFUSED(EINVAL, "KL_WAIT", kl_pair_wait(pair, 3, 0));
    REFUSED(EINVAL, "negative", kl_pair_wait(pair, KL_WAIT_ANY, -2));
}

int main(int argc, char **argv)
{
    kl_card_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL, .pairs = 2};
    kl_card *card = NULL;
    kl_pair *pairs[2] = {NULL};
    kl_pair *again = NULL;
    unsigned char mac[KL_MAC_SIZE];
    kl_counters counters;

    options.connect_timeout_ms = 30000;
    CHECK(kl_card_open(&options, &card) == 0 && card);
    CHECK(kl_card_pairs(card) == 2 && kl_card_mtu(card) == 1500 && kl_card_is_link_up(card) == 1);
    CHECK(kl_card_mac(card, mac) == 1 && memcmp(mac, "\x52\x54\x00\x12\x34\x56", sizeof mac) == 0);
    REFUSED(EINVAL, "mac is null", kl_card_mac(card, NULL));
    for (uint32_t n = 0; n < 2; n++)
        CHECK(kl_pair_open(card, n, &pairs[n]) == 0 && pairs[n]);
    REFUSED(EBUSY, "in use", kl_pair_open(card, 0, &again));
    CHECK(again == NULL);
    REFUSED(EINVAL, "no pair", kl_pair_open(card, 2, &again));
    for (int n = 0; n < 2; n++) {
        receive(pairs[n], 50);
        send_frames(pairs[n]);
        sleep_on_descriptor(pairs[n]);
        CHECK(kl_pair_counters(pairs[n], &counters) == 0);
        CHECK(counters.sent_frames == 3 && counters.sent_bytes == 60 + 1514 + 30000);
        CHECK(counters.received_frames >= 70 && counters.received_invalid == 0 && counters.kicks >= 2);
    }
    CHECK(kl_card_set_pairs(card, 1) == 0);
    REFUSED(EREMOTEIO, "refuses", kl_card_set_pairs(card, 3));
    REFUSED(EINVAL, "KL_RX", kl_card_set_rx_mode(card, 6, 1));
    /* Whether the card has these commands is its own matter. */
    (void)kl_card_set_rx_mode(card, KL_RX_PROMISCUOUS, 1);
    (void)kl_card_set_vlan(card, 7, 1);
    (void)kl_card_set_mac(card, mac);
    (void)kl_card_set_addresses(card, mac, 1, NULL, 0);
    REFUSED(EINVAL, "unicast is null", kl_card_set_addresses(card, NULL, 1, NULL, 0));
    kl_pair_close(pairs[1]);
    kl_pair_close(NULL);
    kl_card_close(card);
    kl_card_close(NULL);
    REFUSED(ENODEV, "dead", kl_pair_receive(pairs[0], NULL, 0));
    kl_pair_close(pairs[0]);

    options.packed = 3;
    REFUSED(EINVAL, "KL_AUTO", kl_card_open(&options, &card));
    CHECK(card == NULL);
    options.size = 4;
    REFUSED(EINVAL, "sizeof(kl_card_options)", kl_card_open(&options, &card));
    puts("all is as it should be");
    return 0;
}
