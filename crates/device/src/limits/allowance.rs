//! The limits of a device during one poll of a task.

use super::Direction;
use crate::Count;

/// The limits during one poll of a task, and the traffic of the poll. Only the task's worker uses it.
#[derive(Debug)]
pub(crate) struct Allowance {
    /// See [`Vring::held_ns`](crate::Vring::held_ns).
    pub(crate) held_ns: Option<u64>,
    /// See [`Limits::request_size`](super::Limits::request_size).
    request_size: u64,
    /// Reads and writes.
    carried: [Carried; 2],
}

/// The traffic of one direction.
#[derive(Debug, Default)]
struct Carried {
    requests: Count,
    bytes: Count,
}

impl Allowance {
    pub(super) fn new(held_ns: Option<u64>, request_size: u64) -> Self {
        Self { held_ns, request_size, carried: Default::default() }
    }

    /// Counts requests or frames that count as one each, with this number of bytes together.
    #[cold]
    pub(crate) fn charge(&self, direction: Direction, requests: u64, bytes: u64) {
        let carried = &self.carried[usize::from(direction == Direction::Write)];
        carried.requests.add(requests);
        carried.bytes.add(bytes);
    }

    /// Counts a request, which may count as several.
    #[cold]
    pub(crate) fn charge_request(&self, direction: Direction, bytes: u64) {
        let requests = bytes.checked_div(self.request_size).map_or(1, |_| bytes.div_ceil(self.request_size));
        self.charge(direction, requests.max(1), bytes);
    }

    /// Returns the requests and bytes of each direction.
    pub(super) fn carried(&self) -> [(Direction, u64, u64); 2] {
        let [reads, writes] = &self.carried;
        [(Direction::Read, reads), (Direction::Write, writes)]
            .map(|(direction, carried)| (direction, carried.requests.get(), carried.bytes.get()))
    }
}
