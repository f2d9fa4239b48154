//! The process that takes over.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use kickless_control::{CHANNEL, Client};
use kickless_daemon::{Beside, FORMATS, Registry, TakenOver, take_over};
use kickless_opener::peer;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::geteuid;
use serde_json::json;
use tracing::{info, warn};

use super::background;
use crate::cli::UpgradeOptions;
use crate::reload::Reload;

/// The longest time that the running daemon has for the answer to the call.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// The longest time that the other process has to end, after this one serves.
const END_WAIT: Duration = Duration::from_secs(60);

/// A connection to the daemon that this process takes over from. Made before the process loses its rights.
pub(crate) struct Upgrade {
    client: Client,
    /// The end of the channel for the other process, and that of this one.
    theirs: OwnedFd,
    own: OwnedFd,
    drain: String,
}

impl Upgrade {
    /// Connects to the daemon, if there is one to take over from.
    ///
    /// # Errors
    /// No daemon of this user listens there. The error is one sentence that names the option.
    pub(crate) fn connect(options: &UpgradeOptions) -> Result<Option<Self>> {
        let Some(path) = &options.upgrade_from else { return Ok(None) };
        let connected = Self::to(path, &options.upgrade_drain.0);
        connected.map(Some).with_context(|| format!("--upgrade-from={}", path.display()))
    }

    /// Connects to the daemon of this control socket. Requests in flight have the time `drain` to complete.
    ///
    /// # Errors
    /// No daemon of this user listens there.
    pub(crate) fn to(path: &Path, drain: &str) -> Result<Self> {
        let client = Client::connect(path)?;
        let (uid, own) = (peer(&client)?.uid, geteuid().as_raw());
        if uid != own {
            // As root, this process would open what a process with fewer rights names.
            bail!("its daemon is that of user {uid}: start this one as that user, and not as user {own}");
        }
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (own, theirs) = pair.context("no free descriptor")?;
        // Its limits cannot be set later: a filter of system calls has no such call.
        let client = client.within(ANSWER_WAIT)?;
        Ok(Self { client, theirs, own, drain: drain.to_owned() })
    }

    /// Returns the descriptors that helper processes must not keep.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.client.as_fd(), self.theirs.as_fd(), self.own.as_fd()].into_iter().chain(background::fd())
    }

    /// Takes all devices over, and serves them. The registry has none. Calls `prepare` before the other
    /// daemon stops anything, and gives up if that fails.
    ///
    /// # Errors
    /// The other daemon goes on. This process ends now, without destructors. The error is one sentence.
    pub(crate) fn take_over(
        self,
        registry: &Arc<Registry>,
        prepare: &mut dyn FnMut(&Beside) -> Result<(), String>,
        has_taken: &Mutex<bool>,
    ) -> Result<TakenOver> {
        let channel = self.begin(false)?;
        take_over(registry, channel, prepare, background::check, has_taken)
            .map_err(|why| anyhow!("the running daemon goes on: {why}"))
    }

    /// Asks the daemon to hand all devices over, and returns the channel to it. `to_store`: this process only
    /// keeps them.
    ///
    /// # Errors
    /// It refuses. The error is one sentence.
    pub(crate) fn begin(self, to_store: bool) -> Result<OwnedFd> {
        let Self { mut client, theirs, own, drain } = self;
        let params = json!({
            "formats": [FORMATS.start(), FORMATS.end()],
            "version": env!("CARGO_PKG_VERSION"),
            "drain": drain,
            "store": to_store,
        });
        let params = params.as_object().cloned().unwrap_or_default();
        let asked = client.call_given("daemon.upgrade", params, &[(CHANNEL.to_owned(), theirs.as_fd())]);
        asked.context("the running daemon does not hand its devices over")?;
        // From here on, the end of the other process is the end of the channel.
        drop((client, theirs));
        Ok(own)
    }
}

/// The end of an upgrade in the process that has taken over.
pub(crate) struct UpgradeEnd(pub(crate) TakenOver);

impl UpgradeEnd {
    /// Logs the upgrade, and reads the configuration file when the other process has ended. The file can have
    /// other devices than that process.
    ///
    /// # Errors
    /// The process cannot start a thread.
    pub(crate) fn finish(self, reload: Option<Reload>) -> Result<()> {
        let TakenOver { version, devices, prepared, stall, taken, .. } = self.0;
        let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
        match taken {
            Some(_) => info!(devices, version, stall_ms = ms(stall), prepared_ms = ms(prepared), "took over"),
            None => info!(devices, version, stall_ms = ms(stall), "took over from the store"),
        }
        let run = move || {
            background::serves();
            if let Some(taken) = taken {
                taken.release();
                if !taken.wait_for_end(Instant::now() + END_WAIT) {
                    warn!("the process that served before has not ended yet");
                }
            }
            if let Some(reload) = reload {
                // The thread logs the result.
                let _ = reload.call_at_start();
            }
            background::done();
        };
        thread::Builder::new().name("upgrade".into()).spawn(run).context("cannot start a thread")?;
        Ok(())
    }
}
