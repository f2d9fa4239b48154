//! Parses commands of a guest's control queue with any features, applies them to a filter, and asks it for
//! frames.
#![no_main]

use kickless_net::{Command, Filter, features};
use kickless_spec::features::Features;
use kickless_spec::net::NetFeatures;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, u16, Vec<Vec<u8>>, &[u8])| {
    let (accepted, pairs_max, commands, frame) = input;
    let features = features::in_force(Features::from_bits_retain(accepted));
    let mut filter = Filter::new(None);
    for command in &commands {
        let Ok(command) = Command::parse(command, features, pairs_max) else { continue };
        match command {
            Command::SetPairs(pairs) => assert!((1..=pairs_max).contains(&pairs)),
            Command::Announced => assert!(features.contains(NetFeatures::GUEST_ANNOUNCE)),
            Command::SetMode(mode, is_on) => filter.modes.set(mode, is_on),
            Command::SetTables { unicast, multicast } => filter.set_tables(unicast, multicast),
            Command::SetAddress(address) => filter.address = Some(address),
            Command::SetVlan(vlan, is_accepted) => filter.set_vlan(vlan, is_accepted),
            Command::SetOffloads(offloads) => assert!(features.contains(offloads)),
        }
        filter.accepts(frame, features.contains(NetFeatures::CTRL_VLAN));
    }
});
