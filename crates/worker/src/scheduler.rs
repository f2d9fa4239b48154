//! The poll list: the order of visits and the budget of each. Pure.
//!
//! Devices share a worker by deficit round robin (Shreedhar and Varghese, 1995), each with its weight. The
//! tasks of one device take turns. The cost of a visit is the one that
//! [`QueueTask::poll`](kickless_device::QueueTask::poll) reports, which counts requests and bytes. A device
//! that does not use up its turn, because it has nothing more to do, loses the rest. A task that ends its
//! poll early and has more to do is visited again in the same turn. If its device is alone, that is in the
//! next round, after kicks and completions.
//!
//! A visit that finds nothing takes time too, so it has a cost: [`VAIN_RING`], or [`VAIN_FAR_SIDE`] if it
//! also looked at a far side. So a device with many empty rings pays for looking at them, and in its turn the
//! worker visits only as many as the turn pays for. The others are first in its next turn. A device that is
//! alone pays nobody.
//!
//! A long turn is efficient: many requests share one submission to the engine and one call. A short turn lets
//! the others go on. A device alone has long turns. A device is *light* if it recently did all its work in
//! the shortest turn, so it takes no more than it leaves to the others. Beside a light device, turns are the
//! shortest. The next request of a light device comes when its last is answered, and would otherwise wait for
//! a long turn of another device each time.

use crate::clock::Nanos;
use std::collections::VecDeque;

/// The cost of one turn of a device that is alone on the list.
const TURN_ALONE: u32 = 64;
/// The cost of one turn beside other busy devices: this divided by their number, but at least `TURN_MIN`.
const TURNS_SHARED: u32 = 64;
const TURN_MIN: u32 = 8;
/// The cost of one turn beside a light device.
const TURN_BESIDE_LIGHT: u32 = 2;
/// The time for which a device counts as light after a turn in which it did all its work.
const LIGHT_NS: Nanos = 1_000_000;

/// The parts of a cost of 1. A request takes about 600 ns, and a visit that finds an empty ring 50 to 100 ns.
const PARTS: u32 = 8;
/// The parts that a visit costs if it found nothing in the ring, and nothing else.
pub(crate) const VAIN_RING: u32 = 1;
/// The same for one that also checked a far side by a system call, which takes as long as a request.
pub(crate) const VAIN_FAR_SIDE: u32 = PARTS;

/// The number of a device on one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow(usize);

impl Flow {
    /// Returns the number. Free numbers are used again.
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

#[derive(Debug)]
struct FlowState {
    device: u64,
    weight: u32,
    /// The number of the device's tasks on this worker. 0: this number is free.
    members: usize,
    /// The device's tasks that are on the list.
    tasks: VecDeque<u32>,
    /// The cost that the device may still take in its turn. A negative one is a debt.
    deficit: i64,
    /// The number of tasks left to visit in this turn.
    visits_left: usize,
    /// The time until which the device counts as light.
    light_until: Nanos,
    /// A visit of this turn left something to do.
    more: bool,
    /// The cost of the visits of this turn, those that found nothing included.
    spent: u64,
    /// The visits of this turn took something.
    served: bool,
    /// The parts of the next 1 that visits have cost that found nothing.
    parts: u32,
}

impl FlowState {
    /// Ends a turn. The rest is not saved for later turns, but a debt is.
    #[inline]
    fn end_turn(&mut self, spent: u64, served: bool, more: bool, now: Nanos) {
        self.deficit = self.deficit.min(0);
        if spent > u64::from(TURN_BESIDE_LIGHT) * u64::from(self.weight) {
            self.light_until = 0;
        } else if served && !more {
            self.light_until = now + LIGHT_NS;
        }
    }
}

/// The result of a visit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    /// The cost of what the task took.
    pub(crate) cost: u32,
    /// There is more to take.
    pub(crate) more: bool,
    /// The task stays on the list.
    pub(crate) stays: bool,
}

