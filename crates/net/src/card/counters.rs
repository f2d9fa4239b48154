//! The counters that only network cards have.

use kickless_device::{Count, OperationTotals};
use kickless_handover::Amounts;
use std::iter::zip;

/// The largest value that another process is believed. No sum of counters overflows with it.
const RAISED_MAX: u64 = 1 << 52;

/// Defines the struct of the counters, and their names and values from the same list.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one ring. Only the worker that runs the task of the ring writes them. They keep
        /// their values when the ring stops and starts again.
        #[derive(Debug, Default)]
        pub(crate) struct RingCounters {
            $($(#[$doc])* pub(crate) $name: Count,)*
        }

        impl RingCounters {
            const NAMES: &[&str] = &[$(stringify!($name),)*];

            fn counts(&self) -> impl Iterator<Item = &Count> {
                [$(&self.$name,)*].into_iter()
            }
        }
    };
}

counters! {
    /// Frames that the driver sent.
    sent_frames,
    /// Their bytes, without headers.
    sent_bytes,
    /// Frames of these that a receiver on the same worker took directly from the driver's memory.
    sent_directly,
    /// Frames that the card made of packets of these by segmentation, beside the first of each packet. Both
    /// together are the frames that the port got.
    sent_segments,
    /// Frames that the driver sent while the ring was disabled.
    sent_disabled,
    /// Frames that the driver sent with an invalid header or length.
    sent_invalid,
    /// Frames that the driver sent and the host refused, such as a packet that is not what its header says.
    sent_refused,
    /// Frames that the driver sent while the TAP was down, after it was deleted, or while no other program
    /// was connected.
    sent_down,
    /// Frames that the switch refused because their source is not the card's address, or is another card's.
    sent_spoofed,
    /// Frames with a VLAN tag that the switch refused from an access port, or whose tag names no VLAN.
    sent_tagged,
    /// Frames that no other port of the switch carries.
    sent_unforwarded,
    /// Frames that the card delivered to the driver.
    received_frames,
    /// Their bytes, without headers.
    received_bytes,
    /// Frames that the card dropped because they are too long for the driver's chains.
    dropped_long,
    /// Frames that the card dropped because too many frames were waiting for a ring, or because a ring
    /// stopped.
    dropped_late,
    /// Frames that the card dropped because the driver does not use their pair of rings.
    dropped_unused,
    /// Frames that the card dropped because the driver's filters do not accept their address or VLAN.
    dropped_filtered,
    /// Frames that the card dropped because the driver did not accept an offload of theirs, and the card
    /// cannot undo it.
    dropped_offload,
    /// Frames that the card could not read from its TAP, or that are too short for an Ethernet header.
    dropped_unread,
    /// Commands that the card executed.
    commands,
    /// Commands that the card answered with an error.
    commands_refused,
}

impl RingCounters {
    /// Returns the counters by name, for the next process. Those of 0 are left out.
    pub(crate) fn amounts(&self) -> Amounts {
        let named = zip(Self::NAMES, self.counts()).map(|(name, count)| ((*name).to_owned(), count.get()));
        named.filter(|(_, value)| *value > 0).collect()
    }

    /// Raises the counters to values of another process, before any task counts.
    pub(crate) fn raise_to(&self, amounts: &Amounts) {
        for (name, count) in zip(Self::NAMES, self.counts()) {
            let wanted = amounts.get(*name).copied().unwrap_or_default().min(RAISED_MAX);
            count.add(wanted.saturating_sub(count.get()));
        }
    }
}

/// Returns the name and the sum of each counter over all of `rings`.
pub(crate) fn sums<'a>(rings: impl IntoIterator<Item = &'a RingCounters>) -> Vec<(&'static str, u64)> {
    let mut sums: Vec<_> = RingCounters::NAMES.iter().map(|name| (*name, 0)).collect();
    for ring in rings {
        for ((_, sum), count) in zip(&mut sums, ring.counts()) {
            *sum += count.get();
        }
    }
    sums
}

/// Returns the frames of both directions as operations. A frame that the card dropped is an error.
pub(crate) fn operations(rings: &[RingCounters]) -> Vec<OperationTotals> {
    let sum = |of: fn(&RingCounters) -> u64| rings.iter().map(of).sum();
    let sent = OperationTotals {
        name: "transmit",
        requests: sum(|ring| ring.sent_frames.get()),
        bytes: sum(|ring| ring.sent_bytes.get()),
        errors: sum(|ring| ring.sent_invalid.get() + ring.sent_refused.get() + ring.sent_down.get()),
    };
    let received = OperationTotals {
        name: "receive",
        requests: sum(|ring| ring.received_frames.get()),
        bytes: sum(|ring| ring.received_bytes.get()),
        errors: sum(|ring| {
            let dropped =
                [&ring.dropped_long, &ring.dropped_late, &ring.dropped_offload, &ring.dropped_unread];
            dropped.map(Count::get).iter().sum()
        }),
    };
    vec![sent, received]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_go_on_in_another_process() {
        let [before, after] = [(); 2].map(|()| RingCounters::default());
        before.sent_frames.add(3);
        before.commands_refused.add(1);
        let mut amounts = before.amounts();
        assert_eq!(amounts.len(), 2);
        amounts.insert("of_a_later_version".into(), 7);
        amounts.insert("sent_bytes".into(), u64::MAX);
        // Several cards can give the counters of an uplink.
        (0..2).for_each(|_| after.raise_to(&amounts));
        after.sent_frames.add(1);
        after.sent_bytes.add(1);
        assert_eq!((after.sent_frames.get(), after.commands_refused.get()), (4, 1));
        assert_eq!(after.sent_bytes.get(), RAISED_MAX + 1);
    }

    #[test]
    fn rings_are_added_up() {
        let rings = [RingCounters::default(), RingCounters::default()];
        rings[0].sent_frames.add(3);
        rings[1].sent_frames.add(4);
        rings[1].commands_refused.add(1);
        rings[1].received_bytes.add(60);
        rings[1].dropped_late.add(2);
        let operations = operations(&rings);
        assert_eq!((operations[0].name, operations[0].requests, operations[0].errors), ("transmit", 7, 0));
        assert_eq!((operations[1].name, operations[1].bytes, operations[1].errors), ("receive", 60, 2));
        let sums = sums(&rings);
        assert_eq!((sums[0], sums.last()), (("sent_frames", 7), Some(&("commands_refused", 1))));
    }
}
