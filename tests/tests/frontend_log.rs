//! Tests the log of a front-end that migrates its guest. A copy of memory that only the log updates must
//! end equal to memory. No page may have a mark if the device did not write it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_memory::Gpa;
use kickless_spec::blk;
use kickless_spec::features::Features;
use kickless_spec::ring::{EVENT_LEN, desc_len, used_len};
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request, UNANSWERED};
use kickless_tests::driver::{Buffer, Eventfd, Queue};
use kickless_tests::frontend::log::{Bitmap, PAGE, Replica};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::served::{IMAGE_SIZE, Served};
use kickless_tests::frontend::{Answer, Frontend, LIMIT};
use kickless_tests::with_each_engine;
use kickless_vhost_user::{FrontendMessage as Message, LogBase, VringAddr};
use zerocopy::IntoBytes;

with_each_engine! {
    split_rings_are_logged
    split_rings_without_event_index_are_logged
    packed_rings_are_logged
    faulty_disks_are_logged
}

/// Requests in flight.
const DEPTH: usize = 16;
/// Bytes of data of one request.
const AREA: u64 = 64 << 10;
/// Size of the queue. At times all its descriptors are in use.
const SIZE: u16 = 64;

/// Guest memory for one request. The device's writes and reads are on different pages.
struct RequestPages {
    header: Gpa,
    table: Gpa,
    /// Data of writes, and of reads that fail before they write.
    untouched: Gpa,
    /// Data of reads, between pages that the device does not use.
    data: Gpa,
    status: Gpa,
}

impl RequestPages {
    fn new(ram: &mut Ram) -> RequestPages {
        let mut take = |len| ram.take(len as usize, PAGE).unwrap();
        RequestPages {
            header: take(PAGE),
            table: take(PAGE),
            untouched: take(AREA),
            data: Gpa(take(AREA + 2 * PAGE).0 + PAGE),
            status: take(PAGE),
        }
    }
}

/// Random requests.
struct Requests {
    random: fastrand::Rng,
    disk_size: u64,
}

impl Requests {
    /// Writes a request's header and returns its buffers.
    fn next(&mut self, ram: &Ram, place: &RequestPages) -> Vec<Buffer> {
        let random = &mut self.random;
        let len = 512 * random.u64(1..=(AREA - PAGE) / 512 / 4);
        // Some buffers are unaligned, so that direct I/O needs bounce buffers.
        let skip = if random.bool() { random.u64(..PAGE) } else { 512 * random.u64(..8) };
        let sector = random.u64(..(self.disk_size - len) / 512);
        let (kind, sector, data, len, writable) = match random.u8(..10) {
            0..=5 => (blk::T_IN, sector, place.data, len, true),
            6..=7 => (blk::T_OUT, sector, place.untouched, len, false),
            8 => (blk::T_GET_ID, 0, place.data, 20, true),
            // Past the end of the disk.
            _ => (blk::T_IN, self.disk_size / 512, place.untouched, len, true),
        };
        let header = blk::Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
        ram.map().write(place.header, header.as_bytes()).unwrap();
        ram.map().write(place.status, &[UNANSWERED]).unwrap();
        let data = data.0 + skip;
        let cut = random.u64(1..len.max(2)).min(len);
        let mut buffers = vec![Buffer { addr: place.header, len: 16, writable: false }];
        for (at, len) in [(0, cut), (cut, len - cut)] {
            if len > 0 {
                buffers.push(Buffer { addr: Gpa(data + at), len: len as u32, writable });
            }
        }
        buffers.push(Buffer { addr: place.status, len: 1, writable: true });
        buffers
    }
}

/// Keeps the queue full until `stop` is set, then waits until it is empty. Returns the number of requests.
fn drive(
    ram: &Ram,
    queue: &mut Queue,
    request_memory: &[RequestPages],
    mut requests: Requests,
    stop: &AtomicBool,
) -> u64 {
    let mut free: Vec<usize> = (0..request_memory.len()).collect();
    let mut taken = BTreeMap::new();
    let mut done = 0;
    loop {
        while !stop.load(Ordering::Relaxed) && !free.is_empty() {
            let place = free.pop().unwrap();
            let buffers = requests.next(ram, &request_memory[place]);
            let head = queue.submit(ram, &buffers, Some(request_memory[place].table)).unwrap();
            assert!(taken.insert(head, place).is_none());
        }
        queue.flush();
        if taken.is_empty() {
            return done;
        }
        let mut used = Some(queue.wait_used(Instant::now() + LIMIT).unwrap());
        while let Some(one) = used {
            let place = taken.remove(&one.head).unwrap();
            let mut status = [0];
            ram.map().read(request_memory[place].status, &mut status).unwrap();
            assert_ne!(status[0], UNANSWERED);
            free.push(place);
            done += 1;
            used = queue.take_used().unwrap();
        }
    }
}

