//! Compares the reservations with a model that is as simple as the standard's text, over random commands of
//! a few nexuses, and the state with its bytes.
#![expect(clippy::unwrap_used, reason = "a test may")]

use kickless_scsi::{
    Attention, Effects, PersistentAction as Action, PersistentIn, PersistentOut, Refused,
    ReservationType as Type, Reservations, SAVED_LEN_MAX, SavedError, TransportId,
};
use proptest::prelude::*;

const NEXUSES: usize = 4;

/// The keys by nexus, where 0 is none, and the reservation with its holders.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    keys: [u64; NEXUSES],
    kind: Option<Type>,
    holders: [bool; NEXUSES],
    generation: u32,
    legacy: Option<usize>,
}

type Told = Vec<(usize, Attention)>;

impl Model {
    fn is_registered(&self, nexus: usize) -> bool {
        self.keys[nexus] != 0
    }

    fn others(&self, nexus: usize) -> impl Iterator<Item = usize> {
        let keys = self.keys;
        (0..NEXUSES).filter(move |other| *other != nexus && keys[*other] != 0)
    }

    /// Makes the holders those that the type says, and ends a reservation without any.
    fn settle(&mut self) {
        for nexus in 0..NEXUSES {
            let all = self.kind.is_some_and(Type::is_of_all_registrants);
            self.holders[nexus] = self.is_registered(nexus) && (all || self.holders[nexus]);
        }
        if self.holders == [false; NEXUSES] {
            self.kind = None;
        }
    }

    /// Executes a service action. `None` refuses it.
    fn out(&mut self, nexus: usize, request: &PersistentOut) -> Option<Told> {
        if self.legacy.is_some() {
            return None;
        }
        let is_registration = matches!(request.action, Action::Register | Action::RegisterAndIgnore);
        if !is_registration && (!self.is_registered(nexus) || self.keys[nexus] != request.key) {
            return None;
        }
        let mut told = Told::new();
        match request.action {
            Action::Register if self.keys[nexus] != request.key => return None,
            Action::Register | Action::RegisterAndIgnore => {
                if !self.is_registered(nexus) && request.action_key == 0 {
                    return Some(told);
                }
                let before = self.kind;
                self.keys[nexus] = request.action_key;
                self.settle();
                if let (Some(kind), None) = (before, self.kind)
                    && kind.is_shared()
                {
                    told.extend(self.others(nexus).map(|other| (other, Attention::ReservationsReleased)));
                }
                self.generation += 1;
            }
            Action::Reserve => match self.kind {
                None => {
                    self.kind = Some(request.kind?);
                    self.holders[nexus] = true;
                    self.settle();
                }
                Some(kind) if self.holders[nexus] && request.kind == Some(kind) => {}
                Some(_) => return None,
            },
            Action::Release if self.kind.is_none() || !self.holders[nexus] => {}
            Action::Release => {
                if request.kind != self.kind {
                    return None;
                }
                if self.kind.is_some_and(Type::is_shared) {
                    told.extend(self.others(nexus).map(|other| (other, Attention::ReservationsReleased)));
                }
                (self.kind, self.holders) = (None, [false; NEXUSES]);
            }
            Action::Clear => {
                told.extend(self.others(nexus).map(|other| (other, Attention::ReservationsPreempted)));
                self.keys = [0; NEXUSES];
                self.settle();
                self.generation += 1;
            }
            Action::Preempt | Action::PreemptAndAbort => {
                let all = self.kind.is_some_and(Type::is_of_all_registrants);
                let key = request.action_key;
                let takes = match all {
                    true => key == 0,
                    false => (0..NEXUSES).any(|other| self.holders[other] && self.keys[other] == key),
                };
                if key == 0 && !takes || takes && request.kind.is_none() {
                    return None;
                }
                let is_victim = |other: usize| self.keys[other] == key || all && key == 0;
                let victims: Vec<usize> = (0..NEXUSES)
                    .filter(|other| {
                        self.is_registered(*other) && is_victim(*other) && !(takes && *other == nexus)
                    })
                    .collect();
                if victims.is_empty() && !takes {
                    return None;
                }
                for victim in victims {
                    self.keys[victim] = 0;
                    if victim != nexus {
                        told.push((victim, Attention::RegistrationsPreempted));
                    }
                }
                if takes {
                    if request.kind != self.kind {
                        told.extend(self.others(nexus).map(|other| (other, Attention::ReservationsReleased)));
                    }
                    self.kind = request.kind;
                    self.holders = [false; NEXUSES];
                    self.holders[nexus] = true;
                }
                self.settle();
                self.generation += 1;
            }
        }
        Some(told)
    }

