//! Tasks in the loop: visits, completions, and changes of state.

#[cfg(test)]
pub(crate) mod tests;

use crate::clock::Nanos;
use crate::entry::TaskState;
use crate::event_loop::{EventLoop, RETRY};
use crate::policy::Verdict;
use crate::scheduler::{Flow, VAIN_FAR_SIDE, VAIN_RING, Visit};
use kickless_device::{Context, Next};

/// The shortest time for which a throttled task is left alone. Its limiter keeps the tokens of this time. So
/// the list of naps is searched for throttled tasks at most this often.
const THROTTLED_MIN: Nanos = 20_000;

/// The time between two polls of a spinning task that try all requests that wait, although nothing has woken
/// it. A try takes 50 nanoseconds, so those of 250 queues with 16 requests of a disk that hangs take 2 % of a
/// worker.
const RETRY_INTERVAL: Nanos = 10_000_000;

/// The time for which a task is looked at instead of a nap, before it is asked again whether another one
/// keeps the core: a tenth of a nap.
const LOOKED_AT: Nanos = 10_000;

/// Returns the time until which a throttled task is left alone.
fn throttled_until(now: Nanos, wait_ns: u64) -> Nanos {
    now.saturating_add(wait_ns.max(THROTTLED_MIN))
}

/// Returns the end of a nap that would last until `until`: the end of another task's nap, if that is in the
/// second half of this one. One wake then serves both, and their next naps begin together.
fn shared_end(now: Nanos, until: Nanos, other: Nanos) -> Nanos {
    if other < until && other - now.min(other) >= (until - now) / 2 { other } else { until }
}

impl EventLoop {
    /// Runs one round of the poll list.
    pub(crate) fn visit_scheduled(&mut self, now: Nanos) {
        if self.scheduler.is_empty() {
            return;
        }
        self.stalls.last_visit = None;
        if let Some((number, budget)) = self.scheduler.begin_lone_round() {
            let visit = self.visit(number, budget, now);
            self.count(visit);
            self.scheduler.end_lone_round(number, visit, now);
        } else {
            self.visit_round(now);
        }
        if !self.woken.is_empty() {
            self.wake_neighbours();
        }
    }

    /// Visits the tasks on the poll list, as far as the budgets of their devices go.
    #[inline(always)]
    fn visit_round(&mut self, now: Nanos) {
        self.scheduler.begin_round();
        while let Some((number, budget)) = self.scheduler.next(now) {
            let Some(entry) = self.entries[number as usize].as_ref() else { continue };
            let looks_far = entry.far_side_interval > 0 && now >= entry.far_side_due;
            let (flow, vain) = (entry.flow, if looks_far { VAIN_FAR_SIDE } else { VAIN_RING });
            let visit = self.visit(number, budget, now);
            self.count(visit);
            self.scheduler.visited(flow, number, visit, vain);
        }
    }

    /// Counts the work of a visit. Saturates, because a request can be of 4 GiB, and there can be many of
    /// them.
    #[inline]
    fn count(&mut self, visit: Visit) {
        self.work = self.work.saturating_add(visit.cost).saturating_add(1);
    }

    /// Polls a task, which is off the list meanwhile.
    #[inline(never)]
    fn visit(&mut self, number: u32, budget: u32, now: Nanos) -> Visit {
        if self.stalls.is_on(now) {
            return self.visit_watched(number, budget, now);
        }
        self.visit_now(number, budget, now)
    }

    /// Does the same as [`EventLoop::visit`], without a watch for stalls.
    #[inline(always)]
    pub(crate) fn visit_now(&mut self, number: u32, budget: u32, now: Nanos) -> Visit {
        match self.entries[number as usize].as_ref() {
            Some(entry) if entry.offers_parcels => self.visit_beside(number, budget, now),
            _ => self.visit_task::<false>(number, budget, now),
        }
    }

    /// Does the same as [`EventLoop::visit`], for a task that may offer parcels. A function of its own, so
    /// that a visit of another task costs no more instructions.
    #[inline(never)]
    fn visit_beside(&mut self, number: u32, budget: u32, now: Nanos) -> Visit {
        self.visit_task::<true>(number, budget, now)
    }

