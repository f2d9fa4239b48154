//! What addresses in descriptors mean.

use crate::Buffer;
use kickless_memory::{Access, Gpa, Iova, Span, Tlb, Translated, View};

/// Pieces of a chain that are told apart: 256 MiB, if no two pages follow one another in guest memory. What comes after them leads
/// nowhere, so that the request fails; each buffer is one piece more then.
const PIECES_MAX: usize = 1 << 16;

/// Turns a driver's addresses into guest-physical ones while a chain is walked.
pub(crate) trait Space<'v> {
    /// Takes in a buffer, which is not empty; how many pieces it has. Something that leads nowhere is one too: it is for
    /// the device to find that it is not guest memory.
    fn place(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, writable: bool) -> usize;

    /// An indirect table in one piece, if it is.
    fn table(&mut self, addr: Iova, len: u32) -> Option<Span<'v>>;

    /// Copies bytes of an indirect table; whether they are guest memory.
    fn read(&mut self, addr: Iova, into: &mut [u8]) -> bool;

    /// Whether something was not there that can come yet.
    fn is_missing(&self) -> bool;

    /// Whether so much was missing that the rest need not be looked at before that has come.
    fn lacks_enough(&self) -> bool;
}

/// Without a vIOMMU they are what they say.
impl<'v> Space<'v> for &'v View {
    #[inline(always)]
    fn place(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, _: bool) -> usize {
        buffers.push(Buffer { addr: View::direct(addr), len });
        1
    }

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

    #[inline(always)]
    fn lacks_enough(&self) -> bool {
        false
    }
}

/// Behind a vIOMMU they are what the front-end says.
pub(crate) struct Translating<'v, 't> {
    pub(crate) view: &'v View,
    pub(crate) tlb: &'t mut Tlb,
}

impl Translating<'_, '_> {
    fn pieces(&mut self, addr: Iova, len: u64, access: Access, mut each: impl FnMut(Option<Gpa>, u64)) {
        self.tlb.translate(self.view.map(), addr, len, access, |to, len| match to {
            Translated::To(gpa) => each(Some(gpa), len),
            Translated::Nowhere | Translated::Missing => each(None, len),
        });
    }
}

impl<'v> Space<'v> for Translating<'v, '_> {
    #[inline]
    fn place(&mut self, buffers: &mut Vec<Buffer>, addr: Iova, len: u32, writable: bool) -> usize {
        let (before, view, mut over) = (buffers.len(), self.view, false);
        let access = if writable { Access::WRITE } else { Access::READ };
        self.pieces(addr, len.into(), access, |gpa, len| {
            // A piece is no longer than the buffer.
            let len = len as u32;
            let full = buffers.len() >= PIECES_MAX;
            match buffers.last_mut() {
                // It is this buffer's, and leads nowhere.
                Some(last) if over => last.len += len,
                _ => {
                    let addr = gpa.filter(|_| !full).unwrap_or_else(|| view.map().nowhere());
                    buffers.push(Buffer { addr, len });
                    over = full;
                }
            }
        });
        buffers.len() - before
    }

    fn table(&mut self, addr: Iova, len: u32) -> Option<Span<'v>> {
        let mut whole = None;
        self.pieces(addr, len.into(), Access::READ, |gpa, piece| {
            whole = gpa.filter(|_| piece == u64::from(len));
        });
        self.view.span(whole?, len.into())
    }

    fn read(&mut self, addr: Iova, into: &mut [u8]) -> bool {
        let (mut done, mut there, view) = (0, true, self.view);
        self.pieces(addr, into.len() as u64, Access::READ, |gpa, len| {
            let end = done + len as usize;
            there &= gpa.is_some_and(|gpa| view.read(gpa, &mut into[done..end]).is_ok());
            done = end;
        });
        there
    }

    fn is_missing(&self) -> bool {
        self.tlb.is_missing()
    }

    #[inline]
    fn lacks_enough(&self) -> bool {
        self.tlb.lacks_enough()
    }
}
