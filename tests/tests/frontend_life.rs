//! Tests the daemon with valid front-ends, step by step over a real socket.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::FrontendRequest;
use kickless_testing::pattern;
use kickless_tests::driver::request::{LAYOUTS, Layout, Request, RequestMemory, UNANSWERED};
use kickless_tests::driver::{Eventfd, Queue};
use kickless_tests::frontend::machine::{Machine, Shape, write_and_verify};
use kickless_tests::frontend::served::{IMAGE_SIZE, Served};
use kickless_tests::frontend::{Frontend, LIMIT, addresses};
use kickless_tests::with_each_engine;
use kickless_vhost_user::{FrontendMessage as Message, VringAddr, VringFd};

with_each_engine! {
    every_layout_works
    queues_of_every_size
    ring_indices_wrap
    four_queues_at_once
    set_up_anew_under_io
    disabled_and_enabled_under_io
    a_stop_drains_and_a_start_continues
    reset_under_io
    sigterm_under_io
    a_front_end_may_leave_under_io
    write_through
}

fn shapes() -> impl Iterator<Item = Shape> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .map(|(event_idx, indirect)| Shape { event_idx, indirect, ..Shape::default() })
}

/// Returns the shape with split rings and with packed rings.
fn both_formats() -> impl Iterator<Item = Shape> {
    shapes().flat_map(|shape| [false, true].map(|packed| Shape { packed, ..shape }))
}

#[test]
fn features_config_and_identity() {
    let served = Served::start("io_uring", &["--serial=what it is"]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let offered = BlkFeatures::from_bits_truncate(machine.frontend.offered().bits());
    assert!(offered.contains(BlkFeatures::FLUSH | BlkFeatures::MQ | BlkFeatures::CONFIG_WCE));
    assert!(!offered.contains(BlkFeatures::RO));
    assert_eq!(machine.frontend.number(&Message::GetQueueNum).unwrap(), 4);

    let config = machine.frontend.config().unwrap();
    assert_eq!(config.capacity.get() * blk::SECTOR_SIZE, IMAGE_SIZE);
    assert_eq!((config.num_queues.get(), config.writeback), (4, 1));
    assert_eq!(config.seg_max.get(), 126);
    assert!(config.blk_size.get().is_power_of_two() && config.blk_size.get() >= 512);

    machine.frontend.set_writeback(false).unwrap();
    assert_eq!(machine.frontend.config().unwrap().writeback, 0);

    let id = machine.perform(0, &Request::get_id(), Layout::Usual).unwrap();
    assert_eq!((id.status, id.used_len), (blk::S_OK, blk::ID_LEN as u32 + 1));
    assert_eq!(&id.data, b"what it is\0\0\0\0\0\0\0\0\0\0");
    let flush = machine.perform(0, &Request::flush(), Layout::Usual).unwrap();
    assert_eq!((flush.status, flush.used_len), (blk::S_OK, 1));
    drop(machine);
    // The same front-end reconnects. Its driver has acknowledged the features before.
    let returning = Shape { returns: true, ..Shape::default() };
    let mut machine = Machine::start(served.socket(), &returning).unwrap();
    assert_eq!(machine.frontend.config().unwrap().writeback, 0);
    drop(machine);
    // Another machine connects, with a driver that has not negotiated yet.
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    assert_eq!(machine.frontend.config().unwrap().writeback, 1);
    machine.frontend.set_writeback(false).unwrap();
    machine.frontend.set_writeback(true).unwrap();
    assert_eq!(machine.frontend.config().unwrap().writeback, 1);
    drop(machine);
    served.end_without_warnings().unwrap();

    // A back-end that starts under a running driver does not know the driver's choice.
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &returning).unwrap();
    assert_eq!(machine.frontend.config().unwrap().writeback, 0);
    drop(machine);
    let log = served.end().unwrap();
    assert_eq!(log.iter().filter(|line| line.contains("every write is made durable")).count(), 1, "{log:#?}");
}

