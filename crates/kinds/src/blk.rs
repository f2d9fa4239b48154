//! The kind `blk`: a disk.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use kickless_blk::{Blk, HandedDisk};
use kickless_daemon::{
    CaptureConfig, Kind, LimitWords, Limited, LimitsConfig, MakeError, Making, Mistake, Notation, Served,
    Settable, Switch, Words, show_name,
};
use kickless_device::{Handed, Operate};
use kickless_disk::{Cache, Disk, DiskSpec, SECTOR, lock, parse_disk_size};
use kickless_opener::Grant;
use kickless_spec::vhost_user::RINGS_MAX;
use kickless_values::{format_size, parse_number, parse_size_within};
use rustix::fs::fstat;
use serde::Serialize;
use serde_json::{Value, json};
use tracing::{info, warn};

/// Default of `num-queues`.
const NUM_QUEUES: u16 = 64;
/// Default of `logical-block-size`, and its smallest value: a sector.
const BLOCK_SIZE: u32 = SECTOR as u32;
/// The smallest page of a guest. Linux before 6.15 refuses a disk whose blocks are larger than a page.
const BLOCK_SIZE_MAX: u32 = 4096;
/// VIRTIO_BLK_T_GET_ID answers with this many bytes (virtio 1.3, section 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;
/// The smallest cache of L2 tables that has an effect: 16 pieces of 4 KiB.
const CACHE_BYTES_MIN: u64 = 64 << 10;
/// The L2 tables of 512 TiB in clusters of 64 KiB. A larger cache is a mistake.
const CACHE_BYTES_MAX: u64 = 64 << 30;

/// The options of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Disk")]
#[serde(rename_all = "kebab-case")]
pub struct BlkConfig {
    /// The disk: the path of a raw image or block device; qcow2:PATH for an image in QEMU's format;
    /// nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH for an export of an NBD server;
    /// rbd:POOL/IMAGE for an image of a Ceph cluster; null:SIZE for a disk that stores nothing; mem:SIZE for
    /// a RAM disk; fault:RULES:DISK for one of these with injected faults, for tests
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().try_map(|text| DiskSpec::parse(&text)))]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub blk_file: DiskSpec,
    /// Grow a qcow2 image to this size if it is smaller [default: the image keeps its size]
    #[arg(long, value_name = "SIZE", value_parser = parse_blk_size)]
    #[serde(serialize_with = "kickless_daemon::text::optional", skip_serializing_if = "Option::is_none")]
    pub blk_size: Option<u64>,
    /// Logical block size that guests see, a power of two from 512 to 4096
    #[arg(long, value_name = "BYTES", default_value_t = BLOCK_SIZE, value_parser = parse_block_size)]
    pub logical_block_size: u32,
    /// Refuse writes of guests
    #[arg(long)]
    pub read_only: bool,
    /// Serial number that guests read, 20 bytes at most [default: derived from the disk]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Maximum number of queues that a virtual machine can use
    #[arg(long, value_name = "N", default_value_t = NUM_QUEUES, value_parser = parse_num_queues)]
    pub num_queues: u16,
    /// Use of the host's page cache: none bypasses it, writeback uses it
    #[arg(long, value_name = "MODE", default_value_t = Cache::None, value_parser = str::parse::<Cache>)]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub cache: Cache,
    /// Maximum memory for the L2 tables of a qcow2 image and its chain, from 64K to 64G [default: 32M each]
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_size)]
    #[serde(serialize_with = "kickless_daemon::text::optional", skip_serializing_if = "Option::is_none")]
    pub cache_size: Option<u64>,
    /// Give space back to the host when a guest discards data; off keeps what is allocated
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub discard: Switch,
    /// Lock the disk against use by other processes, as QEMU does
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub lock: Switch,
    /// Expect a virtual machine to be migrated to this host: another host may still use the disk at start-up
    #[arg(long)]
    pub incoming: bool,
    /// Treatment of a full file system and of a remote disk that is away: report the error to the guest, or
    /// stop the disk until device.resume
    #[arg(long, value_enum, value_name = "report|stop", hide_possible_values = true, default_value_t = OnError::Report)]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub on_error: OnError,
    /// The limits of requests.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitsConfig<Requests>,
}

/// The requests of a disk, whose limits have QEMU's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests;

impl Limited for Requests {
    const WORDS: LimitWords = LimitWords {
        unit: "iops",
        units: "requests",
        directions: ["", "-read", "-write"],
        rates: ["{} a second", "{} a second, reads only", "{} a second, writes only"],
        bursts: ["{} a second"; 3],
        unit_size: Some((
            "iops-size",
            "Count a request as one for each of this number of bytes [default: each request is one]",
        )),
        sharing: "devices",
    };
}

