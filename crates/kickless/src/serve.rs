//! `kickless blk`: from the command line to the last request.

use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use kickless_vhost::Ended;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::info;

use crate::cli::{BlkFile, BlkOptions};
use crate::listen::{Address, Endpoint};
use crate::{stop, wire};

/// Where front-ends are to come from.
enum Origin {
    Inherited(Endpoint),
    Path(Address),
}

/// Serves the disk until a signal comes, or until the only front-end has left where there is but one.
///
/// # Errors
/// It cannot be served, or not any longer: one sentence.
pub(crate) fn blk(options: &BlkOptions) -> Result<()> {
    // First: a descriptor that we opened ourselves must not be mistaken for one that was passed on to us.
    let origin = match (options.fd, &options.socket_path) {
        (Some(fd), _) => Origin::Inherited(Endpoint::inherit(fd)?),
        (None, Some(path)) => {
            Origin::Path(Address::new(path, options.socket_mode, options.socket_group.as_deref())?)
        }
        (None, None) => bail!("give either --socket-path or --fd"),
    };
    let stop = stop::on_signal()?;
    raise_descriptor_limit();
    let server = wire::blk(options)?;
    // Last: a socket that is there is one that is served.
    let endpoint = match origin {
        Origin::Inherited(endpoint) => endpoint,
        Origin::Path(address) => address.bind()?,
    };
    info!(version = env!("CARGO_PKG_VERSION"), disk = %name(&options.blk_file), "serving");
    let served = match endpoint {
        Endpoint::Listening(listener) => {
            server.serve(&listener.socket, stop.as_fd()).context("no front-end can be served any more")
        }
        Endpoint::Connected(connection) => match server.serve_connection(connection, stop.as_fd()) {
            Ok(()) | Err(Ended::Stopped) => Ok(()),
            Err(ended) => Err(ended).context("the connection of --fd was dropped"),
        },
    };
    server.statistics().log();
    served
}

/// Each queue and each piece of guest memory takes descriptors, and the limit on them is low for the sake of programs that
/// use `select`.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where this is refused, the limit that there is may do.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

fn name(disk: &BlkFile) -> String {
    match disk {
        BlkFile::Path(path) => path.display().to_string(),
        BlkFile::Null(bytes) => format!("null:{bytes}"),
        BlkFile::Memory(bytes) => format!("mem:{bytes}"),
    }
}
