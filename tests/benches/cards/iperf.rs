//! Runs iperf3 between two network namespaces.
//!
//! ```text
//! client -- TAP "near" -- card -- our driver -- TAP "far" -- server
//! client -- TAP "near" ------- bare loop ------ TAP "far" -- server
//! client -- veth ----------------------------------- veth -- server
//! ```
//!
//! And through a switch, where each end has a driver of its own, as two guests have. The kernel's bridge has
//! two TAPs in the place of the cards:
//!
//! ```text
//! client -- TAP "near" -- our driver -- card -- switch -- card -- our driver -- TAP "far" -- server
//! client -- TAP "near" -- bare loop --- TAP --- bridge --- TAP --- bare loop -- TAP "far" -- server
//! ```

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};
use kickless_driver::{Card, CardOptions, Choice, Interest, Offload, Outgoing, QueuePair};
use kickless_net_port::{Offloads, ReceiveError, SendError, Tap, TapQueue};
use kickless_spec::net::Header;
use kickless_testing::ip;
use kickless_tests::daemon::{CardConfig, Daemon};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::FromBytes;

use crate::common::{Cpus, Plan, Spread};

const HEADER_LEN: usize = size_of::<Header>();
/// Frames that are moved at a time.
const BATCH: usize = 16;
/// More than the longest frame with its header, so that the kernel cuts none.
const SPACE: usize = 70_000;

/// A network namespace, which lives as long as its process.
struct Namespace(Child);

