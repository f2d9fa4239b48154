//! Puts load on vhost-user-blk back-ends, ours or others', and reports what came of it: the command `kickless bench`.
//!
//! `options` is the command line, `scenario` one load of those that it asks for, `target` the back-end under load. `run`
//! carries one scenario out on one target with a thread (`load`) for each submitter, and makes a `Turn` of it (`turn`).
//! `rounds` does that for each scenario and target. The results are a `Results`, which `table`, JSON and `report` show.
//! `parts` measures single parts without a back-end.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod carry_out;
mod layout;
mod ledger;
mod load;
mod offsets;
mod options;
mod pace;
mod parts;
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
mod turn;
mod wait;

pub use carry_out::carry_out;
pub use options::Bench;
