//! `kickless bench`: puts load on vhost-user-blk back-ends, ours or others', and says what came of it.
//!
//! `options` is what can be asked for, `scenario` one load of those, `target` what it is put on. `run` carries one scenario
//! out on one target with a thread (`load`) for each submitter, and makes a `Turn` of it (`turn`). `rounds` does that for each scenario and target; `blk` and `compare` differ
//! only in how many targets and rounds there are. What came of it all is a `Results`, which `table`, JSON and `report` show.

mod layout;
mod ledger;
mod load;
mod offsets;
mod options;
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

pub(crate) use options::Bench;
pub(crate) use rounds::carry_out;
