//! Tests packed rings over a real socket: stops and starts, moving memory, and guests that write invalid
//! data.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::os::fd::AsFd;
use std::time::Instant;

use kickless_memory::Gpa;
use kickless_spec::blk;
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, PackedDesc};
use kickless_testing::pattern;
use kickless_tests::driver::Queue;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::packed::entry;
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_tests::frontend::served::Served;
use kickless_tests::frontend::{Answer, LIMIT, addresses};
use kickless_tests::with_each_engine;
use kickless_vhost_user::{FrontendMessage as Message, VringState};
use kickless_virtqueue::packed::RingPosition;
use zerocopy::IntoBytes;

with_each_engine! {
    a_ring_continues_where_it_stopped
    a_stop_drains
    invalid_rings_break_alone
}

/// Odd and no power of two, so that chains cross the end of the ring at other positions in each round.
const SIZE: u16 = 13;
const PACKED: Shape = Shape { queues: 2, size: SIZE, packed: true, ..Shape::LINUX };

fn shapes() -> impl Iterator<Item = Shape> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .map(|(event_idx, indirect)| Shape { event_idx, indirect, ..PACKED })
}

/// Returns the device's position as the driver computes it.
fn next(queue: &Queue) -> RingPosition {
    let (next, used) = queue.positions().unwrap();
    assert_eq!(next, used, "nothing is in flight");
    next
}

fn a_ring_continues_where_it_stopped(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for shape in shapes() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        let mut wraps = [false; 2];
        for round in 0..40u64 {
            let data = pattern(round, 1024);
            machine.write(0, round, &data).unwrap();
            let stopped = machine.frontend.stop(&mut machine.queues[0]).unwrap();
            let expected = next(&machine.queues[0]);
            assert_eq!(RingPosition::from_bits(stopped), expected, "{shape:?}");
            wraps[usize::from(expected.wrap)] = true;
            // Both halves of the value have the position. The upper half may be 0.
            let base = machine.queues[0].base();
            assert_eq!(base, u32::from(stopped) << 16 | u32::from(stopped));
            if round % 2 == 0 {
                machine.queues[0].set_base(u32::from(stopped));
            }
            // The ring cannot start with another used index.
            let other = (base ^ 1 << 16, base ^ 1 << 31);
            for num in [other.0, other.1].into_iter().filter(|num| num >> 16 != 0) {
                let told = Message::SetVringBase(VringState { index: 0, num });
                assert_eq!(machine.frontend.attempt(&told).unwrap(), Answer::Refused, "{num:#x}");
            }
            machine.frontend.start(&machine.queues[0]).unwrap();
            assert_eq!(machine.read(0, round, 1024).unwrap(), data);
        }
        assert_eq!(wraps, [true; 2], "the ring did not wrap");
        drop(machine);
    }
    served.end().unwrap();
}

/// The warning about a packed ring that was served before, without an in-flight buffer.
const GOES_ON: &str = "a packed ring continues from the front-end's index, but it was served before";

/// A device continues a ring at the position where another device left it. Only the front-end says where.
#[test]
fn a_ring_starts_at_any_position() {
    let served = Served::start("io_uring", &[]).unwrap();
    let (mut stopped_at, mut doubtful) = (None, 0);
    for index in [0, 1, SIZE - 1] {
        for wrap in [false, true] {
            let mut machine = Machine::prepare(served.socket(), &PACKED).unwrap();
            let begin = RingPosition { index, wrap };
            doubtful += usize::from(begin != RingPosition::FIRST && stopped_at != Some(begin));
            machine.queues[0].begin_at_position(begin).unwrap();
            machine.frontend.start(&machine.queues[0]).unwrap();
            for round in 0..20u64 {
                let data = pattern(round, 512);
                machine.write(0, round, &data).unwrap();
                assert_eq!(machine.read(0, round, 512).unwrap(), data);
            }
            let stopped = machine.frontend.stop(&mut machine.queues[0]).unwrap();
            assert_eq!(RingPosition::from_bits(stopped), next(&machine.queues[0]));
            stopped_at = Some(RingPosition::from_bits(stopped));
        }
    }
    // A ring that starts elsewhere than at 0 was started by another process.
    let log = served.end().unwrap();
    let trouble = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
    let is_expected = |line: &String| line.contains("every write is made durable") || line.contains(GOES_ON);
    assert!(log.iter().filter(trouble).all(is_expected), "{log:#?}");
    assert_eq!(log.iter().filter(|line| line.contains(GOES_ON)).count(), doubtful, "{log:#?}");
}

