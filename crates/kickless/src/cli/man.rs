//! Writes the manual pages: the help of each command, and the sections that a help does not have.
#![cfg_attr(not(test), expect(clippy::disallowed_methods, reason = "this command is no daemon"))]

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use kickless_daemon::KindEntry;
use kickless_kinds::kinds;

/// A term and its explanation.
pub(super) type Entry = (&'static str, &'static str);

const SOURCE: &str = concat!("kickless ", env!("CARGO_PKG_VERSION"));
const MANUAL: &str = "User Commands";
/// No date, so that the same program writes the same pages. With an empty one, the next word takes its place.
const DATE: &str = " ";

const CONFIG: Entry = ("/etc/kickless/devices.toml", "The devices of kickless.service.");
const INSTANCE: Entry =
    ("/etc/kickless/NAME.toml", "The devices of kickless@NAME.service, which serves one virtual machine.");
const CONTROL: Entry = ("/run/kickless/control.sock", "The control socket of kickless.service.");
const INSTANCE_CONTROL: Entry =
    ("/run/kickless-machines/NAME/control.sock", "The control socket of kickless@NAME.service.");
const READ_ONLY: Entry = (
    "/run/kickless-read-only/control.sock",
    "The socket of kickless.service for calls that change nothing. kickless-metrics.service uses it.",
);

const WRONG_LINE: &str = "The command line or KICKLESS_LOG is wrong: an unknown command or option, or a value that the \
    program or this machine does not have, such as a CPU, a group or an inherited descriptor. Nothing was done. Standard \
    error has one sentence.";
const SERVES: &[Entry] = &[
    (
        "0",
        "A signal (SIGTERM, SIGINT) or daemon.stop has ended it, or the machine of a connected --fd has left.",
    ),
    ("1", "Any other end, such as a wrong file. Standard error has one sentence."),
    ("2", WRONG_LINE),
];
const ENDS: &[Entry] =
    &[("0", "Success."), ("1", "It failed. Standard error has one sentence."), ("2", WRONG_LINE)];

/// The sections of a page that the help of the command does not have.
#[derive(Clone, Copy)]
pub(super) struct Sections {
    pub(super) examples: &'static [Entry],
    pub(super) files: &'static [Entry],
    pub(super) statuses: &'static [Entry],
}

/// The sections of each command but those that serve one device.
const SECTIONS: &[(&str, Sections)] = &[
    (
        "kickless",
        Sections {
            examples: &[
                ("Serve the devices of a file:", "kickless serve --config=/etc/kickless/devices.toml"),
                ("Show the devices of the running daemon:", "kickless ctl list"),
            ],
            files: &[CONFIG, INSTANCE, CONTROL, INSTANCE_CONTROL, READ_ONLY],
            statuses: ENDS,
        },
    ),
    (
        "kickless-serve",
        Sections {
            examples: &[
                (
                    "Serve the devices of a file, and calls:",
                    "kickless serve --config=/etc/kickless/devices.toml --control=/run/kickless/control.sock",
                ),
                (
                    "Say whether a file is right:",
                    "kickless serve --config=/etc/kickless/devices.toml --check",
                ),
                (
                    "Take all devices over from the running daemon, while their guests go on:",
                    "kickless serve --config=/etc/kickless/devices.toml --upgrade-from=/run/kickless/control.sock",
                ),
            ],
            files: &[CONFIG, INSTANCE, CONTROL, INSTANCE_CONTROL, READ_ONLY],
            statuses: SERVES,
        },
    ),
    (
        "kickless-ctl",
        Sections {
            examples: &[
                ("Show all devices:", "kickless ctl list"),
                (
                    "Add a disk, with the socket web.sock beside the control socket:",
                    "kickless ctl add web blk-file=/srv/web.img",
                ),
                ("Limit it:", "kickless ctl set web iops=5000 bps=100M"),
                ("Show all words and calls:", "kickless ctl help"),
                ("Keep what was changed:", "kickless ctl config.save --output=/etc/kickless/devices.toml"),
            ],
            files: &[CONTROL, INSTANCE_CONTROL, READ_ONLY],
            statuses: ENDS,
        },
    ),
    (
        "kickless-metrics",
        Sections {
            examples: &[
                ("Print the metrics once:", "kickless metrics"),
                (
                    "Serve them to Prometheus:",
                    "kickless metrics --control=/run/kickless-read-only/control.sock --listen=127.0.0.1:9750",
                ),
                (
                    "Write them for the node exporter:",
                    "kickless metrics --textfile=/var/lib/prometheus/node-exporter/kickless.prom",
                ),
            ],
            files: &[CONTROL, READ_ONLY],
            statuses: ENDS,
        },
    ),
    (
        "kickless-store",
        Sections {
            examples: &[("As ExecStop= of a unit:", "kickless store --control=/run/kickless/control.sock")],
            files: &[CONTROL],
            statuses: ENDS,
        },
    ),
    (
        "kickless-top",
        Sections {
            examples: &[
                ("Show workers and devices:", "kickless top"),
                ("Print the figures of one interval:", "kickless top --once --json"),
            ],
            files: &[CONTROL, READ_ONLY],
            statuses: ENDS,
        },
    ),
    (
        "kickless-completions",
        Sections {
            examples: &[
                ("In the present bash:", "eval \"$(kickless completions bash)\""),
                (
                    "For each fish of a user:",
                    "kickless completions fish >~/.config/fish/completions/kickless.fish",
                ),
            ],
            files: &[],
            statuses: ENDS,
        },
    ),
    (
        "kickless-bench",
        Sections {
            examples: &[("Measure a disk:", "kickless bench blk --socket-path=/tmp/scratch.sock")],
            files: &[],
            statuses: ENDS,
        },
    ),
    (
        "kickless-bench-blk",
        Sections {
            examples: &[(
                "Read with 1 and with 32 requests in flight:",
                "kickless bench blk --socket-path=/tmp/scratch.sock --depth=1,32",
            )],
            files: &[],
            statuses: ENDS,
        },
    ),
    (
        "kickless-bench-compare",
        Sections {
            examples: &[(
                "Compare two disks:",
                "kickless bench compare ours=/tmp/a.sock theirs=/tmp/b.sock --depth=1,32 --report=report.html",
            )],
            files: &[],
            statuses: ENDS,
        },
    ),
    (
        "kickless-bench-net",
        Sections {
            examples: &[(
                "Send frames, as a guest does:",
                "kickless bench net --socket-path=/tmp/card.sock --direction=transmit --depth=32,192",
            )],
            files: &[],
            statuses: ENDS,
        },
    ),
    (
        "kickless-bench-compare-net",
        Sections {
            examples: &[(
                "Compare two cards:",
                "kickless bench compare-net ours=/tmp/a.sock theirs=/tmp/b.sock --frame-size=64,1514",
            )],
            files: &[],
            statuses: ENDS,
        },
    ),
    (
        "kickless-bench-core-latency",
        Sections {
            examples: &[("Measure the first two CPUs:", "kickless bench core-latency")],
            files: &[],
            statuses: ENDS,
        },
    ),
];

