//! Feature bits that any virtio device can have.

use bitflags::bitflags;

bitflags! {
    /// Device-independent feature bits (virtio 1.3, section 6), and the two that vhost-user adds to them.
    ///
    /// Bits 0 to 23 and 50 to 63 belong to the device type. They have no names here, but a set keeps them, so
    /// that it can be passed on whole.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// vhost-user `VHOST_F_LOG_ALL`: mark written pages in the dirty log.
        const LOG_ALL = 1 << 26;
        /// Descriptors may point at a table of descriptors.
        const INDIRECT_DESC = 1 << 28;
        /// `used_event` and `avail_event` replace the flags that suppress notifications.
        const EVENT_IDX = 1 << 29;
        /// vhost-user `VHOST_USER_F_PROTOCOL_FEATURES`: protocol features can be negotiated; rings start
        /// disabled.
        const PROTOCOL_FEATURES = 1 << 30;
        /// Not a legacy device: little-endian everywhere, any layout of buffers.
        const VERSION_1 = 1 << 32;
        /// Addresses go through a platform IOMMU.
        const ACCESS_PLATFORM = 1 << 33;
        /// The packed ring.
        const RING_PACKED = 1 << 34;
        /// Buffers are used in the order in which they were made available.
        const IN_ORDER = 1 << 35;
        /// The driver can reset single queues, and start them again with another size.
        const RING_RESET = 1 << 40;
        const _ = !0;
    }
}
