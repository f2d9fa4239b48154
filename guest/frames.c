// Receives, checks and sends frames of a network card, for the test guest.
//
//   frames receive IFACE COUNT     waits for COUNT test frames and checks each
//   frames send IFACE COUNT LEN    sends COUNT frames of LEN bytes
//
// kickless's null port makes the test frames (crates/net-port/src/test_frame.rs). `receive` fails on a frame
// that is not complete. Otherwise it prints
//   frames=N gaps=N restarts=N lost=N pairs=MASK longest=N source=MAC
// Each pair of queues numbers its frames. `gaps` counts the numbers that are missing. `restarts` counts the
// frames with a lower number than expected. `lost` counts the frames for which the socket of this program had
// no room.
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ETHER_TYPE = 0x88b5, PAIRS_MAX = 32, FRAME_MAX = 1 << 17, CHECKSUM = 32, PATTERN = 36 };

static void fail(const char *what) {
    fprintf(stderr, "frames: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t number_at(const unsigned char *at, int bytes) {
    uint64_t number = 0;
    while (bytes--) number = number << 8 | at[bytes];
    return number;
}

static uint32_t hash(uint32_t hash, const unsigned char *bytes, size_t len) {
    while (len--) hash = (hash ^ *bytes++) * 0x01000193u;
    return hash;
}

// Returns a socket of one interface, for frames of one type.
static int open_socket(const char *name) {
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETHER_TYPE)};
    int room = 64 << 20, fd = socket(AF_PACKET, SOCK_RAW, 0);
    address.sll_ifindex = if_nametoindex(name);
    if (fd < 0 || !address.sll_ifindex) fail(name);
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room)) fail("room");
    if (bind(fd, (struct sockaddr *)&address, sizeof address)) fail("bind");
    return fd;
}

static int receive(const char *name, long count) {
    static unsigned char frame[FRAME_MAX];
    uint64_t next[PAIRS_MAX] = {0};
    unsigned long pairs = 0, gaps = 0, restarts = 0, longest = 0;
    int fd = open_socket(name);
    for (long n = 0; n < count; n++) {
        ssize_t len = recv(fd, frame, sizeof frame, 0);
        if (len < 0) fail("receive");
        unsigned pair = number_at(frame + 18, 2);
        uint64_t number = number_at(frame + 20, 8);
        uint32_t sum = hash(hash(0x811c9dc5u, frame, CHECKSUM), frame + PATTERN, len - PATTERN);
        if (len < 60 || memcmp(frame + 14, "kkl1", 4) || pair >= PAIRS_MAX || number_at(frame + 28, 4) != (uint64_t)len ||
            number_at(frame + CHECKSUM, 4) != sum) {
            fprintf(stderr, "frames: frame %ld, number %lu of pair %u, %zd bytes, is not whole\n", n, number, pair, len);
            return 1;
        }
        if (pairs & 1ul << pair) {
            if (number < next[pair]) restarts++;
            else gaps += number - next[pair];
        }
        pairs |= 1ul << pair;
        next[pair] = number + 1;
        if ((size_t)len > longest) longest = len;
    }
    struct tpacket_stats stats;
    socklen_t size = sizeof stats;
    if (getsockopt(fd, SOL_PACKET, PACKET_STATISTICS, &stats, &size)) fail("statistics");
    printf("frames=%ld gaps=%lu restarts=%lu lost=%u pairs=%lu longest=%lu source=", count, gaps, restarts,
           stats.tp_drops, pairs, longest);
    for (int n = 6; n < 12; n++) printf(n < 11 ? "%02x:" : "%02x\n", frame[n]);
    return 0;
}

static int transmit(const char *name, long count, size_t len) {
    static unsigned char frame[FRAME_MAX];
    int fd = open_socket(name);
    memset(frame, 0x5a, sizeof frame);
    memset(frame, 0xff, 6);
    frame[12] = ETHER_TYPE >> 8;
    frame[13] = ETHER_TYPE & 0xff;
    for (long n = 0; n < count; n++) {
        while (send(fd, frame, len, 0) != (ssize_t)len) {
            if (errno != ENOBUFS) fail("send");
            usleep(1000);
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "receive")) return receive(argv[2], atol(argv[3]));
    if (argc == 5 && !strcmp(argv[1], "send") && atol(argv[4]) <= FRAME_MAX)
        return transmit(argv[2], atol(argv[3]), atol(argv[4]));
    fprintf(stderr, "frames: receive IFACE COUNT | send IFACE COUNT LEN\n");
    return 2;
}
