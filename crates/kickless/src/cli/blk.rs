//! The command line of `kickless blk`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use kickless_disk::{Cache, DiskSpec};
use kickless_values::parse_queue_size;

use super::pool::PoolOptions;
use super::values::{
    NUM_QUEUES, QUEUE_SIZE, Switch, parse_blk_file, parse_memory_max, parse_mode, parse_num_queues,
    parse_serial,
};
use crate::service::{Device, Disk, Mistake, Said, Service, Socket};

/// `kickless blk`.
#[derive(Debug, Args)]
pub(crate) struct BlkOptions {
    /// Listen on this unix socket
    #[arg(long, value_name = "PATH", conflicts_with = "fd", required_unless_present = "fd")]
    socket_path: Option<PathBuf>,
    /// Use this inherited socket, which listens or is connected; when a connected one is closed, the program ends
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    fd: Option<i32>,
    /// The disk: a file or block device; qcow2:PATH is an image in QEMU's format; nbd://HOST:PORT/EXPORT and
    /// nbd+unix:///EXPORT?socket=PATH are exports of an NBD server; rbd:POOL/IMAGE is an image of a Ceph cluster;
    /// null:SIZE answers at once and stores nothing; mem:SIZE is a RAM disk; fault:RULES:DISK is one of these with
    /// faults, for tests
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().try_map(parse_blk_file))]
    blk_file: DiskSpec,
    /// Let guests read only
    #[arg(long)]
    read_only: bool,
    /// What the disk calls itself, 20 bytes at most [default: something that tells it from the others here]
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    serial: Option<String>,
    /// The most queues a virtual machine may use
    #[arg(long, value_name = "N", default_value_t = NUM_QUEUES, value_parser = parse_num_queues)]
    num_queues: u16,
    /// The most requests a queue may hold, a power of two
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE, value_parser = parse_queue_size)]
    queue_size: u16,
    /// Whether the host's page cache is used: none or writeback
    #[arg(long, value_name = "MODE", default_value_t = Cache::None, value_parser = str::parse::<Cache>)]
    cache: Cache,
    /// Whether neighbouring requests that come together are one for the kernel
    #[arg(long, value_enum, default_value_t = Switch::On)]
    merge: Switch,
    /// Whether to lock the disk against other users, as QEMU does
    #[arg(long, value_enum, default_value_t = Switch::On)]
    lock: Switch,
    /// A virtual machine will be migrated in: another host may still be using the disk at start-up
    #[arg(long)]
    incoming: bool,
    /// The most guest memory and what belongs to it that may be mapped at a time
    #[arg(long, value_name = "SIZE", default_value = "16T", value_parser = parse_memory_max)]
    memory_max: u64,
    /// Accept guest memory on file systems that may never answer, such as FUSE or NFS
    #[arg(long)]
    allow_slow_memory: bool,
    #[command(flatten)]
    pool: PoolOptions,
    /// The permissions of the socket, such as 0660
    #[arg(long, value_name = "OCTAL", conflicts_with = "fd", value_parser = parse_mode)]
    socket_mode: Option<u32>,
    /// The group of the socket, by name or number
    #[arg(long, value_name = "GROUP", conflicts_with = "fd")]
    socket_group: Option<String>,
    /// Say in JSON what this back-end can do, and do nothing else
    #[arg(long)]
    print_capabilities: bool,
}

impl BlkOptions {
    /// What they amount to: a pool that has one device.
    ///
    /// # Errors
    /// They do not go together.
    pub(crate) fn service(self) -> Result<Service, Mistake> {
        let said = Said::CommandLine;
        let pool = self.pool.pool(said)?;
        let socket = match (self.fd, self.socket_path) {
            (Some(fd), _) => Socket::Inherited(fd),
            (None, Some(path)) => Socket::Path { path, mode: self.socket_mode, group: self.socket_group },
            (None, None) => {
                return Err(Mistake { option: "socket-path", why: "give it, or --fd".into() });
            }
        };
        let disk = Disk {
            blk_file: self.blk_file,
            read_only: self.read_only,
            serial: self.serial,
            num_queues: self.num_queues,
            queue_size: self.queue_size,
            cache: self.cache,
            merge: self.merge == Switch::On,
            lock: self.lock == Switch::On,
            incoming: self.incoming,
        };
        disk.check(said)?;
        let (memory_max, allow_slow_memory) = (self.memory_max, self.allow_slow_memory);
        let device = Device { name: None, socket, disk, memory_max, allow_slow_memory, weight: 1 };
        Ok(Service { said, pool, devices: vec![device] })
    }
}
