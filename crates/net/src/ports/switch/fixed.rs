//! The addresses that ports have as their only source. Has no side effects.
//!
//! A frame for such an address goes to one of its ports, or nowhere. So it does not matter which addresses
//! the switch has learned, or has room for.

use super::rule::Rule;
use crate::card::filter::Address;
use std::collections::HashMap;

/// A port with an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FixedPort {
    number: u16,
    /// Its address counts in the VLANs that it carries.
    rule: Rule,
}

/// The fixed addresses.
#[derive(Debug, Default)]
pub(super) struct FixedAddresses {
    /// The place of each address in `ports`. The key is the address as a number, which is hashed faster.
    places: HashMap<u64, usize>,
    /// The ports of each address. Most addresses have one. A guest that moves between two cards of one
    /// process has two, in the order in which they last sent. A place without ports is free.
    ports: Vec<Vec<FixedPort>>,
}

fn key(address: Address) -> u64 {
    let [a, b, c, d, e, f] = address;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}

impl FixedAddresses {
    /// Adds a port, which has not sent yet. Returns the place of its address, which stays while the port
    /// does.
    pub(super) fn add(&mut self, address: Address, number: u16, rule: Rule) -> usize {
        let Self { places, ports } = self;
        let place = *places.entry(key(address)).or_insert_with(|| {
            ports.iter().position(Vec::is_empty).unwrap_or_else(|| {
                ports.push(Vec::new());
                ports.len() - 1
            })
        });
        ports[place].push(FixedPort { number, rule });
        place
    }

    /// Removes a port.
    pub(super) fn remove(&mut self, address: Address, number: u16) {
        let Some(place) = self.places.get(&key(address)).copied() else { return };
        self.ports[place].retain(|port| port.number != number);
        if self.ports[place].is_empty() {
            self.places.remove(&key(address));
        }
    }

    fn ports_of(&self, address: Address) -> Option<&[FixedPort]> {
        self.places.get(&key(address)).map(|place| &*self.ports[*place])
    }

    /// Returns whether a port has the address in a VLAN.
    pub(super) fn contains(&self, vlan: u16, address: Address) -> bool {
        self.ports_of(address).is_some_and(|ports| ports.iter().any(|port| port.rule.carries(vlan)))
    }

    /// Notes that a port sent a frame from its address, which has this place. Frames for the address in this
    /// VLAN go to the port from now on.
    pub(super) fn sent(&mut self, vlan: u16, place: usize, number: u16) {
        let ports = &mut self.ports[place];
        if ports.first().is_some_and(|first| first.number == number) {
            return;
        }
        // It goes before the ports of this VLAN. A port of another VLAN keeps its place.
        let to = ports.iter().position(|port| port.number == number || port.rule.carries(vlan));
        let from = ports.iter().position(|port| port.number == number);
        if let (Some(to), Some(from)) = (to, from) {
            ports[to..=from].rotate_right(1);
        }
    }

    /// Returns the port for frames to an address in a VLAN: the last one that sent and that receives, or the
    /// last one that sent. `None` if the address is not fixed in this VLAN.
    pub(super) fn find(&self, vlan: u16, address: Address, receives: impl Fn(u16) -> bool) -> Option<u16> {
        let ports = self.ports_of(address)?;
        let mut of_vlan = ports.iter().filter(|port| port.rule.carries(vlan)).map(|port| port.number);
        of_vlan.clone().find(|port| receives(*port)).or_else(|| of_vlan.next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Address = [2, 0, 0, 0, 0, 1];

    #[test]
    fn an_address_is_behind_the_port_that_sent_last() {
        let mut fixed = FixedAddresses::default();
        let all = |_| true;
        assert_eq!(fixed.find(0, A, all), None);
        let place = [3, 4, 5].map(|number| fixed.add(A, number, Rule::default()))[2];
        assert_eq!(fixed.find(0, A, all), Some(3));
        for number in [5, 4, 4, 3, 5] {
            fixed.sent(0, place, number);
            assert_eq!(fixed.find(7, A, all), Some(number));
        }
        // Ports that do not receive are passed over, while one does.
        assert_eq!(fixed.find(0, A, |port| port == 4), Some(4));
        assert_eq!(fixed.find(0, A, |_| false), Some(5));
        fixed.remove(A, 5);
        assert_eq!(fixed.find(0, A, all), Some(3));
        [3, 4].into_iter().for_each(|number| fixed.remove(A, number));
        assert!(fixed.places.is_empty() && !fixed.contains(0, A));
        // The place is free for another address.
        assert_eq!(fixed.add([2; 6], 1, Rule::default()), place);
    }

    #[test]
    fn an_access_port_has_its_address_in_its_vlan() {
        let mut fixed = FixedAddresses::default();
        let all = |_| true;
        let place = fixed.add(A, 1, Rule { vlan: Some(5), address: Some(A) });
        assert_eq!(
            [0, 5].map(|vlan| (fixed.contains(vlan, A), fixed.find(vlan, A, all))),
            [(false, None), (true, Some(1))]
        );
        fixed.add(A, 2, Rule::default());
        assert_eq!([0, 5].map(|vlan| fixed.find(vlan, A, all)), [Some(2), Some(1)]);
        // Frames of the trunk in another VLAN change nothing in this one.
        fixed.sent(0, place, 2);
        assert_eq!(fixed.find(5, A, all), Some(1));
        fixed.sent(5, place, 2);
        assert_eq!(fixed.find(5, A, all), Some(2));
        fixed.sent(5, place, 1);
        assert_eq!([0, 5].map(|vlan| fixed.find(vlan, A, all)), [Some(2), Some(1)]);
    }
}
