//! The answers of commands that need no disk.

mod capacity;
mod inquiry;
mod luns;
mod opcodes;

pub use capacity::{LbaExtent, lba_status, read_capacity_10, read_capacity_16};
pub use inquiry::inquiry;
pub use luns::report_luns;
pub use opcodes::report_opcodes;
