//! Tests front-ends that truncate the file of their memory while the device uses it. Only their own device
//! may fail.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use kickless_memory::{Gpa, fault};
use kickless_tests::daemon::Daemon;
use kickless_tests::driver::Queue;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::machine::{DATA_LEN_MAX, Machine, RAM_BASE, Shape, write_and_verify};
use kickless_tests::guest::image_dir;
use kickless_tests::with_each_engine;

with_each_engine! {
    truncated_memory_breaks_only_its_device
}

const SHAPE: Shape = Shape { queues: 2, ..Shape::LINUX };
const PACKED: Shape = Shape { packed: true, ..SHAPE };

/// Returns the new end of the memory.
type NewEnd = fn(&Machine) -> Gpa;

/// Removes all memory; all but a page of the rings; only the memory of requests.
const NEW_ENDS: [NewEnd; 3] = [
    |_| Gpa(RAM_BASE),
    |_| Gpa(RAM_BASE + 4096),
    |machine| Gpa(machine.request_memory[0].data().0.min(machine.request_memory[1].data().0) - 4096),
];

/// Submits requests to both queues until `enough` of them have completed or the device signals an error.
/// Returns the number of completions.
fn load(machine: &mut Machine, enough: u64) -> u64 {
    let mut done = 0;
    let deadline = Instant::now() + LIMIT;
    while done < enough && !machine.queues.iter().any(|queue| queue.err().take() > 0) {
        assert!(Instant::now() < deadline, "no answer and no error after {done} requests");
        for (queue, place) in machine.queues.iter_mut().zip(&machine.request_memory) {
            let request = match done % 2 {
                0 => Request::write(8, &[7; 8192]),
                _ => Request::read(8, 8192),
            };
            // Without its memory, the driver cannot use this queue either.
            if queue.in_flight() < 8
                && let Ok(buffers) = place.lay_out(&machine.ram, &request, Layout::Usual)
            {
                let _ = queue.submit(&machine.ram, &buffers, None);
            }
            let _ = queue.publish();
            queue.kick();
            while let Ok(Some(_)) = queue.take_used() {
                done += 1;
            }
        }
        thread::yield_now();
    }
    done
}

fn truncated_memory_breaks_only_its_device(engine: &str) {
    fault::guard().unwrap();
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(16 << 20).unwrap();
    let file = format!("blk-file = '{}'\nnum-queues = 2\nlock = 'off'", image.display());
    let devices = [("file", file.as_str()), ("memory", "blk-file = 'mem:16M'\nnum-queues = 2")];
    for cut_device in ["file", "memory"] {
        // With one worker, the other device runs on the thread that had the fault.
        let mut daemon = Daemon::serve(&format!("workers = 1\nengine = '{engine}'"), &devices).unwrap();
        let holdings = daemon.holdings().unwrap();
        let spared = if cut_device == "file" { "memory" } else { "file" };
        let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        let socket = daemon.socket_of(spared);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let machine = &mut Machine::start(&socket, &SHAPE).unwrap();
                let (queue, place) = (&mut machine.queues[0], &machine.request_memory[0]);
                let enough = |done| {
                    rounds.store(done, Ordering::Relaxed);
                    over.load(Ordering::Relaxed)
                };
                write_and_verify(&machine.ram, queue, place, false, 64, enough).unwrap();
            });
            let _ends = SetOnDrop(&over);
            for shape in [SHAPE, PACKED] {
                for cut in NEW_ENDS {
                    truncate_and_restart(&daemon, cut_device, &shape, cut);
                    // The other device goes on.
                    let (before, deadline) = (rounds.load(Ordering::Relaxed), Instant::now() + LIMIT);
                    while rounds.load(Ordering::Relaxed) < before + 2 {
                        assert!(!other.is_finished() && Instant::now() < deadline, "{spared} stands still");
                        thread::yield_now();
                    }
                }
            }
        });
        daemon.returns_to(holdings).unwrap();
        assert!(daemon.is_running().unwrap());
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0), "{log:#?}");
        let said: Vec<_> = log.iter().filter(|line| line.contains(" ERROR ")).collect();
        let ours = |line: &&&String| {
            line.contains("is damaged: its file was truncated")
                && line.contains(&format!("device={cut_device}"))
        };
        assert_eq!(said.iter().filter(ours).count(), 2 * NEW_ENDS.len(), "one line each time: {said:#?}");
        assert_eq!(said.len(), 2 * NEW_ENDS.len(), "{said:#?}");
    }
}

/// Sets the flag when dropped, also if a test fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Truncates the memory of a machine, then starts the machine in new memory, first on the same connection
/// and then on another one.
fn truncate_and_restart(daemon: &Daemon, device: &str, shape: &Shape, cut: NewEnd) {
    let socket = daemon.socket_of(device);
    let mut machine = Machine::start(&socket, shape).unwrap();
    assert!(load(&mut machine, 200) >= 200);
    machine.ram.truncate(cut(&machine)).unwrap();
    load(&mut machine, u64::MAX);

    for queue in &mut machine.queues {
        machine.frontend.stop(queue).unwrap();
    }
    let mut ram = Ram::new(RAM_BASE, shape.memory).unwrap();
    machine.frontend.share(&[&ram]).unwrap();
    for index in 0..shape.queues {
        let queue = Queue::new(&mut ram, index, shape.size, machine.frontend.features()).unwrap();
        machine.frontend.start(&queue).unwrap();
        machine.queues[usize::from(index)] = queue;
        machine.request_memory[usize::from(index)] = RequestMemory::new(&mut ram, DATA_LEN_MAX).unwrap();
    }
    machine.ram = ram;
    serves(&mut machine);
    machine.stop().unwrap();
    drop(machine);
    serves(&mut Machine::start(&socket, shape).unwrap());
}

fn serves(machine: &mut Machine) {
    for index in 0..2 {
        machine.write(index, 16, &[index as u8 + 1; 4096]).unwrap();
        assert_eq!(machine.read(index, 16, 4096).unwrap(), [index as u8 + 1; 4096]);
    }
}
