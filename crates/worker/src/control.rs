//! Work items in the loop: tasks come, change, move and go.

use crate::balance;
use crate::clock::{Nanos, nanos};
use crate::entry::{Entry, NextHolder, TaskState};
use crate::event_loop::EventLoop;
use crate::mailbox::{MovedTask, Placement, TaskKey, WorkItem};
use crate::policy::Policy;
use kickless_device::{Leave, QueueTask, Stopped, TaskLocation, Update, Vring};
use kickless_sync::mpsc::{Sender, channel};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use tracing::{debug, info};

/// The interval at which loads are compared, while the worker is awake.
const BALANCE_EVERY: Nanos = 100_000_000;
/// The shortest time that a task stays after it has arrived.
const STAY_MIN: Nanos = 1_000_000_000;

impl EventLoop {
    pub(crate) fn handle(&mut self, item: WorkItem) {
        match item {
            WorkItem::Spawn(key, placement, task) => {
                let number = self.add_task(key, placement, task, None);
                // An earlier call may have gone to a descriptor that nothing was reading.
                if let Some(entry) = self.entries[number as usize].as_mut() {
                    entry.task.vring().send_call();
                }
            }
            WorkItem::Adopt(key, placement, moved) => {
                let MovedTask { mut task, mut policy, from } = *moved;
                // The rule may have changed here before the task arrived, and there after it had left.
                policy.set(self.poll);
                task.vring().counters().moves.add(u64::from(from != self.worker_id));
                self.add_task(key, placement, task, Some(policy));
            }
            WorkItem::Update(key, update, done) => {
                if let Some(&number) = self.numbers.get(&key) {
                    self.update(number, update);
                }
                // The receiver may be gone.
                let _ = done.send(());
            }
            WorkItem::Stop(key, leave, done) => {
                if let Some(&number) = self.numbers.get(&key) {
                    self.begin_stop(number, leave, done);
                }
            }
            WorkItem::Park(key, done) => {
                if let Some(&number) = self.numbers.get(&key) {
                    self.set_next_holder(number, Some(NextHolder::Handle(done)));
                }
            }
            WorkItem::Unpark(key) => {
                if let Some(&number) = self.numbers.get(&key) {
                    self.end_park(number);
                }
            }
            WorkItem::MoveAll(to) => self.begin_move_of_all(to),
            WorkItem::Poll(poll) => {
                self.poll = poll;
                for number in 0..self.entries.len() as u32 {
                    if let Some(entry) = self.entries[number as usize].as_mut() {
                        entry.policy.set(poll);
                        self.make_polled(number);
                    }
                }
            }
            WorkItem::Weight(device, weight) => self.scheduler.set_weight(device, weight),
            WorkItem::Pass(done) => {
                let _ = done.send(());
            }
            #[cfg(debug_assertions)]
            WorkItem::Block(until) => drop(until.recv()),
            WorkItem::End => {
                self.ending = true;
                let all: Vec<u32> = self.numbers.values().copied().collect();
                for number in all {
                    self.begin_stop(number, Leave::Failed, no_receiver());
                }
            }
        }
    }

