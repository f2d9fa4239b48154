//! The only file that knows which parts there are: it makes a device of a command line.

use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_blk::Blk;
use kickless_device::Device;
use kickless_disk::lock;
use kickless_disk::{Disk, DiskSpec};
use kickless_vhost::Server;
use kickless_worker::Pool;

use crate::cli::{BlkFile, BlkOptions, Switch};

/// Operations that a worker can have in flight. Its queues may hold more requests; they wait their turn.
const ENGINE_DEPTH: u32 = 1024;

/// Opens the disk, starts the workers and puts the two behind a server.
///
/// # Errors
/// Something that the command line asks for cannot be had: one sentence.
pub(crate) fn blk(options: &BlkOptions) -> Result<Server> {
    let device: Arc<dyn Device> = Arc::new(device(options)?);
    let pool = kickless_worker::Options {
        workers: options.workers().into(),
        engine: options.engine,
        depth: ENGINE_DEPTH,
        cpus: options.cpu.clone().map_or_else(Vec::new, |list| list.0),
        poll: kickless_worker::Poll::default(),
        call_coalesce: None,
    };
    let pool = Arc::new(Pool::start(&pool).context("the workers cannot be started")?);
    Ok(Server::new(device, pool.place(1)))
}

fn device(options: &BlkOptions) -> Result<Blk> {
    let lock = options.lock == Switch::On;
    let spec = match &options.blk_file {
        BlkFile::Path(path) => DiskSpec::File(path.clone()),
        BlkFile::Null(bytes) => DiskSpec::Null(*bytes),
        BlkFile::Memory(bytes) => DiskSpec::Memory(*bytes),
    };
    let disk =
        Disk::open(&spec, &kickless_disk::Options { read_only: options.read_only, cache: options.cache })
            .context("--blk-file")?;
    if let (Some(file), BlkFile::Path(path), true, false) =
        (disk.file(), &options.blk_file, lock, options.incoming)
    {
        lock::check(file, options.read_only)
            .with_context(|| format!("--blk-file: {} cannot be locked", path.display()))?;
    }
    let serial = options.serial.clone().unwrap_or_else(|| disk.identity().to_owned());
    let (queues_max, queue_size_max) = (options.num_queues, options.queue_size);
    Ok(Blk::new(disk, kickless_blk::Options { serial, queues_max, queue_size_max, lock }))
}
