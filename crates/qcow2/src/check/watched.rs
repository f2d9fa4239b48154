//! Tells how far a repair is.

use super::image::{ReadImage, WriteImage};
use std::cell::{Cell, RefCell};
use std::io;

/// An image that reports the number of bytes that were read.
pub(super) struct Watched<'a, I> {
    image: &'a I,
    read: Cell<u64>,
    expected: Cell<u64>,
    progress: RefCell<&'a mut dyn FnMut(u64, u64)>,
}

impl<'a, I> Watched<'a, I> {
    pub(super) fn new(image: &'a I, progress: &'a mut dyn FnMut(u64, u64)) -> Self {
        Self { image, read: Cell::new(0), expected: Cell::new(0), progress: RefCell::new(progress) }
    }

    /// Expects that many bytes to be read from now on, and starts to report.
    pub(super) fn expect(&self, bytes: u64) {
        self.read.set(0);
        self.expected.set(bytes);
    }
}

impl<I: ReadImage> ReadImage for Watched<'_, I> {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.read.set(self.read.get().saturating_add(into.len() as u64));
        let expected = self.expected.get();
        if expected > 0 {
            (self.progress.borrow_mut())(self.read.get().min(expected), expected);
        }
        self.image.read(at, into)
    }

    fn bytes(&self) -> u64 {
        self.image.bytes()
    }
}

impl<I: WriteImage> WriteImage for Watched<'_, I> {
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.image.write(at, from)
    }

    fn sync(&self) -> io::Result<()> {
        self.image.sync()
    }
}