/// The treatment of an error that an operator can mend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnError {
    /// `report`: the guest gets the error.
    Report,
    /// `stop`: the device stops until it is resumed.
    Stop,
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_name(*self, f)
    }
}

fn parse_serial(text: &str) -> Result<String, String> {
    if text.len() > SERIAL_BYTES_MAX {
        return Err(format!(
            "it has {} bytes, and {SERIAL_BYTES_MAX} are the most: use a shorter one",
            text.len()
        ));
    }
    if !text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Err("only printable ASCII characters can be sent to a guest".into());
    }
    Ok(text.into())
}

fn parse_num_queues(text: &str) -> Result<u16, String> {
    parse_number(text, 1, RINGS_MAX.into())
}

/// Parses the size that a disk has at least. The maximum is that of a file.
fn parse_blk_size(text: &str) -> Result<u64, String> {
    parse_disk_size(text).map_err(|error| error.to_string())
}

/// Parses the size of a logical block.
fn parse_block_size(text: &str) -> Result<u32, String> {
    let bytes: u32 = parse_number(text, BLOCK_SIZE, BLOCK_SIZE_MAX)?;
    bytes.is_power_of_two().then_some(bytes).ok_or_else(|| "it must be a power of two".into())
}

/// Parses the size of the cache of L2 tables.
fn parse_cache_size(text: &str) -> Result<u64, String> {
    parse_size_within(text, CACHE_BYTES_MIN, CACHE_BYTES_MAX)
}

/// The kind `blk`.
#[derive(Debug, Default)]
pub struct BlkKind {
    images: Images,
}

impl Kind for BlkKind {
    type Options = BlkConfig;
    type Limited = Requests;

    const WORDS: Words = Words {
        name: "blk",
        key: "blk-file",
        one: "a disk",
        several: "disks",
        has_latencies: true,
        examples: &[
            (
                "Serve a raw image to members of the group kvm:",
                "kickless blk --socket-path=/run/kickless/web.sock --socket-mode=0660 --socket-group=kvm \
                 --blk-file=/srv/images/web.img",
            ),
            (
                "Serve an export of an NBD server:",
                "kickless blk --socket-path=/run/kickless/web.sock --blk-file=nbd://storage.example/web",
            ),
        ],
    };
    const OWN_KEYS: &'static [&'static str] = &["blk-file", "blk-size", "serial"];
    const SETTABLE: &'static [Settable<BlkConfig>] = &[Settable {
        key: "discard",
        take: |options, wanted| options.discard = wanted.discard,
        apply: |options, device| device.set_discard(options.discard == Switch::On),
    }];

    /// Returns the features of QEMU's `VHostUserBackendBlockFeature`.
    fn capabilities() -> Value {
        json!({ "type": "block", "features": ["read-only", "blk-file"] })
    }

    fn check(options: &BlkConfig, notation: Notation) -> Result<(), Mistake> {
        options.limits.check(notation)?;
        if options.incoming && options.blk_file.is_of_process() {
            let why = format!(
                "it needs a {} that another host can use, not null: or mem:",
                notation.option("blk-file")
            );
            return Err(Mistake::new("incoming", why));
        }
        if options.blk_size.is_some() {
            let why = if !options.blk_file.is_qcow2() {
                "only a qcow2: image grows by it; make a file or a device longer yourself, and send SIGHUP"
            } else if options.read_only {
                "a read-only image cannot grow"
            } else {
                return Ok(());
            };
            return Err(Mistake::new("blk-size", why));
        }
        Ok(())
    }

    fn descriptors(options: &BlkConfig) -> Vec<(&'static str, &str)> {
        options.blk_file.descriptor().map(|name| ("blk-file", name)).into_iter().collect()
    }

    fn inherited(_: &BlkConfig) -> Vec<(&'static str, i32)> {
        Vec::new()
    }

    fn grants(options: &BlkConfig) -> Vec<Grant> {
        let target = options.blk_file.target(!options.read_only);
        target.map(|to| Grant { option: "blk-file", to }).into_iter().collect()
    }

    fn log_served(options: &BlkConfig, of: &Served) {
        info!(
            version = of.version,
            disk = %options.blk_file,
            format = options.blk_file.format(),
            size = of.size.map(format_size),
            read_only = options.read_only,
            cache = %options.cache,
            lock = %options.lock,
            queues = options.num_queues,
            queue_size = of.queue_size,
            socket = of.socket,
            mode = of.socket_mode,
            owner = of.socket_owner,
            "serving"
        );
    }

    fn limits(options: &mut BlkConfig) -> &mut LimitsConfig<Requests> {
        &mut options.limits
    }

    fn size_min(options: &mut BlkConfig) -> Option<&mut Option<u64>> {
        Some(&mut options.blk_size)
    }

    fn capture(_: &mut BlkConfig) -> Option<&mut CaptureConfig> {
        None
    }

    fn make(&self, options: &BlkConfig, making: &Making<'_>) -> Result<Arc<dyn Operate>, MakeError> {
        let failed = |error: anyhow::Error| MakeError { option: "blk-file", source: error.into() };
        let handed = making.handed.take();
        let is_handed = handed.is_some();
        let disk = match handed {
            Some(handed) => handed_disk(options, making, handed),
            None => disk(options, making),
        };
        let device = Arc::new(disk.map_err(failed)?);
        self.images.add(making.name, options, &device, is_handed);
        Ok(device)
    }
}

