//! Image locks that QEMU understands.
//!
//! QEMU protects an image with *open file description* locks on single bytes. For each permission that it
//! uses, it takes a shared lock on byte 100 + *permission*. For each permission that it denies to others, it
//! takes a shared lock on byte 200 + *permission*.
//!
//! There are no exclusive locks. A process first takes its own bytes. Then it finds a conflict by asking
//! whether an exclusive lock would be possible on the bytes that say the opposite. So of two processes that
//! start at the same moment both can fail, but never both succeed. The locks do not affect the data of the
//! image at these offsets.
//!
//! This program asks for the same permissions as QEMU's own disk devices: others may read and resize, but not
//! write. Source: QEMU `block/file-posix.c` and `hw/block/block.c`, and `/proc/locks` under QEMU 7.2.

use kickless_sync::lock;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::fstat;

/// This process reads, and relies on the data that it has read.
const READS: i64 = 100;
/// This process writes.
const WRITES: i64 = 101;
/// No other process may read.
const DENIES_READING: i64 = 200;
/// No other process may write.
const DENIES_WRITING: i64 = 201;

/// The longest time to wait for another process. A killed process keeps its locks until the kernel has ended
/// its I/O. A process whose virtual machine has moved here may release its locks a moment late.
pub const LOCK_WAIT_MAX: Duration = Duration::from_secs(3);

/// The number of times that the file at a path can be replaced by another one before it is locked. Each time
/// is a rename within microseconds, so more are an endless loop.
pub(crate) const REPLACED_MAX: u32 = 8;

/// The shortest pause between two attempts to take a lock. The longest is twice as long.
const RETRY_EVERY: Duration = Duration::from_millis(5);

/// The lock bytes of a kind of user.
struct LockBytes {
    /// The bytes to lock.
    holds: &'static [i64],
    /// The bytes that no other process may lock.
    refuses: &'static [i64],
}

const WRITER: LockBytes =
    LockBytes { holds: &[READS, WRITES, DENIES_WRITING], refuses: &[DENIES_READING, DENIES_WRITING, WRITES] };
const READER: LockBytes = LockBytes { holds: &[READS, DENIES_WRITING], refuses: &[DENIES_READING, WRITES] };

const fn lock_bytes(read_only: bool) -> &'static LockBytes {
    if read_only { &READER } else { &WRITER }
}

/// The reason why an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// This process has locked it for another disk.
    #[error(
        "another device of this daemon is using it: give each its own image, make both read-only, or use incoming to \
         migrate a guest to the other"
    )]
    Here,
    /// Another process has the image open for writing.
    #[error("another process has it open for writing: give each its own image, or end that process")]
    Written,
    /// Another process uses the image and does not let others write to it.
    #[error(
        "another process is using it and denies writes to others: make both read-only, or end that process"
    )]
    NotShared,
    /// Another process uses the image exclusively.
    #[error("another process is using it exclusively: give each its own image, or end that process")]
    Exclusive,
    /// Another client of the cluster has the lock.
    #[error("another client of the cluster, {0}, is using it")]
    Owned(String),
    /// The image belongs to a cluster that keeps no lock of it.
    #[error(
        "it has no exclusive lock: add the feature exclusive-lock with rbd feature enable, or use --lock=off"
    )]
    None,
    /// The cluster cannot give the lock.
    #[error("{0}")]
    Failed(#[source] io::Error),
    /// The file system does not support such locks.
    #[error("the file cannot be locked ({0}): use --lock=off to run without a lock")]
    Unsupported(#[source] io::Error),
}

impl LockError {
    /// Returns the error for a `byte` that another process has locked.
    fn held(byte: i64) -> Self {
        match byte {
            WRITES => Self::Written,
            DENIES_WRITING => Self::NotShared,
            _ => Self::Exclusive,
        }
    }

    /// Says that this process has the lock, if it is so. The kernel does not tell.
    fn said_here(self, file: &File, read_only: bool) -> Self {
        if self.is_held() && is_held_here(file, read_only) { Self::Here } else { self }
    }

    /// Returns whether another process has the lock, and may release it.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Here | Self::Written | Self::NotShared | Self::Exclusive)
    }
}

