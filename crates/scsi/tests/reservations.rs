//! Tests reservations case by case.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use common::{cdb, on_disk};
use kickless_scsi::{
    Access, Attention, Command, Effects, Permits, PersistentAction as Action, PersistentIn, PersistentOut,
    PersistentReserveOut, REGISTRATIONS_MAX, Refused, ReservationType as Type, Reservations, Sense,
    TRANSPORT_ID_LEN_MAX, TransportId,
};
use kickless_spec::scsi::opcode::{PERSISTENT_RESERVE_OUT, PROUT_REGISTER};
use kickless_spec::scsi::sense::{
    AdditionalSense, INSUFFICIENT_REGISTRATION_RESOURCES, INVALID_RELEASE_OF_PERSISTENT_RESERVATION,
};

fn nexus(number: u8) -> TransportId {
    TransportId::new(&[number]).unwrap()
}

/// Executes a service action of a nexus.
fn out(
    state: &mut Reservations,
    number: u8,
    action: Action,
    kind: Type,
    keys: (u64, u64),
) -> Result<Effects, Refused> {
    let (key, action_key) = keys;
    let request = PersistentOut { action, kind: Some(kind), key, action_key, persist: false };
    state.persistent_out(&nexus(number), &request)
}

/// Returns a state in which these nexuses are registered, each with ten times its number as its key.
fn registered(numbers: &[u8]) -> Reservations {
    let mut state = Reservations::new(true);
    for number in numbers {
        let keys = (0, u64::from(*number) * 10);
        assert!(out(&mut state, *number, Action::Register, Type::WriteExclusive, keys).is_ok());
    }
    state
}

/// Returns such a state with a reservation of the first one.
fn reserved(numbers: &[u8], kind: Type) -> Reservations {
    let mut state = registered(numbers);
    let keys = (u64::from(numbers[0]) * 10, 0);
    assert_eq!(out(&mut state, numbers[0], Action::Reserve, kind, keys), Ok(Effects::default()));
    state
}

fn keys(state: &Reservations) -> Vec<u64> {
    let bytes = state.persistent_in(PersistentIn::Keys, u32::MAX).unwrap();
    bytes[8..].chunks(8).map(|key| u64::from_be_bytes(key.try_into().unwrap())).collect()
}

/// Returns the key and the type of the reservation.
fn holder(state: &Reservations) -> Option<(u64, u8)> {
    let bytes = state.persistent_in(PersistentIn::Reservation, u32::MAX).unwrap();
    (bytes.len() == 24).then(|| (u64::from_be_bytes(bytes[8..16].try_into().unwrap()), bytes[21]))
}

fn generation(state: &Reservations) -> u32 {
    let bytes = state.persistent_in(PersistentIn::Keys, 4).unwrap();
    u32::from_be_bytes(bytes.try_into().unwrap())
}

fn told(effects: &Effects) -> Vec<(u8, Attention)> {
    effects.attentions.iter().map(|(nexus, attention)| (nexus.bytes()[0], *attention)).collect()
}

fn code(result: Result<Effects, Refused>) -> AdditionalSense {
    match result {
        Err(Refused::Check(sense)) => sense.code,
        other => panic!("{other:?}"),
    }
}

const KIND: Type = Type::WriteExclusive;

#[test]
fn registrations_come_and_go() {
    let mut state = Reservations::new(true);
    let register = |state: &mut Reservations, action, keys| out(state, 1, action, KIND, keys);
    // A nexus without a registration has key 0, and loses nothing.
    assert_eq!(register(&mut state, Action::Register, (5, 7)), Err(Refused::Conflict));
    assert_eq!(register(&mut state, Action::Register, (0, 0)), Ok(Effects::default()));
    assert_eq!((keys(&state), generation(&state)), (vec![], 0));
    assert!(register(&mut state, Action::Register, (0, 7)).is_ok());
    assert_eq!((keys(&state), generation(&state)), (vec![7], 1));
    for wrong in [0, 8] {
        assert_eq!(register(&mut state, Action::Register, (wrong, 9)), Err(Refused::Conflict));
    }
    assert!(register(&mut state, Action::Register, (7, 9)).is_ok());
    assert!(register(&mut state, Action::RegisterAndIgnore, (1234, 11)).is_ok());
    assert_eq!((keys(&state), generation(&state)), (vec![11], 3));
    assert!(register(&mut state, Action::Register, (11, 0)).is_ok());
    assert_eq!((keys(&state), generation(&state)), (vec![], 4));
    // The other nexus may have the same key.
    let mut state = registered(&[1]);
    assert!(out(&mut state, 2, Action::RegisterAndIgnore, KIND, (0, 10)).is_ok());
    assert_eq!(keys(&state), [10, 10]);
}

