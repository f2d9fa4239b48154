//! Cards of a switch, and their frames.

use super::AnyPort;
use kickless_spec::net::Header;
use std::sync::atomic::{AtomicU32, Ordering};
use zerocopy::IntoBytes;

/// The rings of a card with one queue pair.
pub const RECEIVE: u16 = 0;
pub const TRANSMIT: u16 = 1;
/// The task of each receive ring on its worker: 10 and the number of its card.
pub const FIRST_TASK: u32 = 10;

/// The address of broadcasts.
pub const EVERYBODY: [u8; 6] = [0xff; 6];

/// Returns the address of a card.
pub fn mac(number: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, number as u8]
}

/// Returns the name of a switch that no other test of this program has.
pub fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("switch-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns a port of a switch, whose name may have options behind it.
pub fn open(switch: &str) -> AnyPort {
    AnyPort::Named(format!("switch:{switch}"))
}

/// Returns the Ethernet header of a frame.
pub fn addressed(to: [u8; 6], from: usize) -> Vec<u8> {
    [&to[..], &mac(from), &[0x88, 0xb5]].concat()
}

/// Returns a frame without payload, behind its header.
pub fn ethernet(to: usize, from: usize) -> Vec<u8> {
    [Header::default().as_bytes(), &addressed(mac(to), from)].concat()
}
