//! Guest memory, as the front-end shares it.

use crate::error::Refusal;
use crate::rings::Rings;
use crate::wait;
use kickless_device::Update;
use kickless_memory::{Gpa, Map, Released, Slot, UserAddr, View};
use kickless_vhost_user::MemoryRegion;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What is in force. Replaced whole.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    view: Arc<View>,
}

fn slot(region: &MemoryRegion, file: &OwnedFd, old: Option<&Map>) -> Result<Slot, Refusal> {
    if region.xen.is_some() {
        return Err(Refusal::Xen);
    }
    let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
    Ok(Slot::map_or_share(file, region.mmap_offset, gpa, user, region.size, old)?)
}

impl Memory {
    /// The view that is in force.
    pub(crate) fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// SET_MEM_TABLE: these regions and no others. A mapping of bytes that were shared before stays as it is.
    pub(crate) fn set(
        &mut self,
        regions: &[(MemoryRegion, OwnedFd)],
        rings: &mut Rings,
    ) -> Result<(), Refusal> {
        let slots = regions.iter().map(|(region, file)| slot(region, file, Some(self.view.map())));
        let map = Map::new(slots.collect::<Result<_, _>>()?)?;
        self.replace(map, rings)
    }

    /// ADD_MEM_REG.
    pub(crate) fn add(
        &mut self,
        region: &MemoryRegion,
        file: &OwnedFd,
        rings: &mut Rings,
    ) -> Result<(), Refusal> {
        let map = self.view.map().with(slot(region, file, None)?)?;
        self.replace(map, rings)
    }

    /// REM_MEM_REG. When this returns, nobody uses the region.
    pub(crate) fn remove(&mut self, region: &MemoryRegion, rings: &mut Rings) -> Result<(), Refusal> {
        let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
        let (map, removed) = self.view.map().without(gpa, user, region.size)?;
        drop(removed);
        self.replace(map, rings)
    }

    /// Puts `map` in force: workers take it between two rounds, without stopping, and requests in flight end with what
    /// they began with. Returns when every worker has it and nobody uses what is not in it any more.
    fn replace(&mut self, map: Map, rings: &mut Rings) -> Result<(), Refusal> {
        let view = Arc::new(View::new(map));
        let old = std::mem::replace(&mut self.view, view.clone());
        let gone: Vec<Released> = old
            .map()
            .slots()
            .iter()
            .filter(|slot| !view.map().slots().iter().any(|kept| Arc::ptr_eq(kept.mapping(), slot.mapping())))
            .map(|slot| slot.mapping().released())
            .collect();
        drop(old);
        rings.update_all(|| Update::Memory(view.clone()))?;
        for mapping in gone {
            wait::until("I/O in flight to removed memory", |patience| mapping.wait(patience));
        }
        Ok(())
    }
}
