//! Reads states of reservations from any bytes, also from those with a right hash, and changes them by any
//! commands. Whatever the state is, its bytes are read as the same state.
#![no_main]

use kickless_scsi::{
    PersistentAction, PersistentIn, PersistentOut, REGISTRATIONS_MAX, ReservationType, Reservations,
    SAVED_LEN_MAX, TransportId,
};
use libfuzzer_sys::fuzz_target;

const ACTIONS: [PersistentAction; 7] = [
    PersistentAction::Register,
    PersistentAction::RegisterAndIgnore,
    PersistentAction::Reserve,
    PersistentAction::Release,
    PersistentAction::Clear,
    PersistentAction::Preempt,
    PersistentAction::PreemptAndAbort,
];

/// Returns a body behind the beginning of a state, with the hash that it needs.
fn with_hash(body: &[u8]) -> Vec<u8> {
    let body = [b"KSPR\x01", body].concat();
    let hash = body.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    [&body[..], &hash.to_be_bytes()].concat()
}

fn check(state: &Reservations, nexus: &TransportId) {
    let bytes = state.to_bytes();
    assert!(bytes.len() <= SAVED_LEN_MAX);
    assert_eq!(Reservations::from_bytes(&bytes, true).as_ref(), Ok(state));
    state.permits(nexus);
    for action in
        [PersistentIn::Keys, PersistentIn::Reservation, PersistentIn::Capabilities, PersistentIn::FullStatus]
    {
        for allocation in [0, 9, 0xffff] {
            if let Ok(bytes) = state.persistent_in(action, allocation) {
                assert!(bytes.len() <= allocation as usize);
            }
        }
    }
}

fuzz_target!(|input: (&[u8], Vec<(u8, u8, u8, u8, u8)>)| {
    let (saved, steps) = input;
    let _ = Reservations::from_bytes(saved, true);
    let mut state =
        Reservations::from_bytes(&with_hash(saved), true).unwrap_or_else(|_| Reservations::new(true));
    // More steps take longer, and reach no other states.
    for (number, action, kind, key, action_key) in steps.into_iter().take(64) {
        // Identities in a state that was read may have any length.
        let bytes = [number % 8; 3];
        let Ok(nexus) = TransportId::new(&bytes[..1 + usize::from(number >> 7)]) else { continue };
        let kind = ReservationType::from_raw(kind % 10);
        match action % 16 {
            nth @ 0..7 => {
                let action = ACTIONS[usize::from(nth)];
                let (key, action_key) = ((key % 4).into(), (action_key % 4).into());
                let persist = action_key == 3;
                let request = PersistentOut { action, kind, key, action_key, persist };
                let before = state.clone();
                match state.persistent_out(&nexus, &request) {
                    Ok(effects) => {
                        assert!(effects.attentions.len() <= 2 * REGISTRATIONS_MAX);
                        assert!(effects.aborted.len() <= REGISTRATIONS_MAX);
                        assert!(effects.attentions.iter().all(|(other, _)| *other != nexus));
                    }
                    Err(_) => assert_eq!(state, before),
                }
            }
            7 => drop(state.reserve(&nexus)),
            8 => drop(state.release(&nexus)),
            9 => state.lose_nexus(&nexus),
            10 => state.reset(),
            11 => state.power_on(),
            _ => drop(state.permits(&nexus)),
        }
    }
    // Only once, because it takes as long as many steps.
    check(&state, &TransportId::new(&[1]).unwrap_or_else(|_| unreachable!("it has a byte")));
});
