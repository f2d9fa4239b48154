//! The addresses that the switch has learned. Has no side effects.
//!
//! Any guest can fill the table with addresses, so the table gives each port a part that no other port can
//! take, its *reserve*. Beyond that, ports share room for [`SHARED_MAX`] addresses.
//!
//! No step takes long, whatever guests send. Entries are listed by their age, so the oldest ones are found
//! without a search. A new address allocates its entry, in a map that has room for it. Guests cannot make
//! this frequent: a port gets room for [`PORT_ADDRESSES_MAX`] new addresses in [`AGEING`] seconds.

use crate::card::filter::Address;
use lru::LruCache;
use std::collections::hash_map::RandomState;
use std::num::NonZeroUsize;

/// The most addresses beyond the reserves.
const SHARED_MAX: usize = 4096;
/// The addresses that each card can have, however many the others have. A guest has one, and each of its
/// virtual interfaces another one.
pub(super) const RESERVE: usize = 16;
/// The most addresses of one port, with its reserve: a quarter of those that are shared.
pub(super) const PORT_ADDRESSES_MAX: usize = 1024;
/// Seconds after which an address that sends nothing is forgotten (IEEE 802.1Q, table 8-10).
pub(super) const AGEING: u32 = 300;
/// The most old addresses that a new one removes: more than one, so that they become fewer.
const EXPIRED_MAX: usize = 2;
/// The entries that the map has room for from the beginning, so that it does not grow while a frame waits:
/// with the reserves of 250 cards and an uplink.
const PREPARED: NonZeroUsize = NonZeroUsize::new(SHARED_MAX + PORT_ADDRESSES_MAX + 250 * RESERVE).unwrap();

#[derive(Clone, Copy, Debug)]
struct Entry {
    port: u16,
    /// The second in which the address last sent a frame.
    seen: u32,
}

/// The addresses of a port.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    count: usize,
    reserve: usize,
}

/// The port of each address, by VLAN.
#[derive(Debug)]
pub(super) struct Table {
    /// The entries by address and VLAN ([`key`]), and by age.
    entries: LruCache<u64, Entry, RandomState>,
    /// The share of each port, by its number.
    shares: Vec<Share>,
    /// The addresses beyond the reserves of their ports.
    shared: usize,
    /// The latest second so far. Two senders can read the clock in one order and come here in the other.
    now: u32,
}

impl Default for Table {
    fn default() -> Self {
        let mut entries = LruCache::with_hasher(PREPARED, RandomState::new());
        // The shares bound it.
        entries.resize(NonZeroUsize::MAX);
        Self { entries, shares: Vec::new(), shared: 0, now: 0 }
    }
}

/// Returns an address in a VLAN as a number.
fn key(vlan: u16, address: Address) -> u64 {
    let [a, b, c, d, e, f] = address;
    let [v, w] = vlan.to_be_bytes();
    u64::from_be_bytes([v, w, a, b, c, d, e, f])
}

impl Table {
    /// Adds a port, which has this many addresses for itself.
    pub(super) fn join(&mut self, port: u16, reserve: usize) {
        let index = usize::from(port);
        if index >= self.shares.len() {
            self.shares.resize(index + 1, Share::default());
        }
        self.shares[index] = Share { count: 0, reserve };
    }

