//! Runs a behaviour beside the victims.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::daemon::Daemon;
use crate::frontend::LIMIT;
use crate::meter::behaviour::{Behaviour, Deed, Scale, Site, Stage};
use crate::meter::host::{Role, cpus, settle, take_role};
use crate::meter::victim::{DISK_LEN, RECEIVER, SENDER, Sockets, Victims};

/// The worker of the attacker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The worker of the victims, which is the only one.
    SameWorker,
    /// Another one. The daemon moves the attacker away from a worker that is busy. It may do so with one of
    /// the cards, too, so the victim is the disk.
    OtherWorker,
}

/// The devices under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// The disk.
    Disk,
    /// The two cards.
    Cards,
    /// All of them. They share the worker in a way that changes from second to second, so nothing can be
    /// measured.
    Both,
}

/// The figures of one victim in one round.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// The kind of the victim.
    pub name: &'static str,
    /// Requests or frames in a second, beside an attacker that is connected and idle.
    pub idle_rate: f64,
    /// The same during the attack.
    pub rate: f64,
    /// The longest request or frame beside the idle attacker.
    pub idle_worst: Duration,
    /// The same during the attack.
    pub worst: Duration,
    /// Frames that were lost during the attack.
    pub lost: u64,
}

/// The result of a round.
#[derive(Clone, Debug)]
pub struct Round {
    /// The figures of the victim.
    pub victim: Figures,
    /// The deeds of all steps.
    pub deed: Deed,
}

const IDLE: u8 = 0;
const ATTACK: u8 = 1;
const END: u8 = 2;

/// The orders for the attacker's thread, and its state.
#[derive(Default)]
struct Orders {
    order: AtomicU8,
    is_ready: AtomicBool,
    is_in_step: AtomicBool,
    done: AtomicU64,
    seen: AtomicU64,
}

/// Ends the attacker's thread when dropped.
struct EndOnDrop<'a>(&'a Orders);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.order.store(END, Ordering::SeqCst);
    }
}

