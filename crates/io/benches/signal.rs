//! Measures what it takes to signal an eventfd in three ways: by a write, which could wait; by the kernel at
//! the end of an AIO read, as [`kickless_io::signal`] does; and by a ring of io_uring that has the eventfd
//! registered, one for each eventfd, and an operation that does nothing.
//!
//! The eventfds take turns, as the queues of a worker do.
//!
//!     cargo bench -p kickless-io --bench signal [-- --quick]
#![allow(clippy::unwrap_used, reason = "a benchmark")]
#![expect(unsafe_code, reason = "an operation is put into a ring")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use io_uring::{IoUring, opcode};
use kickless_io::{prepare_to_signal, signal};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::write;

/// Numbers of eventfds.
const COUNTS: [usize; 4] = [1, 8, 64, 512];
/// Signals of a turn: some 10 ms.
const SIGNALS: usize = 20_000;
/// The fastest turn of each way is reported, because a turn is shorter than the time slice of other programs.
const TURNS: usize = 101;

/// An eventfd, and a ring in which it is registered.
struct Target {
    eventfd: OwnedFd,
    ring: IoUring,
}

impl Target {
    fn new() -> Self {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let ring = IoUring::new(1).unwrap();
        ring.submitter().register_eventfd(eventfd.as_raw_fd()).unwrap();
        Self { eventfd, ring }
    }

    fn write(&mut self) {
        write(&self.eventfd, &1u64.to_ne_bytes()).unwrap();
    }

    fn signal(&mut self) {
        assert!(signal(&self.eventfd));
    }

    fn submit(&mut self) {
        // SAFETY: the operation uses no memory.
        unsafe { self.ring.submission().push(&opcode::Nop::new().build()) }.unwrap();
        assert_eq!(self.ring.submit().unwrap(), 1);
        assert_eq!(self.ring.completion().count(), 1);
    }
}

/// A way to signal.
type Way = fn(&mut Target);

const WAYS: [(&str, Way); 3] =
    [("write", Target::write), ("AIO", Target::signal), ("io_uring", Target::submit)];

/// Returns the nanoseconds of one signal.
fn turn(targets: &mut [Target], way: Way, signals: usize) -> f64 {
    let begin = Instant::now();
    for number in 0..signals {
        way(&mut targets[number % targets.len()]);
    }
    begin.elapsed().as_nanos() as f64 / signals as f64
}

fn main() {
    let is_quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let (signals, turns) = if is_quick { (1000, 1) } else { (SIGNALS, TURNS) };
    prepare_to_signal();
    println!("nanoseconds of a signal, the fastest of {turns} turns, and their median\n");
    println!("{:>8}  {:>12}  {:>12}  {:>12}", "eventfds", WAYS[0].0, WAYS[1].0, WAYS[2].0);
    for count in COUNTS {
        let mut targets: Vec<Target> = std::iter::repeat_with(Target::new).take(count).collect();
        let mut took = [const { Vec::new() }; WAYS.len()];
        for _ in 0..turns {
            for ((_, way), took) in WAYS.into_iter().zip(&mut took) {
                took.push(turn(&mut targets, way, signals));
            }
        }
        let columns = took.each_mut().map(|took| {
            took.sort_by(f64::total_cmp);
            format!("{:.0} ({:.0})", took[0], took[took.len() / 2])
        });
        println!("{count:>8}  {:>12}  {:>12}  {:>12}", columns[0], columns[1], columns[2]);
    }
}
