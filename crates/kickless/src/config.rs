//! `kickless serve --config=FILE`: many devices on one pool.
//!
//! The file is TOML: a table `[pool]` with the options of the workers, a table `[defaults]` with what holds for each device that
//! says nothing else, and a `[[device]]` for each device. Keys are the command line's options without the dashes, and their
//! values are read by the same parsers.

mod section;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kickless_disk::Cache;
use kickless_io::EngineKind;
use kickless_memory::quota;
use kickless_values::{parse_number, parse_queue_size};

use crate::cli::values::{
    NUM_QUEUES, QUEUE_SIZE, Switch, parse_blk_file, parse_completion, parse_delay, parse_engine, parse_idle,
    parse_memory_max, parse_mode, parse_name, parse_num_queues, parse_rate, parse_serial, parse_workers,
};
use crate::cli::{PollOptions, PoolOptions};
use crate::service::{Device, Disk, Pool, Said, Service, Socket};
use section::{Kind, Section, Text};

/// What says which device it is, and so cannot be said of all.
const OWN: [&str; 4] = ["name", "socket-path", "blk-file", "serial"];
/// The log says the name in each line.
const NAME_BYTES_MAX: usize = 64;
/// The largest share of the pool beside one of 1.
const WEIGHT_MAX: u32 = 1000;

/// Reads the file.
///
/// # Errors
/// It cannot be read, or something in it is wrong: one sentence with its name, the line and the key.
pub(crate) fn read(path: &Path) -> Result<Service> {
    let text = fs::read(path).with_context(|| format!("--config={}", path.display()))?;
    let text = String::from_utf8(text).with_context(|| format!("--config={}", path.display()))?;
    parse(path, &text)
}

/// What `text` asks for; sentences name it by `path`.
fn parse(path: &Path, text: &str) -> Result<Service> {
    let text = Text { path, text };
    let mut whole = Section::whole(&text)?;
    let pool = whole.table("pool", "[pool]")?.unwrap_or_else(|| Section::absent(&text, "[pool]"));
    let defaults = whole.table("defaults", "[defaults]")?;
    let sections = whole.tables("device", "[[device]]")?;
    whole.end()?;
    let pool = pool_of(pool)?;
    let defaults = defaults.map(defaults_of).transpose()?.unwrap_or_default();
    if sections.is_empty() {
        return Err(text.mistake(None, "there is no device to serve: describe each in a [[device]]"));
    }
    let mut devices = Vec::with_capacity(sections.len());
    let (mut names, mut sockets) = (BTreeMap::new(), BTreeMap::new());
    for section in sections {
        let (device, lines) = device_of(section, &defaults)?;
        let taken = |what: &str, line: usize, shown: &str, first: usize| {
            text.at(line, format!("{what}: the device of line {first} has {shown} already: use another one"))
        };
        if let Some(name) = &device.name
            && let Some(first) = names.insert(name.clone(), lines.name)
        {
            return Err(taken("name", lines.name, name, first));
        }
        if let Socket::Path { path, .. } = &device.socket
            && let Some(first) = sockets.insert(real(path), lines.socket_path)
        {
            return Err(taken("socket-path", lines.socket_path, &path.display().to_string(), first));
        }
        devices.push(device);
    }
    Ok(Service { said: Said::File, pool, devices })
}

fn pool_of(mut section: Section<'_>) -> Result<Pool> {
    let options = PoolOptions {
        engine: section.get("engine", Kind::Text, parse_engine)?.unwrap_or(EngineKind::Auto),
        completion: section.get("completion", Kind::Text, parse_completion)?.unwrap_or_default(),
        sqpoll: section.flag("sqpoll")?.unwrap_or(false),
        fixed_buffers: section.flag("fixed-buffers")?.unwrap_or(false),
        workers: section.get("workers", Kind::Number, parse_workers)?,
        cpu: section.get("cpu", Kind::Text, str::parse)?,
        poll: PollOptions {
            poll: section.get("poll", Kind::Text, parse_name)?,
            poll_latency: section.get("poll-latency", Kind::Text, parse_delay)?,
            poll_start_rate: section.get("poll-start-rate", Kind::Number, parse_rate)?,
            poll_stop_idle: section.get("poll-stop-idle", Kind::Text, parse_idle)?,
        },
        call_coalesce: section.get("call-coalesce", Kind::Text, parse_delay)?,
    };
    section.end()?;
    options.pool(Said::File).map_err(|mistake| section.mistake(&mistake))
}

/// What a device says of itself, or what `[defaults]` say.
#[derive(Clone, Debug, Default)]
struct Common {
    read_only: Option<bool>,
    num_queues: Option<u16>,
    queue_size: Option<u16>,
    cache: Option<Cache>,
    merge: Option<Switch>,
    lock: Option<Switch>,
    incoming: Option<bool>,
    memory_max: Option<u64>,
    allow_slow_memory: Option<bool>,
    socket_mode: Option<u32>,
    socket_group: Option<String>,
    weight: Option<u32>,
}

