//! The free descriptors of a split ring's table. The submitter keeps this list in its own memory, where the
//! device cannot write.
//!
//! It is a linked list. Descriptors are taken from its front, so the descriptors of a chain are linked in
//! list order. A chain goes back as a whole, to the front. So the descriptors that were used last are used
//! again first, while they are in the cache. As long as all chains have the same length, adjacent descriptors
//! stay in one chain, on one or two cache lines. If the next id is already known and must not change, the
//! chain goes behind the first descriptor.
//!
//! With IN_ORDER, the descriptors of the chains must follow one another round the table (virtio 1.3, section
//! 2.7.5). The links never change then. A chain that goes back before an older one waits for it.

/// A chain, known by its head.
#[derive(Clone, Copy, Debug, Default)]
struct Chain {
    last: u16,
    len: u16,
    /// With IN_ORDER: the chain has come back and waits for an older one.
    waits: bool,
}

/// The list of free descriptors.
#[derive(Debug)]
pub(super) struct FreeDescriptors {
    /// For each descriptor, the next one in the list or in its chain.
    links: Box<[u16]>,
    chains: Box<[Chain]>,
    first: u16,
    count: u16,
    /// With IN_ORDER, the head of the oldest chain that has not gone back, if there is one.
    oldest: Option<u16>,
}

impl FreeDescriptors {
    /// Makes a list of all `size` descriptors.
    pub(super) fn new(size: u16, in_order: bool) -> Self {
        Self {
            links: (1..size).chain([0]).collect(),
            chains: vec![Chain::default(); size.into()].into(),
            first: 0,
            count: size,
            oldest: in_order.then_some(0),
        }
    }

    #[inline]
    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// Returns the descriptor that is taken next.
    #[inline]
    pub(super) fn first(&self) -> Option<u16> {
        (self.count > 0).then_some(self.first)
    }

    /// Takes a chain of `len` descriptors, which must be free. Calls `each` with each descriptor and the next
    /// one. Returns the head.
    #[inline]
    pub(super) fn take(&mut self, len: u16, mut each: impl FnMut(u16, u16)) -> u16 {
        debug_assert!(0 < len && len <= self.count);
        let head = self.first;
        let (mut last, mut next) = (head, head);
        for _ in 0..len {
            last = next;
            next = self.links[usize::from(last)];
            each(last, next);
        }
        self.first = next;
        self.count -= len;
        self.chains[usize::from(head)] = Chain { last, len, waits: false };
        head
    }

    /// Gives a chain back. Without IN_ORDER its head becomes the next id.
    #[inline]
    pub(super) fn give(&mut self, head: u16) {
        if self.oldest.is_some() {
            return self.give_in_order(head);
        }
        let Chain { last, len, .. } = self.chains[usize::from(head)];
        self.links[usize::from(last)] = self.first;
        self.first = head;
        self.count += len;
    }

    /// Gives a chain back. The next id does not change, if there was one.
    #[cold]
    pub(super) fn give_behind(&mut self, head: u16) {
        if self.oldest.is_some() {
            return self.give_in_order(head);
        }
        let Chain { last, len, .. } = self.chains[usize::from(head)];
        if self.count == 0 {
            self.first = head;
        } else {
            let front = usize::from(self.first);
            self.links[usize::from(last)] = self.links[front];
            self.links[front] = head;
        }
        self.count += len;
    }

    #[inline]
    fn give_in_order(&mut self, head: u16) {
        if self.oldest != Some(head) {
            self.chains[usize::from(head)].waits = true;
            return;
        }
        let mut oldest = head;
        loop {
            let Chain { last, len, .. } = self.chains[usize::from(oldest)];
            self.count += len;
            oldest = self.links[usize::from(last)];
            if !std::mem::take(&mut self.chains[usize::from(oldest)].waits) {
                break;
            }
        }
        self.oldest = Some(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(free: &mut FreeDescriptors, len: u16) -> Vec<u16> {
        let mut taken = Vec::new();
        let head = free.take(len, |here, _| taken.push(here));
        assert_eq!(head, taken[0]);
        taken
    }

    #[test]
    fn what_was_used_last_is_used_next() {
        let mut free = FreeDescriptors::new(8, false);
        assert_eq!([take(&mut free, 3), take(&mut free, 2)], [vec![0, 1, 2], vec![3, 4]]);
        free.give(0);
        assert_eq!((free.first(), free.count()), (Some(0), 6));
        assert_eq!([take(&mut free, 3), take(&mut free, 3)], [vec![0, 1, 2], vec![5, 6, 7]]);
        assert_eq!(free.first(), None);
        free.give(3);
        free.give(5);
        assert_eq!(take(&mut free, 5), [5, 6, 7, 3, 4]);
    }

    #[test]
    fn the_next_stays_the_next() {
        let mut free = FreeDescriptors::new(8, false);
        assert_eq!([take(&mut free, 3), take(&mut free, 2)], [vec![0, 1, 2], vec![3, 4]]);
        free.give_behind(0);
        assert_eq!((free.first(), free.count()), (Some(5), 6));
        assert_eq!(take(&mut free, 6), [5, 0, 1, 2, 6, 7]);
        assert_eq!(free.first(), None);
        free.give_behind(3);
        free.give_behind(5);
        assert_eq!((take(&mut free, 1), free.count()), (vec![3], 7));
        assert_eq!(take(&mut free, 7), [5, 0, 1, 2, 6, 7, 4]);
    }

    #[test]
    fn round_and_round_in_order() {
        let mut free = FreeDescriptors::new(4, true);
        assert_eq!([take(&mut free, 2), take(&mut free, 1)], [vec![0, 1], vec![2]]);
        // It waits for the older one.
        free.give(2);
        assert_eq!((free.first(), free.count()), (Some(3), 1));
        free.give(0);
        assert_eq!((free.first(), free.count()), (Some(3), 4));
        assert_eq!(take(&mut free, 4), [3, 0, 1, 2]);
        assert_eq!(free.first(), None);
        free.give(3);
        assert_eq!((take(&mut free, 1), free.count()), (vec![3], 3));
    }

    /// A descriptor that waited for older ones is taken and given back again.
    #[test]
    fn a_free_descriptor_waits_for_nothing() {
        let mut free = FreeDescriptors::new(4, true);
        assert_eq!([take(&mut free, 1), take(&mut free, 1)], [vec![0], vec![1]]);
        free.give(1);
        free.give(0);
        // Round the table, up to the descriptor that waited.
        assert_eq!([take(&mut free, 2), take(&mut free, 1)], [vec![2, 3], vec![0]]);
        free.give(2);
        free.give(0);
        assert_eq!((free.first(), free.count()), (Some(1), 4));
    }

    #[test]
    fn one() {
        for in_order in [false, true] {
            let mut free = FreeDescriptors::new(1, in_order);
            for _ in 0..3 {
                assert_eq!(take(&mut free, 1), [0]);
                assert_eq!(free.first(), None);
                free.give(0);
            }
        }
    }
}
