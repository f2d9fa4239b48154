//! Plans of clearing, which unmaps clusters.

use super::Tables;
use super::blocks::Block;
use super::entries::EntryPlace;
use super::plan::{Clear, ClearPlan, Stop};
use crate::format::entry::Mapping;
use crate::format::geometry::{GuestOffset, Version};
use crate::runtime::Runtime;

impl<R: Runtime> Tables<R> {
    /// Unmaps or zeroes whole clusters of a range, at most one slice.
    pub fn clear(&mut self, at: GuestOffset, len: u64, how: Clear, waker: &R::Waker) -> ClearPlan {
        self.end_given_up();
        let plan = match self.try_clear(at, len, how, waker) {
            Ok(plan) => plan,
            Err(Stop::Fail(errno)) => ClearPlan::Fail(errno),
            Err(Stop::Wait) => {
                self.wakers.add(waker);
                ClearPlan::Wait
            }
        };
        self.progress();
        plan
    }

    fn try_clear(
        &mut self,
        at: GuestOffset,
        len: u64,
        how: Clear,
        waker: &R::Waker,
    ) -> Result<ClearPlan, Stop> {
        let place = self.place(at, false, waker)?;
        let cluster = self.geometry.cluster();
        let left = (self.entries() - place.index) as u64 * cluster - place.within;
        let len = len.min(left);
        if place.within != 0 || len < cluster {
            return self.clear_part(place, len.min(cluster - place.within));
        }
        let (mut changes, mut count) = (Vec::new(), 0);
        let mut data = None;
        for index in place.index..place.index + (len / cluster) as usize {
            let guest = GuestOffset(at.0 + count * cluster);
            if self.copies.has(self.geometry.guest_cluster(guest)) {
                break;
            }
            let (old, _) = self.mapping(place.way, index)?;
            match self.cleared(old, how) {
                Some(new) if new != old => changes.push((index, old, new)),
                Some(_) => {}
                None => {
                    data = Some(ClearPlan::Data { len: cluster });
                    break;
                }
            }
            count += 1;
        }
        match data {
            Some(data) if count == 0 => return Ok(data),
            _ if count == 0 => return Err(Stop::Wait),
            _ => {}
        }
        if !changes.is_empty() {
            self.check_space()?;
            // This may copy the table, and then the request comes again.
            self.place(at, true, waker)?;
            for (index, _, new) in &changes {
                self.set_entry(place.way, *index, *new);
            }
            self.blocks.change(Block::Slice(place.slice));
        }
        let ticket = self.ticket(place.slice);
        for (_, old, new) in changes {
            if !matches!(new, Mapping::Zero { kept: Some(_), .. }) {
                self.retire_mapping(old, ticket, true);
            }
        }
        Ok(ClearPlan::Done { len: count * cluster, ticket })
    }

    /// Returns the entry of a cleared cluster. `None`: zeroes must be written as data.
    fn cleared(&self, old: Mapping, how: Clear) -> Option<Mapping> {
        let has_zero = self.geometry.version != Version::V2;
        match (how, old) {
            (_, Mapping::Unallocated) if !self.has_backing => Some(old),
            (_, Mapping::Zero { kept: None, .. }) | (Clear::Zero, Mapping::Zero { .. }) => Some(old),
            (Clear::Zero, Mapping::Data { host, copied: true }) if has_zero => {
                Some(Mapping::Zero { kept: Some(host), copied: true })
            }
            (Clear::Zero, Mapping::Parts { host: Some(host), copied: true, .. }) => {
                Some(Mapping::Zero { kept: Some(host), copied: true })
            }
            (Clear::Zero, Mapping::Data { copied: true, .. }) => None,
            _ if !self.has_backing => Some(Mapping::Unallocated),
            _ if has_zero => Some(Mapping::Zero { kept: None, copied: false }),
            // A discard is advice.
            (Clear::Discard, _) => Some(old),
            _ => None,
        }
    }

    /// Clears a part of a cluster. Where it reads as zeroes already, only earlier changes are waited for.
    fn clear_part(&mut self, place: EntryPlace, len: u64) -> Result<ClearPlan, Stop> {
        let is_zero = match self.mapping(place.way, place.index)?.0 {
            Mapping::Zero { .. } => true,
            Mapping::Unallocated => !self.has_backing,
            _ => false,
        };
        if !is_zero {
            return Ok(ClearPlan::Data { len });
        }
        Ok(ClearPlan::Done { len, ticket: self.ticket(place.slice) })
    }
}
