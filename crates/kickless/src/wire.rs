//! Makes devices from their configuration. Only this file knows the kinds of devices.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result, anyhow, bail};
use kickless_blk::Blk;
use kickless_daemon::{
    BlkConfig, DeviceConfig, DeviceKind, MakeError, NetConfig, Notation, OnError, PoolConfig, Registry,
    Switch, sentence,
};
use kickless_device::{Device, Limiter, Limits};
use kickless_disk::{Disk, DiskSpec, lock};
use kickless_io::OWNERS_MAX;
use kickless_net::Net;
use kickless_net_port::PortError;
use kickless_opener::Descriptors;
use kickless_values::{CpuList, MacAddress};
use kickless_worker::WorkerPool;
use tracing::{info, warn};

use crate::inherited::TapFds;
use crate::service::Service;

/// The file in which the kernel lists the online CPUs, in the syntax of `--cpu`.
const CPUS_ONLINE: &str = "/sys/devices/system/cpu/online";

/// Makes a registry for the devices of a service. Their ports can use the inherited `taps`.
///
/// # Errors
/// The process has no free descriptor.
pub(crate) fn registry(service: &Service, taps: TapFds) -> Result<Registry> {
    let images = Images::default();
    let (disk_groups, card_groups) = (Groups::default(), Groups::default());
    let make = move |config: &DeviceConfig, given: &Descriptors| match &config.kind {
        DeviceKind::Blk(blk) => {
            let disk = disk(blk, config.serve.queue_size, given)
                .map_err(|error| MakeError { option: "blk-file", source: error.into() })?;
            let device = Arc::new(
                disk.with_limiter(disk_groups.limiter(blk.limits.group.as_deref(), &blk.limits.limits()))
                    .with_stop_on_error(blk.on_error == OnError::Stop),
            );
            images.warn_of_shared(config.name(), blk, &device);
            Ok(device as Arc<dyn Device>)
        }
        DeviceKind::Net(net) => {
            let card = card(net, config.serve.queue_size, &taps, given);
            let card = card.map_err(|error| MakeError { option: "port", source: error.into() })?;
            let limiter = card_groups.limiter(net.limits.group.as_deref(), &net.limits.limits());
            let card = card.with_limiter(limiter);
            let capture = net.capture_to(config.name().unwrap_or("net"));
            card.set_capture(capture.as_ref())
                .map_err(|error| MakeError { option: "capture", source: error.0 })?;
            Ok(Arc::new(card) as Arc<dyn Device>)
        }
    };
    let devices_max = if service.control.is_on() { OWNERS_MAX as usize } else { service.devices.len() };
    Registry::new(devices_max, make).context("no free descriptor to wait with")
}

/// Starts the workers.
///
/// # Errors
/// The workers cannot be started. The error is one sentence.
pub(crate) fn pool(config: &PoolConfig, devices_max: usize, notation: Notation) -> Result<WorkerPool> {
    let options = config.worker_options(u32::try_from(devices_max).unwrap_or(u32::MAX), notation);
    let options =
        options.map_err(|mistake| anyhow!("{}: {}", notation.option(&mistake.option), mistake.why))?;
    let pool = WorkerPool::start(&options).context("the workers cannot be started")?;
    info!(workers = options.workers, poll = ?options.poll, call_coalesce = ?options.call_coalesce, "pool");
    Ok(pool)
}

/// Checks that this machine has these CPUs.
///
/// # Errors
/// A CPU does not exist or is offline. The error is one sentence.
pub(crate) fn check_cpus(cpus: &[usize], notation: Notation) -> Result<()> {
    // If the host does not list its CPUs, the workers find out when they start.
    let Ok(online) = kickless_opener::text(CPUS_ONLINE.as_ref()) else { return Ok(()) };
    let online = online.trim();
    let Ok(CpuList(here)) = online.parse() else { return Ok(()) };
    match cpus.iter().find(|cpu| !here.contains(cpu)) {
        None => Ok(()),
        Some(cpu) => {
            let option =
                if notation == Notation::Keys { "[pool]: cpu".into() } else { notation.option("cpu") };
            bail!(
                "{option}: CPU {cpu} does not exist or is offline: this machine has {online}, name some of these"
            )
        }
    }
}

/// The limiters of all groups.
#[derive(Default)]
struct Groups(Mutex<HashMap<String, Weak<Limiter>>>);

