use super::*;
use proptest::prelude::*;

fn all(order: &mut Order) -> Vec<(u16, u32)> {
    std::iter::from_fn(|| order.next()).collect()
}

#[test]
fn a_slow_chain_holds_up_later_ones() {
    let mut order = Order::default();
    let ids: Vec<_> = (1..=4).map(|head| order.popped(head)).collect();
    order.pushed(ids[1], 20);
    order.pushed(ids[2], 30);
    assert_eq!(order.next(), None);
    order.pushed(ids[0], 10);
    assert_eq!(all(&mut order), [(1, 10), (2, 20), (3, 30)]);
    // Neither a chain that has gone back, nor one that was never popped.
    order.pushed(ids[0], 11);
    order.pushed(ChainId::new(5, ids[3].position().wrapping_add(1)), 0);
    assert_eq!(order.next(), None);
    order.pushed(ids[3], 40);
    order.pushed(ids[3], 41);
    assert_eq!(all(&mut order), [(4, 40)]);
}

#[test]
fn chains_with_the_same_head_keep_their_own_lengths() {
    let mut order = Order::default();
    let ids = [order.popped(7), order.popped(7), order.popped(7)];
    order.pushed(ids[2], 3);
    order.pushed(ids[1], 2);
    assert_eq!(order.next(), None);
    order.pushed(ids[0], 1);
    assert_eq!(all(&mut order), [(7, 1), (7, 2), (7, 3)]);
}

/// The most work that a driver can cause: the largest ring, completed from the newest to the oldest, until
/// positions wrap.
#[test]
fn completing_a_full_ring_in_reverse_takes_a_fixed_number_of_looks_per_chain() {
    const SIZE: u16 = 1 << 15;
    let mut order = Order::default();
    for round in 0..3u64 {
        let ids: Vec<_> = (0..SIZE).map(|head| order.popped(head)).collect();
        let mut back = 0;
        for id in ids.iter().rev() {
            order.pushed(*id, u32::from(id.head()));
            back += all(&mut order).len();
        }
        assert_eq!(back, usize::from(SIZE));
        // One for the push, one for the chain that goes back, and one that finds no other.
        assert_eq!(order.lookups, 3 * u64::from(SIZE) * (round + 1));
    }
}

/// Finds completed chains by a search, without positions.
#[derive(Default)]
struct Search(VecDeque<(u16, Option<u32>)>);

impl Search {
    fn pushed(&mut self, head: u16, len: u32) {
        if let Some((_, done)) = self.0.iter_mut().find(|(other, done)| *other == head && done.is_none()) {
            *done = Some(len);
        }
    }

    fn next(&mut self) -> Option<(u16, u32)> {
        let &(head, Some(len)) = self.0.front()? else { return None };
        self.0.pop_front();
        Some((head, len))
    }
}

proptest! {
    /// Heads go back in the same order as by a search, even if a head is in flight more than once. Lengths do
    /// too, if each head is in flight once.
    #[test]
    fn as_by_a_search(
        begins in any::<u16>(),
        heads in 1u16..40,
        ops in proptest::collection::vec((any::<bool>(), any::<u16>(), any::<u32>()), 1..400),
    ) {
        let mut order = Order { first: begins, ..Order::default() };
        let mut search = Search::default();
        let mut in_flight: Vec<ChainId> = Vec::new();
        let mut twice = false;
        for (pops, which, len) in ops {
            if pops {
                let head = which % heads;
                twice |= search.0.iter().any(|(other, _)| *other == head);
                in_flight.push(order.popped(head));
                search.0.push_back((head, None));
            } else if let Some(at) = usize::from(which).checked_rem(in_flight.len()) {
                let id = in_flight.swap_remove(at);
                order.pushed(id, len);
                if twice {
                    // A search by the head may find another chain than the one that was pushed.
                    let at = usize::from(id.position().wrapping_sub(order.first));
                    search.0[at].1 = Some(len);
                } else {
                    search.pushed(id.head(), len);
                }
                loop {
                    let (new, old) = (order.next(), search.next());
                    prop_assert_eq!(new, old);
                    if new.is_none() {
                        break;
                    }
                }
            }
            prop_assert_eq!(order.chains.len(), search.0.len());
        }
    }
}
