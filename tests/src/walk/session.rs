//! A hostile front-end with its guest, on one device.

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kickless_memory::Gpa;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_testing::Random;
use kickless_vhost_user::{
    FrontendMessage as Message, Header, Inflight, LogBase, VringAddr, VringFd, VringState,
};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use crate::driver::memory::Ram;
use crate::frontend::LIMIT;
use crate::frontend::machine::RAM_BASE;
use crate::walk::descriptors;
use crate::walk::device_rings::{Kind, RingOfRole, Role, make_rings};
use crate::walk::messages::{Known, UNDECODED};
use crate::walk::ring::{Piece, Ring};
use crate::walk::totals::Totals;
use crate::walk::wire::{Answer, Wire, is_closed, send_raw};

/// Bytes of the memory of a session.
const MEMORY: u64 = 4 << 20;
/// Looks at a ring without room before it counts as one that stands still.
const STALLS_MAX: u32 = 400;

/// A device that sessions attack, one after the other.
pub struct Attacked {
    /// The name of the device.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its socket.
    pub socket: PathBuf,
    session: Option<Session>,
    /// The in-flight buffer of an earlier session.
    inflight: Option<(Inflight, OwnedFd)>,
}

/// A connection, with its memory and rings.
struct Session {
    wire: Wire,
    ram: Ram,
    rings: Vec<RingOfRole>,
    offered: Features,
    protocol: ProtocolFeatures,
    has_indirect: bool,
    /// Descriptors that the daemon may still use.
    kept: Vec<OwnedFd>,
}

impl Attacked {
    /// Describes a device, without a session.
    pub fn new(name: &'static str, kind: Kind, socket: PathBuf) -> Attacked {
        Attacked { name, kind, socket, session: None, inflight: None }
    }

    /// Does one step. Returns whether a session has ended.
    ///
    /// # Errors
    /// The daemon does not answer, or answers what the protocol does not have.
    pub fn step(&mut self, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        let Some(session) = &mut self.session else {
            self.session = Session::connect(self.kind, &self.socket, &mut self.inflight, random, totals)?;
            return Ok(false);
        };
        let goes_on = match random.below(10_000) {
            0..9500 => session.burst(random, totals)?,
            9500..9900 => session.message(random, totals)?,
            9900..9930 => {
                session.lie(random);
                true
            }
            9930..9940 => session.change_memory(random, totals)?,
            9940..9960 => session.repair(random, totals)?,
            _ => {
                let session = self.session.take();
                session.map_or(Ok(()), |session| session.end(random, totals))?;
                return Ok(true);
            }
        };
        if !goes_on {
            self.session = None;
        }
        Ok(!goes_on)
    }

    /// Closes the connection.
    pub fn leave(&mut self) {
        self.session = None;
    }
}

