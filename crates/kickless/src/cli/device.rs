//! The command lines that serve one device, such as `kickless blk`.

use clap::Args;
use kickless_daemon::{
    DeviceConfig, Identity, KindConfig, Mistake, Notation, PoolConfig, ServeConfig, Share,
};
use kickless_values::parse_number;

use crate::inherited;
use crate::service::{InheritedSocket, Lines, Service};

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
    #[arg(long, value_name = "N", value_parser = parse_fd)]
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
        let fd = match self.fd {
            Some(fd) => Some(InheritedSocket::Fd(fd)),
            None if device.serve.socket_path.is_some() => None,
            None => Some(only_passed()?),
        };
        device.check(notation)?;
        device.check_has_no_descriptors()?;
        if control.is_on() {
            // Calls name devices. An inherited socket has no name.
            match fd {
                Some(_) => device.identity.name = Some(INHERITED.into()),
                None => device.name_by_socket()?,
            }
        }
        let devices = vec![device];
        let upgrade = UpgradeOptions::default();
        Ok(Service {
            notation,
            pool,
            devices,
            file: None,
            lines: Lines::default(),
            without_socket: Vec::new(),
            fd,
            control,
            sandbox,
            upgrade,
            all_or_nothing: true,
        })
    }
}

/// Parses the number of an inherited descriptor.
fn parse_fd(text: &str) -> Result<i32, String> {
    parse_number(text, inherited::FIRST as u32, i32::MAX as u32)
}

/// Returns the only socket that the service manager has passed.
///
/// # Errors
/// It has passed none, or several.
fn only_passed() -> Result<InheritedSocket, Mistake> {
    match inherited::passed_count() {
        0 => Err(Mistake::new("socket-path", "this command needs it, or --fd")),
        1 => Ok(InheritedSocket::OfManager(inherited::FIRST)),
        count => {
            let why = format!("this command needs it, or --fd: it serves one socket, and LISTEN_FDS={count}");
            Err(Mistake::new("socket-path", why))
        }
    }
}
