//! Measures cards with the port `xdp` beside cards on TAPs, whose frames go to the same interface.
//!
//! ```text
//! xdp       driver -- card, xdp:near --------------------- near == far
//! redirect  driver -- card, tap:card -- rule of tc ------- near == far
//! bridge    driver -- card, tap:card -- bridge ----------- near == far
//! macvtap   driver -- card, tap-fd:3 -- macvtap "card" --- near == far
//! host      driver -- card, tap:card -- stack of the host
//! ```
//!
//! `near` and `far` are a pair of `veth`, or `near` is a TAP and `far` its program. The stack of the host
//! drops the frames that come out at `far`, or the program reads them. A socket of AF_XDP or the program
//! sends those that the guest receives. In each turn, the links and the daemon are new.
//!
//! The worker has the second CPU, and the driver and the far end share the first one. The kernel does its
//! part of a frame in the call that sends it, so it is in the time of the worker or of the far end. The far
//! end keeps the queue of the port filled, so that the worker finds frames at each look.

use std::fs;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use kickless_driver::{Card, CardOptions, Offload, QueuePair};
use kickless_net_port::{XdpName, XdpPort, XdpQueue};
use kickless_opener::tap;
use kickless_spec::net::Header;
use kickless_testing::{ip, tc};
use kickless_tests::daemon::{CardConfig, Daemon, kickless_binary};
use rustix::io::{Errno, read, write};
use serde_json::Value;

use crate::common::{Cpus, Plan, Spread};
use crate::taps::packet;
use crate::{BATCH, frame};

const HEADER: usize = size_of::<Header>();
/// Flags of TUNSETIFF: IFF_TAP and IFF_NO_PI.
const TAP: i32 = 0x1002;
/// Frames on their way at a time: more than the driver's 256 buffers, and no more than a queue has room for.
const WINDOW: u64 = 768;
/// Calls in which a socket sends a batch.
const CALLS_MAX: u32 = 100;
/// The time of a turn before anything is counted.
const WARM_UP: Duration = Duration::from_millis(100);
/// The time after which frames that have not arrived are lost.
const LOST: Duration = Duration::from_millis(2);

/// The kind of the interface at which all frames end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Veth,
    Tap,
}

/// The part between the card and that interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Xdp,
    Redirect,
    Bridge,
    Macvtap,
    Host,
}

impl Route {
    fn config(self) -> Result<CardConfig> {
        Ok(match self {
            // A sandbox has no room for a library that loads programs into the kernel.
            Route::Xdp => CardConfig::new("xdp:near").with(&["--sandbox=off"]),
            Route::Redirect | Route::Bridge | Route::Host => CardConfig::new("tap:card"),
            Route::Macvtap => {
                let output = Command::new("ip").args(["-o", "link", "show", "card"]).output()?;
                let text = String::from_utf8(output.stdout)?;
                let index = text.split(':').next().context("no macvtap")?;
                CardConfig {
                    inherited: Some(format!("/dev/tap{index}").into()),
                    ..CardConfig::new("tap-fd:3")
                }
            }
        })
    }

    /// Returns the interface at which the far end sends.
    fn source(self, kind: Kind) -> &'static str {
        match (self, kind) {
            (Route::Host, _) => "card",
            (_, Kind::Veth) => "far",
            (_, Kind::Tap) => "near",
        }
    }
}

/// The frames that are measured.
#[derive(Clone, Copy, Debug)]
enum Load {
    Sent(usize),
    Received(usize),
    /// Packets of 64 KiB that are left to segment.
    SentPackets,
}

/// The interfaces of a turn.
struct Links {
    /// The TAP's program.
    program: Option<OwnedFd>,
}

