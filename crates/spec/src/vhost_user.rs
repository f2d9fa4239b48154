//! The wire types of vhost-user (*Vhost-user Protocol*, QEMU `docs/interop/vhost-user.rst`).
//!
//! A message is a [`Header`], `size` bytes of payload and, beside the bytes, file descriptors. The protocol
//! has the machine's own byte order. kickless runs on little-endian machines, so everything here is
//! little-endian.
//!
//! [`FrontendRequest`] and [`BackendRequest`] number the requests of each side. A payload structure has the
//! name of the section of the specification that describes it. There are structures for the requests that a
//! disk or a network card needs.

mod inflight;
mod payload;
mod request;

use bitflags::bitflags;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use inflight::*;
pub use payload::*;
pub use request::{BackendRequest, FrontendRequest};

/// The version of the protocol, in the two low bits of [`Header::flags`].
pub const VERSION: u32 = 1;
/// [`Header::flags`]: the bits of the version.
pub const FLAG_VERSION_MASK: u32 = 0x3;
/// [`Header::flags`]: the message is a reply.
pub const FLAG_REPLY: u32 = 1 << 2;
/// [`Header::flags`]: the sender wants an acknowledgement (with [`ProtocolFeatures::REPLY_ACK`]).
pub const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Most regions in SET_MEM_TABLE. More regions need [`ProtocolFeatures::CONFIGURE_MEM_SLOTS`].
pub const MEM_TABLE_REGIONS_MAX: usize = 8;
/// Most file descriptors with one message.
pub const FDS_MAX: usize = 8;
/// Largest device configuration space in bytes. The limit is QEMU's.
pub const CONFIG_SIZE_MAX: usize = 256;
/// Bytes of guest memory that one bit of the dirty log stands for.
pub const LOG_PAGE_SIZE: u64 = 4096;

/// Bits of the ring's index in SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR and VRING_HOST_NOTIFIER_MSG.
pub const VRING_INDEX_MASK: u64 = 0xff;
/// Most rings of a device that can be used: those with an index in [`VRING_INDEX_MASK`].
pub const RINGS_MAX: u16 = VRING_INDEX_MASK as u16 + 1;
/// Bit beside [`VRING_INDEX_MASK`] in the same messages, and in the reply to SET_DEVICE_STATE_FD: the message
/// carries no file descriptor.
pub const NO_FD: u64 = 1 << 8;
/// Bits of the error in the reply to SET_DEVICE_STATE_FD. Zero means success.
pub const DEVICE_STATE_ERROR_MASK: u64 = 0xff;

/// [`VringAddr::flags`]: mark writes to the used ring in the dirty log, at [`VringAddr::log_guest_addr`].
pub const VRING_F_LOG: u32 = 1 << 0;
/// [`ConfigHeader::flags`]: a write by the guest, to writable fields only.
pub const CONFIG_FRONTEND: u32 = 0;
/// [`ConfigHeader::flags`]: a write by live migration, which may change read-only fields as well.
pub const CONFIG_MIGRATION: u32 = 1;

/// The head of each message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// A [`FrontendRequest`] or a [`BackendRequest`].
    pub request: U32,
    /// `FLAG_*`.
    pub flags: U32,
    /// Bytes of payload that follow.
    pub size: U32,
}

bitflags! {
    /// Protocol features (`VHOST_USER_PROTOCOL_F_*`). A set keeps bits without a name.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ProtocolFeatures: u64 {
        /// GET_QUEUE_NUM.
        const MQ = 1 << 0;
        /// SET_LOG_BASE brings the dirty log as a file descriptor and gets a reply.
        const LOG_SHMFD = 1 << 1;
        /// SEND_RARP.
        const RARP = 1 << 2;
        /// Acknowledgements on demand.
        const REPLY_ACK = 1 << 3;
        /// NET_SET_MTU.
        const MTU = 1 << 4;
        /// SET_BACKEND_REQ_FD.
        const BACKEND_REQ = 1 << 5;
        /// SET_VRING_ENDIAN.
        const CROSS_ENDIAN = 1 << 6;
        /// CREATE_CRYPTO_SESSION and CLOSE_CRYPTO_SESSION.
        const CRYPTO_SESSION = 1 << 7;
        /// POSTCOPY_ADVISE, POSTCOPY_LISTEN and POSTCOPY_END.
        const PAGEFAULT = 1 << 8;
        /// GET_CONFIG and SET_CONFIG.
        const CONFIG = 1 << 9;
        /// Requests of the back-end can bring file descriptors.
        const BACKEND_SEND_FD = 1 << 10;
        /// VRING_HOST_NOTIFIER_MSG.
        const HOST_NOTIFIER = 1 << 11;
        /// GET_INFLIGHT_FD and SET_INFLIGHT_FD.
        const INFLIGHT_SHMFD = 1 << 12;
        /// RESET_DEVICE.
        const RESET_DEVICE = 1 << 13;
        /// VRING_KICK, VRING_CALL and VRING_ERR in place of eventfds.
        const INBAND_NOTIFICATIONS = 1 << 14;
        /// GET_MAX_MEM_SLOTS, ADD_MEM_REG and REM_MEM_REG.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// SET_STATUS and GET_STATUS.
        const STATUS = 1 << 16;
        /// Memory regions have fields of Xen at their end.
        const XEN_MMAP = 1 << 17;
        /// Requests about shared objects.
        const SHARED_OBJECT = 1 << 18;
        /// SET_DEVICE_STATE_FD and CHECK_DEVICE_STATE.
        const DEVICE_STATE = 1 << 19;
        /// GET_VRING_BASE may leave requests in flight, recorded in the buffer of SET_INFLIGHT_FD. Without
        /// it, GET_VRING_BASE completes all requests.
        const GET_VRING_BASE_INFLIGHT = 1 << 20;
        /// Front-end addresses are guest-physical ones, in memory regions as in rings.
        const GPA_ADDRESSES = 1 << 21;
        /// GET_SHMEM_CONFIG, SHMEM_MAP and SHMEM_UNMAP. Version 0.16 of the `vhost` crate has bit 21 for it.
        const SHMEM = 1 << 22;
        /// GET_VRING_BASE_SKIP_DRAIN, which leaves requests in flight. GET_VRING_BASE completes them then.
        const GET_VRING_BASE_SKIP_DRAIN = 1 << 23;
        const _ = !0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_features_are_numbered_as_in_the_specification() {
        // The specification's list (QEMU after 11.1), from bit 0 on. It calls bit 22 SHMEM_MAP in places.
        let names = "MQ LOG_SHMFD RARP REPLY_ACK MTU BACKEND_REQ CROSS_ENDIAN CRYPTO_SESSION PAGEFAULT CONFIG \
                     BACKEND_SEND_FD HOST_NOTIFIER INFLIGHT_SHMFD RESET_DEVICE INBAND_NOTIFICATIONS \
                     CONFIGURE_MEM_SLOTS STATUS XEN_MMAP SHARED_OBJECT DEVICE_STATE GET_VRING_BASE_INFLIGHT \
                     GPA_ADDRESSES SHMEM GET_VRING_BASE_SKIP_DRAIN";
        for (bit, name) in names.split_whitespace().enumerate() {
            let feature = ProtocolFeatures::from_name(name).map(|feature| feature.bits());
            assert_eq!(feature, Some(1 << bit), "{name}");
        }
        let all: u64 = ProtocolFeatures::all().iter_names().map(|(_, feature)| feature.bits()).sum();
        assert_eq!(all, (1 << 24) - 1);
    }
}
