//! A load as the results describe it, whatever the kind of device is.

use std::time::Duration;

use serde_json::Value;

/// The words for what a load consists of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Units {
    /// Several of them.
    pub(crate) plural: &'static str,
    /// The heading of their rate.
    pub(crate) rate: &'static str,
    /// The heading of the bytes a second, and the number of bytes that it counts in.
    pub(crate) bytes: &'static str,
    pub(crate) bytes_unit: f64,
    /// One of them, after a slash.
    pub(crate) each: &'static str,
}

/// Requests to a disk.
pub(crate) const REQUESTS: Units =
    Units { plural: "requests", rate: "IOPS", bytes: "MiB/s", bytes_unit: (1u64 << 20) as f64, each: "req" };
/// Frames of a network card.
pub(crate) const FRAMES: Units =
    Units { plural: "packets", rate: "packets/s", bytes: "Gbit/s", bytes_unit: 1e9 / 8.0, each: "pkt" };

/// One load.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    /// The load in words, part by part.
    pub(crate) parts: Vec<String>,
    /// Requests or frames a second, if the load has a rate.
    pub(crate) rate: Option<u32>,
    /// The measured time of a turn.
    pub(crate) time: Duration,
    /// The time of a turn, from its beginning to its end.
    pub(crate) whole_time: Duration,
    /// The bytes of each request or frame.
    pub(crate) bytes: u32,
    pub(crate) units: Units,
    /// The error if nothing was done in any turn. `None`: a turn can be too short for that.
    pub(crate) silence: Option<&'static str>,
    /// The load for programs.
    pub(crate) json: Value,
}

impl Description {
    /// Returns the load in words.
    pub(crate) fn words(&self) -> String {
        self.parts.join(", ")
    }

    /// Returns the parts that some of the loads have and others do not. Returns all parts if there are none.
    pub(crate) fn label<'a>(&self, all: impl IntoIterator<Item = &'a Description> + Clone) -> String {
        let is_common = |part: &String| all.clone().into_iter().all(|other| other.parts.contains(part));
        let own: Vec<&str> = self.parts.iter().filter(|part| !is_common(part)).map(String::as_str).collect();
        if own.is_empty() { self.words() } else { own.join(", ") }
    }

    /// Returns the parts that all of the loads have.
    pub(crate) fn common<'a>(&self, all: impl IntoIterator<Item = &'a Description> + Clone) -> String {
        let is_common = |part: &&String| all.clone().into_iter().all(|other| other.parts.contains(*part));
        self.parts.iter().filter(is_common).cloned().collect::<Vec<_>>().join(", ")
    }

    /// Makes the load of these parts.
    #[cfg(test)]
    pub(crate) fn fake(parts: &[&str]) -> Self {
        Self {
            parts: parts.iter().map(|part| (*part).to_owned()).collect(),
            rate: None,
            time: Duration::from_secs(1),
            whole_time: Duration::from_secs(1),
            bytes: 4096,
            units: REQUESTS,
            silence: None,
            json: Value::Null,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_has_what_differs() {
        let loads = [["reads", "1 in flight", "polling"], ["reads", "32 in flight", "polling"]]
            .map(|parts| Description::fake(&parts));
        assert_eq!(loads[0].label(&loads), "1 in flight");
        assert_eq!(loads[1].common(&loads), "reads, polling");
        assert_eq!(loads[0].label(&loads[..1]), "reads, 1 in flight, polling");
    }
}
