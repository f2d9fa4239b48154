//! Limits of the requests and bytes of a device.

mod bucket;
mod limiter;

pub use bucket::Rate;
pub use limiter::{Direction, Limit, Limiter, Limits};
