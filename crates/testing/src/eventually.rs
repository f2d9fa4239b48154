//! Waits for other threads and processes.

use std::thread;
use std::time::{Duration, Instant};

/// The time limit of a wait. It is far longer than a successful wait takes, even on a slow machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Waits until `holds` returns true. The pause between two calls of `holds` grows from 50 us to a
/// millisecond.
///
/// # Panics
/// `holds` does not return true within [`LIMIT`]. `otherwise` is the message.
pub fn eventually(otherwise: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    let mut pause = Duration::from_micros(50);
    while !holds() {
        assert!(start.elapsed() < LIMIT, "{otherwise}");
        thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(1));
    }
}
