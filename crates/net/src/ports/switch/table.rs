//! The addresses that the switch has learned. Has no side effects.
//!
//! Any guest can fill the table with addresses, so the table gives each port a part that no other port can
//! take, its *reserve*. Beyond that, ports share room for [`SHARED_MAX`] addresses.
//!
//! No step takes long, whatever guests send. Entries are in an array and in two lists: those of a hash value,
//! and all of them by their age. So the oldest ones are found without a search. The memory of the entries is
//! there before a frame needs it.

use crate::card::filter::Address;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

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
/// The lists of hash values. Each has about one entry if 250 cards use all that they can.
const BUCKETS: usize = 8192;
/// The entries whose memory is there from the beginning: with the reserves of 250 cards and an uplink.
const PREPARED: usize = SHARED_MAX + PORT_ADDRESSES_MAX + 250 * RESERVE;
/// The number of no entry, and of no port.
const NONE: u32 = u32::MAX;
const NO_PORT: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The address and its VLAN ([`key`]).
    key: u64,
    /// The port, or [`NO_PORT`] if the entry is free.
    port: u16,
    /// The second in which the address last sent a frame.
    seen: u32,
    /// The next entry with the same hash value, or the next free one.
    next: u32,
    /// The neighbours in the list by age.
    older: u32,
    newer: u32,
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
    hash: RandomState,
    /// The first entry of each hash value.
    buckets: Box<[u32]>,
    entries: Vec<Entry>,
    /// The first free entry.
    free: u32,
    oldest: u32,
    newest: u32,
    /// The share of each port, by its number.
    shares: Vec<Share>,
    /// The addresses beyond the reserves of their ports.
    shared: usize,
    /// The reserves of all ports.
    reserved: usize,
    /// The latest second so far. Two senders can read the clock in one order and come here in the other.
    now: u32,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            hash: RandomState::new(),
            buckets: vec![NONE; BUCKETS].into(),
            entries: Vec::with_capacity(PREPARED),
            free: NONE,
            oldest: NONE,
            newest: NONE,
            shares: Vec::new(),
            shared: 0,
            reserved: 0,
            now: 0,
        }
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
        self.reserved += reserve;
        let most = SHARED_MAX + self.reserved;
        self.entries.reserve(most.saturating_sub(self.entries.len()));
    }

    /// Removes a port and forgets all its addresses.
    pub(super) fn leave(&mut self, port: u16) {
        for number in 0..self.entries.len() {
            if self.entries[number].port == port {
                // Lossless, because the table has fewer entries.
                self.remove(number as u32);
            }
        }
        let share = std::mem::take(&mut self.shares[usize::from(port)]);
        self.reserved -= share.reserve;
    }

    /// Notes that `address` sent a frame from `port`. Forgets where it was before. If the port has no room
    /// for another address, nothing is noted: frames for it go where they went before, or to all ports.
    ///
    /// An address that is behind another port stays there then. Otherwise a port that is full could make
    /// addresses of others unknown, and get their frames.
    pub(super) fn learn(&mut self, vlan: u16, address: Address, port: u16, now: u32) {
        self.now = self.now.max(now);
        let key = key(vlan, address);
        let bucket = self.bucket(key);
        let known = self.find_entry(bucket, key);
        if let Some(number) = known {
            let entry = self.entries[number as usize];
            if entry.port == port {
                if entry.seen != self.now {
                    self.renew(number);
                }
                return;
            }
        }
        if known.is_none() || !self.has_room(port) {
            self.expire();
        }
        if !self.has_room(port) {
            return;
        }
        // It may have been one of the oldest.
        match self.find_entry(bucket, key) {
            Some(number) => {
                let before = std::mem::replace(&mut self.entries[number as usize].port, port);
                self.uncount(before);
                self.renew(number);
            }
            None => self.insert(bucket, key, port),
        }
        self.count(port);
    }

    /// Returns the port of an address that is known.
    pub(super) fn find(&self, vlan: u16, address: Address, now: u32) -> Option<u16> {
        let key = key(vlan, address);
        let entry = self.entries[self.find_entry(self.bucket(key), key)? as usize];
        (now.saturating_sub(entry.seen) < AGEING).then_some(entry.port)
    }

    fn bucket(&self, key: u64) -> usize {
        self.hash.hash_one(key) as usize % BUCKETS
    }

    fn find_entry(&self, bucket: usize, key: u64) -> Option<u32> {
        let mut number = self.buckets[bucket];
        while let Some(entry) = self.entries.get(number as usize) {
            if entry.key == key {
                return Some(number);
            }
            number = entry.next;
        }
        None
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
            match self.entries.get(self.oldest as usize) {
                Some(oldest) if self.now - oldest.seen >= AGEING => self.remove(self.oldest),
                _ => return,
            }
        }
    }

    /// Adds an entry, for which there is room. Does not allocate: [`Table::join`] has.
    fn insert(&mut self, bucket: usize, key: u64, port: u16) {
        let next = std::mem::replace(&mut self.buckets[bucket], NONE);
        let entry = Entry { key, port, seen: self.now, next, older: NONE, newer: NONE };
        let number = match self.entries.get_mut(self.free as usize) {
            Some(free) => {
                let number = std::mem::replace(&mut self.free, free.next);
                *free = entry;
                number
            }
            None => {
                self.entries.push(entry);
                // Lossless, as in `leave`.
                (self.entries.len() - 1) as u32
            }
        };
        self.buckets[bucket] = number;
        self.append(number);
    }

    /// Frees an entry.
    fn remove(&mut self, number: u32) {
        self.unlink(number);
        let Entry { key, port, next, .. } = self.entries[number as usize];
        self.uncount(port);
        let bucket = self.bucket(key);
        let mut at = self.buckets[bucket];
        if at == number {
            self.buckets[bucket] = next;
        } else {
            while self.entries[at as usize].next != number {
                at = self.entries[at as usize].next;
            }
            self.entries[at as usize].next = next;
        }
        let entry = &mut self.entries[number as usize];
        (entry.port, entry.next) = (NO_PORT, self.free);
        // A free entry is found by no key.
        self.free = number;
    }

    /// Makes an entry the newest.
    fn renew(&mut self, number: u32) {
        self.entries[number as usize].seen = self.now;
        if self.newest != number {
            self.unlink(number);
            self.append(number);
        }
    }

    /// Takes an entry out of the list by age.
    fn unlink(&mut self, number: u32) {
        let Entry { older, newer, .. } = self.entries[number as usize];
        match self.entries.get_mut(older as usize) {
            Some(older) => older.newer = newer,
            None => self.oldest = newer,
        }
        match self.entries.get_mut(newer as usize) {
            Some(newer) => newer.older = older,
            None => self.newest = older,
        }
    }

    /// Puts an entry at the end of the list by age.
    fn append(&mut self, number: u32) {
        let older = std::mem::replace(&mut self.newest, number);
        let entry = &mut self.entries[number as usize];
        (entry.older, entry.newer) = (older, NONE);
        match self.entries.get_mut(older as usize) {
            Some(older) => older.newer = number,
            None => self.oldest = number,
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
        table.entries.iter().filter(|entry| entry.port == port).count()
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

    #[test]
    fn the_memory_of_the_entries_is_there_before_frames_come() {
        let mut table = table(300);
        let (capacity, at) = (table.entries.capacity(), table.entries.as_ptr());
        assert!(capacity >= SHARED_MAX + 300 * RESERVE);
        for port in 0..300 {
            for number in 0..1100 {
                table.learn(port, address(number), port, number);
            }
        }
        assert_eq!((table.entries.capacity(), table.entries.as_ptr()), (capacity, at));
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
                let is_new = table.find_entry(table.bucket(key(0, address(number))), key(0, address(number))).is_none();
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
            // The list by age has each entry once, in order.
            let (mut number, mut listed, mut last) = (table.oldest, 0, 0);
            while let Some(entry) = table.entries.get(number as usize) {
                prop_assert!(entry.seen >= last && entry.port != NO_PORT);
                (number, listed, last) = (entry.newer, listed + 1, entry.seen);
            }
            prop_assert_eq!(listed, (0..4).map(|port| of(&table, port)).sum::<usize>());
        }
    }
}