/// A lock that shows others that an image is in use. Dropping it unlocks the image.
///
/// The lock belongs to the open file description of the file it was made from. Duplicates of that descriptor
/// share it, and a second `open` of the same image conflicts with it. There must be only one lock for each
/// description, because the first drop unlocks it for all.
#[derive(Debug)]
pub struct ImageLock {
    file: File,
    holds: &'static [i64],
    /// Dropping it unlocks the image.
    unlocks: bool,
    /// The entry in [`HELD`].
    entry: Option<(Image, &'static [i64])>,
}

/// The device and the inode of an image.
type Image = (u64, u64);

/// The images that this process has locked, and their bytes. The kernel does not report the owner of a lock.
static HELD: Mutex<Vec<(Image, &[i64])>> = Mutex::new(Vec::new());

fn image(file: &File) -> Option<Image> {
    fstat(file).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Returns whether this process already has a conflicting lock on the image, by this or another open file
/// description.
fn is_held_here(file: &File, read_only: bool) -> bool {
    is_among(&lock(&HELD), file, read_only)
}

fn is_among(held: &[(Image, &[i64])], file: &File, read_only: bool) -> bool {
    let refuses = |holds: &[i64]| holds.iter().any(|byte| lock_bytes(read_only).refuses.contains(byte));
    image(file).is_some_and(|of| held.iter().any(|(image, holds)| *image == of && refuses(holds)))
}

impl ImageLock {
    /// Locks the image of `file` for reading, or for reading and writing. Never waits.
    ///
    /// # Errors
    /// Another process has a conflicting lock, or the file cannot be locked. Then nothing is locked.
    pub fn acquire(file: &File, read_only: bool) -> Result<Self, LockError> {
        // The kernel sees no conflict of two disks that have one open file description.
        let mut held = lock(&HELD);
        if is_among(&held, file, read_only) {
            check(file, read_only)?;
            return Err(LockError::Here);
        }
        Self::set(file, read_only, true, &mut held)
    }

    /// Takes the lock of an open file description that another process of this host has locked, and has
    /// passed to this one. Until [`ImageLock::own`], the other process relies on the lock: dropping it, or a
    /// failure, unlocks nothing.
    ///
    /// # Errors
    /// Another description has a conflicting lock, so the other process had none.
    pub(crate) fn of_handed(file: &File, read_only: bool) -> Result<Self, LockError> {
        Self::set(file, read_only, false, &mut lock(&HELD))
    }

    /// Owns the lock of the description, or leaves it to another process that has the description too.
    pub(crate) fn own(&mut self, owns: bool) {
        self.unlocks = owns;
    }

    /// Locks the bytes, and adds an entry to the images that this process has locked.
    fn set(
        file: &File,
        read_only: bool,
        unlocks: bool,
        held: &mut Vec<(Image, &[i64])>,
    ) -> Result<Self, LockError> {
        let file = file.try_clone().map_err(LockError::Unsupported)?;
        // An early return drops this, which unlocks the bytes that are locked so far.
        let mut lock = Self { file, holds: lock_bytes(read_only).holds, unlocks, entry: None };
        for &byte in lock.holds {
            match fcntl(&lock.file, FcntlArg::F_OFD_SETLK(&range(byte, libc::F_RDLCK))) {
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Err(LockError::held(byte)),
                Err(errno) => return Err(LockError::Unsupported(errno.into())),
            }
        }
        check(&lock.file, read_only)?;
        lock.entry = image(&lock.file).map(|image| (image, lock.holds));
        held.extend(lock.entry);
        Ok(lock)
    }

    /// Locks the image as [`ImageLock::acquire`], but waits up to [`LOCK_WAIT_MAX`] for others to unlock it.
    ///
    /// # Errors
    /// The others keep their lock, or the file cannot be locked. Then nothing is locked.
    pub fn wait_for(file: &File, read_only: bool) -> Result<Self, LockError> {
        Self::acquire_within(file, read_only, LOCK_WAIT_MAX).map_err(|error| error.said_here(file, read_only))
    }

    /// Locks the image as [`ImageLock::acquire`], but waits up to `wait_max` for others to unlock it.
    ///
    /// # Errors
    /// The others keep their lock, or the file cannot be locked. Then nothing is locked.
    pub fn acquire_within(file: &File, read_only: bool, wait_max: Duration) -> Result<Self, LockError> {
        // Nothing is locked between attempts. Otherwise each of two waiting processes would find the other's
        // bytes.
        let attempt = || check(file, read_only).and_then(|()| Self::acquire(file, read_only));
        retry_within(wait_max, attempt, |error| tracing::info!(%error, "waiting for the image's lock"))
    }
}

/// Repeats an attempt until it succeeds, fails for good, or the time has passed. Calls `report` before the
/// first wait.
fn retry_within<T>(
    wait_max: Duration,
    attempt: impl Fn() -> Result<T, LockError>,
    report: impl Fn(&LockError),
) -> Result<T, LockError> {
    let deadline = Instant::now() + wait_max;
    let mut waits = false;
    loop {
        match attempt() {
            Err(error) if error.is_held() && Instant::now() < deadline => {
                if !std::mem::replace(&mut waits, true) {
                    report(&error);
                }
                thread::sleep(pause());
            }
            result => return result,
        }
    }
}

/// Returns a random time from [`RETRY_EVERY`] to twice that. If two processes waited for the same time, each
/// would find the other's bytes for ever.
fn pause() -> Duration {
    // The keys of `RandomState` are random for the first one of a process, and count up from there.
    let random = RandomState::new().hash_one(std::process::id());
    RETRY_EVERY + Duration::from_micros(random % RETRY_EVERY.as_micros() as u64)
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        if let Some(entry) = self.entry {
            let mut held = lock(&HELD);
            if let Some(at) = held.iter().position(|held| *held == entry) {
                held.swap_remove(at);
            }
        }
        for &byte in self.holds.iter().filter(|_| self.unlocks) {
            // A failure cannot be handled, and closing the description unlocks as well.
            let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&range(byte, libc::F_UNLCK)));
        }
    }
}

