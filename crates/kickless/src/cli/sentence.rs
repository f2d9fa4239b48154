//! The sentences about wrong command lines: each names the option, and says what to write.

use std::error::Error;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};
use kickless_daemon::{alternatives, removed_option};
use kickless_values::nearest;

/// The length up to which a sentence shows a value.
const SHOWN_CHARS_MAX: usize = 60;

/// The most options that a sentence suggests for one that they all begin with.
const MEANT_MAX: usize = 4;

/// The command that a command line names.
struct Named<'c> {
    root: &'c Command,
    command: &'c Command,
    /// Its words, such as `kickless bench blk`.
    words: String,
}

/// Returns the error of clap about a command line as one sentence. `usual` is the usual kind of device, and
/// the option that it needs.
pub(super) fn of(error: &clap::Error, mut root: Command, line: &[OsString], usual: (&str, &str)) -> String {
    // Options of all commands reach the commands.
    root.build();
    let named = Named::find(&root, line);
    let see = format!("(see {} --help)", named.words);
    let argument = argument(error);
    match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            format!("say what to do, for example: {}", named.example(usual))
        }
        ErrorKind::InvalidSubcommand => named.unknown_command(text(error, ContextKind::InvalidSubcommand)),
        ErrorKind::UnknownArgument => match argument.as_deref() {
            Some(option) if option.starts_with('-') => named.unknown_option(option),
            Some(word) => named.stray(word),
            None => format!("an argument is unknown {see}"),
        },
        ErrorKind::MissingRequiredArgument => named.missing(error, usual, &see),
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => wrong_value(error, argument, &named),
        ErrorKind::TooManyValues => {
            let option = option_of(&argument.unwrap_or_default()).to_owned();
            format!("{option} takes no value: write {option} alone, or leave it out")
        }
        ErrorKind::ArgumentConflict => conflict(error, &argument.unwrap_or_default()),
        _ => {
            let rendered = error.render().to_string();
            let lines = rendered.lines().take_while(|line| !line.trim().is_empty()).map(str::trim);
            let joined = lines.collect::<Vec<_>>().join(" ");
            format!("{} {see}", joined.strip_prefix("error: ").unwrap_or(&joined))
        }
    }
}

/// Returns the argument that an error is about.
fn argument(error: &clap::Error) -> Option<String> {
    match error.get(ContextKind::InvalidArg)? {
        ContextValue::String(argument) => Some(argument.clone()),
        ContextValue::Strings(all) => all.first().cloned(),
        _ => None,
    }
}

/// Returns a text that belongs to an error.
fn text(error: &clap::Error, kind: ContextKind) -> &str {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text,
        _ => "",
    }
}

/// Returns the option of an argument that clap writes with its value, such as `--mtu <N>`.
fn option_of(argument: &str) -> &str {
    argument.split([' ', '=']).next().unwrap_or_default()
}

/// Returns an argument as an operator writes it: `--mtu=N` for `--mtu <N>`.
fn written(argument: &str) -> String {
    argument.replacen(" <", "=", 1).replace(['<', '>'], "").trim_end_matches("...").to_owned()
}

/// Returns a value, shortened.
fn shortened(value: &str) -> String {
    match value.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((at, _)) => format!("{}...", &value[..at]),
        None => value.to_owned(),
    }
}

/// Returns the sentence about a value that an option or a word does not take.
fn wrong_value(error: &clap::Error, argument: Option<String>, named: &Named<'_>) -> String {
    let argument = argument.unwrap_or_default();
    let value = text(error, ContextKind::InvalidValue);
    let valid = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(valid)) => valid.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    };
    let option = option_of(&argument);
    let is_option = option.starts_with('-');
    if value.is_empty() && error.source().is_none() {
        return match valid[..] {
            [] => format!("{option} needs a value: write {}", written(&argument)),
            _ => format!("{option} needs a value: {}", alternatives(&valid)),
        };
    }
    let why = match error.source() {
        Some(source) => source.to_string(),
        None if !valid.is_empty() => format!("it must be {}", alternatives(&valid)),
        None => format!("it is no value of this option (see {} --help)", named.words),
    };
    match (is_option, value) {
        (true, "") => format!("{option}: {why}"),
        // Otherwise the value and the sentence would run into one another.
        (true, value) if value.ends_with(':') => format!("{option}={:?}: {why}", shortened(value)),
        (true, value) => format!("{option}={}: {why}", shortened(value)),
        (false, value) => format!("{:?}: {why}", shortened(value)),
    }
}