/// Runs the steps of a behaviour as ordered.
fn attack(behaviour: &Behaviour, stage: &Stage<'_>, orders: &Orders, is_measured: bool) -> Result<()> {
    let mut step = (behaviour.start)(stage).context("the set-up of the attacker")?;
    if is_measured {
        take_role(Role::Attacker);
    }
    orders.is_ready.store(true, Ordering::SeqCst);
    loop {
        // Before the look at the order: whoever has changed it sees the step, or the step sees the order.
        orders.is_in_step.store(true, Ordering::SeqCst);
        match orders.order.load(Ordering::SeqCst) {
            ATTACK => {
                let deed = step().context("a step of the attacker")?;
                orders.done.fetch_add(deed.done, Ordering::Relaxed);
                orders.seen.fetch_add(deed.seen, Ordering::Relaxed);
                orders.is_in_step.store(false, Ordering::SeqCst);
                thread::sleep(behaviour.pause);
            }
            END => return Ok(()),
            _ => {
                orders.is_in_step.store(false, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// A daemon with victims and an attacker.
struct Run<'scope> {
    victims: Victims,
    attacker: Option<ScopedJoinHandle<'scope, Result<()>>>,
    orders: &'scope Orders,
}

impl<'scope> Run<'scope> {
    fn start<'env>(
        scope: &'scope Scope<'scope, 'env>,
        behaviour: &'scope Behaviour,
        stage: &'scope Stage<'scope>,
        orders: &'scope Orders,
        load: Load,
    ) -> Result<Self> {
        let is_measured = load != Load::Both;
        let socket = |name: &str| stage.socket(name);
        let disk = (load != Load::Cards).then(|| socket("victim"));
        let cards = (load != Load::Disk).then(|| [socket("sender"), socket("receiver")]);
        let mut victims = Victims::start(Sockets { disk, cards }, is_measured);
        victims.go_on()?;
        let attacker = scope.spawn(move || attack(behaviour, stage, orders, is_measured));
        let mut run = Run { victims, attacker: Some(attacker), orders };
        run.wait("the attacker is not ready", || orders.is_ready.load(Ordering::SeqCst))?;
        Ok(run)
    }

    /// Waits for something that the attacker's thread does.
    fn wait(&mut self, what: &str, holds: impl Fn() -> bool) -> Result<()> {
        let start = Instant::now();
        while !holds() {
            if self.attacker.as_ref().is_none_or(ScopedJoinHandle::is_finished) {
                self.join()?;
                return Err(anyhow!("the attacker has ended"));
            }
            ensure!(start.elapsed() < 2 * LIMIT, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn join(&mut self) -> Result<()> {
        let Some(attacker) = self.attacker.take() else { return Ok(()) };
        attacker.join().map_err(|_| anyhow!("the attacker's thread panicked"))?
    }

    fn order(&self, order: u8) {
        self.orders.order.store(order, Ordering::SeqCst);
    }

    /// Lets the victims work for `time` while the attacker is idle or attacks. Returns the rate and the worst
    /// request of each. A request that the attack has delayed beyond its end counts.
    fn period(&mut self, time: Duration, order: u8) -> Result<Vec<(f64, Duration)>> {
        self.victims.go_on()?;
        for (_, load) in &self.victims.loads {
            load.take_worst();
        }
        let done = |victims: &Victims| victims.loads.iter().map(|(_, load)| load.done()).collect::<Vec<_>>();
        let (before, start) = (done(&self.victims), Instant::now());
        self.order(order);
        thread::sleep(time);
        let took = start.elapsed().as_secs_f64();
        let rates =
            done(&self.victims).into_iter().zip(before).map(|(now, before)| (now - before) as f64 / took);
        let rates: Vec<f64> = rates.collect();
        self.order(IDLE);
        let orders = self.orders;
        self.wait("a step does not end", || !orders.is_in_step.load(Ordering::SeqCst))?;
        self.victims.go_on()?;
        let worst = self.victims.loads.iter().map(|(_, load)| load.take_worst());
        Ok(rates.into_iter().zip(worst).collect())
    }

    fn deed(&self) -> Deed {
        Deed {
            done: self.orders.done.load(Ordering::Relaxed),
            seen: self.orders.seen.load(Ordering::Relaxed),
        }
    }

    fn end(&mut self) -> Result<()> {
        self.order(END);
        self.join()
    }
}

fn serve(behaviour: &Behaviour, site: &mut Site, place: Place, is_measured: bool) -> Result<Daemon> {
    let card = |mac: [u8; 6]| {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        format!("port = 'switch:lan'\nmac = '{mac}'")
    };
    let mut devices = vec![
        // The worker itself copies the data, so the figures are of its time. Threads that read files would
        // take their part of its processor, which changes with each wake.
        ("victim".to_owned(), format!("blk-file = 'mem:{DISK_LEN}'")),
        ("sender".to_owned(), card(SENDER)),
        ("receiver".to_owned(), card(RECEIVER)),
    ];
    devices.extend((behaviour.devices)(site)?);
    let devices: Vec<(&str, &str)> = devices.iter().map(|(name, lines)| (&**name, &**lines)).collect();
    let workers = if place == Place::SameWorker { 1 } else { 2 };
    let cpus = cpus();
    let cpus = cpus.iter().take(workers).map(ToString::to_string).collect::<Vec<_>>().join(",");
    let pinned = if is_measured { format!("\ncpu = '{cpus}'") } else { String::new() };
    // The policy would choose between spinning and naps, which differ more than any attack.
    let poll = if is_measured { "\npoll = 'always'" } else { "" };
    let pool = format!("workers = {workers}{pinned}{poll}");
    Daemon::serve_with(&["--control", "--control-read-only"], &pool, &devices)
}

/// Runs a behaviour in a daemon of its own, and `with` in the middle. Checks that all data was right, and
/// that the daemon ends well.
fn run<T>(
    behaviour: &Behaviour,
    scale: Scale,
    place: Place,
    load: Load,
    with: impl FnOnce(&mut Run<'_>) -> Result<T>,
) -> Result<(T, Deed)> {
    let mut site = Site::new(scale)?;
    let daemon = serve(behaviour, &mut site, place, load != Load::Both)?;
    if load != Load::Both {
        settle(&daemon)?;
    }
    let (stage, orders) = (Stage { daemon: &daemon, scale }, Orders::default());
    let result: Result<_> = thread::scope(|scope| {
        // The scope waits for the attacker's thread, also after an error.
        let _end = EndOnDrop(&orders);
        let mut run = Run::start(scope, behaviour, &stage, &orders, load)?;
        let result = with(&mut run)?;
        let deed = run.deed();
        run.end()?;
        run.victims.stop()?;
        Ok((result, deed))
    });
    let result = result.with_context(|| behaviour.name);
    if result.is_err() {
        daemon.log().dump();
    }
    let result = result?;
    let (status, log) = daemon.stop().context(behaviour.name)?;
    ensure!(status.code() == Some(0), "{}: the daemon ended with {status}: {log:#?}", behaviour.name);
    let panics: Vec<&String> = log.iter().filter(|line| line.contains("panicked")).collect();
    ensure!(panics.is_empty(), "{}: {panics:#?}", behaviour.name);
    ensure!(result.1.done > 0, "{}: no step has done its deed", behaviour.name);
    Ok(result)
}

/// Lets the attacker do a few steps, and checks that the victims go on. Measures nothing. Returns the deeds.
///
/// # Errors
/// Data was wrong, a victim stands still, the attacker did nothing, or the daemon fails.
pub fn try_out(behaviour: &Behaviour) -> Result<Deed> {
    let ((), deed) = run(behaviour, Scale::Small, Place::SameWorker, Load::Both, |run| {
        run.order(ATTACK);
        let orders = run.orders;
        run.wait("the attacker does nothing", || orders.done.load(Ordering::Relaxed) > 0)?;
        run.victims.go_on()
    })?;
    Ok(deed)
}

/// Measures a victim for `time` beside the idle attacker, and then beside the attack.
///
/// # Errors
/// As [`try_out`].
pub fn measure(behaviour: &Behaviour, place: Place, load: Load, time: Duration) -> Result<Round> {
    let (victim, deed) = run(behaviour, Scale::Full, place, load, |run| {
        let (name, load) = run.victims.loads.first().cloned().context("no victim")?;
        // Lets the daemon find how to poll, and where the queues belong.
        thread::sleep(time / 2);
        let (idle_rate, idle_worst) = run.period(time, IDLE)?[0];
        let lost = load.lost();
        let (rate, worst) = run.period(time, ATTACK)?[0];
        Ok(Figures { name, idle_rate, rate, idle_worst, worst, lost: load.lost() - lost })
    })?;
    Ok(Round { victim, deed })
}
