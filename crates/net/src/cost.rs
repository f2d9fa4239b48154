//! What frames cost in the measure of [`QueueTask::poll`](kickless_device::QueueTask::poll).

/// So many bytes cost as much as a frame does.
const COST_BYTES: u64 = 4096;
/// So many descriptors cost as much as a frame does. One takes some 3 nanoseconds.
pub(crate) const COST_DESCRIPTORS: u16 = 64;

/// Returns the cost of a frame of this length. A chain holds at most 2^32 bytes.
pub(crate) fn of_frame(len: u64) -> u32 {
    1 + (len / COST_BYTES) as u32
}
