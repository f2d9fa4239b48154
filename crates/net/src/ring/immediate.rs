//! Serves rings that complete each chain immediately after popping it.

use super::cost::DESCRIPTORS_PER_COST;
use kickless_device::{LEAVING_COST, Next, Polled, Vring};
use kickless_virtqueue::Chain;

/// A ring that completes each chain immediately after popping it.
pub(crate) trait ImmediateRing {
    /// Returns the ring, and the space for the popped chain.
    fn ring(&mut self) -> (&mut Vring, &mut Chain);

    /// Serves the popped chain and pushes it. Returns the cost without that of the descriptors.
    fn serve(&mut self) -> u32;
}

/// Serves chains one by one until they cost `budget` ([`kickless_device::QueueTask::poll`]).
pub(crate) fn poll(task: &mut impl ImmediateRing, budget: u32) -> Polled {
    let (mut served, mut cost) = (0, 0u32);
    let limit = if budget == 0 { LEAVING_COST } else { budget };
    let next = loop {
        if cost >= limit {
            break Next::More;
        }
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
        cost = cost.saturating_add(descriptors).saturating_add(task.serve());
        served += 1;
    };
    task.ring().0.publish();
    Polled { served, cost, next }
}
