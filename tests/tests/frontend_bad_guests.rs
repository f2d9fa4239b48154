//! Tests guests that write invalid data. An invalid ring stops while the other rings go on. An invalid
//! request gets the right error status.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::time::Instant;

use kickless_memory::Gpa;
use kickless_spec::blk;
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request, RequestMemory, UNANSWERED};
use kickless_tests::driver::{Buffer, Queue, desc};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_tests::frontend::served::{IMAGE_SIZE, Served};
use kickless_tests::with_each_engine;
use zerocopy::IntoBytes;

with_each_engine! {
    invalid_rings_break_alone
    a_ring_broken_with_requests_in_flight
    malformed_requests_fail
    requests_outside_memory_fail
}

const SIZE: u16 = 256;
/// An address outside guest memory.
const OUTSIDE_MEMORY: Gpa = Gpa(0x100);
const BOTH: Shape = Shape { queues: 2, size: SIZE, indirect: true, ..Shape::LINUX };
const DIRECT: Shape = Shape { indirect: false, ..BOTH };

/// The machine, the action of its guest on queue 0, and the words in the log.
type Case = (Shape, fn(&Ram, &mut Queue, &RequestMemory), &'static [&'static str]);

/// Makes one descriptor available as a chain.
fn offer(queue: &mut Queue, first: Desc) {
    queue.write_desc(0, &first);
    queue.offer(0);
    queue.flush();
}

/// Makes an indirect table available.
fn table(ram: &Ram, queue: &mut Queue, place: &RequestMemory, entries: &[Desc]) {
    ram.map().write(place.table(), entries.as_bytes()).unwrap();
    let len = size_of_val(entries) as u32;
    offer(queue, desc(place.table(), len, DESC_F_INDIRECT, 0));
}

const CASES: &[Case] = &[
    (DIRECT, |_, queue, _| queue.set_avail_idx(queue.next_avail() + SIZE + 1), &["avail index"]),
    (DIRECT, |_, queue, _| queue.set_avail_idx(queue.next_avail().wrapping_sub(1)), &["avail index"]),
    (
        DIRECT,
        |_, queue, _| {
            queue.offer(SIZE);
            queue.flush();
        },
        &["head 256 in a table of 256"],
    ),
    (
        DIRECT,
        |_, queue, _| {
            queue.offer(u16::MAX);
            queue.flush();
        },
        &["head 65535"],
    ),
    (DIRECT, |_, queue, place| offer(queue, desc(place.data(), 16, DESC_F_NEXT, SIZE)), &["goes on at 256"]),
    (DIRECT, |_, queue, place| offer(queue, desc(place.data(), 16, DESC_F_NEXT, 0)), &["longer than 256"]),
    (
        DIRECT,
        |_, queue, place| {
            queue.write_desc(1, &desc(place.data(), 16, DESC_F_NEXT | DESC_F_WRITE, 2));
            queue.write_desc(2, &desc(place.data(), 16, 0, 0));
            offer(queue, desc(place.data(), 16, DESC_F_NEXT, 1));
        },
        &["readable buffer after a writable one"],
    ),
    (
        DIRECT,
        |_, queue, place| {
            queue.write_desc(1, &desc(place.data(), u32::MAX, DESC_F_NEXT | DESC_F_WRITE, 2));
            queue.write_desc(2, &desc(place.data(), 16, DESC_F_WRITE, 0));
            offer(queue, desc(place.data(), u32::MAX, DESC_F_NEXT, 1));
        },
        &["has 0x", "bytes"],
    ),
    (
        DIRECT,
        |ram, queue, place| table(ram, queue, place, &[desc(place.data(), 16, 0, 0)]),
        &["not negotiated"],
    ),
    (
        BOTH,
        |_, queue, place| offer(queue, desc(place.table(), 16, DESC_F_INDIRECT | DESC_F_NEXT, 1)),
        &["after its indirect table"],
    ),
    (BOTH, |_, queue, place| offer(queue, desc(place.table(), 0, DESC_F_INDIRECT, 0)), &["of 0 bytes"]),
    (BOTH, |_, queue, place| offer(queue, desc(place.table(), 24, DESC_F_INDIRECT, 0)), &["of 24 bytes"]),
    (
        BOTH,
        |_, queue, _| offer(queue, desc(OUTSIDE_MEMORY, 64, DESC_F_INDIRECT, 0)),
        &["not all in guest memory"],
    ),
    (
        BOTH,
        |_, queue, _| offer(queue, desc(Gpa(u64::MAX - 8), 64, DESC_F_INDIRECT, 0)),
        &["not all in guest memory"],
    ),
    (
        BOTH,
        |ram, queue, place| table(ram, queue, place, &[desc(place.table(), 16, DESC_F_INDIRECT, 0)]),
        &["within an indirect table"],
    ),
    (
        BOTH,
        |ram, queue, place| table(ram, queue, place, &[desc(place.data(), 16, DESC_F_NEXT, 0)]),
        &["longer than"],
    ),
    (
        BOTH,
        |ram, queue, place| table(ram, queue, place, &[desc(place.data(), 16, DESC_F_NEXT, 1)]),
        &["goes on at 1"],
    ),
    (BOTH, |_, queue, _| offer(queue, desc(Gpa(RAM_BASE), 0xffff_fff0, DESC_F_INDIRECT, 0)), &["chain 0"]),
];

