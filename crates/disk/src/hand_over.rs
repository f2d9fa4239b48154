//! Disks that pass to the next process of their host, while their guest goes on.
//!
//! The open file descriptions pass, with their locks, and with what the kernel has to report to them. No
//! image is opened again: a new description has no lock, and hears of no write that the host has lost before.

use kickless_handover::Giving;
use kickless_handover::v1::{ImageFinal, Medium, NbdFinal};
use std::fmt::Debug;
use std::io;

/// The state of a disk in the pause: what its descriptors do not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suspended {
    /// The images, in the order of [`DiskHandOver::give`].
    pub images: Vec<ImageFinal>,
    /// The connection to the server.
    pub nbd: Option<NbdFinal>,
}

/// Gives a disk to the next process of this host, and takes it back.
///
/// | old process | new process |
/// | --- | --- |
/// | [`give`](Self::give) | [`Disk::of_handed`](crate::Disk::of_handed) |
/// | [`settle`](Self::settle) | |
/// | [`suspend`](Self::suspend) | [`receive`](Self::receive) |
/// | ends, or [`take_back`](Self::take_back) | [`begin`](Self::begin) |
///
/// No request is in flight from `suspend` to `take_back`, and none in the new process before `begin`. Until
/// then the new process writes nothing, and reads no socket.
///
/// The defaults suit a disk without a state, which the new process makes anew.
pub trait DiskHandOver: Debug + Send + Sync {
    /// Returns why another process cannot take the disk over while a guest uses it, as one sentence.
    fn refuses(&self) -> Option<&'static str> {
        None
    }

    /// Returns the number of changes of the descriptors that [`DiskHandOver::give`] gives.
    fn changes(&self) -> u64 {
        0
    }

    /// Adds duplicates of the descriptors, and says what they are. Requests run, unless the disk
    /// [gives slowly](DiskHandOver::gives_slowly).
    ///
    /// # Errors
    /// There is no free descriptor, or too little memory.
    fn give(&self, _to: &mut Giving) -> io::Result<Medium> {
        Ok(Medium::Anew)
    }

    /// Returns whether [`DiskHandOver::give`] copies the disk, so that no request may run from there on.
    fn gives_slowly(&self) -> bool {
        false
    }

    /// Writes the host's cache to the medium, so that the next flush is short. Requests run. Can wait.
    ///
    /// # Errors
    /// Some data could not be written.
    fn settle(&self) -> io::Result<()> {
        Ok(())
    }

    /// Ends the use of the disk, and returns its state. Files stay open and locked. `is_taken`: a guest uses
    /// the disk.
    ///
    /// # Errors
    /// Some data could not be written, or something is in flight. [`DiskHandOver::take_back`] comes next.
    fn suspend(&self, _is_taken: bool) -> io::Result<Suspended> {
        Ok(Suspended::default())
    }

    /// Goes on after [`DiskHandOver::suspend`], also after one that failed.
    ///
    /// # Errors
    /// The disk cannot be used any more.
    fn take_back(&self, _is_taken: bool) -> io::Result<()> {
        Ok(())
    }

    /// Takes the state that the old process has returned from [`DiskHandOver::suspend`]. `locks`: its images
    /// are locked.
    ///
    /// # Errors
    /// The state contradicts what was given, or the disk cannot be used.
    fn receive(&self, _state: &Suspended, _is_taken: bool, _locks: bool) -> io::Result<()> {
        Ok(())
    }

    /// Goes on in the new process. Does not wait.
    fn begin(&self) {}
}