fn every_layout_works(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for (number, shape) in (0u64..).zip(both_formats()) {
        let shape = Shape { size: 1024, ..shape };
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        for (step, layout) in (0u64..).zip(LAYOUTS) {
            let (sector, data) = (100 * number + 10 * step, pattern(number * 100 + step, 9 * 512));
            let wrote = machine.perform(0, &Request::write(sector, &data), layout).unwrap();
            assert_eq!((wrote.status, wrote.used_len), (blk::S_OK, 1), "{shape:?} {layout:?}");
            assert_eq!(served.on_disk(sector, data.len()).unwrap(), data, "{shape:?} {layout:?}");
            for other in [layout, Layout::Usual] {
                let read = machine.perform(0, &Request::read(sector, data.len()), other).unwrap();
                assert_eq!((read.status, read.used_len), (blk::S_OK, data.len() as u32 + 1), "{other:?}");
                assert!(read.data == data, "{shape:?} {layout:?} {other:?}");
            }
            let id = machine.perform(0, &Request::get_id(), layout).unwrap();
            assert_eq!((id.status, id.data.len()), (blk::S_OK, blk::ID_LEN));
            let flush = machine.perform(0, &Request::flush(), layout).unwrap();
            assert_eq!((flush.status, flush.used_len), (blk::S_OK, 1));
        }
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

/// Fills a queue twice with `count` requests: writes, then reads of the same sectors.
fn fill(machine: &mut Machine, count: usize) {
    let indirect = machine.shape().indirect;
    let per_request = if indirect { 1 } else { 2 };
    let count = count.min(usize::from(machine.shape().size) / per_request);
    let request_memory: Vec<RequestMemory> =
        (0..count).map(|_| RequestMemory::new(&mut machine.ram, 512).unwrap()).collect();
    let (ram, queue) = (&machine.ram, &mut machine.queues[0]);
    let datas: Vec<Vec<u8>> = (0..count).map(|i| pattern(i as u64, 512)).collect();
    for write in [true, false] {
        let requests: Vec<Request> = (0u64..)
            .zip(&datas)
            .map(
                |(sector, data)| {
                    if write { Request::write(sector, data) } else { Request::read(sector, 512) }
                },
            )
            .collect();
        let mut heads = vec![usize::MAX; queue.size().into()];
        for (i, (place, request)) in request_memory.iter().zip(&requests).enumerate() {
            let buffers = place.lay_out(ram, request, Layout::Joined).unwrap();
            let head = queue.submit(ram, &buffers, indirect.then(|| place.table())).unwrap();
            heads[usize::from(head)] = i;
        }
        queue.flush();
        for _ in 0..count {
            let used = queue.wait_used(Instant::now() + LIMIT).unwrap();
            let i = heads[usize::from(used.head)];
            let outcome = request_memory[i].outcome(ram, &requests[i], used.len).unwrap();
            assert_eq!(outcome.status, blk::S_OK);
            assert!(write || outcome.data == datas[i], "request {i} read other bytes than it wrote");
        }
        assert_eq!(queue.in_flight(), 0);
    }
}

fn queues_of_every_size(engine: &str) {
    let served = Served::start(engine, &["--queue-size=32768"]).unwrap();
    for (size, shape) in
        [1, 2, 256, 1024, 32768].into_iter().flat_map(|size| both_formats().map(move |s| (size, s)))
    {
        if size == 1 && !shape.indirect {
            continue;
        }
        // More requests than an engine has slots, so that some of them wait.
        let shape = Shape { size, memory: 1 << 30, ..shape };
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        fill(&mut machine, 3000);
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

fn ring_indices_wrap(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for shape in shapes() {
        let shape = Shape { size: 16, ..shape };
        let mut machine = Machine::prepare(served.socket(), &shape).unwrap();
        machine.queues[0].begin_at(65_530).unwrap();
        machine.frontend.start(&machine.queues[0]).unwrap();
        fill(&mut machine, 8);
        fill(&mut machine, 8);
        assert_eq!(machine.frontend.stop(&mut machine.queues[0]).unwrap(), 65_530u16.wrapping_add(32));
    }
    served.end().unwrap();
}

#[test]
fn a_polling_driver_gets_no_calls() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in both_formats() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        let (ram, queue, place) = (&machine.ram, &mut machine.queues[0], &machine.request_memory[0]);
        // A ring calls once when it starts.
        assert!(queue.call().wait(Instant::now() + LIMIT).unwrap());
        queue.call().take();
        queue.disable_calls();
        for _ in 0..1000 {
            let buffers = place.lay_out(ram, &Request::flush(), Layout::Usual).unwrap();
            queue.submit(ram, &buffers, shape.indirect.then(|| place.table())).unwrap();
            queue.flush();
            queue.poll_used(Instant::now() + LIMIT).unwrap();
        }
        machine.stop().unwrap();
        // With EVENT_IDX, a device that starts does not know which index the driver named to its
        // predecessor, so it calls once.
        let calls = machine.queues[0].call().take();
        assert!(calls <= u64::from(shape.event_idx), "{calls} calls");
    }
    served.end_without_warnings().unwrap();
}

fn four_queues_at_once(engine: &str) {
    for arguments in [&[][..], &["--workers=2"]] {
        let served = Served::start(engine, arguments).unwrap();
        for shape in both_formats() {
            let mut machine = Machine::start(served.socket(), &Shape { queues: 4, ..shape }).unwrap();
            let Machine { ram, queues, request_memory, .. } = &mut machine;
            let ram = &*ram;
            thread::scope(|scope| {
                let hammers: Vec<_> = queues
                    .iter_mut()
                    .zip(&*request_memory)
                    .map(|(queue, place)| {
                        let sector = 1000 * u64::from(queue.index());
                        let indirect = shape.indirect;
                        scope.spawn(move || {
                            write_and_verify(ram, queue, place, indirect, sector, |n| n == 50).unwrap()
                        })
                    })
                    .collect();
                hammers.into_iter().for_each(|write_and_verify| write_and_verify.join().unwrap());
            });
            machine.stop().unwrap();
        }
        served.end_without_warnings().unwrap();
    }
}

/// Repeats `change` while queue 0 of two is under verified I/O. Queue 1 is idle.
fn under_io(machine: &mut Machine, times: u32, mut change: impl FnMut(&mut Frontend, &mut Queue, &Queues)) {
    let stop = AtomicBool::new(false);
    let indirect = machine.shape().indirect;
    let Machine { frontend, ram, queues, request_memory, .. } = machine;
    let [busy, idle] = &mut queues[..] else { panic!("two queues") };
    let others = Queues { addresses: addresses(busy), kick: busy.kick_fd().try_clone().unwrap() };
    let (ram, place, stop) = (&*ram, &request_memory[0], &stop);
    thread::scope(|scope| {
        let enough = |_| stop.load(Ordering::Relaxed);
        let write_and_verify =
            scope.spawn(move || write_and_verify(ram, busy, place, indirect, 0, enough).unwrap());
        for _ in 0..times {
            change(frontend, idle, &others);
        }
        stop.store(true, Ordering::Relaxed);
        write_and_verify.join().unwrap();
    });
}

/// The state of the queue under I/O.
struct Queues {
    addresses: VringAddr,
    kick: Eventfd,
}

fn set_up_anew_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for shape in both_formats() {
        let mut machine = Machine::start(served.socket(), &Shape { queues: 2, ..shape }).unwrap();
        let features = machine.frontend.features();
        under_io(&mut machine, 50, |frontend, idle, busy| {
            frontend.set_features(features).unwrap();
            frontend.order(&Message::SetVringAddr(busy.addresses)).unwrap();
            let fd = Some(busy.kick.as_fd().try_clone_to_owned().unwrap());
            let kick = VringFd { index: 0, fd };
            frontend.order(&Message::SetVringKick(kick)).unwrap();
            // The other queue stops and starts meanwhile.
            frontend.stop(idle).unwrap();
            frontend.start(idle).unwrap();
        });
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

fn disabled_and_enabled_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for shape in both_formats() {
        let mut machine = Machine::start(served.socket(), &Shape { queues: 2, ..shape }).unwrap();
        under_io(&mut machine, 50, |frontend, _, _| {
            for enable in [false, true] {
                frontend.order(&Message::SetVringEnable { index: 0, enable }).unwrap();
            }
        });
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

#[test]
fn a_disabled_queue_pauses_and_needs_no_kick_afterwards() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in both_formats() {
        // The ring is so small that its indices wrap.
        let mut machine = Machine::start(served.socket(), &Shape { size: 8, ..shape }).unwrap();
        for _ in 0..10 {
            machine.frontend.enable(&machine.queues[0], false).unwrap();
            // The type does not exist, so that the device answers as soon as it takes the request.
            let request = Request { kind: 99, ..Request::flush() };
            let buffers = machine.request_memory[0].lay_out(&machine.ram, &request, Layout::Usual).unwrap();
            let table = shape.indirect.then(|| machine.request_memory[0].table());
            machine.queues[0].submit(&machine.ram, &buffers, table).unwrap();
            let _ = machine.queues[0].publish();
            machine.queues[0].kick();
            // The device has looked at a running ring when it answers the second of these.
            for _ in 0..2 {
                machine.frontend.order(&Message::VringKick { index: 0 }).unwrap();
            }
            assert_eq!(machine.queues[0].take_used().unwrap(), None);
            machine.queues[0].kick_fd().take();
            machine.frontend.enable(&machine.queues[0], true).unwrap();
            machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
        }
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

#[test]
fn kicks_may_come_by_message() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    for _ in 0..20 {
        let buffers =
            machine.request_memory[0].lay_out(&machine.ram, &Request::flush(), Layout::Usual).unwrap();
        machine.queues[0].submit(&machine.ram, &buffers, None).unwrap();
        let _ = machine.queues[0].publish();
        machine.frontend.order(&Message::VringKick { index: 0 }).unwrap();
        machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
    }
    assert_eq!(machine.queues[0].kicks(), 0);
    drop(machine);
    served.end_without_warnings().unwrap();
}

#[test]
fn eventfds_of_a_running_queue_can_be_replaced() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in both_formats() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        for round in 0..20 {
            let old_call = machine.queues[0].replace_call(Eventfd::new().unwrap());
            machine.frontend.set_call(&machine.queues[0]).unwrap();
            // The last call may have gone to the old eventfd after the last look at it.
            assert!(machine.queues[0].call().wait(Instant::now() + LIMIT).unwrap());
            old_call.take();
            let old_kick = machine.queues[0].replace_kick(Eventfd::new().unwrap());
            machine.frontend.set_kick(&machine.queues[0]).unwrap();
            let data = pattern(round, 512);
            machine.write(0, 7, &data).unwrap();
            assert_eq!(machine.read(0, 7, 512).unwrap(), data);
            assert_eq!(old_call.take(), 0, "a call went to the eventfd that was replaced");
            drop(old_kick);
        }
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

#[test]
fn a_ring_may_move() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in both_formats() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        for round in 0..10 {
            machine.queues[0].move_to(&mut machine.ram).unwrap();
            let moved = addresses(&machine.queues[0]);
            machine.frontend.order(&Message::SetVringAddr(moved)).unwrap();
            let data = pattern(round, 1024);
            machine.write(0, 9, &data).unwrap();
            assert_eq!(machine.read(0, 9, 1024).unwrap(), data);
        }
    }
    served.end_without_warnings().unwrap();
}

/// Submits one write per `request_memory`, without waiting.
fn submit_writes(machine: &mut Machine, request_memory: &[RequestMemory], len: usize) {
    let indirect = machine.shape().indirect;
    let (ram, queue) = (&machine.ram, &mut machine.queues[0]);
    for (i, place) in (0u64..).zip(request_memory) {
        let request = Request::write(i * (len / 512) as u64, &pattern(i, len));
        let buffers = place.lay_out(ram, &request, Layout::Usual).unwrap();
        queue.submit(ram, &buffers, indirect.then(|| place.table())).unwrap();
    }
    queue.flush();
}

fn a_stop_drains_and_a_start_continues(engine: &str) {
    const LEN: usize = 64 << 10;
    let served = Served::start(engine, &[]).unwrap();
    for shape in shapes() {
        let mut machine = Machine::start(served.socket(), &shape).unwrap();
        let request_memory: Vec<RequestMemory> =
            (0..80).map(|_| RequestMemory::new(&mut machine.ram, LEN).unwrap()).collect();
        for round in 0..5 {
            let begin = machine.queues[0].next_used();
            submit_writes(&mut machine, &request_memory, LEN);
            let base = machine.frontend.stop(&mut machine.queues[0]).unwrap();
            // Every request taken has completed before the answer, and no other.
            assert_eq!(machine.queues[0].used_idx(), base, "round {round}");
            let answered = request_memory.iter().take(base.wrapping_sub(begin).into()).all(|place| {
                place.outcome(&machine.ram, &Request::write(0, &[0; LEN]), 0).unwrap().status == blk::S_OK
            });
            assert!(answered, "round {round}");
            assert_eq!(machine.queues[0].kick_fd().take(), 0, "a served kick is still counted");
            machine.frontend.number(&Message::GetFeatures).unwrap();
            assert_eq!(machine.queues[0].used_idx(), base, "a stopped ring moved");
            // The device looks at a ring that starts, without a kick.
            machine.frontend.start(&machine.queues[0]).unwrap();
            for _ in &request_memory {
                machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            }
            assert_eq!(machine.queues[0].in_flight(), 0);
        }
        for i in 0..request_memory.len() as u64 {
            assert_eq!(served.on_disk(i * (LEN / 512) as u64, LEN).unwrap(), pattern(i, LEN), "write {i}");
        }
        machine.stop().unwrap();
    }
    served.end_without_warnings().unwrap();
}

fn reset_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let request_memory: Vec<RequestMemory> =
        (0..80).map(|_| RequestMemory::new(&mut machine.ram, 65536).unwrap()).collect();
    for _ in 0..5 {
        submit_writes(&mut machine, &request_memory, 65536);
        machine.frontend.order(&Message::ResetDevice).unwrap();
        let still = machine.queues[0].used_idx();
        machine.queues[0] = Queue::new(&mut machine.ram, 0, 256, machine.frontend.features()).unwrap();
        machine.frontend.start(&machine.queues[0]).unwrap();
        machine.write(0, 3, &pattern(u64::from(still), 512)).unwrap();
    }
    machine.stop().unwrap();
    drop(machine);
    served.end_without_warnings().unwrap();
}

fn sigterm_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let request_memory: Vec<RequestMemory> =
        (0..80).map(|_| RequestMemory::new(&mut machine.ram, 65536).unwrap()).collect();
    submit_writes(&mut machine, &request_memory, 65536);
    let log = served.end().unwrap();
    let (used, statuses): (u16, Vec<u8>) = (
        machine.queues[0].used_idx(),
        request_memory
            .iter()
            .map(|p| p.outcome(&machine.ram, &Request::write(0, &[0; 65536]), 0).unwrap().status)
            .collect(),
    );
    // Every started request has completed, and the driver has its used element.
    assert_eq!(statuses.iter().filter(|status| **status == blk::S_OK).count(), usize::from(used));
    assert_eq!(statuses.iter().filter(|status| **status == UNANSWERED).count(), 80 - usize::from(used));
    assert!(log.iter().any(|line| line.contains("errors=0")) || used == 0, "{log:#?}");
}

