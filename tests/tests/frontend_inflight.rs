//! Tests back-ends that are killed with requests in flight, and their successors, which use the in-flight
//! buffer of the front-end.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kickless_spec::blk;
use kickless_spec::vhost_user::{ProtocolFeatures, inflight_region_len};
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::driver::Queue;
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::frontend::inflight::InflightBuffer;
use kickless_tests::frontend::iommu::{DISTANCE, Iommu, at_iova, start};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::served::{IMAGE_SIZE, Served};
use kickless_tests::frontend::{Answer, Frontend, LIMIT};
use kickless_tests::guest::image_dir;
use kickless_tests::with_each_engine;
use kickless_vhost_user::{FrontendMessage as Message, Inflight};
use tempfile::TempDir;

with_each_engine! {
    each_request_in_flight_runs_again_once
    a_stop_completes_requests_in_flight
    requests_run_again_behind_a_viommu
    a_buffer_serves_many_runs_of_a_ring
    a_slow_disk_delays_no_hand_over
}

/// The slow disk holds requests from this sector on for longer than any test takes.
const SLOW: u64 = IMAGE_SIZE / 512 / 2;
const LEN: usize = 4096;
const SECTORS: u64 = (LEN / 512) as u64;
/// Requests per queue. Every second one is slow.
const COUNT: u64 = 12;

/// Time to wait for a message of a device that must send none.
const QUIET_TIME: Duration = Duration::from_millis(100);

const SHAPE: Shape = Shape { queues: 2, size: 32, returns: true, ..Shape::LINUX };

fn shapes() -> impl Iterator<Item = Shape> {
    [(false, false), (false, true), (true, false), (true, true)].into_iter().map(|(packed, indirect)| {
        // With an odd size, chains cross the end of the ring.
        Shape { packed, indirect, event_idx: indirect, size: if packed { 39 } else { 64 }, ..SHAPE }
    })
}

struct Image {
    path: PathBuf,
    engine: String,
    _dir: TempDir,
}

impl Image {
    fn new(engine: &str) -> Self {
        let dir = image_dir().unwrap();
        let path = dir.path().join("disk.img");
        File::create_new(&path).unwrap().set_len(IMAGE_SIZE).unwrap();
        Self { path, engine: engine.to_owned(), _dir: dir }
    }

    fn config(&self, slow: bool) -> DaemonConfig {
        let mut disk = OsString::new();
        if slow {
            disk.push(format!("fault:delay=60s@{SLOW}-{}:", IMAGE_SIZE / 512 - 1));
        }
        disk.push(&self.path);
        DaemonConfig { engine: Some(self.engine.clone()), ..DaemonConfig::new(disk) }
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }

    fn read(&self, sector: u64) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.file().read_exact_at(&mut bytes, sector * 512).unwrap();
        bytes
    }
}

/// Returns the sector of a request of a queue.
fn sector(queue: u16, nth: u64) -> u64 {
    let slow = if nth.is_multiple_of(2) { SLOW } else { 0 };
    slow + (u64::from(queue) * 1000 + nth) * SECTORS
}

fn data(queue: u16, nth: u64) -> Vec<u8> {
    pattern(u64::from(queue) << 32 | nth, LEN)
}

fn submit(machine: &mut Machine, queue: u16, place: &RequestMemory, request: &Request) {
    let buffers = place.lay_out(&machine.ram, request, Layout::Usual).unwrap();
    let table = machine.shape().indirect.then(|| place.table());
    machine.queues[usize::from(queue)].submit(&machine.ram, &buffers, table).unwrap();
}

fn wait(machine: &mut Machine, queue: u16, count: u64) {
    let queue = &mut machine.queues[usize::from(queue)];
    for _ in 0..count {
        queue.wait_used(Instant::now() + LIMIT).unwrap();
    }
}

fn places(machine: &mut Machine) -> Vec<RequestMemory> {
    (0..COUNT).map(|_| RequestMemory::new(&mut machine.ram, LEN).unwrap()).collect()
}

