//! The limits of the device during a poll.

use super::Vring;
use crate::Direction;
use crate::limits::Allowance;

impl Vring {
    /// Begins a poll within limits.
    pub(crate) fn begin_limited(&mut self, allowance: Allowance) {
        self.allowance = Some(allowance);
    }

    /// Ends a poll within limits. Returns its traffic.
    pub(crate) fn end_limited(&mut self) -> Option<Allowance> {
        self.allowance.take()
    }

    /// Returns whether the present poll is one within limits.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.allowance.is_some()
    }

    /// Returns the nanoseconds for which the limits let the task pop no request. `None`: it may pop now.
    /// A task of requests asks once in each poll, and returns them in
    /// [`Next::Throttled`](crate::Next::Throttled) if the ring has requests and nothing else can be done.
    #[inline]
    pub fn held_ns(&self) -> Option<u64> {
        self.allowance.as_ref().and_then(|allowance| allowance.held_ns)
    }

    /// Charges the limits for frames that the poll has carried, or for requests, with this number of bytes
    /// together. Does nothing without limits.
    #[inline]
    pub fn charge(&self, direction: Direction, requests: u64, bytes: u64) {
        if let Some(allowance) = &self.allowance {
            allowance.charge(direction, requests, bytes);
        }
    }

    /// Charges the limits for a popped request with this number of bytes. It counts as several if it is large
    /// and the limits say so ([`Limits::request_size`](crate::Limits::request_size)). Does nothing without
    /// limits.
    #[inline]
    pub fn charge_request(&self, direction: Direction, bytes: u64) {
        if let Some(allowance) = &self.allowance {
            allowance.charge_request(direction, bytes);
        }
    }
}
