//! The ports of a switch, as senders see them.

use super::rule::Rule;
use crate::frame::loop_queue::LoopQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// A port, as the others see it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) rule: Rule,
    /// An inbox for each receive ring.
    pub(super) inboxes: Vec<LoopQueue>,
    /// The pairs of rings that the driver uses, from the first on.
    pub(super) pairs: AtomicU16,
}

impl Member {
    /// Returns the inbox for frames of the sender's transmit ring `pair`: always the same while the receive
    /// rings stay, so that the frames of a connection stay in order. `None` if no receive ring runs.
    pub(super) fn open_inbox(&self, pair: u16) -> Option<&LoopQueue> {
        let pairs = usize::from(self.pairs.load(Ordering::Relaxed)).clamp(1, self.inboxes.len().max(1));
        let used = self.inboxes.get(..pairs)?;
        let (before, from) = used.split_at(usize::from(pair) % pairs);
        from.iter().chain(before).find(|inbox| inbox.is_open())
    }
}

/// The ports of a switch. Made anew when one comes or goes, so that a sender keeps those that it has decided
/// with.
#[derive(Clone, Debug, Default)]
pub(super) struct Members {
    /// The ports, each at the index that is its number.
    ports: Vec<Option<Arc<Member>>>,
    /// The numbers of the ports that carry all VLANs, and those of the access ports behind their VLANs. Both
    /// are in order. So a frame for all ports of a VLAN costs nothing for others.
    trunks: Vec<u16>,
    access: Vec<(u16, u16)>,
}

impl Members {
    /// Returns these ports and one more, with its number.
    pub(super) fn with(&self, member: Arc<Member>) -> (Self, u16) {
        let mut ports = self.ports.clone();
        let free = ports.iter().position(Option::is_none).unwrap_or(ports.len());
        if free == ports.len() {
            ports.push(None);
        }
        ports[free] = Some(member);
        // Lossless, because a process has fewer devices than that.
        (Self::of(ports), free as u16)
    }

    /// Returns these ports without that of this number.
    pub(super) fn without(&self, number: u16) -> Self {
        let mut ports = self.ports.clone();
        ports[usize::from(number)] = None;
        Self::of(ports)
    }

    fn of(ports: Vec<Option<Arc<Member>>>) -> Self {
        let (mut trunks, mut access) = (Vec::new(), Vec::new());
        for (number, member) in (0..).zip(&ports) {
            match member.as_ref().map(|member| member.rule.vlan) {
                Some(None) => trunks.push(number),
                Some(Some(vlan)) => access.push((vlan, number)),
                None => {}
            }
        }
        access.sort_unstable();
        Self { ports, trunks, access }
    }

    pub(super) fn get(&self, number: u16) -> Option<&Arc<Member>> {
        self.ports.get(usize::from(number))?.as_ref()
    }

    /// Returns the access ports of a VLAN.
    fn access_of(&self, vlan: u16) -> &[(u16, u16)] {
        let from = self.access.partition_point(|(other, _)| *other < vlan);
        let of_vlan = &self.access[from..];
        &of_vlan[..of_vlan.partition_point(|(other, _)| *other == vlan)]
    }

    /// Returns the numbers of the ports that carry a VLAN, in order, from the one behind `after` on.
    pub(super) fn carriers_after(&self, vlan: u16, after: Option<u16>) -> impl Iterator<Item = u16> {
        let (mut trunks, mut access) = (&self.trunks[..], self.access_of(vlan));
        trunks = &trunks[trunks.partition_point(|number| Some(*number) <= after)..];
        access = &access[access.partition_point(|(_, number)| Some(*number) <= after)..];
        std::iter::from_fn(move || match (trunks, access) {
            ([trunk, rest @ ..], access) if access.first().is_none_or(|(_, number)| trunk < number) => {
                trunks = rest;
                Some(*trunk)
            }
            (_, [(_, number), rest @ ..]) => {
                access = rest;
                Some(*number)
            }
            _ => None,
        })
    }

    /// Returns the number of these ports.
    pub(super) fn carriers_len(&self, vlan: u16) -> usize {
        self.trunks.len() + self.access_of(vlan).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ports_of_a_vlan_are_those_that_carry_it() {
        let mut members = Members::default();
        for vlan in [Some(5), None, Some(7), Some(5), None, Some(4094)] {
            let rule = Rule { vlan, address: None };
            let member = Member { rule, inboxes: Vec::new(), pairs: AtomicU16::new(1) };
            members = members.with(Arc::new(member)).0;
        }
        let members = members.without(3);
        for vlan in [0, 4, 5, 6, 7, 4094] {
            let carriers: Vec<_> = members.carriers_after(vlan, None).collect();
            let mut expected: Vec<u16> = (0..6).collect();
            expected.retain(|number| members.get(*number).is_some_and(|member| member.rule.carries(vlan)));
            assert_eq!(members.carriers_len(vlan), carriers.len());
            assert_eq!(carriers, expected, "{vlan}");
            for after in 0..6 {
                let rest: Vec<_> = members.carriers_after(vlan, Some(after)).collect();
                expected.retain(|number| *number > after);
                assert_eq!(rest, expected, "{vlan} {after}");
            }
        }
    }
}
