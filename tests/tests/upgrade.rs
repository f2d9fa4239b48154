//! Upgrades a daemon under verified load: one process after another takes over. `UPGRADES` is the number of
//! upgrades for each kind of ring.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_driver::{Choice, Disk, Options, Request, Waiting};
use kickless_tests::daemon::{Daemon, check_log};
use kickless_tests::driver::request;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::image_dir;
use kickless_tests::hostile_backend::{LIMIT, returns_within};
use kickless_tests::qcow2::Qcow2Image;
use kickless_tests::remote_disks::nbd::{Kind, NbdServer};
use kickless_tests::verified_load::{BLOCK, drive_disk};

/// The upgrades of each kind of ring, unless `UPGRADES` says another number.
const UPGRADES: u32 = 3;
const QUEUES: u16 = 2;
/// The requests of a queue in flight.
const DEPTH: u64 = 24;
const DISK_LEN: u64 = QUEUES as u64 * DEPTH * BLOCK as u64;

/// The longest time of an upgrade on a busy machine.
const UPGRADE_LIMIT: Duration = Duration::from_secs(5);

/// The kinds of rings: packed and in order.
const KINDS: [(Choice, Choice); 4] = [
    (Choice::Off, Choice::Off),
    (Choice::On, Choice::Off),
    (Choice::Off, Choice::On),
    (Choice::On, Choice::On),
];

fn upgrades() -> u32 {
    std::env::var("UPGRADES").map_or(UPGRADES, |upgrades| upgrades.parse().unwrap())
}

/// Fails if a test hangs. The machine can be busy, and there can be many upgrades.
fn in_time(test: impl FnOnce() + Send + 'static) {
    returns_within(LIMIT + UPGRADE_LIMIT * upgrades() * KINDS.len() as u32, test);
}

/// Upgrades a daemon with this disk again and again, while a driver writes and reads.
fn upgrade_disk(disk: &str, pool: &str) {
    for (packed, in_order) in KINDS {
        let mut daemon = Daemon::serve_with(&["--control"], pool, &[("disk", disk)]).unwrap();
        let options = Options { queues: QUEUES, packed, in_order, ..Options::new(daemon.socket_of("disk")) };
        let requests = upgrade_under_load(&mut daemon, options, DEPTH);
        stop(daemon);
        println!("packed {packed:?}, in order {in_order:?}: {requests} requests");
    }
}

/// Upgrades a daemon while a driver with these options writes, reads and compares. Each of its queues has
/// `depth` requests in flight. Returns the number of requests.
fn upgrade_under_load(daemon: &mut Daemon, options: Options, depth: u64) -> u64 {
    // The connection is the one from the beginning.
    let disk = Disk::connect(Options { reconnect_limit: Duration::ZERO, ..options }).unwrap();
    let load = |is_over: &AtomicBool| {
        thread::scope(|scope| {
            let drive = |queue| {
                scope.spawn({
                    let queue = disk.queue(queue);
                    move || drive_disk(&queue, depth, is_over)
                })
            };
            let drivers: Vec<_> = (0..disk.queues()).map(drive).collect();
            drivers.into_iter().map(|driver| driver.join().unwrap()).sum()
        })
    };
    let requests = daemon.upgrade_under(upgrades(), load).unwrap();
    disk.flush().unwrap();
    requests
}

fn stop(daemon: Daemon) {
    let (status, log) = daemon.stop().unwrap();
    assert!(status.success(), "{status}");
    check_log(&log).unwrap();
}

#[test]
fn a_disk_in_memory_goes_on() {
    in_time(|| upgrade_disk(&format!("blk-file = \"mem:{DISK_LEN}\""), ""));
}

#[test]
fn a_disk_without_polling_goes_on() {
    in_time(|| upgrade_disk(&format!("blk-file = \"mem:{DISK_LEN}\""), "poll = \"never\""));
}

#[test]
fn a_file_goes_on() {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
    let disk = format!("blk-file = \"{}\"", image.display());
    for (disk, pool) in [
        (disk.clone(), ""),
        (disk.clone(), "engine = \"aio\""),
        (disk.clone(), "engine = \"threads\""),
        (format!("{disk}\ncache = \"writeback\""), ""),
    ] {
        in_time(move || upgrade_disk(&disk, pool));
    }
}

/// The writes go to an image, the first reads to the one under it. QEMU finds no mistake afterwards.
#[test]
fn an_image_over_another_goes_on() {
    in_time(|| {
        let image = Qcow2Image::empty().unwrap();
        image.img(&["create", "-q", "-f", "qcow2", "base", &DISK_LEN.to_string()]).unwrap();
        image.img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base", "disk"]).unwrap();
        let disk = format!("blk-file = \"qcow2:{}\"", image.path().display());
        upgrade_disk(&disk, "");
        let report = image.check().unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
    });
}

/// Servers of two kinds, at a unix socket and over TCP. They see one connection.
#[test]
fn a_disk_of_a_server_goes_on() {
    for kind in [Kind::Nbdkit, Kind::Qemu] {
        in_time(move || {
            let dir = image_dir().unwrap();
            let image = dir.path().join("disk.img");
            File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
            let server = NbdServer::start(kind, &image).unwrap();
            upgrade_disk(&format!("blk-file = \"{}\"", server.uri(10)), "");
        });
    }
}

