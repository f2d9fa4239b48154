//! The log of a front-end that migrates its guest: a copy of memory that is kept by it alone ends as memory does, and no page
//! is marked that nobody wrote.

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
    split_rings
    split_rings_without_event_index
    packed_rings
    faults
}

/// Requests in flight.
const DEPTH: usize = 16;
/// Bytes of data for one.
const AREA: u64 = 64 << 10;
/// The queue's size: all its descriptors are in use now and then.
const SIZE: u16 = 64;

/// Guest memory for one request. What the device writes and what it reads are on different pages.
struct Place {
    header: Gpa,
    table: Gpa,
    /// For writes; and for reads that fail before they touch anything.
    untouched: Gpa,
    /// For reads, between pages that nobody touches.
    data: Gpa,
    status: Gpa,
}

impl Place {
    fn new(ram: &mut Ram) -> Place {
        let mut take = |len| ram.take(len as usize, PAGE).unwrap();
        Place {
            header: take(PAGE),
            table: take(PAGE),
            untouched: take(AREA),
            data: Gpa(take(AREA + 2 * PAGE).0 + PAGE),
            status: take(PAGE),
        }
    }
}

/// What the driver asks for, at random.
struct Requests {
    random: fastrand::Rng,
    disk_size: u64,
}

impl Requests {
    /// Writes a request's header and makes its buffers.
    fn next(&mut self, ram: &Ram, place: &Place) -> Vec<Buffer> {
        let random = &mut self.random;
        let len = 512 * random.u64(1..=(AREA - PAGE) / 512 / 4);
        // Askew, so that direct I/O takes bounce buffers, or not.
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

/// Keeps the queue full until it is told to stop, and then until it is empty.
fn drive(ram: &Ram, queue: &mut Queue, places: &[Place], mut requests: Requests, stop: &AtomicBool) -> u64 {
    let mut free: Vec<usize> = (0..places.len()).collect();
    let mut taken = BTreeMap::new();
    let mut done = 0;
    loop {
        while !stop.load(Ordering::Relaxed) && !free.is_empty() {
            let place = free.pop().unwrap();
            let buffers = requests.next(ram, &places[place]);
            let head = queue.submit(ram, &buffers, Some(places[place].table)).unwrap();
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
            ram.map().read(places[place].status, &mut status).unwrap();
            assert_ne!(status[0], UNANSWERED);
            free.push(place);
            done += 1;
            used = queue.take_used().unwrap();
        }
    }
}

/// A migration while its guest works: several rounds, with another log now and then, and without one for a while.
fn migrate(daemon: &Daemon, disk_size: u64, shape: &Shape) {
    let mut machine = Machine::prepare(daemon.socket(), shape).unwrap();
    machine.frontend.set_features(machine.frontend.features() | Features::LOG_ALL).unwrap();
    let Machine { frontend, ram, queues, .. } = &mut machine;
    let places: Vec<Place> = (0..DEPTH).map(|_| Place::new(ram)).collect();
    let queue = &mut queues[0];
    // As QEMU's, the ring starts before there is a log.
    frontend.start(queue).unwrap();
    let mut replica = Replica::new(ram);
    for place in &places {
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
        // The ring is the driver's thread's; what the front-end has to know of it, it knows.
        let addresses = kickless_tests::frontend::addresses(queue);
        let driver = scope.spawn(|| drive(ram, queue, &places, requests, &stop));
        let ring = |frontend: &mut Frontend, log| {
            let log_guest_addr = ram.map().gpa_of(kickless_memory::UserAddr(addresses.used_addr)).unwrap().0;
            frontend.order(&Message::SetVringAddr(VringAddr { log, log_guest_addr, ..addresses })).unwrap();
        };
        for round in 0..6u64 {
            // Logging was on without a log, or off: what was written is not known, and all of it has to be copied.
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
                    assert!(bitmap.harvest().is_empty(), "a log is written that was taken back");
                    bitmap = larger;
                }
            }
            if round < 5 {
                frontend.set_logging(false).unwrap();
                ring(frontend, false);
                replica.take(ram, &bitmap).unwrap();
                thread::sleep(Duration::from_millis(2));
                assert!(bitmap.harvest().is_empty(), "a log is written that is off");
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(driver.join().unwrap() > 0);
    });
    frontend.stop(queue).unwrap();
    replica.take(ram, &bitmap).unwrap();
    assert!(replica.copied > 0);
    for place in &places {
        replica.compare(ram, Gpa(place.data.0 - PAGE), (AREA + 2 * PAGE) as usize).unwrap();
        replica.compare(ram, place.status, 1).unwrap();
    }
    for (gpa, len) in written {
        replica.compare(ram, gpa, len).unwrap();
    }
}

/// What the device writes of a ring, all of whose chains are indirect ones.
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
    migrate(&served.daemon, IMAGE_SIZE, shape);
    served.serves_the_next().unwrap();
    served.end_untroubled().unwrap();
    for disk in ["mem:64M", "null:64M"] {
        let config = DaemonConfig { engine: Some(engine.to_owned()), ..DaemonConfig::new(disk) };
        let daemon = Daemon::start(&config).unwrap();
        migrate(&daemon, 64 << 20, shape);
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
}

fn split_rings(engine: &str) {
    over_all_disks(engine, &SHAPE);
}

fn split_rings_without_event_index(engine: &str) {
    over_all_disks(engine, &Shape { event_idx: false, ..SHAPE });
}

fn packed_rings(engine: &str) {
    over_all_disks(engine, &Shape { packed: true, ..SHAPE });
}

/// Short transfers, errors half-way, "again", and completions out of order.
fn faults(engine: &str) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    std::fs::File::create_new(&image).unwrap().set_len(IMAGE_SIZE).unwrap();
    let rules = "fault:seed=5,eio@5%,short@40%,eagain@5%,reorder@10%";
    let config = DaemonConfig {
        engine: Some(engine.to_owned()),
        ..DaemonConfig::new(format!("{rules}:{}", image.display()))
    };
    let daemon = Daemon::start(&config).unwrap();
    migrate(&daemon, IMAGE_SIZE, &SHAPE);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// A disk of nothing leaves the buffers of reads as they are, so they are not marked.
#[test]
fn what_is_not_written_is_not_marked() {
    let daemon = Daemon::start(&DaemonConfig::new("null:64M")).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::LINUX).unwrap();
    let bitmap = Bitmap::covering(&machine.ram).unwrap();
    machine.frontend.set_log(&bitmap).unwrap();
    machine.frontend.set_logging(true).unwrap();
    machine.read(0, 0, 64 << 10).unwrap();
    machine.write(0, 0, &[1; 4096]).unwrap();
    machine.stop().unwrap();
    // The status bytes, on a page each; the ring was not to be logged.
    assert_eq!(bitmap.harvest().len(), 2);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!((status.code(), log.iter().any(|line| line.contains(" WARN "))), (Some(0), false));
}

