//! The slots, and the lock for changes.
#![expect(unsafe_code, reason = "island: entries are reached by addresses in lists")]

use crate::bounds::SLOTS;
use crate::entry::Entry;
use crate::epoch::Epochs;
use crate::error::Error;
use crate::level::{END, LEAF_MAX, PAGE, size};
use crate::log::Log;
use crate::node::Node;
use crate::node_pool::NodePool;
use crate::rmap::{Blocks, List};
use crate::slot_rmap::SlotRmap;
use crate::tree::{Tree, unsplit};
use kickless_memory::{Gpa, Slot};
use kickless_sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use kickless_sync::{Mutex, lock};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Guest memory with translation tables, a reverse map and a dirty log: slots, and the spaces that map them.
///
/// A thread that reads or writes has a [`crate::Writer`]. Writers take no lock that a change or a harvest
/// holds while it waits.
///
/// # Lock order
/// 1. `harvests`: harvests take turns, and the log is turned on and off between them.
/// 2. `control`: slots, mappings and the log change one after the other.
///
/// Both are held while their holder waits for the writers. So a thread must not request a change or a harvest
/// within a section of its own: see [`crate::Writer::offline`].
pub struct Mmu {
    pub(crate) slots: Box<[SlotWords]>,
    pub(crate) epochs: Epochs,
    pub(crate) nodes: NodePool,
    /// The direct space, in which an address is a guest-physical one.
    pub(crate) direct: Tree,
    pub(crate) harvests: Mutex<()>,
    pub(crate) control: Mutex<Control>,
}

/// The properties of a slot that writers need.
///
/// They are set before the first leaf that names the slot. They are not set again until all writers were
/// waited for after the last such leaf.
pub(crate) struct SlotWords {
    pub(crate) gpa: AtomicU64,
    pub(crate) len: AtomicU64,
    pub(crate) host: AtomicPtr<u8>,
    /// Null if the slot is not logged. Freed after a wait for all writers.
    pub(crate) log: AtomicPtr<Log>,
}

/// The state that the lock for changes protects.
pub(crate) struct Control {
    pub(crate) slots: Vec<Option<Arc<MappedSlot>>>,
    pub(crate) blocks: Blocks,
    /// Empty tables that a leaf has replaced. The next wait for the writers gives them back.
    pub(crate) garbage: Garbage,
}

pub(crate) struct MappedSlot {
    /// A slot and its reverse map.
    pub(crate) slot: Slot,
    pub(crate) rmap: SlotRmap,
}

/// Tables that are out of use. They are given back after a wait for all writers.
#[derive(Default)]
pub(crate) struct Garbage(Vec<NonNull<Node>>);

// SAFETY: only writers that have not passed a quiescent point since can still use the tables in it.
unsafe impl Send for Garbage {}

impl Garbage {
    pub(crate) fn push(&mut self, node: NonNull<Node>) {
        self.0.push(node);
    }

    /// # Safety
    /// Gives the tables back to the pool.
    ///
    /// All writers were waited for after the last [`Garbage::push`].
    pub(crate) unsafe fn give_back(self, nodes: &NodePool) {
        for node in self.0 {
            // SAFETY: no entry leads to it, and no writer that found it before is in the same section.
            unsafe { nodes.give(node) };
        }
    }
}

impl Mmu {
    /// Makes an MMU without slots.
    pub fn new() -> Arc<Self> {
        let nodes = NodePool::new();
        let words = || SlotWords {
            gpa: AtomicU64::new(0),
            len: AtomicU64::new(0),
            host: AtomicPtr::new(null_mut()),
            log: AtomicPtr::new(null_mut()),
        };
        Arc::new(Self {
            slots: (0..SLOTS).map(|_| words()).collect(),
            epochs: Epochs::new(),
            direct: Tree::new(&nodes),
            nodes,
            harvests: Mutex::new(()),
            control: Mutex::new(Control {
                slots: vec![const { None }; SLOTS],
                blocks: Blocks::default(),
                garbage: Garbage::default(),
            }),
        })
    }

