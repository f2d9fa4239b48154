//! Puts load on vhost-user-blk and vhost-user-net back-ends, ours or others', and reports the results: the
//! command `kickless bench`.
//!
//! - `options` is the command line, `scenario` one of the loads that it asks for, `target` a back-end under
//!   load.
//! - `run` runs one scenario on one target. It starts a thread (`threads`, `load`) for each submitter and
//!   returns a `Turn` (`turn`).
//! - `rounds` runs each scenario on each target and collects a `Results`. `table`, JSON and `report` show it,
//!   and `outputs` has the files for that. `host` says where and when it was measured.
//! - `net` has the loads of network cards. They share `rounds` and the results with disks; `description` says
//!   what the results call them.
//! - `core_latency` measures the core-to-core latency, so that only turns with the same one are compared.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod carry_out;
mod common_options;
mod core_latency;
mod cpu;
mod description;
mod host;
mod interrupt;
mod layout;
mod ledger;
mod load;
mod net;
mod offsets;
mod options;
mod outputs;
mod pace;
mod pattern;
mod progress;
mod report;
mod results;
mod rounds;
mod run;
mod scenario;
mod slots;
mod table;
mod target;
mod terminal;
mod threads;
mod turn;
mod wait;
mod watch;

pub use carry_out::carry_out;
pub use interrupt::Interrupted;
pub use options::Bench;
pub use report::canvas;
