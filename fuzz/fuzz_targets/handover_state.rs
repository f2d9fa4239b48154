//! Reads records as a new process gets them from an old one that guests have taken over. A record that is
//! accepted is within bounds, names each of its descriptors once, and is read again as it is written.
#![no_main]

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use kickless_handover::v1::{
    Card, CardFinal, Device, Disk, DiskFinal, Final, Plan, Stream, StreamFinal, Tap, TapFinal, UplinkFinal,
};
use kickless_handover::{Checked, Giving, Part, Record};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};

/// Reads a record as this type. Returns it, if it is one.
fn read<T: Checked + PartialEq + Debug>(bytes: &[u8], fds: &[OwnedFd]) -> Option<T> {
    let duplicates = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let record = Record::from_bytes(bytes.to_vec(), duplicates).ok()?;
    let (state, _given) = record.read::<T>().ok()?;
    state.check().unwrap();
    let mut giving = Giving::default();
    for fd in fds {
        giving.fd(fd).unwrap();
    }
    let (again, _) = giving.record(&state).unwrap().read::<T>().unwrap();
    assert_eq!(again, state);
    Some(state)
}

fn read_part<T: Checked>(part: &Part) -> Option<T> {
    let part = part.clone().read::<T>().ok()?;
    part.check().unwrap();
    Some(part)
}

fuzz_target!(|input: (u8, bool, &[u8])| {
    let (fds, is_text, rest) = input;
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let fds: Vec<OwnedFd> = (0..fds % 32).map(|_| event.try_clone().unwrap()).collect();
    // The head is simple. Without it, an input is the text.
    let bytes = match is_text {
        false => rest.to_vec(),
        true => {
            let mut bytes = Giving::default().record(&Plan::default()).unwrap().to_bytes();
            bytes.truncate(32);
            bytes[16..24].copy_from_slice(&(rest.len() as u64).to_le_bytes());
            bytes.extend(rest);
            bytes
        }
    };
    if let Some(plan) = read::<Plan>(&bytes, &fds) {
        assert!(plan.served() <= plan.devices.len());
    }
    let device = read::<Device>(&bytes, &fds).unwrap_or_default();
    read_part::<Disk>(&device.own);
    if let Some(card) = read_part::<Card>(&device.own) {
        let tap = read_part::<Tap>(&card.port).unwrap_or_default();
        let _ = TapFinal::default().check_against(tap.queues.len(), tap.detaches);
        read_part::<Stream>(&card.port);
    }
    if let Some(last) = read::<Final>(&bytes, &fds) {
        let _ = last.check_against(&device);
        read_part::<DiskFinal>(&last.own);
        if let Some(card) = read_part::<CardFinal>(&last.own) {
            read_part::<StreamFinal>(&card.port);
            read_part::<UplinkFinal>(&card.port);
        }
    }
});