#[test]
fn registrations_have_a_limit() {
    let mut state = Reservations::new(false);
    for number in 0..REGISTRATIONS_MAX as u8 {
        assert!(out(&mut state, number, Action::Register, KIND, (0, 1)).is_ok());
    }
    let refused = out(&mut state, 255, Action::Register, KIND, (0, 1));
    assert_eq!(code(refused), INSUFFICIENT_REGISTRATION_RESOURCES);
    // Registered nexuses still change their keys.
    assert!(out(&mut state, 0, Action::Register, KIND, (1, 2)).is_ok());
    let bytes = state.persistent_in(PersistentIn::FullStatus, u32::MAX).unwrap();
    assert_eq!(bytes.len(), 8 + 48 * REGISTRATIONS_MAX);
}

#[test]
fn only_registered_nexuses_reserve() {
    for action in [Action::Reserve, Action::Release, Action::Clear, Action::Preempt, Action::PreemptAndAbort]
    {
        let mut state = registered(&[1, 2]);
        // The key is wrong, that of another nexus, or there is none.
        assert_eq!(out(&mut state, 1, action, KIND, (11, 20)), Err(Refused::Conflict));
        assert_eq!(out(&mut state, 1, action, KIND, (20, 20)), Err(Refused::Conflict));
        assert_eq!(out(&mut state, 3, action, KIND, (0, 20)), Err(Refused::Conflict));
        assert_eq!(state, registered(&[1, 2]));
    }
}

#[test]
fn each_type_is_reserved_and_released() {
    for kind in Type::ALL {
        let mut state = reserved(&[1, 2], kind);
        let key = if kind.is_of_all_registrants() { 0 } else { 10 };
        assert_eq!(holder(&state), Some((key, kind as u8)));
        // Again, with another type, and by another nexus.
        assert!(out(&mut state, 1, Action::Reserve, kind, (10, 0)).is_ok());
        for other in Type::ALL.into_iter().filter(|other| *other != kind) {
            let refused = out(&mut state, 1, Action::Reserve, other, (10, 0));
            assert_eq!(refused, Err(Refused::Conflict));
        }
        let second = out(&mut state, 2, Action::Reserve, kind, (20, 0));
        assert_eq!(second.is_ok(), kind.is_of_all_registrants());
        // The wrong type, the wrong scope, and a nexus that is no holder.
        for other in Type::ALL.into_iter().filter(|other| *other != kind) {
            let refused = out(&mut state, 1, Action::Release, other, (10, 0));
            assert_eq!(code(refused), INVALID_RELEASE_OF_PERSISTENT_RESERVATION);
        }
        let request =
            PersistentOut { action: Action::Release, kind: None, key: 10, action_key: 0, persist: false };
        let refused = state.persistent_out(&nexus(1), &request);
        assert_eq!(code(refused), INVALID_RELEASE_OF_PERSISTENT_RESERVATION);
        if !kind.is_of_all_registrants() {
            assert_eq!(out(&mut state, 2, Action::Release, kind, (20, 0)), Ok(Effects::default()));
        }
        assert_eq!(holder(&state), Some((key, kind as u8)));
        let released = out(&mut state, 1, Action::Release, kind, (10, 0)).unwrap();
        let expected = if kind.is_shared() { vec![(2, Attention::ReservationsReleased)] } else { vec![] };
        assert_eq!((told(&released), holder(&state)), (expected, None));
        // Neither counts as a change of registrations.
        assert_eq!(generation(&state), 2);
        assert!(out(&mut state, 1, Action::Release, kind, (10, 0)).is_ok());
    }
}