    /// Removes a port and forgets all its addresses.
    pub(super) fn leave(&mut self, port: u16) {
        let of_port = self.entries.iter().filter(|(_, entry)| entry.port == port);
        for key in of_port.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.entries.pop(&key);
        }
        let Share { count, reserve } = std::mem::take(&mut self.shares[usize::from(port)]);
        self.shared -= count.saturating_sub(reserve);
    }

    /// Notes that `address` sent a frame from `port`. Forgets where it was before. If the port has no room
    /// for another address, nothing is noted: frames for it go where they went before, or to all ports.
    ///
    /// An address that is behind another port stays there then. Otherwise a port that is full could make
    /// addresses of others unknown, and get their frames.
    pub(super) fn learn(&mut self, vlan: u16, address: Address, port: u16, now: u32) {
        self.now = self.now.max(now);
        let key = key(vlan, address);
        let (known, entry) = (self.entries.peek(&key).copied(), Entry { port, seen: self.now });
        if let Some(known) = known.filter(|known| known.port == port) {
            if known.seen != self.now {
                self.entries.put(key, entry);
            }
            return;
        }
        if known.is_none() || !self.has_room(port) {
            self.expire();
        }
        if !self.has_room(port) {
            return;
        }
        // It may have been one of the oldest, which are gone.
        if let Some(before) = self.entries.put(key, entry) {
            self.uncount(before.port);
        }
        self.count(port);
    }

    /// Returns the port of an address that is known.
    pub(super) fn find(&self, vlan: u16, address: Address, now: u32) -> Option<u16> {
        let entry = self.entries.peek(&key(vlan, address))?;
        (now.saturating_sub(entry.seen) < AGEING).then_some(entry.port)
    }

    fn has_room(&self, port: u16) -> bool {
        let Share { count, reserve } = self.shares[usize::from(port)];
        count < reserve || (count < PORT_ADDRESSES_MAX && self.shared < SHARED_MAX)
    }

    fn count(&mut self, port: u16) {
        let share = &mut self.shares[usize::from(port)];
        self.shared += usize::from(share.count >= share.reserve);
        share.count += 1;
    }

    fn uncount(&mut self, port: u16) {
        let share = &mut self.shares[usize::from(port)];
        share.count -= 1;
        self.shared -= usize::from(share.count >= share.reserve);
    }

    /// Forgets the oldest addresses, if they are too old.
    fn expire(&mut self) {
        for _ in 0..EXPIRED_MAX {
            let oldest = self.entries.peek_lru().map(|(_, entry)| *entry);
            let Some(oldest) = oldest.filter(|oldest| self.now - oldest.seen >= AGEING) else { return };
            self.entries.pop_lru();
            self.uncount(oldest.port);
        }
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

    /// Returns a table with this number of cards.
    fn table(ports: u16) -> Table {
        let mut table = Table::default();
        (0..ports).for_each(|port| table.join(port, RESERVE));
        table
    }

    /// Returns the number of entries of a port.
    fn of(table: &Table, port: u16) -> usize {
        table.entries.iter().filter(|(_, entry)| entry.port == port).count()
    }

    #[test]
    fn addresses_move_and_age() {
        let mut table = table(5);
        table.learn(0, address(1), 3, 10);
        assert_eq!(table.find(0, address(1), 309), Some(3));
        assert_eq!(table.find(0, address(1), 310), None);
        assert_eq!((table.find(1, address(1), 10), table.find(0, address(2), 10)), (None, None));
        table.learn(0, address(1), 4, 200);
        assert_eq!(table.find(0, address(1), 499), Some(4));
        table.leave(4);
        assert_eq!(table.find(0, address(1), 200), None);
    }

    #[test]
    fn one_port_cannot_fill_the_table() {
        let mut table = table(2);
        for number in 0..10_000 {
            table.learn(0, address(number), 1, 5);
        }
        assert_eq!(of(&table, 1), PORT_ADDRESSES_MAX);
        table.learn(0, address(20_000), 0, 5);
        assert_eq!(table.find(0, address(20_000), 5), Some(0));
    }

    /// Ports that have taken all that is shared leave each other one its reserve, and an uplink more.
    #[test]
    fn a_full_table_leaves_each_port_its_reserve() {
        let mut table = table(12);
        table.join(12, PORT_ADDRESSES_MAX);
        for port in 0..10 {
            for number in 0..2000 {
                table.learn(port, address(number), port, 6);
            }
        }
        assert_eq!(table.shared, SHARED_MAX);
        assert_eq!((0..10).map(|port| of(&table, port)).sum::<usize>(), SHARED_MAX + 10 * RESERVE);
        for number in 0..2000 {
            table.learn(20, address(number), 10, 6);
            table.learn(21, address(number), 12, 6);
        }
        assert_eq!((of(&table, 10), of(&table, 12)), (RESERVE, PORT_ADDRESSES_MAX));
        // Old addresses make room.
        table.learn(22, address(0), 11, 306);
        for number in 0..1000 {
            table.learn(0, address(30_000 + number), 10, 306);
        }
        assert!(of(&table, 10) > 900, "{}", of(&table, 10));
    }

    /// A port without room neither takes the addresses of others nor makes them unknown.
    #[test]
    fn a_full_port_cannot_take_addresses() {
        let mut table = table(3);
        for number in 0..PORT_ADDRESSES_MAX as u32 {
            table.learn(0, address(number), 0, 5);
        }
        table.learn(0, address(5000), 1, 5);
        table.learn(0, address(5000), 0, 6);
        assert_eq!(table.find(0, address(5000), 6), Some(1));
        // Its own addresses can go elsewhere, which makes room.
        table.learn(0, address(0), 2, 6);
        table.learn(0, address(5000), 0, 6);
        assert_eq!([0, 5000].map(|number| table.find(0, address(number), 6)), [Some(2), Some(0)]);
        assert_eq!((of(&table, 0), of(&table, 1), of(&table, 2)), (PORT_ADDRESSES_MAX, 0, 1));
    }

    /// A frame removes few old addresses, so that no sender waits long for another one.
    #[test]
    fn a_new_address_removes_two_old_ones_at_most() {
        let mut table = table(2);
        for number in 0..1000 {
            table.learn(0, address(number), 0, 0);
        }
        for number in 0..400u32 {
            let before = of(&table, 0);
            table.learn(0, address(5000 + number), 1, 400);
            assert_eq!(before - of(&table, 0), EXPIRED_MAX, "{number}");
        }
        // Addresses that are known cost nothing.
        let before = of(&table, 0);
        table.learn(0, address(5000), 1, 900);
        assert_eq!(of(&table, 0), before);
    }

    proptest! {
        /// The table as one list.
        #[test]
        fn the_table_is_that_of_the_model(
            steps in proptest::collection::vec((0u32..1500, 0u16..4, 0u32..40, 0u32..20), 0..4000)
        ) {
            let (mut table, mut now) = (table(4), 0);
            let mut model = std::collections::BTreeMap::new();
            for (number, port, seconds, kind) in steps {
                now += if kind < 3 { seconds } else { 0 };
                if kind == 0 {
                    table.leave(port);
                    table.join(port, RESERVE);
                    model.retain(|_, (known, _)| *known != port);
                    continue;
                }
                let is_new = !table.entries.contains(&key(0, address(number)));
                table.learn(0, address(number), port, now);
                let found = table.find(0, address(number), now);
                if found == Some(port) {
                    model.insert(number, (port, now));
                } else {
                    // It has no room, and the address is where it was.
                    prop_assert!(of(&table, port) >= PORT_ADDRESSES_MAX || is_new);
                    let known = model.get(&number).filter(|(_, seen)| now - seen < AGEING);
                    prop_assert_eq!(found, known.map(|(port, _)| *port));
                }
            }
            for (number, (port, seen)) in &model {
                let known = (now - seen < AGEING).then_some(*port);
                prop_assert_eq!(table.find(0, address(*number), now), known);
            }
            let mut shared = 0;
            for port in 0..4 {
                let entries = of(&table, port);
                prop_assert_eq!(table.shares[usize::from(port)].count, entries);
                shared += entries.saturating_sub(RESERVE);
            }
            prop_assert_eq!(table.shared, shared);
            // The list by age is in order.
            prop_assert!(table.entries.iter().rev().is_sorted_by_key(|(_, entry)| entry.seen));
        }
    }
}
