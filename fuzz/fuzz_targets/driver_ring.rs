//! Runs the driver's end of a ring. The input is the device: between the driver's operations, it overwrites
//! any memory that it can reach.
//!
//! Each popped id was in flight and is popped once, whatever bytes the device writes. With IN_ORDER, ids are
//! popped in the order of submission. The reported length never exceeds the writable bytes. An error stays
//! for good. The driver writes only to its own part of the memory.
#![no_main]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};

use kickless_memory::{Area, Gpa, Map, Slot, UserAddr, View};
use kickless_spec::ring::{DESC_F_WRITE, EVENT_LEN, RING_ENTRIES, RING_IDX, avail_len, desc_len, used_len};
use kickless_virtqueue::driver::{Areas, Buffer, Completer, Options, Submitter, Table, UsedError, queue};
use kickless_virtqueue::packed::RingPosition;
use libfuzzer_sys::fuzz_target;

/// Offsets: room for 256 descriptors, the rings, and a table of four entries per id.
const DESC: u64 = 0;
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x1800;
const TABLES: u64 = 0x2800;
const TABLE_LEN: u64 = 64;
const END: u64 = 0x6800;
/// The end of the memory. Neither side uses the part from `END` on.
const BEYOND: u64 = 0x7000;
const BUFFERS_MAX: usize = 4;

static MEMORY: LazyLock<Arc<View>> = LazyLock::new(|| {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, BEYOND).expect("room");
    let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0), BEYOND).expect("a mapping");
    Arc::new(View::new(Map::new(vec![slot]).expect("one slot")))
});

fuzz_target!(|data: &[u8]| {
    let [size, flags, ops @ ..] = data else { return };
    let (event_idx, indirect) = (flags & 1 != 0, flags & 2 != 0);
    let options = match flags & 4 {
        0 => Options::new(1 << (size % 9), event_idx, indirect),
        _ => Options::packed(u16::from(*size) + 1, event_idx, indirect),
    };
    let Ok(options) = options else { return };
    MEMORY.map().write(Gpa(0), &[0; BEYOND as usize]).expect("inside");
    Driver::new(options.with_in_order(flags & 8 != 0)).run(ops);
});

/// A chain that was added and not popped.
#[derive(Clone, Copy)]
struct Chain {
    id: u16,
    writable: u32,
    descriptors: u16,
}

struct Driver {
    options: Options,
    submitter: Submitter,
    completer: Completer,
    tables: Area,
    /// Chains in flight, oldest first.
    in_flight: VecDeque<Chain>,
    /// Ids that were popped and not given back.
    popped: Vec<u16>,
    error: Option<UsedError>,
    /// The index with which an honest device would continue.
    used_idx: u16,
    used_place: RingPosition,
    /// The memory that only the device writes, with its last content.
    device_memory: Vec<u8>,
}

fn area(at: u64, len: usize) -> Area {
    MEMORY.map().area(UserAddr(at), len, 16).expect("inside and aligned")
}

/// Returns the memory that only the device writes.
fn device_memory(options: &Options) -> Vec<u8> {
    let len = if options.is_packed() { EVENT_LEN } else { used_len(options.size(), options.event_idx()) };
    let mut bytes = vec![0; len];
    MEMORY.map().read(Gpa(DEVICE), &mut bytes).expect("inside");
    bytes
}

impl Driver {
    fn new(options: Options) -> Self {
        let size = options.size();
        let lens = match options.is_packed() {
            true => (EVENT_LEN, EVENT_LEN),
            false => (avail_len(size, options.event_idx()), used_len(size, options.event_idx())),
        };
        // The areas have the smallest valid length.
        let areas = Areas {
            desc: area(DESC, desc_len(size)),
            driver: area(DRIVER, lens.0),
            device: area(DEVICE, lens.1),
        };
        let (submitter, completer) = queue(options, areas);
        Self {
            submitter,
            completer,
            tables: area(TABLES, (END - TABLES) as usize),
            in_flight: VecDeque::new(),
            popped: Vec::new(),
            error: None,
            used_idx: 0,
            used_place: RingPosition::FIRST,
            device_memory: device_memory(&options),
            options,
        }
    }

    fn run(&mut self, mut ops: &[u8]) {
        while let [op, rest @ ..] = ops {
            ops = rest;
            let detail = op >> 4;
            match op % 16 {
                0..3 => self.add(detail),
                3 => drop(self.submitter.publish()),
                4..7 => self.pop(detail),
                7 => self.give_back(detail),
                8 if detail % 2 == 0 => self.enable_calls(),
                8 => self.completer.disable_calls(),
                9 => self.check_room(),
                10..14 => self.use_one(detail),
                14 => self.move_index(detail),
                _ => write_anywhere(&mut ops),
            }
            if op % 16 < 10 {
                assert_eq!(
                    self.device_memory,
                    device_memory(&self.options),
                    "the driver wrote to the device's memory"
                );
            } else {
                self.device_memory = device_memory(&self.options);
            }
        }
        let mut beyond = [1; (BEYOND - END) as usize];
        MEMORY.map().read(Gpa(END), &mut beyond).expect("inside");
        assert!(beyond.iter().all(|byte| *byte == 0), "the driver wrote beyond its memory");
    }