    /// Does the same as [`EventLoop::visit`]. With `BESIDE`, the task may offer parcels.
    #[inline(always)]
    fn visit_task<const BESIDE: bool>(&mut self, number: u32, budget: u32, now: Nanos) -> Visit {
        let gone = Visit { cost: 0, more: false, stays: false };
        let Some(entry) = self.entries[number as usize].as_mut() else { return gone };
        let leaving = entry.is_leaving();
        let far_side_due = now >= entry.far_side_due;
        let served_others = self.served.wrapping_sub(entry.served_before);
        let budget = if leaving { 0 } else { budget };
        let (entry, polled) = if BESIDE {
            let beside = self.poll_beside(number, budget, now, far_side_due, served_others);
            let (Some(beside), Some(entry)) = (beside, self.entries[number as usize].as_mut()) else {
                return gone;
            };
            (entry, beside)
        } else {
            let (waker, clock, now_ns) = (&entry.waker, self.clock, self.latest);
            let (engine, neighbours) = (&mut self.engine, None);
            let mut context = Context {
                engine,
                task: number,
                waker,
                far_side_due,
                clock,
                now_ns,
                served_others,
                neighbours,
            };
            let polled = entry.placement.limiter.poll(&mut *entry.task, &mut context, budget);
            self.latest = context.now_ns;
            (entry, polled)
        };
        let cost = polled.cost;
        let was_quiet = std::mem::replace(&mut entry.quiet, polled.next == Next::Quiet);
        // This includes chains that are not popped yet.
        entry.cost += u64::from(cost);
        let vring = entry.task.vring();
        let has_pending_call = vring.has_pending_call();
        let counters = vring.counters();
        if polled.served > 0 {
            self.worked = true;
            self.served = self.served.wrapping_add(polled.served);
            entry.served_before = self.served;
            counters.requests.add(polled.served.into());
            counters.polls_with_work.add(1);
            if entry.spin_until.take().is_some() && !was_quiet {
                counters.kicks_avoided.add(1);
            }
            entry.policy.found(now, polled.served);
            // More may have come to the far side meanwhile.
            entry.far_side_due = 0;
        } else {
            counters.polls_without_work.add(1);
        }
        let entry = if has_pending_call {
            self.note_pending_call(number);
            let Some(entry) = self.entries[number as usize].as_mut() else { return gone };
            entry
        } else {
            entry
        };
        match polled.next {
            Next::More => return Visit { cost, more: true, stays: true },
            Next::Blocked if !far_side_due => {
                // This poll has not looked at all that the task waits for.
                entry.far_side_due = 0;
                return Visit { cost, more: false, stays: true };
            }
            Next::Blocked => {
                entry.enter(TaskState::Blocked, now);
                entry.waits = true;
            }
            Next::Waiting if leaving => {
                entry.enter(TaskState::Blocked, now);
                entry.waits = true;
            }
            Next::Idle | Next::Quiet if leaving => self.try_leave(number),
            Next::Throttled { .. } if leaving && !entry.is_draining() => self.try_leave(number),
            Next::Throttled { wait_ns } => {
                let until = throttled_until(self.clock.now(), wait_ns);
                entry.enter(TaskState::Throttled { until }, now);
                self.visit_at(number, until);
            }
            // Its completions may cause the next request before this turn is over.
            _ if polled.served > 0 => return Visit { cost, more: false, stays: true },
            next => {
                let quiet = next == Next::Quiet && !entry.task.vring().is_broken();
                if far_side_due {
                    let rests = next == Next::Waiting && entry.far_side_interval == 0;
                    let interval = if rests { RETRY_INTERVAL } else { entry.far_side_interval };
                    entry.far_side_due = now.saturating_add(interval);
                }
                let spins = entry.spin_until.is_some_and(|until| now < until);
                if !spins && !far_side_due {
                    // Only a poll that has checked the far side too can be the last before a sleep.
                    entry.far_side_due = 0;
                }
                let stays = spins || !far_side_due || self.found_empty(number, now, quiet);
                if !stays
                    && next == Next::Waiting
                    && let Some(entry) = self.entries[number as usize].as_mut()
                {
                    entry.waits = true;
                }
                return Visit { cost, more: false, stays };
            }
        }
        Visit { cost, more: false, stays: false }
    }