impl Common {
    fn take(section: &mut Section<'_>) -> Result<Self> {
        section.get("kind", Kind::Text, parse_kind)?;
        Ok(Self {
            read_only: section.flag("read-only")?,
            num_queues: section.get("num-queues", Kind::Number, parse_num_queues)?,
            queue_size: section.get("queue-size", Kind::Number, parse_queue_size)?,
            cache: section
                .get("cache", Kind::Text, |text| text.parse::<Cache>().map_err(|error| error.to_string()))?,
            merge: section.get("merge", Kind::Text, parse_name)?,
            lock: section.get("lock", Kind::Text, parse_name)?,
            incoming: section.flag("incoming")?,
            memory_max: section.get("memory-max", Kind::Text, parse_memory_max)?,
            allow_slow_memory: section.flag("allow-slow-memory")?,
            socket_mode: section.get("socket-mode", Kind::Text, parse_mode)?,
            socket_group: section
                .get("socket-group", Kind::Text, |text| not_empty(text).map(str::to_owned))?,
            weight: section.get("weight", Kind::Number, |text| parse_number(text, 1, WEIGHT_MAX))?,
        })
    }

    fn or(self, defaults: &Self) -> Self {
        Self {
            read_only: self.read_only.or(defaults.read_only),
            num_queues: self.num_queues.or(defaults.num_queues),
            queue_size: self.queue_size.or(defaults.queue_size),
            cache: self.cache.or(defaults.cache),
            merge: self.merge.or(defaults.merge),
            lock: self.lock.or(defaults.lock),
            incoming: self.incoming.or(defaults.incoming),
            memory_max: self.memory_max.or(defaults.memory_max),
            allow_slow_memory: self.allow_slow_memory.or(defaults.allow_slow_memory),
            socket_mode: self.socket_mode.or(defaults.socket_mode),
            socket_group: self.socket_group.or_else(|| defaults.socket_group.clone()),
            weight: self.weight.or(defaults.weight),
        }
    }
}

fn defaults_of(mut section: Section<'_>) -> Result<Common> {
    let common = Common::take(&mut section)?;
    if let Some(key) = OWN.into_iter().find(|key| section.has(key)) {
        return Err(section.wrong(key, "it is each device's own: say it in a [[device]]"));
    }
    section.end()?;
    Ok(common)
}

/// Where a device says what no other may say.
struct Lines {
    name: usize,
    socket_path: usize,
}

fn device_of(mut section: Section<'_>, defaults: &Common) -> Result<(Device, Lines)> {
    let path = |text: &str| not_empty(text).map(PathBuf::from);
    let common = Common::take(&mut section)?.or(defaults);
    let name = section.get("name", Kind::Text, parse_device_name)?;
    let socket_path = section.get("socket-path", Kind::Text, path)?;
    let blk_file = section.get("blk-file", Kind::Text, |text| parse_blk_file(OsString::from(text)))?;
    let serial = section.get("serial", Kind::Text, parse_serial)?;
    section.end()?;
    let socket_path = section.needed("socket-path", socket_path)?;
    let blk_file = section.needed("blk-file", blk_file)?;
    let name = match name {
        Some(name) => name,
        None => {
            let stem = socket_path.file_stem().unwrap_or_default().to_string_lossy();
            parse_device_name(&stem).map_err(|_| {
                section.wrong("socket-path", "no name can be made of it: give the device a name")
            })?
        }
    };
    let disk = Disk {
        blk_file,
        read_only: common.read_only.unwrap_or(false),
        serial,
        num_queues: common.num_queues.unwrap_or(NUM_QUEUES),
        queue_size: common.queue_size.unwrap_or(QUEUE_SIZE),
        cache: common.cache.unwrap_or(Cache::None),
        merge: common.merge.unwrap_or(Switch::On) == Switch::On,
        lock: common.lock.unwrap_or(Switch::On) == Switch::On,
        incoming: common.incoming.unwrap_or(false),
    };
    disk.check(Said::File).map_err(|mistake| section.mistake(&mistake))?;
    let lines = Lines { name: section.line("name"), socket_path: section.line("socket-path") };
    let socket = Socket::Path { path: socket_path, mode: common.socket_mode, group: common.socket_group };
    let device = Device {
        name: Some(name),
        socket,
        disk,
        memory_max: common.memory_max.unwrap_or(quota::DEVICE_BYTES_DEFAULT),
        allow_slow_memory: common.allow_slow_memory.unwrap_or(false),
        weight: common.weight.unwrap_or(1),
    };
    Ok((device, lines))
}

/// `path` by its directory's real name, so that two ways to write it are the same.
fn real(path: &Path) -> PathBuf {
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    match (directory.unwrap_or(Path::new(".")).canonicalize(), path.file_name()) {
        (Ok(directory), Some(name)) => directory.join(name),
        _ => path.to_owned(),
    }
}

fn parse_kind(text: &str) -> Result<(), String> {
    if text == "blk" { Ok(()) } else { Err("the only kind of device is blk".into()) }
}

fn parse_device_name(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:@".contains(&byte);
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.bytes().all(allowed) {
        return Err(format!("it must be 1 to {NAME_BYTES_MAX} letters, digits and . _ - : @"));
    }
    Ok(text.into())
}

fn not_empty(text: &str) -> Result<&str, String> {
    if text.is_empty() { Err("it is empty: give it a value or leave it out".into()) } else { Ok(text) }
}

#[cfg(test)]
mod tests;
