//! The command line of `kickless blk`.

use clap::Args;
use kickless_daemon::{DeviceConfig, Mistake, Notation, PoolConfig};

use crate::service::Service;

/// `kickless blk`.
#[derive(Debug, Args)]
pub(crate) struct BlkOptions {
    #[command(flatten)]
    device: DeviceConfig,
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

impl BlkOptions {
    /// Returns a service that has one device.
    ///
    /// # Errors
    /// Options do not go together.
    pub(crate) fn service(self) -> Result<Service, Mistake> {
        let notation = Notation::CommandLine;
        let (pool, device) = (self.pool, self.device);
        pool.worker_options(1, notation)?;
        if self.fd.is_none() && device.socket_path.is_none() {
            return Err(Mistake { option: "socket-path", why: "give it, or --fd".into() });
        }
        device.check(notation)?;
        Ok(Service { notation, pool, devices: vec![device], fd: self.fd })
    }
}