fn invalid_rings_break_alone(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for (shape, rubbish, words) in CASES {
        let mut machine = Machine::start(served.socket(), shape).unwrap();
        machine.write(0, 4, &[4; 512]).unwrap();
        let seen = served.daemon.log().len();
        rubbish(&machine.ram, &mut machine.queues[0], &machine.request_memory[0]);
        served.check_broken_queue(&mut machine, seen, words).unwrap();
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end().unwrap();
}

/// Requests taken before the ring broke complete as usual.
fn a_ring_broken_with_requests_in_flight(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for _ in 0..10 {
        let mut machine = Machine::start(served.socket(), &DIRECT).unwrap();
        let request_memory: Vec<RequestMemory> =
            (0..60).map(|_| RequestMemory::new(&mut machine.ram, 65536).unwrap()).collect();
        for (i, place) in (0..).zip(&request_memory) {
            let request = Request::write(i * 128, &[6; 65536]);
            let buffers = place.lay_out(&machine.ram, &request, Layout::Usual).unwrap();
            machine.queues[0].submit(&machine.ram, &buffers, None).unwrap();
        }
        let seen = served.daemon.log().len();
        machine.queues[0].offer(SIZE);
        machine.queues[0].flush();
        for _ in &request_memory {
            machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
        }
        let status = |place: &RequestMemory| {
            place.outcome(&machine.ram, &Request::write(0, &[6; 65536]), 0).unwrap().status
        };
        assert!(request_memory.iter().all(|place| status(place) == blk::S_OK));
        served.check_broken_queue(&mut machine, seen, &["head 256"]).unwrap();
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end().unwrap();
}

/// Performs a request with `out` bytes for the device and `into` bytes from it. Returns its status.
fn status(machine: &mut Machine, kind: u32, sector: u64, out: usize, into: usize) -> u8 {
    let request = Request { kind, sector, write: vec![1; out], read_len: into };
    machine.perform(0, &request, Layout::Usual).unwrap().status
}

fn malformed_requests_fail(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let sectors = IMAGE_SIZE / blk::SECTOR_SIZE;
    for shape in [DIRECT, BOTH] {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        let m = &mut machine;
        assert_eq!(status(m, blk::T_IN, sectors - 1, 0, 512), blk::S_OK);
        assert_eq!(status(m, blk::T_OUT, sectors - 1, 512, 0), blk::S_OK);
        assert_eq!(status(m, blk::T_IN, sectors, 0, 0), blk::S_OK);
        // Sectors past the end of the disk.
        for sector in [sectors, sectors - 1, u64::MAX, u64::MAX / 512, 1 << 55] {
            assert_eq!(status(m, blk::T_IN, sector, 0, 1024), blk::S_IOERR, "{sector}");
            assert_eq!(status(m, blk::T_OUT, sector, 1024, 0), blk::S_IOERR, "{sector}");
        }
        // Lengths that are no multiple of a sector.
        for len in [1, 511, 513, 4095] {
            assert_eq!(status(m, blk::T_IN, 0, 0, len), blk::S_IOERR, "{len}");
            assert_eq!(status(m, blk::T_OUT, 0, len, 0), blk::S_IOERR, "{len}");
        }
        // Types that do not exist or that the device does not offer.
        for kind in [2, 3, 7, 9, blk::T_GET_LIFETIME, blk::T_DISCARD, blk::T_WRITE_ZEROES, 99, u32::MAX] {
            assert_eq!(status(m, kind, 0, 512, 0), blk::S_UNSUPP, "{kind}");
            assert_eq!(status(m, kind, 0, 0, 512), blk::S_UNSUPP, "{kind}");
        }
        // Buffers for the identity that are larger or smaller than it.
        for len in [0, 1, 19, 21, 4096] {
            assert_eq!(status(m, blk::T_GET_ID, 0, 0, len), blk::S_OK, "{len}");
        }
        assert_eq!(status(m, blk::T_FLUSH, u64::MAX, 512, 512), blk::S_OK);

        // A chain without a needed buffer completes, with a status if it has room for one.
        let place = m.request_memory[0];
        let whole = |writable| Buffer { addr: place.data(), len: 512, writable };
        let short = |len, writable| Buffer { len, ..whole(writable) };
        for (buffers, answered) in [
            (vec![whole(false)], false),
            (vec![whole(true)], true),
            (vec![short(15, false), whole(true)], true),
            (vec![short(0, false), whole(true)], true),
            (vec![short(16, false), short(0, true)], false),
        ] {
            m.ram.map().write(place.data(), &[UNANSWERED; 512]).unwrap();
            let table = shape.indirect.then(|| place.table());
            m.queues[0].submit(&m.ram, &buffers, table).unwrap();
            m.queues[0].flush();
            m.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            let status = m.ram.map().read_obj::<u8>(Gpa(place.data().0 + 511)).unwrap();
            assert_eq!(status, if answered { blk::S_IOERR } else { UNANSWERED }, "{buffers:?}");
        }
        m.write(0, 8, &[8; 512]).unwrap();
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    // A request without a header looks like a buffer of a network card.
    served.end_with_warnings_of(&["as network cards do"]).unwrap();
}

fn requests_outside_memory_fail(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for shape in [DIRECT, BOTH] {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        let (place, end) = (machine.request_memory[0], machine.ram.end());
        for (kind, writable) in [(blk::T_IN, true), (blk::T_OUT, false)] {
            for addr in [OUTSIDE_MEMORY, Gpa(RAM_BASE - 512), Gpa(end - 512), Gpa(end), Gpa(u64::MAX - 100)] {
                let request = Request { kind, ..Request::read(0, 0) };
                let usual = place.lay_out(&machine.ram, &request, Layout::Usual).unwrap();
                let outside = Buffer { addr, len: 1024, writable };
                let [header, status] = usual[..] else { panic!("header and status") };
                // Moves the data, the header or the status.
                for (buffers, answer) in [
                    (vec![header, outside, status], blk::S_IOERR),
                    (vec![Buffer { writable: false, ..outside }, status], blk::S_IOERR),
                    (vec![header, Buffer { writable: true, ..outside }], UNANSWERED),
                ] {
                    place.lay_out(&machine.ram, &request, Layout::Usual).unwrap();
                    let table = shape.indirect.then(|| place.table());
                    machine.queues[0].submit(&machine.ram, &buffers, table).unwrap();
                    machine.queues[0].flush();
                    let used = machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
                    let outcome = place.outcome(&machine.ram, &request, used.len).unwrap();
                    // A header of zeroes that just fits at the end of memory is valid: a read of nothing.
                    let fits = addr == Gpa(end - 512)
                        && buffers.len() == 2
                        && !buffers[0].writable
                        && answer == blk::S_IOERR;
                    assert_eq!(outcome.status, if fits { blk::S_OK } else { answer }, "{buffers:?}");
                }
            }
        }
        machine.write(0, 8, &[8; 512]).unwrap();
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end_without_warnings().unwrap();
}
