//! A queue's shape, and its areas mapped once.
#![expect(
    unsafe_code,
    reason = "island: ring entries at indices that are masked or checked, without another check of the bounds"
)]

use super::suppress::{NotificationWords, Word};
use crate::access::Access;
use crate::descriptor::Descriptor;
use crate::packed::RingPosition;
use kickless_memory::{Area, Gpa, Marks, Scattered, Unmapped, UserAddr, View};
use kickless_spec::ring::{
    Desc, EVENT_LEN, PACKED_FLAGS, PACKED_ID, PACKED_LEN, QUEUE_SIZE_MAX, RING_ENTRIES, RING_FLAGS, RING_IDX,
    UsedElem, avail_len, desc_len, used_len,
};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// An error for an invalid queue size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("queue size {size} is not {} from 1 to 32768", if *packed { "a number" } else { "a power of two" })]
pub struct InvalidSize {
    /// The size.
    pub size: u32,
    /// Whether it is for a packed ring.
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
    /// Makes the options of a split queue of `size` descriptors, with VIRTIO_F_EVENT_IDX and
    /// VIRTIO_F_INDIRECT_DESC as negotiated.
    ///
    /// # Errors
    /// `size` is not a power of two from 1 to 32768 (virtio 1.3, section 2.7).
    pub fn new(size: u16, event_idx: bool, indirect: bool) -> Result<Self, InvalidSize> {
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            return Err(InvalidSize { size: u32::from(size), packed: false });
        }
        Ok(Self { size, event_idx, indirect, packed: false, in_order: false })
    }

    /// Makes the options of a packed queue (VIRTIO_F_RING_PACKED) of `size` descriptors, with the others as
    /// negotiated.
    ///
    /// # Errors
    /// `size` is not a number from 1 to 32768 (virtio 1.3, section 2.8.10.1).
    pub fn packed(size: u16, event_idx: bool, indirect: bool) -> Result<Self, InvalidSize> {
        if size == 0 || size > QUEUE_SIZE_MAX {
            return Err(InvalidSize { size: u32::from(size), packed: true });
        }
        Ok(Self { size, event_idx, indirect, packed: true, in_order: false })
    }

    /// Sets VIRTIO_F_IN_ORDER as negotiated.
    #[must_use]
    pub fn with_in_order(self, in_order: bool) -> Self {
        Self { in_order, ..self }
    }

    /// Returns the number of descriptors in the table, and of entries in each ring.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns whether VIRTIO_F_EVENT_IDX was negotiated.
    #[inline]
    pub fn event_idx(&self) -> bool {
        self.event_idx
    }

    /// Returns whether VIRTIO_F_INDIRECT_DESC was negotiated.
    #[inline]
    pub fn indirect(&self) -> bool {
        self.indirect
    }

    /// Returns whether VIRTIO_F_RING_PACKED was negotiated.
    #[inline]
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// Returns whether VIRTIO_F_IN_ORDER was negotiated.
    #[inline]
    pub fn in_order(&self) -> bool {
        self.in_order
    }

    /// Returns the lengths of the areas: the descriptor table, the available and the used ring, or the
    /// corresponding areas of a packed ring.
    pub fn area_lens(&self) -> [usize; 3] {
        let desc = desc_len(self.size);
        match self.packed {
            true => [desc, EVENT_LEN, EVENT_LEN],
            false => [desc, avail_len(self.size, self.event_idx), used_len(self.size, self.event_idx)],
        }
    }

    /// Returns the alignments of the areas (virtio 1.3, sections 2.7 and 2.8.10.1).
    pub fn area_aligns(&self) -> [usize; 3] {
        if self.packed { [16, 4, 4] } else { [16, 2, 4] }
    }
}

/// The front-end's addresses of a queue's areas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The descriptor table, or the packed ring.
    pub desc: UserAddr,
    /// The available ring, or the packed ring's driver event suppression.
    pub avail: UserAddr,
    /// The used ring, or the packed ring's device event suppression.
    pub used: UserAddr,
    /// If set, writes to the ring are marked in the log of its view (VHOST_VRING_F_LOG). The marks of a split
    /// ring are made as if its used ring began here. A packed ring is written in places that existing
    /// front-ends do not name here, so its marks go to its own addresses.
    pub log: Option<Gpa>,
}

/// The addresses for marks of writes to a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedAt {
    /// See [`Addresses::log`].
    Gpa(Gpa),
    /// The addresses of the ring itself, piece by piece.
    InPlace,
}

/// The addresses of the device's parts of a ring in the log.
#[derive(Clone, Copy, Debug)]
struct Logged {
    /// Whether these are the addresses of the ring itself. They are then those of the first bytes.
    in_place: bool,
    /// The descriptors of a packed ring.
    desc: Gpa,
    /// The used ring, or the packed ring's device event suppression.
    used: Gpa,
}