/// Without an in-flight buffer, a front-end does not know how far a killed back-end came, and names the first
/// position. The ring is full, so it has no used descriptors, and stalls.
#[test]
fn a_full_ring_whose_position_is_lost_is_a_warning() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::prepare(served.socket(), &Shape { indirect: true, ..PACKED }).unwrap();
    let (ram, queue, place) = (&machine.ram, &mut machine.queues[0], &machine.request_memory[0]);
    let first = queue.base();
    queue.begin_at_position(RingPosition { index: 5, wrap: true }).unwrap();
    queue.set_base(first);
    let buffers = place.lay_out(ram, &Request::read(0, 512), Layout::Usual).unwrap();
    for _ in 0..SIZE {
        queue.submit(ram, &buffers, Some(place.table())).unwrap();
    }
    queue.flush();
    machine.resume().unwrap();
    machine.write(1, 5, &[5; 512]).unwrap();
    assert_eq!(machine.queues[0].used_ready(), 0);
    drop(machine);
    let mut log = served.end().unwrap();
    log.retain(|line| line.contains(" WARN ") || line.contains(" ERROR "));
    assert!(matches!(&log[..], [line] if line.contains(GOES_ON) && line.contains("queue=0")), "{log:#?}");
}

fn a_stop_drains(engine: &str) {
    const LEN: usize = 64 << 10;
    let served = Served::start(engine, &[]).unwrap();
    for shape in shapes() {
        let mut machine = Machine::start(served.socket(), &Shape { size: 100, ..shape }).unwrap();
        let request_memory: Vec<RequestMemory> =
            (0..30).map(|_| RequestMemory::new(&mut machine.ram, LEN).unwrap()).collect();
        for round in 0..8u64 {
            let requests: Vec<Request> =
                (0..30).map(|i| Request::write(i * 128, &pattern(round << 8 | i, LEN))).collect();
            let (ram, queue) = (&machine.ram, &mut machine.queues[0]);
            for (place, request) in request_memory.iter().zip(&requests) {
                let buffers = place.lay_out(ram, request, Layout::Usual).unwrap();
                queue.submit(ram, &buffers, shape.indirect.then(|| place.table())).unwrap();
            }
            queue.flush();
            let stopped = machine.frontend.stop(queue).unwrap();
            // Every request taken has completed before the answer. The used descriptors end where the ring
            // stopped.
            while queue.take_used().unwrap().is_some() {}
            let (_, used) = queue.positions().unwrap();
            assert_eq!(RingPosition::from_bits(stopped), used, "round {round}");
            machine.frontend.number(&Message::GetFeatures).unwrap();
            assert_eq!(machine.queues[0].take_used().unwrap(), None, "a stopped ring moved");
            // The device looks at a ring that starts, without a kick.
            machine.queues[0].kick_fd().take();
            machine.frontend.start(&machine.queues[0]).unwrap();
            while machine.queues[0].in_flight() > 0 {
                machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            }
            for (i, request) in (0..).zip(&requests) {
                assert!(served.on_disk(i * 128, LEN).unwrap() == request.write, "write {i} of round {round}");
            }
        }
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

/// The ring moves to other memory with a new table of regions. The old memory is removed.
#[test]
fn memory_may_be_replaced() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in shapes() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        let own = machine.ram.region_and_file().unwrap();
        for round in 0..20u64 {
            let mut other_ram = Ram::new(0x10_0000_0000 + (round << 24), 1 << 20).unwrap();
            machine.queues[0].move_to(&mut other_ram).unwrap();
            let table = vec![
                (own.0, own.1.as_fd().try_clone_to_owned().unwrap()),
                other_ram.region_and_file().unwrap(),
            ];
            machine.frontend.order(&Message::SetMemTable(table)).unwrap();
            machine.frontend.order(&Message::SetVringAddr(addresses(&machine.queues[0]))).unwrap();
            let data = pattern(round, 1024);
            machine.write(0, 9, &data).unwrap();
            assert_eq!(machine.read(0, 9, 1024).unwrap(), data);
            // The memory is removed while a request is in the ring, and then added again.
            let buffers = machine.request_memory[0]
                .lay_out(&machine.ram, &Request::write(7, &data), Layout::Usual)
                .unwrap();
            let indirect = shape.indirect.then(|| machine.request_memory[0].table());
            machine.queues[0].submit(&machine.ram, &buffers, indirect).unwrap();
            machine.queues[0].flush();
            machine.frontend.remove(other_ram.region()).unwrap();
            machine.frontend.number(&Message::GetFeatures).unwrap();
            machine.frontend.add(&other_ram).unwrap();
            machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            assert_eq!(served.on_disk(7, 1024).unwrap(), data);
        }
        machine.stop().unwrap();
    }
    served.end().unwrap();
}

/// Whether indirect tables are negotiated, the action of the guest on ring 0, and the words in the log.
type Case = (bool, fn(&Ram, &mut Queue, &RequestMemory), &'static [&'static str]);

/// Makes one descriptor available.
fn offer(queue: &mut Queue, descriptor: PackedDesc) {
    queue.append(descriptor);
    queue.flush();
}

/// An address outside guest memory.
const OUTSIDE_MEMORY: u64 = 0x100;

