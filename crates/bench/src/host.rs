//! The host, the time and the command of a run, for those who read its results later.

use std::env;
use std::fs;

use serde::Serialize;
use time::UtcDateTime;

/// The circumstances of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Host {
    /// The time at which the run began, in UTC (RFC 3339).
    pub(crate) date: String,
    /// The name of the host.
    pub(crate) host: String,
    /// The name and the version of its kernel.
    pub(crate) kernel: String,
    /// The model of its processors.
    pub(crate) cpu: String,
    /// The number of processors.
    pub(crate) cpus: usize,
    /// The command line, as a shell takes it.
    pub(crate) command: String,
}

impl Host {
    /// Returns the circumstances of this process.
    pub(crate) fn this() -> Self {
        let name = rustix::system::uname();
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        // Without the file, only its figures are missing.
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let machine = text(name.machine());
        let command: Vec<String> = env::args_os().map(|word| quoted(&word.to_string_lossy())).collect();
        Self {
            date: date(UtcDateTime::now()),
            host: text(name.nodename()),
            kernel: format!("{} {} {machine}", text(name.sysname()), text(name.release())),
            cpu: model(&info).map_or(machine, str::to_owned),
            cpus: info.lines().filter(|line| line.starts_with("processor")).count(),
            command: command.join(" "),
        }
    }
}

/// Formats a time with seconds.
fn date(now: UtcDateTime) -> String {
    format!("{}T{:02}:{:02}:{:02}Z", now.date(), now.hour(), now.minute(), now.second())
}

/// Returns the first model in a file of the form of `/proc/cpuinfo`.
fn model(info: &str) -> Option<&str> {
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, model)| model.trim())
}

/// Quotes a word for a shell, if it needs that.
fn quoted(word: &str) -> String {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "-_=./,:+@%".contains(char);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_command_again() {
        assert_eq!(quoted("--depth=1,32"), "--depth=1,32");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's {socket}"), r"'it'\''s {socket}'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn a_date_has_two_digits_each() {
        let time = UtcDateTime::from_unix_timestamp(1_700_000_001).unwrap();
        assert_eq!(date(time), "2023-11-14T22:13:21Z");
    }

    #[test]
    fn the_first_processor_is_named() {
        assert_eq!(
            model("processor\t: 0\nmodel name\t: A CPU @ 3: GHz\nmodel name\t: B"),
            Some("A CPU @ 3: GHz")
        );
        assert_eq!(model("processor : 0\n"), None);
        let host = Host::this();
        assert!(host.kernel.starts_with("Linux ") && !host.host.is_empty() && host.cpus > 0, "{host:?}");
    }
}