/// A queue's areas at their present addresses.
#[derive(Debug)]
pub struct Metadata(pub(super) Kind);

/// The kind of access to the areas.
#[derive(Debug)]
pub(super) enum Kind {
    /// Translated once. Accesses are direct until the memory behind them changes.
    Mapped(Areas<Area>),
    /// An area is not contiguous. Accesses to all of them are translated.
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
    /// - An area is not in guest memory.
    /// - An area is not aligned to 16, 2 and 4 bytes, or 16, 4 and 4 in a packed ring (virtio 1.3, sections
    ///   2.7 and 2.8.10.1).
    /// - An area crosses from one slot to the next within a 16-bit field.
    /// - The addresses for the log are not guest memory.
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
        // If an area has another error, mapping it in pieces returns that error.
        let scattered = Areas::make(view, addresses, log, options, |user, len, align| {
            match user.0.is_multiple_of(align as u64) {
                true => Ok((Scattered::new(view, user, len)?, map.gpa_of(user))),
                false => Err(why),
            }
        });
        Ok(Self(Kind::Scattered(scattered?)))
    }

    /// Does the same as [`Metadata::map`] for areas that consist of consecutive pieces of the front-end's
    /// memory. That is the form in which a vIOMMU translates areas. If an area has several pieces, all marks
    /// go to the addresses of the ring itself.
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
        // In a valid ring, different areas never begin at the same address. In another ring, this takes the
        // pieces of the first area. That harms only the guest, and the length is checked below.
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

    /// Returns whether accesses are direct, because each area is contiguous.
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Kind::Mapped(_))
    }
}

impl<A> Areas<A> {
    /// Returns areas that a test has made, in which writes are marked.
    #[cfg(test)]
    pub(super) fn of([desc, avail, used]: [A; 3], options: Options) -> Self {
        let logged = Some(Logged { in_place: true, desc: Gpa(0), used: Gpa(0) });
        Self { desc, avail, used, options, logged }
    }

    /// Makes each area by `make`, from its address, length and alignment. `make` also returns the area's
    /// guest-physical address.
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
    /// Returns the options for which the areas are long enough.
    #[inline]
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Reads descriptor `index`, modulo the size, once.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Descriptor {
        let at = size_of::<Desc>() * usize::from(index & self.mask());
        // SAFETY:
        // - `desc` was made `desc_len(size)` long, and a masked index is smaller than the size;
        // - it starts at a multiple of 16, and so does each descriptor.
        Descriptor::new(unsafe { self.desc.load_words_unchecked(at) })
    }

    /// Prefetches descriptor `index`, modulo the size.
    #[inline]
    pub(super) fn prefetch_descriptor(&self, index: u16) {
        self.desc.prefetch(size_of::<Desc>() * usize::from(index & self.mask()));
    }

    /// Loads the entry of the avail ring at `index`, modulo the size.
    #[inline]
    pub(super) fn avail_entry(&self, index: u16) -> u16 {
        let at = RING_ENTRIES + 2 * usize::from(index & self.mask());
        // Relaxed: the load of avail.idx with acquire orders it.
        // SAFETY:
        // - `avail` was made at least `avail_len(size)` long, and a masked index is smaller than the size;
        // - it starts at an even address, and so does each entry.
        unsafe { self.avail.load_unchecked(at) }
    }

    /// Prefetches the used element at `index`, modulo the size, which is written soon.
    #[inline]
    pub(super) fn prefetch_used_elem(&self, index: u16) {
        let at = RING_ENTRIES + size_of::<UsedElem>() * usize::from(index & self.mask());
        self.used.prefetch_for_write(at);
    }

    /// Reads the used element at `index`, modulo the size.
    pub(super) fn used_elem(&self, index: u16) -> UsedElem {
        self.used.read(RING_ENTRIES + size_of::<UsedElem>() * usize::from(index & self.mask()))
    }

