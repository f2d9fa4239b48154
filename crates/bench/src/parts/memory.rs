//! Measures the translation of guest addresses, and copies from and to guest memory.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_memory::{Gpa, Iov, Map, Marks, Slot, UserAddr, View};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::operation::Operation;

/// The bytes of one slot.
const SLOT: u64 = 1 << 20;
/// Common machines have 1 or 3 slots (RAM below and above the hole). vhost-user allows 509.
const SLOTS: [u64; 3] = [1, 3, 509];
const PAGE: u64 = 4096;

/// Returns each operation, in maps of several sizes.
pub(super) fn operations() -> Result<Vec<Operation>> {
    let mut all = Vec::new();
    for slots in SLOTS {
        let view = memory(slots)?;
        let within = |what: &str| format!("{what}, {slots} slot{}", if slots == 1 { "" } else { "s" });
        // Successive addresses are in different slots, so a cache of the last slot does not help.
        let addresses = || {
            let mut random = fastrand::Rng::with_seed(slots);
            move || Gpa(random.u64(..slots * SLOT / PAGE - 1) * PAGE)
        };

        let (at, pages) = (addresses(), view.clone());
        all.push(Operation::new(within("page translated into a segment"), translate(pages, at)));
        let (mut at, pages) = (addresses(), view.clone());
        all.push(Operation::new(within("64-bit word read"), move || {
            black_box(pages.read_obj::<u64>(at())?);
            Ok(1)
        }));
        let (mut at, pages) = (addresses(), view.clone());
        all.push(Operation::new(within("status byte written"), move || {
            pages.write_obj(at(), black_box(&0u8), &mut Marks::off())?;
            Ok(1)
        }));
        let mut at = addresses();
        let mut page = [0; PAGE as usize];
        all.push(Operation::new(within("page copied out"), move || {
            view.read(at(), black_box(&mut page))?;
            Ok(1)
        }));
    }
    Ok(all)
}

fn translate(
    view: Arc<View>,
    mut at: impl FnMut() -> Gpa + 'static,
) -> impl FnMut() -> Result<u32> + 'static {
    let mut iov = Iov::default();
    move || {
        iov.clear(&mut Marks::off());
        iov.push(&view, at(), PAGE as u32)?;
        black_box(iov.segments());
        Ok(1)
    }
}

fn memory(slots: u64) -> Result<Arc<View>> {
    let slot = |nth: u64| -> Result<Slot> {
        let file = memfd_create("kickless-bench", MemfdFlags::CLOEXEC).context("no memory")?;
        ftruncate(&file, SLOT).context("no memory")?;
        Ok(Slot::map(&file, 0, Gpa(nth * SLOT), UserAddr(nth * SLOT), SLOT)?)
    };
    Ok(Arc::new(View::new(Map::new((0..slots).map(slot).collect::<Result<_>>()?)?)))
}
