//! Image locks that QEMU understands.
//!
//! QEMU guards an image with *open file description* locks on single bytes: for each permission that it uses a shared
//! lock on byte 100 + *permission*, for each permission that it does not let others have a shared lock on byte
//! 200 + *permission*. Nobody ever takes an exclusive lock; a conflict is found by asking, after one's own bytes are
//! held, whether an exclusive lock could be had on the bytes that say the opposite. Two that start at the same moment
//! can therefore both fail, and can never both succeed. Whatever lies in the image at these offsets is not touched.
//!
//! We ask for what QEMU's own disk devices ask for: others may read, and may resize, but not write.
//! Source: QEMU `block/file-posix.c` and `hw/block/block.c`, the bytes as seen in `/proc/locks` under QEMU 7.2.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// "I read, and count on what I read."
const READS: i64 = 100;
/// "I write."
const WRITES: i64 = 101;
/// "Nobody else may read."
const ALONE_READING: i64 = 200;
/// "Nobody else may write."
const ALONE_WRITING: i64 = 201;

/// How long others are best waited for: a process that was killed keeps its locks until the kernel has ended its I/O, and one whose
/// virtual machine has moved here may be a moment late with letting go.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// How long is waited at least between two looks for a lock that others hold, and at most twice as long.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What one kind of user says with its locks.
struct Claim {
    /// The bytes it holds.
    holds: &'static [i64],
    /// The bytes that nobody else may hold.
    refuses: &'static [i64],
}

const WRITER: Claim =
    Claim { holds: &[READS, WRITES, ALONE_WRITING], refuses: &[ALONE_READING, ALONE_WRITING, WRITES] };
const READER: Claim = Claim { holds: &[READS, ALONE_WRITING], refuses: &[ALONE_READING, WRITES] };

const fn claim(read_only: bool) -> &'static Claim {
    if read_only { &READER } else { &WRITER }
}

/// Why an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has the image open for writing.
    #[error("another process has it open for writing")]
    Written,
    /// Another process uses the image and does not let others write to it.
    #[error("another process is using it and lets nobody else write")]
    NotShared,
    /// Another process uses the image alone.
    #[error("another process is using it alone")]
    Exclusive,
    /// A client of a cluster has the lock that the cluster keeps.
    #[error("another client of the cluster, {0}, is using it")]
    Owned(String),
    /// An image of a cluster for which it keeps no lock.
    #[error(
        "it has no exclusive lock: rbd feature enable gives it exclusive-lock, and --lock=off does without"
    )]
    None,
    /// Whoever keeps the lock cannot give it.
    #[error("{0}")]
    Failed(#[source] io::Error),
    /// The file system cannot lock files in this way, or refuses to.
    #[error("the file cannot be locked (--lock=off does without): {0}")]
    Unsupported(#[source] io::Error),
}

impl LockError {
    /// What it means that somebody else holds `byte`.
    fn held(byte: i64) -> Self {
        match byte {
            WRITES => Self::Written,
            ALONE_WRITING => Self::NotShared,
            _ => Self::Exclusive,
        }
    }

    /// Returns whether another user of the image is in the way, who may let go of it.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Written | Self::NotShared | Self::Exclusive)
    }
}

/// An image that others know to be in use, until this is dropped.
///
/// The lock belongs to the open file description of the file it was made from: duplicates of that descriptor share it,
/// a second `open` of the same image conflicts with it. One lock at a time for each description, since the first to be
/// dropped unlocks for all.
#[derive(Debug)]
pub struct ImageLock {
    file: File,
    holds: &'static [i64],
    /// In [`HELD`].
    entry: Option<(Image, &'static [i64])>,
}

/// Device and inode of an image.
type Image = (u64, u64);

/// The images that this process has locked, and how: the kernel does not say whose a lock is.
static HELD: Mutex<Vec<(Image, &[i64])>> = Mutex::new(Vec::new());

fn held() -> MutexGuard<'static, Vec<(Image, &'static [i64])>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn image(file: &File) -> Option<Image> {
    file.metadata().ok().map(|file| (file.dev(), file.ino()))
}

/// Returns whether this process has a lock on the image behind `file`, by this or another open file description, that does
/// not go with one for reading, or for reading and writing.
pub fn is_held_here(file: &File, read_only: bool) -> bool {
    let refuses = |holds: &[i64]| holds.iter().any(|byte| claim(read_only).refuses.contains(byte));
    image(file).is_some_and(|of| held().iter().any(|(image, holds)| *image == of && refuses(holds)))
}

