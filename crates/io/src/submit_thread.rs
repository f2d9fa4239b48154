//! The thread beside a worker that makes the calls which submit: see [`handover`].

pub(crate) mod handover;

use crate::Waker;
use crate::submit_thread::handover::{Call, Desk, desk};
use std::fmt;
use std::io;
use std::ops::Deref;
use std::thread::{Builder, JoinHandle};

/// It makes system calls, and needs next to none.
const STACK_BYTES: usize = 128 << 10;

/// A desk with a thread at its other side.
pub(crate) struct SubmitThread<C: Call> {
    desk: Desk<C>,
    thread: Option<JoinHandle<()>>,
}

impl<C: Call> SubmitThread<C> {
    /// Starts the thread. It signals `waker` when a call has come back.
    pub(crate) fn start(waker: Waker) -> io::Result<Self> {
        let (desk, clerk) = desk(waker);
        let thread = Builder::new().name("submit".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || clerk.serve())?;
        Ok(Self { desk, thread: Some(thread) })
    }

    /// Waits for the call that it has been asked for, and for the end of the thread.
    pub(crate) fn finish(&mut self) -> Option<(C, C::Result)> {
        self.desk.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.desk.take()
    }
}

impl<C: Call> Deref for SubmitThread<C> {
    type Target = Desk<C>;

    fn deref(&self) -> &Desk<C> {
        &self.desk
    }
}

impl<C: Call> Drop for SubmitThread<C> {
    fn drop(&mut self) {
        self.finish();
    }
}

impl<C: Call> fmt::Debug for SubmitThread<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubmitThread").field("busy", &self.desk.is_busy()).finish_non_exhaustive()
    }
}
