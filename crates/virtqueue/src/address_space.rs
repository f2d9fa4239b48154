//! Translates the addresses in descriptors.

use crate::Buffer;
use crate::progress::{Described, Progress, TablePiece};
use kickless_memory::{Access, Gpa, Iova, Span, Tlb, Translated, View};

/// Translates a driver's addresses into guest-physical ones while a chain is walked.
pub(crate) trait AddressSpace<'v> {
    /// Adds a buffer, which is not empty. It need not be guest memory; the device checks this later.
    fn add_buffer(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, writable: bool);

    /// Ends the walk of a valid chain, which has `len` bytes. If [`AddressSpace::add_buffer`] has not added
    /// the buffers yet, translates them, adds them to `buffers`, and sets `readable` to the number of
    /// readable ones.
    fn finish(&mut self, buffers: &mut Vec<Buffer>, readable: &mut usize, len: u64);

    /// Begins an indirect table. Returns all of it if it is contiguous in guest memory.
    fn table(&mut self, addr: Iova, len: u32) -> Option<Span<'v>>;

    /// Copies bytes of the indirect table that [`AddressSpace::table`] began last. Returns whether they are
    /// guest memory.
    fn read(&mut self, addr: Iova, into: &mut [u8]) -> bool;

    /// Prefetches a line of guest memory, to write to it soon.
    fn prefetch_for_write(&self, gpa: Gpa);

    /// Returns whether the chain cannot be popped yet: a translation is missing and may still come, or the
    /// chain needs more translations than one pop may do.
    fn is_missing(&self) -> bool;
}

/// Without a vIOMMU, addresses are guest-physical ones.
impl<'v> AddressSpace<'v> for &'v View {
    #[inline(always)]
    fn add_buffer(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, _: bool) {
        buffers.push(Buffer { addr: View::direct(addr), len });
    }

    #[inline(always)]
    fn finish(&mut self, _: &mut Vec<Buffer>, _: &mut usize, _: u64) {}

    #[inline(always)]
    fn table(&mut self, addr: Iova, len: u32) -> Option<Span<'v>> {
        View::span(self, View::direct(addr), len.into())
    }

    fn read(&mut self, addr: Iova, into: &mut [u8]) -> bool {
        View::read(self, View::direct(addr), into).is_ok()
    }

    #[inline(always)]
    fn prefetch_for_write(&self, gpa: Gpa) {
        View::prefetch_for_write(self, gpa);
    }

    #[inline(always)]
    fn is_missing(&self) -> bool {
        false
    }
}

/// Behind a vIOMMU, the front-end translates addresses. Buffers are translated after the whole chain is read:
/// see [`crate::progress`].
pub(crate) struct Translating<'v, 't> {
    pub(crate) view: &'v View,
    pub(crate) tlb: &'t mut Tlb,
    pub(crate) progress: &'t mut Progress,
}

impl<'v> AddressSpace<'v> for Translating<'v, '_> {
    #[inline]
    fn add_buffer(&mut self, _: &mut Vec<Buffer>, addr: Iova, len: u32, writable: bool) {
        self.progress.describe(Described { addr, len, writable });
    }

    fn finish(&mut self, buffers: &mut Vec<Buffer>, readable: &mut usize, len: u64) {
        if !self.tlb.is_missing() {
            self.progress.translate(self.view.map(), self.tlb, len, (buffers, readable));
        }
    }

    fn table(&mut self, addr: Iova, len: u32) -> Option<Span<'v>> {
        let pieces = self.progress.table_pieces(addr);
        let mut end = 0;
        self.tlb.translate(self.view.map(), addr, len.into(), Access::READ, |to, len| {
            end += len;
            let to = if let Translated::To(gpa) = to { Some(gpa) } else { None };
            pieces.push(TablePiece { len, end, to });
        });
        match pieces[..] {
            [TablePiece { to: Some(gpa), .. }] => self.view.span(gpa, len.into()),
            _ => None,
        }
    }

    fn read(&mut self, addr: Iova, into: &mut [u8]) -> bool {
        self.progress.read_table(self.view, addr, into)
    }

    fn prefetch_for_write(&self, gpa: Gpa) {
        self.view.prefetch_for_write(gpa);
    }

    fn is_missing(&self) -> bool {
        self.tlb.is_missing() || self.progress.is_unfinished()
    }
}
