//! Carries out work items, in slices of time ([`crate::item_slices`]).

use crate::event_loop::EventLoop;

impl EventLoop {
    /// Carries out items for a slice of time, if one may begin. `idle`: no task is on the list.
    pub(crate) fn carry_out_items(&mut self, idle: bool) {
        let began = self.clock.now();
        if !self.item_slices.may_begin(began, idle, self.served) {
            return;
        }
        let mut now = began;
        while !self.item_slices.is_over(began, now) {
            let Some(item) = self.mailbox.take_next() else {
                self.has_items = false;
                break;
            };
            self.handle(item);
            now = self.clock.now();
        }
        self.item_slices.end(began, now, self.served);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Poll;
    use crate::clock::Nanos;
    use crate::mailbox::{Mailbox, WorkItem};
    use crate::peers::Peers;
    use kickless_device::Clock;
    use kickless_io::{Engine, EngineKind, Waker};
    use kickless_sync::mpsc::{Receiver, channel};
    use std::sync::Arc;

    #[test]
    fn items_that_are_left_are_carried_out_later_in_their_order() {
        let mailbox = Arc::new(Mailbox::new(Waker::of_worker().unwrap()));
        let peers = Arc::new(Peers::new(Clock::start(), vec![mailbox.clone()]));
        let engine = Engine::open(EngineKind::Threads, 1).unwrap();
        let mut worker = EventLoop::new(peers, 0, engine, Poll::Never).unwrap();
        let answers: Vec<Receiver<()>> = (0..3)
            .map(|_| {
                let (done, answer) = channel();
                assert!(mailbox.put(WorkItem::Pass(done)).is_ok());
                answer
            })
            .collect();
        let answered = |worker: &mut EventLoop, idle| {
            worker.carry_out_items(idle);
            answers.iter().map(|answer| answer.try_recv().is_ok()).collect::<Vec<_>>()
        };
        // A slice is over as soon as it begins, and its pause does not end.
        (worker.item_slices.slice, worker.has_items) = (1, true);
        assert_eq!(answered(&mut worker, false), [true, false, false]);
        (worker.item_slices.due, worker.served) = (Nanos::MAX, 1);
        assert_eq!(answered(&mut worker, false), [false; 3]);
        assert!(worker.has_items);
        assert_eq!(answered(&mut worker, true), [false, true, false]);
        assert_eq!(answered(&mut worker, true), [false, false, true]);
        assert!(worker.has_items, "it has not seen that there are no more");
        assert_eq!(answered(&mut worker, true), [false; 3]);
        assert!(!worker.has_items);
    }
}
