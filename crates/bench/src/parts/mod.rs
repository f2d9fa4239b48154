//! `kickless bench ring`, `kickless bench memory`: the cost of single parts on this machine, without a
//! back-end.
//!
//! A part is a list of operations. Each round measures all of them, one after the other, so that other work
//! of the machine affects all of them alike.

mod memory;
mod operation;
mod ring;

use anyhow::Result;
use serde_json::json;

use super::layout::columns;
use super::options::{Part, PartOptions};
use super::results::Spread;

/// Measures a part and prints the results.
///
/// # Errors
/// There is no memory for it, or an operation fails.
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
