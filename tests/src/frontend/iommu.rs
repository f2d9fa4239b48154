//! The front-end's part of a vIOMMU: it is asked for translations, and answers when the test says so.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{IotlbAccess, IotlbKind};
use kickless_vhost_user::{
    BackendMessage, Error, FrontendMessage as Message, FrontendReply, FrontendResponder, Header, Iotlb,
    VringAddr, VringState, Wait,
};

use crate::driver::memory::Ram;
use crate::driver::{Buffer, Queue};
use crate::frontend::{Answer, Frontend, LIMIT, descriptor};

/// A page.
pub const PAGE: u64 = 4096;
/// What lies between what the device sees and what the guest has: who takes one for the other is found out.
pub const DISTANCE: u64 = 0x70_0000_0000;

/// What a device asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Where.
    pub iova: u64,
    /// What it wants to do there.
    pub access: IotlbAccess,
    header: Header,
}

/// The front-end's end of the channel for misses, and the pages that it would tell of.
pub struct Iommu {
    channel: FrontendResponder,
    pages: BTreeMap<u64, u64>,
    /// Misses so far.
    pub misses: u64,
}

impl Iommu {
    /// Opens the channel, and negotiates a vIOMMU over all that was negotiated before.
    ///
    /// # Errors
    /// It is refused.
    pub fn connect(frontend: &mut Frontend) -> Result<Iommu> {
        let (ours, theirs) = UnixStream::pair()?;
        frontend.order(&Message::SetBackendReqFd(OwnedFd::from(theirs)))?;
        frontend.set_features(frontend.features() | Features::ACCESS_PLATFORM)?;
        Ok(Iommu { channel: FrontendResponder::new(ours), pages: BTreeMap::new(), misses: 0 })
    }

    /// The device may see all of this memory, page by page, at [`DISTANCE`].
    pub fn map_all(&mut self, ram: &Ram) {
        let region = ram.region();
        for page in 0..region.size / PAGE {
            self.map(region.guest_addr + DISTANCE + page * PAGE, region.user_addr + page * PAGE);
        }
    }

    /// The device may see a page of the front-end's.
    pub fn map(&mut self, iova: u64, user: u64) {
        self.pages.insert(iova, user);
    }

    /// It may not see that any more. Nothing is said to it yet.
    pub fn unmap(&mut self, iova: u64) {
        self.pages.remove(&iova);
    }

    /// The next miss, if there is one in time.
    ///
    /// # Errors
    /// The channel is gone, or something else comes on it.
    pub fn miss(&mut self, time: Duration) -> Result<Option<Miss>> {
        loop {
            let received = match self.channel.recv(&Wait::FOREVER.at_most(time)) {
                Ok(Some(received)) => received,
                Ok(None) => bail!("the channel for misses is closed"),
                Err(Error::Interrupted) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            match received.message {
                BackendMessage::IotlbMsg(Iotlb { kind: IotlbKind::Miss, iova, access, .. }) => {
                    self.misses += 1;
                    return Ok(Some(Miss { iova, access, header: received.header }));
                }
                // Told to who has just come.
                BackendMessage::ConfigChange => {
                    self.channel.ack(&received.header, true, &Wait::FOREVER.at_most(LIMIT))?;
                }
                other => bail!("{other:?} comes on the channel for misses"),
            }
        }
    }

    /// Answers a miss as QEMU does: an update first, if there is such a page, and then whether there was.
    ///
    /// # Errors
    /// The update is refused, or a connection is gone.
    pub fn answer(&mut self, frontend: &mut Frontend, miss: &Miss) -> Result<()> {
        let user = self.pages.get(&miss.iova).copied();
        if let Some(user) = user {
            frontend.order(&update(miss.iova, PAGE, user, IotlbAccess::READ | IotlbAccess::WRITE))?;
        }
        self.reply(miss, user.is_some())
    }

    /// Replies to a miss.
    ///
    /// # Errors
    /// The channel is gone.
    pub fn reply(&mut self, miss: &Miss, done: bool) -> Result<()> {
        let reply = FrontendReply::Ack(u64::from(!done));
        Ok(self.channel.reply(&miss.header, &reply, &Wait::FOREVER.at_most(LIMIT))?)
    }

    /// Answers misses until the queue has something used; the length of that.
    ///
    /// # Errors
    /// It has nothing in time.
    pub fn wait_used(&mut self, frontend: &mut Frontend, queue: &mut Queue) -> Result<u32> {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            while let Some(miss) = self.miss(Duration::from_millis(5))? {
                self.answer(frontend, &miss)?;
            }
            if let Ok(used) = queue.wait_used(Instant::now()) {
                return Ok(used.len);
            }
        }
        bail!("the request does not come back")
    }
}

/// An update.
pub fn update(iova: u64, size: u64, user_addr: u64, access: IotlbAccess) -> Message {
    Message::IotlbMsg(Iotlb { kind: IotlbKind::Update, iova, size, user_addr, access })
}

/// An invalidation.
pub fn invalidate(iova: u64, size: u64) -> Message {
    let access = IotlbAccess::empty();
    Message::IotlbMsg(Iotlb { kind: IotlbKind::Invalidate, iova, size, user_addr: 0, access })
}

/// Tells everything about a queue, whose areas are at [`DISTANCE`], and starts it.
///
/// # Errors
/// Something is refused.
pub fn start(frontend: &mut Frontend, ram: &Ram, queue: &Queue) -> Result<()> {
    let index = queue.index().into();
    frontend.order(&Message::SetVringNum(VringState { index, num: queue.size().into() }))?;
    frontend.order(&Message::SetVringBase(VringState { index, num: queue.base() }))?;
    frontend.order(&Message::SetVringAddr(addresses(ram, queue)))?;
    frontend.set_call(queue)?;
    let err = descriptor(queue, std::os::fd::AsFd::as_fd(queue.err()))?;
    frontend.order(&Message::SetVringErr(err))?;
    frontend.set_kick(queue)?;
    frontend.enable(queue, true)
}

/// SET_VRING_ADDR of a queue whose areas are at [`DISTANCE`].
pub fn addresses(ram: &Ram, queue: &Queue) -> VringAddr {
    let [desc_addr, avail_addr, used_addr] =
        queue.user_addresses().map(|user| user - ram.region().user_addr + ram.region().guest_addr + DISTANCE);
    VringAddr { index: queue.index().into(), desc_addr, avail_addr, used_addr, ..VringAddr::default() }
}

/// The buffers where the device sees them.
pub fn seen(buffers: &[Buffer]) -> Vec<Buffer> {
    let shift = |b: &Buffer| Buffer { addr: kickless_memory::Gpa(b.addr.0 + DISTANCE), ..*b };
    buffers.iter().map(shift).collect()
}

/// A message that must be refused, on a connection that goes on.
///
/// # Errors
/// It is carried out, or the connection is dropped.
pub fn refused(frontend: &mut Frontend, message: &Message) -> Result<()> {
    match frontend.attempt(message)? {
        Answer::Refused => Ok(()),
        answer => Err(anyhow::anyhow!("{answer:?}")).with_context(|| format!("{message:?}")),
    }
}
