//! Runs two Linux guests on one switch, one of which also has the network of a user, through passt. The
//! host is a namespace of the test.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers fail by panicking")]

use kickless_testing::{in_network_namespace, ip};
use kickless_tests::guest::cards;

/// One worker polls all rings, so packets can go directly from one guest's memory to the other's.
const POOL: &str = "workers = 1\npoll = \"always\"";

/// iperf3 runs between the guests, and one gets an address by DHCP and a page from a server at the host's
/// loopback.
#[test]
fn guests_reach_one_another_and_the_host() {
    in_network_namespace(|| {
        ip("link set dev lo up");
        ip("link add up0 type veth peer name up1");
        ip("link set up1 up");
        ip("link set up0 up");
        ip("addr add 10.78.0.2/24 dev up0");
        ip("route add default via 10.78.0.1");
        let outcome = cards::run(POOL, 2, |_| {}).unwrap();
        assert_eq!(outcome.results["eth1.address"], "10.78.0.2");
        // Below 100, iperf3 prints a fraction.
        assert!(outcome.results["iperf.mbits"].parse::<f64>().unwrap() > 0.0);
        let cards = outcome.log.iter().filter(|line| line.contains(" summary device "));
        let (mut count, mut direct) = (0, 0);
        for line in cards {
            count += 1;
            for name in [
                "sent_invalid",
                "sent_refused",
                "sent_spoofed",
                "sent_tagged",
                "dropped_long",
                "dropped_offload",
            ] {
                assert!(line.contains(&format!(" {name}=0")), "{line}");
            }
            let words = line.split(' ').filter_map(|word| word.strip_prefix("sent_directly="));
            direct += words.map(|count| count.parse::<u64>().unwrap()).sum::<u64>();
        }
        assert_eq!(count, 3);
        // The packets of 64 KiB of iperf3 that Linux sends in several buffers.
        assert!(direct > 100, "{direct} frames went directly");
    });
}
