//! Address spaces over guest memory.

pub(crate) mod control;
pub(crate) mod entry;
mod epoch;
mod error;
mod fault;
mod granules;
mod node;
pub(crate) mod primitive;
pub(crate) mod protect;
mod rmap;
mod space;
mod tlb;
pub(crate) mod tree;
mod writer;

pub use control::Mmu;
pub use error::Error;
pub use space::Space;
pub use writer::{Offline, Writer};