    /// Adds a slot, and maps it in the direct space.
    ///
    /// # Errors
    /// The slot is not whole pages of 4 KiB, ends above 256 TiB, or overlaps another one; or there are too
    /// many slots.
    pub fn add(&self, slot: Slot) -> Result<(), Error> {
        let (gpa, len) = (slot.gpa(), slot.len());
        check_range(gpa.0, len)?;
        let mut control = lock(&self.control);
        let control = &mut *control;
        let overlaps = |other: &&Arc<MappedSlot>| {
            other.slot.gpa().0 < gpa.0 + len && gpa.0 < other.slot.gpa().0 + other.slot.len()
        };
        if let Some(other) = control.slots.iter().flatten().find(overlaps) {
            return Err(Error::Overlaps { gpa, other: other.slot.gpa() });
        }
        let index = control.slots.iter().position(Option::is_none).ok_or(Error::TooMany)?;
        let words = &self.slots[index];
        words.gpa.store(gpa.0, Ordering::Relaxed);
        words.len.store(len, Ordering::Relaxed);
        words.host.store(slot.mapping().base().as_ptr(), Ordering::Relaxed);
        control.slots[index] = Some(Arc::new(MappedSlot { slot, rmap: SlotRmap::new(gpa, len) }));
        self.map_pieces(control, &self.direct, gpa.0, gpa, len, true);
        Ok(())
    }

    /// Removes the slot that begins at `gpa` from all spaces.
    ///
    /// Waits for a quiescent point of every writer. After that no writer uses the memory. A [`Slot`] or an
    /// [`kickless_memory::Iov`] of it (input and output in flight) still keeps it mapped in this process.
    ///
    /// # Errors
    /// There is no such slot, or it is being logged.
    pub fn remove(&self, gpa: Gpa) -> Result<Slot, Error> {
        let mut control = lock(&self.control);
        let control = &mut *control;
        let (index, state) = control.find(gpa)?;
        let words = &self.slots[index];
        if !words.log.load(Ordering::Relaxed).is_null() {
            return Err(Error::Logged { gpa });
        }
        let mut garbage = Garbage::default();
        state.rmap.each(|_, list| {
            let mut found = Vec::new();
            // SAFETY: the blocks live as long as `self`.
            unsafe { list.walk(|at| found.push(at)) };
            for at in found {
                // SAFETY: the tables of listed entries are in use, and the lock is held.
                let at = unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(at as usize) };
                detach(at, list, &mut control.blocks, &mut garbage);
            }
        });
        self.epochs.wait();
        // SAFETY: all writers were waited for just now.
        unsafe { garbage.give_back(&self.nodes) };
        // SAFETY: as above; its tables were put there before the wait.
        unsafe { std::mem::take(&mut control.garbage).give_back(&self.nodes) };
        words.host.store(null_mut(), Ordering::Relaxed);
        control.slots[index] = None;
        Ok(state.slot.clone())
    }

    /// Waits until every writer that is online has passed a quiescent point. Its writes before this call are
    /// done then.
    pub fn wait_for_writers(&self) {
        self.epochs.wait();
    }

    /// Returns the number of bytes of memory of tables, reverse map and dirty bits, without the memory of
    /// writers.
    pub fn overhead(&self) -> usize {
        let control = lock(&self.control);
        let lists: usize = control.slots.iter().flatten().map(|state| state.rmap.bytes()).sum();
        // SAFETY: a log is freed under the lock for changes, which is held.
        let logs = self.slots.iter().filter_map(|w| unsafe { w.log.load(Ordering::Acquire).as_ref() });
        let bits: usize = logs.map(|log| log.bits.bytes()).sum();
        let own = size_of::<Self>() + size_of_val(&*self.slots) + size_of_val(&*control.slots);
        own + self.nodes.bytes() + lists + bits + control.blocks.bytes()
    }

    /// Returns whether leaves of a slot have to be protected.
    pub(crate) fn protects(&self, slot: usize) -> bool {
        // SAFETY: the caller is in a section or holds the lock for changes, so the log is not freed.
        unsafe { self.slots[slot].log.load(Ordering::Acquire).as_ref() }.is_some_and(Log::protects)
    }

    /// Maps `len` bytes at `gpa`, which are all in slots, at the free addresses from `addr` on, with the
    /// largest leaves that fit.
    pub(crate) fn map_pieces(
        &self,
        control: &mut Control,
        tree: &Tree,
        addr: u64,
        gpa: Gpa,
        len: u64,
        may_write: bool,
    ) {
        let mut done = 0;
        while done < len {
            let (addr, gpa) = (addr + done, gpa.0 + done);
            let Some((slot, state)) = control.holding(Gpa(gpa)) else { return };
            let rest = (len - done).min(state.slot.gpa().0 + state.slot.len() - gpa);
            let fits = |level: &u32| (addr | gpa).is_multiple_of(size(*level)) && rest >= size(*level);
            let level = (1..=LEAF_MAX).rev().find(fits).unwrap_or(1);
            // SAFETY: the lock is held, and nothing is mapped there.
            let at = unsafe { tree.make(&self.nodes, addr, level) };
            if let Some(list) = state.rmap.make(Gpa(gpa), level) {
                let address = std::ptr::from_ref(at).expose_provenance() as u64;
                // SAFETY: all blocks are from `control`, and lists do not move.
                unsafe { list.add(&mut control.blocks, address) };
            }
            // The entry must be in its list first, because a writer can make it writable from here on.
            let leaf = Entry::leaf(gpa, slot, may_write);
            let leaf = leaf.with_writable(leaf.is_writable() && !self.protects(slot));
            // Earlier, smaller mappings may have left their tables here.
            if let Some(empty) = Entry(at.swap(leaf.0, Ordering::AcqRel)).node() {
                control.garbage.push(empty);
            }
            done += size(level);
        }
    }
}

