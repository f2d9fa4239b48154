//! The formats of the state. Each has a number and a module, and belongs to no version of the program.
//!
//! A process reads and writes the formats of [`FORMATS`]: the newest, and the one before it. The new process
//! says which it has, and the old one writes the highest that both have ([`common`]). So the old process
//! needs no knowledge of later formats, and a downgrade is the same call.
//!
//! A released format does not change: `tests/states` has a file of each record. The ignored test of
//! `tests/states.rs` writes the files of a format that is not released yet. A change is a new module, with
//! conversions from and to the format before it. A conversion to the older format fails with a sentence if a
//! field that the older format lacks has a value other than its neutral one. Format 1 is the only one so far,
//! so there are no conversions.

pub mod v1;

use crate::error::Error;
use std::ops::RangeInclusive;

/// The formats that this process reads and writes.
pub const FORMATS: RangeInclusive<u32> = 1..=1;

/// Returns the highest format that both processes have.
///
/// # Errors
/// There is none.
pub fn common(theirs: RangeInclusive<u32>) -> Result<u32, Error> {
    let highest = *theirs.end().min(FORMATS.end());
    match theirs.contains(&highest) && FORMATS.contains(&highest) {
        true => Ok(highest),
        false => Err(Error::Formats { theirs, ours: FORMATS }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_common_format_is_used() {
        let newest = *FORMATS.end();
        assert_eq!(common(newest..=newest + 1).unwrap(), newest, "the new process is newer");
        assert_eq!(common(newest - 1..=newest).unwrap(), newest);
        let (later, none) = (common(newest + 1..=newest + 2), common(RangeInclusive::new(newest, 0)));
        assert_eq!(
            later.unwrap_err().to_string(),
            "it has formats 2 to 3 of the state, and this process has 1 to 1"
        );
        assert!(none.is_err());
    }
}
