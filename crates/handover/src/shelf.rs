//! Records that wait in a pair of sockets for a process that does not exist yet.
//!
//! The messages stay in the queue of one end, with their descriptors, as long as any process has both ends. A
//! service manager keeps these while it starts the next process. Each message can be taken once, so a process
//! that starts later cannot use an old state.
//!
//! A shelf gets no answers, so all messages of a shelf must fit into the queue of a socket.

use crate::error::Error;
use crate::message::Kind;
use crate::parcel::{Arriving, Parcel};
use crate::record::Record;
use crate::socket::Socket;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// A pair of sockets, whose one end is filled.
#[derive(Debug)]
pub struct Shelf {
    filled: Socket,
    other: OwnedFd,
}

/// The records of several shelves.
#[derive(Debug, Default)]
pub struct Shelved {
    /// A [`Plan`](crate::v1::Plan).
    pub plan: Option<Record>,
    /// Devices by their position in the plan: a [`Device`](crate::v1::Device) and its
    /// [`Final`](crate::v1::Final).
    pub devices: BTreeMap<u32, (Record, Record)>,
}

impl Shelf {
    fn new() -> Result<Self, Error> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (filled, other) = pair?;
        Ok(Self { filled: Socket::new(filled), other })
    }

    /// Puts a plan into a shelf.
    ///
    /// # Errors
    /// It does not fit.
    pub fn of_plan(plan: Record) -> Result<Self, Error> {
        let shelf = Self::new()?;
        shelf.put(Kind::Plan, 0, plan)?;
        Ok(shelf)
    }

    /// Puts a device and its final state into a shelf.
    ///
    /// # Errors
    /// They do not fit.
    pub fn of_device(number: u32, device: Record, last: Record) -> Result<Self, Error> {
        let shelf = Self::new()?;
        shelf.put(Kind::Device, number, device)?;
        shelf.put(Kind::Final, number, last)?;
        Ok(shelf)
    }

    fn put(&self, kind: Kind, number: u32, record: Record) -> Result<(), Error> {
        let parcel = Parcel::of(record)?;
        // A queue that is full stays full.
        let now = Instant::now();
        let mut messages = parcel.messages(kind, number);
        messages.try_for_each(|message| self.filled.send_only(message.head, message.body, message.fds, now))
    }

    /// Returns both ends. The records are there while both are open.
    pub fn ends(&self) -> [BorrowedFd<'_>; 2] {
        [self.filled.fd.as_fd(), self.other.as_fd()]
    }
}

impl Shelved {
    /// Returns all descriptors.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let devices = self.devices.values().flat_map(|(device, last)| [device, last]);
        self.plan.iter().chain(devices).flat_map(|record| &record.fds).map(AsFd::as_fd)
    }

    /// Takes all records out of one end of a shelf. The other end has none. An error leaves out this shelf.
    ///
    /// # Errors
    /// It is no end of a shelf, or not all of it is there.
    pub fn take(&mut self, end: OwnedFd) -> Result<(), Error> {
        let mut socket = Socket::new(end);
        let mut device = None;
        while let Some((kind, number, record)) = next(&mut socket)? {
            match (kind, device.take()) {
                (Kind::Plan, None) => self.plan = Some(record),
                (Kind::Device, None) => device = Some((number, record)),
                (Kind::Final, Some((of, device))) if of == number => {
                    self.devices.insert(number, (device, record));
                }
                (kind, _) => return Err(kind.out_of_order()),
            }
        }
        if device.is_some() { Err(Error::Message("a device without its final state")) } else { Ok(()) }
    }
}

/// Returns the next record in the queue.
fn next(socket: &mut Socket) -> Result<Option<(Kind, u32, Record)>, Error> {
    let now = Instant::now();
    let first = match socket.receive(now) {
        Ok(first) => first,
        // The other end may have been closed.
        Err(Error::TimedOut | Error::Ended) => return Ok(None),
        Err(error) => return Err(error),
    };
    let (kind, number) = (first.head.kind, first.head.number);
    let mut arriving = Arriving::new(first)?;
    while !arriving.is_complete() {
        arriving.add(socket.receive(now)?)?;
    }
    Ok(Some((kind, number, arriving.record()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Giving;
    use crate::v1::{Device, Plan};
    use std::fs::File;

    fn ends(shelf: &Shelf) -> [OwnedFd; 2] {
        shelf.ends().map(|end| end.try_clone_to_owned().unwrap())
    }

    fn record(fds: usize, text: usize) -> Record {
        let fds = (0..fds).map(|_| File::open("/dev/null").unwrap().into()).collect();
        Record { text: vec![b' '; text], bytes: Vec::new(), fds }
    }

    #[test]
    fn records_wait_and_are_taken_once() {
        let plan = Giving::default().record(&Plan::default()).unwrap();
        let plan = ends(&Shelf::of_plan(plan).unwrap());
        let device = Giving::default().record(&Device::default()).unwrap();
        let shelves = [(3, device, record(0, 7)), (9, record(300, 100_000), record(1, 0))];
        let shelves = shelves.map(|(number, device, last)| {
            let shelf = Shelf::of_device(number, device, last).unwrap();
            ends(&shelf)
        });
        let all: Vec<[OwnedFd; 2]> = [plan].into_iter().chain(shelves).collect();
        for is_first in [true, false] {
            let mut shelved = Shelved::default();
            for end in all.iter().flatten() {
                shelved.take(end.try_clone().unwrap()).unwrap();
            }
            assert_eq!(shelved.plan.is_some(), is_first);
            let found = shelved
                .devices
                .iter()
                .map(|(at, (device, last))| (*at, device.fds.len(), last.text.len() + last.fds.len()));
            assert_eq!(
                found.collect::<Vec<_>>(),
                if is_first { vec![(3, 0, 7), (9, 300, 1)] } else { vec![] }
            );
        }
    }

    #[test]
    fn a_part_of_a_device_is_an_error() {
        let shelf = Shelf::new().unwrap();
        shelf.put(Kind::Device, 1, record(0, 1)).unwrap();
        let mut shelved = Shelved::default();
        assert!(shelved.take(shelf.other.try_clone().unwrap()).is_err());
        shelf.put(Kind::Device, 1, record(0, 1)).unwrap();
        shelf.put(Kind::Final, 2, record(0, 1)).unwrap();
        assert!(shelved.take(shelf.other).is_err());
        assert!(shelved.take(File::open("/dev/null").unwrap().into()).is_err());
        assert!(shelved.devices.is_empty());
    }

    #[test]
    fn a_full_queue_is_an_error() {
        let shelf = Shelf::new().unwrap();
        let put = |_| shelf.put(Kind::Device, 1, record(0, 30_000));
        assert!((0..100).map(put).any(|put| put.is_err()));
    }
}
