//! The front-end's part of a vIOMMU. The back-end asks it for translations; the test decides when it
//! answers.

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

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Distance of the device's addresses from the guest's, so that a back-end that confuses them fails.
pub const DISTANCE: u64 = 0x70_0000_0000;

/// A translation that the device asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The address.
    pub iova: u64,
    /// The access that the device wants.
    pub access: IotlbAccess,
    header: Header,
}

/// The front-end's end of the channel for misses, and the pages that it can translate.
pub struct Iommu {
    channel: FrontendResponder,
    pages: BTreeMap<u64, u64>,
    /// Number of misses so far.
    pub misses: u64,
}

impl Iommu {
    /// Opens the channel and adds a vIOMMU to the negotiated features.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn connect(frontend: &mut Frontend) -> Result<Iommu> {
        let (ours, theirs) = UnixStream::pair()?;
        frontend.order(&Message::SetBackendReqFd(OwnedFd::from(theirs)))?;
        frontend.set_features(frontend.features() | Features::ACCESS_PLATFORM)?;
        Ok(Iommu { channel: FrontendResponder::new(ours), pages: BTreeMap::new(), misses: 0 })
    }

    /// Lets the device use all of this memory, page by page, at [`DISTANCE`].
    pub fn map_all(&mut self, ram: &Ram) {
        let region = ram.region();
        for page in 0..region.size / PAGE {
            self.map(region.guest_addr + DISTANCE + page * PAGE, region.user_addr + page * PAGE);
        }
    }

    /// Lets the device use one page of the front-end.
    pub fn map(&mut self, iova: u64, user: u64) {
        self.pages.insert(iova, user);
    }

    /// Removes a page. Does not tell the device.
    pub fn unmap(&mut self, iova: u64) {
        self.pages.remove(&iova);
    }

    /// Returns the next miss, or `None` if none comes in time.
    ///
    /// # Errors
    /// The channel is closed, or another message comes on it.
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
                // The back-end sends this message to a front-end that has just connected.
                BackendMessage::ConfigChange => {
                    self.channel.ack(&received.header, true, &Wait::FOREVER.at_most(LIMIT))?;
                }
                other => bail!("{other:?} came on the channel for misses"),
            }
        }
    }

    /// Answers a miss as QEMU does: first an update, if there is such a page, then a reply that says
    /// whether there is one.
    ///
    /// # Errors
    /// The back-end refuses the update, or a connection is closed.
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
    /// The channel is closed.
    pub fn reply(&mut self, miss: &Miss, done: bool) -> Result<()> {
        let reply = FrontendReply::Ack(u64::from(!done));
        Ok(self.channel.reply(&miss.header, &reply, &Wait::FOREVER.at_most(LIMIT))?)
    }

    /// Answers misses until the queue has a used element, and returns its length.
    ///
    /// # Errors
    /// No used element comes in time.
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
        bail!("the request did not complete")
    }
}

/// Returns an IOTLB update.
pub fn update(iova: u64, size: u64, user_addr: u64, access: IotlbAccess) -> Message {
    Message::IotlbMsg(Iotlb { kind: IotlbKind::Update, iova, size, user_addr, access })
}

/// Returns an IOTLB invalidation.
pub fn invalidate(iova: u64, size: u64) -> Message {
    let access = IotlbAccess::empty();
    Message::IotlbMsg(Iotlb { kind: IotlbKind::Invalidate, iova, size, user_addr: 0, access })
}

/// Sets up a queue with its areas at [`DISTANCE`], and starts it.
///
/// # Errors
/// The back-end refuses a message.
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

/// Returns the SET_VRING_ADDR argument of a queue with its areas at [`DISTANCE`].
pub fn addresses(ram: &Ram, queue: &Queue) -> VringAddr {
    let [desc_addr, avail_addr, used_addr] =
        queue.user_addresses().map(|user| user - ram.region().user_addr + ram.region().guest_addr + DISTANCE);
    VringAddr { index: queue.index().into(), desc_addr, avail_addr, used_addr, ..VringAddr::default() }
}

/// Returns the buffers at the addresses that the device uses.
pub fn at_iova(buffers: &[Buffer]) -> Vec<Buffer> {
    let shift = |b: &Buffer| Buffer { addr: kickless_memory::Gpa(b.addr.0 + DISTANCE), ..*b };
    buffers.iter().map(shift).collect()
}

/// Sends a message that the back-end must refuse without closing the connection.
///
/// # Errors
/// The back-end accepts it, or closes the connection.
pub fn expect_refused(frontend: &mut Frontend, message: &Message) -> Result<()> {
    match frontend.attempt(message)? {
        Answer::Refused => Ok(()),
        answer => Err(anyhow::anyhow!("{answer:?}")).with_context(|| format!("{message:?}")),
    }
}
