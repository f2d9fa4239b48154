//! The only file that knows which parts there are: it makes devices of what was asked for.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use kickless_blk::Blk;
use kickless_disk::{Disk, DiskSpec, lock};
use kickless_io::{EngineOptions, OWNERS_MAX};
use kickless_memory::Mapper;
use kickless_memory::quota::AddressSpace;
use kickless_values::CpuList;
use kickless_vhost::Server;
use kickless_worker::Pool;
use tracing::{info, warn};

use crate::serve::in_spans;
use crate::service::{self, Device, Said, Service};

/// Operations that a worker can have in flight, beside the reserve of each device. Its queues may hold more requests; they wait
/// their turn.
const ENGINE_DEPTH: u32 = 1024;

/// A disk behind its server.
pub(crate) struct Served {
    /// The disk.
    pub(crate) disk: Arc<Blk>,
    /// What serves it.
    pub(crate) server: Server,
}

/// All that a service needs but its sockets.
pub(crate) struct Parts {
    /// The workers.
    pub(crate) pool: Arc<Pool>,
    /// The disks behind their servers, in the order of the service's devices.
    pub(crate) served: Vec<Served>,
}

/// Opens the disks, starts the workers and puts each disk with its share of them behind a server.
///
/// # Errors
/// Something that is asked for cannot be had: one sentence.
pub(crate) fn parts(service: &Service) -> Result<Parts> {
    check_cpus(&service.pool.cpus, service.said)?;
    let disks = in_spans(service, |device| disk(device, service.said))?;
    warn_of_shared_images(&disks, service);
    let pool = pool(&service.pool, service.devices.len())?;
    let space = Arc::new(AddressSpace::default());
    let served = disks.into_iter().zip(&service.devices).map(|(disk, device)| {
        let disk = Arc::new(disk);
        let server =
            Server::new(disk.clone(), pool.executor(device.weight)).with_mapper(mapper(&space, device));
        Served { server, disk }
    });
    Ok(Parts { served: served.collect(), pool })
}

/// Returns the mapper of the memory of a device's front-ends.
fn mapper(space: &Arc<AddressSpace>, device: &Device) -> Mapper {
    let mapper = Mapper::within(space.join(device.memory_max));
    if device.allow_slow_memory { mapper } else { mapper.only_at_hand() }
}

/// The file in which the kernel lists the CPUs that run, as in `--cpu`.
const CPUS_ONLINE: &str = "/sys/devices/system/cpu/online";

fn check_cpus(cpus: &[usize], said: Said) -> Result<()> {
    // Where the host does not say, the workers try.
    let Ok(online) = fs::read_to_string(CPUS_ONLINE) else { return Ok(()) };
    let online = online.trim();
    let Ok(CpuList(here)) = online.parse() else { return Ok(()) };
    match cpus.iter().find(|cpu| !here.contains(cpu)) {
        None => Ok(()),
        Some(cpu) => {
            let option = if said == Said::File { "[pool]: cpu".into() } else { said.option("cpu") };
            bail!(
                "{option}: CPU {cpu} does not exist or is offline: this machine has {online}, name some of these"
            )
        }
    }
}

fn pool(of: &service::Pool, devices: usize) -> Result<Arc<Pool>> {
    let options = kickless_worker::Options {
        workers: of.workers.into(),
        engine: EngineOptions {
            kind: of.engine,
            depth: ENGINE_DEPTH,
            owners: u32::try_from(devices).unwrap_or(OWNERS_MAX),
            completion: of.completion,
            sqpoll: of.sqpoll,
            fixed_buffers: of.fixed_buffers,
        },
        cpus: of.cpus.clone(),
        poll: of.poll,
        call_coalesce: of.call_coalesce,
    };
    let pool = Pool::start(&options).context("the workers cannot be started")?;
    info!(workers = of.workers, poll = ?of.poll, call_coalesce = ?of.call_coalesce, "pool");
    Ok(Arc::new(pool))
}

/// Warns of devices that have the same image. They can be used in turns, so this is no error.
fn warn_of_shared_images(disks: &[Blk], service: &Service) {
    let images = disks.iter().zip(&service.devices).map(|(disk, device)| {
        let of = &device.disk;
        let file = disk.disk().file().filter(|_| of.lock && !of.incoming);
        file.and_then(|file| file.metadata().ok()).map(|file| ((file.dev(), file.ino()), device))
    });
    let images: Vec<_> = images.flatten().collect();
    for (at, (image, device)) in images.iter().enumerate() {
        let other = images[..at].iter().find(|(other, _)| other == image);
        if let Some((_, other)) = other.filter(|(_, other)| !(device.disk.read_only && other.disk.read_only))
        {
            let other = other.name.as_deref().unwrap_or_default();
            device.span().in_scope(|| {
                warn!(other, image = %device.disk.blk_file, "two devices have the same blk-file: only one can be \
                    used at a time; give each its own, or set read-only for both");
            });
        }
    }
}

/// Adds to a sentence about a file that is missing what its name was perhaps meant to be.
fn hint(error: anyhow::Error, of: &DiskSpec) -> anyhow::Error {
    let DiskSpec::File(path) = of else { return error };
    if path.exists() {
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
    anyhow!("{}: {what}", crate::sentence(&error))
}

fn disk(device: &Device, said: Said) -> Result<Blk> {
    let of = &device.disk;
    let option = || device.option(said, "blk-file");
    let options = kickless_disk::Options { read_only: of.read_only, cache: of.cache, merge: of.merge };
    let disk = Disk::open(&of.blk_file, &options)
        .map_err(|error| hint(error.into(), &of.blk_file))
        .with_context(option)?;
    if let (Some(file), Some(path), true, false) = (disk.file(), of.blk_file.path(), of.lock, of.incoming) {
        lock::check_within(file, of.read_only, lock::PATIENCE)
            .with_context(|| format!("{}: {} cannot be locked", option(), path.display()))?;
    }
    if of.lock && !of.incoming {
        disk.check_own_lock().with_context(|| format!("{}: {} cannot be locked", option(), of.blk_file))?;
    }
    let serial = of.serial.clone().unwrap_or_else(|| disk.identity().to_owned());
    let (queues_max, queue_size_max) = (of.num_queues, of.queue_size);
    Ok(Blk::new(disk, kickless_blk::Options { serial, queues_max, queue_size_max, lock: of.lock }))
}
