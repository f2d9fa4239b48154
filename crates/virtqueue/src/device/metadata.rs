//! A queue's shape, and its areas mapped once.
#![expect(
    unsafe_code,
    reason = "island: ring entries at masked indices, without a second look at the bounds"
)]

use super::suppress::{Cells, Word};
use crate::access::Access;
use crate::descriptor::Descriptor;
use crate::packed::Place;
use kickless_memory::{Area, Gpa, Marks, Scattered, Unmapped, UserAddr, View};
use kickless_spec::ring::{
    Desc, EVENT_LEN, QUEUE_SIZE_MAX, RING_ENTRIES, RING_FLAGS, RING_IDX, UsedElem, avail_len, desc_len,
    used_len,
};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A queue size that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("queue size {size} is not {} from 1 to 32768", if *packed { "a number" } else { "a power of two" })]
pub struct InvalidSize {
    /// The size.
    pub size: u32,
    /// Of a packed ring.
    pub packed: bool,
}

/// The shape of a queue, fixed while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    size: u16,
    event_idx: bool,
    indirect: bool,
    packed: bool,
    in_order: bool,
}

impl Options {
    /// A split queue of `size` descriptors, with VIRTIO_F_EVENT_IDX and VIRTIO_F_INDIRECT_DESC as negotiated.
    ///
    /// # Errors
    /// `size` is not a power of two from 1 to 32768 (virtio 1.3, section 2.7).
    pub fn new(size: u16, event_idx: bool, indirect: bool) -> Result<Self, InvalidSize> {
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            return Err(InvalidSize { size: u32::from(size), packed: false });
        }
        Ok(Self { size, event_idx, indirect, packed: false, in_order: false })
    }

    /// A packed queue (VIRTIO_F_RING_PACKED) of `size` descriptors, with the others as negotiated.
    ///
    /// # Errors
    /// `size` is not a number from 1 to 32768 (virtio 1.3, section 2.8.10.1).
    pub fn packed(size: u16, event_idx: bool, indirect: bool) -> Result<Self, InvalidSize> {
        if size == 0 || size > QUEUE_SIZE_MAX {
            return Err(InvalidSize { size: u32::from(size), packed: true });
        }
        Ok(Self { size, event_idx, indirect, packed: true, in_order: false })
    }

    /// The same with VIRTIO_F_IN_ORDER as negotiated.
    #[must_use]
    pub fn with_in_order(self, in_order: bool) -> Self {
        Self { in_order, ..self }
    }

    /// Descriptors in the table, and entries in each ring.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    #[inline]
    pub fn event_idx(&self) -> bool {
        self.event_idx
    }

    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    #[inline]
    pub fn indirect(&self) -> bool {
        self.indirect
    }

    /// Whether VIRTIO_F_RING_PACKED was negotiated.
    #[inline]
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// Whether VIRTIO_F_IN_ORDER was negotiated.
    #[inline]
    pub fn in_order(&self) -> bool {
        self.in_order
    }

    /// How long the areas are: the descriptor table, the available and the used ring, or what a packed ring has in their
    /// places.
    pub fn area_lens(&self) -> [usize; 3] {
        let desc = desc_len(self.size);
        match self.packed {
            true => [desc, EVENT_LEN, EVENT_LEN],
            false => [desc, avail_len(self.size, self.event_idx), used_len(self.size, self.event_idx)],
        }
    }

    /// How they are aligned (virtio 1.3, sections 2.7 and 2.8.10.1).
    pub fn area_aligns(&self) -> [usize; 3] {
        if self.packed { [16, 4, 4] } else { [16, 2, 4] }
    }
}

/// Where the front-end says a queue's areas are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The descriptor table, or the packed ring.
    pub desc: UserAddr,
    /// The available ring, or the packed ring's driver event suppression.
    pub avail: UserAddr,
    /// The used ring, or the packed ring's device event suppression.
    pub used: UserAddr,
    /// What is written to the ring is marked in the log of its view (VHOST_VRING_F_LOG): of a split ring, as if its used ring
    /// began here. A packed ring is written in other places than the front-ends that exist name here; its marks go to where it
    /// lies.
    pub log: Option<Gpa>,
}

