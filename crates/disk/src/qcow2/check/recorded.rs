//! An image in memory that records its writes.

use super::image::{ReadImage, WriteImage};
use std::cell::RefCell;
use std::io;

/// A change of an image.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { at: u64, bytes: Vec<u8> },
    Sync,
}

/// An image in memory. Tests look at its changes, fuzz targets do not.
#[derive(Debug)]
pub(crate) struct Recorded {
    bytes: RefCell<Vec<u8>>,
    #[cfg(test)]
    changes: RefCell<Vec<Change>>,
}

impl Recorded {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: RefCell::new(bytes),
            #[cfg(test)]
            changes: RefCell::default(),
        }
    }

    /// Returns the contents.
    #[cfg(test)]
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_inner()
    }

    /// Returns all changes so far.
    #[cfg(test)]
    pub(crate) fn changes(&self) -> Vec<Change> {
        self.changes.borrow().clone()
    }
}

/// Writes to an image, which grows if needed.
pub(crate) fn write(image: &mut Vec<u8>, at: u64, from: &[u8]) {
    let at = at as usize;
    if image.len() < at + from.len() {
        image.resize(at + from.len(), 0);
    }
    image[at..at + from.len()].copy_from_slice(from);
}

impl ReadImage for Recorded {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes.borrow();
        let rest = bytes.get(usize::try_from(at).unwrap_or(usize::MAX)..).unwrap_or_default();
        let here = rest.len().min(into.len());
        into[..here].copy_from_slice(&rest[..here]);
        into[here..].fill(0);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }
}

impl WriteImage for Recorded {
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        write(&mut self.bytes.borrow_mut(), at, from);
        #[cfg(test)]
        self.changes.borrow_mut().push(Change::Write { at, bytes: from.to_vec() });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        self.changes.borrow_mut().push(Change::Sync);
        Ok(())
    }
}
