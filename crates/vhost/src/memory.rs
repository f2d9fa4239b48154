//! Guest memory, as the front-end shares it.

use crate::error::Refusal;
use crate::rings::Rings;
use crate::wait::{self, Ends};
use kickless_device::Update;
use kickless_memory::{Gpa, Log, LogError, Map, Mapper, Released, Slot, UserAddr, View};
use kickless_vhost_user::MemoryRegion;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tracing::{debug, info};

/// What is in force. Replaced whole.
#[derive(Debug)]
pub(crate) struct Memory {
    mapper: Mapper,
    view: Arc<View>,
    logging: Logging,
}

/// What the front-end has said of its log.
#[derive(Debug, Default)]
struct Logging {
    /// SET_LOG_BASE. It has a bit for each page of the memory that is in force.
    base: Option<Arc<Log>>,
    /// VHOST_F_LOG_ALL. Without a base that is legal, and means nothing yet: QEMU starts rings before it has sent one.
    on: bool,
}

impl Logging {
    /// Where writes are to be marked now.
    fn in_force(&self) -> Option<Arc<Log>> {
        self.base.clone().filter(|_| self.on)
    }

    /// Memory becomes `map`. A base that is too small for it serves no more, and is refused that while anybody marks in it:
    /// a front-end that adds memory sends a larger log first.
    fn fit(&mut self, map: &Map, rings: &Rings) -> Result<(), LogError> {
        if let Some(base) = &self.base
            && let Err(error) = base.covers(map)
        {
            if self.on && rings.any_running() {
                return Err(error);
            }
            debug!(%error, "the log is let go");
            self.base = None;
        }
        Ok(())
    }
}

fn slot(mapper: &Mapper, region: &MemoryRegion, file: &OwnedFd, old: &[Slot]) -> Result<Slot, Refusal> {
    if region.xen.is_some() {
        return Err(Refusal::Xen);
    }
    let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
    Ok(mapper.slot(file, region.mmap_offset, gpa, user, region.size, old)?)
}

impl Memory {
    /// None yet; what comes is mapped by `mapper`.
    pub(crate) fn new(mapper: Mapper) -> Self {
        Self { mapper, view: Arc::default(), logging: Logging::default() }
    }

    /// The view that is in force.
    pub(crate) fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// SET_MEM_TABLE: these regions and no others. A mapping of bytes that were shared before stays as it is.
    pub(crate) fn set(
        &mut self,
        regions: &[(MemoryRegion, OwnedFd)],
        rings: &mut Rings,
        ends: Ends<'_>,
    ) -> Result<(), Refusal> {
        let slots =
            regions.iter().map(|(region, file)| slot(&self.mapper, region, file, self.view.map().slots()));
        let map = Map::new(slots.collect::<Result<_, _>>()?)?;
        self.replace(map, rings, ends)
    }

    /// ADD_MEM_REG.
    pub(crate) fn add(
        &mut self,
        region: &MemoryRegion,
        file: &OwnedFd,
        rings: &mut Rings,
        ends: Ends<'_>,
    ) -> Result<(), Refusal> {
        let map = self.view.map().with(slot(&self.mapper, region, file, &[])?)?;
        self.replace(map, rings, ends)
    }

    /// REM_MEM_REG. When this returns, nobody uses the region.
    pub(crate) fn remove(
        &mut self,
        region: &MemoryRegion,
        rings: &mut Rings,
        ends: Ends<'_>,
    ) -> Result<(), Refusal> {
        let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
        let (map, removed) = self.view.map().without(gpa, user, region.size)?;
        drop(removed);
        self.replace(map, rings, ends)
    }

    /// SET_LOG_BASE. When this returns, nobody writes the log before it.
    pub(crate) fn set_log_base(
        &mut self,
        file: &OwnedFd,
        offset: u64,
        len: u64,
        rings: &mut Rings,
    ) -> Result<(), Refusal> {
        let log = self.mapper.log(file, offset, len)?;
        log.covers(self.view.map())?;
        self.logging.base = Some(Arc::new(log));
        self.log_as_said(rings)
    }

    /// VHOST_F_LOG_ALL. When this returns, all writes are marked, or none. Who turns it off gets its log back.
    pub(crate) fn set_logging(&mut self, on: bool, rings: &mut Rings) -> Result<(), Refusal> {
        if std::mem::replace(&mut self.logging.on, on) && !on {
            // The front-end is done with it, and sends one when it begins anew.
            self.logging.base = None;
        }
        self.log_as_said(rings)
    }

    fn log_as_said(&mut self, rings: &mut Rings) -> Result<(), Refusal> {
        let log = self.logging.in_force();
        if self.view.log().map(Arc::as_ptr) == log.as_ref().map(Arc::as_ptr) {
            return Ok(());
        }
        match &log {
            Some(log) => info!(bytes = log.len(), "writes to guest memory are marked in a log"),
            None => info!("writes to guest memory are not marked any more"),
        }
        self.view = Arc::new(View::new(self.view.map().clone()).with_log(log)?);
        Ok(rings.update_all(|| Update::Memory(self.view.clone()))?)
    }

    /// Puts `map` in force: workers take it between two rounds, without stopping, and requests in flight end with what
    /// they began with. Returns when every worker has it and no request uses what is not in it any more.
    fn replace(&mut self, map: Map, rings: &mut Rings, ends: Ends<'_>) -> Result<(), Refusal> {
        self.logging.fit(&map, rings)?;
        let view = Arc::new(View::new(map).with_log(self.logging.in_force())?);
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
            let what = "I/O in flight to removed memory";
            wait::until(what, ends, || rings.limit_remote_waits(), |patience| mapping.wait(patience))?;
        }
        Ok(())
    }
}
