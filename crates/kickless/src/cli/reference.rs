//! The pages of `docs/reference`: one for each command, and one for the configuration file.
//!
//! They follow the options, as the help and the manual pages do. After a change:
//!
//! ```text
//! REFERENCE=write cargo test -p kickless reference
//! ```

use std::any::TypeId;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs};

use clap::{Arg, Args, Command, CommandFactory};
use kickless_daemon::{Identity, PollingConfig, PoolConfig, ServeConfig, Share, keys};
use kickless_kinds::kinds;

use super::Cli;
use super::man::{Sections, sections};

const GENERATED: &str = "<!-- Written by `REFERENCE=write cargo test -p kickless reference`. -->\n";
/// The page of the configuration file.
const FILE_PAGE: &str = "configuration-file.md";

/// Returns the pages and their names.
fn pages() -> BTreeMap<String, String> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut pages = BTreeMap::new();
    let mut index = format!(
        "{GENERATED}# Reference\n\n\
         These pages are for operators. They have each option of each command, as `--help` and the manual pages do, and each \
         key of the configuration file.\n\n\
         - [The configuration file]({FILE_PAGE}): the keys of `kickless serve`\n"
    );
    add_command(&command, &mut pages, &mut index);
    pages.insert("README.md".into(), index);
    pages.insert(FILE_PAGE.into(), file_page());
    pages
}

/// Adds the page of a command, and those of its commands that are not hidden.
fn add_command(command: &Command, pages: &mut BTreeMap<String, String>, index: &mut String) {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let title = name.replace("kickless-", "kickless ").replace("bench-", "bench ");
    let about = escaped(&command.get_about().map(ToString::to_string).unwrap_or_default());
    *index += &format!("- [{title}]({name}.md): {about}\n");
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let mut page = format!("{GENERATED}# {title}\n\n{about}.\n\n```text\n{usage}\n```\n");
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name());
        let about = escaped(&command.get_about().map(ToString::to_string).unwrap_or_default());
        page += &format!("\n- [`{}`]({name}.md): {about}", command.get_name());
    }
    if command.has_subcommands() {
        page += "\n";
    }
    let is_root = name == "kickless";
    let own = |argument: &&Arg| is_root || !argument.is_global_set() && argument.get_id() != "help";
    let arguments: Vec<&Arg> =
        command.get_arguments().filter(own).filter(|argument| !argument.is_hide_set()).collect();
    page += &by_heading(&arguments);
    if !is_root {
        page += "\n`--log-level` and `--log-format` are options of [each command](kickless.md).\n";
    }
    page += &sections(name).map_or_else(String::new, of_sections);
    pages.insert(format!("{name}.md"), page);
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        add_command(command, pages, index);
    }
}

/// Returns the list of the options below each heading of the help.
fn by_heading(arguments: &[&Arg]) -> String {
    let mut headings: Vec<&str> = Vec::new();
    let heading = |argument: &Arg| match argument.is_positional() {
        true => "Arguments".to_owned(),
        false => argument.get_help_heading().unwrap_or("Options").to_owned(),
    };
    let all: Vec<String> = arguments.iter().map(|argument| heading(argument)).collect();
    for heading in &all {
        if !headings.contains(&heading.as_str()) {
            headings.push(heading);
        }
    }
    let mut text = String::new();
    for wanted in headings {
        text += &format!("\n## {wanted}\n\n");
        for argument in arguments.iter().filter(|argument| heading(argument) == wanted) {
            let needed = if argument.is_required_set() { " (needed)" } else { "" };
            text += &format!("- **`{}`**{needed}: {}\n", as_option(argument), described(argument));
        }
    }
    text
}

/// Returns an argument as a command line has it.
fn as_option(argument: &Arg) -> String {
    let values = argument.get_value_names().unwrap_or_default().join(" ");
    match (argument.get_long(), argument.get_short()) {
        (None, _) => values,
        (Some(long), _) if argument.get_action().takes_values() => format!("--{long}={values}"),
        (Some(long), Some(short)) => format!("-{short}, --{long}"),
        (Some(long), None) => format!("--{long}"),
    }
}

/// Returns the help of an argument, with its default and its values.
fn described(argument: &Arg) -> String {
    let mut text = escaped(&argument.get_help().map(ToString::to_string).unwrap_or_default());
    let values = argument.get_possible_values();
    if argument.get_action().takes_values() && !values.is_empty() && !argument.is_hide_possible_values_set() {
        let names: Vec<String> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
        text += &format!(" [possible values: {}]", names.join(", "));
    }
    if let Some(variable) = argument.get_env() {
        text += &format!(" [env: `{}`]", variable.display());
    }
    let defaults: Vec<String> =
        argument.get_default_values().iter().map(|value| format!("`{}`", value.display())).collect();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        text += &format!(" [default: {}]", defaults.join(" "));
    }
    text
}

