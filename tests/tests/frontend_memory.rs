//! Adds and removes guest memory while queues work.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use kickless_memory::Gpa;
use kickless_spec::blk;
use kickless_testing::pattern;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::driver::{Buffer, Queue};
use kickless_tests::frontend::machine::{Machine, Shape, write_and_verify};
use kickless_tests::frontend::served::Served;
use kickless_tests::frontend::{Answer, Frontend, LIMIT};
use kickless_tests::with_each_engine;
use kickless_vhost_user::FrontendMessage as Message;

with_each_engine! {
    the_largest_number_of_regions_works
    the_table_may_change_under_io
    regions_removed_under_io
    a_ring_waits_for_its_removed_memory
    buffers_may_cross_regions
}

/// Largest number of regions.
const REGIONS_MAX: usize = 509;
/// Address of the first region besides the machine's own.
const MORE: u64 = 0x10_0000_0000;
/// Bytes of each further region.
const LEN: u64 = 64 << 10;

fn region(number: usize) -> Ram {
    // Each region has a gap after it. Otherwise the kernel would join their mappings.
    Ram::new(MORE + 2 * LEN * number as u64, LEN).unwrap()
}

/// Runs `change` while queue 0 of two is under verified I/O. `change` may use all else.
fn under_io(machine: &mut Machine, change: impl FnOnce(&mut Frontend, &Ram, &mut Queue, &RequestMemory)) {
    let stop = AtomicBool::new(false);
    let Machine { frontend, ram, queues, request_memory, .. } = machine;
    let [busy, idle] = &mut queues[..] else { panic!("two queues") };
    let (ram, place, stop) = (&*ram, &request_memory[0], &stop);
    thread::scope(|scope| {
        let enough = |_| stop.load(Ordering::Relaxed);
        let write_and_verify =
            scope.spawn(move || write_and_verify(ram, busy, place, false, 0, enough).unwrap());
        change(frontend, ram, idle, &request_memory[1]);
        stop.store(true, Ordering::Relaxed);
        write_and_verify.join().unwrap();
    });
}

/// Writes 4096 bytes from `data` to sector 1000. Returns the status.
fn write_from(ram: &Ram, queue: &mut Queue, place: &RequestMemory, data: Gpa) -> u8 {
    let request = Request::write(1000, &[]);
    let mut buffers = place.lay_out(ram, &request, Layout::Usual).unwrap();
    buffers.insert(1, Buffer { addr: data, len: 4096, writable: false });
    queue.submit(ram, &buffers, None).unwrap();
    queue.flush();
    let used = queue.wait_used(Instant::now() + LIMIT).unwrap();
    place.outcome(ram, &request, used.len).unwrap().status
}

fn the_largest_number_of_regions_works(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape { queues: 2, ..Shape::default() }).unwrap();
    under_io(&mut machine, |frontend, ram, queue, place| {
        assert_eq!(frontend.number(&Message::GetMaxMemSlots).unwrap(), REGIONS_MAX as u64);
        let regions: Vec<Ram> = (0..REGIONS_MAX - 1).map(region).collect();
        for (number, more) in regions.iter().enumerate() {
            frontend.add(more).unwrap();
            if number % 50 == 0 || number == REGIONS_MAX - 2 {
                let (data, at) = (pattern(number as u64, 4096), Gpa(more.region().guest_addr + 100 * 512));
                more.map().write(at, &data).unwrap();
                assert_eq!(write_from(ram, queue, place, at), blk::S_OK);
                assert_eq!(served.on_disk(1000, 4096).unwrap(), data);
            }
        }
        let (one_too_many, file) = region(REGIONS_MAX).region_and_file().unwrap();
        let refused = frontend.attempt(&Message::AddMemReg(one_too_many, file)).unwrap();
        assert_eq!(refused, Answer::Refused);
        for (number, more) in regions.iter().enumerate() {
            let at = Gpa(more.region().guest_addr);
            frontend.remove(more.region()).unwrap();
            if number % 50 == 0 {
                assert_eq!(write_from(ram, queue, place, at), blk::S_IOERR);
            }
        }
    });
    drop(machine);
    served.check_next_frontend().unwrap();
    let log = served.end().unwrap();
    let refusals: Vec<_> = log.iter().filter(|line| line.contains(" WARN ")).collect();
    assert!(refusals.len() == 1 && refusals[0].contains("510 regions, at most 509"), "{refusals:#?}");
}

fn the_table_may_change_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape { queues: 2, ..Shape::default() }).unwrap();
    let own = machine.ram.region_and_file().unwrap();
    under_io(&mut machine, |frontend, ram, queue, place| {
        for round in 0..50 {
            let more = region(round);
            let mut table = vec![(own.0, own.1.try_clone().unwrap()), more.region_and_file().unwrap()];
            if round % 2 == 0 {
                table.swap(0, 1);
            }
            frontend.order(&Message::SetMemTable(table)).unwrap();
            let (data, at) = (pattern(round as u64, 4096), Gpa(more.region().guest_addr + 8192));
            more.map().write(at, &data).unwrap();
            assert_eq!(write_from(ram, queue, place, at), blk::S_OK);
            assert_eq!(served.on_disk(1000, 4096).unwrap(), data);
            // The next table does not have this region.
            let gone = Gpa(region(round + 1).region().guest_addr);
            assert_eq!(write_from(ram, queue, place, gone), blk::S_IOERR);
        }
    });
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end_without_warnings().unwrap();
}