impl ImageLock {
    /// Locks the image behind `file` for reading, or for reading and writing. Never waits.
    ///
    /// # Errors
    /// Another process holds a lock that does not go with this one, or the file cannot be locked. Nothing is held then.
    pub fn acquire(file: &File, read_only: bool) -> Result<Self, LockError> {
        let claim = claim(read_only);
        let file = file.try_clone().map_err(LockError::Unsupported)?;
        // Dropping it on the way out unlocks what has been locked so far.
        let mut lock = Self { file, holds: claim.holds, entry: None };
        for &byte in claim.holds {
            match fcntl(&lock.file, FcntlArg::F_OFD_SETLK(&range(byte, libc::F_RDLCK))) {
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Err(LockError::held(byte)),
                Err(errno) => return Err(LockError::Unsupported(errno.into())),
            }
        }
        check(&lock.file, read_only)?;
        lock.entry = image(&lock.file).map(|image| (image, lock.holds));
        held().extend(lock.entry);
        Ok(lock)
    }

    /// As [`ImageLock::acquire`], but waits up to `patience` for others to let go.
    ///
    /// # Errors
    /// They do not, or the file cannot be locked. Nothing is held then.
    pub fn acquire_within(file: &File, read_only: bool, patience: Duration) -> Result<Self, LockError> {
        // Nothing is held while looking: of two that wait, each would find the other's bytes.
        let attempt = || check(file, read_only).and_then(|()| Self::acquire(file, read_only));
        within(patience, attempt, |error| tracing::info!(%error, "waiting for the image's lock"))
    }
}

/// Tries until it works, fails for good, or others have been waited for long enough. `tell` hears of it when it has to wait.
fn within<T>(
    patience: Duration,
    attempt: impl Fn() -> Result<T, LockError>,
    tell: impl Fn(&LockError),
) -> Result<T, LockError> {
    let deadline = Instant::now() + patience;
    let mut waits = false;
    loop {
        match attempt() {
            Err(error) if error.is_held() && Instant::now() < deadline => {
                if !std::mem::replace(&mut waits, true) {
                    tell(&error);
                }
                thread::sleep(pause());
            }
            result => return result,
        }
    }
}

/// From [`LOOK_EVERY`] to twice as long, and not the same for two that wait: of two in lockstep, each would find the other's bytes for
/// ever.
fn pause() -> Duration {
    // The keys are another for each: random in a process's first, and counted up from there.
    let random = RandomState::new().hash_one(std::process::id());
    LOOK_EVERY + Duration::from_micros(random % LOOK_EVERY.as_micros() as u64)
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        if let Some(entry) = self.entry {
            let mut held = held();
            if let Some(at) = held.iter().position(|held| *held == entry) {
                held.swap_remove(at);
            }
        }
        for &byte in self.holds {
            // Nothing can be done about a failure, and closing the description unlocks as well.
            let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&range(byte, libc::F_UNLCK)));
        }
    }
}

/// Whether the image behind `file` could be locked now; takes no lock. What `file`'s own description holds is no
/// obstacle.
///
/// # Errors
/// Another process holds a lock that does not go with this one, or the file cannot be locked.
pub fn check(file: &File, read_only: bool) -> Result<(), LockError> {
    for &byte in claim(read_only).refuses {
        let mut found = range(byte, libc::F_WRLCK);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))
            .map_err(|errno| LockError::Unsupported(errno.into()))?;
        if i32::from(found.l_type) != libc::F_UNLCK {
            return Err(LockError::held(byte));
        }
    }
    Ok(())
}

/// As [`check`], but waits up to `patience` for others to let go.
///
/// # Errors
/// They do not, or the file cannot be locked.
pub fn check_within(file: &File, read_only: bool, patience: Duration) -> Result<(), LockError> {
    // Who starts is told by the error, and by nothing before it.
    within(patience, || check(file, read_only), |_| {})
}

