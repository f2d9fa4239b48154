//! Changes of served devices and of the pool: limits, discards, drains, sizes, captures, the polling rule.

use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use kickless_device::StoppedOnError;
use kickless_sync::lock;

use super::Registry;
use crate::config::{CaptureConfig, DeviceConfig, Mistake, Notation, PollingConfig, PoolConfig};
use crate::error::{CaptureError, DrainError, FindError, ResizeError, SetError};
use crate::table::Phase;

/// The interval at which a drain looks whether requests are in flight.
const DRAIN_CHECK_EVERY: Duration = Duration::from_millis(5);

impl Registry {
    /// Changes the polling rule of the pool. Does not wait until it is in force. Returns
    /// the whole configuration.
    ///
    /// # Errors
    /// Some options of the rule cannot be combined.
    pub fn set_polling(&self, polling: &PollingConfig) -> Result<PoolConfig, Mistake> {
        // The lock is held over the change, so that the recorded rule is the last one that was set.
        let mut config = lock(&self.state.pool_config);
        let changed = config.with_polling(polling);
        let options = changed.worker_options(1, Notation::Keys)?;
        if let Some(pool) = self.pool() {
            pool.request_poll(options.poll);
        }
        config.clone_from(&changed);
        Ok(changed)
    }

    /// Changes the weight and the limits of a served device, and the other values that its kind can set
    /// ([`Kind::SETTABLE`](crate::Kind::SETTABLE)). `change` gets the configuration and returns a new one, of
    /// which only these are used. Returns the configuration with these.
    ///
    /// # Errors
    /// There is no such device, it is not served, or `change` refused.
    pub fn set(
        &self,
        name: &str,
        change: impl FnOnce(&DeviceConfig) -> Result<DeviceConfig, Mistake>,
    ) -> Result<DeviceConfig, SetError> {
        let devices = &self.state.devices;
        // The lock is held over the change, so that the recorded values are the last ones that were set. The
        // functions below do not wait.
        let mut table = devices.lock();
        let at = table.entries.iter().position(|entry| entry.name == name);
        let at = at.ok_or_else(|| FindError::no_device(name, table.names()))?;
        let entry = &mut table.entries[at];
        let Phase::Running(served) = &entry.phase else {
            return Err(FindError::NotServed { name: name.into() }.into());
        };
        let wanted = change(&entry.config)?;
        let (weight, present) = (wanted.share.weight, &mut entry.config.kind);
        if present.group() != wanted.kind.group() {
            return Err(SetError::Group);
        }
        let limits = wanted.kind.limits();
        // A limit that is set anew forgives debts.
        if present.limits() != limits || present.group().is_some() {
            served.limiter().set(&limits);
        }
        wanted.kind.apply(served.device());
        present.take_settable(&*wanted.kind);
        if entry.config.share.weight != weight {
            served.set_weight(weight);
            entry.config.share.weight = weight;
        }
        Ok(entry.config.clone())
    }

    /// Makes a device take no new requests, and waits up to `timeout` until none is in flight. Requests wait
    /// in the rings until [`Registry::resume`].
    ///
    /// # Errors
    /// There is no such device, it is not served, it cannot do this, or requests are still in flight. In the
    /// last case, it takes no new ones.
    pub fn drain(&self, name: &str, timeout: Duration) -> Result<(), DrainError> {
        let deadline = Instant::now() + timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        let served = self.served(name)?;
        let one = served.config().kind.words().one;
        served.set_drained(true).map_err(|why| DrainError::Unsupported { name: name.into(), one, why })?;
        drop(served);
        let pool = self.pool().ok_or_else(|| FindError::NotServed { name: name.into() })?;
        // After this, no worker is within a poll that began before.
        for passed in pool.pass() {
            if passed.recv_timeout(left()) == Err(RecvTimeoutError::Timeout) {
                return Err(DrainError::Deadline { name: name.into(), in_flight: None });
            }
        }
        loop {
            // A reference is kept for a short time, because the device could be removed meanwhile.
            let served = self.served(name)?;
            let in_flight = served.device().metrics(pool.clock().now()).in_flight;
            if in_flight == 0 {
                return Ok(());
            }
            // Waiting longer is of no use. Failing these requests would break the promise of `on-error`.
            if let Some(StoppedOnError { error, requests }) = served.device().stopped()
                && requests >= in_flight
            {
                return Err(DrainError::Stopped { name: name.into(), error, requests });
            }
            drop(served);
            if left().is_zero() {
                return Err(DrainError::Deadline { name: name.into(), in_flight: Some(in_flight) });
            }
            thread::sleep(left().min(DRAIN_CHECK_EVERY));
        }
    }

    /// Makes a device take requests again that was drained, or that stopped because of an error. Returns
    /// whether it took none before.
    ///
    /// # Errors
    /// There is no such device, or it is not served.
    pub fn resume(&self, name: &str) -> Result<bool, DrainError> {
        let served = self.served(name)?;
        let was_drained = served.is_drained();
        // A device that cannot be drained was not.
        let _ = served.set_drained(false);
        Ok(served.device().resume() || was_drained)
    }

    /// Reads the size of a device's medium again, after growing the medium to `size` if that is given. Tells
    /// the driver. Returns the size. Waits for the medium.
    ///
    /// # Errors
    /// There is no such device, it is not served, it has no size, or it is not as large as `size` afterwards.
    pub fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, ResizeError> {
        let served = self.served(name)?;
        let device = served.device();
        let one = served.config().kind.words().one;
        let present = device.size().map_err(|why| ResizeError::NoSize { name: name.into(), one, why })?;
        if let Some(size) = size {
            if size < present {
                return Err(ResizeError::Shrink { present });
            }
            let mut grown = served.config().clone();
            if let Some(size_min) = grown.kind.size_min() {
                *size_min = Some(size);
            }
            grown.check(Notation::Keys)?;
            device.set_size_min(size);
        }
        served.config().span().in_scope(|| device.refresh());
        let present = device.size().unwrap_or(present);
        match size {
            Some(size) if present < size => Err(ResizeError::TooSmall { present }),
            _ => Ok(present),
        }
    }

    /// Writes the frames of a card to the file `capture` from now on, `length` bytes of each at most, or ends
    /// that for `None`. Waits for the file.
    ///
    /// # Errors
    /// There is no such device, it is not served or has no frames, or the sandbox does not allow the file. Or
    /// the file cannot be written, and the capture is off then.
    pub fn set_capture(
        &self,
        name: &str,
        capture: Option<PathBuf>,
        length: Option<u32>,
    ) -> Result<(), CaptureError> {
        let served = self.served(name)?;
        let mut config = served.config().clone();
        let one = config.kind.words().one;
        let no_frames = || CaptureError::NoFrames { name: name.into(), one };
        *config.kind.capture().ok_or_else(no_frames)? = CaptureConfig { capture, capture_length: length };
        let mut entry = lock(&served.entry);
        entry.replace(&config.grants()).map_err(CaptureError::Refused)?;
        let wanted = config.kind.capture().ok_or_else(no_frames)?;
        let to = wanted.to(name);
        let set = served.config().span().in_scope(|| served.device().set_capture(to.as_ref()));
        if set.is_err() {
            *wanted = CaptureConfig::default();
        }
        let mut table = self.state.devices.lock();
        let listed = table.entries.iter_mut().find(|entry| entry.name == name);
        if let Some(present) = listed.and_then(|entry| entry.config.kind.capture()) {
            present.clone_from(wanted);
        }
        drop((table, entry));
        set.map_err(CaptureError::File)
    }
}
