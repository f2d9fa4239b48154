//! Routes: the thread that makes the calls for a file's transfers, chosen so that no device can make the
//! worker wait.
//!
//! # Which calls wait
//! - io_uring starts an operation without waiting. If the operation cannot go on, it passes to threads of the
//!   kernel ("io-wq"). There are few of these for all files together, and one frozen file system occupies
//!   them all. So transfers of files that are open for direct I/O carry `RWF_NOWAIT`. A thread of ours
//!   ([`crate::threads::pool`]) does a transfer that answers `EAGAIN`.
//! - `io_submit` accepts the same flag, for block devices, and for reads. For a write to a regular file it
//!   waits while the file system is frozen, even with the flag (`kiocb_start_write` of fs/aio.c). So a thread
//!   of ours makes that call for a batch. The transfers are asynchronous as before. The worker waits for a
//!   moment until the call is made ([`crate::threads::submit_wait`]). tmpfs cannot be frozen. If the engine
//!   has a lone owner ([`crate::EngineOptions::lone_owner`]), the worker makes the call itself. A frozen file
//!   system then blocks its own device only, but also the front-end's changes to it: new memory, the start of
//!   a migration, a stop.
//! - If a device's driver lacks `RWF_NOWAIT`, such a thread calls `io_submit` as well. For a device that
//!   keeps its bytes in RAM (zram, brd), the worker calls, because there is nothing to wait for.
//! - A read through the host's cache goes to the ring without the flag. With it, the kernel would not wait
//!   for pages in its asynchronous way. A write through the cache goes there with the flag. A durable one
//!   waits for the device in any case.
//! - Flushes and ranges wait. They are not transfers, and always go to threads.
//!
//! # Limits of the kernel's promise
//! `RWF_NOWAIT` is best effort: ext4 may read a block of its map from the device, and readahead may wait for
//! a tag. Before 6.12 (and the stable kernels of that time), io_uring waits on a frozen file system even with
//! the flag.
//!
//! # Files that always answer EAGAIN
//! A write into unallocated space answers `EAGAIN`, and so does each write through the cache of ext4. Trying
//! each of them would waste a call. So after [`FAILURES_MAX`] failures in a row, all but one of [`TRY_EACH`]
//! transfers go to threads at once, until a tried one succeeds.
//!
//! A block device answers `EAGAIN` to each transfer that it would split (`max_sectors_kb`, the number of
//! segments), even when it is idle. That says nothing about smaller ones. So failures count by size
//! ([`Backoff::of`]), and transfers that are too large for the device do not send small ones to threads.

use crate::AlignedBuf;
use kickless_opener::block_facts;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, fstatfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::IoSliceMut;

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// The number of failures in a row after which tries are rare.
const FAILURES_MAX: u8 = 8;
/// Of this many, one is tried then.
const TRY_EACH: u8 = 16;

/// The route of one kind of transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// The worker starts it with `RWF_NOWAIT`. On `EAGAIN` a thread does it.
    NoWait,
    /// The worker starts it without a flag, because it does not wait.
    Plain,
    /// The worker calls `io_submit`. Either the call does not wait, or no other owner waits with it.
    Worker,
    /// A thread of the owner's share calls `io_submit`.
    Offload,
    /// A thread of the owner's share makes a call that waits.
    Blocking,
}

/// The routes of a file's transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Routes {
    pub(crate) read: Route,
    pub(crate) write: Route,
    /// The route of durable writes.
    pub(crate) durable: Route,
}

impl Routes {
    pub(crate) fn all(route: Route) -> Self {
        Self { read: route, write: route, durable: route }
    }

    /// Returns the routes of a file in an engine that has io_uring.
    pub(crate) fn by_ring(facts: Facts) -> Self {
        match facts {
            // Pipes and the like: the ring polls for them instead of waiting.
            Facts { kind: Kind::Other, .. } => Self::all(Route::Plain),
            Facts { direct: true, nowait: true, .. } => Self::all(Route::NoWait),
            Facts { direct: true, .. } => facts.without_nowait(),
            Facts { nowait: true, .. } => {
                Self { read: Route::Plain, write: Route::NoWait, durable: Route::Blocking }
            }
            Facts { .. } => Self::all(Route::Blocking),
        }
    }

    /// Returns the routes of a file in an engine that has kernel AIO and no ring.
    pub(crate) fn by_aio(facts: Facts) -> Self {
        match facts {
            Facts { direct: false, .. } | Facts { kind: Kind::Other, .. } => Self::all(Route::Blocking),
            Facts { kind: Kind::Device, nowait: true, .. } => Self::all(Route::NoWait),
            Facts { kind: Kind::Regular, nowait: true, tmpfs: false, .. } => {
                Self { read: Route::NoWait, ..Self::all(Route::Offload) }
            }
            Facts { .. } => facts.without_nowait(),
        }
    }

    /// Returns the same routes with each call of `io_submit` made by the worker.
    pub(crate) fn without_handover(self) -> Self {
        let by_worker = |route| if route == Route::Offload { Route::Worker } else { route };
        Self { read: by_worker(self.read), write: by_worker(self.write), durable: by_worker(self.durable) }
    }

    /// Returns whether a transfer of the file can go by `io_submit` beside a ring.
    pub(crate) fn use_aio(self) -> bool {
        matches!(self.read, Route::Worker | Route::Offload)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Regular,
    Device,
    Other,
}

/// The properties that decide the routes of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    kind: Kind,
    /// The file is open for direct I/O.
    direct: bool,
    /// The file accepts `RWF_NOWAIT`.
    nowait: bool,
    tmpfs: bool,
    /// A device with its bytes in RAM: zram, brd, or a partition of one.
    ram: bool,
}