impl Session {
    fn connect(
        kind: Kind,
        path: &Path,
        inflight: &mut Option<(Inflight, OwnedFd)>,
        random: &mut Random,
        totals: &mut Totals,
    ) -> Result<Option<Session>> {
        let socket = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        let requester = kickless_vhost_user::Frontend::new(socket.try_clone()?);
        let mut wire = Wire { requester, socket, acks: false };
        let Some(offered) = wire.say(&Message::GetFeatures, totals)? else { return Ok(None) };
        let Some(protocol) = wire.say(&Message::GetProtocolFeatures, totals)? else { return Ok(None) };
        let (Answer::Number(offered), Answer::Number(protocol)) = (offered, protocol) else {
            bail!("the back-end offers nothing")
        };
        let offered = Features::from_bits_retain(offered);
        let protocol = ProtocolFeatures::from_bits_retain(protocol);
        let mut wanted = protocol;
        if random.one_in(4) {
            wanted &= ProtocolFeatures::from_bits_retain(random.next());
        }
        let mut features = offered & Features::from_bits_retain(random.next() | random.next());
        let always = Features::VERSION_1 | Features::PROTOCOL_FEATURES;
        features |= if random.one_in(32) { Features::empty() } else { always };
        let rare = Features::ACCESS_PLATFORM | Features::LOG_ALL;
        features -= if random.one_in(16) { Features::empty() } else { rare };
        for message in
            [Message::SetProtocolFeatures(wanted), Message::SetOwner, Message::SetFeatures(features)]
        {
            if wire.say(&message, totals)?.is_none() {
                return Ok(None);
            }
            if let Message::SetProtocolFeatures(wanted) = message {
                wire.acks = wanted.contains(ProtocolFeatures::REPLY_ACK);
            }
        }
        let mut ram = Ram::new(RAM_BASE, MEMORY)?;
        let rings = make_rings(kind, features, &mut ram, random)?;
        let has_indirect = features.contains(Features::INDIRECT_DESC);
        let mut session = Session { wire, ram, rings, offered, protocol, has_indirect, kept: Vec::new() };
        let table = vec![session.ram.region_and_file()?];
        if session.wire.say(&Message::SetMemTable(table), totals)?.is_none() {
            return Ok(None);
        }
        if random.one_in(4) && !session.share_inflight(inflight, random, totals)? {
            return Ok(None);
        }
        for at in 0..session.rings.len() {
            if !session.start(at, random, totals)? {
                return Ok(None);
            }
        }
        totals.sessions += 1;
        Ok(Some(session))
    }

    /// Gives the back-end an in-flight buffer: a new one, or that of an earlier session, in which some bytes
    /// may have changed. Returns whether the connection is still there.
    fn share_inflight(
        &mut self,
        kept: &mut Option<(Inflight, OwnedFd)>,
        random: &mut Random,
        totals: &mut Totals,
    ) -> Result<bool> {
        if kept.is_none() || random.one_in(4) {
            let num_queues = self.rings.len() as u16;
            let queue_size = self.rings.iter().map(|ring| ring.ring.size).max().unwrap_or(1);
            let wanted = Inflight { num_queues, queue_size, ..Inflight::default() };
            match self.wire.say(&Message::GetInflightFd(wanted), totals)? {
                Some(Answer::Inflight(described, file)) => *kept = Some((described, file)),
                Some(_) => return Ok(true),
                None => return Ok(false),
            }
        }
        let Some((described, file)) = kept else { return Ok(true) };
        if random.one_in(2) {
            for _ in 0..random.below(64) {
                let at = described.mmap_offset + random.below(described.mmap_size.max(1));
                // Only a file that cannot be written refuses.
                let _ = rustix::io::pwrite(&*file, &random.next().to_le_bytes(), at);
            }
        }
        let message = Message::SetInflightFd(*described, file.try_clone()?);
        Ok(self.wire.say(&message, totals)?.is_some())
    }

