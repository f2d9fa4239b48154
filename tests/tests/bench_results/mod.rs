//! Checks results of `kickless bench` against their schema, `docs/bench.schema.json`.

use std::fs;

use anyhow::{Context, Result, anyhow, bail};
use kickless_tests::daemon::repository;
use serde_json::Value;

/// Checks results.
///
/// # Errors
/// They are not as the schema says, or the schema is none.
pub(crate) fn check(results: &Value) -> Result<()> {
    let path = repository().join("docs/bench.schema.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let schema = serde_json::from_str(&text)?;
    let validator = jsonschema::validator_for(&schema).map_err(|error| anyhow!("the schema: {error}"))?;
    let errors: Vec<String> =
        validator.iter_errors(results).map(|error| format!("{}: {error}", error.instance_path())).collect();
    if errors.is_empty() { Ok(()) } else { bail!("{}", errors.join("\n")) }
}
