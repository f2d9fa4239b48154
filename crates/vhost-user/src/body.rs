//! Decodes and encodes payload and file descriptors of one message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kickless_spec::vhost_user::{
    self as wire, CONFIG_SIZE_MAX, IotlbAccess, IotlbKind, MEM_TABLE_REGIONS_MAX, NO_FD, VRING_F_LOG,
    VRING_INDEX_MASK,
};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::MessageError;
use crate::payload::{Config, Inflight, Iotlb, MemoryRegion, VringAddr, VringFd, VringState};

/// The body of a received message. A method that consumes it checks that nothing is left over.
pub(crate) struct Body<'a> {
    pub(crate) request: &'static str,
    pub(crate) payload: &'a [u8],
    pub(crate) fds: Vec<OwnedFd>,
}

impl Body<'_> {
    /// Checks that there is neither payload nor file descriptors.
    pub(crate) fn nothing(self) -> Result<(), MessageError> {
        self.size(0)?;
        self.no_fds()
    }

    /// Returns a file descriptor; there must be no payload.
    pub(crate) fn fd(self) -> Result<OwnedFd, MessageError> {
        self.size(0)?;
        self.one_fd()
    }

    /// Returns a `T`; there must be no file descriptors.
    pub(crate) fn plain<T: FromBytes>(self) -> Result<T, MessageError> {
        let value = self.read(size_of::<T>())?;
        self.no_fds()?;
        Ok(value)
    }

    /// Returns a `T` and its file descriptor.
    pub(crate) fn with_fd<T: FromBytes>(self) -> Result<(T, OwnedFd), MessageError> {
        let value = self.read(size_of::<T>())?;
        Ok((value, self.one_fd()?))
    }

    pub(crate) fn u64(self) -> Result<u64, MessageError> {
        self.plain::<U64>().map(U64::get)
    }

    pub(crate) fn vring_state(self) -> Result<VringState, MessageError> {
        self.plain::<wire::VringState>().map(VringState::from)
    }

    /// Reads the description of an in-flight buffer, with or without padding. File descriptors stay.
    pub(crate) fn inflight(&self) -> Result<Inflight, MessageError> {
        self.read::<wire::Inflight>(wire::Inflight::UNPADDED).map(Inflight::from)
    }

    /// Returns a ring and a switch, which is 0 or 1.
    pub(crate) fn vring_switch(self) -> Result<(u32, bool), MessageError> {
        let request = self.request;
        let VringState { index, num } = self.vring_state()?;
        match num {
            0 | 1 => Ok((index, num == 1)),
            _ => Err(field(request, "num", num.into(), "expected 0 or 1")),
        }
    }

    pub(crate) fn vring_addr(self) -> Result<VringAddr, MessageError> {
        let request = self.request;
        let addr: wire::VringAddr = self.plain()?;
        let flags = addr.flags.get();
        if flags & !VRING_F_LOG != 0 {
            return Err(field(request, "flags", flags.into(), "unknown bits set"));
        }
        Ok(VringAddr {
            index: addr.index.get(),
            log: flags & VRING_F_LOG != 0,
            desc_addr: addr.desc.get(),
            used_addr: addr.used.get(),
            avail_addr: addr.avail.get(),
            log_guest_addr: addr.log_guest_addr.get(),
        })
    }

    pub(crate) fn vring_fd(self) -> Result<VringFd, MessageError> {
        let value = self.read::<U64>(size_of::<U64>())?.get();
        if value & !(VRING_INDEX_MASK | NO_FD) != 0 {
            return Err(field(self.request, "ring index", value, "bits 9 to 63 must be 0"));
        }
        let index = (value & VRING_INDEX_MASK) as u8;
        if value & NO_FD != 0 {
            self.no_fds()?;
            return Ok(VringFd { index, fd: None });
        }
        Ok(VringFd { index, fd: Some(self.one_fd()?) })
    }

    pub(crate) fn iotlb(self) -> Result<Iotlb, MessageError> {
        let request = self.request;
        let msg: wire::IotlbMsg = self.read(wire::IotlbMsg::UNPADDED)?;
        self.no_fds()?;
        let kind = IotlbKind::from_raw(msg.kind)
            .ok_or_else(|| field(request, "type", msg.kind.into(), "expected 1 to 4"))?;
        let access = match kind {
            // QEMU sends whatever lies there, because an invalidation has no permissions.
            IotlbKind::Invalidate => IotlbAccess::empty(),
            IotlbKind::Miss | IotlbKind::Update | IotlbKind::AccessFail => {
                IotlbAccess::from_bits(msg.perm)
                    .ok_or_else(|| field(request, "permissions", msg.perm.into(), "expected 0 to 3"))?
            }
        };
        Ok(Iotlb { kind, iova: msg.iova.get(), size: msg.size.get(), user_addr: msg.user_addr.get(), access })
    }

    pub(crate) fn config(self) -> Result<Config, MessageError> {
        let request = self.request;
        let len = self.payload.len();
        let short = |least| MessageError::PayloadShort { request, len, least };
        let (header, rest) = wire::ConfigHeader::read_from_prefix(self.payload)
            .map_err(|_| short(size_of::<wire::ConfigHeader>()))?;
        let size = header.size.get() as usize;
        if size > CONFIG_SIZE_MAX {
            return Err(field(request, "size", size as u64, "expected at most 256"));
        }
        let data = rest.get(..size).ok_or_else(|| short(size_of::<wire::ConfigHeader>() + size))?.to_vec();
        let spare = rest.len() - size;
        if rest.len() > CONFIG_SIZE_MAX.max(size) {
            let expected = size_of::<wire::ConfigHeader>() + size;
            return Err(MessageError::PayloadSize { request, len, expected });
        }
        self.no_fds()?;
        Ok(Config { offset: header.offset.get(), flags: header.flags.get(), data, spare })
    }

    /// Reads regions and their number.
    pub(crate) fn regions(&self) -> Result<Vec<MemoryRegion>, MessageError> {
        let request = self.request;
        let len = self.payload.len();
        let least = size_of::<wire::MemoryTableHeader>();
        let (header, rest) = wire::MemoryTableHeader::read_from_prefix(self.payload)
            .map_err(|_| MessageError::PayloadShort { request, len, least })?;
        let count = header.num_regions.get() as usize;
        if count > MEM_TABLE_REGIONS_MAX {
            return Err(field(request, "number of regions", count as u64, "expected at most 8"));
        }
        let wrong_size = MessageError::PayloadSize {
            request,
            len,
            expected: least + count * size_of::<wire::MemoryRegion>(),
        };
        let regions =
            <[wire::MemoryRegion]>::ref_from_bytes_with_elems(rest, count).map_err(|_| wrong_size)?;
        Ok(regions.iter().map(MemoryRegion::from).collect())
    }

    /// Reads one region, which follows padding.
    pub(crate) fn region(&self) -> Result<MemoryRegion, MessageError> {
        let single: wire::SingleMemoryRegion = self.read(size_of::<wire::SingleMemoryRegion>())?;
        Ok(MemoryRegion::from(&single.region))
    }

    /// Reads a `T` whose last `size_of::<T>() - least` bytes are padding that may be missing.
    pub(crate) fn read<T: FromBytes>(&self, least: usize) -> Result<T, MessageError> {
        let size = size_of::<T>();
        if self.payload.len() == size {
            return T::read_from_bytes(self.payload).map_err(|_| self.wrong_size(size));
        }
        self.size(least)?;
        let mut padded = self.payload.to_vec();
        padded.resize(size, 0);
        T::read_from_bytes(&padded).map_err(|_| self.wrong_size(size))
    }

    pub(crate) fn size(&self, expected: usize) -> Result<(), MessageError> {
        if self.payload.len() == expected { Ok(()) } else { Err(self.wrong_size(expected)) }
    }

    fn wrong_size(&self, expected: usize) -> MessageError {
        MessageError::PayloadSize { request: self.request, len: self.payload.len(), expected }
    }

    fn wrong_fds(&self, expected: usize) -> MessageError {
        MessageError::FdCount { request: self.request, fds: self.fds.len(), expected }
    }

    pub(crate) fn no_fds(&self) -> Result<(), MessageError> {
        if self.fds.is_empty() { Ok(()) } else { Err(self.wrong_fds(0)) }
    }

    pub(crate) fn one_fd(self) -> Result<OwnedFd, MessageError> {
        let wrong = self.wrong_fds(1);
        let mut fds = self.fds.into_iter();
        match (fds.next(), fds.next()) {
            (Some(fd), None) => Ok(fd),
            _ => Err(wrong),
        }
    }

    pub(crate) fn optional_fd(self) -> Result<Option<OwnedFd>, MessageError> {
        if self.fds.is_empty() { Ok(None) } else { self.one_fd().map(Some) }
    }
}

