//! Tests states of reservations that contradict themselves, with a right hash.

use kickless_scsi::{
    REGISTRATIONS_MAX, Reservations, SAVED_LEN_MAX, SavedError, TRANSPORT_ID_LEN_MAX, TransportId,
};

/// FNV-1a, written a second time.
fn with_hash(body: &[u8]) -> Vec<u8> {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in body {
        hash ^= u64::from(*byte);
        hash = hash.wrapping_mul(0x0100_0000_01b3);
    }
    [body, &hash.to_be_bytes()].concat()
}

const HEAD: [u8; 10] = [b'K', b'S', b'P', b'R', 1, 0, 0, 0, 0, 9];
const ONE: [u8; 11] = [0, 0, 0, 0, 0, 0, 0, 7, 2, 1, 2];
const TWO: [u8; 11] = [0, 0, 0, 0, 0, 0, 0, 8, 2, 3, 4];

fn state(parts: &[&[u8]]) -> Result<Reservations, SavedError> {
    Reservations::from_bytes(&with_hash(&[&HEAD, &parts.concat()[..]].concat()), true)
}

/// The layout of version 1 never changes.
#[test]
fn bytes_of_version_1() {
    let found = state(&[&[0, 2], &ONE, &TWO, &[5, 0, 1], &[0]]).unwrap();
    let bytes = with_hash(&[&HEAD[..], &[0, 2], &ONE, &TWO, &[5, 0, 1], &[0]].concat());
    assert_eq!(found.to_bytes(), bytes);
    assert!(found.permits(&TransportId::new(&[1, 2]).unwrap()).write);
    assert!(!found.permits(&TransportId::new(&[1, 3]).unwrap()).write);
    let empty = state(&[&[0, 0], &[0, 0xff, 0xff], &[0]]).unwrap();
    assert_eq!(empty.to_bytes(), with_hash(&[&HEAD[..], &[0, 0, 0, 0xff, 0xff, 0]].concat()));
    let all_registrants = state(&[&[0, 1], &ONE, &[7, 0xff, 0xff], &[0]]).unwrap();
    assert!(all_registrants.permits(&TransportId::new(&[1, 2]).unwrap()).write);
}

#[test]
fn the_longest_state_fits() {
    let id = |number: u8| [&[TRANSPORT_ID_LEN_MAX as u8][..], &[number; TRANSPORT_ID_LEN_MAX]].concat();
    let registrations: Vec<u8> =
        (0..REGISTRATIONS_MAX as u8).flat_map(|number| [&ONE[..8], &id(number)].concat()).collect();
    let found = state(&[&[0, REGISTRATIONS_MAX as u8], &registrations, &[1, 0, 127], &[0]]).unwrap();
    // The room for the nexus of RESERVE is not used: the two kinds of reservations exclude each other.
    assert_eq!(found.to_bytes().len(), SAVED_LEN_MAX - TRANSPORT_ID_LEN_MAX);
}

#[test]
fn contradictions_are_refused() {
    let none: &[u8] = &[0, 0xff, 0xff];
    let keyless = [0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2];
    let nameless = [0, 0, 0, 0, 0, 0, 0, 7, 0];
    let cases: [&[&[u8]]; 13] = [
        // More bytes, a nexus twice, no key, and no identity.
        &[&[0, 0], none, &[0], &[0]],
        &[&[0, 2], &ONE, &ONE, none, &[0]],
        &[&[0, 1], &keyless, none, &[0]],
        &[&[0, 1], &nameless, none, &[0]],
        // Too many registrations.
        &[&[0, 129], none, &[0]],
        // The type is unknown, or the holder is no registration.
        &[&[0, 1], &ONE, &[2, 0, 0], &[0]],
        &[&[0, 1], &ONE, &[0, 0, 0], &[0]],
        &[&[0, 1], &ONE, &[1, 0, 1], &[0]],
        &[&[0, 1], &ONE, &[1, 0xff, 0xff], &[0]],
        &[&[0, 1], &ONE, &[7, 0, 0], &[0]],
        &[&[0, 0], &[7, 0xff, 0xff], &[0]],
        // Reservations of both kinds, and an identity that is too long.
        &[&[0, 1], &ONE, none, &[1, 9]],
        &[&[0, 0], none, &[255], &[1; 255]],
    ];
    for parts in cases {
        assert!(matches!(state(parts), Err(SavedError::Invalid(_))), "{parts:?} {:?}", state(parts));
    }
    let flags = with_hash(&[&HEAD[..5], &[2], &HEAD[6..], &[0, 0], none, &[0]].concat());
    assert!(matches!(Reservations::from_bytes(&flags, true), Err(SavedError::Invalid(_))));
}

#[test]
fn foreign_bytes_are_refused() {
    let found = |bytes: &[u8]| Reservations::from_bytes(bytes, true).unwrap_err();
    assert_eq!(found(b""), SavedError::Foreign);
    assert_eq!(found(b"KSPR"), SavedError::Damaged);
    assert_eq!(found(b"KSPR\x01"), SavedError::Damaged);
    assert_eq!(found(b"KSPR\x02"), SavedError::Version(2));
    assert_eq!(found(&[0; SAVED_LEN_MAX]), SavedError::Foreign);
    // The body ends early.
    for len in 5..HEAD.len() {
        assert_eq!(found(&with_hash(&HEAD[..len])), SavedError::Damaged);
    }
    assert_eq!(state(&[&[0, 1], &ONE[..10]]), Err(SavedError::Damaged));
}
