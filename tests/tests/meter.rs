//! Lets hostile devices run beside a disk and two cards that verify their data. `kickless_tests::meter`
//! describes the harness.
//!
//! Without further settings, each behaviour does its deed a few times, and nothing is measured. With
//! `METER=1`, the victims' loss of rate and their worst request are measured beside the same attacker when it
//! is idle, and have to keep limits. `docs/measurements/neighbours.md` has the command. `METER_ROWS` takes
//! the rows whose name contains it, `METER_ROUNDS` sets the number of rounds, and `METER_TIME` the
//! milliseconds of each period. `METER_PLACES=same` takes the attackers on the worker of the victims, and
//! `other` those on another one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::meter::behaviour::Behaviour;
use kickless_tests::meter::host::FirstSession;
use kickless_tests::meter::report::{Row, print_page};
use kickless_tests::meter::turn::{Load, Place, measure, try_out};
use kickless_tests::meter::{control, frames, memory, messages, queues};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Rounds and milliseconds without `METER_ROUNDS` and `METER_TIME`.
const ROUNDS: u64 = 3;
const TIME: u64 = 500;

/// Measurements run one after the other.
static MEASURING: Mutex<()> = Mutex::new(());

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

fn run(kind: &str, table: &[Behaviour]) {
    let only = std::env::var("METER_ROWS").unwrap_or_default();
    let table: Vec<&Behaviour> = table.iter().filter(|behaviour| behaviour.name.contains(&only)).collect();
    if std::env::var_os("METER").is_none() {
        for behaviour in table {
            let deed = try_out(behaviour).unwrap_or_else(|error| panic!("{error:#}"));
            println!("{}: {} deeds", behaviour.name, deed.done);
            assert_eq!(deed.seen, 0, "{}: frames between two others are seen", behaviour.name);
        }
        return;
    }
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let _first = FirstSession::take();
    let time = Duration::from_millis(number("METER_TIME", TIME));
    let mut failures = Vec::new();
    let places = std::env::var("METER_PLACES").unwrap_or_default();
    let places = [("same", Place::SameWorker), ("other", Place::OtherWorker)]
        .into_iter()
        .filter_map(|(name, place)| (places.is_empty() || places == name).then_some(place));
    for place in places {
        let mut rows = Vec::new();
        for behaviour in &table {
            let loads =
                if place == Place::SameWorker { &[Load::Disk, Load::Cards][..] } else { &[Load::Disk] };
            let rounds = (0..number("METER_ROUNDS", ROUNDS)).flat_map(|_| loads);
            let rounds: Result<Vec<_>, _> =
                rounds.map(|load| measure(behaviour, place, *load, time)).collect();
            match rounds {
                Ok(rounds) => {
                    let row = Row::new(behaviour, place, &rounds);
                    println!("{row}");
                    failures.extend(row.offences().iter().map(|what| format!("{}: {what}", row.name)));
                    rows.push(row);
                }
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        print_page(&format!("{kind}, {place:?}"), &rows);
    }
    assert!(failures.is_empty(), "{} limits are not kept:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn frames() {
    run("Frames", frames::TABLE);
}

#[test]
fn memory() {
    run("Memory", memory::TABLE);
}

#[test]
fn queues() {
    run("Queues", queues::TABLE);
}

#[test]
fn messages() {
    run("Messages", messages::TABLE);
}

#[test]
fn control_sockets() {
    run("Control sockets", control::TABLE);
}