/// Starts a machine. On each queue, half of the requests are in flight at its back-end, and the other half
/// has completed.
fn start_half_done(daemon: &Daemon, shape: &Shape) -> (Machine, InflightBuffer, Vec<Vec<RequestMemory>>) {
    let mut machine = Machine::prepare(daemon.socket(), shape).unwrap();
    let kept = machine.get_and_set_inflight().unwrap();
    machine.resume().unwrap();
    let request_memory: Vec<Vec<RequestMemory>> = (0..shape.queues).map(|_| places(&mut machine)).collect();
    for (queue, request_memory) in (0..).zip(&request_memory) {
        for (nth, place) in (0..).zip(request_memory) {
            submit(&mut machine, queue, place, &Request::write(sector(queue, nth), &data(queue, nth)));
        }
        machine.queues[usize::from(queue)].flush();
    }
    (0..shape.queues).for_each(|queue| wait(&mut machine, queue, COUNT / 2));
    (machine, kept, request_memory)
}

fn is_repeat_line(line: &str) -> bool {
    line.contains("are done again")
}

fn repeat_lines(log: &[String]) -> Vec<&String> {
    log.iter().filter(|line| is_repeat_line(line)).collect()
}

fn each_request_in_flight_runs_again_once(engine: &str) {
    for shape in shapes() {
        let image = Image::new(engine);
        let mut daemon = Daemon::start(&image.config(true)).unwrap();
        let (mut machine, kept, request_memory) = start_half_done(&daemon, &shape);
        // A completed request that runs again would write other bytes than these.
        let other = pattern(99, LEN);
        for queue in 0..shape.queues {
            for nth in (1..COUNT).step_by(2) {
                assert!(image.read(sector(queue, nth)) == data(queue, nth), "{shape:?}: {queue} {nth}");
                image.file().write_all_at(&other, sector(queue, nth) * 512).unwrap();
            }
        }
        // The successor is killed as well, after it has completed requests of its own.
        for generation in 0..2 {
            daemon.kill_and_restart(&image.config(true)).unwrap();
            machine.reconnect(daemon.socket(), Some(&kept)).unwrap();
            machine.resume().unwrap();
            for queue in 0..shape.queues {
                let place = RequestMemory::new(&mut machine.ram, LEN).unwrap();
                let request = Request::write(200_000 / 8 + u64::from(queue) * SECTORS, &data(7, generation));
                submit(&mut machine, queue, &place, &request);
                machine.queues[usize::from(queue)].flush();
                wait(&mut machine, queue, 1);
            }
        }
        // A thread of the daemon writes the log, so a kill can lose lines that nobody has seen yet.
        for queue in 0..shape.queues {
            let field = format!(" queue={queue} ");
            daemon
                .log()
                .wait_for("requests of the queue that are done again", LIMIT, |line| {
                    (is_repeat_line(line) && line.contains(&field)).then_some(())
                })
                .unwrap();
        }
        let log = daemon.kill_and_restart(&image.config(false)).unwrap();
        let again = repeat_lines(&log);
        assert_eq!(again.len(), usize::from(shape.queues), "{log:#?}");
        assert!(again.iter().all(|line| line.contains("requests=6")), "{again:#?}");
        machine.reconnect(daemon.socket(), Some(&kept)).unwrap();
        machine.resume().unwrap();
        for (queue, request_memory) in (0..).zip(&request_memory) {
            wait(&mut machine, queue, COUNT / 2);
            assert_eq!(machine.queues[usize::from(queue)].in_flight(), 0);
            for nth in 0..request_memory.len() as u64 {
                let expected = if nth % 2 == 0 { data(queue, nth) } else { other.clone() };
                assert!(image.read(sector(queue, nth)) == expected, "{shape:?}: {queue} {nth}");
            }
        }
        for round in 0..100 {
            machine.write(1, 8, &pattern(round, LEN)).unwrap();
            assert_eq!(machine.read(0, 8, LEN).unwrap(), pattern(round, LEN));
        }
        machine.stop().unwrap();
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        assert!(!log.iter().any(|line| line.contains(" ERROR ")), "{log:#?}");
    }
}

