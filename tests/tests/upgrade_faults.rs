//! Kills, stops and fails each process of an upgrade at each of its steps, under verified load. Afterwards
//! one process serves, or none, and a restart goes on as after a crash. `UPGRADE_FAULTS=all` tries all faults
//! at all steps.
//!
//! Another program that asks for the image's lock never gets it, as long as one of the two processes lives.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::process::Child;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_disk::lock::check;
use kickless_driver::{Choice, Disk, Options};
use kickless_tests::daemon::{Daemon, Process, is_stopped, wait_for_exit};
use kickless_tests::guest::image_dir;
use kickless_tests::qcow2::qemu_img;
use kickless_tests::verified_load::{BLOCK, drive_disk};
use rustix::process::{Pid, Signal, kill_process};

const DEPTH: u64 = 8;
const DISK_LEN: u64 = DEPTH * BLOCK as u64;
/// Cases at the same time.
const AT_ONCE: usize = 6;
const LIMIT: Duration = Duration::from_secs(40);
/// The time for which a process is stopped.
const STOP: Duration = Duration::from_secs(3);
/// The time in which the load makes some requests.
const A_WHILE: Duration = Duration::from_millis(60);

/// The steps that each process comes to, also if no device changes between its two records.
const OLD_STEPS: &[u32] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12];
const NEW_STEPS: &[u32] = &[1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    end: &'static str,
    step: u32,
    fault: &'static str,
}

/// The processes that live after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Old,
    New,
    Neither,
    /// One of the two.
    One,
}

impl Case {
    fn is_of_old(self) -> bool {
        self.end == "old"
    }

    fn outcome(self) -> Outcome {
        match (self.end, self.step, self.fault) {
            (_, _, "stop") => Outcome::One,
            // The new process has taken over, and the old one ends by itself.
            ("old", 12, _) | ("new", 11 | 12, "error") => Outcome::New,
            ("old", _, "error") => Outcome::Old,
            ("old", ..) | ("new", 11 | 12, _) => Outcome::Neither,
            _ => Outcome::Old,
        }
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
}

/// Returns the numbers of descriptors and of threads, without those that the engine keeps for the next call.
fn descriptors_and_threads(pid: u32) -> (usize, usize) {
    let of_process = |of| fs::read_dir(format!("/proc/{pid}/{of}")).into_iter().flatten().flatten();
    let is_of_engine = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("io-"))
    };
    (of_process("fd").count(), of_process("task").filter(|task| !is_of_engine(task)).count())
}

/// Waits until something holds. Returns whether it does.
fn in_time(mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Waits until one of the processes has ended. Returns whether the old one has, and the new one has.
fn ended(daemon: &mut Daemon, new: &mut Process) -> (bool, bool) {
    let mut ended = (false, false);
    in_time(|| {
        ended = (!daemon.is_running().unwrap(), new.child.try_wait().unwrap().is_some());
        ended != (false, false)
    });
    ended
}

/// Fails an upgrade in this way. The disk is a raw or a qcow2 image, and its rings are split or packed.
fn run(case: Case) {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.img");
    let is_qcow2 = case.step % 2 == 1;
    if is_qcow2 {
        qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "disk.img", "1M"]).unwrap();
    } else {
        File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
    }
    let disk = format!("blk-file = \"{}{}\"", if is_qcow2 { "qcow2:" } else { "" }, image.display());
    let fault = format!("KICKLESS_UPGRADE_FAULT={}:{}:{}", case.end, case.step, case.fault);
    let (of_old, of_new) =
        if case.is_of_old() { (&[&*fault][..], &[][..]) } else { (&[][..], &[&*fault][..]) };
    let devices = [("disk", &*disk), ("idle", "blk-file = \"mem:1M\"")];
    let mut daemon = Daemon::serve_in(of_old, &["--control"], "workers = 1", &devices).unwrap();
    let packed = if case.step % 4 < 2 { Choice::On } else { Choice::Off };
    let options = Options { queues: 1, packed, ..Options::new(daemon.socket_of("disk")) };
    let driver = Disk::connect(options).unwrap();
    let (is_over, was_free) = (AtomicBool::new(false), AtomicU64::new(0));
    let queue = driver.queue(0);
    let outside = File::options().read(true).write(true).open(&image).unwrap();
    let outcome = thread::scope(|scope| {
        let load = scope.spawn(|| drive_disk(&queue, DEPTH, &is_over));
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let is_free = check(&outside, false).is_ok();
                was_free.fetch_add(is_free.into(), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            thread::sleep(A_WHILE);
            let outcome = fail(&mut daemon, case, of_new);
            thread::sleep(A_WHILE);
            outcome
        }));
        is_over.store(true, Ordering::Relaxed);
        let requests = load.join().unwrap();
        assert!(requests > 0);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    driver.flush().unwrap();
    drop((queue, driver));
    let was_free = was_free.into_inner();
    assert!(outcome == Outcome::Neither || was_free == 0, "{case:?}: the image was free {was_free} times");
    let (status, _) = daemon.stop().unwrap();
    assert!(status.success(), "{case:?}: {status}");
}