fn a_front_end_may_leave_under_io(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for _ in 0..10 {
        let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
        let request_memory: Vec<RequestMemory> =
            (0..80).map(|_| RequestMemory::new(&mut machine.ram, 65536).unwrap()).collect();
        submit_writes(&mut machine, &request_memory, 65536);
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end_without_warnings().unwrap();
}

/// Runs as a process of its own, which [`a_killed_front_end_leaves_nothing`] kills. Tests nothing itself.
#[test]
#[ignore = "the victim of another test"]
fn victim() {
    let socket = std::env::var_os("KICKLESS_TEST_SOCKET").unwrap();
    let mut machine = Machine::start(socket.as_ref(), &Shape::default()).unwrap();
    let (ram, queue, place) = (&machine.ram, &mut machine.queues[0], &machine.request_memory[0]);
    println!("\nhammering");
    write_and_verify(ram, queue, place, false, 0, |_| false).unwrap();
}

#[test]
fn a_killed_front_end_leaves_nothing() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    let served = Served::start("io_uring", &[]).unwrap();
    for _ in 0..3 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--ignored", "--nocapture"])
            .env("KICKLESS_TEST_SOCKET", served.socket())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "hammering"));
        victim.kill().unwrap();
        victim.wait().unwrap();
        served.check_next_frontend().unwrap();
    }
    served.end_without_warnings().unwrap();
}