/// A ring that stops before its first turn also completes the requests in flight.
fn a_stop_completes_requests_in_flight(engine: &str) {
    for shape in shapes() {
        let image = Image::new(engine);
        let mut daemon = Daemon::start(&image.config(true)).unwrap();
        let (mut machine, kept, _places) = start_half_done(&daemon, &shape);
        daemon.kill_and_restart(&image.config(false)).unwrap();
        machine.reconnect(daemon.socket(), Some(&kept)).unwrap();
        for index in 0..usize::from(shape.queues) {
            machine.frontend.start(&machine.queues[index]).unwrap();
            machine.frontend.stop(&mut machine.queues[index]).unwrap();
            for _ in 0..COUNT / 2 {
                assert!(machine.queues[index].take_used().unwrap().is_some(), "{shape:?}");
            }
            assert_eq!(machine.queues[index].in_flight(), 0);
        }
        for queue in 0..shape.queues {
            for nth in 0..COUNT {
                assert!(image.read(sector(queue, nth)) == data(queue, nth), "{shape:?}: {queue} {nth}");
            }
        }
        machine.resume().unwrap();
        machine.write(0, 8, &pattern(1, LEN)).unwrap();
        machine.stop().unwrap();
    }
}

/// Behind a vIOMMU, the device asks for translations of the ring and of the buffers of repeated requests,
/// as usual. A queue that waits for one can stop. Requests that it has not done stay in the buffer, for the
/// next queue of this process or another.
fn requests_run_again_behind_a_viommu(engine: &str) {
    for (packed, killed) in [(false, false), (false, true), (true, false), (true, true)] {
        let shape = Shape { queues: 1, packed, ..SHAPE };
        let image = Image::new(engine);
        let mut daemon = Daemon::start(&image.config(true)).unwrap();
        let mut machine = Machine::prepare(daemon.socket(), &shape).unwrap();
        let kept = machine.get_and_set_inflight().unwrap();
        let mut iommu = Iommu::connect(&mut machine.frontend).unwrap();
        iommu.map_all(&machine.ram);
        start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
        let request_memory = places(&mut machine);
        let slow: Vec<Request> =
            (0..4).map(|nth| Request::write(sector(0, 2 * nth), &data(0, 2 * nth))).collect();
        for (place, request) in
            request_memory.iter().zip(&slow).chain([(&request_memory[4], &Request::read(0, 512))])
        {
            let buffers = place.lay_out(&machine.ram, request, Layout::Usual).unwrap();
            machine.queues[0].submit(&machine.ram, &at_iova(&buffers), None).unwrap();
        }
        machine.queues[0].flush();
        // The last request has completed, so all were taken.
        iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();

        daemon.kill_and_restart(&image.config(false)).unwrap();
        machine.reconnect(daemon.socket(), Some(&kept)).unwrap();
        let mut iommu = Iommu::connect(&mut machine.frontend).unwrap();
        iommu.map_all(&machine.ram);
        let held_back = request_memory[1].data().0 + DISTANCE;
        start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
        // One page has no translation. The request that needs it waits, and those after it.
        let mut late = Vec::new();
        while let Some(miss) = iommu.miss(if late.is_empty() { LIMIT } else { QUIET_TIME }).unwrap() {
            // The device shows completions in order.
            if miss.iova == held_back || !late.is_empty() {
                late.push(miss);
            } else {
                iommu.answer(&mut machine.frontend, &miss).unwrap();
            }
        }
        machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
        assert_eq!(machine.queues[0].take_used().unwrap(), None);
        // The request is still in the buffer when the ring stops. The answer comes late.
        machine.frontend.ask(&Message::GetVringBase { index: 0 }).unwrap();
        // Completed requests are not in the buffer, so they do not run again.
        image.file().write_all_at(&[0; LEN], sector(0, 0) * 512).unwrap();
        if killed {
            daemon.kill_and_restart(&image.config(false)).unwrap();
            machine.reconnect(daemon.socket(), Some(&kept)).unwrap();
            iommu = Iommu::connect(&mut machine.frontend).unwrap();
            iommu.map_all(&machine.ram);
        } else {
            for miss in &late {
                iommu.answer(&mut machine.frontend, miss).unwrap();
            }
        }
        start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
        for _ in 0..3 {
            iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();
        }
        assert_eq!(machine.queues[0].in_flight(), 0);
        // Now the requests after it run.
        let read = Request::read(sector(0, 2), LEN);
        let buffers = request_memory[5].lay_out(&machine.ram, &read, Layout::Usual).unwrap();
        machine.queues[0].submit(&machine.ram, &at_iova(&buffers), None).unwrap();
        machine.queues[0].flush();
        iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();
        machine.frontend.ask(&Message::GetVringBase { index: 0 }).unwrap();
        assert!(image.read(sector(0, 0)) == [0; LEN], "a completed request ran again");
        for nth in [2, 4, 6] {
            assert!(image.read(sector(0, nth)) == data(0, nth), "{nth}");
        }
        drop(machine);
        let (_, log) = daemon.stop().unwrap();
        let left: Vec<_> = repeat_lines(&log).into_iter().map(|line| line.contains("requests=3")).collect();
        // The ring repeated four requests at its first start and three at its second. If the process was
        // killed in between, only the second is in this log.
        assert_eq!(left.last(), Some(&true), "{log:#?}");
        assert_eq!(left.len(), if killed { 1 } else { 2 }, "{log:#?}");
    }
}

