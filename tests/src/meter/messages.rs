//! Behaviours of a front-end with its messages.

use std::time::Duration;

use anyhow::{Result, ensure};
use kickless_driver::Disk;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, VERSION};
use kickless_vhost_user::{Config, FrontendMessage as Message, Header, VringState};

use crate::frontend::machine::{Machine, Shape};
use crate::frontend::{Answer, Frontend};
use crate::meter::behaviour::{Behaviour, Bound, Deed, Devices, Site, Stage, Step, device, memory_disk};
use crate::meter::victim::connect_disk;

/// The behaviours.
pub const TABLE: &[Behaviour] = &[
    Behaviour {
        name: "nothing",
        devices: memory_disk,
        start: |_| Ok(Box::new(|| Ok(Deed::of(1)))),
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "an honest neighbour",
        devices: memory_disk,
        start: honest,
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "sessions that come and go",
        devices: two_disks,
        start: sessions,
        pause: Duration::from_millis(2),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "queues that start and stop",
        devices: memory_disk,
        start: starts,
        pause: Duration::from_millis(2),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "call eventfds without end",
        devices: memory_disk,
        start: calls,
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "messages that are wrong, each for the log",
        devices: memory_disk,
        start: wrong_messages,
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "sessions that end by an error",
        devices: memory_disk,
        start: bad_sessions,
        pause: Duration::from_millis(2),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "reads of the configuration space",
        devices: memory_disk,
        start: config_reads,
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "replies that are not read",
        devices: memory_disk,
        start: unread,
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
];

const SHAPE: Shape = Shape { memory: 4 << 20, ..Shape::LINUX };

/// Writes and reads a few blocks, as the victims do. It shows what an ordinary neighbour costs.
fn honest(stage: &Stage<'_>) -> Result<Step> {
    let disk: Disk = connect_disk(&stage.socket("attacker"))?;
    let mut block = [7; 4096];
    Ok(Box::new(move || {
        for number in 0..8 {
            disk.write_at(&block, number * 4096)?;
            disk.read_at(&mut block, number * 4096)?;
        }
        Ok(Deed::of(16))
    }))
}

fn two_disks(site: &mut Site) -> Result<Devices> {
    Ok([memory_disk(site)?, device("resident", "blk-file = 'mem:1M'")].concat())
}

/// A second disk is idle and in use all the time, so that the worker polls before the sessions come, too.
fn sessions(stage: &Stage<'_>) -> Result<Step> {
    let socket = stage.socket("attacker");
    let mut resident = stage.machine("resident", &SHAPE)?;
    Ok(Box::new(move || {
        let mut machine = Machine::start(&socket, &SHAPE)?;
        machine.read(0, 0, 512)?;
        resident.read(0, 0, 512)?;
        Ok(Deed::of(1))
    }))
}

fn starts(stage: &Stage<'_>) -> Result<Step> {
    let mut machine = stage.machine("attacker", &Shape { queues: 4, memory: 16 << 20, ..SHAPE })?;
    Ok(Box::new(move || {
        machine.stop()?;
        machine.resume()?;
        machine.read(0, 0, 512)?;
        Ok(Deed::of(4))
    }))
}

fn calls(stage: &Stage<'_>) -> Result<Step> {
    let mut machine = stage.machine("attacker", &SHAPE)?;
    Ok(Box::new(move || {
        for _ in 0..16 {
            machine.frontend.set_call(&machine.queues[0])?;
        }
        machine.read(0, 0, 512)?;
        Ok(Deed::of(16))
    }))
}

fn wrong_messages(stage: &Stage<'_>) -> Result<Step> {
    let mut machine = stage.machine("attacker", &SHAPE)?;
    Ok(Box::new(move || {
        for index in 0..16 {
            let message = Message::SetVringNum(VringState { index: 1000 + index, num: 256 });
            ensure!(machine.frontend.attempt(&message)? == Answer::Refused, "{message:?} is accepted");
        }
        Ok(Deed::of(16))
    }))
}

fn connect(stage: &Stage<'_>) -> impl Fn() -> Result<Frontend> + use<> {
    let socket = stage.socket("attacker");
    move || {
        let mut frontend = Frontend::connect(&socket)?;
        frontend.negotiate(Features::VERSION_1)?;
        Ok(frontend)
    }
}

fn bad_sessions(stage: &Stage<'_>) -> Result<Step> {
    let connect = connect(stage);
    Ok(Box::new(move || {
        let mut frontend = connect()?;
        frontend.send_bytes(&[0xff; 12])?;
        ensure!(frontend.answer_to_raw()? == Answer::Dropped, "the session goes on");
        Ok(Deed::of(1))
    }))
}

fn config_reads(stage: &Stage<'_>) -> Result<Step> {
    let mut frontend = connect(stage)()?;
    Ok(Box::new(move || {
        for _ in 0..32 {
            let config = Config { data: vec![0; 256], ..Config::default() };
            frontend.ask(&Message::GetConfig(config))?;
        }
        Ok(Deed::of(32))
    }))
}

/// Asks more than the socket has room for answers, and leaves.
fn unread(stage: &Stage<'_>) -> Result<Step> {
    const QUESTIONS: usize = 350;
    let connect = connect(stage);
    Ok(Box::new(move || {
        let mut frontend = connect()?;
        let header = Header { request: Code::GetFeatures as u32, flags: VERSION, size: 0 };
        // The daemon may close the connection of a peer that does not read.
        let sent = (0..QUESTIONS).take_while(|_| frontend.send_raw(&header, &[], &[]).is_ok()).count();
        Ok(Deed::of(sent as u64))
    }))
}
