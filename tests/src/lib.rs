//! What the end-to-end tests and the benchmarks share.

pub mod allocations;
pub mod block_on;
pub mod daemon;
pub mod driver;
pub mod driver_load;
pub mod driver_packed;
pub mod driver_request;
pub mod frontend;
pub mod frontend_iommu;
pub mod frontend_log;
pub mod frontend_machine;
pub mod frontend_memory;
pub mod frontend_served;
pub mod frontend_state;
pub mod guest;
pub mod liar;
pub mod liar_chaos;
pub mod liar_lies;
pub mod liar_ring;
pub mod liar_session;
pub mod migration;
pub mod qemu;
pub mod qmp;
pub mod scratch;
pub mod stage;
pub mod transcript;
