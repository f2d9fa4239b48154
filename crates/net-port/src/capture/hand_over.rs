//! Passes the file of a capture to the next process of this host, at the end of its last block.
//!
//! The thread of the capture ends before, because one process writes at a time. Frames that come meanwhile
//! are dropped and counted, and the next process goes on with that count.

use super::error::CaptureError;
use super::file::CaptureFile;
use super::{Buffer, Capture, END_WAIT_MAX, Session, Suspended, Wish, Writer};
use kickless_handover::{Given, Giving, v1};
use kickless_sync::lock;
use std::io;
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::Span;

/// The largest count that is believed. Sums of it and of what this process counts cannot overflow.
const COUNT_MAX: u64 = u64::MAX / 4;

impl Capture {
    /// Suspends the capture, if it is on. Waits for up to two seconds until its frames are in the file. Later
    /// frames are dropped and counted.
    ///
    /// # Errors
    /// The file is not complete yet.
    pub fn suspend(&self) -> Result<(), CaptureError> {
        let mut session = lock(&self.0.session);
        if let Some(session) = session.as_mut().filter(|session| session.wish == Wish::Write) {
            session.wish = Wish::Suspend;
        }
        self.0.changed.notify_all();
        let is_writing = |session: &mut Option<Session>| {
            session.as_ref().is_some_and(|session| session.suspended.is_none())
        };
        let waited = self.0.changed.wait_timeout_while(session, END_WAIT_MAX, is_writing);
        let (mut session, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if is_writing(&mut session) { Err(CaptureError::Unfinished) } else { Ok(()) }
    }

    /// Writes the file again, if the capture is suspended.
    ///
    /// # Errors
    /// The process cannot have another thread. The capture is off then.
    pub fn resume(&self) -> Result<(), CaptureError> {
        let mut guard = lock(&self.0.session);
        let Some(session) = guard.as_mut().filter(|session| session.wish == Wish::Suspend) else {
            return Ok(());
        };
        session.wish = Wish::Write;
        // Without this, the thread is still there, and goes on.
        let Some(mut suspended) = session.suspended.take() else { return Ok(()) };
        suspended.file.own_lock();
        let spawned = Writer { shared: self.0.clone(), state: suspended }.spawn();
        if spawned.is_err() {
            *guard = None;
            self.0.is_on.store(false, Ordering::Relaxed);
        }
        spawned
    }

    /// Returns the file for the next process, with a duplicate of its descriptor. `None` unless the capture
    /// is suspended.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn give(&self, to: &mut Giving) -> io::Result<Option<v1::Capture>> {
        let session = lock(&self.0.session);
        let suspended = session.as_ref().and_then(|session| session.suspended.as_ref());
        let Some(Suspended { file, start, taken, lost, .. }) = suspended else { return Ok(None) };
        // Lossless until the year 2554.
        let counts = [("start_ns", start.as_nanos() as u64), ("taken", *taken), ("lost", *lost)];
        Ok(Some(v1::Capture {
            file: to.fd(file.file())?,
            statistics_at: file.statistics_at,
            end: file.end,
            counts: counts.map(|(name, count)| (name.to_owned(), count)).into(),
        }))
    }

    /// Returns the number of frames that had no room, or came while the capture was suspended.
    pub fn dropped(&self) -> u64 {
        lock(&self.0.session).as_ref().map_or(0, |session| session.dropped)
    }

    /// Takes note of the frames that the other process had dropped at last.
    pub fn set_dropped(&self, dropped: u64) {
        if let Some(session) = &mut *lock(&self.0.session) {
            session.dropped = dropped.min(COUNT_MAX);
        }
    }

    /// Takes a file over that another process has given. The capture is suspended. It writes nothing before
    /// [`Capture::resume`], and leaves the lock of the file alone until then.
    ///
    /// # Errors
    /// The descriptor is no file that a capture can write.
    pub fn take_over(
        &self,
        path: &Path,
        len_max: u32,
        given: &v1::Capture,
        from: &mut Given,
    ) -> Result<(), CaptureError> {
        let file = from.fd(given.file).map_err(CaptureError::Given)?;
        let file = CaptureFile::taken_over(file, path, given.statistics_at, given.end)?;
        let count = |name| given.counts.get(name).copied().unwrap_or_default().min(COUNT_MAX);
        let (taken, lost, start) = (count("taken"), count("lost"), Duration::from_nanos(count("start_ns")));
        let (path, span) = (path.to_owned(), Span::current());
        let suspended = Some(Suspended { file, start, path, span, taken, lost });
        let (len_max, buffer, wish) = (len_max as usize, Buffer::new(), Wish::Suspend);
        *lock(&self.0.session) = Some(Session { len_max, buffer, dropped: 0, wish, suspended });
        self.0.is_on.store(true, Ordering::Relaxed);
        Ok(())
    }
}
