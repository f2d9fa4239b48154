//! A simulator that cuts an image at any operation: by a kill, and by a power cut.
//!
//! Requests of several queues run against `Tables` with a recorder ([`cut_file`]) under them. Their operations
//! ([`engine`]) complete in random order, some late, some with errors, which may stay. Each queue has a waker
//! of its own, and each request must end. `SectorModel` knows which contents each sector may have. At each
//! cut, a judge ([`judge`]) that shares no code with the tables compares refcounts, flags and contents.
//!
//! A second simulator ([`whole`]) runs a whole disk with its real requests on a recording engine
//! ([`recorder`]): queues that stop by force, short transfers, and engines without room.
//!
//! `KICKLESS_CUTS=100000 cargo test -p kickless-disk --lib sim` takes that many cuts.

mod builder;
mod cut_file;
mod cuts;
mod engine;
mod failures;
mod judge;
mod life;
mod ops;
mod recorder;
mod request;
mod stamps;
mod steps;
mod whole;
mod whole_cuts;