#[test]
fn a_holder_that_unregisters_releases() {
    for kind in Type::ALL {
        let mut state = reserved(&[1, 2], kind);
        let effects = out(&mut state, 1, Action::Register, KIND, (10, 0)).unwrap();
        match (kind.is_of_all_registrants(), kind.is_shared()) {
            (true, _) => {
                assert_eq!((told(&effects), holder(&state)), (vec![], Some((0, kind as u8))));
                assert!(out(&mut state, 2, Action::Register, KIND, (20, 0)).is_ok());
            }
            (false, true) => assert_eq!(told(&effects), [(2, Attention::ReservationsReleased)]),
            (false, false) => assert_eq!(told(&effects), []),
        }
        assert_eq!(holder(&state), None);
    }
    let mut state = reserved(&[1, 2], Type::ExclusiveAccessRegistrantsOnly);
    assert_eq!(out(&mut state, 2, Action::Register, KIND, (20, 0)), Ok(Effects::default()));
    assert_eq!(holder(&state), Some((10, 6)));
}

/// SPC-4, section 5.13.1.
#[test]
fn types_permit_classes_of_commands() {
    for kind in Type::ALL {
        let state = reserved(&[1, 2], kind);
        let permits = |number| {
            let permits = state.permits(&nexus(number));
            [Access::Exempt, Access::Reservation, Access::Status, Access::Read, Access::Write]
                .map(|access| permits.contains(access))
        };
        let others = [true, true, true, kind.permits_reads(), false];
        assert_eq!(permits(1), [true; 5], "{kind:?}");
        assert_eq!(permits(2), if kind.is_shared() { [true; 5] } else { others }, "{kind:?}");
        assert_eq!(permits(3), others, "{kind:?}");
    }
    assert!(registered(&[1]).permits(&nexus(2)).write);
    let [we, ea, we_ro, ea_ro, we_ar, ea_ar] = Type::ALL.map(Type::permits_reads);
    assert_eq!([we, ea, we_ro, ea_ro, we_ar, ea_ar], [true, false, true, false, true, false]);
}

#[test]
fn clear_ends_everything() {
    for kind in Type::ALL {
        let mut state = reserved(&[1, 2, 3], kind);
        let effects = out(&mut state, 2, Action::Clear, KIND, (20, 0)).unwrap();
        let told = told(&effects);
        assert_eq!(told, [1, 3].map(|number| (number, Attention::ReservationsPreempted)));
        assert_eq!((keys(&state), holder(&state), generation(&state)), (vec![], None, 4));
    }
}

#[test]
fn a_holder_is_preempted() {
    use Attention::{RegistrationsPreempted, ReservationsReleased};
    for kind in Type::ALL.into_iter().filter(|kind| !kind.is_of_all_registrants()) {
        for new in Type::ALL {
            let mut state = reserved(&[1, 2, 3], kind);
            let effects = out(&mut state, 2, Action::Preempt, new, (20, 10)).unwrap();
            let mut expected = vec![(1, RegistrationsPreempted)];
            expected.extend((new != kind).then_some((3, ReservationsReleased)));
            assert_eq!((told(&effects), effects.aborted), (expected, vec![]));
            let key = if new.is_of_all_registrants() { 0 } else { 20 };
            assert_eq!((keys(&state), holder(&state)), (vec![20, 30], Some((key, new as u8))));
            assert_eq!(generation(&state), 4);
        }
    }
}

#[test]
fn preempt_and_abort_names_the_nexuses() {
    let mut state = reserved(&[1, 2, 3], KIND);
    assert!(out(&mut state, 3, Action::Register, KIND, (30, 10)).is_ok());
    let effects = out(&mut state, 2, Action::PreemptAndAbort, KIND, (20, 10)).unwrap();
    assert_eq!(effects.aborted, [nexus(1), nexus(3)]);
    assert_eq!((keys(&state), holder(&state)), (vec![20], Some((20, 1))));
}