/// Checks whether the image of `file` could be locked now. Takes no lock.
///
/// Locks of the same open file description are no obstacle.
///
/// # Errors
/// Another process has a conflicting lock, or the file cannot be locked.
pub fn check(file: &File, read_only: bool) -> Result<(), LockError> {
    for &byte in lock_bytes(read_only).refuses {
        let mut found = range(byte, libc::F_WRLCK);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))
            .map_err(|errno| LockError::Unsupported(errno.into()))?;
        if i32::from(found.l_type) != libc::F_UNLCK {
            return Err(LockError::held(byte));
        }
    }
    Ok(())
}

/// Checks as [`check`], but waits up to `wait_max` for others to unlock the image.
///
/// # Errors
/// The others keep their lock, or the file cannot be locked.
pub fn check_within(file: &File, read_only: bool, wait_max: Duration) -> Result<(), LockError> {
    // At start-up, only the final error is reported.
    let checked = retry_within(wait_max, || check(file, read_only), |_| {});
    checked.map_err(|error| error.said_here(file, read_only))
}

/// Returns the beginning of the sentence about an image that cannot be locked. It names the process that had
/// locked the image at the start of this one.
pub fn cannot_be_locked(file: &File, path: &Path) -> String {
    match kickless_opener::holder(file) {
        Some(holder) => format!("{} is locked by {holder}", path.display()),
        None => format!("{} cannot be locked", path.display()),
    }
}

