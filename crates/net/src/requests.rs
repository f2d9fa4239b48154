//! Rings whose chains are done at once, in the order in which they are popped.

use crate::cost::COST_DESCRIPTORS;
use kickless_device::{Next, Polled, Vring};
use kickless_virtqueue::Chain;

/// A ring of such requests.
pub(crate) trait Requests {
    /// Returns the ring, and the chain that was popped last.
    fn ring(&mut self) -> (&mut Vring, &mut Chain);

    /// Carries out the request in the popped chain, and pushes it. Returns the cost beside that of its descriptors.
    fn serve(&mut self) -> u32;
}

/// Serves requests until they cost `budget` ([`kickless_device::QueueTask::poll`]).
pub(crate) fn poll(requests: &mut impl Requests, budget: u32) -> Polled {
    let (mut served, mut cost) = (0, 0u32);
    let next = loop {
        let (vring, chain) = requests.ring();
        if budget > 0 && cost >= budget {
            break Next::More;
        }
        if budget == 0 && vring.again() == 0 {
            break Next::Idle;
        }
        let popped = vring.pop(chain);
        if vring.has_cost() {
            cost = cost.saturating_add(vring.take_cost());
        }
        if !popped {
            break if vring.take_unfinished() { Next::More } else { Next::Idle };
        }
        served += 1;
        let descriptors = u32::from(chain.descriptors() / COST_DESCRIPTORS);
        cost = cost.saturating_add(descriptors).saturating_add(requests.serve());
    };
    requests.ring().0.publish();
    Polled { served, cost, next }
}