/// A disk without content: each request completes once.
#[test]
fn a_null_disk_goes_on() {
    const IN_FLIGHT: usize = 128;
    in_time(|| {
        for (packed, in_order) in KINDS {
            let mut daemon =
                Daemon::serve_with(&["--control"], "", &[("disk", "blk-file = \"null:1G\"")]).unwrap();
            let options = Options {
                queues: 1,
                packed,
                in_order,
                reconnect_limit: Duration::ZERO,
                ..Options::new(daemon.socket_of("disk"))
            };
            let disk = Disk::connect(options).unwrap();
            let load = |is_over: &AtomicBool| {
                let queue = disk.queue(0);
                let read = |token| Request::read(0, disk.buffer(BLOCK).unwrap()).token(token);
                let mut batch: Vec<_> = (0..IN_FLIGHT as u64).map(read).collect();
                // The next token of each request in flight.
                let mut completed = vec![false; IN_FLIGHT];
                let mut in_flight = 0;
                loop {
                    in_flight += batch.len();
                    queue.submit_or_wait(&mut batch).unwrap();
                    if in_flight == 0 {
                        return completed.len();
                    }
                    let mut done = Vec::new();
                    in_flight -=
                        queue.wait(usize::MAX, Some(LIMIT), |completion| done.push(completion)).unwrap();
                    assert!(!done.is_empty(), "no request completes");
                    for completion in done {
                        completion.result.unwrap();
                        let is_new = !std::mem::replace(&mut completed[completion.token as usize], true);
                        assert!(is_new, "request {} completes twice", completion.token);
                        if !is_over.load(Ordering::Relaxed) {
                            batch.push(read(completed.len() as u64));
                            completed.push(false);
                        }
                    }
                }
            };
            let requests = daemon.upgrade_under(upgrades(), load).unwrap();
            println!("packed {packed:?}, in order {in_order:?}: {requests} requests");
            stop(daemon);
        }
    });
}

/// Drivers that never sleep, with a pool that always polls, and 128 requests in flight.
#[test]
fn drivers_that_poll_go_on() {
    const IN_FLIGHT: u64 = 128;
    in_time(|| {
        let len = u64::from(QUEUES) * IN_FLIGHT * BLOCK as u64;
        let disk = format!("blk-file = \"mem:{len}\"");
        for pool in ["poll = \"always\"", ""] {
            let mut daemon = Daemon::serve_with(&["--control"], pool, &[("disk", &disk)]).unwrap();
            // Full rings: a request takes one descriptor of them.
            let options = Options {
                queues: QUEUES,
                queue_size: IN_FLIGHT as u16,
                indirect: Choice::On,
                waiting: Waiting::Spin(Duration::MAX),
                ..Options::new(daemon.socket_of("disk"))
            };
            upgrade_under_load(&mut daemon, options, IN_FLIGHT);
            stop(daemon);
        }
    });
}

/// The debt of a limit passes: after several upgrades, the driver has done no more than the rate allows, and
/// one burst at the beginning.
#[test]
fn a_limit_is_kept() {
    const RATE: f64 = 2000.0;
    const BURST: f64 = RATE / 10.0;
    in_time(|| {
        let disk = format!("blk-file = \"mem:{DISK_LEN}\"\niops = {RATE}");
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("disk", &disk)]).unwrap();
        let options = Options { queues: 1, ..Options::new(daemon.socket_of("disk")) };
        let begun = Instant::now();
        let requests = upgrade_under_load(&mut daemon, options, DEPTH) as f64;
        let seconds = begun.elapsed().as_secs_f64();
        let allowed = RATE.mul_add(seconds, BURST);
        println!("{requests} requests in {seconds:.2} s, {:+.2} %", 100.0 * (requests / allowed - 1.0));
        // The drivers of a busy machine can be slower, and never faster.
        assert!(requests <= 1.02 * allowed, "{requests} of {allowed}");
        stop(daemon);
    });
}

/// A ring that its front-end has disabled stays so, and works when it is enabled.
#[test]
fn a_disabled_ring_stays_disabled() {
    for packed in [false, true] {
        let disk = format!("blk-file = \"mem:{DISK_LEN}\"");
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("disk", &disk)]).unwrap();
        let shape = Shape { packed, queues: 1, ..Shape::default() };
        let mut machine = Machine::start(&daemon.socket_of("disk"), &shape).unwrap();
        machine.write(0, 0, &[1; 512]).unwrap();
        machine.frontend.enable(&machine.queues[0], false).unwrap();
        let request = request::Request::read(0, 512);
        machine.submit(0, &request).unwrap();
        for _ in 0..upgrades() {
            check_log(&daemon.upgrade().unwrap()).unwrap();
        }
        thread::sleep(Duration::from_millis(50));
        assert_eq!(machine.queues[0].used_ready(), 0, "a disabled ring is served");
        machine.frontend.enable(&machine.queues[0], true).unwrap();
        let outcome = machine.outcome(0, &request).unwrap();
        assert_eq!(outcome.data, [1; 512]);
        drop(machine);
        stop(daemon);
    }
}

/// Front-ends come and go between upgrades, and right after each. The disk keeps its content.
#[test]
fn front_ends_connect_again_right_after() {
    in_time(|| {
        let disk = format!("blk-file = \"mem:{DISK_LEN}\"");
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("disk", &disk)]).unwrap();
        let connect = |daemon: &Daemon| Disk::connect(Options::new(daemon.socket_of("disk"))).unwrap();
        let mut disk = connect(&daemon);
        for round in 0..2 * upgrades() as u8 {
            disk.write_at(&[round; BLOCK], 0).unwrap();
            if round % 2 == 0 {
                // No front-end is connected at this upgrade.
                disk.close();
            }
            check_log(&daemon.upgrade().unwrap()).unwrap();
            disk.close();
            disk = connect(&daemon);
            let mut found = [0; BLOCK];
            disk.read_at(&mut found, 0).unwrap();
            assert!(found == [round; BLOCK], "round {round}");
        }
        disk.close();
        stop(daemon);
    });
}