    /// Writes the used element at `index`, modulo the size.
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
        self.mark_used(self.locate(word).1, size_of::<u16>(), marks);
    }

    /// Marks the descriptor at a position of a packed ring.
    #[inline]
    pub(super) fn mark_descriptor(&self, position: RingPosition, marks: &mut Marks) {
        let Some(Logged { desc, .. }) = self.logged else { return };
        self.desc.mark(desc, position.at(), size_of::<Desc>(), marks);
    }

    /// Marks the packed ring's device event suppression.
    #[inline]
    pub(super) fn mark_event(&self, marks: &mut Marks) {
        let Some(Logged { used, .. }) = self.logged else { return };
        self.used.mark(used, 0, EVENT_LEN, marks);
    }

    /// Returns the packed ring's descriptors.
    #[inline]
    pub(super) fn ring(&self) -> &A {
        &self.desc
    }

    /// Returns the packed ring's event suppression structures, the driver's and ours.
    #[inline]
    pub(super) fn events(&self) -> (&A, &A) {
        (&self.avail, &self.used)
    }

    /// Reads the descriptor at a position of a packed ring once. Its `next` is the chain's id.
    #[inline]
    pub(crate) fn packed_descriptor(&self, position: RingPosition) -> Descriptor {
        Descriptor::from_packed(self.packed_words(position))
    }

    /// Reads the descriptor at a position of a packed ring, if it is available there. Its `next` is the
    /// chain's id.
    #[inline]
    pub(super) fn available_descriptor(&self, position: RingPosition) -> Option<Descriptor> {
        let at = self.packed_at(position) + PACKED_FLAGS;
        // SAFETY: as in `packed_words`. The flags are the last two of the descriptor's 16 bytes, at an even
        // address.
        let flags = unsafe { self.desc.load_unchecked(at) };
        if !position.is_available(flags) {
            return None;
        }
        // The descriptor, and the driver's writes to the buffer, are read after the flags. Its partner is the
        // driver's release.
        fence(Ordering::Acquire);
        Some(self.packed_descriptor(position))
    }

    /// Prefetches the descriptor `count` after a position of a packed ring, unless the ring wraps before it.
    #[inline]
    pub(super) fn prefetch_packed(&self, position: RingPosition, count: usize) {
        self.desc.prefetch(position.at() + count * size_of::<Desc>());
    }

    /// Does the same as [`Areas::prefetch_packed`] for a descriptor that is overwritten soon.
    #[inline]
    pub(super) fn prefetch_packed_for_write(&self, position: RingPosition, count: usize) {
        self.desc.prefetch_for_write(position.at() + count * size_of::<Desc>());
    }

    /// Reads the two words of the descriptor at a position of a packed ring, each once.
    #[inline]
    pub(super) fn packed_words(&self, position: RingPosition) -> [u64; 2] {
        let at = self.packed_at(position);
        // SAFETY:
        // - `desc` was made `desc_len(size)` long, and the index is smaller than the size;
        // - it starts at a multiple of 16, and so does each descriptor.
        unsafe { self.desc.load_words_unchecked(at) }
    }

    /// Writes length and id of a used element over the descriptor at a position of a packed ring. Its flags
    /// stay as they are.
    #[inline]
    pub(super) fn set_packed_used(&self, position: RingPosition, len: u32, id: u16) {
        let at = self.packed_at(position);
        // SAFETY: `desc` was made `desc_len(size)` long, the index is smaller than the size, and both fields
        // are in the 16 bytes of a descriptor.
        unsafe {
            self.desc.write_unchecked(at + PACKED_LEN, &len.to_le());
            self.desc.write_unchecked(at + PACKED_ID, &id.to_le());
        }
    }

    /// Writes length, id and flags of a used element over the descriptor at a position of a packed ring, in
    /// one store.
    #[inline]
    pub(super) fn set_packed_used_and_flags(&self, position: RingPosition, len: u32, id: u16, flags: u16) {
        let at = self.packed_at(position);
        let word = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
        // SAFETY: `desc` was made `desc_len(size)` long, the index is smaller than the size, and the last
        // eight of the 16 bytes of a descriptor are length, id and flags.
        unsafe { self.desc.write_unchecked(at + PACKED_LEN, &word.to_le()) }
    }

    /// Returns the offset of the descriptor at a position of a packed ring.
    ///
    /// # Panics
    /// Panics if the position is not in the ring. Positions come from our own arithmetic, never from the
    /// guest.
    #[inline(always)]
    fn packed_at(&self, position: RingPosition) -> usize {
        assert!(position.index < self.options.size, "position beyond the packed ring");
        position.at()
    }

    #[inline]
    fn mask(&self) -> u16 {
        self.options.size - 1
    }

    /// Returns the area that holds a word, and the word's offset.
    #[inline(always)]
    fn locate(&self, word: Word) -> (&A, usize) {
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
impl<A: Access> NotificationWords for Areas<A> {
    #[inline(always)]
    fn load(&self, word: Word, order: Ordering) -> u16 {
        let (area, offset) = self.locate(word);
        area.load(offset, order)
    }

    #[inline(always)]
    fn store(&self, word: Word, value: u16, order: Ordering) {
        let (area, offset) = self.locate(word);
        area.store(offset, value, order);
    }

    #[inline(always)]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

const _: () = assert!(size_of::<Desc>() == 16 && size_of::<UsedElem>() == 8);