const CASES: &[Case] = &[
    // A chain longer than the ring.
    (
        false,
        |_, queue, at| {
            (0..SIZE).for_each(|_| queue.append(entry(at.data().0, 16, DESC_F_NEXT)));
            queue.flush();
        },
        &["longer than 13"],
    ),
    (
        false,
        |_, queue, at| {
            queue.append(entry(at.data().0, 16, DESC_F_NEXT | DESC_F_WRITE));
            offer(queue, entry(at.data().0, 16, 0));
        },
        &["readable buffer after a writable one"],
    ),
    (
        false,
        |_, queue, at| {
            queue.append(entry(at.data().0, u32::MAX, DESC_F_NEXT));
            offer(queue, entry(at.data().0, u32::MAX, DESC_F_WRITE));
        },
        &["has 0x", "bytes"],
    ),
    (false, |_, queue, at| offer(queue, entry(at.table().0, 16, DESC_F_INDIRECT)), &["not negotiated"]),
    (
        true,
        |_, queue, at| offer(queue, entry(at.table().0, 16, DESC_F_INDIRECT | DESC_F_NEXT)),
        &["after its indirect table"],
    ),
    (true, |_, queue, at| offer(queue, entry(at.table().0, 0, DESC_F_INDIRECT)), &["of 0 bytes"]),
    (true, |_, queue, at| offer(queue, entry(at.table().0, 24, DESC_F_INDIRECT)), &["of 24 bytes"]),
    (
        true,
        |_, queue, _| offer(queue, entry(OUTSIDE_MEMORY, 64, DESC_F_INDIRECT)),
        &["not all in guest memory"],
    ),
    (
        true,
        |_, queue, _| offer(queue, entry(u64::MAX - 8, 64, DESC_F_INDIRECT)),
        &["not all in guest memory"],
    ),
    (true, |_, queue, _| offer(queue, entry(RAM_BASE, 0xffff_fff0, DESC_F_INDIRECT)), &["chain"]),
    (
        true,
        |ram, queue, at| {
            let table = [entry(at.table().0, 16, DESC_F_INDIRECT)];
            ram.map().write(at.table(), table.as_bytes()).unwrap();
            offer(queue, entry(at.table().0, 16, DESC_F_INDIRECT));
        },
        &["within an indirect table"],
    ),
    // One id twice in a batch, while the device has it.
    (
        true,
        |ram, queue, at| {
            let request = Request::read(0, 65536);
            let buffers = at.lay_out(ram, &request, Layout::Usual).unwrap();
            let table = kickless_tests::driver::packed::table(&buffers);
            ram.map().write(at.table(), table.as_bytes()).unwrap();
            for _ in 0..2 {
                queue.append(PackedDesc { id: 5.into(), ..entry(at.table().0, 48, DESC_F_INDIRECT) });
            }
            queue.flush();
        },
        &TWICE,
    ),
];

const TWICE: [&str; 1] = ["id 5 is in flight twice"];

fn invalid_rings_break_alone(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for (indirect, rubbish, words) in CASES {
        let shape = Shape { indirect: *indirect, ..PACKED };
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        // Starts in the middle of the ring and of a round.
        (0..6).for_each(|sector| machine.write(0, sector, &[4; 512]).unwrap());
        let seen = served.daemon.log().len();
        rubbish(&machine.ram, &mut machine.queues[0], &machine.request_memory[0]);
        if *words == TWICE {
            // The device took the first of the two before the ring broke, so it still answers it.
            let deadline = Instant::now() + LIMIT;
            while machine.queues[0].used_ready() == 0 {
                assert!(Instant::now() < deadline, "the device did not answer a request that it took");
                std::thread::yield_now();
            }
        }
        served.check_broken_queue(&mut machine, seen, words).unwrap();
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end().unwrap();
}

/// Wrong lengths and addresses fail only their own request.
#[test]
fn malformed_requests_fail() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in shapes() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        for len in [1, 511, 513] {
            let outcome = machine.perform(0, &Request::read(0, len), Layout::Usual).unwrap();
            assert_eq!(outcome.status, blk::S_IOERR, "{len}");
        }
        let request = Request::read(0, 0);
        for addr in [OUTSIDE_MEMORY, RAM_BASE - 512, machine.ram.end(), u64::MAX - 100] {
            let mut buffers =
                machine.request_memory[0].lay_out(&machine.ram, &request, Layout::Usual).unwrap();
            let outside = kickless_tests::driver::Buffer { addr: Gpa(addr), len: 1024, writable: true };
            buffers.insert(1, outside);
            let indirect = shape.indirect.then(|| machine.request_memory[0].table());
            machine.queues[0].submit(&machine.ram, &buffers, indirect).unwrap();
            machine.queues[0].flush();
            let used = machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            let outcome = machine.request_memory[0].outcome(&machine.ram, &request, used.len).unwrap();
            assert_eq!(outcome.status, blk::S_IOERR, "{addr:#x}");
        }
        machine.write(0, 8, &[8; 512]).unwrap();
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}