#[test]
fn all_registrants_are_preempted_by_key_zero() {
    for kind in Type::ALL.into_iter().filter(|kind| kind.is_of_all_registrants()) {
        let mut state = reserved(&[1, 2, 3], kind);
        let effects = out(&mut state, 2, Action::Preempt, KIND, (20, 0)).unwrap();
        let expected = [1, 3].map(|number| (number, Attention::RegistrationsPreempted));
        assert_eq!((told(&effects), keys(&state)), (expected.to_vec(), vec![20]));
        assert_eq!(holder(&state), Some((20, KIND as u8)));
        // A key ends registrations, and the reservation stays until the last one.
        let mut state = reserved(&[1, 2], kind);
        assert!(out(&mut state, 2, Action::Preempt, KIND, (20, 10)).is_ok());
        assert_eq!((keys(&state), holder(&state)), (vec![20], Some((0, kind as u8))));
        assert!(out(&mut state, 2, Action::Preempt, KIND, (20, 20)).is_ok());
        assert_eq!((keys(&state), holder(&state)), (vec![], None));
    }
}

#[test]
fn registrations_are_preempted() {
    for mut state in [registered(&[1, 2, 3]), reserved(&[1, 2, 3], KIND)] {
        let before = holder(&state);
        let zero = out(&mut state, 2, Action::Preempt, KIND, (20, 0));
        assert_eq!(zero, Err(Refused::Check(Sense::invalid_parameter(8, 7))));
        assert_eq!(out(&mut state, 2, Action::Preempt, KIND, (20, 99)), Err(Refused::Conflict));
        let effects = out(&mut state, 2, Action::Preempt, KIND, (20, 30)).unwrap();
        assert_eq!(told(&effects), [(3, Attention::RegistrationsPreempted)]);
        assert_eq!((keys(&state), holder(&state)), (vec![10, 20], before));
        // Its own one.
        let effects = out(&mut state, 2, Action::PreemptAndAbort, KIND, (20, 20)).unwrap();
        assert_eq!((effects, keys(&state)), (Effects::default(), vec![10]));
    }
    // The type only counts if the reservation is preempted.
    let request =
        PersistentOut { action: Action::Preempt, kind: None, key: 20, action_key: 30, persist: false };
    let mut state = reserved(&[1, 2, 3], KIND);
    assert!(state.persistent_out(&nexus(2), &request).is_ok());
    let refused = state.persistent_out(&nexus(2), &PersistentOut { action_key: 10, ..request });
    assert_eq!(refused, Err(Refused::Check(Sense::invalid_field(2, 7))));
}

#[test]
fn a_holder_may_preempt_itself() {
    let mut state = reserved(&[1, 2], KIND);
    let new = Type::ExclusiveAccessRegistrantsOnly;
    let effects = out(&mut state, 1, Action::Preempt, new, (10, 10)).unwrap();
    assert_eq!(told(&effects), [(2, Attention::ReservationsReleased)]);
    assert_eq!((keys(&state), holder(&state)), (vec![10, 20], Some((10, new as u8))));
}

#[test]
fn reserve_and_release() {
    let mut state = Reservations::new(true);
    assert_eq!(state.reserve(&nexus(1)), Ok(()));
    assert_eq!(state.reserve(&nexus(1)), Ok(()));
    assert_eq!(state.reserve(&nexus(2)), Err(Refused::Conflict));
    let permits = state.permits(&nexus(2));
    assert!(!permits.status && !permits.read && !permits.write && permits.contains(Access::Exempt));
    assert!(state.permits(&nexus(1)).write);
    // The release of another nexus does nothing.
    assert_eq!(state.release(&nexus(2)), Ok(()));
    assert_eq!(state.reserve(&nexus(2)), Err(Refused::Conflict));
    // Persistent reservations conflict, for the holder too.
    for number in [1, 2] {
        assert_eq!(out(&mut state, number, Action::Register, KIND, (0, 1)), Err(Refused::Conflict));
    }
    assert_eq!(state.persistent_in(PersistentIn::Keys, 8), Err(Refused::Conflict));
    assert_eq!(state.release(&nexus(1)), Ok(()));
    assert_eq!(state, Reservations::new(true));
    for end in [|state: &mut Reservations| state.lose_nexus(&nexus(1)), Reservations::reset] {
        assert_eq!(state.reserve(&nexus(1)), Ok(()));
        state.lose_nexus(&nexus(2));
        assert_eq!(state.reserve(&nexus(2)), Err(Refused::Conflict));
        end(&mut state);
        assert_eq!(state, Reservations::new(true));
    }
}