/// Removing memory waits for the requests in flight that use it.
fn regions_removed_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape { queues: 2, ..Shape::default() }).unwrap();
    under_io(&mut machine, |frontend, ram, queue, place| {
        let before = served.daemon.holdings().unwrap();
        for round in 0..30 {
            let more = region(round);
            frontend.add(&more).unwrap();
            for block in 0..16 {
                let request = Request::read(block * 8, 0);
                let mut buffers = place.lay_out(ram, &request, Layout::Usual).unwrap();
                let addr = Gpa(more.region().guest_addr + block * 4096);
                buffers.insert(1, Buffer { addr, len: 4096, writable: true });
                queue.submit(ram, &buffers, None).unwrap();
            }
            queue.flush();
            frontend.remove(more.region()).unwrap();
            // The mapping is gone, and so are all requests that used it.
            assert_eq!(served.daemon.holdings().unwrap().1, before.1);
            for _ in 0..16 {
                queue.wait_used(Instant::now() + LIMIT).unwrap();
            }
        }
    });
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end_without_warnings().unwrap();
}

fn a_ring_waits_for_its_removed_memory(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for event_idx in [false, true] {
        let shape = Shape { queues: 2, event_idx, ..Shape::default() };
        let mut machine = Machine::prepare(served.socket(), &shape).unwrap();
        let mut other_ram = Ram::new(MORE, 1 << 20).unwrap();
        machine.queues[1].move_to(&mut other_ram).unwrap();
        machine.frontend.add(&other_ram).unwrap();
        machine.queues.iter().for_each(|queue| machine.frontend.start(queue).unwrap());
        under_io(&mut machine, |frontend, ram, queue, place| {
            for round in 0..20 {
                let data = pattern(round, 4096);
                let request = Request::write(1000, &data);
                let buffers = place.lay_out(ram, &request, Layout::Usual).unwrap();
                queue.submit(ram, &buffers, None).unwrap();
                queue.flush();
                // The device may have started the request or not.
                frontend.remove(other_ram.region()).unwrap();
                frontend.number(&Message::GetFeatures).unwrap();
                frontend.add(&other_ram).unwrap();
                let used = queue.wait_used(Instant::now() + LIMIT).unwrap();
                assert_eq!(place.outcome(ram, &request, used.len).unwrap().status, blk::S_OK);
                assert_eq!(served.on_disk(1000, 4096).unwrap(), data);
            }
        });
        machine.stop().unwrap();
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    let log = served.end().unwrap();
    let rested = log.iter().filter(|line| line.contains("no longer in guest memory")).count();
    assert_eq!(rested, 40, "{log:#?}");
}

fn buffers_may_cross_regions(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for indirect in [false, true] {
        let mut machine = Machine::start(served.socket(), &Shape { indirect, ..Shape::default() }).unwrap();
        let (low, high) = (Ram::new(MORE, LEN).unwrap(), Ram::new(MORE + LEN, LEN).unwrap());
        machine.frontend.add(&high).unwrap();
        machine.frontend.add(&low).unwrap();
        let data = pattern(7, 8192);
        low.map().write(Gpa(MORE + LEN - 4096), &data[..4096]).unwrap();
        high.map().write(Gpa(MORE + LEN), &data[4096..]).unwrap();
        let place = machine.request_memory[0];
        for (kind, writable) in [(blk::T_OUT, false), (blk::T_IN, true)] {
            let request = Request { kind, ..Request::read(2000, 0) };
            let mut buffers = place.lay_out(&machine.ram, &request, Layout::Usual).unwrap();
            buffers.insert(1, Buffer { addr: Gpa(MORE + LEN - 4096), len: 8192, writable });
            let queue = &mut machine.queues[0];
            queue.submit(&machine.ram, &buffers, indirect.then(|| place.table())).unwrap();
            queue.flush();
            let used = queue.wait_used(Instant::now() + LIMIT).unwrap();
            assert_eq!(place.outcome(&machine.ram, &request, used.len).unwrap().status, blk::S_OK);
            assert_eq!(served.on_disk(2000, 8192).unwrap(), data);
            if kind == blk::T_OUT {
                low.map().write(Gpa(MORE + LEN - 4096), &[0; 4096]).unwrap();
                high.map().write(Gpa(MORE + LEN), &[0; 4096]).unwrap();
            }
        }
        let mut read = vec![0; 8192];
        low.map().read(Gpa(MORE + LEN - 4096), &mut read[..4096]).unwrap();
        high.map().read(Gpa(MORE + LEN), &mut read[4096..]).unwrap();
        assert_eq!(read, data);
    }
    served.check_next_frontend().unwrap();
    served.end_without_warnings().unwrap();
}
