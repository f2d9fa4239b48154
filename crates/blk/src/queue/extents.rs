//! Discards and zeroes: requests on extents of the disk, which the driver writes as data.

use super::Queue;
use crate::request::{self, RangeOp, Reject, Request};
use kickless_device::Context;
use kickless_disk::{self as disk, Extent};
use kickless_spec::blk;

impl Queue {
    /// Starts a discard or write-zeroes request.
    #[cold]
    pub(super) fn start_on_extents(
        &mut self,
        context: &mut Context<'_>,
        slot: u32,
        request: &Request,
        op: RangeOp,
    ) {
        let id = self.chain.id;
        let wanted = match self.read_extents(slot, request, op) {
            Ok(wanted) => wanted,
            Err(reject) => {
                self.slots.clear_refused(slot, self.vring.memory().1);
                return self.reject(id, reject);
            }
        };
        let entry = self.slots.get(slot);
        entry.fill(self.vring.view(), id, request.status, request.kind, request.data_len);
        self.meter.count(entry.operation, request.data_len);
        // Each extent costs as much as a request.
        let cost = entry.io.extents_len() as u32;
        self.slots.take_next();
        if self.shared.on_error.is_on {
            self.keep_copy(slot, wanted);
        }
        self.other_work.add_cost(cost);
        if self.slots.reserve(slot) {
            self.start_now(context, slot, wanted);
        } else {
            self.wait_for_budget(slot, wanted);
        }
    }

    /// Reads the segments of a request into its slot. Returns the operation on them.
    fn read_extents(&mut self, slot: u32, request: &Request, op: RangeOp) -> Result<disk::Request, Reject> {
        let (disk, durable) = (&self.disk, self.durable());
        let (limits, wanted) = match op {
            RangeOp::Discard => (disk.limits().discard, disk::Request::Discard { durable }),
            RangeOp::WriteZeroes => (disk.limits().write_zeroes, disk::Request::WriteZeroes { durable }),
        };
        let Some(limits) = limits else {
            let why = "request type that the disk does not have";
            return Err(Reject { status: Some(request.status), code: blk::S_UNSUPP, why });
        };
        let io = &mut self.slots.get(slot).io;
        let (view, marks) = self.vring.memory();
        io.buffers_mut().clear(marks);
        let into = io.extents_mut();
        into.clear();
        request::extents(&self.chain, view, request, op, (disk.size(), &limits), into)?;
        Ok(if self.shared.discard() { wanted } else { keep_space(wanted, into) })
    }
}

/// Changes a request so that all space stays allocated, and the data are as with the request itself.
///
/// A discard does nothing, because it is advice and the data that it leaves are of no use. Zeroes are written
/// as if the driver had asked for their space to be kept.
fn keep_space(wanted: disk::Request, extents: &mut Vec<Extent>) -> disk::Request {
    match wanted {
        disk::Request::Discard { .. } => {
            extents.clear();
            // Without a change there is nothing to make durable.
            disk::Request::Discard { durable: false }
        }
        wanted => {
            extents.iter_mut().for_each(|extent| extent.unmap = false);
            wanted
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_kept_and_zeroes_are_written() {
        let two = [(0, true), (4096, false)].map(|(offset, unmap)| Extent { offset, len: 512, unmap });
        let kept = |wanted| {
            let mut extents = two.to_vec();
            (keep_space(wanted, &mut extents), extents)
        };
        for durable in [true, false] {
            let nothing = (disk::Request::Discard { durable: false }, Vec::new());
            assert_eq!(kept(disk::Request::Discard { durable }), nothing);
            let zeroes = disk::Request::WriteZeroes { durable };
            assert_eq!(kept(zeroes), (zeroes, two.map(|extent| Extent { unmap: false, ..extent }).to_vec()));
        }
    }
}