/// A front-end that takes the buffer along does not wait for a disk that is slow: what it has in flight is
/// cancelled, and the destination does it.
fn a_slow_disk_delays_no_hand_over(engine: &str) {
    let protocol = ProtocolFeatures::GET_VRING_BASE_INFLIGHT;
    for shape in shapes().map(|shape| Shape { protocol, ..shape }) {
        let image = Image::new(engine);
        let source = Daemon::start(&image.config(true)).unwrap();
        let (mut machine, kept, _places) = start_half_done(&source, &shape);
        for queue in &mut machine.queues {
            machine.frontend.enable(queue, false).unwrap();
            machine.frontend.stop(queue).unwrap();
            assert_eq!(queue.take_used().unwrap(), None, "{shape:?}");
        }
        for nth in (0..COUNT).step_by(2) {
            assert!(image.read(sector(0, nth)) != data(0, nth), "{shape:?}: nothing was cancelled");
        }
        let destination = Daemon::start(&image.config(false)).unwrap();
        drop(machine.move_to(destination.socket()).unwrap());
        machine.frontend.set_inflight(&kept.copy().unwrap()).unwrap();
        machine.resume().unwrap();
        for queue in 0..shape.queues {
            wait(&mut machine, queue, COUNT / 2);
            assert_eq!(machine.queues[usize::from(queue)].in_flight(), 0);
            for nth in 0..COUNT {
                assert!(image.read(sector(queue, nth)) == data(queue, nth), "{shape:?}: {queue} {nth}");
            }
        }
        machine.write(0, 8, &pattern(1, LEN)).unwrap();
        machine.stop().unwrap();
        let (status, log) = source.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        let left = log.iter().filter(|line| line.contains("unfinished requests are left")).count();
        assert_eq!(left, usize::from(shape.queues), "{log:#?}");
        assert!(!log.iter().any(|line| line.contains(" ERROR ") || line.contains("failed")), "{log:#?}");
    }
}

