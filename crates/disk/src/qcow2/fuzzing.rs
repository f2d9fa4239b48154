//! Runs requests on hostile images for the fuzz target.

use super::sim::hostile::script;
use kickless_memory::View;
use std::path::Path;
use std::sync::Arc;

/// The guest memory that [`requests`] needs, in bytes.
pub const MEMORY_BYTES: u64 = script::MEMORY_BYTES;

/// Runs requests on an image that the input describes, and on its backing image: two files of one directory.
/// Returns whether the image is opened.
///
/// # Panics
/// A request does not end, or a file changes where it must not.
pub fn requests(memory: &Arc<View>, files: [&Path; 2], input: &[u8]) -> bool {
    script::requests(memory, files, input).is_opened
}
