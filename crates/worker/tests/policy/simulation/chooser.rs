//! Decides about waits in the simulation, by the policy or by a fixed rule to compare it with.

use kickless_worker::Poll;
use kickless_worker::policy::{Host, Nanos, Policy, Verdict};

/// A rule.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Policy(Poll),
    /// Spin for this time, then arm.
    Spin(Nanos),
    /// Nap for this time, again and again.
    Nap(Nanos),
}

impl Rule {
    /// Returns the fixed rules that the policy is compared with.
    pub(crate) fn fixed() -> impl Iterator<Item = Rule> {
        let spins = [0, 5, 20, 50, 100, 200, 500].map(|us| Rule::Spin(us * 1_000));
        let naps = [50, 100].map(|us| Rule::Nap(us * 1_000));
        spins.into_iter().chain(naps).chain([Rule::Policy(Poll::Always)])
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Rule::Policy(Poll::Auto { .. }) => "auto".into(),
            Rule::Policy(Poll::Always) => "always".into(),
            Rule::Policy(Poll::Never) => "never".into(),
            Rule::Policy(Poll::Rate { .. }) => "rate".into(),
            Rule::Spin(limit) => format!("spin {} us", limit / 1_000),
            Rule::Nap(nap) => format!("nap {} us", nap / 1_000),
        }
    }
}

/// A rule applied to one queue.
pub(crate) enum Chooser {
    Policy(Box<Policy>),
    Fixed { rule: Rule, since: Option<Nanos> },
}

impl Chooser {
    pub(crate) fn new(rule: Rule, ring_size: u16) -> Self {
        match rule {
            Rule::Policy(poll) => Chooser::Policy(Box::new(Policy::new(poll, ring_size))),
            _ => Chooser::Fixed { rule, since: None },
        }
    }

    pub(crate) fn found(&mut self, now: Nanos, requests: u32) {
        match self {
            Chooser::Policy(policy) => policy.found(now, requests),
            Chooser::Fixed { since, .. } => *since = None,
        }
    }

    pub(crate) fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        match self {
            Chooser::Policy(policy) => policy.empty(now, host, on_disk),
            Chooser::Fixed { rule: Rule::Nap(nap), .. } => {
                Verdict::Nap { until: now + *nap, ignore_completions: false }
            }
            Chooser::Fixed { rule: Rule::Spin(limit), since } => {
                let until = *since.get_or_insert(now) + *limit;
                if until > now { Verdict::Spin { until } } else { Verdict::Arm }
            }
            Chooser::Fixed { rule: Rule::Policy(_), .. } => Verdict::Arm,
        }
    }

    pub(crate) fn armed(&mut self) {
        if let Chooser::Policy(policy) = self {
            policy.armed();
        }
    }

    pub(crate) fn woken(&mut self, now: Nanos, host: &Host) {
        if let Chooser::Policy(policy) = self {
            policy.woken(now, host);
        }
    }
}