impl Links {
    fn make(kind: Kind, route: Route) -> Result<Links> {
        let mut program = None;
        let mut names = Vec::new();
        if route != Route::Host {
            match kind {
                Kind::Veth => {
                    ip("link add near type veth peer name far");
                    names.extend(["near", "far"]);
                }
                Kind::Tap => {
                    let opened = tap("near", TAP).map_err(|error| anyhow!("{error:?}"))?;
                    program = Some(opened);
                    names.push("near");
                }
            }
        }
        match route {
            Route::Xdp => {}
            Route::Redirect | Route::Bridge | Route::Host => ip("tuntap add dev card mode tap"),
            Route::Macvtap => ip("link add link near name card type macvtap mode passthru"),
        }
        if route != Route::Xdp {
            names.push("card");
        }
        if route == Route::Bridge {
            ip("link add both type bridge forward_delay 0 mcast_snooping 0");
            names.push("both");
            for name in ["near", "card"] {
                ip(&format!("link set {name} master both"));
            }
        }
        for name in names {
            ip(&format!("link set {name} up"));
        }
        if route == Route::Redirect {
            for (from, to) in [("near", "card"), ("card", "near")] {
                tc(&format!("qdisc add dev {from} ingress"));
                let filter = format!("filter add dev {from} ingress protocol all u32 match u32 0 0");
                tc(&format!("{filter} action mirred egress redirect dev {to}"));
            }
        }
        Ok(Links { program })
    }

    /// Returns the number of frames that have reached the end of the way.
    fn arrived(route: Route) -> Result<u64> {
        let (name, field) = if route == Route::Host { ("card:", 1) } else { ("near:", 9) };
        let text = fs::read_to_string("/proc/thread-self/net/dev")?;
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix(name));
        let count = line.and_then(|line| line.split_ascii_whitespace().nth(field));
        Ok(count.with_context(|| format!("no counter of {name}"))?.parse()?)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.program = None;
        for name in ["card", "near", "both"] {
            let _ = Command::new("ip").args(["link", "del", name]).output();
        }
    }
}

/// The far end of the interface.
enum Far<'a> {
    /// The stack of the host, which drops what it gets.
    Stack,
    /// A socket that sends.
    Socket { queue: XdpQueue, _port: XdpPort },
    /// The TAP's program.
    Program(&'a OwnedFd),
}