#[test]
fn a_second_front_end_waits() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut first = Machine::start(served.socket(), &Shape::default()).unwrap();
    let mut second = Frontend::connect(served.socket()).unwrap();
    second.send(&Message::GetFeatures).unwrap();
    first.write(0, 0, &pattern(1, 512)).unwrap();
    assert!(!second.replies_within(FrontendRequest::GetFeatures, Duration::from_millis(100)).unwrap());
    assert_eq!(first.read(0, 0, 512).unwrap(), pattern(1, 512));
    let warned = |line: &str| line.contains("another front-end has connected").then_some(());
    served.daemon.log().wait_for("the warning", LIMIT, warned).unwrap();
    drop(first);
    assert!(second.replies_within(FrontendRequest::GetFeatures, LIMIT).unwrap());
    drop(second);
    served.check_next_frontend().unwrap();
    let warnings: Vec<String> =
        served.end().unwrap().into_iter().filter(|line| line.contains(" WARN ")).collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(warnings[0].contains("another front-end has connected"), "{warnings:#?}");
}

#[test]
fn front_ends_come_and_go() {
    let served = Served::start("io_uring", &[]).unwrap();
    for _ in 0..30 {
        served.check_next_frontend().unwrap();
        // One front-end sends nothing, one sends little.
        drop(Frontend::connect(served.socket()).unwrap());
        Frontend::connect(served.socket()).unwrap().negotiate(Features::VERSION_1).unwrap();
    }
    served.end_without_warnings().unwrap();
}

