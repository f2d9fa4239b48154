//! A simulator that cuts the tables of an image at any operation: by a kill, and by a power cut.
//!
//! Requests of several queues run against `Tables` with a recorder ([`CutFile`]) under them. Their operations
//! ([`engine`]) complete in random order, some late, some with errors, which may stay. Each queue has a waker
//! of its own, and each request must end. `SectorModel` knows which contents each sector may have. At each
//! cut, a judge ([`Judge`]) that shares no code with the tables compares refcounts, flags and contents.
//!
//! `KICKLESS_CUTS=100000 cargo test -p kickless-qcow2 --lib sim` takes that many cuts.
//!
//! [`CutFile`]: crate::images::cut_file::CutFile
//! [`Judge`]: crate::images::judge::Judge

mod cuts;
mod engine;
mod life;
mod ops;
mod request;
pub(crate) mod runtime;
mod steps;
