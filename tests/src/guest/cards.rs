//! Two guests on one switch, one of which fetches a page of the host as a user without rights. The demo shows
//! them, and a test checks them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::NamedTempFile;

use crate::daemon::Daemon;
use crate::guest::qemu::{Guest, GuestConfig, NicConfig, Results};
use crate::guest::sha256;
use crate::page_server::PageServer;

/// Kernel option for the guests.
const QUIET: &str = "ipv6.disable=1";
/// The length of the page. A guest receives it in many frames.
const PAGE: usize = 1 << 20;
/// Limit for a step of a guest. It needs less, even on an emulated CPU of a busy host.
const LIMIT: Duration = Duration::from_secs(120);
/// The devices of the daemon: two cards on a switch, and one with the network of the user.
const DEVICES: [(&str, &str); 3] = [
    ("a", "port = \"switch:lan\"\nmac = \"52:54:00:00:00:0a\""),
    ("b", "port = \"switch:lan\"\nmac = \"52:54:00:00:00:0b\""),
    ("user", "port = \"user,-4\""),
];

/// The results of the guests, and the log of the daemon.
pub struct Outcome {
    /// The lines that the guest with two cards reported.
    pub results: Results,
    /// The log of the daemon, with the counters of the cards.
    pub log: Vec<String>,
}

/// Runs two guests. One sends to the other with iperf3 for this number of seconds, and fetches a page from
/// a web server at the host's loopback. The daemon has a pool of workers with these lines of its file. `say`
/// is called with each step.
///
/// # Errors
/// A guest does not start or fails, the page is another one, or the daemon does not end well.
pub fn run(pool: &str, seconds: u32, say: impl Fn(&str)) -> Result<Outcome> {
    let page: Vec<u8> = (0..PAGE).map(|n| (n / 7) as u8).collect();
    let copy = NamedTempFile::new()?;
    std::fs::write(copy.path(), &page)?;
    let server = PageServer::start(page)?;
    let daemon = Daemon::serve(pool, &DEVICES)?;
    say(&format!("kickless serves two cards on a switch, and one through passt (process {})", daemon.pid()));
    let run = || -> Result<Results> {
        let nic = |device: &str, mac: &str| {
            NicConfig::new(&daemon.socket_of(device), 1, &format!("mac=52:54:00:00:00:{mac}"))
        };
        let guest = |task: &str, nics: Vec<NicConfig>| {
            let config = GuestConfig::new(&format!("{QUIET} {task}"), Vec::new());
            Guest::start(&GuestConfig { nics, ..config })
        };
        let other = guest("kl.task=iperf_server", vec![nic("b", "0b")])?;
        let ready = |line: &str| (line == "KL: iperf=ready").then_some(());
        other.results().wait_for("a server of iperf3", LIMIT, ready).with_context(|| other.last_words())?;
        say("a guest waits at one port of the switch");
        let task = format!("kl.task=iperf,fetch kl.seconds={seconds} kl.page=eth1:{}", server.port());
        let guest = guest(&task, vec![nic("a", "0a"), nic("user", "0c")])?;
        say("another guest boots with two cards");
        follow(&guest, &say)?;
        let results = guest.finish()?;
        other.finish()?;
        Ok(results)
    };
    let outcome = run();
    let (status, log) = daemon.stop()?;
    let results = outcome.with_context(|| format!("the daemon said:\n{}", log.join("\n")))?;
    ensure!(status.success(), "the daemon ended with {status}");
    let fetched = results.get("eth1.page").context("no page")?;
    ensure!(*fetched == sha256(copy.path(), 0, PAGE as u64)?, "the guest got another page");
    Ok(Outcome { results, log })
}

/// Says each step that a guest reports, until it ends.
///
/// # Errors
/// The guest does not end in time.
pub fn follow(guest: &Guest, say: impl Fn(&str)) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    let mut index = 0;
    while let Some(line) = guest.results().line(index, deadline).with_context(|| guest.last_words())? {
        index += 1;
        match line.strip_prefix("KL: ").and_then(|text| text.split_once('=')) {
            Some(("step", step)) => say(&format!("guest: {step}")),
            Some(("end", _)) => break,
            _ => {}
        }
    }
    Ok(())
}