    /// Sets a ring up and starts it, now and then in another order. Returns whether the connection is still
    /// there.
    fn start(&mut self, at: usize, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        let ring = &self.rings[at].ring;
        let (index, fd_index) = (u32::from(ring.index), u8::try_from(ring.index)?);
        let event = |fd: BorrowedFd<'_>| -> Result<VringFd> {
            Ok(VringFd { index: fd_index, fd: Some(fd.try_clone_to_owned()?) })
        };
        let mut messages = vec![
            Message::SetVringNum(VringState { index, num: ring.size.into() }),
            Message::SetVringBase(VringState { index, num: ring.base() }),
            Message::SetVringAddr(addresses(ring)),
            Message::SetVringCall(event(ring.call.as_fd())?),
            Message::SetVringErr(event(ring.err.as_fd())?),
            Message::SetVringKick(event(ring.kick.as_fd())?),
            Message::SetVringEnable { index, enable: true },
        ];
        if random.one_in(32) {
            let (a, b) = (random.below(7) as usize, random.below(7) as usize);
            messages.swap(a, b);
        }
        if random.one_in(32) {
            messages.remove(random.below(7) as usize);
        }
        for message in messages {
            if self.wire.say(&message, totals)?.is_none() {
                return Ok(false);
            }
        }
        self.rings[at].ring.kick.signal();
        Ok(true)
    }

    /// Submits some chains to one of the rings, and takes back what is done. Returns whether the connection
    /// is still there.
    fn burst(&mut self, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        let Some(at) = random.next().checked_rem(self.rings.len() as u64) else { return Ok(true) };
        let at = at as usize;
        let RingOfRole { ring, place, role, stalls } = &mut self.rings[at];
        let done = ring.reap();
        match role {
            Role::Requests => totals.requests += done,
            Role::Transmit => totals.frames += done,
            Role::Receive => totals.received += done,
            Role::Control => totals.commands += done,
        }
        let mut left = 1 + random.below(256);
        let mut chain = [Piece::default(); 4];
        while left > 0 && ring.has_room() {
            let slot = ring.slot();
            let count = match role {
                Role::Requests => place.request(slot, random, self.has_indirect, &mut chain),
                Role::Receive => place.buffer(slot, random, &mut chain),
                Role::Transmit => place.frame(slot, random, &mut chain),
                Role::Control => place.command(slot, random, &mut chain),
            };
            ring.offer(&chain[..count]);
            left -= 1;
        }
        ring.publish();
        if random.one_in(64) {
            ring.ask_for_calls(random);
        }
        if done > 0 {
            *stalls = 0;
            if random.one_in(4) {
                ring.kick.signal();
            }
            return Ok(true);
        }
        *stalls += 1;
        ring.kick.signal();
        // A broken ring, or one that a message has stopped. A receive ring may have nothing to receive.
        let is_broken = ring.err.take() > 0;
        if is_broken || *stalls > STALLS_MAX && *role != Role::Receive {
            totals.broken += u64::from(is_broken);
            return self.restart(at, random, totals);
        }
        if *stalls > 8 {
            totals.pauses += 1;
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(true)
    }

    /// Stops a ring, empties it, and starts it again.
    fn restart(&mut self, at: usize, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        let index = self.rings[at].ring.index.into();
        if self.wire.say(&Message::GetVringBase { index }, totals)?.is_none() {
            return Ok(false);
        }
        self.rings[at].ring.clear();
        self.rings[at].stalls = 0;
        self.start(at, random, totals)
    }

    /// Shares the memory again, and starts all rings again.
    fn repair(&mut self, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        let table = Message::SetMemTable(vec![self.ram.region_and_file()?]);
        if self.wire.say(&table, totals)?.is_none() {
            return Ok(false);
        }
        for at in 0..self.rings.len() {
            if !self.restart(at, random, totals)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends any message.
    fn message(&mut self, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        if random.one_in(32) {
            let wanted = self.protocol & ProtocolFeatures::from_bits_retain(random.next());
            // Whether this message itself is acknowledged depends on its content.
            self.wire.acks = false;
            let answer = self.wire.say(&Message::SetProtocolFeatures(wanted), totals)?;
            self.wire.acks = wanted.contains(ProtocolFeatures::REPLY_ACK);
            return Ok(answer.is_some());
        }
        if random.one_in(6) {
            let code = UNDECODED[random.below(UNDECODED.len() as u64) as usize];
            let len = random.below(64);
            let (payload, file) = (random.bytes(len), descriptors::any(random, &self.wire.socket)?);
            let fds = if random.one_in(2) { &[file.as_fd()][..] } else { &[] };
            let answer = self.wire.say_undecoded(code, &payload, fds, totals)?;
            totals.refused += u64::from(answer.is_some());
            return Ok(answer.is_some());
        }
        let ring = &self.rings[random.below(self.rings.len() as u64) as usize].ring;
        let known = Known {
            socket: &self.wire.socket,
            ram: &self.ram,
            offered: self.offered,
            protocol: self.protocol,
            addresses: addresses(ring),
        };
        let message = known.message(random)?;
        let answer = self.wire.say(&message, totals)?;
        totals.refused += u64::from(matches!(answer, Some(Answer::Refused | Answer::Number(_))));
        Ok(answer.is_some())
    }

    fn lie(&mut self, random: &mut Random) {
        let at = random.below(self.rings.len() as u64) as usize;
        let ring = &mut self.rings[at].ring;
        ring.lie(random);
        ring.kick.signal();
    }

    /// Changes the memory under the rings that run.
    fn change_memory(&mut self, random: &mut Random, totals: &mut Totals) -> Result<bool> {
        match random.below(6) {
            0 => self.ram.truncate(Gpa(RAM_BASE + random.below(MEMORY)))?,
            1 | 2 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let (from, len) = (random.below(MEMORY), 1 + random.below(MEMORY));
                fallocate(self.ram.as_fd(), flags, from, len)?;
            }
            3 => return self.repair(random, totals),
            4 => {
                // The same memory as two regions.
                let middle = Gpa(RAM_BASE + MEMORY / 2);
                let table = Message::SetMemTable(self.ram.regions_and_files(middle)?);
                return Ok(self.wire.say(&table, totals)?.is_some());
            }
            _ => {
                // A log that is too small, or shrinks.
                let file = memfd_create("walk-log", MemfdFlags::CLOEXEC)?;
                let len = 1 << random.below(18);
                ftruncate(&file, len)?;
                let log = LogBase::Shared { mmap_size: len, mmap_offset: 0, fd: Some(file.try_clone()?) };
                if self.wire.say(&Message::SetLogBase(log), totals)?.is_none() {
                    return Ok(false);
                }
                let features = self.offered - Features::ACCESS_PLATFORM;
                if self.wire.say(&Message::SetFeatures(features), totals)?.is_none() {
                    return Ok(false);
                }
                if random.one_in(2) {
                    ftruncate(&file, 0)?;
                }
                self.kept.push(file);
            }
        }
        Ok(true)
    }

    /// Ends the session in one of many ways.
    fn end(mut self, random: &mut Random, totals: &mut Totals) -> Result<()> {
        match random.below(8) {
            // With requests in flight.
            0..4 => return Ok(()),
            4 => {
                for at in 0..self.rings.len() {
                    let index = self.rings[at].ring.index.into();
                    if self.wire.say(&Message::GetVringBase { index }, totals)?.is_none() {
                        return Ok(());
                    }
                }
                return Ok(());
            }
            _ => {}
        }
        // Bytes that are no message, or the beginning of one, or a message with too many descriptors.
        totals.messages += 1;
        let request = if random.one_in(4) { random.next() as u32 } else { random.below(48) as u32 };
        let size = if random.one_in(4) { random.next() as u32 } else { random.below(300) as u32 };
        let flags = if random.one_in(4) { random.next() as u32 } else { 1 | (random.below(4) as u32) << 2 };
        let header = Header { request, flags, size };
        let sent = random.below(300);
        let bytes = [&header.to_bytes()[..], &random.bytes(sent)].concat();
        let fds = (0..random.below(12)).map(|_| descriptors::any(random, &self.wire.socket));
        let fds = fds.collect::<Result<Vec<_>>>()?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        if let Err(error) = send_raw(&self.wire.socket, &bytes, &fds) {
            ensure!(is_closed(error.kind()), "the bytes of a message cannot be sent: {error}");
        }
        // The daemon must find the end of the stream, whatever it thought of the bytes.
        let _ = self.wire.socket.shutdown(Shutdown::Write);
        self.wire.socket.set_read_timeout(Some(LIMIT))?;
        let mut rest = [0; 4096];
        loop {
            match self.wire.socket.read(&mut rest) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if is_closed(error.kind()) => return Ok(()),
                Err(error) => bail!("the session does not end after {header:?}, {sent} bytes: {error}"),
            }
        }
    }
}

fn addresses(ring: &Ring) -> VringAddr {
    let [desc_addr, avail_addr, used_addr] = ring.user;
    VringAddr { index: ring.index.into(), desc_addr, avail_addr, used_addr, ..VringAddr::default() }
}
