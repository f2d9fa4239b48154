//! VIRTIO_F_IN_ORDER: chains come back in the order in which they were popped, whatever the order in which a device is done
//! with them (virtio 1.3, sections 2.7.9 and 2.8.9).

use std::collections::VecDeque;

/// The chains in flight, oldest first. Bounded by the size of the queue.
#[derive(Debug, Default)]
pub(super) struct Order(VecDeque<(u16, Option<u32>)>);

impl Order {
    #[inline]
    pub(super) fn popped(&mut self, head: u16) {
        self.0.push_back((head, None));
    }

    /// The device is done with `head`. Whose turn it is then is for [`Order::next`] to say.
    #[inline]
    pub(super) fn pushed(&mut self, head: u16, len: u32) {
        if let Some((_, done)) = self.0.iter_mut().find(|(other, done)| *other == head && done.is_none()) {
            *done = Some(len);
        }
    }

    /// The oldest chain, if the device is done with it.
    #[inline]
    pub(super) fn next(&mut self) -> Option<(u16, u32)> {
        let &(head, Some(len)) = self.0.front()? else { return None };
        self.0.pop_front();
        Some((head, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slow_hold_up_the_fast() {
        let mut order = Order::default();
        (1..=4).for_each(|head| order.popped(head));
        order.pushed(2, 20);
        order.pushed(3, 30);
        assert_eq!(order.next(), None);
        order.pushed(1, 10);
        assert_eq!(std::iter::from_fn(|| order.next()).collect::<Vec<_>>(), [(1, 10), (2, 20), (3, 30)]);
        order.pushed(5, 0);
        assert_eq!(order.next(), None);
    }
}