    /// Asks the policy what to do with a task that was found empty. Returns whether it stays on the list. A
    /// `quiet` task does not wait for kicks.
    fn found_empty(&mut self, number: u32, now: Nanos, quiet: bool) -> bool {
        let Some(entry) = self.entries[number as usize].as_mut() else { return false };
        let (flow, on_disk) = (entry.flow, entry.task.in_flight() > 0);
        let mut verdict = entry.policy.empty(now, &self.host_probe.host, on_disk);
        if let Verdict::Nap { until, .. } = verdict
            && entry.policy.may_look_in_nap()
            && self.keeps_core_for(flow)
        {
            verdict = Verdict::Spin { until: until.min(now.saturating_add(LOOKED_AT)) };
        }
        let Some(entry) = self.entries[number as usize].as_mut() else { return false };
        match verdict {
            Verdict::Spin { until } => {
                entry.spin_until = Some(until);
                true
            }
            Verdict::Nap { until, ignore_completions } => {
                let until = shared_end(now, until, self.next_nap);
                entry.enter(TaskState::Napping { until, ignore_completions }, now);
                self.visit_at(number, until);
                false
            }
            Verdict::Arm if !quiet && entry.task.arm() => {
                // The visit that follows finds the work, which ends the wait.
                entry.task.disarm();
                entry.spin_until = None;
                true
            }
            Verdict::Arm => {
                entry.policy.armed();
                entry.enter(if quiet { TaskState::Quiet } else { TaskState::Armed }, now);
                self.watch_event(number);
                false
            }
        }
    }

    /// Returns whether a device has a task on the list whose waits are spun through. A nap of another of its
    /// tasks would delay requests and save nothing: of a card, both queues of a pair pass the same frames. A
    /// task of another device naps in any case, because looks at it would take time from this one.
    fn keeps_core_for(&self, flow: Flow) -> bool {
        let entry = |number: u32| self.entries[number as usize].as_ref();
        self.scheduler.listed(flow).any(|number| entry(number).is_some_and(|entry| entry.policy.keeps_core()))
    }

    /// Has a task that naps or is throttled polled at a time.
    fn visit_at(&mut self, number: u32, until: Nanos) {
        self.next_nap = self.next_nap.min(until);
        if let Some(entry) = self.entries[number as usize].as_mut()
            && !std::mem::replace(&mut entry.in_naps, true)
        {
            self.naps.push(number);
        }
        self.ignore_event(number);
    }

    /// Reaps completions and gives each task its own.
    pub(crate) fn complete(&mut self) {
        // An engine that is ready is reaped even if nothing is in flight, because only a reap makes it
        // unready.
        if self.engine.in_flight() == 0 && !std::mem::take(&mut self.engine_ready) {
            return;
        }
        self.engine.reap(&mut self.completions);
        if self.completions.is_empty() {
            return;
        }
        self.worked = true;
        let mut completions = std::mem::take(&mut self.completions);
        let mut rest = completions.drain(..).peekable();
        while let Some(first) = rest.next() {
            let number = first.token.source;
            self.batch.push(first);
            while let Some(next) = rest.next_if(|next| next.token.source == number) {
                self.batch.push(next);
            }
            self.work = self.work.saturating_add(self.batch.len() as u32);
            if let Some(entry) = self.entries[number as usize].as_mut() {
                let (waker, clock, now_ns) = (&entry.waker, self.clock, self.latest);
                let mut context = Context {
                    engine: &mut self.engine,
                    task: number,
                    waker,
                    far_side_due: true,
                    clock,
                    now_ns,
                    served_others: 0,
                    neighbours: None,
                };
                let waits = entry.task.complete(&mut context, &mut self.batch);
                self.latest = context.now_ns;
                self.completed(number, waits);
            }
            self.batch.clear();
        }
        drop(rest);
        self.completions = completions;
    }

