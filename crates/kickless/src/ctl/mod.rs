//! `kickless ctl`: makes one call on a control socket.
//!
//! People write short words (`list`, `add NAME KEY=VALUE`), and get tables on a terminal. Programs write the
//! names of calls, and get JSON. JSON also goes into each pipe.
#![cfg_attr(not(test), expect(clippy::disallowed_methods, reason = "this command is no daemon"))]

mod table;
mod words;

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::{Path, absolute};

use anyhow::{Context, Result, anyhow};
use kickless_control::{Client, ClientError};
use kickless_daemon::sentence;
use serde_json::Value;

use crate::cli::Ctl;
use crate::inherited;
use crate::replace::replace;
use crate::wrong_use::WrongUse;

use words::Words;

/// The call whose result is a file.
const SAVE: &str = "config.save";
/// The word that shows all calls.
const HELP: &str = "help";
/// The call of the short word `list`, and the call that has all columns of its table.
const LIST: &str = "device.list";
const SNAPSHOT: &str = "daemon.snapshot";

/// Makes the call, and prints its result with `print`. After a subscription, prints what comes, one line for
/// each, until the daemon ends.
///
/// # Errors
/// The parameters are wrong, no daemon answers, or the call failed. The error is one sentence.
pub(crate) fn call(ctl: &Ctl, print: fn(&str) -> Result<()>) -> Result<()> {
    let path = ctl.control.path();
    if ctl.call == HELP {
        let help = words::help(ctl.words.first().map(String::as_str));
        return print(&help.map_err(|error| WrongUse::of(sentence(&*error)))?);
    }
    // The daemon has another working directory.
    let control = absolute(&path).unwrap_or_else(|_| path.clone());
    let words = words::read(&ctl.call, &ctl.words, &control);
    let Words { mut method, params, is_short } = words.map_err(|error| WrongUse::of(sentence(&*error)))?;
    let is_table = is_short && io::stdout().is_terminal();
    if is_table && method == LIST {
        method = SNAPSHOT.into();
    }
    if ctl.output.is_some() && method != SAVE {
        return Err(WrongUse::of(format!("--output: only {SAVE} returns a file: leave it out")));
    }
    let given = inherited::given(&inherited::note(), &ctl.fds)?;
    let given: Vec<_> = given.iter().map(|(name, fd)| (name.clone(), fd.as_fd())).collect();
    let about = || format!("--control={}", path.display());
    let mut client = Client::connect(&path).with_context(about)?;
    match client.call_given(&method, params, &given) {
        Ok(_) if method.ends_with(".subscribe") => loop {
            match client.next_notification() {
                Ok(line) => print(&format!("{line}\n"))?,
                Err(ClientError::Closed) => return Ok(()),
                Err(error) => return Err(anyhow::Error::from(error).context(about())),
            }
        },
        Ok(result) => match &ctl.output {
            Some(output) => save(&result, output).with_context(|| format!("--output={}", output.display())),
            None if is_table && method == SNAPSHOT => print(&table::devices(&result)),
            None if is_table => print(&table::members(&result)),
            None => print(&format!("{result:#}\n")),
        },
        // The sentence of the daemon tells enough.
        Err(error @ ClientError::Call(_)) => Err(error.into()),
        Err(error) => Err(anyhow::Error::from(error).context(about())),
    }
}

/// Replaces the file, or the target of a symbolic link, with the configuration.
fn save(result: &Value, output: &Path) -> Result<()> {
    let text = result["toml"].as_str().context("the daemon returned no configuration")?;
    let (path, old) = match output.canonicalize() {
        Ok(path) => {
            let old = path.metadata()?;
            (path, Some(old))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => (output.to_owned(), None),
        Err(error) => return Err(error.into()),
    };
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        return Err(anyhow!("it is no regular file"));
    }
    Ok(replace(&path, text, old.as_ref())?)
}