/// Returns the sentence about an option that does not go with another one, or is there twice.
fn conflict(error: &clap::Error, argument: &str) -> String {
    let option = option_of(argument);
    let others: Vec<&str> = match error.get(ContextKind::PriorArg) {
        Some(ContextValue::String(other)) => vec![option_of(other)],
        Some(ContextValue::Strings(others)) => others.iter().map(|other| option_of(other)).collect(),
        _ => Vec::new(),
    };
    match others[..] {
        [] => format!("{option} cannot be combined with other options: leave it or the others out"),
        [other] if other == option => format!("{option} is given twice: give it once"),
        [other] => format!("{option} cannot be combined with {other}: leave one of them out"),
        _ => format!("{option} cannot be combined with {}: leave it or the others out", others.join(" and ")),
    }
}

impl<'c> Named<'c> {
    fn find(root: &'c Command, line: &[OsString]) -> Self {
        let mut named = Self { root, command: root, words: root.get_name().to_owned() };
        for word in line.iter().skip(1).filter_map(|word| word.to_str()) {
            if let Some(command) = named.command.find_subcommand(word) {
                named.words = format!("{} {}", named.words, command.get_name());
                named.command = command;
            }
        }
        named
    }

    /// Returns a correct command line.
    fn example(&self, (kind, key): (&str, &str)) -> String {
        match self.command.get_name() {
            "bench" => format!("{} blk --socket-path=PATH", self.words),
            "ctl" => format!("{} list", self.words),
            _ if self.command.get_name() == self.root.get_name() => {
                format!("{} {kind} --socket-path=PATH --{key}=PATH", self.words)
            }
            _ => format!("{} --help", self.words),
        }
    }

    fn unknown_command(&self, word: &str) -> String {
        let known = self.command.get_subcommands().filter(|command| !command.is_hide_set());
        match nearest(word, known.map(Command::get_name)) {
            Some(nearest) => format!("there is no command {word:?}: did you mean {} {nearest}?", self.words),
            None => format!("there is no command {word:?} (see {} --help)", self.words),
        }
    }

    fn unknown_option(&self, argument: &str) -> String {
        let option = option_of(argument);
        let name = option.trim_start_matches('-');
        if let Some(mistake) = removed_option(name) {
            return format!("--{}: {}", mistake.option, mistake.why);
        }
        let known =
            || self.command.get_arguments().filter(|known| !known.is_hide_set()).filter_map(Arg::get_long);
        // Such as `--socket`, which three options begin with.
        let begins = |known: &&str| known.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
        let meant: Vec<String> = known().filter(begins).map(|known| format!("--{known}")).collect();
        if (2..=MEANT_MAX).contains(&meant.len()) {
            let meant: Vec<&str> = meant.iter().map(String::as_str).collect();
            return format!(
                "{option} is no option of {}: did you mean {}?",
                self.words,
                alternatives(&meant)
            );
        }
        match (nearest(name, known()), self.command_with(name)) {
            (Some(nearest), _) => {
                format!("{option} is no option of {}: did you mean --{nearest}?", self.words)
            }
            (None, Some(other)) => format!("{option} is an option of {other}, and not of {}", self.words),
            (None, None) => format!("{option} is no option of {} (see {} --help)", self.words, self.words),
        }
    }

    /// Returns the words of the first other command that has an option of this name.
    fn command_with(&self, option: &str) -> Option<String> {
        fn find(command: &Command, words: &str, option: &str) -> Option<String> {
            let has = |command: &Command| command.get_arguments().any(|arg| arg.get_long() == Some(option));
            command.get_subcommands().filter(|command| !command.is_hide_set()).find_map(|command| {
                let words = format!("{words} {}", command.get_name());
                match has(command) {
                    true => Some(words),
                    false => find(command, &words, option),
                }
            })
        }
        find(self.root, self.root.get_name(), option)
    }

    /// Returns the sentence about a word that no command takes.
    fn stray(&self, word: &str) -> String {
        let key = word.split('=').next().unwrap_or_default();
        let is_option = |arg: &Arg| arg.get_long() == Some(key);
        match word.contains('=') && self.command.get_arguments().any(is_option) {
            true => format!("{word:?} has no dashes: write --{word}"),
            false => format!("{word:?} is one word too many (see {} --help)", self.words),
        }
    }

    /// Returns the sentence about arguments that are not there.
    fn missing(&self, error: &clap::Error, usual: (&str, &str), see: &str) -> String {
        let missing = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(missing)) => {
                missing.iter().map(|argument| written(argument)).collect()
            }
            _ => Vec::new(),
        };
        let is_always = |argument: &String| {
            let name = option_of(argument).trim_start_matches('-');
            let mut all = self.command.get_arguments();
            all.any(|arg| arg.is_required_set() && (arg.get_long() == Some(name) || arg.is_positional()))
        };
        match &missing[..] {
            [word] if self.command.get_name() == "ctl" && !word.starts_with('-') => {
                format!("say what to do, for example: {}", self.example(usual))
            }
            all if all.iter().all(is_always) => format!("{} needs {} {see}", self.words, all.join(" and ")),
            all => format!("{} is missing: another option needs it {see}", all.join(" and ")),
        }
    }
}
