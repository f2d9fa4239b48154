//! Answers each request of a driver at once and without a check, as the smallest possible back-end. It shows
//! the rate that a driver itself can reach: the ceiling of a measurement of `null:` with that driver.
//!
//!     trivial-responder SOCKET
//!
//! It serves split rings in turn, polls them all the time, and trusts the driver. So it is for measurements
//! only.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use kickless_memory::{Area, Gpa, Map, Slot, UserAddr, View};
use kickless_spec::blk::{BlkFeatures, Config, S_OK};
use kickless_spec::features::Features;
use kickless_spec::ring::{
    DESC_F_INDIRECT, DESC_F_NEXT, Desc, RING_ENTRIES, RING_FLAGS, RING_IDX, USED_F_NO_NOTIFY, UsedElem,
    avail_len, desc_len, used_len,
};
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_vhost_user::{
    Backend, Expects, FrontendMessage as Message, MemoryRegion, Reply, VringAddr, VringState, Wait,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::IntoBytes;

/// Number of empty polls of the rings between two polls of the connection.
const POLLS: u32 = 1 << 16;
/// Completions are shown after the first of a batch and after each 16 more, as `kickless blk` does.
const SHOW_AFTER: u16 = 16;
const DISK_LEN: u64 = 1 << 30;
const QUEUES: u16 = 4;

/// A ring of the driver.
struct Ring {
    desc: Area,
    avail: Area,
    used: Area,
    mask: u16,
    next: u16,
}

impl Ring {
    fn new(view: &View, size: u16, addr: &VringAddr) -> Result<Ring> {
        let area = |at, len| view.map().area(UserAddr(at), len, 2).context("a ring outside of the memory");
        let used = area(addr.used_addr, used_len(size, true))?;
        used.store_u16(RING_FLAGS, USED_F_NO_NOTIFY, Ordering::Relaxed);
        Ok(Ring {
            desc: area(addr.desc_addr, desc_len(size))?,
            avail: area(addr.avail_addr, avail_len(size, true))?,
            used,
            mask: size - 1,
            next: 0,
        })
    }

    /// Answers all requests that are there. Returns whether there was one.
    fn poll(&mut self, view: &View) -> Result<bool> {
        let end = self.avail.load_u16(RING_IDX, Ordering::Acquire);
        let mut show_at = self.next.wrapping_add(1);
        if self.next == end {
            return Ok(false);
        }
        while self.next != end {
            let entry = usize::from(self.next & self.mask);
            let head = self.avail.load_u16(RING_ENTRIES + 2 * entry, Ordering::Relaxed);
            view.map().write_obj(self.status_of(view, head)?, &S_OK)?;
            let element = UsedElem { id: u32::from(head).into(), len: 4097.into() };
            self.used.write(RING_ENTRIES + size_of::<UsedElem>() * entry, &element);
            self.next = self.next.wrapping_add(1);
            if self.next == show_at || self.next == end {
                self.used.store_u16(RING_IDX, self.next, Ordering::Release);
                show_at = self.next.wrapping_add(SHOW_AFTER);
            }
        }
        Ok(true)
    }

    /// Returns the address of the status byte: the last byte of the chain.
    fn status_of(&self, view: &View, head: u16) -> Result<Gpa> {
        let mut last: Desc = self.desc.read(size_of::<Desc>() * usize::from(head));
        while last.flags.get() & DESC_F_NEXT != 0 {
            last = self.desc.read(size_of::<Desc>() * usize::from(last.next.get()));
        }
        if last.flags.get() & DESC_F_INDIRECT != 0 {
            let end = last.addr.get() + u64::from(last.len.get());
            last = view.map().read_obj(Gpa(end - size_of::<Desc>() as u64))?;
        }
        Ok(Gpa(last.addr.get() + u64::from(last.len.get()) - 1))
    }
}

/// The state of the connection.
struct Session {
    backend: Backend,
    slots: Vec<Slot>,
    view: Arc<View>,
    sizes: BTreeMap<u32, u16>,
    addresses: BTreeMap<u32, VringAddr>,
    rings: Vec<(u32, Ring)>,
}

impl Session {
    fn share(&mut self, region: &MemoryRegion, file: &std::os::fd::OwnedFd) -> Result<()> {
        let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
        self.slots.push(Slot::map(file, region.mmap_offset, gpa, user, region.size)?);
        self.view = Arc::new(View::new(Map::new(self.slots.clone())?));
        Ok(())
    }

    fn answer(&mut self, message: Message) -> Result<Option<Reply>> {
        let number = |value| Ok(Some(Reply::U64(value)));
        match message {
            Message::GetFeatures => {
                let blk = BlkFeatures::SEG_MAX | BlkFeatures::SIZE_MAX | BlkFeatures::MQ;
                let blk = Features::from_bits_retain(blk.bits());
                let ring = Features::VERSION_1 | Features::PROTOCOL_FEATURES | Features::INDIRECT_DESC;
                return number((blk | ring).bits());
            }
            Message::GetProtocolFeatures => {
                let features = ProtocolFeatures::MQ | ProtocolFeatures::CONFIG | ProtocolFeatures::REPLY_ACK;
                return number(features.bits());
            }
            Message::GetQueueNum => return number(QUEUES.into()),
            Message::GetConfig(wanted) => {
                let config = Config {
                    capacity: (DISK_LEN / 512).into(),
                    size_max: (1 << 20).into(),
                    seg_max: 30.into(),
                    blk_size: 512.into(),
                    num_queues: QUEUES.into(),
                    ..Config::default()
                };
                let data = config.as_bytes().iter().copied().skip(wanted.offset as usize);
                let data: Vec<u8> = data.chain(std::iter::repeat(0)).take(wanted.data.len()).collect();
                return Ok(Some(Reply::Config(Some(wanted.answer(&data)))));
            }
            Message::SetMemTable(regions) => {
                self.slots.clear();
                for (region, file) in regions {
                    self.share(&region, &file)?;
                }
            }
            Message::SetVringNum(VringState { index, num }) => {
                self.sizes.insert(index, u16::try_from(num)?);
            }
            Message::SetVringAddr(addr) => {
                self.addresses.insert(addr.index, addr);
            }
            Message::SetVringEnable { index, .. } => {
                let (size, addr) = (self.sizes.get(&index), self.addresses.get(&index));
                let (size, addr) = size.zip(addr).context("a ring without a size or an address")?;
                let ring = Ring::new(&self.view, *size, addr)?;
                self.rings.retain(|(other, _)| *other != index);
                self.rings.push((index, ring));
            }
            Message::GetVringBase { index } => {
                let stopped = self.rings.iter().position(|(other, _)| *other == index);
                let num = stopped.map_or(0, |at| self.rings.remove(at).1.next.into());
                return Ok(Some(Reply::VringBase(VringState { index, num })));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Serves messages and the rings until the driver leaves.
    fn run(&mut self, socket: &impl std::os::fd::AsFd) -> Result<()> {
        loop {
            let now = (!self.rings.is_empty()).then_some(Timespec { tv_sec: 0, tv_nsec: 0 });
            let mut fds = [PollFd::new(socket, PollFlags::IN)];
            if poll(&mut fds, now.as_ref())? > 0 {
                let Some(received) = self.backend.recv(&Wait::FOREVER)? else { return Ok(()) };
                let (header, acknowledged) = (received.header, received.expects() == Expects::Ack);
                let reply = self.answer(received.message)?.or(acknowledged.then_some(Reply::U64(0)));
                if let Some(reply) = reply {
                    self.backend.reply(&header, &reply, &Wait::FOREVER)?;
                }
            }
            let mut idle = 0;
            while idle < POLLS && !self.rings.is_empty() {
                idle += 1;
                for (_, ring) in &mut self.rings {
                    if ring.poll(&self.view)? {
                        idle = 0;
                    }
                }
                std::hint::spin_loop();
            }
        }
    }
}

fn main() -> Result<()> {
    let Some(path) = std::env::args_os().nth(1) else { bail!("usage: trivial-responder SOCKET") };
    let listener = UnixListener::bind(path)?;
    loop {
        let (socket, _) = listener.accept()?;
        let mut session = Session {
            backend: Backend::new(socket.try_clone()?),
            slots: Vec::new(),
            view: Arc::default(),
            sizes: BTreeMap::new(),
            addresses: BTreeMap::new(),
            rings: Vec::new(),
        };
        if let Err(error) = session.run(&socket) {
            eprintln!("the connection ends: {error:#}");
        }
    }
}
