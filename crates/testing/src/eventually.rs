//! Waits for other threads and processes.

use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a wait that ends soon on any machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Waits until `holds` returns true. It is asked every 50 us at first and every millisecond later.
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
