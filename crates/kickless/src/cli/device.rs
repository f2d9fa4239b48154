//! The command lines of `kickless blk` and `kickless net`.

use clap::Args;
use kickless_daemon::{DeviceConfig, DeviceKind, Mistake, Notation, PoolConfig, ServeConfig};

use crate::service::Service;

/// A command that serves one device. `K` has the options of the device's kind.
#[derive(Debug, Args)]
pub(crate) struct DeviceOptions<K: Args> {
    #[command(flatten)]
    kind: K,
    #[command(flatten)]
    serve: ServeConfig,
    /// Use this inherited socket, which listens or is connected; when a connected one is closed, the program ends
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    #[arg(conflicts_with_all = ["socket_path", "socket_mode", "socket_group"])]
    fd: Option<i32>,
    #[command(flatten)]
    pool: PoolConfig,
    /// Say in JSON what this back-end can do, and do nothing else
    #[arg(long)]
    print_capabilities: bool,
}

impl<K: Args> DeviceOptions<K> {
    /// Returns a service that has one device, of the kind that `kind` makes of its options.
    ///
    /// # Errors
    /// Options do not go together.
    pub(crate) fn service(self, kind: fn(K) -> DeviceKind) -> Result<Service, Mistake> {
        let notation = Notation::CommandLine;
        let (pool, device) = (self.pool, DeviceConfig { kind: kind(self.kind), serve: self.serve });
        pool.worker_options(1, notation)?;
        if self.fd.is_none() && device.serve.socket_path.is_none() {
            return Err(Mistake { option: "socket-path", why: "give it, or --fd".into() });
        }
        device.check(notation)?;
        Ok(Service { notation, pool, devices: vec![device], fd: self.fd })
    }
}