    fn add(&mut self, detail: u8) {
        let next = self.submitter.next_id();
        let len = 1 + usize::from(detail % 4);
        let readable = usize::from(detail / 4).min(len);
        let buffer = |at| Buffer { addr: 0x1_0000, len: 512 + at as u32, writable: at >= readable };
        let buffers: [Buffer; BUFFERS_MAX] = std::array::from_fn(buffer);
        let buffers = &buffers[..len];
        let indirect = self.options.indirect() && detail != 15;
        let table = next.filter(|_| indirect).map(|id| {
            let offset = u64::from(id) * TABLE_LEN;
            Table { area: &self.tables, offset: offset as usize, addr: TABLES + offset }
        });
        let descriptors = if table.is_some() { 1 } else { len as u16 };
        match self.submitter.add(buffers, table) {
            Ok(id) => {
                assert_eq!(Some(id), next);
                assert!(id < self.options.size());
                assert!(self.in_flight.iter().all(|chain| chain.id != id) && !self.popped.contains(&id));
                let writable = buffers.iter().filter(|buffer| buffer.writable).map(|buffer| buffer.len).sum();
                self.in_flight.push_back(Chain { id, writable, descriptors });
                let taken: u16 = self.in_flight.iter().map(|chain| chain.descriptors).sum();
                assert!(taken <= self.options.size());
            }
            Err(_) => assert!(next.is_none() || len > 1),
        }
    }

    fn pop(&mut self, detail: u8) {
        for _ in 0..=detail {
            match self.completer.pop() {
                Ok(Some(done)) => {
                    assert_eq!(self.error, None, "an error must stay");
                    let at = self.in_flight.iter().position(|chain| chain.id == done.id);
                    let at = at.expect("a popped id was not in flight");
                    assert!(at == 0 || !self.options.in_order(), "out of order");
                    let chain = self.in_flight.remove(at).expect("found");
                    assert!(done.len <= chain.writable, "the length exceeds the buffers");
                    self.popped.push(done.id);
                }
                Ok(None) => {
                    assert_eq!(self.error, None, "an error must stay");
                    return;
                }
                Err(error) => {
                    assert_eq!(*self.error.get_or_insert(error), error, "an error must stay");
                    return;
                }
            }
        }
    }

    fn give_back(&mut self, detail: u8) {
        if let Some(at) = usize::from(detail).checked_rem(self.popped.len()) {
            self.completer.give_back(self.popped.swap_remove(at));
        }
    }

    fn enable_calls(&mut self) {
        let come = self.completer.enable_calls();
        assert!(come || self.error.is_none(), "a queue with an error must not sleep");
    }

    fn check_room(&mut self) {
        let room = self.submitter.room();
        let (in_flight, popped) = (self.in_flight.len(), self.popped.len());
        assert!(room + in_flight + popped <= usize::from(self.options.size()));
        assert_eq!(self.submitter.next_id().is_some(), room > 0);
    }

    /// Uses a chain as the device, correctly or with small errors.
    fn use_one(&mut self, detail: u8) {
        let Some(at) = usize::from(detail / 4).checked_rem(self.in_flight.len()) else { return };
        let at = if self.options.in_order() && detail % 4 != 0 { 0 } else { at };
        let Chain { id, writable, descriptors } = self.in_flight[at];
        let len = writable + u32::from(detail == 1);
        if self.options.is_packed() {
            let place = self.used_place;
            let flags = place.used() | if len > 0 { DESC_F_WRITE } else { 0 };
            MEMORY.map().write_obj(Gpa(DESC + place.at() as u64 + 8), &len.to_le_bytes()).expect("inside");
            MEMORY.map().write_obj(Gpa(DESC + place.at() as u64 + 12), &id.to_le_bytes()).expect("inside");
            MEMORY
                .map()
                .write_obj(Gpa(DESC + place.flags_at() as u64), &flags.to_le_bytes())
                .expect("inside");
            self.used_place = place.after(descriptors, self.options.size());
        } else {
            let entry = u64::from(self.used_idx & (self.options.size() - 1));
            let element = [u32::from(id).to_le_bytes(), len.to_le_bytes()].concat();
            MEMORY.map().write(Gpa(DEVICE + RING_ENTRIES as u64 + 8 * entry), &element).expect("inside");
            self.move_index(1);
        }
    }

    /// Moves the device's index on, also past elements that were not written.
    fn move_index(&mut self, by: u8) {
        if !self.options.is_packed() {
            self.used_idx = self.used_idx.wrapping_add(by.into());
            let index = self.used_idx.to_le_bytes();
            MEMORY.map().write_obj(Gpa(DEVICE + RING_IDX as u64), &index).expect("inside");
        }
    }
}

/// Writes eight bytes at any address as the device.
fn write_anywhere(ops: &mut &[u8]) {
    let [low, high, a, b, c, d, e, f, g, h, rest @ ..] = ops else { return };
    let at = u64::from(u16::from_le_bytes([*low, *high])) % (END - 8);
    MEMORY.map().write(Gpa(at), &[*a, *b, *c, *d, *e, *f, *g, *h]).expect("inside");
    *ops = rest;
}