/// Uses one buffer for many runs of a ring. Each run ends without requests in flight.
fn a_buffer_serves_many_runs_of_a_ring(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for shape in shapes() {
        let mut machine =
            Machine::prepare(served.socket(), &Shape { size: shape.size / 4, ..shape }).unwrap();
        let kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        for round in 0..40u64 {
            machine.write(0, round, &pattern(round, 1024)).unwrap();
            machine.stop().unwrap();
            if round % 3 == 0 {
                machine.frontend.set_inflight(&kept).unwrap();
            }
            if round % 5 == 0 {
                machine.reconnect(served.socket(), Some(&kept)).unwrap();
            }
            machine.resume().unwrap();
            assert_eq!(machine.read(0, round, 1024).unwrap(), pattern(round, 1024));
        }
        machine.stop().unwrap();
    }
    let log = served.end().unwrap();
    assert!(repeat_lines(&log).is_empty(), "{log:#?}");
}

/// The rings start anew after a reset. The buffer does not describe them.
#[test]
fn a_reset_forgets_the_buffer() {
    let served = Served::start("io_uring", &[]).unwrap();
    for shape in shapes() {
        let mut machine = Machine::prepare(served.socket(), &shape).unwrap();
        for round in 0..3u64 {
            machine.get_and_set_inflight().unwrap();
            machine.resume().unwrap();
            for index in 0..shape.queues {
                // The rings have different positions.
                for nth in 0..round + u64::from(index) {
                    machine.write(index, nth, &pattern(nth, 512)).unwrap();
                }
            }
            machine.frontend.order(&Message::ResetDevice).unwrap();
            for index in 0..shape.queues {
                let queue =
                    Queue::new(&mut machine.ram, index, shape.size, machine.frontend.features()).unwrap();
                machine.queues[usize::from(index)] = queue;
                machine.frontend.start(&machine.queues[usize::from(index)]).unwrap();
                machine.write(index, 50, &pattern(round, 512)).unwrap();
                assert_eq!(machine.read(index, 50, 512).unwrap(), pattern(round, 512), "{shape:?}");
            }
            machine.stop().unwrap();
        }
    }
    let log = served.end().unwrap();
    assert!(!log.iter().any(|line| line.contains(" ERROR ")) && repeat_lines(&log).is_empty(), "{log:#?}");
}

/// Without its base, a packed ring can only continue with a buffer.
#[test]
fn a_packed_ring_continues_only_with_a_buffer() {
    let image = Image::new("io_uring");
    let shape = Shape { packed: true, size: 8, queues: 1, ..SHAPE };
    for keeps in [false, true] {
        let mut daemon = Daemon::start(&image.config(false)).unwrap();
        let mut machine = Machine::prepare(daemon.socket(), &shape).unwrap();
        let kept = keeps.then(|| machine.get_and_set_inflight().unwrap());
        machine.resume().unwrap();
        machine.write(0, 8, &pattern(1, LEN)).unwrap();
        daemon.kill_and_restart(&image.config(false)).unwrap();
        machine.reconnect(daemon.socket(), kept.as_ref()).unwrap();
        machine.resume().unwrap();
        if keeps {
            assert_eq!(machine.read(0, 8, LEN).unwrap(), pattern(1, LEN));
            machine.stop().unwrap();
        } else {
            assert!(
                machine.queues[0].err().wait(Instant::now() + LIMIT).unwrap(),
                "the daemon signalled no error"
            );
        }
    }
}

fn wait_until_broken(machine: &mut Machine, daemon: &Daemon, words: &str) {
    assert!(
        machine.queues[0].err().wait(Instant::now() + LIMIT).unwrap(),
        "{words}: the daemon signalled no error"
    );
    let says = |line: &str| (line.contains(" ERROR ") && line.contains(words)).then_some(());
    daemon.log().wait_for(words, LIMIT, says).unwrap();
}

