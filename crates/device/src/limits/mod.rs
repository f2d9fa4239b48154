//! Limits of the requests and bytes of a device.

mod allowance;
mod bucket;
mod limited_poll;
mod limiter;
mod traffic;

pub(crate) use allowance::Allowance;
pub use bucket::Rate;
pub use limiter::{Limit, Limiter, Limits};
pub use traffic::{Direction, Traffic};
