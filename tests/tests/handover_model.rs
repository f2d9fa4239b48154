//! Hands disks over at random between two hosts with a page cache each, and checks that nothing is lost.
//! `kickless_tests::handover` describes the model.
//!
//! `HANDOVER_STEPS` is the number of steps of each test, and `HANDOVER_SEED` the first seed, which a failure
//! prints. `HANDOVER_CASE` takes only the disks whose description contains it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::handover::steps::walk;
use kickless_tests::handover::{Case, Format, Medium};

/// Steps of a walk. A later walk of the same disk has another seed.
const WALK: u64 = 500;
/// Steps of each test without `HANDOVER_STEPS`.
const STEPS: u64 = 240;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// Walks with each disk in turn. All disks are tried before a failure is reported.
fn run(cases: &[Case]) {
    let (steps, mut seed) = (number("HANDOVER_STEPS", STEPS), number("HANDOVER_SEED", 1));
    let only = std::env::var("HANDOVER_CASE").unwrap_or_default();
    let cases: Vec<&Case> = cases.iter().filter(|case| case.to_string().contains(&only)).collect();
    let (mut left, mut taken, mut failures) = (steps, 0, Vec::new());
    while left > 0 && !cases.is_empty() {
        for case in &cases {
            let part = (steps / cases.len() as u64).clamp(1, WALK).min(left);
            match walk(case, seed, part) {
                Ok(was_possible) => taken += if was_possible { part } else { 0 },
                Err(error) => failures.push(format!("{error:#}")),
            }
            left -= part;
            seed += 1;
        }
    }
    println!("{taken} steps");
    assert!(failures.is_empty(), "{} walks failed:\n\n{}", failures.len(), failures.join("\n\n"));
}

fn disk(medium: Medium, format: Format, writeback: bool) -> Case {
    Case { medium, format, writeback }
}

fn qcow2(cluster: u32, layers: usize) -> Format {
    Format::Qcow2 { cluster, subclusters: false, layers }
}

const SMALL: Medium = Medium::Loops { block: 512 };
const LARGE: Medium = Medium::Loops { block: 4096 };

#[test]
fn raw_disks() {
    run(&[
        disk(SMALL, Format::Raw, true),
        disk(LARGE, Format::Raw, false),
        disk(Medium::File, Format::Raw, true),
        disk(Medium::File, Format::Raw, false),
    ]);
}

#[test]
fn qcow2_images_through_the_page_cache() {
    run(&[
        disk(SMALL, qcow2(65536, 1), true),
        disk(LARGE, qcow2(4096, 3), true),
        disk(Medium::File, qcow2(65536, 2), true),
        disk(SMALL, Format::Qcow2 { cluster: 16384, subclusters: true, layers: 2 }, true),
    ]);
}

#[test]
fn qcow2_images_past_the_page_cache() {
    run(&[
        disk(SMALL, qcow2(65536, 3), false),
        // These go through it all the same, because their clusters or subclusters are smaller than a block.
        disk(LARGE, qcow2(512, 2), false),
        disk(LARGE, Format::Qcow2 { cluster: 16384, subclusters: true, layers: 1 }, false),
        disk(Medium::File, qcow2(4096, 3), false),
    ]);
}

#[test]
fn exports() {
    let export = |can_multi_conn| disk(Medium::Nbd { can_multi_conn }, Format::Raw, false);
    run(&[export(false), export(true)]);
}
