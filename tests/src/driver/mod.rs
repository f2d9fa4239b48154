//! Drives a virtqueue in memory that the test shares with the back-end.

mod buffer;
mod eventfd;
pub mod load;
pub mod memory;
pub mod packed;
mod queue;
pub mod request;

pub use buffer::{Buffer, Used};
pub use eventfd::Eventfd;
pub use queue::{Queue, chain, desc};
