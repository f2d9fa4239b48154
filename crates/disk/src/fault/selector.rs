//! Selects the operations that faults affect. It is pure except for a counter and a seeded generator.

use crate::spec::fault_rules::{Effect, OperationKind, Rule, When};
use crate::{Extent, FaultRules, SECTOR};

/// An operation, as the rules see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) kind: OperationKind,
    /// The ranges of the operation; none for a flush.
    pub(super) extents: &'a [Extent],
}

impl Subject<'_> {
    /// Returns the number of bytes.
    pub(super) fn len(&self) -> u64 {
        self.extents.iter().map(|extent| extent.len).sum()
    }
}

/// Returns whether a rule applies to this kind and place of operation.
fn is_about(rule: &Rule, Subject { kind, extents }: Subject<'_>) -> bool {
    let of_kind = rule.kinds.is_empty() || rule.kinds.contains(&kind);
    let there = rule.sectors.as_ref().is_none_or(|sectors| {
        extents.iter().any(|&Extent { offset, len, .. }| {
            let (first, end) = (offset / SECTOR, offset.saturating_add(len).div_ceil(SECTOR));
            len > 0 && first <= *sectors.end() && end > *sectors.start()
        })
    });
    of_kind && there && (rule.effect != Effect::Short || kind.is_transfer())
}

/// The rules, with their counters.
#[derive(Debug)]
pub(super) struct FaultSelector {
    rules: Vec<(Rule, u64)>,
    state: u64,
}

impl FaultSelector {
    pub(super) fn new(rules: &FaultRules) -> Self {
        Self { rules: rules.rules.iter().map(|rule| (rule.clone(), 0)).collect(), state: rules.seed }
    }

    /// Returns the effect on this operation: that of the first rule that applies. Every rule counts all
    /// operations that it is about.
    pub(super) fn select(&mut self, subject: Subject<'_>) -> Option<Effect> {
        let mut effect = None;
        for place in 0..self.rules.len() {
            let random = self.random();
            let (rule, count) = &mut self.rules[place];
            if !is_about(rule, subject) {
                continue;
            }
            *count += 1;
            let applies = match rule.when {
                When::Always => true,
                When::Rate(millionths) => random % 1_000_000 < u64::from(millionths),
                When::Nth(number) => *count == number,
                When::Every(number) => count.is_multiple_of(number),
            };
            if applies && effect.is_none() {
                effect = Some(rule.effect.clone());
            }
        }
        effect
    }

    /// Returns a random number, by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    /// generators", 2014).
    pub(super) fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BadRule;
    use kickless_io::Errno;

    fn rules(text: &str) -> Result<FaultRules, BadRule> {
        text.parse()
    }

    /// Returns the affected ones of the first `count` operations of this kind, each on the next sector.
    fn hits(text: &str, kind: OperationKind, count: u64) -> Vec<u64> {
        let mut selector = FaultSelector::new(&rules(text).unwrap());
        (0..count).filter(|i| roll(&mut selector, kind, &[(i * 512, 512)]).is_some()).collect()
    }

    fn roll(selector: &mut FaultSelector, kind: OperationKind, ranges: &[(u64, u64)]) -> Option<Effect> {
        let extents: Vec<_> =
            ranges.iter().map(|&(offset, len)| Extent { offset, len, unmap: false }).collect();
        selector.select(Subject { kind, extents: &extents })
    }

    #[test]
    fn conditions_select_operations() {
        assert_eq!(hits("eio", OperationKind::Read, 3), [0, 1, 2]);
        assert_eq!(hits("eio@100%", OperationKind::Read, 3), [0, 1, 2]);
        assert_eq!(hits("eio@nth=3", OperationKind::Read, 9), [2]);
        assert_eq!(hits("eio@every=4", OperationKind::Read, 9), [3, 7]);
        assert_eq!(hits("eio@2-4", OperationKind::Read, 9), [2, 3, 4]);
        assert_eq!(hits("eio@2-9+every=2", OperationKind::Read, 7), [3, 5]);
        assert!(hits("eio@write", OperationKind::Read, 9).is_empty());
        assert_eq!(hits("eio@write+read", OperationKind::Read, 2), [0, 1]);
        assert_eq!(hits("enospc@nth=2,eio@nth=5", OperationKind::Write, 9), [1, 4]);
        // An operation is affected if it touches the range. A flush has no place, and is never short.
        let mut selector = FaultSelector::new(&rules("eio@2-4,short").unwrap());
        let eio = Some(Effect::Error(Errno::IO));
        assert_eq!(roll(&mut selector, OperationKind::Read, &[(0, 1025)]), eio);
        assert_eq!(roll(&mut selector, OperationKind::Read, &[(0, 1024)]), Some(Effect::Short));
        assert_eq!(roll(&mut selector, OperationKind::Read, &[(1536, 0)]), Some(Effect::Short));
        assert_eq!(roll(&mut selector, OperationKind::Flush, &[]), None);
        // A rule applies if it covers any of several ranges.
        assert_eq!(
            roll(&mut selector, OperationKind::Discard, &[(0, 512), (4 * 512, 512), (9 * 512, 512)]),
            eio
        );
        assert_eq!(roll(&mut selector, OperationKind::Discard, &[(0, 512), (9 * 512, 512)]), None);
    }

    #[test]
    fn rates_are_close_and_repeatable() {
        let some = hits("eio@12.5%", OperationKind::Read, 10_000);
        assert!((1000..1500).contains(&some.len()), "{}", some.len());
        assert_eq!(hits("eio@12.5%", OperationKind::Read, 10_000), some);
        assert_ne!(hits("seed=2,eio@12.5%", OperationKind::Read, 10_000), some);
    }
}