/// What to mark in the log for what is written to a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedAt {
    /// See [`Addresses::log`].
    Gpa(Gpa),
    /// Where it lies, piece by piece.
    InPlace,
}

/// Where the parts of a ring that the device writes are in the log.
#[derive(Clone, Copy, Debug)]
struct Logged {
    /// They are where they lie; the addresses are those of their first bytes.
    in_place: bool,
    /// The descriptors of a packed ring.
    desc: Gpa,
    /// The used ring, or the packed ring's device event suppression.
    used: Gpa,
}

/// A queue's areas, where they are now.
#[derive(Debug)]
pub struct Metadata(pub(super) Kind);

/// How they are reached.
#[derive(Debug)]
pub(super) enum Kind {
    /// Translated once, and read and written directly until the memory behind them changes.
    Mapped(Areas<Area>),
    /// One of them is not in one piece: all are translated at each access.
    Scattered(Areas<Scattered>),
}

/// The three areas of a queue.
#[derive(Debug)]
pub(crate) struct Areas<A> {
    desc: A,
    avail: A,
    used: A,
    options: Options,
    logged: Option<Logged>,
}

impl Metadata {
    /// Translates `addresses` for a queue of this shape.
    ///
    /// # Errors
    /// An area that is not in guest memory, or not aligned as virtio 1.3, sections 2.7 and 2.8.10.1 ask (16, 2 and 4
    /// bytes, or 16, 4 and 4), or one that crosses from one slot to the next within a 16-bit field; a place for the log that is
    /// not guest memory.
    pub fn map(view: &Arc<View>, addresses: &Addresses, options: &Options) -> Result<Self, Unmapped> {
        Self::map_logged(view, addresses, addresses.log.map(LoggedAt::Gpa), options)
    }

    fn map_logged(
        view: &Arc<View>,
        addresses: &Addresses,
        log: Option<LoggedAt>,
        options: &Options,
    ) -> Result<Self, Unmapped> {
        let map = view.map();
        let mapped = Areas::make(view, addresses, log, options, |user, len, align| {
            let area = map.area(user, len, align)?;
            let gpa = map.gpa_of_area(&area);
            Ok((area, gpa))
        });
        let why = match mapped {
            Ok(areas) => return Ok(Self(Kind::Mapped(areas))),
            Err(why) => why,
        };
        // What else may be wrong with an area in one piece is wrong with it in pieces too.
        let scattered = Areas::make(view, addresses, log, options, |user, len, align| {
            match user.0.is_multiple_of(align as u64) {
                true => Ok((Scattered::new(view, user, len)?, map.gpa_of(user))),
                false => Err(why),
            }
        });
        Ok(Self(Kind::Scattered(scattered?)))
    }

    /// As [`Metadata::map`], but each area is in pieces of the front-end's memory, one after the other: what a vIOMMU makes of
    /// an area that is in one piece for the device. If one is in several pieces, all is marked in the log where it lies.
    ///
    /// # Errors
    /// As [`Metadata::map`].
    pub fn map_pieces(
        view: &Arc<View>,
        areas: &[Vec<(UserAddr, usize)>; 3],
        log: Option<LoggedAt>,
        options: &Options,
    ) -> Result<Self, Unmapped> {
        let first = |area: &Vec<(UserAddr, usize)>| area.first().map_or(UserAddr(0), |(user, _)| *user);
        let [desc, avail, used] = areas.each_ref().map(first);
        let addresses = Addresses { desc, avail, used, log: None };
        if areas.iter().all(|area| area.len() == 1) {
            return Self::map_logged(view, &addresses, log, options);
        }
        // No two areas that differ begin at the same address.
        let pieces_of = |user| areas.iter().find(|area| first(area) == user);
        let log = log.map(|_| LoggedAt::InPlace);
        let scattered = Areas::make(view, &addresses, log, options, |user, len, align| {
            let unmapped = Unmapped { addr: user.0, len: len as u64 };
            let pieces = pieces_of(user).filter(|_| user.0.is_multiple_of(align as u64)).ok_or(unmapped)?;
            let scattered = Scattered::from_pieces(view, pieces)?;
            (scattered.len() == len).then_some(()).ok_or(unmapped)?;
            Ok((scattered, view.map().gpa_of(user)))
        });
        Ok(Self(Kind::Scattered(scattered?)))
    }

