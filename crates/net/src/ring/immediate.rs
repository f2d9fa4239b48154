//! Serves rings that complete each chain immediately after popping it.

use crate::ring::cost::{DESCRIPTORS_PER_COST, FRAMES_MAX};
use kickless_device::{LEAVING_COST, Neighbours, Next, Polled, Vring};
use kickless_virtqueue::Chain;

/// The other tasks of the worker, if the ring may offer them parcels.
pub(crate) type Beside<'n, 'p> = Option<&'n mut (dyn Neighbours + 'p)>;

/// A ring that completes each chain immediately after popping it.
pub(crate) trait ImmediateRing {
    /// Returns the ring, and the space for the popped chain.
    fn ring(&mut self) -> (&mut Vring, &mut Chain);

    /// Serves the popped chain and pushes it. Returns the cost without that of the descriptors.
    fn serve(&mut self) -> u32;

    /// Does the same as [`ImmediateRing::serve`], beside tasks that may take the frame.
    fn serve_beside(&mut self, _neighbours: Beside<'_, '_>) -> Served {
        Served { chains: 1, cost: self.serve(), frames: 1 }
    }

    /// Serves chains of a single descriptor together ([`Vring::peek`]), until they cost `budget`. None if the
    /// next chain has to be popped. Rings that stop are not asked.
    fn serve_batch(&mut self, _neighbours: Beside<'_, '_>, _budget: u32) -> Served {
        Served::default()
    }

    /// Returns why no further chain is popped in this turn, which has served this number of chains. Rings
    /// that stop are not asked.
    fn pauses(&mut self, _served: u32) -> Option<Next> {
        None
    }
}

/// The chains that a task has served together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    pub(crate) chains: u32,
    pub(crate) cost: u32,
    /// The frames that count towards [`FRAMES_MAX`]: more than there are, if each takes longer than usual.
    pub(crate) frames: u32,
}

/// Number of chains that are popped one by one before the next batch is tried. If few chains can be served in
/// a batch, their descriptors are read twice for this part of the chains only.
pub(crate) const POPS: u32 = 8;

/// Serves chains one by one until they cost `budget` ([`kickless_device::QueueTask::poll`]).
pub(crate) fn poll(task: &mut impl ImmediateRing, budget: u32) -> Polled {
    poll_beside(task, budget, None)
}

/// Does the same as [`poll`], beside tasks that may take frames. A ring that stops offers them none.
pub(crate) fn poll_beside(task: &mut impl ImmediateRing, budget: u32, neighbours: Beside<'_, '_>) -> Polled {
    let mut neighbours = if budget > 0 { neighbours } else { None };
    let (mut served, mut cost) = (0, 0u32);
    // The frames that count towards the limit.
    let mut frames = 0;
    let limit = if budget == 0 { LEAVING_COST } else { budget };
    let mut pops = 0;
    let next = loop {
        if cost >= limit {
            break Next::More;
        }
        if budget > 0 && pops == 0 {
            let batch = task.serve_batch(neighbours.as_deref_mut(), limit - cost);
            if batch.chains > 0 {
                served += batch.chains;
                frames += batch.frames;
                cost = cost.saturating_add(batch.cost);
                if frames >= FRAMES_MAX {
                    break Next::More;
                }
                continue;
            }
            pops = POPS;
        }
        if budget > 0
            && let Some(next) = task.pauses(served)
        {
            break next;
        }
        pops = pops.saturating_sub(1);
        let (vring, chain) = task.ring();
        if budget == 0 && vring.resubmissions() == 0 {
            break Next::Idle;
        }
        let popped = vring.pop(chain);
        if vring.has_cost() {
            cost = cost.saturating_add(vring.take_cost());
        }
        if !popped {
            break if vring.take_unfinished() { Next::More } else { Next::Idle };
        }
        let descriptors = u32::from(chain.descriptors() / DESCRIPTORS_PER_COST);
        let one = task.serve_beside(neighbours.as_deref_mut());
        (served, frames) = (served + one.chains, frames + one.frames);
        cost = cost.saturating_add(descriptors).saturating_add(one.cost);
    };
    task.ring().0.publish();
    Polled { served, cost, next }
}
