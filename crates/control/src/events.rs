//! Events: what changed between two looks at the devices. Pure, except for the look itself.
//!
//! The server looks a few times a second while a client is subscribed, and no device knows of it. So an event
//! costs the data path nothing, and no queue of events can grow. A state that a device leaves again between
//! two looks has no event. Counters never miss anything.

use std::collections::BTreeMap;

use kickless_daemon::{DeviceState, Registry};
use serde_json::{Value, json};

/// The devices as a look finds them, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Seen(BTreeMap<String, SeenDevice>);

#[derive(Clone, Debug, PartialEq)]
struct SeenDevice {
    state: DeviceState,
    error: Option<String>,
    /// The size of a disk in bytes.
    size: Option<u64>,
    /// The times that its rings broke.
    broken: u64,
    /// The requests that were answered with an error.
    errors: u64,
    throttled_ns: u64,
    /// Requests waited for a limit between this look and the one before.
    is_throttled: bool,
}

impl Seen {
    /// Looks at the devices.
    pub(crate) fn look(registry: &Registry) -> Self {
        let mut seen = Self::default();
        for status in registry.list() {
            let name = status.config.name().unwrap_or_default().to_owned();
            let device = SeenDevice {
                state: status.state,
                error: status.error,
                size: None,
                broken: 0,
                errors: 0,
                throttled_ns: 0,
                is_throttled: false,
            };
            seen.0.insert(name, device);
        }
        for device in registry.devices() {
            let Some(seen) = seen.0.get_mut(device.config().name().unwrap_or_default()) else { continue };
            seen.size = device.device().size().ok();
            for counters in device.statistics().queues() {
                seen.broken += counters.broken.get();
                seen.errors += counters.errors.get();
                seen.throttled_ns += counters.throttled_ns.get();
            }
        }
        seen
    }

    /// Returns the events since an earlier look, and notes which devices are throttled.
    pub(crate) fn since(&mut self, earlier: &Self) -> Vec<Value> {
        let mut events = Vec::new();
        let mut event = |device: &str, event: &str, key: &str, value: Value| {
            let mut shown = json!({ "device": device, "event": event });
            if !key.is_empty() {
                shown[key] = value;
            }
            events.push(shown);
        };
        for name in earlier.0.keys().filter(|name| !self.0.contains_key(*name)) {
            event(name, "removed", "", Value::Null);
        }
        for (name, now) in &mut self.0 {
            let Some(before) = earlier.0.get(name) else {
                event(name, "added", "state", now.state.word().into());
                continue;
            };
            if let Some(word) = change_of_state(before.state, now.state) {
                let key = if now.error.is_some() { "error" } else { "" };
                event(name, word, key, now.error.clone().into());
            }
            if now.size > before.size && before.size.is_some() {
                event(name, "grown", "size", now.size.into());
            }
            if now.broken > before.broken {
                event(name, "broken", "rings", (now.broken - before.broken).into());
            }
            if now.errors > before.errors {
                event(name, "failed", "requests", (now.errors - before.errors).into());
            }
            // The counter also grows while the device takes no requests.
            let is_halted = matches!(now.state, DeviceState::Drained | DeviceState::Stopped);
            now.is_throttled = now.throttled_ns > before.throttled_ns && !is_halted;
            if now.is_throttled && !before.is_throttled {
                event(name, "throttled", "", Value::Null);
            }
        }
        events
    }
}

/// Returns the word for a change of a device's state.
fn change_of_state(before: DeviceState, now: DeviceState) -> Option<&'static str> {
    match (before, now) {
        (before, now) if before == now => None,
        (_, DeviceState::Ended | DeviceState::Unavailable) => Some("lost"),
        (_, DeviceState::Drained) => Some("drained"),
        (_, DeviceState::Stopped) => Some("stopped"),
        (DeviceState::Drained | DeviceState::Stopped, _) => Some("resumed"),
        (DeviceState::Ended | DeviceState::Unavailable, _) => Some("back"),
        (_, DeviceState::Connected) => Some("connected"),
        (DeviceState::Connected, DeviceState::Free) => Some("left"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(state: DeviceState) -> SeenDevice {
        SeenDevice {
            state,
            error: None,
            size: Some(512),
            broken: 0,
            errors: 0,
            throttled_ns: 0,
            is_throttled: false,
        }
    }

    fn seen(device: SeenDevice) -> Seen {
        Seen(BTreeMap::from([("a".to_owned(), device)]))
    }

    #[test]
    fn changes_are_events() {
        let (free, connected) = (device(DeviceState::Free), device(DeviceState::Connected));
        let words = |before: &SeenDevice, now: &SeenDevice| -> Vec<String> {
            let events = seen(now.clone()).since(&seen(before.clone()));
            events.iter().map(|event| event["event"].as_str().unwrap().to_owned()).collect()
        };
        assert!(words(&free, &free).is_empty());
        assert_eq!(words(&free, &connected), ["connected"]);
        assert_eq!(words(&connected, &free), ["left"]);
        assert_eq!(words(&connected, &device(DeviceState::Drained)), ["drained"]);
        assert_eq!(words(&device(DeviceState::Drained), &connected), ["resumed"]);
        let full = SeenDevice { error: Some("write: full".into()), ..device(DeviceState::Stopped) };
        assert_eq!(
            (words(&connected, &full), words(&full, &free)),
            (vec!["stopped".into()], vec!["resumed".into()])
        );
        assert_eq!(words(&device(DeviceState::Unavailable), &free), ["back"]);
        let now = SeenDevice { size: Some(1024), broken: 1, errors: 2, throttled_ns: 7, ..free.clone() };
        assert_eq!(words(&free, &now), ["grown", "broken", "failed", "throttled"]);
        // It is throttled still.
        let (mut one, mut two) = (seen(now.clone()), seen(SeenDevice { throttled_ns: 9, ..now }));
        one.since(&seen(free));
        assert!(two.since(&one).is_empty());
    }

    #[test]
    fn devices_come_and_go_with_a_reason() {
        let lost = SeenDevice { error: Some("no server".into()), ..device(DeviceState::Ended) };
        let events = seen(lost).since(&seen(device(DeviceState::Connected)));
        assert_eq!(events, [json!({ "device": "a", "event": "lost", "error": "no server" })]);
        let events = seen(device(DeviceState::Free)).since(&Seen::default());
        assert_eq!(events, [json!({ "device": "a", "event": "added", "state": "free" })]);
        let events = Seen::default().since(&seen(device(DeviceState::Free)));
        assert_eq!(events, [json!({ "device": "a", "event": "removed" })]);
    }
}