    /// Whether accesses go straight to the areas, for each is in one piece.
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Kind::Mapped(_))
    }
}

impl<A> Areas<A> {
    /// Areas that a test has made, in which writes are marked.
    #[cfg(test)]
    pub(super) fn of([desc, avail, used]: [A; 3], options: Options) -> Self {
        let logged = Some(Logged { in_place: true, desc: Gpa(0), used: Gpa(0) });
        Self { desc, avail, used, options, logged }
    }

    /// Has each area made, by its address, length and alignment; with it comes where it begins in guest memory.
    fn make(
        view: &View,
        addresses: &Addresses,
        log: Option<LoggedAt>,
        options: &Options,
        make: impl Fn(UserAddr, usize, usize) -> Result<(A, Option<Gpa>), Unmapped>,
    ) -> Result<Self, Unmapped> {
        let (lens, aligns) = (options.area_lens(), options.area_aligns());
        let (desc, desc_gpa) = make(addresses.desc, lens[0], aligns[0])?;
        let (avail, _) = make(addresses.avail, lens[1], aligns[1])?;
        let (used, used_gpa) = make(addresses.used, lens[2], aligns[2])?;
        let logged = match log {
            None => None,
            Some(LoggedAt::Gpa(gpa)) if !options.packed => {
                let (addr, len) = (gpa.0, lens[2] as u64);
                view.map().contains(gpa, len).then_some(()).ok_or(Unmapped { addr, len })?;
                Some(Logged { in_place: false, desc: gpa, used: gpa })
            }
            Some(_) => desc_gpa.zip(used_gpa).map(|(desc, used)| Logged { in_place: true, desc, used }),
        };
        Ok(Self { desc, avail, used, options: *options, logged })
    }
}

impl<A: Access> Areas<A> {
    /// The shape that the areas are long enough for.
    #[inline]
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Descriptor `index`, modulo the size, read once.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Descriptor {
        let at = size_of::<Desc>() * usize::from(index & self.mask());
        // SAFETY:
        // - `desc` was made `desc_len(size)` long, and a masked index is smaller than the size;
        // - it starts at a multiple of 16, and so does each descriptor.
        Descriptor::new(unsafe { self.desc.load_words_unchecked(at) })
    }

    /// The entry of the avail ring at `index`, modulo the size.
    #[inline]
    pub(super) fn avail_entry(&self, index: u16) -> u16 {
        let at = RING_ENTRIES + 2 * usize::from(index & self.mask());
        // Relaxed: the acquiring load of avail.idx has put it in order.
        // SAFETY:
        // - `avail` was made at least `avail_len(size)` long, and a masked index is smaller than the size;
        // - it starts at an even address, and so does each entry.
        unsafe { self.avail.load_unchecked(at) }
    }

    /// The used element at `index`, modulo the size.
    pub(super) fn used_elem(&self, index: u16) -> UsedElem {
        self.used.read(RING_ENTRIES + size_of::<UsedElem>() * usize::from(index & self.mask()))
    }

    /// Fills the used element at `index`, modulo the size.
    #[inline]
    pub(super) fn set_used_elem(&self, index: u16, elem: &UsedElem) {
        let at = RING_ENTRIES + size_of::<UsedElem>() * usize::from(index & self.mask());
        // SAFETY: `used` was made at least `used_len(size)` long, and a masked index is smaller than the
        // size.
        unsafe { self.used.write_unchecked(at, elem) }
    }

