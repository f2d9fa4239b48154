//! Reads the file of `kickless serve --config=FILE`, which describes many devices on one pool.
//!
//! The file is TOML. It has a table `[pool]` with the options of the workers, a table `[defaults]` with
//! defaults for all devices, and a `[[device]]` for each device. Keys are the options of the command line
//! without the dashes. The same parsers read their values.

mod section;
mod syntax;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use kickless_daemon::{DeviceConfig, KindEntry, Kinds, Notation, PoolConfig, keys, read as read_keys};
use kickless_kinds::kinds;
use kickless_opener::{Want, config_file, explained, file, real_path};

use crate::cli::{ControlOptions, SandboxOptions, UpgradeOptions};
use crate::service::{Lines, Service};
use crate::wire::check_cpus;
use section::{Section, Text};

/// Reads the configuration file.
///
/// # Errors
/// The file cannot be read, or its contents are wrong. The error is one sentence with the name of the file,
/// the line and the key.
pub(crate) fn read(path: &Path) -> Result<Service> {
    let text = match config_file() {
        // In a sandbox, the file that the operator named at the start, whatever its path leads to now.
        Some(file) => file.and_then(|mut file| bytes(&mut file)),
        None => read_bytes(path),
    };
    let text = text.map_err(|error| explained(path, Want::Read, error));
    parse_bytes(path, &text.with_context(|| about(path))?)
}

fn about(path: &Path) -> String {
    format!("--config={}", path.display())
}

/// Reads the file in this process.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    bytes(&mut file(path)?)
}

fn bytes(file: &mut File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    // Without `take`, the library asks for the size first, by a call that a sandbox refuses.
    file.take(u64::MAX).read_to_end(&mut text)?;
    Ok(text)
}

/// Parses the contents of the file. Sentences name the file by `path`.
///
/// # Errors
/// The contents are wrong. The error is one sentence with the name of the file, the line and the key.
pub(crate) fn parse_bytes(path: &Path, text: &[u8]) -> Result<Service> {
    let parsed = str::from_utf8(text).map_err(|error| {
        let line = 1 + text[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        anyhow!("{}:{line}: it is no text in UTF-8: save the file as UTF-8", path.display())
    });
    parse(path, parsed?)
}

/// Checks the contents of the file, and the CPUs that it names. Opens no disk and no socket. Returns a line
/// with the numbers of devices.
///
/// # Errors
/// As for [`read`].
pub(crate) fn check(path: &Path) -> Result<String> {
    let service = read(path)?;
    check_cpus(&service)?;
    let count = |kind: &dyn KindEntry| {
        let words = kind.words();
        match service.devices.iter().filter(|device| device.kind.words() == words).count() {
            1 => words.one.to_owned(),
            count => format!("{count} {}", words.several),
        }
    };
    let counts: Vec<_> = kinds().commands().map(count).collect();
    Ok(format!("{}: {}\n", path.display(), counts.join(" and ")))
}

fn parse(path: &Path, text: &str) -> Result<Service> {
    let (text, kinds) = (Text { path, text }, kinds());
    let mut whole = Section::whole(&text)?;
    let mut pool = whole.table("pool", "[pool]")?.unwrap_or_else(|| Section::absent(&text, "[pool]"));
    let defaults = whole.table("defaults", "[defaults]")?;
    let sections = whole.tables("device", "[[device]]")?;
    whole.end()?;
    let mut lines = Lines::default();
    let pool = {
        let config = pool_of(&mut pool)?;
        pool.keys().for_each(|(key, line)| lines.add(None, key, line));
        config
    };
    if let Some(defaults) = &defaults {
        check_defaults(defaults, &kinds)?;
    }
    let mut devices = Vec::with_capacity(sections.len());
    let (mut names, mut sockets, mut without_socket) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for mut section in sections {
        if let Some(defaults) = &defaults {
            // Defaults for other kinds of devices do not apply to this device.
            section.add_absent(defaults, &kinds.foreign_keys(|key| section.has(key)));
        }
        let device = device_of(&mut section, &kinds)?;
        section.keys().for_each(|(key, line)| lines.add(device.name(), key, line));
        let taken = |what: &str, line: usize, shown: &str, first: usize| {
            let why = match section.has_value(what) {
                true => format!("the device of line {first} has {shown} already: use another one"),
                false => format!(
                    "this [[device]] is called {shown} after its socket, as that of line {first} is: give it a name"
                ),
            };
            text.at(line, format!("{what}: {why}"))
        };
        if let Some(name) = device.name()
            && let Some(first) = names.insert(name.to_owned(), section.line("name"))
        {
            return Err(taken("name", section.line("name"), name, first));
        }
        if let Some(path) = &device.serve.socket_path
            && let Some(first) = sockets.insert(real_path(path), section.line("socket-path"))
        {
            return Err(taken(
                "socket-path",
                section.line("socket-path"),
                &path.display().to_string(),
                first,
            ));
        }
        if device.serve.socket_path.is_none() {
            without_socket.push((
                device.name().unwrap_or_default().to_owned(),
                section.needs("socket-path").to_string(),
            ));
        }
        devices.push(device);
    }
    let (notation, file, control) = (Notation::Keys, Some(text.path.to_owned()), ControlOptions::default());
    let (sandbox, upgrade) = (SandboxOptions::default(), UpgradeOptions::default());
    Ok(Service {
        notation,
        pool,
        devices,
        file,
        lines,
        without_socket,
        fd: None,
        control,
        sandbox,
        upgrade,
        all_or_nothing: false,
    })
}

/// Reads the table `[pool]`.
fn pool_of(section: &mut Section<'_>) -> Result<PoolConfig> {
    let values = section.read(&keys::<PoolConfig>())?;
    let pool: PoolConfig = read_keys(&values).map_err(|mistake| section.mistake(&mistake))?;
    pool.worker_options(1, Notation::Keys).map_err(|mistake| section.mistake(&mistake))?;
    Ok(pool)
}

/// Checks the table `[defaults]`.
fn check_defaults(section: &Section<'_>, kinds: &Kinds) -> Result<()> {
    let own = kinds.own_keys();
    section.clone().read_without(&kinds.keys(), &own)?;
    match own.into_iter().find(|key| section.has(key)) {
        Some(key) => Err(section.wrong(key, "it is each device's own: say it in a [[device]]")),
        None => Ok(()),
    }
}

fn device_of(section: &mut Section<'_>, kinds: &Kinds) -> Result<DeviceConfig> {
    let values = section.read(&kinds.keys())?;
    let mut device = kinds.read(&values).map_err(|mistake| section.mistake(&mistake))?;
    // The service manager can pass the socket of a device that has a name.
    if device.serve.socket_path.is_none() && device.name().is_none() {
        return Err(section.needs("socket-path"));
    }
    device.name_by_socket().map_err(|mistake| section.mistake(&mistake))?;
    device.check(Notation::Keys).map_err(|mistake| section.mistake(&mistake))?;
    device.check_has_no_descriptors().map_err(|mistake| section.mistake(&mistake))?;
    Ok(device)
}

#[cfg(test)]
mod tests;