/// The poll list of one worker.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    flows: Vec<FlowState>,
    /// Flows with tasks on the list. The turn, once begun, is that of the front one.
    active: VecDeque<usize>,
    /// The number of turns left in this round, and whether the front flow's turn has begun.
    turns_left: usize,
    turn_begun: bool,
    /// Something was taken in this round.
    taken: bool,
    /// The two active flows that count as light for longest. One is not enough, because a flow does not count
    /// as light beside itself.
    light: [(usize, Nanos); 2],
    tasks: usize,
}

impl Scheduler {
    /// Adds a task of a device with this weight. The task is not on the list yet.
    pub(crate) fn join(&mut self, device: u64, weight: u32) -> Flow {
        let free = self.flows.iter().position(|flow| flow.members == 0);
        let known = self.flows.iter().position(|flow| flow.members > 0 && flow.device == device);
        if let Some(index) = known {
            self.flows[index].members += 1;
            return Flow(index);
        }
        let share = FlowState {
            device,
            weight: weight.max(1),
            members: 1,
            tasks: VecDeque::new(),
            deficit: 0,
            visits_left: 0,
            light_until: 0,
            more: false,
            spent: 0,
            served: false,
            parts: 0,
        };
        match free {
            Some(index) => self.flows[index] = share,
            None => self.flows.push(share),
        }
        Flow(free.unwrap_or(self.flows.len() - 1))
    }

    /// Changes the weight of a device, if it has tasks here.
    pub(crate) fn set_weight(&mut self, device: u64, weight: u32) {
        let mut flows = self.flows.iter_mut();
        if let Some(flow) = flows.find(|flow| flow.members > 0 && flow.device == device) {
            flow.weight = weight.max(1);
        }
    }

    /// Removes a task, which is not on the list.
    pub(crate) fn leave(&mut self, flow: Flow) {
        self.flows[flow.0].members -= 1;
    }

    /// Puts a task at the end of the list.
    pub(crate) fn push(&mut self, flow: Flow, task: u32) {
        let share = &mut self.flows[flow.0];
        // A flow stays in front during its turn.
        if share.tasks.is_empty() && !(self.turn_begun && self.active.front() == Some(&flow.0)) {
            self.active.push_back(flow.0);
        }
        share.tasks.push_back(task);
        self.tasks += 1;
    }

    /// Returns the tasks of a device that are on the list.
    pub(crate) fn listed(&self, flow: Flow) -> impl Iterator<Item = u32> {
        self.flows[flow.0].tasks.iter().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks == 0
    }

    /// Begins a round for the only task on the list. Returns the task, which is off the list until
    /// [`Scheduler::end_lone_round`], and its budget. `None` if there are others or none, or if the device
    /// has a debt.
    ///
    /// A worker with one busy task spends most of its turns here. The result is that of
    /// [`Scheduler::begin_round`] and [`Scheduler::next`], without a check of other devices.
    #[inline]
    pub(crate) fn begin_lone_round(&mut self) -> Option<(u32, u32)> {
        if self.tasks != 1 {
            return None;
        }
        let share = &mut self.flows[*self.active.front()?];
        let owed = if self.taken { share.deficit } else { share.deficit.max(0) };
        let budget = owed + i64::from(TURN_ALONE) * i64::from(share.weight);
        if budget <= 0 {
            return None;
        }
        let task = share.tasks.pop_front()?;
        share.deficit = budget;
        (self.tasks, self.taken, self.turn_begun) = (0, false, true);
        Some((task, u32::try_from(budget).unwrap_or(u32::MAX)))
    }

    /// Ends the round of the task that [`Scheduler::begin_lone_round`] returned. Other tasks may have come to
    /// the list during the visit, and this one may have left its device and joined it again.
    #[inline]
    pub(crate) fn end_lone_round(&mut self, task: u32, visit: Visit, now: Nanos) {
        self.turn_begun = false;
        // The others are behind it.
        let Some(&index) = self.active.front() else { return };
        let share = &mut self.flows[index];
        share.deficit -= i64::from(visit.cost);
        self.taken = visit.cost > 0;
        share.end_turn(visit.cost.into(), visit.cost > 0, visit.more, now);
        if visit.stays {
            share.tasks.push_back(task);
            self.tasks += 1;
        } else if share.tasks.is_empty() {
            self.active.pop_front();
        }
    }

