//! Passes sessions from one process to another, at each moment that a front-end and a driver can choose. Both
//! processes, the front-end and the driver are in this process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_device::Operate;
use kickless_disk::DiskSpec;
use kickless_driver::{Choice, Disk, Options};
use kickless_handover::Checked;
use kickless_handover::v1::{Device, Final, Shape as RingShape};
use kickless_spec::blk;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, TransferDirection};
use kickless_testing::{Random, eventually, pattern};
use kickless_tests::driver::request::{Layout, Request};
use kickless_tests::frontend::Answer;
use kickless_tests::frontend::iommu::{self, Iommu, PAGE, at_iova, invalidate};
use kickless_tests::frontend::log::Bitmap;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::hostile_backend::returns_in_time;
use kickless_tests::two_processes::{
    LIMIT, Process, Served, final_record, hand_over, record, restore, take_over,
};
use kickless_tests::verified_load::{BLOCK, drive_disk};
use kickless_vhost::HandOverError;
use kickless_vhost_user::{
    BackendMessage, Error, FrontendMessage as Message, FrontendResponder, Header, Wait,
};
use serde_json::Value;

const IMAGE_LEN: u64 = 16 << 20;
/// The hand-overs of each kind of ring, unless `HANDOVERS` says another number.
const HANDOVERS: u32 = 12;

fn served() -> (Served, Process) {
    let served = Served::new(IMAGE_LEN);
    let process = served.process();
    process.serve();
    (served, process)
}

fn shapes() -> impl Iterator<Item = Shape> {
    (0..8).map(|bits| Shape {
        packed: bits & 1 != 0,
        event_idx: bits & 2 != 0,
        indirect: bits & 4 != 0,
        queues: 2,
        ..Shape::default()
    })
}

fn write_and_verify(machine: &mut Machine, seed: u64) {
    for queue in 0..machine.shape().queues {
        let (sector, data) = (64 * u64::from(queue), pattern(seed + u64::from(queue), 4096));
        machine.write(queue, sector, &data).unwrap();
        assert!(machine.read(queue, sector, data.len()).unwrap() == data, "queue {queue}");
    }
}

