//! Kicks, and devices that kick without work.
//!
//! A kick costs the worker an event, about 150 ns, whether there is work or not. A kick that finds work is
//! followed by a visit, which its device pays for. One in vain is not. A driver sends few of them: it kicks
//! while the worker just disables kicks. A front-end can write to the descriptors without end.
//!
//! So each device may kick a number of times in vain within a window ([`crate::kicks_in_vain`]). After that,
//! the worker does not listen to the descriptors of its further kicks for [`IGNORE_TIME`]. Then it listens
//! again, which reports the kicks that came meanwhile. So none is lost: a request waits for this time.

use crate::clock::Nanos;
use crate::entry::TaskState;
use crate::event_loop::EventLoop;
use std::os::fd::AsFd;

/// The time for which the worker does not listen to a descriptor.
const IGNORE_TIME: Nanos = 10_000_000;

impl EventLoop {
    /// Handles a kick of a driver.
    pub(crate) fn handle_kick(&mut self, number: u32) {
        let Some(entry) = self.entries.get_mut(number as usize).and_then(Option::as_mut) else { return };
        let armed = entry.state == TaskState::Armed;
        let flow = entry.flow;
        let vring = entry.task.vring();
        vring.counters().kicks.add(1);
        if armed && vring.has_work() {
            self.make_polled(number);
        } else {
            // Kicks stay enabled, so nothing is missed.
            vring.counters().kicks_in_vain.add(1);
            if self.kicks_in_vain.count(flow, self.latest) {
                self.ignore_kicks(number);
            }
        }
    }

    /// Stops listening to the kicks of a task for a while.
    #[cold]
    fn ignore_kicks(&mut self, number: u32) {
        let until = self.clock.now().saturating_add(IGNORE_TIME);
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        let Some(kick) = entry.task.vring().kick() else { return };
        if self.waiter.listen(kick.as_fd(), number, false).is_ok() {
            entry.deaf_until = Some(until);
            self.deaf.push(number);
            self.next_nap = self.next_nap.min(until);
        }
    }

    /// Listens again to the kicks of tasks whose time is over. Kicks that came meanwhile are reported.
    #[cold]
    pub(crate) fn listen_again(&mut self, now: Nanos) {
        let (entries, next_nap, waiter) = (&mut self.entries, &mut self.next_nap, &self.waiter);
        self.deaf.retain(|&number| {
            let Some(entry) = entries.get_mut(number as usize).and_then(Option::as_mut) else { return false };
            // A task that has another descriptor since, or another task with this number, is listened to.
            let Some(until) = entry.deaf_until else { return false };
            if until > now {
                *next_nap = until.min(*next_nap);
                return true;
            }
            entry.deaf_until = None;
            let vring = entry.task.vring();
            if let Some(kick) = vring.kick()
                && let Err(error) = waiter.listen(kick.as_fd(), number, true)
            {
                vring.fail(&format_args!("its worker cannot wait for its kicks: {error}"));
            }
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kicks_in_vain::{IN_VAIN_MAX, WINDOW};
    use crate::visit::tests::Rig;
    use kickless_device::{Kick, Next, Update};
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    /// Adds a task. Returns its number and the descriptor of its kicks.
    fn add(rig: &mut Rig, device: u64) -> (u32, OwnedFd) {
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let number = rig.add(device, Next::Idle, false);
        rig.update(number, Update::Kick(Some(Kick::new(kick.try_clone().unwrap()).unwrap())));
        rig.run();
        (number, kick)
    }

    /// Kicks, and has the worker take the events. Returns their number.
    fn kick(rig: &mut Rig, kicks: &[&OwnedFd]) -> usize {
        for kick in kicks {
            rustix::io::write(kick, &1u64.to_ne_bytes()).unwrap();
        }
        rig.worker.wait(Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn a_device_that_kicks_in_vain_without_end_is_not_listened_to() {
        let mut rig = Rig::new();
        let ((first, kicks), (second, others)) = (add(&mut rig, 0), add(&mut rig, 0));
        let (other, of_other) = add(&mut rig, 1);
        let heard = (0..10 * IN_VAIN_MAX).map(|_| kick(&mut rig, &[&kicks, &others])).sum::<usize>();
        assert_eq!(heard as u32, IN_VAIN_MAX + 2, "the window is the worker's time, which stands");
        assert_eq!(rig.counted_kicks(first) + rig.counted_kicks(second), heard as u64);
        // Another device is heard.
        assert_eq!((kick(&mut rig, &[&of_other]), rig.counted_kicks(other)), (1, 1));
        // It sleeps no longer than that. Then the kicks of that time are reported, once.
        let until = rig.worker.next_nap;
        assert!(until < Nanos::MAX);
        rig.worker.wake_naps(until - 1);
        assert_eq!(kick(&mut rig, &[&kicks]), 0);
        rig.worker.wake_naps(until + IGNORE_TIME);
        assert_eq!(rig.worker.next_nap, Nanos::MAX);
        rig.worker.latest += WINDOW;
        assert_eq!(kick(&mut rig, &[]), 2);
        assert_eq!((kick(&mut rig, &[]), kick(&mut rig, &[&kicks])), (0, 1));
    }

    /// The kick comes while the worker does not listen.
    #[test]
    fn a_kick_with_work_is_late_and_not_lost() {
        let mut rig = Rig::new();
        let (number, kicks) = add(&mut rig, 0);
        while rig.worker.deaf.is_empty() {
            kick(&mut rig, &[&kicks]);
        }
        rig.submit(number);
        let before = rig.polls();
        assert_eq!(kick(&mut rig, &[&kicks]), 0);
        let until = rig.worker.next_nap;
        rig.worker.wake_naps(until);
        assert_eq!(kick(&mut rig, &[]), 1);
        rig.worker.visit_scheduled(0);
        assert_eq!(rig.polls(), [before[0] + 1]);
    }

    /// A front-end sends descriptors without end, each of which is kicked in vain.
    #[test]
    fn a_task_is_in_the_list_once() {
        let mut rig = Rig::new();
        let (number, kicks) = add(&mut rig, 0);
        while rig.worker.deaf.is_empty() {
            kick(&mut rig, &[&kicks]);
        }
        for _ in 0..3 {
            let new = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            rig.update(number, Update::Kick(Some(Kick::new(new.try_clone().unwrap()).unwrap())));
            rig.run();
            assert!(rig.worker.deaf.is_empty());
            kick(&mut rig, &[&new]);
            assert_eq!(rig.worker.deaf, [number]);
        }
    }

    /// A new descriptor is listened to at once, and the end of the old one's time changes nothing.
    #[test]
    fn another_descriptor_is_listened_to() {
        let mut rig = Rig::new();
        let (number, kicks) = add(&mut rig, 0);
        while rig.worker.deaf.is_empty() {
            kick(&mut rig, &[&kicks]);
        }
        let new = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rig.update(number, Update::Kick(Some(Kick::new(new.try_clone().unwrap()).unwrap())));
        rig.run();
        rig.worker.latest += WINDOW;
        assert_eq!(kick(&mut rig, &[&new]), 1);
        let until = rig.worker.next_nap;
        rig.worker.wake_naps(until);
        assert_eq!((kick(&mut rig, &[]), kick(&mut rig, &[&new])), (0, 1));
    }
}
