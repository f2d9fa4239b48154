//! Guest memory, and the logs that are compared.

use kickless_dirty_log::{HarvestTime, Harvester, Method, Mmu, Pages, Writer};
use kickless_memory::{Gpa, Iova, Slot, UserAddr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

pub(crate) const PAGE: u64 = 4096;

/// Makes a sparse file of `len` bytes.
pub(crate) fn file(len: u64) -> File {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file.into()
}

pub(crate) fn slot(file: &File, len: u64) -> Slot {
    Slot::map(file, 0, Gpa(0), UserAddr(0), len).unwrap()
}

/// The guest memory of all contestants. It is mapped once for each kind of contestant, so that no turn pays
/// for the kernel's page faults.
pub(crate) struct Guest {
    pub(crate) len: u64,
    slot: Slot,
    atomic: Arc<AtomicMemory>,
}

impl Guest {
    pub(crate) fn new(len: u64) -> Self {
        let file = file(len);
        let slot = slot(&file, len);
        let range = (GuestAddress(0), len as usize, Some(FileOffset::new(file, 0)));
        let atomic = Arc::new(AtomicMemory::from_ranges_with_files([range]).unwrap());
        let guest = Self { len, slot, atomic };
        for kind in [Kind::Off, Kind::Atomic] {
            let mut store = Logged::new(kind, &guest).store();
            (0..len / PAGE).for_each(|page| store.write(page * PAGE, 1));
        }
        guest
    }
}

/// A contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No log.
    Off,
    /// [`Method::Protect`].
    Protect,
    /// [`Method::Marks`].
    Marks,
    /// One array of bits, each checked before it is set, behind [`Writer`]s that log nothing. Its harvest
    /// waits for them.
    Flat,
    /// vm-memory's bitmap.
    Atomic,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Off => "no log",
            Self::Protect => "Protect",
            Self::Marks => "Marks",
            Self::Flat => "flat, checks first",
            Self::Atomic => "vm-memory AtomicBitmap",
        }
    }
}

type AtomicMemory = GuestMemoryMmap<AtomicBitmap>;
type Bits = Arc<[AtomicU64]>;

/// Logged memory, and its harvester.
pub(crate) enum Logged {
    Ours(Arc<Mmu>, Option<Harvester>, Pages),
    Flat(Arc<Mmu>, Bits, Vec<u64>),
    Atomic(Arc<AtomicMemory>),
}

impl Logged {
    /// Starts a contestant, with an empty log and no writer.
    pub(crate) fn new(kind: Kind, guest: &Guest) -> Self {
        let ours = |method: Option<Method>| {
            let mmu = Mmu::new();
            mmu.add(guest.slot.clone()).unwrap();
            let log = method.map(|method| Harvester::enable(&mmu, Gpa(0), method).unwrap());
            Self::Ours(mmu, log, Pages::default())
        };
        match kind {
            Kind::Off => ours(None),
            Kind::Protect => ours(Some(Method::Protect)),
            Kind::Marks => ours(Some(Method::Marks)),
            Kind::Flat => {
                let mmu = Mmu::new();
                mmu.add(guest.slot.clone()).unwrap();
                let bits = (0..guest.len / PAGE / 64 + 1).map(|_| AtomicU64::new(0)).collect();
                Self::Flat(mmu, bits, Vec::new())
            }
            Kind::Atomic => {
                guest.atomic.iter().for_each(|region| region.bitmap().reset());
                Self::Atomic(guest.atomic.clone())
            }
        }
    }

    pub(crate) fn store(&self) -> Store {
        match self {
            Self::Ours(mmu, ..) => Store::Ours(Writer::direct(mmu)),
            Self::Flat(mmu, bits, _) => Store::Flat(Writer::direct(mmu), bits.clone()),
            Self::Atomic(memory) => Store::Atomic(memory.clone()),
        }
    }

    /// Harvests. Returns the duration and, if `count` is set, the number of pages.
    pub(crate) fn harvest(&mut self, count: bool) -> (HarvestTime, u64) {
        match self {
            Self::Ours(_, Some(log), pages) => {
                let took = log.harvest(.., pages);
                (took, if count { pages.count() } else { 0 })
            }
            Self::Ours(..) => (HarvestTime::default(), 0),
            Self::Flat(mmu, bits, taken) => {
                let begun = Instant::now();
                taken.clear();
                taken.extend(bits.iter().map(|word| match word.load(Ordering::Relaxed) {
                    0 => 0,
                    _ => word.swap(0, Ordering::AcqRel),
                }));
                let walk = begun.elapsed();
                mmu.wait_for_writers();
                let wait = begun.elapsed() - walk;
                let pages = taken.iter().map(|word| u64::from(word.count_ones())).sum();
                (HarvestTime { walk, wait }, pages)
            }
            Self::Atomic(memory) => {
                let begun = Instant::now();
                let taken: Vec<Vec<u64>> =
                    memory.iter().map(|region| region.bitmap().get_and_reset()).collect();
                let walk = begun.elapsed();
                let pages = taken.iter().flatten().map(|word| u64::from(word.count_ones())).sum();
                (HarvestTime { walk, ..HarvestTime::default() }, pages)
            }
        }
    }
}

/// A thread's access to the memory.
pub(crate) enum Store {
    Ours(Writer),
    Flat(Writer, Bits),
    Atomic(Arc<AtomicMemory>),
}

impl Store {
    #[inline]
    pub(crate) fn write(&mut self, at: u64, value: u64) {
        match self {
            Self::Ours(writer) => writer.write_obj(Iova(at), &value).unwrap(),
            Self::Flat(writer, bits) => {
                writer.write_obj(Iova(at), &value).unwrap();
                let (word, bit) = (&bits[(at / PAGE / 64) as usize], 1 << (at / PAGE % 64));
                if word.load(Ordering::Relaxed) & bit == 0 {
                    word.fetch_or(bit, Ordering::Release);
                }
            }
            Self::Atomic(memory) => memory.write_obj(value, GuestAddress(at)).unwrap(),
        }
    }

    #[inline]
    pub(crate) fn quiesce(&mut self) {
        match self {
            Self::Ours(writer) | Self::Flat(writer, _) => writer.quiesce(),
            Self::Atomic(_) => {}
        }
    }
}
