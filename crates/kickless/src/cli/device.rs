//! The command lines that serve one device, such as `kickless blk`.

use clap::Args;
use kickless_daemon::{
    DeviceConfig, Identity, KindConfig, Mistake, Notation, PoolConfig, ServeConfig, Share,
};

use crate::service::Service;

use super::control::ControlOptions;
use super::sandbox::SandboxOptions;
use super::upgrade::UpgradeOptions;

/// The name of a device with an inherited socket, for calls.
const INHERITED: &str = "fd";

/// The options of a command that serves one device, without those of its kind.
#[derive(Debug, Args)]
pub(crate) struct DeviceOptions {
    #[command(flatten)]
    serve: ServeConfig,
    /// Use the inherited socket with this number, which listens or is connected. The program ends when a
    /// connected socket is closed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    #[arg(conflicts_with_all = ["socket_path", "socket_mode", "socket_group"])]
    fd: Option<i32>,
    #[command(flatten)]
    pool: PoolConfig,
    /// Print the capabilities of this back-end as JSON and exit
    #[arg(long)]
    print_capabilities: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    sandbox: SandboxOptions,
}

impl DeviceOptions {
    /// Returns the service of this one device.
    ///
    /// # Errors
    /// Some options cannot be combined.
    pub(crate) fn service(self, kind: KindConfig) -> Result<Service, Mistake> {
        let notation = Notation::CommandLine;
        let (pool, control, sandbox) = (self.pool, self.control, self.sandbox);
        let mut device =
            DeviceConfig { kind, identity: Identity::default(), serve: self.serve, share: Share::default() };
        pool.worker_options(1, notation)?;
        if self.fd.is_none() && device.serve.socket_path.is_none() {
            return Err(Mistake::new("socket-path", "give it, or --fd"));
        }
        device.check(notation)?;
        device.check_has_no_descriptors()?;
        if control.is_on() {
            // Calls name devices. An inherited socket has no name.
            match self.fd {
                Some(_) => device.identity.name = Some(INHERITED.into()),
                None => device.name_by_socket()?,
            }
        }
        let devices = vec![device];
        let (fd, upgrade) = (self.fd, UpgradeOptions::default());
        Ok(Service {
            notation,
            pool,
            devices,
            file: None,
            fd,
            control,
            sandbox,
            upgrade,
            all_or_nothing: true,
        })
    }
}
