//! The order of the old process's messages. Pure.

use crate::error::Error;
use crate::message::{Head, Kind};
use std::collections::BTreeMap;

/// More devices than a process has.
const DEVICES_MAX: u32 = 1 << 16;

/// The messages that have come.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// The number of devices that have records, once the plan has come.
    served: Option<u32>,
    devices: BTreeMap<u32, Stage>,
    finals: u32,
    is_complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Given,
    Gone,
    Final,
}

impl Order {
    /// Takes the head of the next message.
    ///
    /// # Errors
    /// No old process sends it now.
    pub(crate) fn next(&mut self, head: Head) -> Result<(), Error> {
        let Head { kind, number, .. } = head;
        let (stage, known) = (self.devices.get(&number).copied(), self.devices.len());
        let is_ordered = match (kind, self.served) {
            _ if self.is_complete => false,
            (Kind::Plan, None) => number <= DEVICES_MAX,
            (Kind::Device | Kind::Gone, Some(served)) if stage.is_none() => {
                self.finals == 0 && number < DEVICES_MAX && known < served as usize
            }
            (Kind::Device, Some(_)) => self.finals == 0 && stage == Some(Stage::Given),
            (Kind::Gone | Kind::Final, Some(_)) => stage == Some(Stage::Given),
            (Kind::Last, Some(served)) => {
                let is_open = self.devices.values().any(|stage| *stage == Stage::Given);
                known == served as usize && !is_open && number == self.finals
            }
            _ => false,
        };
        if !is_ordered {
            return Err(kind.out_of_order());
        }
        match kind {
            Kind::Plan => self.served = Some(number),
            Kind::Device => drop(self.devices.insert(number, Stage::Given)),
            Kind::Gone => drop(self.devices.insert(number, Stage::Gone)),
            Kind::Final => {
                self.devices.insert(number, Stage::Final);
                self.finals += 1;
            }
            _ => self.is_complete = true,
        }
        Ok(())
    }

    /// Returns whether all have come.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of messages that are in order.
    fn ordered(messages: &[(Kind, u32)]) -> usize {
        let mut order = Order::default();
        let taken =
            messages.iter().take_while(|(kind, number)| order.next(Head::new(*kind, *number)).is_ok());
        taken.count()
    }

    #[test]
    fn an_upgrade_is_in_order() {
        use Kind::{Device, Final, Gone, Last, Plan};
        for messages in [
            &[(Plan, 2), (Device, 0), (Device, 7), (Device, 0), (Final, 7), (Final, 0), (Last, 2)][..],
            &[(Plan, 2), (Device, 0), (Device, 1), (Gone, 0), (Final, 1), (Last, 1)],
            &[(Plan, 1), (Device, 0), (Gone, 0), (Last, 0)],
            &[(Plan, 2), (Gone, 4), (Device, 0), (Final, 0), (Last, 1)],
            &[(Plan, 0), (Last, 0)],
        ] {
            assert_eq!(ordered(messages), messages.len(), "{messages:?}");
        }
    }

    #[test]
    fn other_orders_are_found() {
        use Kind::{Device, Final, Gone, Last, More, Plan, Ready, Taken};
        for messages in [
            &[(Device, 0)][..],
            &[(Last, 0)],
            &[(Plan, DEVICES_MAX + 1)],
            &[(Plan, 1), (Plan, 1)],
            &[(Plan, 1), (Last, 0)],
            &[(Plan, 1), (Final, 0)],
            &[(Plan, 1), (More, 0)],
            &[(Plan, 1), (Ready, 1)],
            &[(Plan, 1), (Taken, 0)],
            &[(Plan, 1), (Device, DEVICES_MAX)],
            &[(Plan, 1), (Device, 0), (Device, 1)],
            &[(Plan, 1), (Device, 0), (Last, 0)],
            &[(Plan, 1), (Device, 0), (Final, 1)],
            &[(Plan, 1), (Device, 0), (Final, 0), (Final, 0)],
            &[(Plan, 1), (Device, 0), (Final, 0), (Device, 0)],
            &[(Plan, 1), (Device, 0), (Final, 0), (Gone, 0)],
            &[(Plan, 1), (Device, 0), (Gone, 0), (Device, 0)],
            &[(Plan, 1), (Gone, 0), (Device, 0)],
            &[(Plan, 1), (Gone, 0), (Gone, 0)],
            &[(Plan, 1), (Gone, 0), (Gone, 1)],
            &[(Plan, 1), (Device, 0), (Final, 0), (Last, 0)],
            &[(Plan, 0), (Last, 0), (Last, 0)],
        ] {
            assert_eq!(ordered(messages), messages.len() - 1, "{messages:?}");
        }
    }
}