    /// Marks `count` used elements from `first` on, modulo the size.
    #[inline]
    pub(super) fn mark_used_elems(&self, first: u16, count: u16, marks: &mut Marks) {
        if self.logged.is_none() {
            return;
        }
        let start = first & self.mask();
        let here = count.min(self.options.size - start);
        for (at, count) in [(start, here), (0, count - here)] {
            let at = RING_ENTRIES + size_of::<UsedElem>() * usize::from(at);
            self.mark_used(at, usize::from(count) * size_of::<UsedElem>(), marks);
        }
    }

    /// Marks bytes of a split ring's used ring.
    #[inline(always)]
    fn mark_used(&self, at: usize, len: usize, marks: &mut Marks) {
        match self.logged {
            None => {}
            Some(Logged { in_place: true, used, .. }) => self.used.mark(used, at, len, marks),
            Some(Logged { used, .. }) => marks.wrote(Gpa(used.0 + at as u64), len as u64),
        }
    }

    /// Marks a word of the used ring.
    #[inline]
    pub(super) fn mark_word(&self, word: Word, marks: &mut Marks) {
        self.mark_used(self.place(word).1, size_of::<u16>(), marks);
    }

    /// Marks the descriptor at a place of a packed ring.
    #[inline]
    pub(super) fn mark_descriptor(&self, place: Place, marks: &mut Marks) {
        let Some(Logged { desc, .. }) = self.logged else { return };
        self.desc.mark(desc, place.at(), size_of::<Desc>(), marks);
    }

    /// Marks the packed ring's device event suppression.
    #[inline]
    pub(super) fn mark_event(&self, marks: &mut Marks) {
        let Some(Logged { used, .. }) = self.logged else { return };
        self.used.mark(used, 0, EVENT_LEN, marks);
    }

    /// The packed ring's descriptors.
    #[inline]
    pub(super) fn ring(&self) -> &A {
        &self.desc
    }

    /// The packed ring's event suppression structures, the driver's and ours.
    #[inline]
    pub(super) fn events(&self) -> (&A, &A) {
        (&self.avail, &self.used)
    }

    /// The descriptor at a place of a packed ring, read once; its `next` is the chain's id.
    #[inline]
    pub(crate) fn packed_descriptor(&self, place: Place) -> Descriptor {
        Descriptor::from_packed_le(self.desc.read(place.at()))
    }

    /// The two words of the descriptor at a place of a packed ring, read once.
    #[inline]
    pub(super) fn packed_words(&self, place: Place) -> [u64; 2] {
        self.desc.read::<[u64; 2]>(place.at()).map(u64::from_le)
    }

    #[inline]
    fn mask(&self) -> u16 {
        self.options.size - 1
    }

    /// The area that holds a word, and where.
    #[inline(always)]
    fn place(&self, word: Word) -> (&A, usize) {
        match word {
            Word::AvailFlags => (&self.avail, RING_FLAGS),
            Word::AvailIdx => (&self.avail, RING_IDX),
            Word::UsedEvent => (&self.avail, avail_len(self.options.size, false)),
            Word::UsedFlags => (&self.used, RING_FLAGS),
            Word::UsedIdx => (&self.used, RING_IDX),
            Word::AvailEvent => (&self.used, used_len(self.options.size, false)),
        }
    }
}

/// The event words exist only with EVENT_IDX.
impl<A: Access> Cells for Areas<A> {
    #[inline(always)]
    fn load(&self, word: Word, order: Ordering) -> u16 {
        let (area, offset) = self.place(word);
        area.load(offset, order)
    }

    #[inline(always)]
    fn store(&self, word: Word, value: u16, order: Ordering) {
        let (area, offset) = self.place(word);
        area.store(offset, value, order);
    }

    #[inline(always)]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

const _: () = assert!(size_of::<Desc>() == 16 && size_of::<UsedElem>() == 8);
