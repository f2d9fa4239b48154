//! Compares the reference counts and flags of an image with its references, and repairs them.
//!
//! The check shares no code with the cache of tables, because it is the judge in the tests of that cache.

mod bitmaps;
mod compare;
mod count;
pub(crate) mod image;
mod layout;
pub(crate) mod repair;
#[cfg(test)]
mod repair_tests;
pub(crate) mod report;
#[cfg(test)]
mod tests;
mod walk;
mod watched;

use compare::survey;
use image::ReadImage;
use layout::Layout;
use report::{CheckError, Report};

/// The number of host clusters to check at a time: 1 TiB of a file with clusters of 64 KiB. The counters take
/// 64 MiB.
pub const WINDOW: u64 = 16 << 20;

/// Compares refcounts and flags with all references, in windows of `window` host clusters. The result does
/// not depend on the window, [`WINDOW`] for instance.
///
/// # Errors
/// The image cannot be read, its header or its tables are not those of an image, or it is too large.
pub fn check(image: &impl ReadImage, window: u64) -> Result<Report, CheckError> {
    Ok(survey(image, &Layout::load(image)?, window)?.report)
}
