//! Parses the values of options: sizes, durations, numbers, CPU lists and addresses of network cards. Finds
//! the word that a mistyped one stands for.
//!
//! The command line, configuration files and the names of disks use these parsers. A parser's error is the
//! end of a sentence, such as "it must be a number from 1 to 256". The caller puts the name of the option
//! before it.
//!
//! ```
//! use kickless_values::{parse_duration, parse_number, parse_size};
//! use std::time::Duration;
//!
//! assert_eq!(parse_size("64G"), Ok(64 << 30));
//! assert_eq!(parse_duration("500us"), Ok(Duration::from_micros(500)));
//! assert_eq!(parse_number::<u16>("0", 1, 256), Err("it must be a number from 1 to 256".into()));
//! ```
#![forbid(unsafe_code)]

mod cpus;
mod duration;
mod mac;
mod nearest;
mod number;
mod size;
mod socket_path;

pub use cpus::CpuList;
pub use duration::parse_duration;
pub use mac::MacAddress;
pub use nearest::nearest;
pub use number::{QUEUE_SIZE_MAX, parse_number, parse_queue_size};
pub use size::{format_size, parse_any_size, parse_size, parse_size_within};
pub use socket_path::SOCKET_PATH_BYTES_MAX;
