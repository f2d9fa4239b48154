//! Writes the frames of a card to a pcapng file.
//!
//! Tasks copy frames into a bounded buffer under a lock, and a thread of the capture writes the buffer to the
//! file. The thread holds the lock only to take the buffer in exchange for an empty one. So a slow file costs
//! frames, which are counted, and never delays a task. While no file is written, a task reads one flag.

mod error;
mod file;
mod hand_over;
mod pcapng;

pub use error::CaptureError;
use file::CaptureFile;
use kickless_sync::lock;
pub use pcapng::Direction;
use pcapng::{Packet, Statistics};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{mem, thread};
use tracing::{Span, warn};

/// The size of a buffer. It holds what a card carries in the time of [`LINGER`] at 3 Gbit/s. A capture has
/// two.
const BUFFER: usize = 4 << 20;
/// The time for which the thread collects frames before it writes them, unless the buffer is half full. So
/// few frames wake it.
const LINGER: Duration = Duration::from_millis(10);
/// The time that a caller waits for the end of a capture. A file on a server may never answer.
const END_WAIT_MAX: Duration = Duration::from_secs(2);

/// The capture of a card's frames, which is on or off.
#[derive(Debug, Default)]
pub struct Capture(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Whether frames are wanted. Relaxed: the lock orders everything else.
    is_on: AtomicBool,
    session: Mutex<Option<Session>>,
    changed: Condvar,
}

/// The state of one file. It is there until the thread has closed the file.
#[derive(Debug)]
struct Session {
    len_max: usize,
    buffer: Buffer,
    dropped: u64,
    wish: Wish,
    /// The file, while no thread has it.
    suspended: Option<Suspended>,
}

/// The state that a caller wishes a file to be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// The thread writes it.
    Write,
    /// It is complete, and stays open.
    Suspend,
    /// It is complete and closed.
    End,
}

/// The file of a capture that no thread writes now, with its counts.
#[derive(Debug)]
struct Suspended {
    file: CaptureFile,
    start: Duration,
    path: PathBuf,
    span: Span,
    /// Frames that were taken out of the buffer, and those of them that could not be written.
    taken: u64,
    lost: u64,
}

/// Frames that are not written yet, as whole blocks.
#[derive(Debug)]
struct Buffer {
    blocks: Vec<u8>,
    frames: u64,
}

impl Buffer {
    fn new() -> Self {
        Self { blocks: Vec::with_capacity(BUFFER), frames: 0 }
    }
}