impl Control {
    /// Returns the slot that begins at `gpa`.
    pub(crate) fn find(&self, gpa: Gpa) -> Result<(usize, Arc<MappedSlot>), Error> {
        self.holding(gpa).filter(|(_, state)| state.slot.gpa() == gpa).ok_or(Error::NoSuchSlot { gpa })
    }

    /// Returns the slot that contains `gpa`.
    pub(crate) fn holding(&self, gpa: Gpa) -> Option<(usize, Arc<MappedSlot>)> {
        let mut taken = self.slots.iter().enumerate().filter_map(|(i, state)| Some((i, state.as_ref()?)));
        taken.find(|(_, state)| state.slot.contains(gpa)).map(|(i, state)| (i, state.clone()))
    }
}

/// Unmaps a mapping, whose list is `list`. The entry is emptied first, so that a writer cannot find it when
/// it leaves the list. See [`crate::order`].
pub(crate) fn detach(at: &AtomicU64, list: &List, blocks: &mut Blocks, garbage: &mut Garbage) {
    let old = Entry(at.swap(Entry::NONE.0, Ordering::AcqRel));
    // SAFETY: all blocks are from the one `Control`, and lists do not move.
    let listed = unsafe { list.remove(blocks, std::ptr::from_ref(at).addr() as u64) };
    debug_assert!(listed, "a mapping in no list");
    if let Some(node) = old.node() {
        garbage.push(node);
    }
}

/// Returns the guest address and the slot of a mapping.
///
/// # Safety
/// The caller holds the lock for changes.
pub(crate) unsafe fn target(entry: Entry) -> (Gpa, usize) {
    // SAFETY: by the caller.
    let leaf = unsafe { unsplit(entry) };
    (leaf.gpa(), leaf.slot())
}

/// Checks that a range is whole pages below the end.
pub(crate) fn check_range(addr: u64, len: u64) -> Result<(), Error> {
    if len == 0 || !(addr | len).is_multiple_of(PAGE) {
        return Err(Error::Misaligned { addr, len });
    }
    if addr.checked_add(len).is_none_or(|end| end > END) {
        return Err(Error::TooHigh { addr, len });
    }
    Ok(())
}

impl Drop for Mmu {
    fn drop(&mut self) {
        // SAFETY: there is no other reference to `self`, and the slots' lists are dropped too.
        unsafe { self.direct.give_back(&self.nodes) };
        // SAFETY: as above, there is no writer.
        unsafe { std::mem::take(&mut lock(&self.control).garbage).give_back(&self.nodes) };
    }
}

impl std::fmt::Debug for Mmu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mmu").finish_non_exhaustive()
    }
}
