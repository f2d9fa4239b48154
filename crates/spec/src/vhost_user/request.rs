//! The requests of both sides, by number.

/// Defines an enumeration of request numbers with their names in the specification.
macro_rules! requests {
    ($(#[$attr:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal, $text:literal;)* }) => {
        $(#[$attr])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum $name {
            $($(#[$doc])* $variant = $number,)*
        }

        impl $name {
            /// Each request, in the order of the numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the request with this number, if there is one.
            pub const fn from_raw(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Returns the number on the wire.
            pub const fn raw(self) -> u32 {
                self as u32
            }

            /// Returns the specification's name without its prefix.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

requests! {
    /// Requests of the front-end (`VHOST_USER_*`). The doc of each names its purpose, its payload and its
    /// reply. A payload without a link has no structure in this crate.
    FrontendRequest {
        /// The device's features. Replies a `u64`.
        GetFeatures = 1, "GET_FEATURES";
        /// The features to use. `u64`.
        SetFeatures = 2, "SET_FEATURES";
        /// A session starts.
        SetOwner = 3, "SET_OWNER";
        /// Deprecated. The back-end ignores it or disables all rings.
        ResetOwner = 4, "RESET_OWNER";
        /// The guest's memory. Regions, with a file descriptor each.
        SetMemTable = 5, "SET_MEM_TABLE";
        /// The dirty log. [`Log`](super::Log), with its file descriptor.
        SetLogBase = 6, "SET_LOG_BASE";
        /// An eventfd to signal after marking. File descriptor only.
        SetLogFd = 7, "SET_LOG_FD";
        /// Size of a ring. [`VringState`](super::VringState).
        SetVringNum = 8, "SET_VRING_NUM";
        /// The addresses of a ring. [`VringAddr`](super::VringAddr).
        SetVringAddr = 9, "SET_VRING_ADDR";
        /// The index at which a ring begins. [`VringState`](super::VringState).
        SetVringBase = 10, "SET_VRING_BASE";
        /// Stop a ring and return its index. [`VringState`](super::VringState), both ways.
        GetVringBase = 11, "GET_VRING_BASE";
        /// The eventfd of kicks. Index and [`NO_FD`](super::NO_FD) in a `u64`.
        SetVringKick = 12, "SET_VRING_KICK";
        /// The eventfd of calls. Index and [`NO_FD`](super::NO_FD) in a `u64`.
        SetVringCall = 13, "SET_VRING_CALL";
        /// The eventfd of errors. Index and [`NO_FD`](super::NO_FD) in a `u64`.
        SetVringErr = 14, "SET_VRING_ERR";
        /// The protocol features that the back-end offers. Replies a `u64`.
        GetProtocolFeatures = 15, "GET_PROTOCOL_FEATURES";
        /// The protocol features to use. `u64`.
        SetProtocolFeatures = 16, "SET_PROTOCOL_FEATURES";
        /// Most rings of the device. Replies a `u64`.
        GetQueueNum = 17, "GET_QUEUE_NUM";
        /// Enable (`num` 1) or disable (0) a ring. [`VringState`](super::VringState).
        SetVringEnable = 18, "SET_VRING_ENABLE";
        /// Announce the guest after migration. The first six bytes of the `u64` are its MAC address.
        SendRarp = 19, "SEND_RARP";
        /// The MTU of the host. `u64`.
        NetSetMtu = 20, "NET_SET_MTU";
        /// The socket for requests of the back-end. File descriptor only.
        SetBackendReqFd = 21, "SET_BACKEND_REQ_FD";
        /// Update or invalidate the IOTLB. [`IotlbMsg`](super::IotlbMsg). Replies a `u64`.
        IotlbMsg = 22, "IOTLB_MSG";
        /// Byte order of a legacy ring. [`VringState`](super::VringState), `num` 1 for big-endian.
        SetVringEndian = 23, "SET_VRING_ENDIAN";
        /// Read the configuration space. [`ConfigHeader`](super::ConfigHeader) and bytes, both ways.
        GetConfig = 24, "GET_CONFIG";
        /// Write the configuration space. [`ConfigHeader`](super::ConfigHeader) and bytes.
        SetConfig = 25, "SET_CONFIG";
        /// Open a crypto session. The layout is QEMU's and differs between its versions; the same both ways.
        CreateCryptoSession = 26, "CREATE_CRYPTO_SESSION";
        /// Close a crypto session. `u64`.
        CloseCryptoSession = 27, "CLOSE_CRYPTO_SESSION";
        /// A postcopy migration is coming. Replies a userfaultfd.
        PostcopyAdvise = 28, "POSTCOPY_ADVISE";
        /// Postcopy begins: register memory with the userfaultfd.
        PostcopyListen = 29, "POSTCOPY_LISTEN";
        /// Postcopy is over. Replies a `u64`.
        PostcopyEnd = 30, "POSTCOPY_END";
        /// Make an in-flight buffer. [`Inflight`](super::Inflight), both ways; replies its descriptor.
        GetInflightFd = 31, "GET_INFLIGHT_FD";
        /// The in-flight buffer. [`Inflight`](super::Inflight), with its descriptor.
        SetInflightFd = 32, "SET_INFLIGHT_FD";
        /// The socket of the vhost-user-gpu protocol. File descriptor only.
        GpuSetSocket = 33, "GPU_SET_SOCKET";
        /// Disable all rings and reset the device.
        ResetDevice = 34, "RESET_DEVICE";
        /// A kick in band. [`VringState`](super::VringState).
        VringKick = 35, "VRING_KICK";
        /// Most memory regions. Replies a `u64`.
        GetMaxMemSlots = 36, "GET_MAX_MEM_SLOTS";
        /// Add a region. [`SingleMemoryRegion`](super::SingleMemoryRegion), with its file descriptor.
        AddMemReg = 37, "ADD_MEM_REG";
        /// Remove a region. [`SingleMemoryRegion`](super::SingleMemoryRegion).
        RemMemReg = 38, "REM_MEM_REG";
        /// The device status byte. `u64`.
        SetStatus = 39, "SET_STATUS";
        /// The device status byte. Replies a `u64`.
        GetStatus = 40, "GET_STATUS";
        /// Hand out a dma-buf. A UUID. Replies a file descriptor.
        GetSharedObject = 41, "GET_SHARED_OBJECT";
        /// Transfer the device's state. [`DeviceStateTransfer`](super::DeviceStateTransfer), with one end of
        /// the channel. Replies a `u64`, which can bring another channel.
        SetDeviceStateFd = 42, "SET_DEVICE_STATE_FD";
        /// Whether the transfer of the state succeeded. Replies a `u64`.
        CheckDeviceState = 43, "CHECK_DEVICE_STATE";
        /// The shared memory regions. Replies their number and their sizes.
        GetShmemConfig = 44, "GET_SHMEM_CONFIG";
        /// As GET_VRING_BASE, and requests in flight may stay in the in-flight buffer.
        /// [`VringState`](super::VringState), both ways.
        GetVringBaseSkipDrain = 45, "GET_VRING_BASE_SKIP_DRAIN";
    }
}

requests! {
    /// Requests of the back-end (`VHOST_USER_BACKEND_*`), on the socket of SET_BACKEND_REQ_FD.
    BackendRequest {
        /// A miss or a failed access of the IOTLB. [`IotlbMsg`](super::IotlbMsg).
        IotlbMsg = 1, "BACKEND_IOTLB_MSG";
        /// The configuration space has changed.
        ConfigChangeMsg = 2, "BACKEND_CONFIG_CHANGE_MSG";
        /// A page to which the guest writes its kicks. Index and [`NO_FD`](super::NO_FD), size and offset,
        /// with its file descriptor.
        VringHostNotifierMsg = 3, "BACKEND_VRING_HOST_NOTIFIER_MSG";
        /// A call in band. [`VringState`](super::VringState).
        VringCall = 4, "BACKEND_VRING_CALL";
        /// An error in band. [`VringState`](super::VringState).
        VringErr = 5, "BACKEND_VRING_ERR";
        /// This back-end exports an object. A UUID.
        SharedObjectAdd = 6, "BACKEND_SHARED_OBJECT_ADD";
        /// This back-end no longer exports the object. A UUID.
        SharedObjectRemove = 7, "BACKEND_SHARED_OBJECT_REMOVE";
        /// The dma-buf of an object. A UUID. Replies a `u64` and a file descriptor.
        SharedObjectLookup = 8, "BACKEND_SHARED_OBJECT_LOOKUP";
        /// Map a file into a shared memory region. The range, with the file descriptor.
        ShmemMap = 9, "BACKEND_SHMEM_MAP";
        /// Unmap a file from a shared memory region. The range.
        ShmemUnmap = 10, "BACKEND_SHMEM_UNMAP";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_specification() {
        assert_eq!(FrontendRequest::ALL.len(), 45);
        for (i, request) in FrontendRequest::ALL.iter().enumerate() {
            assert_eq!(request.raw() as usize, i + 1);
            assert_eq!(FrontendRequest::from_raw(request.raw()), Some(*request));
        }
        assert_eq!(BackendRequest::ALL.len(), 10);
        for (i, request) in BackendRequest::ALL.iter().enumerate() {
            assert_eq!(request.raw() as usize, i + 1);
            assert_eq!(BackendRequest::from_raw(request.raw()), Some(*request));
        }
        assert_eq!((FrontendRequest::from_raw(0), FrontendRequest::from_raw(46)), (None, None));
        assert_eq!((BackendRequest::from_raw(0), BackendRequest::from_raw(11)), (None, None));
        assert_eq!(FrontendRequest::SetVringAddr.to_string(), "SET_VRING_ADDR");
    }
}
