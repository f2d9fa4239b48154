//! A TAP, with all that the rings of a card share there.

use crate::ports::hand_over::Gate;
use kickless_net_port::Tap;
use kickless_sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::{fmt, io};
use tracing::{Span, error, warn};

/// A TAP, and what makes it follow the rings.
///
/// Calls that attach queues or set offloads take a lock of the kernel's network configuration. A worker never
/// makes them: a thread of the card does, after the rings have changed what it looks at
/// (`follower.rs`).
#[derive(Debug)]
pub(crate) struct TapState {
    pub(crate) tap: Tap,
    follower: Mutex<Follower>,
    changed: Condvar,
    /// Keeps the thread from setting the TAP while another process may take it over.
    pub(crate) gate: Gate,
    is_gone: AtomicBool,
    has_failed: AtomicBool,
    /// The span of log lines about the card.
    span: Span,
}

/// The reason for which the thread looks at the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// They have changed.
    Rings,
    /// The thread ends.
    End,
}

#[derive(Debug, Default)]
struct Follower {
    /// The rings have changed since the thread last looked.
    is_due: bool,
    is_ending: bool,
    thread: Option<JoinHandle<()>>,
}

impl TapState {
    pub(crate) fn new(tap: Tap) -> Self {
        Self {
            tap,
            follower: Mutex::default(),
            changed: Condvar::new(),
            gate: Gate::default(),
            is_gone: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            span: Span::current(),
        }
    }

    /// Makes the TAP follow the rings, which have changed. Does not wait for it.
    pub(crate) fn changed(&self) {
        lock(&self.follower).is_due = true;
        self.changed.notify_one();
    }

    /// Starts the thread that makes the TAP follow the rings of the card, unless it runs.
    ///
    /// # Errors
    /// The process cannot have another thread.
    pub(crate) fn start_thread(&self, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut follower = lock(&self.follower);
        if follower.thread.is_none() {
            follower.is_ending = false;
            follower.thread = Some(thread::Builder::new().name("tap".into()).spawn(run)?);
        }
        Ok(())
    }

    /// Waits until the rings have changed, or the thread is to end after a last look at them.
    pub(crate) fn wait_for_change(&self) -> Change {
        let mut follower = lock(&self.follower);
        while !follower.is_due && !follower.is_ending {
            follower = self.changed.wait(follower).unwrap_or_else(PoisonError::into_inner);
        }
        follower.is_due = false;
        if follower.is_ending { Change::End } else { Change::Rings }
    }

    /// Ends the thread. No ring runs any more, so the TAP has no offloads and no attached queue afterwards.
    pub(crate) fn end(&self) {
        let mut follower = lock(&self.follower);
        let Some(thread) = follower.thread.take() else { return };
        follower.is_ending = true;
        drop(follower);
        self.changed.notify_one();
        self.gate.open();
        // The thread does not panic. If it did, the TAP would keep its settings.
        let _ = thread.join();
    }

    /// Logs that the TAP is gone, once. The card goes on without it.
    pub(crate) fn report_gone(&self) {
        if !self.is_gone.swap(true, Ordering::Relaxed) {
            let name = self.tap.name();
            error!(parent: &self.span, tap = name, "the TAP was deleted: the card has no network until the TAP is made again, \
                and the device is removed and added");
        }
    }

    /// Returns whether a ring has found that the TAP is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Logs the first read that has failed.
    pub(crate) fn report_failed_read(&self, error: &dyn fmt::Display) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            warn!(parent: &self.span, tap = self.tap.name(), %error, "a frame of the TAP could not be read; further ones are counted as dropped_unread");
        }
    }
}
