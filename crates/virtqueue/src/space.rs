//! What addresses in descriptors mean.

use crate::Buffer;
use crate::progress::{Described, Progress, TablePiece};
use kickless_memory::{Access, Iova, Span, Tlb, Translated, View};

/// Turns a driver's addresses into guest-physical ones while a chain is walked.
pub(crate) trait Space<'v> {
    /// Takes in a buffer, which is not empty; how many pieces it has. Something that leads nowhere is one too: it is for
    /// the device to find that it is not guest memory.
    fn place(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, writable: bool) -> usize;

    /// Ends the walk of a chain with nothing wrong in it, which has `len` bytes. Puts into `buffers` what [`Space::place`] has
    /// held back, and adds the readable pieces among that to `readable`.
    fn finish(&mut self, buffers: &mut Vec<Buffer>, readable: &mut usize, len: u64);

    /// Takes in an indirect table. Returns it whole if it is in one piece of guest memory.
    fn table(&mut self, addr: Iova, len: u32) -> Option<Span<'v>>;

    /// Copies bytes of the indirect table that [`Space::table`] took in last. Returns whether they are guest memory.
    fn read(&mut self, addr: Iova, into: &mut [u8]) -> bool;

    /// Whether the chain is not whole: something was not there that can come yet, or there is more to translate than is
    /// translated at a time.
    fn is_missing(&self) -> bool;
}

/// Without a vIOMMU they are what they say.
impl<'v> Space<'v> for &'v View {
    #[inline(always)]
    fn place(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, _: bool) -> usize {
        buffers.push(Buffer { addr: View::direct(addr), len });
        1
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
    fn is_missing(&self) -> bool {
        false
    }
}

/// Behind a vIOMMU they are what the front-end says. Buffers are translated when the whole chain has been read: see
/// [`crate::progress`].
pub(crate) struct Translating<'v, 't> {
    pub(crate) view: &'v View,
    pub(crate) tlb: &'t mut Tlb,
    pub(crate) progress: &'t mut Progress,
}

impl<'v> Space<'v> for Translating<'v, '_> {
    #[inline]
    fn place(&mut self, _: &mut Vec<Buffer>, addr: Iova, len: u32, writable: bool) -> usize {
        self.progress.describe(Described { addr, len, writable });
        0
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

    fn is_missing(&self) -> bool {
        self.tlb.is_missing() || self.progress.is_unfinished()
    }
}