/// A buffer that a ring does not understand breaks this ring only.
#[test]
fn an_invalid_buffer_breaks_only_its_ring() {
    for packed in [false, true] {
        let shape = Shape { packed, ..SHAPE };
        for (offset, bytes, words) in [
            (8, [7u16, 32], "the version is 7"),
            (8, [1, 33], "the number of entries is 33"),
            (8, [1, 31], "the number of entries is 31"),
        ] {
            let served = Served::start("io_uring", &[]).unwrap();
            let mut machine = Machine::prepare(served.socket(), &shape).unwrap();
            let kept = machine.get_and_set_inflight().unwrap();
            let bytes = bytes.map(u16::to_le_bytes).concat();
            kept.file().unwrap().write_all_at(&bytes, offset).unwrap();
            machine.resume().unwrap();
            wait_until_broken(&mut machine, &served.daemon, words);
            machine.write(1, 8, &pattern(1, LEN)).unwrap();
            // The buffer is unchanged, for a process that understands it.
            let mut found = [0; 4];
            kept.file().unwrap().read_exact_at(&mut found, offset).unwrap();
            assert_eq!(found[..], bytes[..]);
            drop(machine);
            served.check_next_frontend().unwrap();
            served.end().unwrap();
        }
    }
}

/// Writes to a buffer in use have no effect on its users.
#[test]
fn writes_to_a_buffer_in_use_have_no_effect() {
    for packed in [false, true] {
        let served = Served::start("io_uring", &[]).unwrap();
        let shape = Shape { packed, returns: false, ..SHAPE };
        let mut machine = Machine::prepare(served.socket(), &shape).unwrap();
        let kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        for round in 0..100 {
            let rubbish = pattern(round, kept.described.mmap_size as usize);
            kept.file().unwrap().write_all_at(&rubbish, 0).unwrap();
            machine.write(0, round, &pattern(round, LEN)).unwrap();
            assert_eq!(machine.read(1, round, LEN).unwrap(), pattern(round, LEN));
        }
        machine.stop().unwrap();
        served.end_without_warnings().unwrap();
    }
}

/// The front-end can truncate a file of its own. It cannot truncate the daemon's buffer.
#[test]
fn a_truncated_buffer_breaks_its_rings() {
    for packed in [false, true] {
        let served = Served::start("io_uring", &[]).unwrap();
        let shape = Shape { packed, ..SHAPE };
        let mut machine = Machine::prepare(served.socket(), &shape).unwrap();
        let ours = machine.get_and_set_inflight().unwrap();
        assert!(ours.file().unwrap().set_len(0).is_err());
        let kept = InflightBuffer::new(Inflight { mmap_offset: 4096, ..ours.described }).unwrap();
        machine.frontend.set_inflight(&kept).unwrap();
        machine.resume().unwrap();
        machine.write(0, 8, &pattern(1, LEN)).unwrap();
        machine.write(1, 8, &pattern(1, LEN)).unwrap();
        kept.file().unwrap().set_len(0).unwrap();
        let request = Request::read(8, LEN);
        let place = machine.request_memory[0];
        submit(&mut machine, 0, &place, &request);
        machine.queues[0].flush();
        wait_until_broken(&mut machine, &served.daemon, "the in-flight buffer (");
        drop(machine);
        served.check_next_frontend().unwrap();
        served.end().unwrap();
    }
}

/// The front-end has not chosen the ring format yet.
#[test]
fn a_buffer_fits_both_ring_formats() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut frontend = Frontend::connect(served.socket()).unwrap();
    frontend.send(&Message::SetProtocolFeatures(ProtocolFeatures::INFLIGHT_SHMFD)).unwrap();
    let kept = frontend.get_inflight(2, 32).unwrap().unwrap();
    assert_eq!(kept.described.mmap_size, 2 * inflight_region_len(true, 32) as u64);
    drop(frontend);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