/// Returns the lock of one byte for `fcntl`.
fn range(byte: i64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        // The kernel requires 0 for locks of a description.
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::OpenOptions;
    use std::io::{BufRead, BufReader, Write};
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
    fn locks_of_this_process_are_found() {
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
        // The failed attempt left no locks.
        check(&s, true).unwrap();
    }

    /// Each byte conflicts by itself, because another program could lock only this one.
    #[test]
    fn each_byte_conflicts_as_in_qemu() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        let set = |byte, kind| fcntl(&b, FcntlArg::F_OFD_SETLK(&range(byte, kind))).is_ok();
        for (byte, writer, reader) in [
            (READS, "Ok(())", "Ok(())"),
            (WRITES, "Err(Written)", "Err(Written)"),
            (DENIES_READING, "Err(Exclusive)", "Err(Exclusive)"),
            (DENIES_WRITING, "Err(NotShared)", "Ok(())"),
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
            [(false, &[READS, WRITES, DENIES_WRITING][..]), (true, &[READS, DENIES_WRITING])]
        {
            let _lock = ImageLock::acquire(&a, read_only).unwrap();
            for byte in [READS, WRITES, DENIES_READING, DENIES_WRITING] {
                let free = set(byte, libc::F_WRLCK);
                assert_eq!(free, !holds.contains(&byte), "{byte}");
                assert!(!free || set(byte, libc::F_UNLCK));
            }
        }
    }

    #[test]
    fn a_drop_unlocks_while_the_file_stays_open() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        drop(ImageLock::acquire(&a, false).unwrap());
        drop(ImageLock::acquire(&b, false).unwrap());
        drop(ImageLock::acquire(&a, false).unwrap());
    }

    #[test]
    fn waits_until_the_other_unlocks() {
        let image = image();
        let (a, b) = (open(image.path(), false), open(image.path(), false));
        let held = ImageLock::acquire(&a, false).unwrap();
        let (started, wait_max) = (Instant::now(), Duration::from_millis(20));
        let refused = ImageLock::acquire_within(&b, false, wait_max);
        assert!(matches!(refused, Err(LockError::NotShared)) && started.elapsed() >= wait_max);
        let started = Instant::now();
        let refused = check_within(&b, false, wait_max);
        assert!(matches!(refused, Err(LockError::Here)) && started.elapsed() >= wait_max);
        let waiting = thread::spawn(move || ImageLock::acquire_within(&b, false, Duration::from_secs(60)));
        drop(held);
        let _theirs = waiting.join().unwrap().unwrap();
        assert!(ImageLock::acquire(&a, false).is_err());
    }

    /// Runs attempts that succeed after this many failures. Returns whether they succeeded, the number of
    /// attempts, and the number of reports.
    fn wait(wait_max: Duration, error: fn() -> LockError, failures: usize) -> (bool, usize, usize) {
        let (attempts, reports) = (Cell::new(0), Cell::new(0));
        let attempt = || {
            attempts.set(attempts.get() + 1);
            if attempts.get() > failures { Ok(()) } else { Err(error()) }
        };
        let result = retry_within(wait_max, attempt, |_| reports.set(reports.get() + 1));
        (result.is_ok(), attempts.get(), reports.get())
    }

    #[test]
    fn waits_only_for_held_locks_and_reports_once() {
        let long = Duration::from_secs(60);
        for held in [|| LockError::Written, || LockError::NotShared, || LockError::Exclusive] {
            assert_eq!(wait(long, held, 3), (true, 4, 1));
            assert_eq!(wait(long, held, 0), (true, 1, 0));
            assert_eq!(wait(Duration::ZERO, held, 3), (false, 1, 0));
            let (is_ok, attempts, reports) = wait(Duration::from_millis(30), held, usize::MAX);
            assert!(!is_ok && (2..=7).contains(&attempts) && reports == 1, "{attempts}");
        }
        assert_eq!(wait(long, || LockError::None, 3), (false, 1, 0));
        assert_eq!(wait(long, || LockError::Unsupported(io::ErrorKind::Other.into()), 3), (false, 1, 0));
    }

    #[test]
    fn waiting_processes_use_different_pauses() {
        let waits: std::collections::BTreeSet<_> = (0..16).map(|_| pause()).collect();
        assert!(waits.len() > 1 && waits.iter().all(|wait| (RETRY_EVERY..2 * RETRY_EVERY).contains(wait)));
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

    /// Runs one command of `qemu-io`. The error is its output.
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
            // QEMU sends a greeting first, and answers commands when the devices exist.
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
