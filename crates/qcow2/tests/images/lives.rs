//! The length of random runs.

/// The steps of a life.
pub(crate) const STEPS: u64 = 800;
/// The share of steps after which all requests must end.
pub(crate) const SETTLE: f64 = 0.004;
/// The lives of an image.
pub(crate) const LIVES: usize = 3;

/// Returns the number in an environment variable, or the default.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}