impl Namespace {
    fn new() -> Result<Namespace> {
        let child = Command::new("unshare").args(["--net", "cat"]).stdin(Stdio::piped()).spawn()?;
        let namespace = Namespace(child);
        let own = fs::read_link("/proc/thread-self/ns/net")?;
        while fs::read_link(format!("/proc/{}/ns/net", namespace.pid()))? == own {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(namespace)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns a command that runs in the namespace.
    fn command(&self, words: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args([&format!("--net=/proc/{}/ns/net", self.pid()), "--"]).args(words.split(' '));
        command
    }

    /// Moves a device here, gives it an address and starts it.
    fn adopt(&self, device: &str, address: &str) -> Result<()> {
        ip(&format!("link set {device} netns {}", self.pid()));
        for words in [
            format!("ip addr add {address}/24 dev {device}"),
            format!("ip link set {device} up txqueuelen 1000"),
        ] {
            ensure!(self.command(&words).status()?.success(), "{words}");
        }
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A frame in memory of its own.
struct Space {
    bytes: Vec<u8>,
    len: usize,
}

impl Space {
    fn many() -> Vec<Space> {
        (0..BATCH).map(|_| Space { bytes: vec![0; SPACE], len: 0 }).collect()
    }

    fn frame(&self) -> &[u8] {
        &self.bytes[HEADER_LEN..HEADER_LEN + self.len]
    }

    fn header(&self) -> Result<Header> {
        Header::read_from_bytes(&self.bytes[..HEADER_LEN]).map_err(|_| anyhow::anyhow!("no header"))
    }
}

/// Reads frames of a TAP. Returns their number.
fn read(tap: &mut TapQueue, spaces: &mut [Space]) -> Result<usize> {
    for (count, space) in spaces.iter_mut().enumerate() {
        match tap.receive_copy(&mut space.bytes) {
            Ok(len) => space.len = len,
            Err(ReceiveError::Empty) => return Ok(count),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(spaces.len())
}

/// Writes a frame to a TAP, which drops it if it is full, as the kernel does.
fn write(tap: &mut TapQueue, header: &Header, frame: &[u8]) -> Result<()> {
    match tap.send_copy(header, frame) {
        Ok(()) | Err(SendError::Full | SendError::Down | SendError::Refused(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn sleep(fds: &mut [PollFd<'_>]) -> Result<()> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    poll(fds, Some(&timeout))?;
    Ok(())
}

/// Moves frames between a card and a TAP until `is_over`.
fn bridge(pair: &mut QueuePair, tap: &mut TapQueue, is_over: &AtomicBool) -> Result<()> {
    let mut spaces = Space::many();
    let mut bytes = vec![0; SPACE];
    while !is_over.load(Ordering::Relaxed) {
        let mut written = Ok(());
        let received = pair.receive(BATCH, |frame| {
            let len = frame.read(0, &mut bytes);
            if let Err(error) = write(tap, &frame.offload().header(), &bytes[..len]) {
                written = Err(error);
            }
        })?;
        written?;
        let read = read(tap, &mut spaces)?;
        let mut frames = Vec::with_capacity(read);
        for space in &spaces[..read] {
            let offload = Offload::of_header(&space.header()?)?;
            frames.push(Outgoing { bytes: space.frame(), offload });
        }
        let mut sent = 0;
        while sent < frames.len() {
            sent += pair.send(&frames[sent..])?;
            if sent < frames.len() {
                ensure!(pair.wait(Interest::Send, Some(Duration::from_secs(10)))?, "the card stands still");
            }
        }
        if received + read == 0 && pair.arm(Interest::Receive)? {
            sleep(&mut [PollFd::new(pair, PollFlags::IN), PollFd::new(tap, PollFlags::IN)])?;
        }
    }
    Ok(())
}

/// Moves the frames of a TAP to another one. Returns their number.
fn pass(from: &mut TapQueue, to: &mut TapQueue, spaces: &mut [Space]) -> Result<usize> {
    let count = read(from, spaces)?;
    for space in &spaces[..count] {
        write(to, &space.header()?, space.frame())?;
    }
    Ok(count)
}

/// Moves frames between two TAPs until `is_over`.
fn bare_loop([near, far]: &mut [TapQueue; 2], is_over: &AtomicBool) -> Result<()> {
    let mut spaces = Space::many();
    while !is_over.load(Ordering::Relaxed) {
        if pass(near, far, &mut spaces)? + pass(far, near, &mut spaces)? == 0 {
            sleep(&mut [PollFd::new(&*near, PollFlags::IN), PollFd::new(&*far, PollFlags::IN)])?;
        }
    }
    Ok(())
}

/// The two namespaces with a way between them.
struct Way {
    name: &'static str,
    client: Namespace,
    _server: Namespace,
    iperf: Child,
}

impl Way {
    /// Moves the devices `near` and `far` into namespaces of their own, and starts the server at the second.
    fn new(name: &'static str, near: &str, far: &str) -> Result<Way> {
        let (client, server) = (Namespace::new()?, Namespace::new()?);
        client.adopt(near, "10.0.0.1")?;
        server.adopt(far, "10.0.0.2")?;
        let iperf = server.command("iperf3 --server --forceflush").stdout(Stdio::null()).spawn()?;
        Ok(Way { name, client, _server: server, iperf })
    }

    /// Sends for this time. Returns the bits a second that arrived.
    fn turn(&self, time: Duration, reverse: bool) -> Result<f64> {
        let mut words = format!("iperf3 --client 10.0.0.2 --json --time {}", time.as_secs().max(1));
        if reverse {
            words += " --reverse";
        }
        for _ in 0..100 {
            let output = self.client.command(&words).output()?;
            let answer: serde_json::Value = serde_json::from_slice(&output.stdout).context("iperf3")?;
            let rate = &answer["end"]["sum_received"]["bits_per_second"];
            match (rate.as_f64(), answer["error"].as_str()) {
                (Some(rate), _) => return Ok(rate),
                // The server is not there yet, or not done yet.
                (None, Some(error)) if error.contains("refused") || error.contains("busy") => {
                    thread::sleep(Duration::from_millis(50));
                }
                (None, error) => bail!("iperf3: {error:?}"),
            }
        }
        bail!("no iperf3 listens")
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let _ = self.iperf.kill();
        let _ = self.iperf.wait();
    }
}

fn make_tap(name: &str) {
    ip(&format!("tuntap add dev {name} mode tap"));
}

fn open_tap(name: &str) -> Result<(Tap, TapQueue)> {
    make_tap(name);
    let tap = Tap::open(name, 1)?;
    tap.set(Offloads::all(), |_| true);
    let queue = tap.queue(0)?;
    Ok((tap, queue))
}

fn has_iperf() -> bool {
    let is_there = Command::new("iperf3").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !is_there {
        println!("iperf3 is not installed");
    }
    is_there
}

pub(crate) fn iperf(plan: &Plan, _cpus: &Cpus) -> Result<()> {
    if !has_iperf() {
        return Ok(());
    }
    // The card's.
    make_tap("near0");
    let daemon = Daemon::start_card(&CardConfig::new("tap:near0"))?;
    let options = CardOptions { receive_offloads: Choice::On, ..CardOptions::new(daemon.socket()) };
    let card = Card::connect(options)?;
    let mut pair = card.pair(0).context("the card has no pair")?;
    let (_far, mut far) = open_tap("far0")?;
    // The bare loop's.
    let (_near, bare_near) = open_tap("near1")?;
    let (_far, bare_far) = open_tap("far1")?;
    let mut bare = [bare_near, bare_far];
    ip("link add near2 type veth peer name far2");
    let ways = [
        Way::new("card", "near0", "far0")?,
        Way::new("bare loop", "near1", "far1")?,
        Way::new("veth", "near2", "far2")?,
    ];
    let movers: [Mover<'_>; 2] = [
        Box::new(move |is_over| bridge(&mut pair, &mut far, is_over)),
        Box::new(move |is_over| bare_loop(&mut bare, is_over)),
    ];
    while_moving(movers, || {
        measure(&ways, "through the card's TAP", false, plan)?;
        measure(&ways, "to the card's TAP", true, plan)
    })
}

/// Moves frames until the flag is set.
type Mover<'a> = Box<dyn FnOnce(&AtomicBool) -> Result<()> + Send + 'a>;

/// Runs `does` while each mover has a thread.
fn while_moving<const N: usize>(movers: [Mover<'_>; N], does: impl FnOnce() -> Result<()>) -> Result<()> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let is_over = &is_over;
        let threads = movers.map(|mover| scope.spawn(move || mover(is_over)));
        let done = does();
        is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        done
    })
}

pub(crate) fn through_switch(plan: &Plan, _cpus: &Cpus) -> Result<()> {
    if !has_iperf() {
        return Ok(());
    }
    // The switch's.
    let card = "port = \"switch:iperf\"";
    let daemon = Daemon::serve("workers = 1\n", &[("near", card), ("far", card)])?;
    let connect = |name: &str| -> Result<(Card, QueuePair)> {
        let socket = daemon.socket_of(name);
        let card = Card::connect(CardOptions { receive_offloads: Choice::On, ..CardOptions::new(socket) })?;
        let pair = card.pair(0).context("the card has no pair")?;
        Ok((card, pair))
    };
    let ((_near_card, mut near_pair), (_far_card, mut far_pair)) = (connect("near")?, connect("far")?);
    let ((_near, mut near), (_far, mut far)) = (open_tap("near0")?, open_tap("far0")?);
    // The bridge's.
    ip("link add bridge1 type bridge");
    let ((_near, bare_near), (_far, bare_far)) = (open_tap("near1")?, open_tap("far1")?);
    let ((_in, port_near), (_out, port_far)) = (open_tap("in1")?, open_tap("out1")?);
    for port in ["in1", "out1"] {
        ip(&format!("link set {port} master bridge1 up txqueuelen 1000"));
    }
    ip("link set bridge1 up");
    let (mut at_near, mut at_far) = ([bare_near, port_near], [bare_far, port_far]);
    let ways = [Way::new("switch", "near0", "far0")?, Way::new("kernel bridge", "near1", "far1")?];
    let movers: [Mover<'_>; 4] = [
        Box::new(move |is_over| bridge(&mut near_pair, &mut near, is_over)),
        Box::new(move |is_over| bridge(&mut far_pair, &mut far, is_over)),
        Box::new(move |is_over| bare_loop(&mut at_near, is_over)),
        Box::new(move |is_over| bare_loop(&mut at_far, is_over)),
    ];
    while_moving(movers, || measure(&ways, "between two guests", false, plan))
}

/// Measures all ways, and compares the first one with the second.
fn measure<const N: usize>(ways: &[Way; N], direction: &str, reverse: bool, plan: &Plan) -> Result<()> {
    let mut turns = Vec::new();
    for _ in 0..plan.rounds {
        let mut rates = [0.0; N];
        for (way, rate) in ways.iter().zip(&mut rates) {
            *rate = way.turn(plan.time, reverse)?;
        }
        turns.push(rates);
    }
    let of = |at: usize| Spread::of(turns.iter().map(|turn| turn[at] / 1e9));
    for (at, way) in ways.iter().enumerate() {
        let rate = of(at);
        println!("{direction}: {} {:.1} Gbit/s ({:.1} .. {:.1})", way.name, rate.median, rate.min, rate.max);
    }
    let ratio = Spread::of(turns.iter().map(|turn| turn[0] / turn[1]));
    println!(
        "{direction}: {} / {} {:.2} ({:.2} .. {:.2}){}",
        ways[0].name,
        ways[1].name,
        ratio.median,
        ratio.min,
        ratio.max,
        plan.remark()
    );
    Ok(())
}