impl Groups {
    /// Returns the limiter of a device with these limits, which become those of its group.
    fn limiter(&self, group: Option<&str>, limits: &Limits) -> Arc<Limiter> {
        let limiter = match group {
            None => Arc::default(),
            Some(group) => {
                let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                groups.retain(|_, limiter| limiter.strong_count() > 0);
                let known = groups.get(group).and_then(Weak::upgrade);
                known.unwrap_or_else(|| {
                    let limiter = Arc::default();
                    groups.insert(group.to_owned(), Arc::downgrade(&limiter));
                    limiter
                })
            }
        };
        limiter.set(limits);
        limiter
    }
}

/// The images of all open disks.
#[derive(Default)]
struct Images(Mutex<Vec<Image>>);

struct Image {
    name: String,
    is_read_only: bool,
    /// Device and inode.
    file: (u64, u64),
    device: Weak<Blk>,
}

impl Images {
    /// Warns if another device has the same image. This is not an error, because the devices can be used one
    /// after the other.
    fn warn_of_shared(&self, name: Option<&str>, config: &BlkConfig, device: &Arc<Blk>) {
        let disk = device.disk();
        let file = disk.file().filter(|_| config.lock == Switch::On && !config.incoming);
        let Some(found) = file.and_then(|file| file.metadata().ok()) else { return };
        let (file, is_read_only) = ((found.dev(), found.ino()), config.read_only);
        let mut images = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        images.retain(|image| image.device.strong_count() > 0);
        let other = images.iter().find(|other| other.file == file);
        if let Some(other) = other.filter(|other| !(is_read_only && other.is_read_only)) {
            warn!(other = other.name, image = %config.blk_file, "two devices have the same blk-file: only one can be \
                used at a time; give each its own, or set read-only for both");
        }
        let name = name.unwrap_or_default().to_owned();
        images.push(Image { name, is_read_only, file, device: Arc::downgrade(device) });
    }
}

/// Adds a hint about the probable mistake to an error about a missing file.
fn hint(error: anyhow::Error, of: &DiskSpec) -> anyhow::Error {
    let DiskSpec::File(path) = of else { return error };
    if of.descriptor().is_some() || kickless_opener::status(path).is_ok() {
        return error;
    }
    let scheme = path.to_str().and_then(|path| path.split_once(':')).map(|(scheme, _)| scheme);
    let what = match scheme {
        Some("nbd") => "an NBD server is written nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH".into(),
        Some("file" | "raw") => "a raw image is written as its path alone".into(),
        Some(scheme) if scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+') => {
            format!("{scheme}: is no kind of disk, see kickless blk --help")
        }
        _ => "correct the path, or make the image first".into(),
    };
    anyhow!("{}: {what}", sentence(&*error))
}

fn disk(config: &BlkConfig, queue_size_max: u16, given: &Descriptors) -> Result<Blk> {
    let BlkConfig { blk_file, read_only, .. } = config;
    let (merge, lock) = (config.merge == Switch::On, config.lock == Switch::On);
    let options = kickless_disk::Options {
        read_only: *read_only,
        cache: config.cache,
        merge,
        cache_size: config.cache_size,
    };
    let disk = Disk::open_given(blk_file, &options, given).map_err(|error| hint(error.into(), blk_file))?;
    if lock && !config.incoming {
        if let (Some(file), Some(path)) = (disk.file(), blk_file.path()) {
            lock::check_within(file, *read_only, lock::LOCK_WAIT_MAX)
                .with_context(|| format!("{} cannot be locked", path.display()))?;
        }
        disk.check_own_lock().with_context(|| format!("{blk_file} cannot be locked"))?;
    }
    let serial = config.serial.clone().unwrap_or_else(|| disk.identity().to_owned());
    let queues_max = config.num_queues;
    let device = Blk::new(disk, kickless_blk::Options { serial, queues_max, queue_size_max, lock })
        .with_block_size(config.logical_block_size);
    config.blk_size.into_iter().for_each(|bytes| device.set_size_min(bytes));
    device.set_discard(config.discard == Switch::On);
    Ok(device)
}

fn card(
    config: &NetConfig,
    queue_size_max: u16,
    taps: &TapFds,
    given: &Descriptors,
) -> Result<Net, PortError> {
    let descriptor = |fd: &str| match fd.parse() {
        Ok(number) => taps.queue(number),
        Err(_) => Ok(given.duplicate(fd)?),
    };
    let pairs_max = config.pairs_max();
    Ok(Net::new(kickless_net::Options {
        mac: config.mac.map(MacAddress::bytes),
        mtu: config.mtu,
        pairs_max,
        queue_size_max,
        offload: config.offload == Switch::On,
        ring_reset: config.ring_reset == Switch::On,
        port: config.port.open(pairs_max, descriptor)?,
    }))
}