/// SPC-4, section 5.13.3.
#[test]
fn reserve_does_nothing_for_those_who_share() {
    for kind in Type::ALL {
        let mut state = reserved(&[1, 2], kind);
        let before = state.clone();
        for number in 1..4 {
            let shares = number == 1 || number == 2 && kind.is_shared();
            let expected = if shares { Ok(()) } else { Err(Refused::Conflict) };
            assert_eq!(state.reserve(&nexus(number)), expected);
            assert_eq!(state.release(&nexus(number)), expected);
        }
        assert_eq!(state, before);
    }
    let mut state = registered(&[1]);
    for number in [1, 2] {
        assert_eq!(state.reserve(&nexus(number)), Err(Refused::Conflict));
        assert_eq!(state.release(&nexus(number)), Err(Refused::Conflict));
    }
}

fn register_to_persist(state: &mut Reservations, key: u64, persist: bool) -> Result<Effects, Refused> {
    let action = Action::RegisterAndIgnore;
    let request = PersistentOut { action, kind: None, key: 0, action_key: key, persist };
    state.persistent_out(&nexus(1), &request)
}

#[test]
fn a_state_that_persists_is_saved() {
    let mut state = Reservations::new(true);
    let saves =
        |state: &mut Reservations, key, persist| register_to_persist(state, key, persist).unwrap().save;
    assert!(!saves(&mut state, 10, false));
    assert!(saves(&mut state, 10, true) && state.persists());
    assert!(out(&mut state, 1, Action::Reserve, KIND, (10, 0)).unwrap().save);
    // Nothing changes.
    assert!(!out(&mut state, 1, Action::Reserve, KIND, (10, 0)).unwrap().save);
    let mut after = Reservations::from_bytes(&state.to_bytes(), true).unwrap();
    after.power_on();
    assert_eq!((keys(&after), holder(&after), generation(&after)), (vec![10], Some((10, 1)), 0));
    // The last one that registers decides, and this is saved too.
    assert!(saves(&mut state, 11, false) && !state.persists());
    assert!(!saves(&mut state, 12, false));
    state.power_on();
    assert_eq!(state, Reservations::new(true));
}

/// Registrations that persist do not keep the other kind of reservation.
#[test]
fn a_loss_of_power_ends_the_reservation_of_reserve() {
    for persist in [false, true] {
        let mut state = Reservations::new(true);
        for key in [10, 0] {
            register_to_persist(&mut state, key, persist).unwrap();
        }
        assert_eq!((state.reserve(&nexus(1)), state.persists()), (Ok(()), persist));
        state.power_on();
        assert_eq!((state.permits(&nexus(2)), generation(&state)), (Permits::ALL, 0));
    }
}

#[test]
fn a_unit_without_a_file_does_not_persist() {
    let mut state = Reservations::new(true);
    register_to_persist(&mut state, 10, true).unwrap();
    let mut without = Reservations::from_bytes(&state.to_bytes(), false).unwrap();
    assert!(keys(&without) == [10] && !without.persists());
    assert_eq!(without.persistent_in(PersistentIn::Capabilities, 8).unwrap()[2..4], [0x10, 0x90]);
    assert!(!register_to_persist(&mut without, 11, false).unwrap().save);
    let mut state = Reservations::new(false);
    let refused = register_to_persist(&mut state, 10, true);
    assert_eq!(refused, Err(Refused::Check(Sense::invalid_parameter(20, 0))));
    assert_eq!(state.persistent_in(PersistentIn::Capabilities, 8).unwrap()[2], 0x10);
}