impl Capture {
    /// Writes at most `len_max` bytes of each frame to a file from now on, as those of an interface with this
    /// name. Ends an earlier file. Waits for the files.
    ///
    /// # Errors
    /// The file cannot be created, or the earlier one does not end in time. The capture is off then.
    pub fn begin(&self, path: &Path, interface: &str, len_max: u32) -> Result<(), CaptureError> {
        self.end()?;
        let start = now();
        let file = CaptureFile::create(
            path,
            interface,
            len_max,
            &Statistics { start, now: start, ..Default::default() },
        )?;
        let mut session = lock(&self.0.session);
        if session.is_some() {
            return Err(CaptureError::Busy);
        }
        let (path, span) = (path.into(), Span::current());
        let state = Suspended { file, start, path, span, taken: 0, lost: 0 };
        // The thread waits for the lock.
        Writer { shared: self.0.clone(), state }.spawn()?;
        let (len_max, buffer) = (len_max as usize, Buffer::new());
        *session = Some(Session { len_max, buffer, dropped: 0, wish: Wish::Write, suspended: None });
        self.0.is_on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the capture, if it is on. Waits for up to two seconds until the file is complete.
    ///
    /// # Errors
    /// The file is not complete yet. Its last frames are written when the host does so.
    pub fn end(&self) -> Result<(), CaptureError> {
        self.0.is_on.store(false, Ordering::Relaxed);
        let mut session = lock(&self.0.session);
        if let Some(present) = &mut *session {
            present.wish = Wish::End;
            if present.suspended.is_some() {
                *session = None;
            }
        }
        self.0.changed.notify_all();
        let waited = self.0.changed.wait_timeout_while(session, END_WAIT_MAX, |session| session.is_some());
        let (session, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if session.is_some() { Err(CaptureError::Busy) } else { Ok(()) }
    }

    /// Returns whether frames are wanted.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Adds frames of one direction of a pair of rings, if the capture is on. `frames` has the length of each
    /// frame, and a function that copies its first bytes. Frames without room are dropped and counted. Does
    /// not wait for the file.
    #[cold]
    pub fn add<R: FnOnce(&mut [u8])>(
        &self,
        direction: Direction,
        pair: u16,
        frames: impl IntoIterator<Item = (usize, R)>,
    ) {
        let time = now();
        let mut guard = lock(&self.0.session);
        let Some(session) = guard.as_mut().filter(|session| session.wish != Wish::End) else { return };
        if session.wish == Wish::Suspend {
            session.dropped += frames.into_iter().count() as u64;
            return;
        }
        let before = session.buffer.blocks.len();
        for (len, read) in frames {
            let captured = len.min(session.len_max);
            let blocks = &mut session.buffer.blocks;
            if blocks.len() + pcapng::packet_len(captured) > BUFFER {
                session.dropped += 1;
                continue;
            }
            Packet { time, direction, pair, len, captured }.push(blocks, read);
            session.buffer.frames += 1;
        }
        let after = session.buffer.blocks.len();
        drop(guard);
        // The thread waits for the first frame, and after that for a half of a buffer.
        let passes = |len: usize| before <= len && after > len;
        if passes(0) || passes(BUFFER / 2) {
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // A thread that does not end in time writes what it has, and then closes the file.
        let _ = self.end();
    }
}

/// The thread of a capture.
struct Writer {
    shared: Arc<Shared>,
    state: Suspended,
}

impl Writer {
    /// Starts the thread.
    fn spawn(self) -> Result<(), CaptureError> {
        let thread = thread::Builder::new().name("capture".into());
        thread.spawn(move || self.run()).map(drop).map_err(CaptureError::Thread)
    }

    fn run(mut self) {
        let (mut buffer, mut has_failed) = (Buffer::new(), false);
        loop {
            let (wish, without_room) = self.take(&mut buffer);
            let Suspended { file, start, path, span, taken, lost } = &mut self.state;
            *taken += buffer.frames;
            let mut written = file.append(&buffer.blocks);
            if written.is_err() {
                *lost += buffer.frames;
            }
            let (received, dropped) = (*taken + without_room, *lost + without_room);
            let statistics = Statistics { start: *start, now: now(), received, dropped };
            written = written.and(file.set_statistics(&statistics));
            if let Err(error) = written
                && !mem::replace(&mut has_failed, true)
            {
                warn!(parent: &*span, path = %path.display(), %error, "the capture file cannot be written: \
                    frames are missing there until it can");
            }
            buffer.blocks.clear();
            buffer.frames = 0;
            match wish {
                Wish::Write => {}
                Wish::End => break,
                Wish::Suspend => {
                    let mut session = lock(&self.shared.session);
                    // A later wish is for the thread.
                    if let Some(session) = session.as_mut().filter(|session| session.wish == wish) {
                        session.suspended = Some(self.state);
                        self.shared.changed.notify_all();
                        return;
                    }
                }
            }
        }
        drop(self.state);
        *lock(&self.shared.session) = None;
        self.shared.changed.notify_all();
    }

    /// Waits for frames and takes them. Returns the wish of the caller, and the number of frames that had no
    /// room.
    fn take(&self, buffer: &mut Buffer) -> (Wish, u64) {
        let changed = &self.shared.changed;
        let is_over = |session: &mut Option<Session>| {
            session.as_ref().is_none_or(|session| session.wish != Wish::Write)
        };
        let session = lock(&self.shared.session);
        let waited = changed.wait_while(session, |session| {
            !is_over(session) && session.as_ref().is_some_and(|session| session.buffer.blocks.is_empty())
        });
        let session = waited.unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_timeout_while(session, LINGER, |session| {
            !is_over(session)
                && session.as_ref().is_some_and(|session| session.buffer.blocks.len() <= BUFFER / 2)
        });
        let (mut session, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let Some(session) = &mut *session else { return (Wish::End, 0) };
        mem::swap(&mut session.buffer, buffer);
        (session.wish, session.dropped)
    }
}

/// Returns the time since the epoch.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