    /// Starts to stop a task, or adds a receiver of its answer.
    fn begin_stop(&mut self, number: u32, leave: Leave, done: Sender<Stopped>) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        if entry.stopping.is_empty() {
            entry.task.stopping(leave);
        }
        entry.stopping.push(done);
        self.make_polled(number);
    }

    /// Adds a task, which is polled once, with or without a kick. Returns its number.
    pub(crate) fn add_task(
        &mut self,
        key: TaskKey,
        placement: Placement,
        mut task: Box<dyn QueueTask>,
        policy: Option<Policy>,
    ) -> u32 {
        let now = self.clock.now();
        let number = self.free.pop().unwrap_or(self.entries.len() as u32);
        let attached = task.attach(&mut self.engine);
        let worker_id = self.peers.location_of(self.worker_id);
        task.set_location(Some(TaskLocation { worker_id, task: number }));
        let offers_parcels = task.offers_parcels();
        let vring = task.vring();
        let watched = vring.kick().map_or(Ok(()), |kick| self.waiter.add(kick.as_fd(), number));
        if let Err(error) = attached.and(watched) {
            vring.fail(&format_args!("its worker cannot serve it: {error}"));
        }
        let policy = policy.unwrap_or_else(|| Policy::new(self.poll, vring.size()));
        task.disarm();
        let far_side_interval = nanos(task.far_side_interval());
        let flow = self.scheduler.join(placement.device, placement.weight.load(Ordering::Relaxed));
        let entry = Entry {
            key,
            placement,
            task,
            flow,
            offers_parcels,
            policy,
            state: TaskState::Polled,
            spin_until: None,
            quiet: false,
            counted_until: now,
            far_side_interval,
            far_side_due: 0,
            watched: None,
            waker: self.mailbox.waker().of_task(number),
            waits: false,
            in_naps: false,
            deaf_until: None,
            call_due: None,
            served_before: self.served,
            cost: 0,
            arrived: now,
            next_holder: None,
            stopping: Vec::new(),
        };
        match self.entries.get_mut(number as usize) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        self.numbers.insert(key, number);
        self.scheduler.push(flow, number);
        self.follow_home(number);
        if self.ending {
            self.begin_stop(number, Leave::Failed, no_receiver());
        }
        number
    }

    fn update(&mut self, number: u32, update: Update) {
        self.return_credit_before(number, &update);
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        let vring = entry.task.vring();
        let memory = matches!(update, Update::Memory(_));
        let enable = if let Update::Enable(enable) = update { Some(enable) } else { None };
        if let Update::Kick(new) = &update {
            if let Some(old) = vring.kick() {
                self.waiter.remove(old.as_fd());
            }
            let watched = new.as_ref().map_or(Ok(()), |new| self.waiter.add(new.as_fd(), number));
            if let Err(error) = watched {
                vring.fail(&format_args!("cannot wait for its kicks: {error}"));
            }
            if entry.deaf_until.take().is_some() {
                self.deaf.retain(|deaf| *deaf != number);
            }
        }
        vring.apply(update);
        if memory {
            entry.task.memory_changed();
        }
        if let Some(enable) = enable {
            entry.task.set_enabled(enable);
        }
        self.make_polled(number);
    }

    /// Starts to move a task to a less busy worker, if it is time to compare loads and this worker has too
    /// much to do.
    #[inline]
    pub(crate) fn balance(&mut self, now: Nanos) {
        if now.saturating_sub(self.last_balance) >= BALANCE_EVERY {
            self.update_loads(now);
        }
    }

    #[cold]
    fn update_loads(&mut self, now: Nanos) {
        let elapsed = now.saturating_sub(std::mem::replace(&mut self.last_balance, now)).max(1);
        let thousandths = |part: u64, whole: u64| (u128::from(part) * 1000 / u128::from(whole.max(1))) as u32;
        let busy = thousandths(std::mem::take(&mut self.busy), elapsed).min(1000);
        self.peers.publish_load(self.worker_id, busy, now);
        let cost: u64 = self.entries.iter().flatten().map(|entry| entry.cost).sum();
        let mut candidates = Vec::new();
        let mut moving = false;
        for (number, entry) in self.entries.iter_mut().enumerate() {
            let Some(entry) = entry else { continue };
            entry.count_time(now);
            moving |= entry.is_leaving();
            let share = thousandths(std::mem::take(&mut entry.cost), cost) * busy / 1000;
            let stays = now.saturating_sub(entry.arrived) < STAY_MIN;
            candidates.push((number as u32, if stays { 0 } else { share }));
        }
        self.join_groups(&mut candidates);
        for number in 0..self.entries.len() as u32 {
            self.follow_home(number);
        }
        let overloaded = std::mem::replace(&mut self.overloaded, busy >= balance::OVERLOADED);
        // A single busy interval may be a burst. And a move that is under way changes the loads.
        if !overloaded || moving || self.ending {
            return;
        }
        let loads: Vec<u32> = self.peers.loads(now).collect();
        let shares: Vec<u32> = candidates.iter().map(|candidate| candidate.1).collect();
        if let Some((task, to)) = balance::choose(self.worker_id, &loads, &shares) {
            let number = candidates[task].0;
            debug!(from = self.worker_id, to, load = busy, share = shares[task], "a queue starts to move");
            self.begin_move(number, to);
        }
    }

    /// Moves a task, and the tasks of its affinity group that are here.
    fn begin_move(&mut self, number: u32, to: usize) {
        let Some(entry) = self.entries[number as usize].as_ref() else { return };
        let Some(home) = entry.placement.home.clone() else { return self.move_one(number, to) };
        if to < self.peers.workers.len() {
            home.store(to, Ordering::Relaxed);
            (0..self.entries.len() as u32).for_each(|number| self.follow_home(number));
        }
    }

    /// Moves all tasks. Looks at each once, because there can be thousands.
    fn begin_move_of_all(&mut self, to: usize) {
        if to >= self.peers.workers.len() {
            return;
        }
        for number in 0..self.entries.len() as u32 {
            let home = self.entries[number as usize].as_ref().and_then(|entry| entry.placement.home.as_ref());
            if let Some(home) = home {
                home.store(to, Ordering::Relaxed);
            }
            self.move_one(number, to);
        }
    }

    /// Starts to move one task. It pops nothing from now on, and moves when its requests in flight are done.
    pub(crate) fn move_one(&mut self, number: u32, to: usize) {
        if let Some(entry) = self.entries[number as usize].as_mut()
            && to != self.worker_id
            && to < self.peers.workers.len()
            && !entry.is_leaving()
        {
            self.set_next_holder(number, Some(NextHolder::Worker(to)));
        }
    }

    /// Changes what becomes of a task that does not stop: it leaves for another holder, or goes on.
    pub(crate) fn set_next_holder(&mut self, number: u32, next_holder: Option<NextHolder>) {
        if let Some(entry) = self.entries[number as usize].as_mut() {
            entry.next_holder = next_holder;
            self.make_polled(number);
        }
    }

    /// Ends, moves or parks a leaving task, which is not on the list, if none of its requests are in flight.
    pub(crate) fn try_leave(&mut self, number: u32) {
        let now = self.clock.now();
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        // An item in the mailbox goes before a park, and puts the task on the list.
        let parks = entry.stopping.is_empty() && matches!(entry.next_holder, Some(NextHolder::Handle(_)));
        if entry.is_draining() || parks && self.mailbox.has_for(entry.key) {
            entry.enter(TaskState::Draining, now);
            return self.watch_event(number);
        }
        if !entry.stopping.is_empty() || parks {
            entry.task.return_credit();
        }
        entry.count_time(now);
        self.forget_event(number);
        let Some(mut entry) = self.entries[number as usize].take() else { return };
        self.numbers.remove(&entry.key);
        self.free.push(number);
        // A number must not be in these lists twice when another task gets it.
        if entry.in_naps {
            self.naps.retain(|napping| *napping != number);
        }
        if entry.deaf_until.is_some() {
            self.deaf.retain(|deaf| *deaf != number);
        }
        if entry.call_due.is_some() {
            self.pending_calls.retain(|pending| *pending != number);
        }
        self.scheduler.leave(entry.flow);
        entry.task.set_location(None);
        entry.task.detach(&mut self.engine);
        let vring: &mut Vring = entry.task.vring();
        if let Some(kick) = vring.kick() {
            self.waiter.remove(kick.as_fd());
        }
        if entry.stopping.is_empty() {
            match entry.next_holder.take() {
                Some(NextHolder::Worker(to)) => return self.hand_over(entry, to),
                Some(NextHolder::Handle(done)) => return self.park(entry, done),
                None => {}
            }
        }
        let stopped = vring.stop();
        debug!(queue = vring.index(), next_avail = stopped.next_avail, "queue stopped");
        // The resources of the task, above all memory, are released before a receiver learns that it has
        // stopped.
        drop(entry.task);
        for done in entry.stopping {
            let _ = done.send(stopped.clone());
        }
    }

    /// Gives a task to another worker, with all its work items that are not done yet.
    fn hand_over(&mut self, mut entry: Entry, to: usize) {
        let (key, placement) = (entry.key, entry.placement);
        let vring = entry.task.vring();
        vring.send_pending_call();
        let queue = vring.index();
        let from = self.worker_id;
        let moved = Box::new(MovedTask { task: entry.task, policy: entry.policy, from });
        match self.peers.hand_over(key, &placement, moved, to) {
            Ok(()) => info!(queue, from, to, "queue moved to another worker"),
            // The other worker has ended, so the task stays here.
            Err(WorkItem::Adopt(key, placement, moved)) => {
                let MovedTask { task, policy, .. } = *moved;
                if let Some(home) = &placement.home {
                    home.store(from, Ordering::Relaxed);
                }
                self.add_task(key, placement, task, Some(policy));
            }
            Err(_) => {}
        }
    }
}

/// Makes a sender without a receiver, for a task that stops because its worker ends.
fn no_receiver() -> Sender<Stopped> {
    channel().0
}