    /// Begins a round, in which each device that is on the list now has one turn.
    pub(crate) fn begin_round(&mut self) {
        self.turns_left = self.active.len();
        // The cost that a device took beyond its turn is a debt to the others. If no device took anything in
        // a round, there are no others to repay, and the debt is cancelled. Otherwise the worker would run
        // rounds with nothing to do.
        let forgiven = !std::mem::take(&mut self.taken);
        self.light = Default::default();
        for at in 0..self.active.len() {
            let index = self.active[at];
            let share = &mut self.flows[index];
            if forgiven {
                share.deficit = share.deficit.max(0);
            }
            let until = share.light_until;
            self.note_light(index, until);
        }
    }

    /// Notes the time until which a flow counts as light.
    fn note_light(&mut self, index: usize, until: Nanos) {
        let [first, second] = &mut self.light;
        if first.0 != index && until > first.1 {
            *second = std::mem::replace(first, (index, until));
        } else if first.0 == index {
            first.1 = until;
        } else if until > second.1 {
            *second = (index, until);
        }
    }

    /// Returns the next task of the round and its budget. The task is off the list until
    /// [`Scheduler::visited`].
    pub(crate) fn next(&mut self, now: Nanos) -> Option<(u32, u32)> {
        loop {
            if self.turns_left == 0 {
                return None;
            }
            let &index = self.active.front()?;
            if !self.turn_begun {
                let turn = self.turn_cost(index, now);
                let share = &mut self.flows[index];
                share.deficit += i64::from(turn) * i64::from(share.weight);
                (share.visits_left, share.more) = (share.tasks.len(), false);
                (share.spent, share.served) = (0, false);
                self.turn_begun = true;
            }
            let share = &mut self.flows[index];
            if share.visits_left > 0 && share.deficit > 0 {
                share.visits_left -= 1;
                if let Some(task) = share.tasks.pop_front() {
                    self.tasks -= 1;
                    return Some((task, u32::try_from(share.deficit).unwrap_or(u32::MAX)));
                }
            }
            self.end_turn(index, now);
        }
    }

    /// Records the visit of the task that [`Scheduler::next`] returned. `vain`: the parts of a cost of 1 that
    /// it costs if it took nothing.
    #[inline]
    pub(crate) fn visited(&mut self, flow: Flow, task: u32, visit: Visit, vain: u32) {
        let alone = self.active.len() <= 1;
        let share = &mut self.flows[flow.0];
        let mut cost = visit.cost;
        if cost > 0 {
            (self.taken, share.served) = (true, true);
        } else if !alone {
            share.parts += vain;
            (cost, share.parts) = (share.parts / PARTS, share.parts % PARTS);
        }
        share.deficit -= i64::from(cost);
        share.spent += u64::from(cost);
        // Without a cost there was no progress, and the task waits for something.
        if visit.more && visit.stays && visit.cost > 0 && share.deficit > 0 && !alone {
            share.visits_left += 1;
        } else {
            share.more |= visit.more;
        }
        if visit.stays {
            share.tasks.push_back(task);
            self.tasks += 1;
        }
    }

    fn end_turn(&mut self, index: usize, now: Nanos) {
        let share = &mut self.flows[index];
        // Tasks that were not visited may have more to do, too.
        let more = share.more || share.visits_left > 0;
        share.end_turn(share.spent, share.served, more, now);
        let (stays, light_until) = (!share.tasks.is_empty(), share.light_until);
        self.active.pop_front();
        if stays {
            self.active.push_back(index);
        }
        if stays && light_until > 0 {
            self.note_light(index, light_until);
        } else if self.light[0].0 == index {
            self.light = [self.light[1], Default::default()];
        } else if self.light[1].0 == index {
            self.light[1] = Default::default();
        }
        self.turn_begun = false;
        self.turns_left -= 1;
    }