/// Returns the sections of the page `name`.
pub(super) fn sections(name: &str) -> Option<Sections> {
    if let Some((_, sections)) = SECTIONS.iter().find(|(listed, _)| *listed == name) {
        return Some(*sections);
    }
    let (kinds, command) = (kinds(), name.strip_prefix("kickless-"));
    let words = kinds.commands().map(KindEntry::words).find(|words| command == Some(words.name))?;
    Some(Sections { examples: words.examples, files: &[], statuses: SERVES })
}

/// Writes a page of the command, and one of each of its commands that is not hidden.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write_pages(command: Command, directory: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_page(&command, directory)
}

fn write_page(command: &Command, directory: &Path) -> io::Result<()> {
    let mut commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    commands.try_for_each(|command| write_page(command, directory))?;
    let man = Man::new(command.clone()).date(DATE).source(SOURCE).manual(MANUAL);
    let mut page = Vec::new();
    man.render(&mut page)?;
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    if let Some(sections) = sections(name) {
        sections.roff(name).to_writer(&mut page)?;
    }
    File::create(directory.join(man.get_filename()))?.write_all(&page)
}

impl Sections {
    fn roff(self, name: &str) -> Roff {
        let mut roff = Roff::new();
        roff.control("SH", ["EXAMPLES"]);
        for (text, line) in self.examples {
            roff.control("PP", []).text([roman(*text)]);
            roff.control("PP", []).control("RS", ["4"]).control("nf", []);
            roff.text([roman(*line)]).control("fi", []).control("RE", []);
        }
        let mut terms = |heading: &str, entries: &[Entry]| {
            if !entries.is_empty() {
                roff.control("SH", [heading]);
            }
            for (term, text) in entries {
                roff.control("TP", []).text([bold(*term)]).text([roman(*text)]);
            }
        };
        terms("FILES", self.files);
        terms("EXIT STATUS", self.statuses);
        if name != "kickless" {
            roff.control("SH", ["SEE ALSO"]).text([bold("kickless"), roman("(1)")]);
        }
        roff
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::iter;

    use clap::CommandFactory;

    use super::super::{Cli, parse};
    use super::*;

    /// Splits a line into words as a shell does that knows single quotes only.
    fn words(line: &str) -> Vec<OsString> {
        let parts = line.split('\'').zip([false, true].into_iter().cycle());
        let of = |(part, is_quoted): (&str, bool)| -> Vec<OsString> {
            if is_quoted { vec![part.into()] } else { part.split_whitespace().map(OsString::from).collect() }
        };
        parts.flat_map(of).collect()
    }

    fn names(command: &Command) -> Vec<String> {
        let own = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
        let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
        iter::once(own).chain(commands.flat_map(names)).collect()
    }

    #[test]
    fn each_command_has_examples_that_it_takes() {
        let mut cli = Cli::command().disable_help_subcommand(true);
        cli.build();
        let names = names(&cli);
        for name in &names {
            let Sections { examples, statuses, .. } = sections(name).unwrap_or_else(|| panic!("{name}"));
            assert!(!examples.is_empty() && !statuses.is_empty(), "{name}");
            for (_, line) in examples {
                // A shell starts these, and takes the rest away.
                let line = line.trim_start_matches("eval \"$(").trim_end_matches(")\"");
                let line = line.split(" >").next().unwrap_or_default();
                assert!(line.replace(' ', "-").starts_with(name.as_str()), "{name}: {line}");
                parse(words(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
            }
        }
        for (name, _) in SECTIONS {
            assert!(names.iter().any(|known| known == name), "there is no command of {name}");
        }
    }
}