#[test]
fn reports() {
    let mut state = reserved(&[1, 2], Type::WriteExclusiveRegistrantsOnly);
    let report = |state: &Reservations, action, len| state.persistent_in(action, len).unwrap();
    let keys = [0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0, 20];
    assert_eq!(report(&state, PersistentIn::Keys, 512), keys);
    assert_eq!(report(&state, PersistentIn::Keys, 10), keys[..10]);
    let holder = [0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 5, 0, 0];
    assert_eq!(report(&state, PersistentIn::Reservation, 512), holder);
    let capabilities = |state: &Reservations| report(state, PersistentIn::Capabilities, 512);
    assert_eq!(capabilities(&state), [0, 8, 0x11, 0x90, 0xea, 0x01, 0, 0]);
    let full = report(&state, PersistentIn::FullStatus, 512);
    let mut first = [0; 48];
    first[7] = 10;
    first[12..14].copy_from_slice(&[1, 5]);
    first[18..25].copy_from_slice(&[0, 1, 0, 0, 0, 24, 1]);
    let mut second = first;
    (second[7], second[12], second[13], second[24]) = (20, 0, 0, 2);
    assert_eq!(full, [&[0, 0, 0, 2, 0, 0, 0, 96][..], &first, &second].concat());
    register_to_persist(&mut state, 10, true).unwrap();
    assert_eq!(capabilities(&state)[3], 0x91);
    // An identity is as long as it is, in multiples of four.
    let mut state = Reservations::new(false);
    let long = TransportId::new(&[7; TRANSPORT_ID_LEN_MAX]).unwrap();
    let request =
        PersistentOut { action: Action::Register, kind: None, key: 0, action_key: 1, persist: false };
    state.persistent_out(&long, &request).unwrap();
    let full = report(&state, PersistentIn::FullStatus, 512);
    assert_eq!((full.len(), full[31]), (8 + 24 + 252, 252));
    assert!(TransportId::new(&[]).is_err() && TransportId::new(&[0; TRANSPORT_ID_LEN_MAX + 1]).is_err());
}

#[test]
fn parameter_lists() {
    let command = |action: u8, len: u32| match on_disk(&cdb(
        PERSISTENT_RESERVE_OUT,
        &[(1, &[action, 1]), (5, &len.to_be_bytes())],
    )) {
        Ok(Command::PersistentReserveOut(command)) => command,
        other => panic!("{other:?}"),
    };
    let mut list = [0; PersistentReserveOut::LIST_LEN as usize];
    list[..16].copy_from_slice(&[0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0]);
    let parsed = PersistentOut::parse(&command(PROUT_REGISTER, 24), &list).unwrap();
    let expected = PersistentOut {
        action: Action::Register,
        kind: None,
        key: 0x102,
        action_key: 0x0304_0000_0000_0000,
        persist: false,
    };
    assert_eq!(parsed, expected);
    for (flags, result) in [
        (0x01, Ok(PersistentOut { persist: true, ..expected })),
        (0x04, Err(Sense::invalid_parameter(20, 2))),
        (0x08, Err(Sense::invalid_parameter(20, 3))),
        (0xf2, Ok(expected)),
    ] {
        list[20] = flags;
        assert_eq!(PersistentOut::parse(&command(PROUT_REGISTER, 24), &list), result);
        // The others ignore the flags.
        let reserve = PersistentOut::parse(&command(1, 24), &list).unwrap();
        assert!(!reserve.persist && reserve.kind == Some(Type::WriteExclusive));
    }
    // A list with other initiators says so before it is too long.
    list[20] = 0x08;
    let register = command(PROUT_REGISTER, 100);
    assert_eq!(PersistentOut::parse(&register, &list), Err(Sense::invalid_parameter(20, 3)));
    list[20] = 0;
    assert_eq!(PersistentOut::parse(&register, &list), Err(Sense::LIST_LENGTH));
    assert_eq!(PersistentOut::parse(&command(1, 24), &list[..23]), Err(Sense::LIST_LENGTH));
}
