//! The contract of a device, as an operator sees it.

use crate::{CaptureTo, Device, DeviceMetrics, HandOver, StartError, StoppedOnError, Unsupported};
use kickless_io::Waker;

/// The things that an operator can do with a device, and see of it, while it is served.
///
/// A transport needs none of them. Each has a default, which does nothing or refuses with a sentence, for a
/// kind of device that has no such thing.
pub trait Operate: Device + HandOver {
    /// Returns names and values of the device's own counters, beside those of each ring. The values never
    /// decrease.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns the metrics of the device. `now_ns` is the time on the clock of the pool that runs its queues.
    /// The default is for a device that counts no operations.
    fn metrics(&self, _now_ns: u64) -> DeviceMetrics {
        DeviceMetrics::default()
    }

    /// Reads the host's values again, such as the size of a disk, and notifies the driver of a change.
    fn refresh(&self) {}

    /// Returns the waker that is signalled when [`Operate::refresh`] would find a change. `None` if changes
    /// are not reported. The caller of `refresh` clears it first.
    fn refresh_due(&self) -> Option<Waker> {
        None
    }

    /// Sets the size in bytes that the medium has at least after the next [`Operate::refresh`] of an open
    /// device. The default is for a device without a medium that can grow by itself.
    fn set_size_min(&self, _bytes: u64) {}

    /// Returns the size of the medium in bytes.
    ///
    /// # Errors
    /// The device has no medium.
    fn size(&self) -> Result<u64, Unsupported> {
        Err(Unsupported("has no size"))
    }

    /// Sets whether the device gives space of its medium back to the host. Does not wait. Any thread can call
    /// this. The default is for a device without space to give back.
    fn set_discard(&self, _is_on: bool) {}

    /// Stops to take new requests, or continues. Requests wait in the rings meanwhile, and those in flight
    /// complete. Any thread can call this.
    ///
    /// # Errors
    /// This kind of device cannot do it, because requests do not complete by themselves.
    fn set_paused(&self, _is_paused: bool) -> Result<(), Unsupported> {
        Err(Unsupported("has nothing to drain: disconnect or remove it"))
    }

    /// Writes the frames of the device to a file from now on, or ends that for `None`. Waits for the file.
    /// Any thread can call this. The default is for a device without frames.
    ///
    /// # Errors
    /// The file cannot be written, or an earlier one is not complete yet. The error is one sentence.
    fn set_capture(&self, to: Option<&CaptureTo<'_>>) -> Result<(), StartError> {
        match to {
            Some(_) => Err(StartError("this kind of device has no frames".into())),
            None => Ok(()),
        }
    }

    /// Returns the error for which the device has stopped. `None` if it has not.
    ///
    /// A device can stop instead of answering a request with an error. It then keeps the failed requests and
    /// takes no new ones until [`Operate::resume`]. The default is for a device that always answers.
    fn stopped(&self) -> Option<StoppedOnError> {
        None
    }

    /// Starts the requests again for which the device has stopped, and takes new ones. Returns whether it had
    /// stopped. Any thread can call this.
    fn resume(&self) -> bool {
        false
    }
}
