//! The choice of a task to move, and of its new worker. Pure.

/// The load, in thousandths, from which a worker gives tasks away.
pub(crate) const OVERLOADED: u32 = 800;
/// The least amount by which a move must lower the load of the busier of the two workers.
const GAIN_MIN: u32 = 50;
/// A task that takes at most `SMALL_TASK` of an overloaded worker's time may move even if the gain is
/// smaller. The new worker's load must then be at most `FREE_WORKER` with it, so the task hardly waits
/// there.
const SMALL_TASK: u32 = 100;
const FREE_WORKER: u32 = 100;

/// Chooses a task and its new worker, both by their index in the slices. `None`: nothing should move.
///
/// `here` is this worker's index in `loads`, which are in thousandths of each worker's time. `shares` are the
/// parts of this worker's time that the movable tasks take.
pub(crate) fn choose(here: usize, loads: &[u32], shares: &[u32]) -> Option<(usize, usize)> {
    let load = *loads.get(here)?;
    let others = loads.iter().enumerate().filter(|(worker_id, _)| *worker_id != here);
    let (worker_id, &other_load) = others.min_by_key(|(_, load)| **load)?;
    let busy = shares.iter().filter(|share| **share > 0).count();
    if load < OVERLOADED || busy < 2 {
        return None;
    }
    let worst = |share: u32| (load.saturating_sub(share)).max(other_load.saturating_add(share));
    let candidates = shares.iter().enumerate().filter(|(_, share)| **share > 0);
    // Among equally good tasks, the smallest one, because it has the least to finish before it can move.
    let (task, &share) = candidates.min_by_key(|(_, share)| (worst(**share), **share))?;
    let is_useful =
        worst(share) + GAIN_MIN <= load || (share <= SMALL_TASK && other_load + share <= FREE_WORKER);
    is_useful.then_some((task, worker_id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tasks_move_from_an_overloaded_worker_to_the_idlest() {
        assert_eq!(choose(0, &[1000, 0], &[500, 500]), Some((0, 1)));
        assert_eq!(choose(1, &[300, 1000, 10], &[100, 400, 500]), Some((2, 2)));
        // One task is large and one small. The small one moves.
        assert_eq!(choose(0, &[1000, 20], &[970, 30]), Some((1, 1)));
    }

    #[test]
    fn nothing_moves_without_need_or_gain() {
        assert_eq!(choose(0, &[700, 0], &[350, 350]), None, "not crowded");
        assert_eq!(choose(0, &[1000, 1000], &[500, 500]), None, "no room on the other worker");
        assert_eq!(choose(0, &[1000, 0], &[1000]), None, "alone");
        assert_eq!(choose(0, &[1000, 0], &[1000, 0]), None, "as good as alone");
        assert_eq!(choose(0, &[1000], &[500, 500]), None, "the only worker");
        assert_eq!(choose(0, &[], &[]), None);
    }

    proptest! {
        /// Moves end under any constant load.
        #[test]
        fn moves_settle(shares in prop::collection::vec(prop::collection::vec(0u32..1000, 0..6), 1..5)) {
            let mut shares = shares;
            for _ in 0..200 {
                let loads: Vec<u32> = shares.iter().map(|s| s.iter().sum::<u32>()).collect();
                let step = (0..shares.len()).find_map(|here| choose(here, &loads, &shares[here]).map(|c| (here, c)));
                let Some((here, (task, to))) = step else { return Ok(()) };
                let share = shares[here].remove(task);
                shares[to].push(share);
            }
            prop_assert!(false, "still moving: {:?}", shares);
        }
    }
}