impl Facts {
    /// Examines the file, which may wait for its file system. This reads nothing, so it does not wait for a
    /// device.
    pub(crate) fn of(file: &File) -> Self {
        let unknown = Self { kind: Kind::Regular, direct: false, nowait: false, tmpfs: false, ram: false };
        Self::try_of(file).unwrap_or(unknown)
    }

    fn try_of(file: &File) -> Result<Self, Errno> {
        let stat = fstat(file)?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Kind::Regular,
            FileType::BlockDevice => Kind::Device,
            _ => Kind::Other,
        };
        let direct = fcntl_getfl(file)?.contains(OFlags::DIRECT);
        let tmpfs = kind == Kind::Regular && fstatfs(file)?.f_type as u64 == TMPFS;
        let nowait = kind != Kind::Other && takes_nowait(file);
        let ram = kind == Kind::Device && block_facts(stat.st_rdev).is_ok_and(|facts| facts.is_in_ram);
        Ok(Self { kind, direct, nowait, tmpfs, ram })
    }

    /// Returns the routes of a file that is open for direct I/O and lacks `RWF_NOWAIT`.
    fn without_nowait(self) -> Routes {
        Routes::all(match self {
            Self { tmpfs: true, .. } | Self { ram: true, .. } => Route::Worker,
            Self { kind: Kind::Device, .. } => Route::Offload,
            // `io_submit` would do the whole transfers, one after the other.
            Self { .. } => Route::Blocking,
        })
    }
}

/// Returns whether a file accepts `RWF_NOWAIT`. The kernel checks the flag first, and then finds that the
/// offset is past the end.
pub(crate) fn takes_nowait(file: &File) -> bool {
    const LEN: usize = 4096;
    const BEYOND: u64 = 1 << 62;
    let Ok(mut buffer) = AlignedBuf::new(LEN, LEN) else { return false };
    let read = preadv2(file, &mut [IoSliceMut::new(&mut buffer)], BEYOND, ReadWriteFlags::NOWAIT);
    !matches!(read, Err(Errno::OPNOTSUPP | Errno::NOSYS))
}

/// Makes tries rare after [`FAILURES_MAX`] failures in a row, until one succeeds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backoff {
    failures: u8,
    skipped: u8,
}

/// The number of sizes that are counted separately: below 8 KiB, below 16 KiB, and so on. The last is 16 MiB
/// and more, where every device splits.
pub(crate) const SIZE_CLASSES: usize = 13;

impl Backoff {
    /// Returns the counter for a transfer of this many bytes. The limit of a device is within one of the
    /// sizes. Transfers of that size can succeed or fail. All others have the same result each time.
    #[inline]
    pub(crate) fn of(sizes: &mut [Self; SIZE_CLASSES], bytes: u64) -> &mut Self {
        let size = (bytes >> 12 | 1).ilog2() as usize;
        &mut sizes[size.min(SIZE_CLASSES - 1)]
    }

    /// Returns whether to try the next one.
    #[inline]
    pub(crate) fn should_try(&mut self) -> bool {
        self.failures < FAILURES_MAX || self.is_turn()
    }

    #[cold]
    fn is_turn(&mut self) -> bool {
        self.skipped = (self.skipped + 1) % TRY_EACH;
        self.skipped == 0
    }

    /// Notes that a try succeeded.
    #[inline]
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Notes that a try failed.
    pub(crate) fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_make_tries_rare_until_a_success() {
        let mut backoff = Backoff::default();
        let tried = |backoff: &mut Backoff, rounds: usize| {
            (0..rounds)
                .filter(|_| {
                    backoff.should_try() && {
                        backoff.failed();
                        true
                    }
                })
                .count()
        };
        assert_eq!(tried(&mut backoff, 8), 8);
        assert_eq!(tried(&mut backoff, 160), 10);
        backoff.succeeded();
        assert_eq!(tried(&mut backoff, 1000), 8 + 62);
    }

    /// Reads existing bytes with `RWF_NOWAIT`.
    fn preadv2_nowait(mut image: &File) -> Result<usize, Errno> {
        std::io::Write::write_all(&mut image, &[1; 4096]).unwrap();
        preadv2(image, &mut [IoSliceMut::new(&mut [0; 512])], 0, ReadWriteFlags::NOWAIT)
    }

    #[test]
    fn properties_of_a_file_decide_its_routes() {
        let facts = Facts { kind: Kind::Regular, direct: true, nowait: false, tmpfs: false, ram: false };
        assert_eq!(facts.without_nowait(), Routes::all(Route::Blocking));
        assert_eq!(Facts { tmpfs: true, ..facts }.without_nowait(), Routes::all(Route::Worker));
        let device = Facts { kind: Kind::Device, ..facts };
        assert_eq!(device.without_nowait(), Routes::all(Route::Offload));
        assert_eq!(device.without_nowait().without_handover(), Routes::all(Route::Worker));
        let regular = Facts { kind: Kind::Regular, nowait: true, ..facts };
        assert_eq!(Routes::by_aio(regular), Routes { read: Route::NoWait, ..Routes::all(Route::Offload) });
        assert_eq!(Facts { ram: true, ..device }.without_nowait(), Routes::all(Route::Worker));
        let null = File::open("/dev/null").unwrap();
        assert_eq!(Routes::by_ring(Facts::of(&null)), Routes::all(Route::Plain));
        let image = tempfile::tempfile().unwrap();
        assert_eq!(Routes::by_aio(Facts::of(&image)), Routes::all(Route::Blocking));
        assert_eq!(takes_nowait(&image), preadv2_nowait(&image) != Err(Errno::OPNOTSUPP));
        assert_ne!(Routes::by_ring(Facts::of(&image)).durable, Route::NoWait);
    }
}
