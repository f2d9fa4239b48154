//! The turns of clients: whose line is handled next.
//!
//! Each line is charged with the work that it causes, and the client with the least charge is next. So a
//! client that asks for little waits for one line of each other client at most, however many lines they have
//! sent. The two kinds of sockets take turns in the same way, so the clients of the read-only socket
//! together delay those of the other one as little as a single one does.
//!
//! A client that was silent, or is new, gets no credit for that: it continues beside the client whose turn
//! was last. Among equals, the one that connected first is next, so new connections starve none.

use super::reader::Access;

/// The share of a client.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    charged: u64,
    is_ready: bool,
}

impl Share {
    /// Returns whether the client waits for a turn.
    pub(super) fn is_ready(self) -> bool {
        self.is_ready
    }

    /// Records that the client waits for no turn.
    pub(super) fn rest(&mut self) {
        self.is_ready = false;
    }
}

/// The shares of the sockets.
#[derive(Debug, Default)]
pub(super) struct Turns {
    full: SocketShare,
    read_only: SocketShare,
    /// The charge of the socket whose turn was last.
    last: u64,
}

/// The share of all clients of a kind of socket.
#[derive(Debug, Default)]
struct SocketShare {
    charged: u64,
    /// The charge of the client whose turn was last, before it.
    last: u64,
}

impl Turns {
    fn socket(&mut self, access: Access) -> &mut SocketShare {
        match access {
            Access::Full => &mut self.full,
            Access::ReadOnly => &mut self.read_only,
        }
    }

    /// Records that a client waits for a turn.
    pub(super) fn ready(&mut self, access: Access, share: &mut Share) {
        if share.is_ready {
            return;
        }
        let last = self.last;
        let socket = self.socket(access);
        socket.charged = socket.charged.max(last);
        *share = Share { charged: share.charged.max(socket.last), is_ready: true };
    }

    /// Returns the order of a client that waits. The one with the least is next.
    pub(super) fn order(&self, access: Access, share: Share) -> (u64, u64) {
        let socket = match access {
            Access::Full => &self.full,
            Access::ReadOnly => &self.read_only,
        };
        (socket.charged, share.charged)
    }

    /// Records that it is the turn of this client.
    pub(super) fn begin(&mut self, access: Access, share: Share) {
        let socket = self.socket(access);
        socket.last = share.charged;
        self.last = self.socket(access).charged;
    }

    /// Charges a client and its socket with work.
    pub(super) fn charge(&mut self, access: Access, share: &mut Share, work: usize) {
        share.charged += work as u64;
        self.socket(access).charged += work as u64;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Clients with endless lines that cost this much.
    struct Crowd {
        turns: Turns,
        clients: Vec<(Access, Share, usize)>,
    }

    impl Crowd {
        fn new(clients: impl IntoIterator<Item = (Access, usize)>) -> Self {
            let mut crowd = Self { turns: Turns::default(), clients: Vec::new() };
            clients.into_iter().for_each(|(access, cost)| crowd.join(access, cost));
            crowd
        }

        fn join(&mut self, access: Access, cost: usize) {
            let mut share = Share::default();
            self.turns.ready(access, &mut share);
            self.clients.push((access, share, cost));
        }

        fn turns(&mut self, count: usize) {
            for _ in 0..count {
                self.turn();
            }
        }

        /// Gives the next turn, and returns the number of the client.
        fn turn(&mut self) -> usize {
            let order = |&at: &usize| self.turns.order(self.clients[at].0, self.clients[at].1);
            let ready = (0..self.clients.len()).filter(|&at| self.clients[at].1.is_ready());
            let next = ready.min_by_key(order).unwrap();
            let (access, share, cost) = &mut self.clients[next];
            self.turns.begin(*access, *share);
            self.turns.charge(*access, share, *cost);
            next
        }
    }

    #[test]
    fn a_client_that_asks_for_little_waits_for_one_line_of_each() {
        for others in [1, 63] {
            let mut crowd = Crowd::new((0..others).map(|_| (Access::ReadOnly, 300_000)));
            crowd.turns(1000);
            for access in [Access::Full, Access::ReadOnly] {
                let newcomer = crowd.clients.len();
                crowd.join(access, 100);
                let most = if access == Access::Full { 1 } else { others };
                let waited = (0..=most).position(|_| crowd.turn() == newcomer);
                assert!(waited.is_some(), "{others} {access:?}");
                crowd.clients[newcomer].1.rest();
                crowd.turns(100);
            }
        }
    }

    #[test]
    fn a_silent_client_saves_no_turns() {
        let mut crowd = Crowd::new([(Access::Full, 100), (Access::Full, 100)]);
        crowd.clients[0].1.rest();
        crowd.turns(1000);
        let (access, share, _) = &mut crowd.clients[0];
        crowd.turns.ready(*access, share);
        let turns: usize = (0..100).filter(|_| crowd.turn() == 0).count();
        assert!((49..=51).contains(&turns), "{turns}");
    }

    #[test]
    fn a_crowd_on_the_read_only_socket_gets_half() {
        let crowd = (0..64).map(|_| (Access::ReadOnly, 5000)).chain([(Access::Full, 5000)]);
        let mut crowd = Crowd::new(crowd);
        let turns = (0..1000).filter(|_| crowd.turn() == 64).count();
        assert!((499..=501).contains(&turns), "{turns}");
    }

    proptest! {
        /// Clients of one socket that always have lines get the same work, up to one line.
        #[test]
        fn work_is_shared(costs in prop::collection::vec(1usize..1000, 2..10), turns in 1usize..1000) {
            let mut crowd = Crowd::new(costs.iter().map(|&cost| (Access::Full, cost)));
            let mut work = vec![0; costs.len()];
            for _ in 0..turns {
                let next = crowd.turn();
                work[next] += costs[next];
            }
            let most = costs.iter().max().unwrap();
            prop_assert!(work.iter().max().unwrap() - work.iter().min().unwrap() <= *most);
        }
    }
}
