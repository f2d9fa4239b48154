//! Compares the program with its last release: docs/stability.md says which promises these are.
//!
//! `tests/fixtures/released` has what the release understood and printed. A new release writes it anew:
//!
//! ```text
//! RELEASED=write cargo test -p kickless-tests --test stability -- --test-threads=1
//! ```

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use kickless_tests::daemon::{Daemon, kickless_binary, repository};
use serde_json::Value;

/// Returns the path of a file of the release.
fn released(name: &str) -> PathBuf {
    repository().join("tests/fixtures/released").join(name)
}

/// Returns a file of the release. Writes it before, if the test was asked for that. A command that is new has
/// none.
fn of_release(name: &str, now: &str) -> Option<String> {
    let path = released(name);
    if env::var("RELEASED").is_ok_and(|way| way == "write") {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, now).unwrap();
    }
    fs::read_to_string(&path).ok()
}

/// Runs the program. Returns its standard output.
fn output_of(words: &[&str]) -> String {
    let output = Command::new(kickless_binary().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// An option of a command: the name of its value, its default and the values that it takes, where the help
/// has them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Opt {
    value: String,
    default: Option<String>,
    values: BTreeSet<String>,
}

/// The help of a command.
#[derive(Debug, Default)]
struct Help {
    /// The words that it needs, in order.
    needs: Vec<String>,
    commands: BTreeSet<String>,
    options: BTreeMap<String, Opt>,
}

impl Help {
    /// Reads the output of `--help`.
    fn parse(text: &str) -> Self {
        let (mut help, mut is_command, mut described) = (Self::default(), false, None::<(String, String)>);
        for line in text.lines().chain([""]) {
            let words = line.trim_start();
            if let Some(usage) = line.strip_prefix("Usage: ") {
                // Behind the name of the program, which has the path of this one.
                let needed = usage.split_whitespace().skip(1).filter(|word| !word.starts_with('['));
                help.needs = needed.map(str::to_owned).collect();
            }
            let option = words.strip_prefix("--").or_else(|| words.get(2..)?.strip_prefix(", --"));
            let is_heading = !line.starts_with(' ');
            if option.is_some() || is_heading && !line.is_empty() {
                help.end(described.take());
            }
            if let Some(option) = option {
                let end = option.find([' ', '[']).unwrap_or(option.len());
                described = Some((option[..end].to_owned(), option[end..].to_owned() + " "));
            } else if let Some((_, text)) = &mut described {
                *text += &(words.to_owned() + " ");
            }
            is_command =
                if is_heading { line == "Commands:" || is_command && line.is_empty() } else { is_command };
            if is_command && line.starts_with("  ") && !line.starts_with("   ") {
                help.commands.insert(words.split(' ').next().unwrap().to_owned());
            }
        }
        help.end(described.take());
        help
    }

    fn end(&mut self, described: Option<(String, String)>) {
        let Some((name, text)) = described else { return };
        let note = |note: &str| {
            let (_, after) = text.split_once(&format!("[{note}: "))?;
            Some(after.split_once(']')?.0.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let value = text.trim_start().strip_prefix('<').and_then(|text| text.split_once('>'));
        let values = note("possible values").unwrap_or_default();
        let option = Opt {
            value: value.map_or(String::new(), |(value, _)| value.to_owned()),
            default: note("default"),
            values: values.split(", ").filter(|value| !value.is_empty()).map(str::to_owned).collect(),
        };
        self.options.insert(name, option);
    }

    /// Checks that this help has all that an earlier one had.
    fn keeps(&self, before: &Self, command: &str) {
        assert_eq!(self.needs, before.needs, "kickless {command} needs other words");
        let lost: Vec<_> = before.commands.difference(&self.commands).collect();
        assert!(lost.is_empty(), "kickless {command} lost the commands {lost:?}");
        for (name, option) in &before.options {
            let Some(now) = self.options.get(name) else { panic!("kickless {command} lost --{name}") };
            assert_eq!(now.value, option.value, "kickless {command} --{name}");
            assert_eq!(now.default, option.default, "kickless {command} --{name}");
            let lost: Vec<_> = option.values.difference(&now.values).collect();
            assert!(lost.is_empty(), "kickless {command} --{name} lost {lost:?}");
        }
    }
}

#[test]
fn command_lines_are_understood() {
    let help = |words: &[&str], name: &str| {
        let now = output_of(words);
        let before = of_release(&format!("help/{name}.txt"), &now);
        let now = Help::parse(&now);
        if let Some(before) = before {
            now.keeps(&Help::parse(&before), words[0]);
        }
        now
    };
    let all = help(&["--help"], "kickless");
    assert!(all.commands.len() > 5 && all.options.contains_key("log-level"), "{all:?}");
    for command in all.commands.iter().filter(|command| *command != "help") {
        let of = help(&[command, "--help"], command);
        for part in of.commands.iter().filter(|part| *part != "help") {
            help(&[command, part, "--help"], &format!("{command}-{part}"));
        }
        assert!(!of.options.is_empty(), "{command}");
    }
}

#[test]
fn configuration_files_are_understood() {
    let file = released("devices.toml");
    output_of(&["serve", "--check", &format!("--config={}", file.display())]);
    // It has all keys that a file can have, which are those of the calls.
    let text = fs::read_to_string(file).unwrap();
    let document: Value =
        serde_json::from_str(&fs::read_to_string(released("openrpc.json")).unwrap()).unwrap();
    for method in ["device.add", "pool.set"] {
        let keys = find(&document["methods"], method)["params"].as_array().unwrap();
        for key in keys.iter().map(|key| key["name"].as_str().unwrap()) {
            let has = |line: &str| line.trim_start_matches("# ").starts_with(&format!("{key} = "));
            assert!(text.lines().any(has), "{key}");
        }
    }
}

#[test]
fn calls_are_understood_and_answered() {
    let now = fs::read_to_string(repository().join("docs/openrpc.json")).unwrap();
    let before: Value = serde_json::from_str(&of_release("openrpc.json", &now).unwrap()).unwrap();
    let now: Value = serde_json::from_str(&now).unwrap();
    for method in before["methods"].as_array().unwrap() {
        let name = method["name"].as_str().unwrap();
        let now_method = find(&now["methods"], name);
        for param in method["params"].as_array().unwrap() {
            let key = param["name"].as_str().unwrap();
            let now_param = find(&now_method["params"], key);
            let schemas = [(&before, &param["schema"]), (&now, &now_param["schema"])];
            contains(schemas, &format!("{name} {key}"), 0);
        }
        let required = |params: &Value| -> BTreeSet<String> {
            let params = params.as_array().unwrap().iter().filter(|param| param["required"] == true);
            params.map(|param| param["name"].as_str().unwrap().to_owned()).collect()
        };
        let (needs, needed) = (required(&now_method["params"]), required(&method["params"]));
        assert!(needs.is_subset(&needed), "{name} needs {needs:?}");
        contains([(&before, &method["result"]["schema"]), (&now, &now_method["result"]["schema"])], name, 0);
    }
}

/// Returns the object of an array with this name.
fn find<'v>(all: &'v Value, name: &str) -> &'v Value {
    let found = all.as_array().unwrap().iter().find(|one| one["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is gone"))
}

/// Checks that the second schema has the properties of the first one, with their types. Each comes with its
/// document.
fn contains(schemas: [(&Value, &Value); 2], path: &str, depth: u32) {
    let [(before_document, before), (now_document, now)] = schemas;
    let [before, now] = [resolved(before_document, before), resolved(now_document, now)];
    // A schema can contain itself.
    if depth > 8 {
        return;
    }
    assert_eq!(before["type"], now["type"], "{path}");
    for (key, value) in before["properties"].as_object().into_iter().flatten() {
        let Some(same) = now["properties"].get(key) else { panic!("{path}.{key} is gone") };
        contains([(before_document, value), (now_document, same)], &format!("{path}.{key}"), depth + 1);
    }
    for value in before["enum"].as_array().into_iter().flatten() {
        assert!(now["enum"].as_array().is_some_and(|all| all.contains(value)), "{path}: {value} is gone");
    }
    if let Some(items) = before.get("items") {
        contains([(before_document, items), (now_document, &now["items"])], &format!("{path}[]"), depth + 1);
    }
}

/// Follows the reference of a schema to a part of its document.
fn resolved<'v>(document: &'v Value, schema: &'v Value) -> &'v Value {
    match schema.get("$ref").and_then(Value::as_str) {
        Some(path) => document.pointer(path.trim_start_matches('#')).unwrap(),
        None => schema,
    }
}

#[test]
fn metrics_have_their_names() {
    let devices = [("disk", "blk-file = 'null:1M'"), ("card", "port = 'null'")];
    let daemon = Daemon::serve_with(&["--control"], "", &devices).unwrap();
    let control = format!("--control={}", daemon.socket_of("control").display());
    let now = metric_lines(&output_of(&["metrics", &control]));
    let before = of_release("metrics.txt", &(now.join("\n") + "\n")).unwrap();
    for line in before.lines() {
        assert!(now.iter().any(|other| other == line), "{line} is gone");
    }
    daemon.stop().unwrap();
}

/// Returns the name and the type of each metric, and the names of the labels of its samples.
fn metric_lines(text: &str) -> Vec<String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).map(str::to_owned);
    let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let series = line.rsplit_once(' ')?.0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels: BTreeSet<&str> = labels
            .trim_end_matches('}')
            .split("\",")
            .filter_map(|label| Some(label.split_once('=')?.0))
            .collect();
        Some(format!("{name} {labels:?}"))
    });
    let lines: BTreeSet<String> = types.chain(samples).collect();
    assert!(lines.len() > 20, "{text}");
    lines.into_iter().collect()
}
