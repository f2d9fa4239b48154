//! `kickless bench ring`, `kickless bench memory`: what single parts cost on this machine, without a back-end.
//!
//! A part is a list of operations that can be done again and again. All of them are measured in each round, one after the
//! other, so that whatever else the machine does meets all alike.

mod memory;
mod operation;
mod ring;

use anyhow::Result;
use serde_json::json;

use super::layout::columns;
use super::options::{Part, PartOptions};
use super::results::Spread;

/// Measures a part and prints what came of it.
///
/// # Errors
/// There is no memory for it.
pub(super) fn carry_out(
    part: Part,
    options: &PartOptions,
    print: impl FnOnce(&str) -> Result<()>,
) -> Result<()> {
    let mut operations = match part {
        Part::Ring => ring::operations()?,
        Part::Memory => memory::operations()?,
    };
    let mut figures: Vec<Vec<f64>> = operations.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.rounds {
        for (operation, figures) in operations.iter_mut().zip(&mut figures) {
            figures.push(operation.measure(options.time)?);
        }
    }
    let results = operations
        .iter()
        .zip(figures)
        .filter_map(|(operation, all)| Some((&operation.name, Spread::of(all)?)));
    print(&if options.json {
        let all: Vec<_> =
            results.map(|(name, spread)| json!({ "operation": name, "nanoseconds": spread })).collect();
        serde_json::to_string_pretty(&all)? + "\n"
    } else {
        let mut rows = vec![["ns for each", "median", "least", "most"].map(String::from).to_vec()];
        rows.extend(results.map(|(name, Spread { median, least, most })| {
            let figures = [median, least, most].map(|figure| format!("{figure:.1}"));
            std::iter::once(name.clone()).chain(figures).collect()
        }));
        columns(&rows)
    })
}
