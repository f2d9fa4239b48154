//! Runs a Linux guest whose card is the network of a user, through passt. The host is a namespace of the
//! test.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers fail by panicking")]

use std::io::Write;

use kickless_testing::{in_network_namespace, ip};
use kickless_tests::daemon::{CardConfig, Daemon, card_counter};
use kickless_tests::guest::qemu::{Guest, GuestConfig, NicConfig};
use kickless_tests::guest::sha256;
use kickless_tests::page_server::PageServer;

/// The length of the page. The guest receives it in many frames.
const PAGE: usize = 1 << 20;

/// Gets an address by DHCP, and a page from a server at the host's loopback.
#[test]
fn a_guest_fetches_a_page_of_the_host() {
    in_network_namespace(|| {
        ip("link set dev lo up");
        ip("link add up0 type veth peer name up1");
        ip("link set up1 up");
        ip("link set up0 up");
        ip("addr add 10.78.0.2/24 dev up0");
        ip("route add default via 10.78.0.1");
        let page: Vec<u8> = (0..PAGE).map(|n| (n / 7) as u8).collect();
        let mut copy = tempfile::NamedTempFile::new().unwrap();
        copy.write_all(&page).unwrap();
        let server = PageServer::start(page).unwrap();
        let daemon = Daemon::start_card(&CardConfig::new("user,-4")).unwrap();
        let nic = NicConfig::new(daemon.socket(), 1, "mac=52:54:00:00:00:01");
        let task = format!("ipv6.disable=1 kl.task=fetch kl.page=eth0:{}", server.port());
        let config = GuestConfig { nics: vec![nic], ..GuestConfig::new(&task, Vec::new()) };
        let results = Guest::start(&config).unwrap().finish().unwrap();
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0), "{log:#?}");
        assert_eq!(results["eth0.address"], "10.78.0.2");
        assert_eq!(results["eth0.page"], sha256(copy.path(), 0, PAGE as u64).unwrap());
        for name in ["sent_invalid", "sent_refused", "dropped_long", "dropped_unread"] {
            assert_eq!(card_counter(&log, name).unwrap(), 0, "{name}");
        }
    });
}