/// The images of all open disks.
#[derive(Debug, Default)]
struct Images(Mutex<Vec<Image>>);

#[derive(Debug)]
struct Image {
    name: String,
    is_read_only: bool,
    /// Device and inode.
    file: (u64, u64),
    device: Weak<Blk>,
}

impl Images {
    /// Adds the image of a device, and warns if another device has the same. This is not an error, because
    /// the devices can be used one after the other. `is_handed`: another process has warned of it.
    fn add(&self, name: Option<&str>, config: &BlkConfig, device: &Arc<Blk>, is_handed: bool) {
        let disk = device.disk();
        let file = disk.file().filter(|_| config.lock == Switch::On && !config.incoming);
        let Some(found) = file.and_then(|file| fstat(file).ok()) else { return };
        let (file, is_read_only) = ((found.st_dev, found.st_ino), config.read_only);
        let mut images = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        images.retain(|image| image.device.strong_count() > 0);
        let other = images.iter().find(|other| other.file == file);
        let other = other.filter(|other| !(is_handed || is_read_only && other.is_read_only));
        if let Some(other) = other {
            warn!(other = other.name, image = %config.blk_file, "two devices have the same blk-file: only one can be \
                used at a time; give each its own, or set read-only for both");
        }
        let name = name.unwrap_or_default().to_owned();
        images.push(Image { name, is_read_only, file, device: Arc::downgrade(device) });
    }
}

/// Opens the disk of a device.
fn disk(config: &BlkConfig, making: &Making<'_>) -> Result<Blk> {
    let BlkConfig { blk_file, read_only, .. } = config;
    let lock = config.lock == Switch::On;
    let disk = Disk::open_given(blk_file, &disk_options(config), making.given)?;
    if lock && !config.incoming {
        if let (Some(file), Some(path)) = (disk.file(), blk_file.path()) {
            lock::check_within(file, *read_only, lock::LOCK_WAIT_MAX)
                .with_context(|| lock::cannot_be_locked(file, path))?;
        }
        disk.check_own_lock().with_context(|| format!("{blk_file} cannot be locked"))?;
    }
    let options = device_options(config, making, &disk);
    Ok(configured(config, Blk::new(disk, options)))
}

/// Makes the disk of a device that another process gives. That one has the locks.
fn handed_disk(config: &BlkConfig, making: &Making<'_>, handed: Handed<'_>) -> Result<Blk> {
    let handed = HandedDisk::new(&config.blk_file, &disk_options(config), handed)?;
    let options = device_options(config, making, &handed.disk);
    let device = configured(config, Blk::of_handed(handed, options));
    device.set_discard(config.discard == Switch::On);
    device.check_handed()?;
    Ok(device)
}

fn disk_options(config: &BlkConfig) -> kickless_disk::Options {
    let BlkConfig { read_only, cache, cache_size, .. } = *config;
    kickless_disk::Options { read_only, cache, cache_size }
}

fn device_options(config: &BlkConfig, making: &Making<'_>, disk: &Disk) -> kickless_blk::Options {
    let serial = config.serial.clone().unwrap_or_else(|| disk.identity().to_owned());
    let (queues_max, queue_size_max) = (config.num_queues, making.queue_size_max);
    kickless_blk::Options { serial, queues_max, queue_size_max, lock: config.lock == Switch::On }
}

/// Applies the options that do not come from the disk.
fn configured(config: &BlkConfig, device: Blk) -> Blk {
    let device = device
        .with_stop_on_error(config.on_error == OnError::Stop)
        .with_block_size(config.logical_block_size);
    config.blk_size.into_iter().for_each(|bytes| device.set_size_min(bytes));
    device
}