    fn turn_cost(&self, index: usize, now: Nanos) -> u32 {
        let active = self.active.len() as u32;
        if active == 1 {
            return TURN_ALONE;
        }
        // The two lightest flows are known, so there is no loop over all flows for each flow.
        let [first, second] = self.light;
        if (if first.0 == index { second } else { first }).1 > now {
            return TURN_BESIDE_LIGHT;
        }
        (TURNS_SHARED / active).max(TURN_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tasks with requests. A visit takes whole requests, as a task does.
    struct SchedulerRig {
        scheduler: Scheduler,
        flows: Vec<Flow>,
        waiting: Vec<u32>,
        request_cost: Vec<u32>,
        taken: Vec<u64>,
        now: Nanos,
    }

    impl SchedulerRig {
        /// Makes tasks, each with its device, the device's weight and the cost of its requests.
        fn new(tasks: &[(u64, u32, u32)]) -> Self {
            let mut scheduler = Scheduler::default();
            let flows: Vec<Flow> =
                tasks.iter().map(|(device, weight, _)| scheduler.join(*device, *weight)).collect();
            for (task, flow) in flows.iter().enumerate() {
                scheduler.push(*flow, task as u32);
            }
            let request_cost = tasks.iter().map(|task| task.2).collect();
            let count = tasks.len();
            Self {
                scheduler,
                flows,
                waiting: vec![u32::MAX; count],
                request_cost,
                taken: vec![0; count],
                now: 0,
            }
        }

        /// Runs one round. Returns the tasks that were visited.
        fn round(&mut self) -> Vec<u32> {
            let mut visited = Vec::new();
            self.now += 1000;
            self.scheduler.begin_round();
            while let Some((task, budget)) = self.scheduler.next(self.now) {
                let at = task as usize;
                let (mut cost, mut left) = (0, self.waiting[at]);
                while cost < budget && left > 0 {
                    cost += self.request_cost[at];
                    left = left.saturating_sub(1);
                }
                if self.waiting[at] != u32::MAX {
                    self.waiting[at] = left;
                }
                self.taken[at] += u64::from(cost);
                let visit = Visit { cost, more: left > 0 && cost >= budget, stays: true };
                self.scheduler.visited(self.flows[at], task, visit, VAIN_RING);
                visited.push(task);
            }
            visited
        }
    }

    #[test]
    fn a_changed_weight_changes_the_share() {
        let mut world = SchedulerRig::new(&[(1, 1, 1), (2, 1, 1)]);
        (0..1000).for_each(|_| drop(world.round()));
        assert_eq!(world.taken[0], world.taken[1]);
        world.scheduler.set_weight(2, 3);
        world.scheduler.set_weight(7, 3);
        let before = world.taken.clone();
        (0..1000).for_each(|_| drop(world.round()));
        let [one, other] = [0, 1].map(|task| world.taken[task] - before[task]);
        assert!((3 * one).abs_diff(other) <= other / 100, "{one} {other}");
    }

    #[test]
    fn the_share_of_a_device_does_not_depend_on_its_queues() {
        let mut world = SchedulerRig::new(&[(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 1, 1)]);
        for _ in 0..1000 {
            world.round();
        }
        let first: u64 = world.taken[..4].iter().sum();
        assert!(first.abs_diff(world.taken[4]) <= first / 100, "{:?}", world.taken);
        assert!(
            world.taken[..4].iter().all(|taken| taken.abs_diff(first / 4) <= first / 50),
            "{:?}",
            world.taken
        );
    }

    /// The short path for a lone task and the long one lead to the same state, whatever visits find.
    #[test]
    fn a_lone_task_is_served_as_one_of_many() {
        let visits =
            [(0, false), (1, false), (64, true), (257, false), (0, false), (1 << 20, true), (3, true)];
        for weight in [1, 3] {
            let lists = || {
                let mut scheduler = Scheduler::default();
                let flow = scheduler.join(1, weight);
                scheduler.push(flow, 0);
                (scheduler, flow)
            };
            let ((mut short, _), (mut long, flow)) = (lists(), lists());
            for now in 1..100_000 {
                let (cost, more) = visits[now as usize % visits.len()];
                let visit = Visit { cost, more, stays: true };
                let begun = short.begin_lone_round();
                match begun {
                    Some(_) => short.end_lone_round(0, visit, now),
                    // The device has a debt.
                    None => {
                        short.begin_round();
                        assert_eq!(short.next(now), None);
                    }
                }
                long.begin_round();
                let next = long.next(now);
                assert_eq!(begun, next);
                if next.is_some() {
                    long.visited(flow, 0, visit, VAIN_RING);
                    assert_eq!(long.next(now), None);
                }
                let state = |list: &Scheduler| (list.flows[0].deficit, list.flows[0].light_until, list.taken);
                assert_eq!(state(&short), state(&long));
            }
            // Another device's task comes during the visit, and this task leaves.
            let (budget, next) = (short.begin_lone_round(), short.join(2, 1));
            short.push(next, 1);
            assert!(budget.is_some());
            short.end_lone_round(0, Visit { cost: 0, more: false, stays: false }, 100_000);
            short.begin_round();
            assert_eq!(short.next(100_000).map(|next| next.0), Some(1));
        }
    }

    /// A task that cannot move leaves its device, joins it again, and is on the list during its own visit.
    #[test]
    fn a_lone_task_that_comes_back_during_its_visit_stays_on_the_list() {
        let mut scheduler = Scheduler::default();
        let flow = scheduler.join(1, 1);
        scheduler.push(flow, 0);
        for now in 0..3 {
            assert_eq!(scheduler.begin_lone_round().map(|next| next.0), Some(0));
            scheduler.leave(flow);
            assert_eq!(scheduler.join(1, 1), flow);
            scheduler.push(flow, 0);
            scheduler.end_lone_round(0, Visit { cost: 0, more: false, stays: false }, now);
        }
        assert_eq!(scheduler.begin_lone_round().map(|next| next.0), Some(0));
        scheduler.end_lone_round(0, Visit { cost: 0, more: false, stays: false }, 3);
        assert!(scheduler.is_empty() && scheduler.begin_lone_round().is_none());
    }

    #[test]
    fn weights_and_large_requests() {
        let mut world = SchedulerRig::new(&[(1, 1, 1), (2, 3, 1), (3, 1, 33), (4, 1, 257)]);
        for _ in 0..10_000 {
            world.round();
        }
        let unit = world.taken[0] as f64;
        for (taken, weight) in world.taken.iter().zip([1.0, 3.0, 1.0, 1.0]) {
            assert!((*taken as f64 / unit / weight - 1.0).abs() < 0.01, "{:?}", world.taken);
        }
    }

    #[test]
    fn turns_are_long_alone_and_short_beside_a_light_device() {
        let mut world = SchedulerRig::new(&[(1, 1, 1)]);
        world.round();
        assert_eq!(world.taken, [64]);

        let mut world = SchedulerRig::new(&[(1, 1, 1), (2, 1, 1)]);
        world.round();
        assert_eq!(world.taken, [32, 32]);

        let mut world = SchedulerRig::new(&[(1, 1, 1), (2, 1, 1)]);
        world.waiting[1] = 1;
        world.round();
        let before = world.taken[0];
        for _ in 0..10 {
            world.waiting[1] = 1;
            world.round();
            assert_eq!(world.waiting[1], 0);
        }
        assert!(world.taken[0] - before <= 10 * u64::from(TURN_BESIDE_LIGHT), "{:?}", world.taken);
        // Long after the last work of the light device.
        let before = world.taken[0];
        world.now += 2 * LIGHT_NS;
        world.round();
        assert_eq!(world.taken[0] - before, 32);
    }

    /// A card that drains its ring in a part of each turn, beside a disk that always has more.
    #[test]
    fn a_device_that_takes_much_in_each_turn_is_not_light() {
        for (weight, burst) in [(1, 12), (1, 3), (3, 12)] {
            let mut world = SchedulerRig::new(&[(1, 1, 1), (2, weight, 1)]);
            for round in 0..1000 {
                // At times it finds little, and counts as light until its next turn.
                world.waiting[1] = if round % 2 == 0 { burst } else { 1 };
                world.round();
                assert_eq!(world.waiting[1], 0);
            }
            let share = world.taken[1] / u64::from(weight);
            assert!(world.taken[0] >= share, "{weight} {burst}: {:?}", world.taken);
        }
    }

    /// Polls end after a number of frames, whatever the budget.
    #[test]
    fn polls_that_end_early_share_by_weight_and_save_nothing() {
        let mut scheduler = Scheduler::default();
        let flows = [scheduler.join(1, 1), scheduler.join(2, 3)];
        (0..2).for_each(|task| scheduler.push(flows[task as usize], task));
        let mut taken = [0u64; 2];
        for now in 0..1000 {
            scheduler.begin_round();
            while let Some((task, budget)) = scheduler.next(now) {
                let cost = budget.min(16);
                taken[task as usize] += u64::from(cost);
                scheduler.visited(
                    flows[task as usize],
                    task,
                    Visit { cost, more: true, stays: true },
                    VAIN_RING,
                );
            }
        }
        assert_eq!(taken, [32_000, 96_000]);
        // Alone, too.
        let mut scheduler = Scheduler::default();
        let flow = scheduler.join(1, 1);
        scheduler.push(flow, 0);
        for now in 0..1000 {
            assert_eq!(scheduler.begin_lone_round(), Some((0, TURN_ALONE)));
            scheduler.end_lone_round(0, Visit { cost: 16, more: true, stays: true }, now);
        }
    }

    #[test]
    fn an_idle_device_loses_its_unused_turns() {
        let mut world = SchedulerRig::new(&[(1, 1, 1), (2, 1, 1)]);
        world.waiting[1] = 0;
        for _ in 0..100 {
            world.round();
        }
        let before = world.taken[0];
        world.waiting[1] = u32::MAX;
        for _ in 0..10 {
            world.round();
        }
        assert!(world.taken[1].abs_diff(world.taken[0] - before) <= 64, "{:?}", world.taken);
    }

    /// 250 rings are polled in vain, beside one with requests.
    #[test]
    fn visits_in_vain_come_out_of_the_share_of_their_device() {
        for (vain, per_cost) in [(VAIN_RING, 8), (VAIN_FAR_SIDE, 1)] {
            for (weights, is_light) in [((1, 1), false), ((1, 1), true), ((3, 1), false)] {
                let mut scheduler = Scheduler::default();
                let flows = [scheduler.join(1, weights.0), scheduler.join(2, weights.1)];
                (0..250).for_each(|task| scheduler.push(flows[0], task));
                scheduler.push(flows[1], 250);
                let mut visits = vec![0u32; 250];
                let (mut served, mut most) = (0, 0);
                for now in 0..10_000 {
                    scheduler.begin_round();
                    let mut in_round = 0;
                    while let Some((task, budget)) = scheduler.next(now) {
                        let idle = task < 250;
                        let cost = if idle {
                            0
                        } else if is_light {
                            1
                        } else {
                            budget
                        };
                        served += cost;
                        let visit = Visit { cost, more: !idle && !is_light, stays: true };
                        scheduler.visited(flows[usize::from(!idle)], task, visit, vain);
                        if idle {
                            visits[task as usize] += 1;
                            in_round += 1;
                        }
                    }
                    most = most.max(in_round);
                }
                let total: u32 = visits.iter().sum();
                let turn = if is_light { TURN_BESIDE_LIGHT } else { TURNS_SHARED / 2 } * weights.0;
                let bound = 10_000 * turn.min(250 / per_cost + 1) * per_cost;
                assert!(total <= bound + 300, "{total} visits beside {served} requests, at most {bound}");
                assert!(most <= (TURNS_SHARED / 2 * weights.0 * per_cost).min(250), "{most} in one round");
                let (least, most) = (visits.iter().min(), visits.iter().max());
                assert!(most <= least.map(|least| least + 1).as_ref(), "{least:?} {most:?}: not in turn");
                let expected = 10_000 * if is_light { 1 } else { TURNS_SHARED / 2 * weights.1 };
                assert_eq!(served, expected);
            }
        }
    }

    /// A device serves one request in each turn, and looks at many empty rings. It takes more than a light
    /// one may.
    #[test]
    fn a_device_with_many_empty_rings_is_not_light() {
        let mut scheduler = Scheduler::default();
        let flows = [scheduler.join(1, 1), scheduler.join(2, 1)];
        (0..100).for_each(|task| scheduler.push(flows[0], task));
        scheduler.push(flows[1], 100);
        for now in 0..1000 {
            scheduler.begin_round();
            let mut one = 1;
            while let Some((task, budget)) = scheduler.next(now) {
                let idle = task < 100;
                let cost = if idle { std::mem::take(&mut one) } else { budget };
                assert!(idle || budget == TURNS_SHARED / 2, "a turn of {budget} in round {now}");
                let visit = Visit { cost, more: !idle, stays: true };
                scheduler.visited(flows[usize::from(!idle)], task, visit, VAIN_RING);
            }
        }
    }

    #[test]
    fn a_debt_is_cancelled_when_no_device_is_owed() {
        // A device with requests of 4 GiB, alone, and beside a device that has nothing to do.
        for devices in [1, 2] {
            let mut world = SchedulerRig::new(&[(1, 1, 1 << 20), (2, 1, 1)][..devices]);
            world.waiting[1..].fill(0);
            for _ in 0..10 {
                world.round();
            }
            assert_eq!(world.taken[0], 5 << 20, "every other round");
        }
    }

    #[test]
    fn a_light_device_does_not_shorten_its_own_turn() {
        let budgets = |scheduler: &mut Scheduler, now| {
            let mut budgets = [0; 4];
            scheduler.begin_round();
            while let Some((task, budget)) = scheduler.next(now) {
                budgets[task as usize] = budget;
                // Tasks from 1 on take all of their work.
                let visit = Visit { cost: if task == 0 { budget } else { 1 }, more: task == 0, stays: true };
                scheduler.visited(Flow(task as usize), task, visit, VAIN_RING);
            }
            budgets
        };
        for devices in 2..=4 {
            let mut scheduler = Scheduler::default();
            for device in 0..devices {
                let flow = scheduler.join(device.into(), 1);
                scheduler.push(flow, device);
            }
            budgets(&mut scheduler, 0);
            let second = budgets(&mut scheduler, 1);
            assert_eq!(second[0], TURN_BESIDE_LIGHT);
            // The only light device is not beside another light one.
            let alone = if devices == 2 { TURNS_SHARED / 2 } else { TURN_BESIDE_LIGHT };
            assert!(second[1..devices as usize].iter().all(|budget| *budget == alone), "{second:?}");
        }
    }

    #[test]
    fn numbers_of_devices_that_are_gone_are_reused() {
        let mut scheduler = Scheduler::default();
        let (a, b) = (scheduler.join(7, 1), scheduler.join(8, 1));
        assert_eq!(scheduler.join(7, 1), a);
        scheduler.leave(a);
        scheduler.leave(a);
        assert_eq!(scheduler.join(9, 2), a);
        scheduler.push(b, 4);
        scheduler.push(a, 5);
        scheduler.begin_round();
        assert_eq!(scheduler.next(0).map(|next| next.0), Some(4));
        scheduler.visited(b, 4, Visit { cost: 0, more: false, stays: false }, VAIN_RING);
        assert_eq!(scheduler.next(0).map(|next| next.0), Some(5));
        scheduler.visited(a, 5, Visit { cost: 0, more: false, stays: true }, VAIN_RING);
        assert_eq!(scheduler.next(0), None);
        assert!(!scheduler.is_empty());
    }

    #[test]
    fn a_task_that_joins_during_a_turn_is_visited_in_the_next_round() {
        let mut scheduler = Scheduler::default();
        let flow = scheduler.join(1, 1);
        scheduler.push(flow, 0);
        scheduler.begin_round();
        assert!(scheduler.next(0).is_some());
        // Another task of the flow is woken while its only task is off the list.
        scheduler.push(flow, 1);
        scheduler.visited(flow, 0, Visit { cost: 0, more: false, stays: false }, VAIN_RING);
        assert_eq!(scheduler.next(0), None);
        scheduler.begin_round();
        assert_eq!(scheduler.next(0).map(|next| next.0), Some(1));
    }
}