/// The one byte at `byte`, as `fcntl` wants it.
fn range(byte: i64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        // The kernel wants 0 for locks of a description.
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::OpenOptions;
    use std::io::{BufRead, BufReader, Write};
    use std::path::Path;
    use std::process::{Command, Stdio};

    use tempfile::NamedTempFile;

    use super::*;

    fn image() -> NamedTempFile {
        let image = NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        image
    }

    fn open(path: &Path, read_only: bool) -> File {
        OpenOptions::new().read(true).write(!read_only).open(path).unwrap()
    }

    #[test]
    fn what_this_process_has_locked() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let other = image.reopen().unwrap();
        assert!(!is_held_here(&other, false));
        let first = ImageLock::acquire(image.as_file(), true).unwrap();
        let second = ImageLock::acquire(&image.reopen().unwrap(), true).unwrap();
        assert!(ImageLock::acquire(&image.reopen().unwrap(), false).is_err());
        drop(first);
        assert!(is_held_here(&other, false) && !is_held_here(&other, true));
        drop(second);
        assert!(!is_held_here(&other, false));
        let _writer = ImageLock::acquire(image.as_file(), false).unwrap();
        assert!(is_held_here(&other, false) && is_held_here(&other, true));
    }

    #[test]
    fn one_writer_or_many_readers() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        let writer = ImageLock::acquire(&a, false).unwrap();
        assert!(matches!(check(&b, false), Err(LockError::NotShared)));
        assert!(matches!(ImageLock::acquire(&b, false), Err(LockError::NotShared)));
        assert!(matches!(ImageLock::acquire(&b, true), Err(LockError::Written)));
        check(&a, false).unwrap();
        drop(writer);

        let (r, s) = (open(image.path(), true), open(image.path(), true));
        let _first = ImageLock::acquire(&r, true).unwrap();
        let _second = ImageLock::acquire(&s, true).unwrap();
        assert!(matches!(ImageLock::acquire(&a, false), Err(LockError::NotShared)));
        // What failed left nothing behind.
        check(&s, true).unwrap();
    }

    /// Each byte by itself, as another program could hold it.
    #[test]
    fn each_byte_says_what_it_says() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        let set = |byte, kind| fcntl(&b, FcntlArg::F_OFD_SETLK(&range(byte, kind))).is_ok();
        for (byte, writer, reader) in [
            (READS, "Ok(())", "Ok(())"),
            (WRITES, "Err(Written)", "Err(Written)"),
            (ALONE_READING, "Err(Exclusive)", "Err(Exclusive)"),
            (ALONE_WRITING, "Err(NotShared)", "Ok(())"),
        ] {
            assert!(set(byte, libc::F_RDLCK));
            for (read_only, expected) in [(false, writer), (true, reader)] {
                assert_eq!(format!("{:?}", check(&a, read_only)), expected, "{byte}");
                let acquired = ImageLock::acquire(&a, read_only).map(drop);
                assert_eq!(format!("{acquired:?}"), expected, "{byte}");
            }
            assert!(set(byte, libc::F_UNLCK));
        }
        for (read_only, holds) in
            [(false, &[READS, WRITES, ALONE_WRITING][..]), (true, &[READS, ALONE_WRITING])]
        {
            let _lock = ImageLock::acquire(&a, read_only).unwrap();
            for byte in [READS, WRITES, ALONE_READING, ALONE_WRITING] {
                let free = set(byte, libc::F_WRLCK);
                assert_eq!(free, !holds.contains(&byte), "{byte}");
                assert!(!free || set(byte, libc::F_UNLCK));
            }
        }
    }

    #[test]
    fn gone_with_the_drop_although_the_file_stays_open() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        drop(ImageLock::acquire(&a, false).unwrap());
        drop(ImageLock::acquire(&b, false).unwrap());
        drop(ImageLock::acquire(&a, false).unwrap());
    }

    #[test]
    fn waited_for_until_the_other_lets_go() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        let held = ImageLock::acquire(&a, false).unwrap();
        let (started, patience) = (Instant::now(), Duration::from_millis(20));
        let refused = ImageLock::acquire_within(&b, false, patience);
        assert!(matches!(refused, Err(LockError::NotShared)) && started.elapsed() >= patience);
        let started = Instant::now();
        let refused = check_within(&b, false, patience);
        assert!(matches!(refused, Err(LockError::NotShared)) && started.elapsed() >= patience);
        let waiting = thread::spawn(move || ImageLock::acquire_within(&b, false, Duration::from_secs(60)));
        drop(held);
        let _theirs = waiting.join().unwrap().unwrap();
        assert!(ImageLock::acquire(&a, false).is_err());
    }

    /// How it ends when others let go after so many looks, or never; how often is looked and told.
    fn wait(patience: Duration, error: fn() -> LockError, looks: usize) -> (bool, usize, usize) {
        let (looked, told) = (Cell::new(0), Cell::new(0));
        let attempt = || {
            looked.set(looked.get() + 1);
            if looked.get() > looks { Ok(()) } else { Err(error()) }
        };
        let result = within(patience, attempt, |_| told.set(told.get() + 1));
        (result.is_ok(), looked.get(), told.get())
    }

    #[test]
    fn only_what_is_held_is_waited_for_and_told_of_once() {
        let long = Duration::from_secs(60);
        for held in [|| LockError::Written, || LockError::NotShared, || LockError::Exclusive] {
            assert_eq!(wait(long, held, 3), (true, 4, 1));
            assert_eq!(wait(long, held, 0), (true, 1, 0));
            assert_eq!(wait(Duration::ZERO, held, 3), (false, 1, 0));
            let (ended_well, looked, told) = wait(Duration::from_millis(30), held, usize::MAX);
            assert!(!ended_well && (2..=7).contains(&looked) && told == 1, "{looked}");
        }
        assert_eq!(wait(long, || LockError::None, 3), (false, 1, 0));
        assert_eq!(wait(long, || LockError::Unsupported(io::ErrorKind::Other.into()), 3), (false, 1, 0));
    }

    #[test]
    fn two_that_wait_do_not_look_in_lockstep() {
        let waits: std::collections::BTreeSet<_> = (0..16).map(|_| pause()).collect();
        assert!(waits.len() > 1 && waits.iter().all(|wait| (LOOK_EVERY..2 * LOOK_EVERY).contains(wait)));
    }

    #[test]
    fn a_foreign_exclusive_lock_is_a_conflict() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        fcntl(&b, FcntlArg::F_OFD_SETLK(&range(READS, libc::F_WRLCK))).unwrap();
        assert!(ImageLock::acquire(&a, false).is_err());
        fcntl(&b, FcntlArg::F_OFD_SETLK(&range(READS, libc::F_UNLCK))).unwrap();
        ImageLock::acquire(&a, false).unwrap();
    }

    /// `qemu-io` running one command, and whether that went well.
    fn qemu_io(path: &Path, read_only: bool) -> Result<(), String> {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", "-c", "read 0 512"]).stdin(Stdio::null());
        if read_only {
            command.arg("-r");
        }
        let out = command.arg(path).output().unwrap();
        if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
    }

    #[test]
    fn qemu_respects_our_locks() {
        let image = image();
        let file = open(image.path(), false);

        let writer = ImageLock::acquire(&file, false).unwrap();
        let refused = qemu_io(image.path(), false).unwrap_err();
        assert!(refused.contains("Failed to get \"write\" lock"), "{refused}");
        drop(writer);
        qemu_io(image.path(), false).unwrap();

        let reader = ImageLock::acquire(&file, true).unwrap();
        let refused = qemu_io(image.path(), false).unwrap_err();
        assert!(refused.contains("Failed to get \"write\" lock"), "{refused}");
        qemu_io(image.path(), true).unwrap();
        drop(reader);
    }

    #[test]
    fn we_respect_the_locks_of_a_guest_in_qemu() {
        let image = image();
        let file = open(image.path(), false);
        for qemu_reads_only in [false, true] {
            let drive = format!(
                "if=none,id=disk,format=raw,file={},readonly={}",
                image.path().display(),
                if qemu_reads_only { "on" } else { "off" }
            );
            let mut qemu = Command::new("qemu-system-x86_64")
                .args(["-S", "-nodefaults", "-display", "none", "-m", "32", "-qmp", "stdio"])
                .args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            // Commands are answered once the devices stand; the greeting comes before.
            qemu.stdin.as_mut().unwrap().write_all(b"{\"execute\":\"qmp_capabilities\"}\n").unwrap();
            BufReader::new(qemu.stdout.as_mut().unwrap()).lines().nth(1).unwrap().unwrap();

            let found = check(&file, false);
            let (writer, reader) = (ImageLock::acquire(&file, false), ImageLock::acquire(&file, true));
            qemu.kill().unwrap();
            qemu.wait().unwrap();
            assert!(matches!(found, Err(LockError::NotShared)), "{found:?}");
            assert!(writer.is_err());
            assert_eq!(reader.is_ok(), qemu_reads_only);
            drop(reader);
            ImageLock::acquire(&file, false).unwrap();
        }
    }
}