    /// Returns whether RESERVE and RELEASE are executed, and whether they then do anything.
    fn legacy_result(&self, nexus: usize) -> Option<bool> {
        if self.keys == [0; NEXUSES] {
            return Some(true);
        }
        let shares = self.kind.is_some_and(Type::is_shared) && self.is_registered(nexus);
        (shares || self.holders[nexus]).then_some(false)
    }

    fn permits(&self, nexus: usize) -> [bool; 3] {
        let shares = self.kind.is_some_and(Type::is_shared) && self.is_registered(nexus);
        match (self.legacy, self.kind) {
            (Some(by), _) => [by == nexus; 3],
            (_, Some(kind)) if !self.holders[nexus] && !shares => [true, kind.permits_reads(), false],
            _ => [true; 3],
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Out(usize, PersistentOut),
    Reserve(usize),
    Release(usize),
    Lose(usize),
    Reset,
}

fn requests() -> impl Strategy<Value = PersistentOut> {
    const ACTIONS: [Action; 10] = [
        Action::Register,
        Action::RegisterAndIgnore,
        Action::RegisterAndIgnore,
        Action::Reserve,
        Action::Reserve,
        Action::Release,
        Action::Clear,
        Action::Preempt,
        Action::Preempt,
        Action::PreemptAndAbort,
    ];
    let action = prop::sample::select(&ACTIONS[..]);
    let kind = prop::option::weighted(0.9, prop::sample::select(&Type::ALL[..]));
    (action, kind, 0u64..4, 0u64..4, any::<bool>()).prop_map(|(action, kind, key, action_key, persist)| {
        // RESERVE always has a type.
        let kind = if action == Action::Reserve { kind.or(Some(Type::WriteExclusive)) } else { kind };
        PersistentOut { action, kind, key, action_key, persist }
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let nexus = || 0..NEXUSES;
    let step = prop_oneof![
        20 => (nexus(), requests()).prop_map(|(nexus, request)| Step::Out(nexus, request)),
        1 => nexus().prop_map(Step::Reserve),
        2 => nexus().prop_map(Step::Release),
        1 => nexus().prop_map(Step::Lose),
        1 => Just(Step::Reset),
    ];
    prop::collection::vec(step, 0..60)
}

fn id(nexus: usize) -> TransportId {
    TransportId::new(&[nexus as u8, 7]).unwrap()
}

/// Takes one of the keys that are registered most of the time.
fn with_own_key(model: &Model, nexus: usize, request: PersistentOut) -> PersistentOut {
    let key = if request.key == 3 { request.key } else { model.keys[nexus] };
    PersistentOut { key, ..request }
}

fn check_out(
    state: &mut Reservations,
    model: &mut Model,
    nexus: usize,
    request: &PersistentOut,
) -> Result<(), TestCaseError> {
    let before = state.clone();
    let (result, expected) = (state.persistent_out(&id(nexus), request), model.out(nexus, request));
    let (Ok(Effects { attentions, aborted, save }), Some(told)) = (&result, &expected) else {
        prop_assert!(result.is_err() && expected.is_none(), "{:?} {:?}", result, expected);
        prop_assert_eq!(&*state, &before);
        return Ok(());
    };
    let sorted = |mut told: Told| {
        told.sort_by_key(|(nexus, attention)| (*nexus, attention.code().code, attention.code().qualifier));
        told
    };
    let found = attentions.iter().map(|(nexus, attention)| (nexus.bytes()[0].into(), *attention)).collect();
    prop_assert_eq!(sorted(found), sorted(told.clone()));
    let lost = attentions.iter().filter(|(_, what)| *what == Attention::RegistrationsPreempted);
    let lost: Vec<_> = lost.map(|(nexus, _)| nexus.clone()).collect();
    prop_assert_eq!(aborted, &if request.action == Action::PreemptAndAbort { lost } else { vec![] });
    if *state == before {
        prop_assert!(!save || request.action == Action::Clear);
    } else {
        prop_assert_eq!(*save, before.persists() || state.persists());
    }
    Ok(())
}

fn check_state(state: &Reservations, model: &Model) -> Result<(), TestCaseError> {
    for nexus in 0..NEXUSES {
        let permits = state.permits(&id(nexus));
        prop_assert_eq!([permits.status, permits.read, permits.write], model.permits(nexus));
    }
    match state.persistent_in(PersistentIn::FullStatus, u32::MAX) {
        Err(refused) => prop_assert!(refused == Refused::Conflict && model.legacy.is_some()),
        Ok(bytes) => {
            prop_assert_eq!(u32::from_be_bytes(bytes[..4].try_into().unwrap()), model.generation);
            let mut found = Model { legacy: None, generation: model.generation, ..Model::default() };
            for status in bytes[8..].chunks(48) {
                let nexus = usize::from(status[24]);
                found.keys[nexus] = u64::from_be_bytes(status[..8].try_into().unwrap());
                found.holders[nexus] = status[12] & 1 == 1;
                found.kind = found.kind.or(Type::from_raw(status[13]));
            }
            prop_assert_eq!(&found, model);
        }
    }
    let bytes = state.to_bytes();
    prop_assert!(bytes.len() <= SAVED_LEN_MAX);
    let found = Reservations::from_bytes(&bytes, true);
    prop_assert_eq!(found.as_ref(), Ok(state));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_state_is_that_of_the_model(steps in steps()) {
        let (mut state, mut model) = (Reservations::new(true), Model::default());
        for step in steps {
            match step {
                Step::Out(nexus, request) => {
                    let request = with_own_key(&model, nexus, request);
                    check_out(&mut state, &mut model, nexus, &request)?;
                }
                Step::Reserve(nexus) => {
                    let is_free = model.legacy.is_none_or(|by| by == nexus);
                    let expected = model.legacy_result(nexus).filter(|_| is_free);
                    prop_assert_eq!(state.reserve(&id(nexus)).is_ok(), expected.is_some());
                    if expected == Some(true) {
                        model.legacy = Some(nexus);
                    }
                }
                Step::Release(nexus) => {
                    let expected = model.legacy_result(nexus);
                    prop_assert_eq!(state.release(&id(nexus)).is_ok(), expected.is_some());
                    if expected == Some(true) && model.legacy == Some(nexus) {
                        model.legacy = None;
                    }
                }
                Step::Lose(nexus) => {
                    state.lose_nexus(&id(nexus));
                    model.legacy = model.legacy.filter(|by| *by != nexus);
                }
                Step::Reset => {
                    state.reset();
                    model.legacy = None;
                }
            }
            check_state(&state, &model)?;
        }
    }

    /// A state that was damaged is never taken for another one.
    #[test]
    fn damaged_bytes_are_refused(steps in steps(), at: prop::sample::Index, flip in 1u8.., cut: bool) {
        let mut state = Reservations::new(true);
        for step in steps {
            if let Step::Out(nexus, request) = step {
                let _ = state.persistent_out(&id(nexus), &request);
            }
        }
        let mut bytes = state.to_bytes();
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] ^= flip;
        }
        let found = Reservations::from_bytes(&bytes, true);
        prop_assert!(matches!(found, Err(SavedError::Foreign | SavedError::Version(_) | SavedError::Damaged)));
    }
}