/// Rings of a driver in this process, under load, full, and without an in-flight buffer.
#[test]
fn rings_under_load_go_on() {
    let rounds = std::env::var("HANDOVERS").map_or(HANDOVERS, |rounds| rounds.parse().unwrap());
    returns_in_time(move || {
        for (packed, in_order) in [
            (Choice::Off, Choice::Off),
            (Choice::On, Choice::Off),
            (Choice::Off, Choice::On),
            (Choice::On, Choice::On),
        ] {
            let (served, mut process) = served();
            const DEPTH: u64 = 64;
            let options = Options {
                queues: 2,
                queue_size: DEPTH as u16,
                indirect: Choice::On,
                reconnect_limit: Duration::ZERO,
                packed,
                in_order,
                ..Options::new(served.socket())
            };
            let (disk, is_over) = (Disk::connect(options).unwrap(), AtomicBool::new(false));
            thread::scope(|scope| {
                let drivers: Vec<_> = (0..2)
                    .map(|queue| {
                        let (queue, is_over) = (disk.queue(queue), &is_over);
                        scope.spawn(move || drive_disk(&queue, DEPTH, is_over))
                    })
                    .collect();
                for round in 0..rounds {
                    process = hand_over(&served, &process);
                    if round % 3 == 0 {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
                is_over.store(true, Ordering::Relaxed);
                let requests: u64 = drivers.into_iter().map(|driver| driver.join().unwrap()).sum();
                println!("packed {packed:?}, in order {in_order:?}: {requests} requests");
            });
            assert!(BLOCK as u64 * DEPTH * 2 <= served.image_len());
        }
    });
}

/// A front-end finds the next process as the last one was, with each kind of ring.
#[test]
fn a_session_goes_on() {
    for shape in shapes() {
        let (served, mut process) = served();
        let mut machine = Machine::start(&served.socket(), &shape).unwrap();
        for round in 0..3 {
            write_and_verify(&mut machine, round);
            let before = process.server.statistics().queues()[0].requests.get();
            process = hand_over(&served, &process);
            assert_eq!(process.server.statistics().queues()[0].requests.get(), before);
            assert!(process.server.is_connected());
        }
        // It stops, and starts where it stopped.
        write_and_verify(&mut machine, 9);
        machine.stop().unwrap();
        machine.resume().unwrap();
        write_and_verify(&mut machine, 10);
        process = hand_over(&served, &process);
        drop(machine);
        eventually("the session ends", || !process.server.is_connected());
        // The next front-end is served.
        write_and_verify(&mut Machine::start(&served.socket(), &shape).unwrap(), 11);
    }
}

/// A server without a front-end is passed on too, with the places where its rings have stopped.
#[test]
fn a_free_server_goes_on() {
    let (served, process) = served();
    let mut machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
    write_and_verify(&mut machine, 1);
    machine.stop().unwrap();
    drop(machine);
    eventually("the session ends", || !process.server.is_connected());
    let mut parked = process.park();
    assert!(!parked.has_session());
    let new = served.process();
    let restored = restore(&new, record(&parked)).unwrap();
    let state = final_record(&mut parked);
    assert_eq!(state.stops[0], Some(2));
    take_over(&new, restored, parked, &state);
    new.serve();
    write_and_verify(&mut Machine::start(&served.socket(), &Shape::default()).unwrap(), 2);
}

/// The in-flight buffer moves, and names the requests that a disk keeps, which the next process does again.
/// Without a buffer they cannot move.
#[test]
fn kept_requests_go_on_with_a_buffer_only() {
    for (has_buffer, packed) in [(false, false), (false, true), (true, false), (true, true)] {
        let served = Served::new(IMAGE_LEN);
        let fault = "enospc@write+nth=1".parse().unwrap();
        let failing = DiskSpec::Fault(fault, Box::new(DiskSpec::File(served.image())));
        let process = Process::new(&served, &failing);
        process.serve();
        let shape = Shape { packed, ..Shape::default() };
        let mut machine = Machine::prepare(&served.socket(), &shape).unwrap();
        let kept = has_buffer.then(|| machine.get_and_set_inflight().unwrap());
        machine.resume().unwrap();
        let data = pattern(7, 4096);
        let write = Request::write(0, &data);
        machine.submit(0, &write).unwrap();
        eventually("the disk stops", || process.device.stopped().is_some());
        let mut parked = process.park();
        if kept.is_none() {
            parked.park_rings();
            assert!(parked.wait_for_rings(Instant::now() + LIMIT).unwrap());
            let error = parked.give_final(&mut Final::default()).unwrap_err();
            assert!(matches!(error, HandOverError::Kept { index: 0, requests: 1 }), "{error}");
            drop(parked);
            assert!(process.device.resume());
            assert_eq!(machine.status(0, &write).unwrap(), blk::S_OK);
            continue;
        }
        let new = served.process();
        let restored = restore(&new, record(&parked)).unwrap();
        let state = final_record(&mut parked);
        take_over(&new, restored, parked, &state);
        new.serve();
        assert_eq!(machine.status(0, &write).unwrap(), blk::S_OK);
        assert!(machine.read(0, 0, data.len()).unwrap() == data);
    }
}

/// Replies to misses of the old process come to the new one, which asks again.
#[test]
fn a_viommu_goes_on_with_a_miss_open() {
    for packed in [false, true] {
        let (served, mut process) = served();
        let shape = Shape { packed, ..Shape::default() };
        let mut machine = Machine::prepare(&served.socket(), &shape).unwrap();
        let mut iommu = Iommu::connect(&mut machine.frontend).unwrap();
        iommu.map_all(&machine.ram);
        iommu::start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
        for round in 0..4 {
            let data = pattern(round, 4096);
            for request in [Request::write(8, &data), Request::read(8, data.len())] {
                machine.frontend.order(&invalidate(0, 0)).unwrap();
                let buffers =
                    machine.request_memory[0].lay_out(&machine.ram, &request, Layout::Usual).unwrap();
                machine.queues[0].submit(&machine.ram, &at_iova(&buffers), None).unwrap();
                machine.queues[0].flush();
                let open = iommu.miss(LIMIT).unwrap().unwrap();
                // The old process has read the reply, or the new one reads it.
                let is_early = round % 2 == 0;
                if is_early {
                    iommu.reply(&open, false).unwrap();
                }
                process = hand_over(&served, &process);
                if !is_early {
                    iommu.answer(&mut machine.frontend, &open).unwrap();
                }
                let len = iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();
                let outcome = machine.request_memory[0].outcome(&machine.ram, &request, len).unwrap();
                // An early reply without a translation refuses it.
                if !is_early {
                    assert_eq!(outcome.status, blk::S_OK);
                    assert!(outcome.data.is_empty() || outcome.data == data);
                }
            }
        }
    }
}

/// A log that is on stays so, and has the marks of both processes.
#[test]
fn a_log_goes_on() {
    for packed in [false, true] {
        let (served, process) = served();
        let mut machine = Machine::start(&served.socket(), &Shape { packed, ..Shape::default() }).unwrap();
        let bitmap = Bitmap::covering(&machine.ram).unwrap();
        machine.frontend.set_log(&bitmap).unwrap();
        machine.frontend.set_logging(true).unwrap();
        let page = machine.request_memory[0].data().0 / PAGE;
        machine.read(0, 0, 4096).unwrap();
        let process = hand_over(&served, &process);
        assert!(bitmap.harvest().contains(&page), "of the old process");
        machine.read(0, 0, 4096).unwrap();
        assert!(bitmap.harvest().contains(&page), "of the new process");
        machine.frontend.set_logging(false).unwrap();
        let _process = hand_over(&served, &process);
        machine.read(0, 0, 4096).unwrap();
        assert!(!bitmap.harvest().contains(&page));
    }
}

/// A message of which a part has arrived, with its descriptors, is completed in the next process.
#[test]
fn half_a_message_goes_on() {
    let (served, mut process) = served();
    let mut machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
    let changes = |process: &Process| process.park().changes();
    let whole = Header::request(Code::SetVringCall.raw(), true, 8);
    for len in [1, 11, 12, 13, 19] {
        let unchanged = changes(&process);
        assert_eq!(changes(&process), unchanged, "nothing has come");
        let bytes = [&whole.to_bytes()[..], &0u64.to_le_bytes()].concat();
        let (first, rest) = bytes.split_at(len);
        // Descriptors come with the first byte.
        let call = machine.queues[0].call().try_clone().unwrap();
        machine.frontend.send_part(first, &[call.as_fd()]).unwrap();
        eventually("it has arrived", || changes(&process) > unchanged);
        process = hand_over(&served, &process);
        machine.frontend.send_bytes(rest).unwrap();
        assert_eq!(machine.frontend.answer_to_raw().unwrap(), Answer::Done, "{len} bytes");
        write_and_verify(&mut machine, len as u64);
    }
}

/// A front-end can leave while its session is parked: this process or the next one finds it.
#[test]
fn a_front_end_leaves_while_it_is_parked() {
    for goes_on in [false, true] {
        let (served, process) = served();
        let machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
        let mut parked = process.park();
        let new = served.process();
        let restored = restore(&new, record(&parked)).unwrap();
        drop(machine);
        let state = final_record(&mut parked);
        let server = if goes_on {
            drop((restored, parked));
            &process
        } else {
            take_over(&new, restored, parked, &state);
            new.serve();
            &new
        };
        eventually("the session ends", || !server.server.is_connected());
        write_and_verify(&mut Machine::start(&served.socket(), &Shape::default()).unwrap(), 3);
    }
}

/// A ring that is disabled stays so, and continues when it is enabled.
#[test]
fn a_disabled_ring_goes_on() {
    for packed in [false, true] {
        let (served, mut process) = served();
        let mut machine = Machine::start(&served.socket(), &Shape { packed, ..Shape::default() }).unwrap();
        write_and_verify(&mut machine, 1);
        machine.frontend.enable(&machine.queues[0], false).unwrap();
        let data = pattern(5, 4096);
        let write = Request::write(0, &data);
        machine.submit(0, &write).unwrap();
        process = hand_over(&served, &process);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(machine.queues[0].used_ready(), 0, "it is disabled");
        process = hand_over(&served, &process);
        machine.frontend.enable(&machine.queues[0], true).unwrap();
        assert_eq!(machine.status(0, &write).unwrap(), blk::S_OK);
        assert!(machine.read(0, 0, data.len()).unwrap() == data);
        drop(process);
    }
}

/// A hand-over that fails leaves the old process as it was, at each step.
#[test]
fn the_old_process_goes_on_after_each_step() {
    for shape in [Shape::default(), Shape { packed: true, ..Shape::default() }] {
        let (served, process) = served();
        let mut machine = Machine::start(&served.socket(), &shape).unwrap();
        for step in 0..6 {
            let request = process.server.park();
            if step == 0 {
                drop(request);
            } else {
                let mut parked = request.wait(Instant::now() + LIMIT).unwrap();
                let new = (step > 1).then(|| served.process());
                let mut restored = new.as_ref().map(|new| restore(new, record(&parked)).unwrap());
                if let Some(new) = &new {
                    new.serve();
                }
                match step {
                    3 => parked.park_rings(),
                    4 => {
                        final_record(&mut parked);
                        parked.unpark_rings();
                    }
                    5 => restored.as_mut().unwrap().receive_final(&final_record(&mut parked)).unwrap(),
                    _ => {}
                }
            }
            write_and_verify(&mut machine, step);
        }
    }
}

/// A session in the middle of a message is not parked. Its rings run meanwhile, and it can be parked later.
#[test]
fn a_busy_session_is_not_parked() {
    let (served, process) = served();
    let mut machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
    write_and_verify(&mut machine, 1);
    machine.stop().unwrap();
    let state = machine.frontend.save_state().unwrap();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let answer = machine.frontend.transfer(TransferDirection::Load, reader.into()).unwrap();
    assert_eq!(answer, Answer::Done);
    let error = process.server.park().wait(Instant::now() + Duration::from_millis(50)).err().unwrap();
    assert!(matches!(error, HandOverError::Busy), "{error}");
    writer.write_all(&state).unwrap();
    drop(writer);
    // The result of the transfer moves, and the state that was loaded.
    let _new = hand_over(&served, &process);
    assert_eq!(machine.frontend.number(&Message::CheckDeviceState).unwrap(), 0);
    machine.resume().unwrap();
    write_and_verify(&mut machine, 2);
}

/// A change of the size that comes while the session is parked is reported by the next process.
#[test]
fn a_change_of_the_configuration_space_goes_on() {
    let (served, process) = served();
    let mut machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut channel = FrontendResponder::new(ours);
    machine.frontend.order(&Message::SetBackendReqFd(theirs.into())).unwrap();
    let mut next = |time| channel.recv(&Wait::FOREVER.at_most(time));
    // The back-end reports the space to a front-end that has just connected.
    assert!(matches!(next(LIMIT).unwrap().unwrap().message, BackendMessage::ConfigChange));
    let process = hand_over(&served, &process);
    assert!(matches!(next(Duration::from_millis(100)), Err(Error::Interrupted)), "nothing has changed");
    let mut parked = process.park();
    let new = served.process();
    let restored = restore(&new, record(&parked)).unwrap();
    File::options().write(true).open(served.image()).unwrap().set_len(2 * IMAGE_LEN).unwrap();
    process.device.refresh();
    let state = final_record(&mut parked);
    take_over(&new, restored, parked, &state);
    new.serve();
    assert!(matches!(next(LIMIT).unwrap().unwrap().message, BackendMessage::ConfigChange));
}

/// A server that is told to stop while it is parked stops when it goes on.
#[test]
fn a_stop_waits_until_the_server_goes_on() {
    for has_session in [false, true] {
        let (served, process) = served();
        let machine = has_session.then(|| Machine::start(&served.socket(), &Shape::default()).unwrap());
        let parked = process.park();
        process.stop();
        assert_eq!(process.server.is_connected(), has_session);
        drop(parked);
        // A thread that has not begun is parked as well.
        let park = || process.server.park().wait(Instant::now() + LIMIT);
        eventually("it ends", || matches!(park(), Err(HandOverError::Ended)));
        assert!(!process.server.is_connected());
        drop(machine);
    }
}

/// A state that is wrong in one place is refused, and the old process serves on.
#[test]
fn a_hostile_state_is_refused() {
    let (served, process) = served();
    let mut machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
    let bitmap = Bitmap::covering(&machine.ram).unwrap();
    machine.frontend.set_log(&bitmap).unwrap();
    type Lie = (&'static str, fn(&mut Device));
    fn session(device: &mut Device) -> &mut kickless_handover::v1::Session {
        device.session.as_mut().unwrap()
    }
    fn ring(device: &mut Device) -> &mut kickless_handover::v1::Ring {
        &mut session(device).rings[0]
    }
    let lies: &[Lie] = &[
        ("a connection", |device| session(device).connection = ring(device).call.take().unwrap()),
        ("features", |device| session(device).features |= 1 << 60),
        ("protocol features", |device| session(device).protocol_features |= 1 << 60),
        ("a long region", |device| session(device).regions[0].len *= 2),
        ("a region twice", |device| {
            let region = session(device).regions[0];
            session(device).regions.push(region);
        }),
        ("a file that is none", |device| {
            let call = ring(device).call.take().unwrap();
            session(device).files[0] = call;
        }),
        ("a short log", |device| session(device).log.as_mut().unwrap().len = 1),
        ("a large ring", |device| ring(device).size = Some(512)),
        ("a ring beyond the last", |device| ring(device).index = 4),
        ("features of a ring", |device| ring(device).runs_with = Some(1 << 60)),
        ("a ring without addresses", |device| ring(device).addresses = None),
        ("a ring that is not started", |device| ring(device).is_started = false),
        ("a disabled ring that runs", |device| ring(device).is_enabled = false),
        ("a large loaded ring", |device| {
            ring(device).loaded = Some(RingShape { size: 1024, is_packed: true });
        }),
        ("a descriptor used twice", |device| ring(device).kick = ring(device).call),
        ("no kick", |device| ring(device).kick = None),
        ("a channel that is none", |device| {
            let socket = ring(device).err.take().unwrap();
            session(device).backend_channel =
                Some(kickless_handover::v1::BackendChannel { socket, half_reply: None });
        }),
    ];
    for (name, lie) in lies {
        let new = served.process();
        let mut parked = process.park();
        let (mut device, given) = record(&parked);
        lie(&mut device);
        let restored = restore(&new, (device, given));
        println!("{name}: {}", restored.err().unwrap_or_else(|| panic!("{name} is not refused")));
        // The record of the rings.
        let mut restored = restore(&new, record(&parked)).unwrap();
        let state = final_record(&mut parked);
        for change in [
            (|state: &mut Final| state.rings[0].index = 1) as fn(&mut Final),
            |state| state.rings[0].next_avail = None,
            |state| state.rings.clear(),
            |state| state.session = None,
            |state| state.session.as_mut().unwrap().is_open = false,
            |state| state.stops = vec![None; 5],
        ] {
            let mut changed = state.clone();
            change(&mut changed);
            assert!(restored.receive_final(&changed).is_err());
        }
        drop((restored, parked));
        write_and_verify(&mut machine, 1);
    }
}

/// Changes a random number, flag or list of a text.
fn change(value: &mut Value, random: &mut Random) {
    match value {
        // Descriptors are named once, which the reader of records checks.
        Value::Object(object) if object.contains_key("fd") => {}
        Value::Object(object) if !object.is_empty() => {
            let at = random.below(object.len() as u64) as usize;
            object.values_mut().nth(at).into_iter().for_each(|value| change(value, random));
        }
        Value::Array(values) if !values.is_empty() && !random.one_in(4) => {
            let at = random.below(values.len() as u64) as usize;
            change(&mut values[at], random);
        }
        Value::Array(values) => values.clear(),
        Value::Number(number) => {
            let shift = random.below(64);
            let bits = random.next() >> shift;
            let near = number.as_u64().unwrap_or_default().wrapping_add(random.below(3)).wrapping_sub(1);
            *value = if random.one_in(2) { bits.into() } else { near.into() };
        }
        Value::Bool(flag) => *flag = !*flag,
        _ => {}
    }
}

/// Returns a state with some changes, if it is still one.
fn changed<T: Checked>(state: &T, random: &mut Random) -> Option<T> {
    let mut value = serde_json::to_value(state).unwrap();
    (0..=random.below(3)).for_each(|_| change(&mut value, random));
    serde_json::from_value::<T>(value).ok().filter(|state| state.check().is_ok())
}

/// The new process refuses a state that has random changes, or serves on. Such a state can harm the guests of
/// the old process only.
#[test]
fn a_state_with_random_changes_harms_its_guests_only() {
    let (mut random, mut refused, mut begun) = (Random(9), 0, 0);
    for round in 0..60 {
        let (served, process) = served();
        let shape = Shape { packed: round % 2 == 0, event_idx: round % 3 == 0, ..Shape::default() };
        let mut machine = Machine::prepare(&served.socket(), &shape).unwrap();
        let _buffer = (round % 4 < 2).then(|| machine.get_and_set_inflight().unwrap());
        machine.frontend.set_log(&Bitmap::covering(&machine.ram).unwrap()).unwrap();
        machine.resume().unwrap();
        write_and_verify(&mut machine, round);
        let (new, mut parked) = (served.process(), process.park());
        for _ in 0..10 {
            let (device, given) = record(&parked);
            let Some(lie) = changed(&device, &mut random) else { continue };
            refused += u32::from(restore(&new, (lie, given)).is_err());
        }
        let mut restored = restore(&new, record(&parked)).unwrap();
        let state = final_record(&mut parked);
        let lies: Vec<_> = (0..20).filter_map(|_| changed(&state, &mut random)).collect();
        let accepted = lies.into_iter().find(|lie| restored.receive_final(lie).is_ok());
        let Some(lie) = accepted else { continue };
        take_over(&new, restored, parked, &lie);
        new.serve();
        begun += 1;
        machine.queues[0].kick();
        let _ = machine.frontend.number(&Message::GetFeatures);
        drop(machine);
        eventually("the session ends", || !new.server.is_connected());
        if !lie.is_last_session {
            write_and_verify(&mut Machine::start(&served.socket(), &Shape::default()).unwrap(), 1);
        }
    }
    println!("{refused} sessions refused, {begun} began");
    assert!(refused > 20 && begun > 20);
}

/// A ring goes on with the features that it has, whatever its front-end has sent since.
#[test]
fn features_may_change_while_rings_run() {
    let (served, mut process) = served();
    let mut machine = Machine::start(&served.socket(), &Shape::default()).unwrap();
    let features = machine.frontend.features();
    // The ring goes on as a split one.
    machine.frontend.set_features(features | Features::RING_PACKED).unwrap();
    process = hand_over(&served, &process);
    write_and_verify(&mut machine, 1);
    machine.frontend.set_features(features).unwrap();
    process = hand_over(&served, &process);
    write_and_verify(&mut machine, 2);
    drop(process);
}
