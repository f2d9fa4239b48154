//! The addresses that the switch has learned. Has no side effects.

use crate::filter::Address;
use std::collections::HashMap;

/// The most addresses.
pub(super) const ADDRESSES_MAX: usize = 4096;
/// The most addresses of one port, so that one port cannot fill the table: a quarter of it.
pub(super) const PORT_ADDRESSES_MAX: u32 = 1024;
/// Seconds after which an address that sends nothing is forgotten (IEEE 802.1Q, table 8-10).
pub(super) const AGEING: u32 = 300;

/// An address in a VLAN.
type Key = (u16, Address);

#[derive(Clone, Copy, Debug)]
struct Entry {
    port: u16,
    /// The second in which the address last sent a frame.
    seen: u32,
}

/// The port of each address, by VLAN.
#[derive(Debug)]
pub(super) struct Table {
    entries: HashMap<Key, Entry>,
    /// The number of addresses of each port.
    counts: Vec<u32>,
    /// The second of the last search for old addresses.
    swept: u32,
}

impl Default for Table {
    fn default() -> Self {
        Self { entries: HashMap::with_capacity(ADDRESSES_MAX), counts: Vec::new(), swept: 0 }
    }
}

impl Table {
    /// Notes that `address` sent a frame from `port`. Forgets where it was before. An address for which there
    /// is no room is not noted: frames for it go to all ports.
    pub(super) fn learn(&mut self, vlan: u16, address: Address, port: u16, now: u32) {
        let entry = Entry { port, seen: now };
        if let Some(known) = self.entries.get_mut(&(vlan, address)) {
            let before = std::mem::replace(known, entry);
            if before.port != port {
                *self.count(before.port) -= 1;
                *self.count(port) += 1;
            }
            return;
        }
        if !self.has_room(port) {
            self.sweep(now);
        }
        if self.has_room(port) {
            self.entries.insert((vlan, address), entry);
            *self.count(port) += 1;
        }
    }

    /// Returns the port of an address that is known.
    pub(super) fn find(&self, vlan: u16, address: Address, now: u32) -> Option<u16> {
        let entry = self.entries.get(&(vlan, address))?;
        (now.saturating_sub(entry.seen) < AGEING).then_some(entry.port)
    }

    /// Forgets all addresses of a port.
    pub(super) fn forget(&mut self, port: u16) {
        self.entries.retain(|_, entry| entry.port != port);
        *self.count(port) = 0;
    }

    fn has_room(&mut self, port: u16) -> bool {
        // A move can give a port more than its share.
        self.entries.len() < ADDRESSES_MAX && *self.count(port) < PORT_ADDRESSES_MAX
    }

    /// Forgets old addresses, at most once a second.
    fn sweep(&mut self, now: u32) {
        if std::mem::replace(&mut self.swept, now) == now {
            return;
        }
        let counts = &mut self.counts;
        self.entries.retain(|_, entry| {
            let is_kept = now.saturating_sub(entry.seen) < AGEING;
            if !is_kept {
                counts[usize::from(entry.port)] -= 1;
            }
            is_kept
        });
    }

    fn count(&mut self, port: u16) -> &mut u32 {
        let port = usize::from(port);
        if port >= self.counts.len() {
            self.counts.resize(port + 1, 0);
        }
        &mut self.counts[port]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(number: u32) -> Address {
        let [a, b, c, d] = number.to_be_bytes();
        [2, 0, a, b, c, d]
    }

    #[test]
    fn addresses_move_and_age() {
        let mut table = Table::default();
        table.learn(0, address(1), 3, 10);
        assert_eq!(table.find(0, address(1), 309), Some(3));
        assert_eq!(table.find(0, address(1), 310), None);
        assert_eq!((table.find(1, address(1), 10), table.find(0, address(2), 10)), (None, None));
        table.learn(0, address(1), 4, 200);
        assert_eq!(table.find(0, address(1), 499), Some(4));
        table.forget(4);
        assert_eq!(table.find(0, address(1), 200), None);
    }

    #[test]
    fn one_port_cannot_fill_the_table() {
        let mut table = Table::default();
        for number in 0..10_000 {
            table.learn(0, address(number), 1, 5);
        }
        assert_eq!(table.entries.len(), PORT_ADDRESSES_MAX as usize);
        table.learn(0, address(20_000), 2, 5);
        assert_eq!(table.find(0, address(20_000), 5), Some(2));
        for port in 2..10 {
            for number in 0..2000 {
                table.learn(port, address(number), port, 6);
            }
        }
        assert_eq!(table.entries.len(), ADDRESSES_MAX);
        // Old addresses make room.
        table.learn(0, address(30_000), 20, 305);
        assert_eq!(table.find(0, address(30_000), 305), Some(20));
    }

    proptest! {
        #[test]
        fn the_counts_are_those_of_the_entries(
            steps in proptest::collection::vec((0u32..1500, 0u16..4, 0u32..40, 0u32..20), 0..4000)
        ) {
            let (mut table, mut now) = (Table::default(), 0);
            for (number, port, seconds, kind) in steps {
                now += seconds;
                match kind {
                    0 => table.forget(port),
                    1 => table.sweep(now),
                    _ => {
                        table.learn(0, address(number), port, now);
                        if let Some(found) = table.find(0, address(number), now) {
                            prop_assert_eq!(found, port);
                        }
                    }
                }
                prop_assert!(table.entries.len() <= ADDRESSES_MAX);
            }
            for port in 0..4 {
                let entries = table.entries.values().filter(|entry| entry.port == port).count();
                prop_assert_eq!(*table.count(port) as usize, entries);
            }
        }
    }
}