/// Returns the error for a field with a forbidden value.
pub(crate) fn field(
    request: &'static str,
    field: &'static str,
    value: u64,
    rule: &'static str,
) -> MessageError {
    MessageError::Field { request, field, value, rule }
}

/// An encoded message: the payload, and the file descriptors that go with it.
#[derive(Debug, Default)]
pub struct Encoded<'a> {
    /// At most [`PAYLOAD_MAX`](crate::PAYLOAD_MAX) bytes.
    pub payload: Vec<u8>,
    /// At most [`FDS_MAX`](wire::FDS_MAX).
    pub fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Encoded<'a> {
    pub(crate) fn plain<T: IntoBytes + Immutable>(value: T) -> Self {
        Self { payload: value.as_bytes().to_vec(), fds: Vec::new() }
    }

    pub(crate) fn u64(value: u64) -> Self {
        Self::plain(U64::new(value))
    }

    pub(crate) fn fds(self, fds: impl IntoIterator<Item = &'a OwnedFd>) -> Self {
        Self { fds: fds.into_iter().map(OwnedFd::as_fd).collect(), ..self }
    }

    pub(crate) fn vring_state(index: u32, num: u32) -> Self {
        Self::plain(wire::VringState { index: index.into(), num: num.into() })
    }

    pub(crate) fn vring_addr(addr: &VringAddr) -> Self {
        Self::plain(wire::VringAddr {
            index: addr.index.into(),
            flags: if addr.log { VRING_F_LOG } else { 0 }.into(),
            desc: addr.desc_addr.into(),
            used: addr.used_addr.into(),
            avail: addr.avail_addr.into(),
            log_guest_addr: addr.log_guest_addr.into(),
        })
    }

    pub(crate) fn vring_fd(vring: &'a VringFd) -> Self {
        let no_fd = if vring.fd.is_none() { NO_FD } else { 0 };
        Self::u64(u64::from(vring.index) | no_fd).fds(&vring.fd)
    }

    pub(crate) fn iotlb(msg: &Iotlb) -> Self {
        Self::plain(wire::IotlbMsg {
            iova: msg.iova.into(),
            size: msg.size.into(),
            user_addr: msg.user_addr.into(),
            perm: msg.access.bits(),
            kind: msg.kind as u8,
            padding: [0; 6],
        })
    }

    pub(crate) fn config(config: &Config) -> Self {
        let header = wire::ConfigHeader {
            offset: config.offset.into(),
            size: (config.data.len() as u32).into(),
            flags: config.flags.into(),
        };
        let mut payload = header.as_bytes().to_vec();
        payload.extend_from_slice(&config.data);
        payload.resize(payload.len() + config.spare, 0);
        Self { payload, fds: Vec::new() }
    }

    pub(crate) fn regions<'r>(regions: impl ExactSizeIterator<Item = &'r MemoryRegion>) -> Self {
        let header =
            wire::MemoryTableHeader { num_regions: (regions.len() as u32).into(), padding: 0.into() };
        let mut payload = header.as_bytes().to_vec();
        regions.for_each(|region| payload.extend_from_slice(wire::MemoryRegion::from(region).as_bytes()));
        Self { payload, fds: Vec::new() }
    }

    pub(crate) fn region(region: &MemoryRegion) -> Self {
        Self::plain(wire::SingleMemoryRegion { padding: 0.into(), region: region.into() })
    }
}