/// Migrates a working guest in several rounds. At times it sets another log, or logs nothing for a while.
fn migrate_under_load(daemon: &Daemon, disk_size: u64, shape: &Shape) {
    let mut machine = Machine::prepare(daemon.socket(), shape).unwrap();
    machine.frontend.set_features(machine.frontend.features() | Features::LOG_ALL).unwrap();
    let Machine { frontend, ram, queues, .. } = &mut machine;
    let request_memory: Vec<RequestPages> = (0..DEPTH).map(|_| RequestPages::new(ram)).collect();
    let queue = &mut queues[0];
    // As with QEMU, the ring starts before the log exists.
    frontend.start(queue).unwrap();
    let mut replica = Replica::new(ram);
    for place in &request_memory {
        replica.allow(place.data, AREA);
        replica.allow(place.status, 1);
    }
    let written = written_ring_areas(ram, queue, shape);
    written.iter().for_each(|&(gpa, len)| replica.allow(gpa, len as u64));

    let stop = AtomicBool::new(false);
    let ram = &*ram;
    let mut bitmap = Bitmap::covering(ram).unwrap();
    thread::scope(|scope| {
        let requests = Requests { random: fastrand::Rng::with_seed(disk_size ^ u64::from(SIZE)), disk_size };
        // The driver's thread owns the ring. The front-end only needs its addresses.
        let addresses = kickless_tests::frontend::addresses(queue);
        let driver = scope.spawn(|| drive(ram, queue, &request_memory, requests, &stop));
        let ring = |frontend: &mut Frontend, log| {
            let log_guest_addr = ram.map().gpa_of(kickless_memory::UserAddr(addresses.used_addr)).unwrap().0;
            frontend.order(&Message::SetVringAddr(VringAddr { log, log_guest_addr, ..addresses })).unwrap();
        };
        for round in 0..6u64 {
            // Logging was off, or on without a log. Writes are unknown, so all memory must be copied.
            frontend.set_log(&bitmap).unwrap();
            frontend.set_logging(true).unwrap();
            ring(frontend, true);
            replica.copy_all(ram).unwrap();
            for turn in 0..20 {
                thread::sleep(Duration::from_millis(1));
                replica.take(ram, &bitmap).unwrap();
                if turn % 7 == 6 {
                    let larger = Bitmap::new((ram.end() >> 15) + (1 << round) + turn).unwrap();
                    frontend.set_log(&larger).unwrap();
                    replica.take(ram, &bitmap).unwrap();
                    thread::sleep(Duration::from_millis(1));
                    assert!(
                        bitmap.harvest().is_empty(),
                        "the device wrote to a log that it must not use any more"
                    );
                    bitmap = larger;
                }
            }
            if round < 5 {
                frontend.set_logging(false).unwrap();
                ring(frontend, false);
                replica.take(ram, &bitmap).unwrap();
                thread::sleep(Duration::from_millis(2));
                assert!(bitmap.harvest().is_empty(), "the device wrote to the log while logging was off");
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(driver.join().unwrap() > 0);
    });
    frontend.stop(queue).unwrap();
    replica.take(ram, &bitmap).unwrap();
    assert!(replica.copied > 0);
    for place in &request_memory {
        replica.compare(ram, Gpa(place.data.0 - PAGE), (AREA + 2 * PAGE) as usize).unwrap();
        replica.compare(ram, place.status, 1).unwrap();
    }
    for (gpa, len) in written {
        replica.compare(ram, gpa, len).unwrap();
    }
}

/// Returns the parts of a ring that the device writes. All chains of the ring are indirect.
fn written_ring_areas(ram: &Ram, queue: &Queue, shape: &Shape) -> Vec<(Gpa, usize)> {
    let [desc, _, used] =
        queue.user_addresses().map(|user| ram.map().gpa_of(kickless_memory::UserAddr(user)).unwrap());
    match shape.packed {
        true => vec![(desc, desc_len(SIZE)), (used, EVENT_LEN)],
        false => vec![(used, used_len(SIZE, shape.event_idx))],
    }
}

const SHAPE: Shape = Shape { size: SIZE, indirect: true, ..Shape::LINUX };

fn over_all_disks(engine: &str, shape: &Shape) {
    let served = Served::start(engine, &[]).unwrap();
    migrate_under_load(&served.daemon, IMAGE_SIZE, shape);
    served.check_next_frontend().unwrap();
    served.end_without_warnings().unwrap();
    for disk in ["mem:64M", "null:64M"] {
        let config = DaemonConfig { engine: Some(engine.to_owned()), ..DaemonConfig::new(disk) };
        let daemon = Daemon::start(&config).unwrap();
        migrate_under_load(&daemon, 64 << 20, shape);
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
}

fn split_rings_are_logged(engine: &str) {
    over_all_disks(engine, &SHAPE);
}

fn split_rings_without_event_index_are_logged(engine: &str) {
    over_all_disks(engine, &Shape { event_idx: false, ..SHAPE });
}

fn packed_rings_are_logged(engine: &str) {
    over_all_disks(engine, &Shape { packed: true, ..SHAPE });
}

/// The disk has short transfers, errors after a part, EAGAIN, and completions out of order.
fn faulty_disks_are_logged(engine: &str) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    std::fs::File::create_new(&image).unwrap().set_len(IMAGE_SIZE).unwrap();
    let rules = "fault:seed=5,eio@5%,short@40%,eagain@5%,delay=100us-2ms@10%";
    let config = DaemonConfig {
        engine: Some(engine.to_owned()),
        ..DaemonConfig::new(format!("{rules}:{}", image.display()))
    };
    let daemon = Daemon::start(&config).unwrap();
    migrate_under_load(&daemon, IMAGE_SIZE, &SHAPE);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// A null disk does not write the buffers of reads, so it does not mark them.
#[test]
fn pages_not_written_are_not_marked() {
    let daemon = Daemon::start(&DaemonConfig::new("null:64M")).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::LINUX).unwrap();
    let bitmap = Bitmap::covering(&machine.ram).unwrap();
    machine.frontend.set_log(&bitmap).unwrap();
    machine.frontend.set_logging(true).unwrap();
    machine.read(0, 0, 64 << 10).unwrap();
    machine.write(0, 0, &[1; 4096]).unwrap();
    machine.stop().unwrap();
    // The two status bytes are on a page each. Logging of the ring is off.
    assert_eq!(bitmap.harvest().len(), 2);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!((status.code(), log.iter().any(|line| line.contains(" WARN "))), (Some(0), false));
}

#[test]
fn the_log_descriptor_signals_new_marks() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let (bitmap, news) = (Bitmap::covering(&machine.ram).unwrap(), Eventfd::new().unwrap());
    use std::os::fd::AsFd;
    let fd = news.as_fd().try_clone_to_owned().unwrap();
    machine.frontend.order(&Message::SetLogFd(fd)).unwrap();
    machine.read(0, 0, 4096).unwrap();
    assert_eq!(news.take(), 0, "there is no log yet");
    machine.frontend.set_log(&bitmap).unwrap();
    machine.frontend.set_logging(true).unwrap();
    for _ in 0..2 {
        machine.read(0, 0, 4096).unwrap();
        assert!(news.wait(Instant::now() + LIMIT).unwrap(), "the device signalled no news");
        machine.stop().unwrap();
        news.take();
        assert!(!bitmap.harvest().is_empty());
        machine.frontend.start(&machine.queues[0]).unwrap();
    }
    machine.read(0, 0, 4096).unwrap();
    assert!(news.wait(Instant::now() + LIMIT).unwrap());
    news.take();
    // All pages are marked already, except the ring, whose logging is off.
    machine.read(0, 0, 4096).unwrap();
    machine.stop().unwrap();
    assert_eq!(news.take(), 0);
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// Each of these logs is refused with a reason, and the old log stays in use.
#[test]
fn invalid_logs_are_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let Machine { frontend, ram, .. } = &mut machine;
    let good = Bitmap::covering(ram).unwrap();
    let needs = (ram.end() - 1) / PAGE / 8 + 1;
    frontend.set_log(&good).unwrap();
    frontend.set_logging(true).unwrap();
    let small = format!("a log of {} bytes is too small", needs - 1);
    let takes = format!("takes {needs} bytes");
    let file = || Some(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let shared =
        |mmap_size, mmap_offset, fd| Message::SetLogBase(LogBase::Shared { mmap_size, mmap_offset, fd });
    let event = Eventfd::new().unwrap();
    use std::os::fd::AsFd;
    let event = event.as_fd().try_clone_to_owned().unwrap();
    let cases: Vec<(Message, Vec<&str>)> = vec![
        (Bitmap::new(needs - 1).unwrap().message().unwrap(), vec![&small, &takes]),
        (shared(needs, 0, file()), vec!["bytes of its file, which has 0x0"]),
        (shared(0, 0, file()), vec!["empty"]),
        (shared(needs, 3, file()), vec!["mmap offset 0x3", "no multiple of 8"]),
        (shared(u64::MAX, 8, file()), vec!["wraps"]),
        (shared(needs, u64::MAX - 7, file()), vec!["wraps"]),
        (shared(needs, 0, Some(event)), vec!["cannot be mapped"]),
        (shared(needs, 0, None), vec!["no file descriptor"]),
        (Message::SetLogBase(LogBase::Address(0x1000)), vec!["no file descriptor"]),
    ];
    for (message, words) in cases {
        let seen = served.daemon.log().len();
        assert_eq!(frontend.attempt(&message).unwrap(), Answer::Refused, "{message:?}");
        let said = |line: &str| {
            (line.contains("SET_LOG_BASE") && words.iter().all(|w| line.contains(w))).then_some(())
        };
        served.daemon.log().wait_from(seen, &format!("saying {words:?}"), LIMIT, said).unwrap();
    }
    machine.read(0, 0, 4096).unwrap();
    assert!(!good.harvest().is_empty(), "the old log is not in use any more");
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// Memory beyond the log is refused while the log is in use. It is accepted with a larger log or without
/// one.
#[test]
fn memory_beyond_the_log_is_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let Machine { frontend, ram, .. } = &mut machine;
    let bitmap = Bitmap::covering(ram).unwrap();
    frontend.set_log(&bitmap).unwrap();
    frontend.set_logging(true).unwrap();
    let more = Ram::new(ram.end().next_multiple_of(1 << 30), 1 << 20).unwrap();
    let (region, file) = more.region_and_file().unwrap();
    assert_eq!(frontend.attempt(&Message::AddMemReg(region, file)).unwrap(), Answer::Refused);
    let larger = Bitmap::covering(&more).unwrap();
    frontend.set_log(&larger).unwrap();
    frontend.add(&more).unwrap();
    // A read into the new memory is marked.
    let (data, place) = (Gpa(more.region().guest_addr + PAGE), &machine.request_memory[0]);
    let request = kickless_tests::driver::request::Request::read(0, 0);
    let layout = kickless_tests::driver::request::Layout::Usual;
    let mut buffers = place.lay_out(&machine.ram, &request, layout).unwrap();
    buffers.insert(1, Buffer { addr: data, len: 4096, writable: true });
    machine.queues[0].submit(&machine.ram, &buffers, None).unwrap();
    machine.queues[0].flush();
    machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
    let frontend = &mut machine.frontend;
    frontend.stop(&mut machine.queues[0]).unwrap();
    assert!(larger.harvest().contains(&(data.0 / PAGE)));
    // No ring runs, so the device drops a log that does not cover memory any more.
    frontend.remove(more.region()).unwrap();
    frontend.set_log(&bitmap).unwrap();
    frontend.add(&more).unwrap();
    bitmap.harvest();
    frontend.start(&machine.queues[0]).unwrap();
    machine.read(0, 0, 4096).unwrap();
    machine.stop().unwrap();
    assert!(bitmap.harvest().is_empty());
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// A front-end that truncates its log would not learn of written pages. Its rings break until they are set
/// up again.
#[test]
fn a_truncated_log_breaks_the_rings() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let (cut, whole) = (Bitmap::covering(&machine.ram).unwrap(), Bitmap::covering(&machine.ram).unwrap());
    machine.write(0, 0, &[7; 4096]).unwrap();
    machine.frontend.set_log(&cut).unwrap();
    machine.frontend.set_logging(true).unwrap();
    cut.truncate().unwrap();
    let seen = served.daemon.log().len();
    let buffers =
        machine.request_memory[0].lay_out(&machine.ram, &Request::read(0, 4096), Layout::Usual).unwrap();
    machine.queues[0].submit(&machine.ram, &buffers, None).unwrap();
    machine.queues[0].flush();
    assert!(machine.queues[0].err().wait(Instant::now() + LIMIT).unwrap());
    let said = |line: &str| line.contains("the log of written pages").then_some(());
    served.daemon.log().wait_from(seen, "a damaged log", LIMIT, said).unwrap();
    // The machine has another log now.
    machine.frontend.set_log(&whole).unwrap();
    for index in 0..machine.queues.len() {
        machine.frontend.stop(&mut machine.queues[index]).unwrap();
        let (size, features) = (machine.shape().size, machine.frontend.features());
        machine.queues[index] = Queue::new(&mut machine.ram, index as u16, size, features).unwrap();
        machine.frontend.start(&machine.queues[index]).unwrap();
    }
    assert_eq!(machine.read(0, 0, 4096).unwrap(), [7; 4096]);
    machine.stop().unwrap();
    assert!(!whole.harvest().is_empty());
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// The log address of a ring must be in guest memory.
#[test]
fn invalid_log_addresses_are_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let addresses = kickless_tests::frontend::addresses(&machine.queues[0]);
    for log_guest_addr in [0, machine.ram.end(), u64::MAX] {
        let message = Message::SetVringAddr(VringAddr { log: true, log_guest_addr, ..addresses });
        assert_eq!(machine.frontend.attempt(&message).unwrap(), Answer::Refused, "{log_guest_addr:#x}");
    }
    machine.read(0, 0, 4096).unwrap();
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}