#[test]
fn the_log_descriptor_tells_of_news() {
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
        assert!(news.wait(Instant::now() + LIMIT).unwrap(), "nothing was signalled");
        machine.stop().unwrap();
        news.take();
        assert!(!bitmap.harvest().is_empty());
        machine.frontend.start(&machine.queues[0]).unwrap();
    }
    machine.read(0, 0, 4096).unwrap();
    assert!(news.wait(Instant::now() + LIMIT).unwrap());
    news.take();
    // It is all marked already, but for the ring, which is not to be logged.
    machine.read(0, 0, 4096).unwrap();
    machine.stop().unwrap();
    assert_eq!(news.take(), 0);
    drop(machine);
    served.end_untroubled().unwrap();
}

/// Each of these is refused, in words, and the log before it stays in force.
#[test]
fn logs_that_cannot_be() {
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
    assert!(!good.harvest().is_empty(), "the log before is not in force any more");
    drop(machine);
    served.serves_the_next().unwrap();
    served.end().unwrap();
}

/// Memory that a log has no bits for is refused while it is in force; with a larger log, or none, it comes.
#[test]
fn memory_grows_under_a_log() {
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
    // A read into it is marked.
    let (data, place) = (Gpa(more.region().guest_addr + PAGE), &machine.places[0]);
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
    // No ring runs: a log that does not cover memory any more is let go.
    frontend.remove(more.region()).unwrap();
    frontend.set_log(&bitmap).unwrap();
    frontend.add(&more).unwrap();
    bitmap.harvest();
    frontend.start(&machine.queues[0]).unwrap();
    machine.read(0, 0, 4096).unwrap();
    machine.stop().unwrap();
    assert!(bitmap.harvest().is_empty());
    drop(machine);
    served.serves_the_next().unwrap();
    served.end().unwrap();
}

/// Who cuts its log short would never hear of pages that are written: its rings break, until they are set up anew.
#[test]
fn a_log_that_is_cut_short() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let (cut, whole) = (Bitmap::covering(&machine.ram).unwrap(), Bitmap::covering(&machine.ram).unwrap());
    machine.write(0, 0, &[7; 4096]).unwrap();
    machine.frontend.set_log(&cut).unwrap();
    machine.frontend.set_logging(true).unwrap();
    cut.cut_short().unwrap();
    let seen = served.daemon.log().len();
    let buffers = machine.places[0].lay_out(&machine.ram, &Request::read(0, 4096), Layout::Usual).unwrap();
    machine.queues[0].submit(&machine.ram, &buffers, None).unwrap();
    machine.queues[0].flush();
    assert!(machine.queues[0].err().wait(Instant::now() + LIMIT).unwrap());
    let said = |line: &str| line.contains("the log of written pages").then_some(());
    served.daemon.log().wait_from(seen, "a damaged log", LIMIT, said).unwrap();
    // With another log.
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
    served.serves_the_next().unwrap();
    served.end().unwrap();
}

/// Where a ring's marks are to go has to be guest memory.
#[test]
fn rings_whose_log_address_cannot_be() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let addresses = kickless_tests::frontend::addresses(&machine.queues[0]);
    for log_guest_addr in [0, machine.ram.end(), u64::MAX] {
        let message = Message::SetVringAddr(VringAddr { log: true, log_guest_addr, ..addresses });
        assert_eq!(machine.frontend.attempt(&message).unwrap(), Answer::Refused, "{log_guest_addr:#x}");
    }
    machine.read(0, 0, 4096).unwrap();
    drop(machine);
    served.serves_the_next().unwrap();
    served.end().unwrap();
}
