//! Guest memory, as the front-end shares it.

use crate::error::{HandOverError, RequestError};
use crate::rings::Rings;
use crate::wait::{self, Cancellation};
use kickless_device::Update;
use kickless_handover::{Fd, Given, Giving, v1};
use kickless_memory::{Gpa, Log, Map, Mapper, Released, Slot, UserAddr, View};
use kickless_vhost_user::MemoryRegion;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use tracing::{debug, info};

/// The bytes at the beginning of guest memory in which firmware or a kernel has surely written something.
const BEGINNING: u64 = 1 << 20;
const PAGE: usize = 4096;

/// The memory in force. A change replaces it as a whole.
#[derive(Debug)]
pub(crate) struct Memory {
    mapper: Mapper,
    view: Arc<View>,
    logging: Logging,
}

/// The front-end's settings of its log.
#[derive(Debug, Default)]
struct Logging {
    /// The log of SET_LOG_BASE. It has a bit for each page of the present memory.
    base: Option<Arc<Log>>,
    /// VHOST_F_LOG_ALL is set. Without a base this is legal and has no effect: QEMU starts rings before it
    /// sends one.
    on: bool,
}

impl Logging {
    /// Returns the log for writes, if they are logged.
    fn active(&self) -> Option<Arc<Log>> {
        self.base.clone().filter(|_| self.on)
    }

    /// Prepares for the memory `map`. Drops a log that is too small for it. Fails if rings mark pages in this
    /// log: a front-end that adds memory sends a larger log first.
    fn drop_if_too_small(&mut self, map: &Map, rings: &Rings) -> Result<(), kickless_memory::Error> {
        if let Some(base) = &self.base
            && let Err(error) = base.covers(map)
        {
            if self.on && rings.any_running() {
                return Err(error);
            }
            debug!(%error, "the log is dropped");
            self.base = None;
        }
        Ok(())
    }
}

fn slot(mapper: &Mapper, region: &MemoryRegion, file: &OwnedFd, old: &[Slot]) -> Result<Slot, RequestError> {
    let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
    Ok(mapper.slot(file, region.mmap_offset, gpa, user, region.size, old)?)
}

impl Memory {
    /// Makes an empty memory. Regions are mapped by `mapper`.
    pub(crate) fn new(mapper: Mapper) -> Self {
        Self { mapper, view: Arc::default(), logging: Logging::default() }
    }

    /// Returns the view that is in force.
    pub(crate) fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Returns whether the beginning of guest memory reads as zeroes, apart from the pages of these areas. A
    /// file that the front-end has mapped privately stays so: the guest's writes go to other pages.
    pub(crate) fn begins_blank(&self, areas: &[Range<u64>]) -> bool {
        let map = self.view.map();
        let pages = map.slots().iter().flat_map(|slot| {
            (0..slot.len() / PAGE as u64).map(|page| (slot.gpa().0, slot.user().0, page * PAGE as u64))
        });
        let is_blank = |(gpa, user, offset): (u64, u64, u64)| {
            let start = user.saturating_add(offset);
            let page = start..start.saturating_add(PAGE as u64);
            let mut bytes = [0; PAGE];
            areas.iter().any(|area| area.start < page.end && page.start < area.end)
                || map.read(Gpa(gpa + offset), &mut bytes).is_err()
                || bytes == [0; PAGE]
        };
        pages.take((BEGINNING / PAGE as u64) as usize).all(is_blank)
    }

