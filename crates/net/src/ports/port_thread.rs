//! A thread of a port.

use kickless_io::Waker;
use kickless_sync::{Mutex, lock};
use std::io;
use std::thread::{self, JoinHandle};

/// A thread of a port, which runs from [`PortThread::start`] to [`PortThread::end`]. Locked while it starts
/// or ends, so that a port has one at a time.
#[derive(Debug, Default)]
pub(crate) struct PortThread(Mutex<Option<(Waker, JoinHandle<()>)>>);

impl PortThread {
    /// Starts the thread, unless it runs. `make` returns its work, which ends soon after the waker was woken.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot have another thread, or `make` has failed.
    pub(crate) fn start<W: FnOnce() + Send + 'static>(
        &self,
        name: &str,
        make: impl FnOnce(Waker) -> io::Result<W>,
    ) -> io::Result<()> {
        let mut running = lock(&self.0);
        if running.is_none() {
            let stop = Waker::new()?;
            let work = make(stop.clone())?;
            *running = Some((stop, thread::Builder::new().name(name.into()).spawn(work)?));
        }
        Ok(())
    }

    /// Ends the thread and waits for it.
    pub(crate) fn end(&self) {
        if let Some((stop, thread)) = lock(&self.0).take() {
            stop.wake();
            // The thread does not panic. If it did, it would have ended as well.
            let _ = thread.join();
        }
    }
}
