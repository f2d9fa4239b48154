//! An image in memory that grows if needed, and records its writes.

use kickless_qcow2::{ReadImage, WriteImage};
use std::cell::RefCell;
use std::io;

/// A change of an image.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { at: u64, bytes: Vec<u8> },
    Sync,
}

/// An image in memory that records its writes.
#[derive(Debug)]
pub(crate) struct Recorded {
    bytes: RefCell<Vec<u8>>,
    changes: RefCell<Vec<Change>>,
}

impl Recorded {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: RefCell::new(bytes), changes: RefCell::default() }
    }

    /// Returns the contents.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_inner()
    }

    /// Returns all changes so far.
    pub(crate) fn changes(&self) -> Vec<Change> {
        self.changes.borrow().clone()
    }
}

impl ReadImage for Recorded {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.bytes.borrow().as_slice().read(at, into)
    }

    fn bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }
}

impl WriteImage for Recorded {
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.changes.borrow_mut().push(Change::Write { at, bytes: from.to_vec() });
        let (mut bytes, at) = (self.bytes.borrow_mut(), at as usize);
        let end = bytes.len().max(at + from.len());
        bytes.resize(end, 0);
        bytes[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.changes.borrow_mut().push(Change::Sync);
        Ok(())
    }
}