    /// Carries out SET_MEM_TABLE, which replaces all regions. Bytes that were shared before keep their
    /// mapping.
    pub(crate) fn set(
        &mut self,
        regions: &[(MemoryRegion, OwnedFd)],
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<(), RequestError> {
        let slots =
            regions.iter().map(|(region, file)| slot(&self.mapper, region, file, self.view.map().slots()));
        let map = Map::new(slots.collect::<Result<_, _>>()?)?;
        self.replace(map, rings, cancellation)
    }

    /// Carries out ADD_MEM_REG.
    pub(crate) fn add(
        &mut self,
        region: &MemoryRegion,
        file: &OwnedFd,
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<(), RequestError> {
        let map = self.view.map().with(slot(&self.mapper, region, file, &[])?)?;
        self.replace(map, rings, cancellation)
    }

    /// Carries out REM_MEM_REG. When this returns, the region is not in use.
    pub(crate) fn remove(
        &mut self,
        region: &MemoryRegion,
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<(), RequestError> {
        let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
        let (map, removed) = self.view.map().without(gpa, user, region.size)?;
        drop(removed);
        self.replace(map, rings, cancellation)
    }

    /// Carries out SET_LOG_BASE. When this returns, no ring writes to the previous log.
    pub(crate) fn set_log_base(
        &mut self,
        file: &OwnedFd,
        offset: u64,
        len: u64,
        rings: &mut Rings,
    ) -> Result<(), RequestError> {
        let log = self.mapper.log(file, offset, len)?;
        log.covers(self.view.map())?;
        self.logging.base = Some(Arc::new(log));
        self.apply_logging(rings)
    }

    /// Switches the log on or off (VHOST_F_LOG_ALL). When this returns, either all writes are marked or none.
    /// Switching it off releases the front-end's log.
    pub(crate) fn set_logging(&mut self, on: bool, rings: &mut Rings) -> Result<(), RequestError> {
        if std::mem::replace(&mut self.logging.on, on) && !on {
            // The front-end does not use this log any more, and sends another one the next time.
            self.logging.base = None;
        }
        self.apply_logging(rings)
    }

    /// Returns the files of guest memory, and its regions.
    pub(crate) fn give(&self, to: &mut Giving) -> Result<(Vec<Fd>, Vec<v1::Region>), HandOverError> {
        let (mut files, mut numbers) = (Vec::new(), BTreeMap::new());
        let regions = self.view.map().slots().iter().map(|slot| {
            let mapping = slot.mapping();
            let file = mapping.file().ok_or(HandOverError::FileNotKept)?;
            // Mappings of one file have the same descriptor.
            let number = match numbers.get(&file.as_raw_fd()) {
                Some(number) => *number,
                None => {
                    // Fewer than there are slots.
                    let number = files.len() as u16;
                    numbers.insert(file.as_raw_fd(), number);
                    files.push(to.fd(file)?);
                    number
                }
            };
            let (gpa, user) = (slot.gpa().0, slot.user().0);
            Ok(v1::Region { gpa, user, len: slot.len(), file: number, offset: mapping.offset() })
        });
        let regions = regions.collect::<Result<_, HandOverError>>()?;
        Ok((files, regions))
    }

    /// Returns the log, and whether writes are logged.
    pub(crate) fn give_log(&self, to: &mut Giving) -> Result<(Option<v1::Log>, bool), HandOverError> {
        let give = |log: &Arc<Log>| {
            let file = to.fd(log.file().ok_or(HandOverError::FileNotKept)?)?;
            Ok::<_, HandOverError>(v1::Log { file, offset: log.offset(), len: log.len() })
        };
        Ok((self.logging.base.as_ref().map(give).transpose()?, self.logging.on))
    }

    /// Maps the memory and the log of a session of another process. No ring runs.
    pub(crate) fn restore(&mut self, from: &v1::Session, given: &mut Given) -> Result<(), RequestError> {
        let files = from.files.iter().map(|file| given.fd(*file)).collect::<Result<Vec<_>, _>>()?;
        let slots = from.regions.iter().map(|region| {
            // The record was checked.
            let file = files.get(usize::from(region.file)).ok_or(RequestError::NoFile)?;
            let (gpa, user) = (Gpa(region.gpa), UserAddr(region.user));
            Ok(self.mapper.slot(file, region.offset, gpa, user, region.len, &[])?)
        });
        let map = Map::new(slots.collect::<Result<_, RequestError>>()?)?;
        if let Some(v1::Log { file, offset, len }) = from.log {
            let log = self.mapper.log(given.fd(file)?, offset, len)?;
            log.covers(&map)?;
            self.logging.base = Some(Arc::new(log));
        }
        self.logging.on = from.logs;
        self.view = Arc::new(View::new(map).with_log(self.logging.active())?);
        Ok(())
    }

    fn apply_logging(&mut self, rings: &mut Rings) -> Result<(), RequestError> {
        let log = self.logging.active();
        if self.view.log().map(Arc::as_ptr) == log.as_ref().map(Arc::as_ptr) {
            return Ok(());
        }
        match &log {
            Some(log) => info!(bytes = log.len(), "writes to guest memory are marked in a log"),
            None => info!("writes to guest memory are no longer marked"),
        }
        self.view = Arc::new(View::new(self.view.map().clone()).with_log(log)?);
        Ok(rings.update_all(|| Update::Memory(self.view.clone()))?)
    }

    /// Replaces the memory with `map`. Workers take it between two rounds, without stopping, and requests in
    /// flight end with the memory that they began with. Returns when every worker has it and no request uses
    /// removed memory.
    fn replace(
        &mut self,
        map: Map,
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<(), RequestError> {
        self.logging.drop_if_too_small(&map, rings)?;
        let view = Arc::new(View::new(map).with_log(self.logging.active())?);
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
            wait::until(
                what,
                cancellation,
                || rings.limit_remote_waits(),
                |patience| mapping.wait(patience),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::guest_memory;

    #[test]
    fn memory_is_blank_until_a_guest_writes_beside_its_rings() {
        const USER: u64 = 0x7000_0000;
        const RINGS: Range<u64> = USER + 0x2800..USER + 0x3010;
        let view = guest_memory(BEGINNING + 0x1000, USER);
        let memory = Memory { view: view.clone(), ..Memory::new(Mapper::default()) };
        let write = |at: u64| view.map().write(Gpa(at), &[1]).unwrap();
        assert!(memory.begins_blank(&[]));
        write(BEGINNING);
        assert!(memory.begins_blank(&[]));
        write(0x2fff);
        write(0x3fff);
        assert!(!memory.begins_blank(&[]));
        assert!(memory.begins_blank(&[RINGS]));
        write(0x1fff);
        assert!(!memory.begins_blank(&[RINGS]));
    }
}