impl Far<'_> {
    fn open<'a>(links: &'a Links, kind: Kind, route: Route, load: Load) -> Result<Far<'a>> {
        if let Some(program) = &links.program {
            return Ok(Far::Program(program));
        }
        let Load::Received(_) = load else { return Ok(Far::Stack) };
        let name = XdpName { interface: route.source(kind).to_owned(), queue: 0 };
        let port = XdpPort::open(&name, 1)?;
        Ok(Far::Socket { queue: port.queue(0)?, _port: port })
    }

    /// Sends a frame so many times, or until there is no room. Returns the number.
    fn send(&mut self, frame: &[u8], count: usize) -> Result<u64> {
        let mut sent = 0;
        match self {
            Far::Stack => {}
            Far::Socket { queue, .. } => {
                let mut turn = queue.turn();
                while sent < count {
                    let pushed = turn.push(frame.len(), |space| {
                        space[HEADER..].copy_from_slice(frame);
                        Ok::<_, ()>(frame.len())
                    });
                    if pushed.is_none() {
                        break;
                    }
                    sent += 1;
                }
                for _ in 0..CALLS_MAX {
                    turn.flush();
                    if !turn.is_waiting() {
                        break;
                    }
                }
            }
            Far::Program(fd) => {
                for _ in 0..count {
                    match write(&**fd, frame) {
                        Ok(_) => sent += 1,
                        Err(Errno::AGAIN) => break,
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        Ok(sent as u64)
    }

    /// Reads frames. Returns their number.
    fn receive(&mut self, count: usize) -> Result<u64> {
        let Far::Program(fd) = self else { return Ok(0) };
        let mut bytes = [0; 2048];
        for received in 0..count as u64 {
            match read(&**fd, &mut bytes) {
                Ok(_) => {}
                Err(Errno::AGAIN) => return Ok(received),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(count as u64)
    }
}

/// The sum of a flow.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    /// Frames that the driver or the far end has sent.
    sent: u64,
    /// Frames that have come to the other one.
    arrived: u64,
    /// Frames that never came.
    lost: u64,
    /// The time that the far end took for frames.
    far_time: Duration,
    time: Duration,
}

/// Keeps frames on their way for a time. `step` sends if its first argument allows it, takes frames, and
/// adds to the flow.
fn flow(time: Duration, mut step: impl FnMut(bool, &mut Flow) -> Result<()>) -> Result<Flow> {
    let (begun, mut flow) = (Instant::now(), Flow::default());
    let mut moved = begun;
    loop {
        let now = Instant::now();
        if now - begun >= time {
            flow.time = now - begun;
            return Ok(flow);
        }
        let on_way = flow.sent.saturating_sub(flow.arrived + flow.lost);
        let before = flow.arrived;
        step(on_way + BATCH as u64 <= WINDOW, &mut flow)?;
        if flow.arrived > before {
            moved = now;
        } else if now - moved > LOST {
            flow.lost = flow.sent.saturating_sub(flow.arrived);
            moved = now;
        }
    }
}

/// Sends frames to the card.
fn transmit(
    pair: &mut QueuePair,
    far: &mut Far<'_>,
    bytes: &[u8],
    offload: Offload,
    time: Duration,
) -> Result<Flow> {
    let reads = matches!(far, Far::Program(_));
    flow(time, |may_send, flow| {
        if may_send || !reads {
            let sent = pair.send_with(
                BATCH,
                |_| bytes.len(),
                |_, frame| {
                    frame.write(0, bytes);
                    frame.set_offload(offload);
                },
            )?;
            flow.sent += sent as u64;
        }
        if reads {
            let begun = Instant::now();
            let received = far.receive(2 * BATCH)?;
            if received > 0 {
                flow.far_time += begun.elapsed();
            }
            flow.arrived += received;
        } else {
            flow.arrived = flow.sent;
        }
        Ok(())
    })
}

/// Receives frames from the card.
fn receive(pair: &mut QueuePair, far: &mut Far<'_>, bytes: &[u8], time: Duration) -> Result<Flow> {
    flow(time, |may_send, flow| {
        if may_send {
            let begun = Instant::now();
            flow.sent += far.send(bytes, BATCH)?;
            flow.far_time += begun.elapsed();
        }
        flow.arrived += pair.receive(2 * BATCH, |_| {})? as u64;
        Ok(())
    })
}

/// The processor time up to now.
#[derive(Clone, Copy, Debug)]
struct Times {
    worker_ns: u64,
    softirq_ns: u64,
}

impl Times {
    fn now(control: &str) -> Result<Times> {
        let output = Command::new(kickless_binary()?).args(["ctl", control, "stats.get", "{}"]).output()?;
        let stats: Value = serde_json::from_slice(&output.stdout).context("stats.get")?;
        let worker_ns = stats["workers"][0]["work_ns"].as_u64().context("no time of a worker")?;
        // The kernel's threads, for what is not done in the calls.
        let mut softirq_ns = 0;
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
            if name.starts_with("ksoftirqd/") {
                let times = fs::read_to_string(path.join("schedstat"))?;
                softirq_ns += times.split(' ').next().context("schedstat")?.parse::<u64>()?;
            }
        }
        Ok(Times { worker_ns, softirq_ns })
    }
}

/// The result of a turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Frames a second.
    rate: f64,
    /// The worker's time for a frame, and its part of the turn.
    worker_ns: f64,
    worker_part: f64,
    /// The time of the far end and of softirqs for a frame.
    other_ns: f64,
    /// The part of the frames that never came.
    lost: f64,
}

fn turn(kind: Kind, route: Route, load: Load, time: Duration, cpus: &Cpus) -> Result<Turn> {
    let links = Links::make(kind, route)?;
    let dir = tempfile::tempdir()?;
    let control = format!("--control={}", dir.path().join("control.sock").display());
    cpus.for_back_ends()?;
    // The library of AF_XDP opens what no sandbox has room for.
    let config = route.config()?.with(&["--poll=always", "--workers=1", "--sandbox=off", &control]);
    let daemon = Daemon::start_card(&config)?;
    cpus.for_driver()?;
    let card = Card::connect(CardOptions::new(daemon.socket()))?;
    let mut pair = card.pair(0).context("the card has no pair")?;
    // A thread of the card attaches its queue.
    thread::sleep(Duration::from_millis(100));
    let mut far = Far::open(&links, kind, route, load)?;
    let packet = packet();
    let mut run = |time| match load {
        Load::Sent(len) => transmit(&mut pair, &mut far, &frame(len), Offload::default(), time),
        Load::SentPackets => transmit(&mut pair, &mut far, &packet.0, packet.2, time),
        Load::Received(len) => receive(&mut pair, &mut far, &frame(len), time),
    };
    run(WARM_UP)?;
    thread::sleep(Duration::from_millis(5));
    let (times, arrived) = (Times::now(&control)?, Links::arrived(route)?);
    let mut flow = run(time)?;
    thread::sleep(Duration::from_millis(5));
    let mut lost = flow.lost as f64 / flow.sent as f64;
    if let (Load::Sent(_), Kind::Veth) = (load, kind) {
        flow.arrived = Links::arrived(route)? - arrived;
        lost = (flow.sent as f64 - flow.arrived as f64) / flow.sent as f64;
    }
    ensure!(flow.arrived > 0, "{kind:?}, {route:?}, {load:?}: no frame arrives");
    let after = Times::now(&control)?;
    let frames = flow.arrived as f64;
    let worker_ns = (after.worker_ns - times.worker_ns) as f64;
    let other_ns = flow.far_time.as_nanos() as f64 + (after.softirq_ns - times.softirq_ns) as f64;
    drop((card, pair));
    Ok(Turn {
        rate: frames / flow.time.as_secs_f64(),
        worker_ns: worker_ns / frames,
        worker_part: worker_ns / flow.time.as_nanos() as f64,
        other_ns: other_ns / frames,
        lost,
    })
}

fn compare(kind: Kind, load: Load, routes: &[Route], plan: &Plan, cpus: &Cpus) -> Result<()> {
    println!("\n{kind:?}, {load:?}{}", plan.remark());
    let mut turns = vec![Vec::new(); routes.len()];
    for round in 0..plan.rounds {
        for at in 0..routes.len() {
            // Another one begins each round.
            let at = (at + round) % routes.len();
            turns[at].push(turn(kind, routes[at], load, plan.time, cpus)?);
        }
    }
    for (route, of_route) in routes.iter().zip(&turns) {
        let spread = |value: fn(&Turn) -> f64| Spread::of(of_route.iter().map(value));
        let ratio = |value: fn(&Turn, &Turn) -> f64| {
            let ratio = Spread::of(turns[0].iter().zip(of_route).map(|(xdp, turn)| value(xdp, turn)));
            format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.min, ratio.max)
        };
        println!(
            "  {:<9} {:>8.0}/s, xdp has {} times as many; {:>5.0} and {:>5.0} ns of the worker and of the far end, \
             {} times those of xdp; the worker is busy for {:.2}, {:.3} are lost",
            format!("{route:?}"),
            spread(|turn| turn.rate).median,
            ratio(|xdp, turn| xdp.rate / turn.rate),
            spread(|turn| turn.worker_ns).median,
            spread(|turn| turn.other_ns).median,
            ratio(|xdp, turn| (turn.worker_ns + turn.other_ns) / (xdp.worker_ns + xdp.other_ns)),
            spread(|turn| turn.worker_part).median,
            spread(|turn| turn.lost).max,
        );
    }
    Ok(())
}

pub(crate) fn xdp(plan: &Plan, cpus: &Cpus) -> Result<()> {
    for kind in [Kind::Veth, Kind::Tap] {
        // The host is the same for both kinds.
        let routes = [Route::Xdp, Route::Redirect, Route::Bridge, Route::Macvtap, Route::Host];
        let routes = &routes[..if kind == Kind::Veth { 5 } else { 4 }];
        for len in [64, 1514] {
            for load in [Load::Sent(len), Load::Received(len)] {
                compare(kind, load, routes, plan, cpus)?;
            }
        }
        if kind == Kind::Veth {
            compare(kind, Load::SentPackets, routes, plan, cpus)?;
        }
    }
    Ok(())
}
