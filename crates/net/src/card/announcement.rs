//! Announces the address of a guest that has moved here, so that switches learn where it is (SEND_RARP).
//!
//! The thread of the session sends the frame, outside of the budgets of workers and the limits of the card.
//! Each announcement can go to all cards of a switch, so a card makes few of them, whatever its front-end
//! requests.

use kickless_handover::Amounts;
use kickless_net_port::{Capture, Direction};
use kickless_spec::net::{ETHERNET_HEADER_LEN, MAC_LEN};
use kickless_sync::lock;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The length of the frame: the shortest of Ethernet, without its check sequence.
const LEN: usize = 60;
const ETHERTYPE_RARP: u16 = 0x8035;
const HARDWARE_ETHERNET: u16 = 1;
const PROTOCOL_IPV4: u16 = 0x0800;
const ADDRESS_LENGTHS: [u8; 2] = [MAC_LEN as u8, 4];
/// "Request reverse" (RFC 903).
const REQUEST: u16 = 3;
/// An IPv4 address that is not known.
const NO_ADDRESS: [u8; 4] = [0; 4];

/// The announcements that a card makes at once, and the time for which each further one waits its turn. QEMU
/// requests five within a second after a migration.
const BURST: u32 = 10;
const INTERVAL: Duration = Duration::from_millis(200);

/// The announcements of a card.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    /// The number of those that the front-end requested.
    pub(crate) requested: AtomicU64,
    /// The number of those that were too many, and were not made.
    pub(crate) limited: AtomicU64,
    pace: Mutex<Pace>,
}

/// The limit of announcements. Pure.
#[derive(Debug, Default)]
struct Pace {
    /// The time at which the card has made no more than its share.
    settled: Duration,
}

impl Pace {
    /// Returns whether an announcement is made at this time, and counts it then.
    fn admits(&mut self, now: Duration) -> bool {
        let begin = self.settled.max(now);
        let is_admitted = begin - now <= INTERVAL * (BURST - 1);
        if is_admitted {
            self.settled = begin + INTERVAL;
        }
        is_admitted
    }
}

impl Announcements {
    /// Returns the nanoseconds until the card has made no more than its share, for the next process.
    pub(crate) fn settles_in_ns(&self) -> u64 {
        let wait = lock(&self.pace).settled.saturating_sub(now());
        u64::try_from(wait.as_nanos()).unwrap_or_default()
    }

    /// Returns the counters by name, for the next process.
    pub(crate) fn amounts(&self) -> Amounts {
        let counts = [("announcements", &self.requested), ("announcements_limited", &self.limited)];
        counts.map(|(name, count)| (name.to_owned(), count.load(Ordering::Relaxed))).into()
    }

    /// Goes on where another process has ended.
    pub(crate) fn go_on(&self, settles_in_ns: u64, amounts: &Amounts) {
        let wait = Duration::from_nanos(settles_in_ns).min(INTERVAL * BURST);
        lock(&self.pace).settled = now() + wait;
        let amount = |name| amounts.get(name).copied().unwrap_or_default();
        self.requested.store(amount("announcements"), Ordering::Relaxed);
        self.limited.store(amount("announcements_limited"), Ordering::Relaxed);
    }

    /// Returns the frame that announces an address, as the front-end of the card requests, and adds it to the
    /// capture. Returns `None` if there were too many requests.
    pub(crate) fn request(&self, capture: &Capture, mac: [u8; MAC_LEN]) -> Option<[u8; LEN]> {
        self.requested.fetch_add(1, Ordering::Relaxed);
        if !lock(&self.pace).admits(now()) {
            self.limited.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let frame = frame(mac);
        if capture.is_on() {
            let read = |into: &mut [u8]| into.copy_from_slice(&frame[..into.len()]);
            capture.add(Direction::Outbound, 0, [(LEN, read)]);
        }
        Some(frame)
    }
}

fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Returns a frame that all switches see, with this address as its source.
fn frame(mac: [u8; MAC_LEN]) -> [u8; LEN] {
    let parts: [&[u8]; 11] = [
        &[0xff; MAC_LEN],
        &mac,
        &ETHERTYPE_RARP.to_be_bytes(),
        &HARDWARE_ETHERNET.to_be_bytes(),
        &PROTOCOL_IPV4.to_be_bytes(),
        &ADDRESS_LENGTHS,
        &REQUEST.to_be_bytes(),
        &mac,
        &NO_ADDRESS,
        &mac,
        &NO_ADDRESS,
    ];
    let mut frame = [0; LEN];
    let mut rest = &mut frame[..];
    for part in parts {
        let (here, more) = rest.split_at_mut(part.len());
        here.copy_from_slice(part);
        rest = more;
    }
    frame
}

const _: () = assert!(ETHERNET_HEADER_LEN + 28 <= LEN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_announcements_are_made_in_a_second() {
        let mut pace = Pace::default();
        let mut admitted = |ms: u64| pace.admits(Duration::from_millis(ms));
        // QEMU announces two moves, one right after the other.
        for ms in [0, 50, 200, 450, 800, 810, 860, 1010, 1260, 1610] {
            assert!(admitted(ms), "{ms}");
        }
        assert_eq!((0..1000).filter(|_| admitted(60_000)).count(), BURST as usize);
        assert_eq!((60_000..70_000).filter(|ms| admitted(*ms)).count(), 49);
        assert!(admitted(70_000) && admitted(1_000_000));
    }

    #[test]
    fn the_frame_is_that_of_rfc_903() {
        let frame = frame([2, 3, 4, 5, 6, 7]);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 3, 4, 5, 6, 7, 0x80, 0x35]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&frame[6..12], &frame[6..12]));
        assert_eq!((&frame[28..32], &frame[38..]), (&[0; 4][..], &[0; 22][..]));
    }
}