#[test]
fn a_read_only_disk() {
    let served = Served::start("io_uring", &["--read-only"]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let offered = BlkFeatures::from_bits_truncate(machine.frontend.offered().bits());
    assert!(offered.contains(BlkFeatures::RO));
    let wrote = machine.perform(0, &Request::write(0, &[1; 512]), Layout::Usual).unwrap();
    assert_eq!(wrote.status, blk::S_IOERR);
    assert_eq!(machine.read(0, 0, 512).unwrap(), [0; 512]);
    let flush = machine.perform(0, &Request::flush(), Layout::Usual).unwrap();
    assert_eq!(flush.status, blk::S_OK);
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// Without FLUSH or with writeback 0, writes take another path. The test cannot see whether they are
/// durable.
fn write_through(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    machine.frontend.set_writeback(false).unwrap();
    for (seed, layout) in (1u64..).zip([Layout::Usual, Layout::Joined]) {
        let data = pattern(seed, 4096);
        assert_eq!(machine.perform(0, &Request::write(5, &data), layout).unwrap().status, blk::S_OK);
        assert_eq!(served.on_disk(5, 4096).unwrap(), data);
    }
    drop(machine);
    let mut machine = Machine::prepare(served.socket(), &Shape::default()).unwrap();
    machine
        .frontend
        .set_features(Features::VERSION_1 | Features::PROTOCOL_FEATURES | Features::EVENT_IDX)
        .unwrap();
    machine.frontend.start(&machine.queues[0]).unwrap();
    machine.write(0, 11, &pattern(3, 4096)).unwrap();
    assert_eq!(served.on_disk(11, 4096).unwrap(), pattern(3, 4096));
    drop(machine);
    served.end_without_warnings().unwrap();
}