#[test]
fn invalid_buffers_are_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::prepare(served.socket(), &SHAPE).unwrap();
    for (queues, size) in [(0, 32), (5, 32), (2, 0), (2, 1025), (u16::MAX, u16::MAX)] {
        assert!(machine.frontend.get_inflight(queues, size).unwrap().is_none(), "{queues} {size}");
    }
    let kept = machine.get_and_set_inflight().unwrap();
    let region = inflight_region_len(false, SHAPE.size) as u64;
    assert_eq!(kept.described.mmap_size, 2 * region);
    for wrong in [
        Inflight { mmap_size: 0, ..kept.described },
        Inflight { mmap_size: 2 * region - 8, ..kept.described },
        Inflight { mmap_size: 1 << 40, ..kept.described },
        Inflight { mmap_offset: 4, mmap_size: region, num_queues: 1, ..kept.described },
        Inflight { mmap_offset: u64::MAX - 7, ..kept.described },
        Inflight { queue_size: 0, ..kept.described },
        Inflight { queue_size: u16::MAX, ..kept.described },
    ] {
        let wrong = Message::SetInflightFd(wrong, kept.file.try_clone().unwrap());
        assert_eq!(machine.frontend.attempt(&wrong).unwrap(), Answer::Refused, "{wrong:?}");
    }
    machine.resume().unwrap();
    // Rings are running.
    assert_eq!(machine.frontend.attempt(&kept.message().unwrap()).unwrap(), Answer::Refused);
    machine.write(0, 8, &pattern(1, LEN)).unwrap();
    machine.stop().unwrap();
    drop(machine);
    // A ring that the buffer does not have does not start.
    let mut machine = Machine::prepare(served.socket(), &SHAPE).unwrap();
    let kept = machine.frontend.get_inflight(1, 32).unwrap().unwrap();
    machine.frontend.set_inflight(&kept).unwrap();
    assert!(machine.resume().is_err());
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// A guest of QEMU's virtio-mmio can choose larger rings than those for which QEMU makes the buffer.
#[test]
fn a_ring_that_is_larger_than_the_buffer_goes_on_without_it() {
    let served = Served::start("io_uring", &[]).unwrap();
    for (size, has_room) in [(SHAPE.size / 2, false), (SHAPE.size * 2, true)] {
        let mut machine = Machine::prepare(served.socket(), &SHAPE).unwrap();
        let kept = machine.frontend.get_inflight(SHAPE.queues, size).unwrap().unwrap();
        machine.frontend.set_inflight(&kept).unwrap();
        machine.resume().unwrap();
        for queue in 0..SHAPE.queues {
            machine.write(queue, 8 * u64::from(queue), &pattern(1, LEN)).unwrap();
        }
        machine.stop().unwrap();
        // The device has written something into it.
        let mut bytes = vec![0; kept.described.mmap_size as usize];
        kept.file().unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes.iter().any(|byte| *byte != 0), has_room, "{size}");
    }
    served.check_next_frontend().unwrap();
    let log = served.end().unwrap();
    let warnings = log.iter().filter(|line| line.contains("give the hypervisor's device queue-size=32"));
    assert_eq!(warnings.count(), usize::from(SHAPE.queues), "{log:#?}");
}

/// A status byte that the device never wrote keeps its value.
#[test]
fn requests_that_run_again_get_a_status() {
    let image = Image::new("threads");
    let mut daemon = Daemon::start(&image.config(true)).unwrap();
    let shape = Shape { queues: 1, size: 64, ..SHAPE };
    let (mut machine, kept, request_memory) = start_half_done(&daemon, &shape);
    let status = |machine: &Machine, place: &RequestMemory, nth| {
        place.outcome(&machine.ram, &Request::write(sector(0, nth), &data(0, nth)), 1).unwrap().status
    };
    for nth in 0..COUNT {
        let answered = status(&machine, &request_memory[0][nth as usize], nth) == blk::S_OK;
        assert_eq!(answered, nth % 2 == 1, "{nth}");
    }
    daemon.kill_and_restart(&image.config(false)).unwrap();
    machine.reconnect(daemon.socket(), Some(&kept)).unwrap();
    machine.resume().unwrap();
    wait(&mut machine, 0, COUNT / 2);
    for nth in 0..COUNT {
        assert_eq!(status(&machine, &request_memory[0][nth as usize], nth), blk::S_OK, "{nth}");
    }
}