    /// Continues a task that has taken completions.
    fn completed(&mut self, number: u32, waits: bool) {
        self.note_pending_call(number);
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        match entry.state {
            // A leaving task too, because nothing else would continue the request.
            _ if waits => self.make_polled(number),
            TaskState::Draining => self.try_leave(number),
            TaskState::Polled if entry.spin_until.is_some() => {
                entry.spin_until = None;
                entry.policy.found(self.clock.now(), 0);
            }
            // The answer may cause the next request soon.
            TaskState::Armed => {
                let now = self.clock.now();
                entry.policy.woken(now, &self.host_probe.host);
                entry.policy.found(now, 0);
                let on_disk = entry.task.in_flight() > 0;
                match entry.policy.empty(now, &self.host_probe.host, on_disk) {
                    Verdict::Spin { until } => {
                        self.schedule(number, now);
                        if let Some(entry) = self.entries[number as usize].as_mut() {
                            entry.spin_until = Some(until);
                        }
                    }
                    Verdict::Nap { .. } | Verdict::Arm => entry.policy.armed(),
                }
            }
            TaskState::Napping { .. } => {
                self.make_polled(number);
                if let Some(entry) = self.entries[number as usize].as_mut() {
                    entry.policy.found(self.clock.now(), 0);
                }
            }
            // Kicks are off, and after the completion the task may need its ring.
            TaskState::Quiet => self.make_polled(number),
            TaskState::Polled | TaskState::Blocked | TaskState::Throttled { .. } => {}
        }
        // The completion can make the room that the task waits for.
        self.wake(number);
    }

    /// Polls a task again if it waits. The next poll looks at all that it waits for.
    fn wake(&mut self, number: u32) {
        let Some(entry) = self.entries.get_mut(number as usize).and_then(Option::as_mut) else { return };
        entry.far_side_due = 0;
        if entry.waits {
            self.make_polled(number);
        }
    }

    /// Polls the tasks that their wakers name, if they wait.
    pub(crate) fn wake_woken(&mut self) {
        let (mailbox, tasks) = (self.mailbox.clone(), self.entries.len());
        mailbox.waker().take_woken(tasks, |number| self.wake(number));
    }

    /// Polls tasks for which the engine has room again: as many as it has room for, in turn.
    #[cold]
    pub(crate) fn wake_with_room(&mut self) {
        let mut numbers = std::mem::take(&mut self.with_room);
        self.engine.take_sources_with_room(&mut numbers);
        numbers.drain(..).for_each(|number| self.wake(number));
        self.with_room = numbers;
    }

    /// Puts a task on the poll list, unless it is there already.
    pub(crate) fn make_polled(&mut self, number: u32) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        match entry.state {
            TaskState::Polled => {
                // It is polled in any case, and then asks its policy anew.
                entry.spin_until = None;
                return;
            }
            TaskState::Armed | TaskState::Quiet => {
                entry.policy.woken(self.clock.now(), &self.host_probe.host);
            }
            TaskState::Napping { .. } => {
                let vring = entry.task.vring();
                if !entry.quiet && vring.pending() > 0 {
                    vring.counters().kicks_avoided.add(1);
                }
            }
            TaskState::Blocked | TaskState::Throttled { .. } | TaskState::Draining => {}
        }
        self.schedule(number, self.clock.now());
    }

    fn schedule(&mut self, number: u32, now: Nanos) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        if entry.state == TaskState::Armed {
            entry.task.disarm();
        }
        entry.enter(TaskState::Polled, now);
        entry.waits = false;
        entry.far_side_due = 0;
        self.scheduler.push(entry.flow, number);
    }

    /// Notes the time at which a task's pending call is due.
    pub(crate) fn note_pending_call(&mut self, number: u32) {
        let Some(entry) = self.entries[number as usize].as_mut() else { return };
        if entry.call_due.is_none() && entry.task.vring().has_pending_call() {
            let due = self.clock.now().saturating_add(RETRY);
            entry.call_due = Some(due);
            self.next_call = self.next_call.min(due);
            self.pending_calls.push(number);
        }
    }
}