/// Returns the sections that a manual page has beside the help.
fn of_sections(Sections { examples, files, statuses }: Sections) -> String {
    let mut text = String::from("\n## Examples\n");
    for (about, line) in examples {
        text += &format!("\n{about}\n\n```sh\n{line}\n```\n");
    }
    for (heading, entries) in [("Files", files), ("Exit status", statuses)] {
        if !entries.is_empty() {
            text += &format!("\n## {heading}\n\n");
        }
        for (term, about) in entries {
            text += &format!("- **`{term}`**: {}\n", escaped(about));
        }
    }
    text
}

/// Returns the page of the keys of a configuration file.
fn file_page() -> String {
    let kinds = kinds();
    let pool = key_lines(&PoolConfig::augment_args(Command::new("pool")), &names::<PollingConfig>(), &[]);
    let own = kinds.own_keys();
    let settable = kinds.set_keys().iter().map(|key| key.name().to_owned()).collect::<Vec<_>>();
    let of = |command: &Command| key_lines(command, &settable, &own);
    let shared =
        of(&Share::augment_args(ServeConfig::augment_args(Identity::augment_args(Command::new("")))));
    let names: Vec<String> = kinds
        .commands()
        .map(|kind| format!("`\"{}\"` for {}", kind.words().name, kind.words().one))
        .collect();
    let mut page = format!(
        "{GENERATED}# The configuration file\n\n\
         This page is for operators. It has each key of the file of `kickless serve --config=FILE`. \
         [operating.md](../operating.md#one-process-many-disks) has an example and its rules, and `kickless serve --check` \
         says where a mistake is.\n\n\
         Keys are the options of the [command line](README.md) without their dashes. A size such as `\"64G\"` and a duration \
         such as `\"500us\"` are text. *Changes at once*: a reload changes the key while a guest uses the device, and so does \
         `device.set` or `pool.set`. *Own*: the key cannot be in `[defaults]`.\n\n\
         ## `[pool]`\n\nThe workers that all devices share.\n\n{}\n\
         ## `[[device]]` and `[defaults]`\n\n\
         Each `[[device]]` is served. `[defaults]` has the keys of devices that say nothing else.\n\n\
         - **`kind`**: {}. Follows from the key that only this kind has\n{}",
        pool,
        names.join(", "),
        shared
    );
    for kind in kinds.commands() {
        let words = kind.words();
        let keys = of(&kind.augment(Command::new(words.name)));
        let [first, rest @ ..] = words.several.as_bytes() else { continue };
        let title = [&[first.to_ascii_uppercase()], rest].concat();
        page += &format!("\n### {}\n\n{}", String::from_utf8_lossy(&title), keys);
    }
    for key in kinds.keys() {
        let is_there = page.contains(&format!("- **`{} = ", key.name())) || key.name() == "kind";
        assert!(is_there, "no group of options has the key {}", key.name());
    }
    page
}

fn names<A: Args>() -> Vec<String> {
    keys::<A>().iter().map(|key| key.name().to_owned()).collect()
}

/// Returns the keys of a group of options, as the lines of a list. `settable` are those that change at once.
fn key_lines(command: &Command, settable: &[String], own: &[&str]) -> String {
    let mut text = String::new();
    for argument in command.get_arguments() {
        let Some(name) = argument.get_long() else { continue };
        let value_type = argument.get_value_parser().type_id();
        let value = argument.get_value_names().unwrap_or_default().join(" ");
        let value = if !argument.get_action().takes_values() {
            "true".into()
        } else if value_type == TypeId::of::<u16>() || value_type == TypeId::of::<u32>() {
            value
        } else {
            format!("\"{value}\"")
        };
        let mut notes = Vec::new();
        if argument.is_required_set() {
            notes.push("needed");
        }
        if own.contains(&name) {
            notes.push("own");
        }
        if settable.iter().any(|key| key == name) {
            notes.push("changes at once");
        }
        let notes = if notes.is_empty() { String::new() } else { format!(" (*{}*)", notes.join(", ")) };
        // The help names other options, which are keys here.
        let about = described(argument).replace(" --", " ");
        text += &format!("- **`{name} = {value}`**{notes}: {about}\n");
    }
    text
}

/// Returns text as Markdown that shows it.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if "<*|`".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[test]
fn the_reference_is_that_of_this_program() {
    let directory: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    let pages = pages();
    assert!(pages.len() > 12, "{:?}", pages.keys());
    if env::var("REFERENCE").is_ok_and(|way| way == "write") {
        fs::remove_dir_all(&directory).unwrap();
        fs::create_dir_all(&directory).unwrap();
        for (name, text) in &pages {
            fs::write(directory.join(name), text).unwrap();
        }
    }
    for (name, text) in &pages {
        let committed = fs::read_to_string(directory.join(name)).unwrap_or_default();
        assert!(
            committed == *text,
            "docs/reference/{name}: run REFERENCE=write cargo test -p kickless reference"
        );
    }
    let files = fs::read_dir(&directory).unwrap().count();
    assert_eq!(files, pages.len(), "docs/reference has a page of no command");
}