/// Begins an upgrade that fails. Returns when a process serves again.
fn fail(daemon: &mut Daemon, case: Case, of_new: &[&str]) -> Outcome {
    let before = descriptors_and_threads(daemon.pid());
    let mut new = daemon.begin_upgrade(of_new, &[]).unwrap();
    if case.fault == "stop" {
        let stops = if case.is_of_old() { daemon.pid() } else { new.child.id() };
        assert!(in_time(|| is_stopped(stops)), "{case:?}: no fault: {:?}", new.log.lines());
        thread::sleep(STOP);
        match case.is_of_old() {
            true => daemon.signal(Signal::CONT).unwrap(),
            false => signal(&new.child, Signal::CONT),
        }
    }
    let mut ended = ended(daemon, &mut new);
    if case.outcome() == Outcome::Neither {
        // The other one finds the end of the first, or ends by itself.
        let _ = wait_for_exit(&mut new.child, LIMIT);
        assert!(in_time(|| !daemon.is_running().unwrap()), "{case:?}");
        ended = (true, true);
    }
    let (old_log, new_log) = (daemon.log().clone(), new.log.clone());
    let said =
        || format!("{case:?}:\n{}\n--- new\n{}", old_log.lines().join("\n"), new_log.lines().join("\n"));
    let outcome = match ended {
        (false, false) => panic!("neither ends: {}", said()),
        (true, true) => Outcome::Neither,
        (true, false) => Outcome::New,
        (false, true) => Outcome::Old,
    };
    let of_end = if case.is_of_old() { &old_log } else { &new_log };
    assert!(in_time(|| !of_end.grep("fault: ").is_empty()), "no fault, {}", said());
    let expected = case.outcome();
    assert!(
        expected == outcome || expected == Outcome::One && outcome != Outcome::Neither,
        "{outcome:?}, {}",
        said()
    );
    match outcome {
        Outcome::Old => {
            let status = new.child.wait().unwrap();
            assert!(matches!(status.code(), Some(1) | None), "{status}, {}", said());
            let is_as_before = || {
                let now = descriptors_and_threads(daemon.pid());
                now.0 <= before.0 && now.1 <= before.1
            };
            assert!(
                in_time(is_as_before),
                "{before:?} before, {:?} now: {}",
                descriptors_and_threads(daemon.pid()),
                said()
            );
            thread::sleep(A_WHILE);
            // The next upgrade succeeds.
            daemon.upgrade().unwrap_or_else(|error| panic!("{error:#}, {}", said()));
        }
        Outcome::New => drop(daemon.becomes(new).child.wait().unwrap()),
        _ => drop(daemon.restart().unwrap_or_else(|error| panic!("{error:#}, {}", said()))),
    }
    outcome
}

#[test]
fn one_process_serves_after_each_fault() {
    let all = std::env::var("UPGRADE_FAULTS").is_ok_and(|faults| faults == "all");
    let of = |end, steps: &'static [u32]| steps.iter().map(move |step| (end, *step));
    let mut cases = Vec::new();
    for (at, (end, step)) in of("old", OLD_STEPS).chain(of("new", NEW_STEPS)).enumerate() {
        for (number, fault) in ["kill", "stop", "exit", "error"].into_iter().enumerate() {
            let is_chosen = fault == "kill" || at % 3 + 1 == number;
            if all || is_chosen {
                cases.push(Case { end, step, fault });
            }
        }
    }
    let (left, failed) = (Mutex::new(cases.clone()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(case) = left.lock().unwrap().pop() else { return };
                    if thread::spawn(move || run(case)).join().is_err() {
                        failed.lock().unwrap().push(case);
                    }
                }
            });
        }
    });
    println!("{} faults", cases.len());
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{failed:?}");
}
