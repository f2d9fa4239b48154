//! The states of devices, as operators and programs see them.

use kickless_device::StoppedOnError;

use super::config::DeviceConfig;
use super::served_device::ServedDevice;
use super::table::{Entry, Phase};

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// The device is being opened.
    Opening,
    /// The device waits for a front-end.
    Free,
    /// A front-end is connected.
    Connected,
    /// The device takes no new requests, whether a front-end is connected or not.
    Drained,
    /// The device takes no new requests, because requests have failed and wait until they are
    /// [resumed](crate::Registry::resume). [`DeviceStatus::error`] tells the error.
    Stopped,
    /// The device takes no new requests. It is removed when the last one in flight has ended, and the device
    /// is closed.
    Removing,
    /// The device is no longer served. [`DeviceStatus::error`] and the log tell the reason.
    Ended,
    /// The device cannot be opened yet, and is tried again. [`DeviceStatus::error`] tells the reason.
    Unavailable,
}

impl DeviceState {
    /// Returns the word for the state, for operators and programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Free => "free",
            Self::Connected => "connected",
            Self::Drained => "drained",
            Self::Stopped => "stopped",
            Self::Removing => "removing",
            Self::Ended => "ended",
            Self::Unavailable => "unavailable",
        }
    }
}

/// A device as [`Registry::list`](crate::Registry::list) shows it.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// The configuration.
    pub config: DeviceConfig,
    /// The state.
    pub state: DeviceState,
    /// The error that ended or stopped the device, as a sentence. `None` if the device has not failed.
    pub error: Option<String>,
    /// The front-ends, or what is behind the device, come from descriptors, which a file cannot name.
    pub is_inherited: bool,
    /// A front-end is connected, and the device is removed when it has left
    /// ([`Registry::remove_when_free`](crate::Registry::remove_when_free)).
    pub is_leaving: bool,
}

/// Returns the state of a device, and the error for which it has stopped.
pub(crate) fn state(entry: &Entry<ServedDevice>) -> (DeviceState, Option<String>) {
    if let (Phase::Running(served), false) = (&entry.phase, entry.is_removing)
        && let Some(StoppedOnError { error, requests }) = served.device().stopped()
    {
        let requests =
            if requests == 1 { "1 request waits".into() } else { format!("{requests} requests wait") };
        return (DeviceState::Stopped, Some(format!("{error} ({requests})")));
    }
    let state = match &entry.phase {
        Phase::Opening(_) => DeviceState::Opening,
        _ if entry.is_removing => DeviceState::Removing,
        Phase::Running(served) if served.is_drained() => DeviceState::Drained,
        Phase::Running(served) if served.is_connected() => DeviceState::Connected,
        Phase::Running(_) => DeviceState::Free,
        Phase::Ended(..) | Phase::Closing(_) | Phase::Closed(_) => DeviceState::Ended,
    };
    (state, None)
}
