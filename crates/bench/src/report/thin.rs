//! Reduces the number of points of a line.

/// The largest number of points of a line: two for each of 150 columns, finer than the eye can see.
const POINTS_MAX: usize = 300;

/// Reduces a line to at most [`POINTS_MAX`] points.
///
/// It keeps the lowest and the highest point of each run of points, so that a stall or a burst of a single
/// point stays visible.
pub(super) fn thin_out(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    let runs = points.chunks(points.len().div_ceil(POINTS_MAX / 2));
    runs.flat_map(|run| {
        let at = |place: Option<(usize, &(f64, f64))>| place.map_or(0, |(at, _)| at);
        let lowest = at(run.iter().enumerate().min_by(|(_, a), (_, b)| a.1.total_cmp(&b.1)));
        let highest = at(run.iter().enumerate().max_by(|(_, a), (_, b)| a.1.total_cmp(&b.1)));
        let (first, second) = (lowest.min(highest), lowest.max(highest));
        run.get(first).into_iter().chain(run.get(second).filter(|_| second != first)).copied()
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(len: usize) -> Vec<(f64, f64)> {
        (0..len).map(|x| (x as f64, 100.0 + (x % 7) as f64)).collect()
    }

    #[test]
    fn a_short_line_stays_as_it_is() {
        for len in [0, 1, POINTS_MAX] {
            assert_eq!(thin_out(&line(len)), line(len));
        }
    }

    #[test]
    fn a_stall_and_a_burst_stay_visible() {
        for len in [POINTS_MAX + 1, 1000, 12_345] {
            let mut line = line(len);
            for (at, y) in [(0, 5.0), (1, 999.0), (len / 2, 0.0), (len - 1, 2000.0)] {
                line[at].1 = y;
            }
            let thin = thin_out(&line);
            assert!(thin.len() <= POINTS_MAX && thin.len() > POINTS_MAX / 4, "{} of {len}", thin.len());
            assert!(thin.is_sorted_by(|a, b| a.0 < b.0));
            assert!(thin.iter().all(|point| line.contains(point)));
            for at in [0, 1, len / 2, len - 1] {
                assert!(thin.contains(&line[at]), "{at} of {len}");
            }
        }
    }
}
