//! Reads and writes by Linux AIO.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use crate::Waker;
use crate::files::Files;
use crate::kernel_aio::{BATCH, Context, Control, Event, PREAD, PREADV, PWRITE, PWRITEV, SIGNAL_EVENT};
use crate::op::{BYTES_MAX, OpKind, View};
use crate::slots::{InFlight, Slots};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A context and what is in it. The operations themselves are in the engine's slots, by whose places they are known here.
#[derive(Debug)]
pub(crate) struct Transfers {
    context: Context,
    /// Signalled with each completion.
    event: Waker,
    staged: VecDeque<u32>,
    in_flight: usize,
}

impl Transfers {
    /// A context for `depth` operations, whose completions make `epoll` readable.
    pub(crate) fn open(depth: usize, epoll: impl AsFd) -> io::Result<Self> {
        let event = Waker::new()?;
        let context = Context::open(depth)?;
        let transfers = Self { context, event, staged: VecDeque::with_capacity(depth), in_flight: 0 };
        epoll::add(epoll, transfers.event.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(transfers)
    }

    pub(crate) fn queue(&mut self, place: u32) {
        self.staged.push_back(place);
    }

    /// Whether operations wait that the kernel could not take.
    pub(crate) fn needs_turn(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Starts what is staged. Operations that the kernel refuses go to `refused` with its reason.
    pub(crate) fn submit(&mut self, slots: &mut Slots, files: &Files, mut refused: impl FnMut(u32, Errno)) {
        while !self.staged.is_empty() {
            let mut controls = [Control::default(); BATCH];
            let event_fd = self.event.as_fd().as_raw_fd();
            let count = self.staged.len().min(BATCH);
            for (control, &place) in controls.iter_mut().zip(&self.staged) {
                let Some(operation) = slots.get_mut(place) else {
                    debug_assert!(false, "a staged operation has its slot");
                    continue;
                };
                *control = Control { data: place.into(), event_fd, ..filled(operation, files) };
            }
            // SAFETY: the buffers and the file of each belong to its slot, which keeps them unchanged until the completion
            // has been reaped; a dropped engine waits for that or leaks them.
            match unsafe { self.context.submit(&mut controls[..count]) } {
                Ok(0) => return,
                Ok(taken) => {
                    self.staged.drain(..taken);
                    self.in_flight += taken;
                }
                // The error is that of the first, or there is no room yet.
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    if let Some(place) = self.staged.pop_front() {
                        refused(place, errno);
                    }
                }
            }
        }
    }

    /// Calls `done` for each operation that has completed. Waits for one at least if `wait`; the error of a wait that cannot
    /// be.
    pub(crate) fn reap(
        &mut self,
        wait: bool,
        mut done: impl FnMut(u32, Result<u32, Errno>),
    ) -> Result<(), Errno> {
        // Before the look at what has completed: what comes after it signals again. Also with nothing in flight: the kernel
        // signals after it has shown a completion, which may have been taken by then.
        self.event.clear();
        if self.in_flight == 0 {
            return Ok(());
        }
        let mut wait = wait;
        loop {
            let mut events = [Event::default(); BATCH];
            let count = match self.context.events(wait, &mut events) {
                Ok(count) => count,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            for event in events.iter().take(count) {
                self.in_flight = self.in_flight.saturating_sub(1);
                let result = match event.result {
                    bytes @ 0.. => Ok(bytes as u32),
                    errno => Err(Errno::from_raw_os_error(-errno as i32)),
                };
                done(event.data as u32, result);
            }
            if count < BATCH {
                return Ok(());
            }
            wait = false;
        }
    }

    /// Forgets what the kernel has not been told of, and returns the places.
    pub(crate) fn take_staged(&mut self) -> impl Iterator<Item = u32> + '_ {
        self.staged.drain(..)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// What to tell the kernel about an operation.
fn filled(operation: &mut InFlight, files: &Files) -> Control {
    // Without a file the kernel refuses it with EBADF.
    let fd = files.get(operation.held).map_or(-1, |(file, ..)| file.as_raw_fd());
    let write = matches!(operation.op.kind, OpKind::Write { .. });
    let durable = operation.op.kind == OpKind::Write { durable: true };
    let (opcode, buf, nbytes) = match (operation.op.buffers.view(operation.op.kind), write) {
        (View::One(at, len), write) => {
            (if write { PWRITE } else { PREAD }, at as u64, len.min(BYTES_MAX) as u64)
        }
        (View::Many(at, count), write) => (if write { PWRITEV } else { PREADV }, at as u64, count as u64),
    };
    let rw_flags = if durable { libc::RWF_DSYNC as u32 } else { 0 };
    let flags = SIGNAL_EVENT;
    Control { rw_flags, opcode, fd, buf, nbytes, offset: operation.op.offset, flags, ..Control::default() }
}
