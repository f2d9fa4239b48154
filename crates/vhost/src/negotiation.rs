//! Offered and negotiated features.

use crate::error::RequestError;
use kickless_device::{Device, Leave};
use kickless_handover::v1;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;

/// The protocol features that are offered for every device.
///
/// STATUS is not among them. QEMU resets the status before it asks for the rings' bases, and this back-end
/// has no use for it.
const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::LOG_SHMFD)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::INFLIGHT_SHMFD)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(ProtocolFeatures::DEVICE_STATE);

/// Returns the protocol features that are offered with this device: ours and its own.
pub(crate) fn protocol_features(device: &dyn Device) -> ProtocolFeatures {
    let own = device.protocol_features();
    (PROTOCOL_FEATURES | own.offered) - own.withheld
}

/// The negotiated features.
#[derive(Debug, Default)]
pub(crate) struct Negotiated {
    /// The feature bits, of the driver and of vhost-user.
    pub(crate) features: Features,
    /// SET_FEATURES has come on this connection.
    pub(crate) features_set: bool,
    /// The protocol features.
    pub(crate) protocol: ProtocolFeatures,
}

impl Negotiated {
    /// Returns the feature bits of the device and of vhost-user.
    ///
    /// A vIOMMU needs a channel for misses and acknowledgements of their answers. So it is offered only after
    /// these protocol features were negotiated. QEMU asks for feature bits once before that, and again
    /// afterwards; the second answer counts. (If the first answer has the bit, QEMU insists on these protocol
    /// features.)
    pub(crate) fn offered(&self, device: &dyn Device) -> Features {
        let vhost_user = Features::PROTOCOL_FEATURES | Features::LOG_ALL;
        let needed = ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::REPLY_ACK;
        let iommu = match self.protocol.contains(needed) {
            true => Features::ACCESS_PLATFORM,
            false => Features::empty(),
        };
        device.features() | vhost_user | iommu
    }

    /// Returns all feature bits that a front-end of this device can have negotiated. It may have set the
    /// protocol features again, without those that a vIOMMU needs.
    pub(crate) fn offered_at_most(device: &dyn Device) -> Features {
        let protocol = ProtocolFeatures::all();
        Self { protocol, ..Self::default() }.offered(device)
    }

    /// Takes what was negotiated in another process.
    pub(crate) fn restore(device: &dyn Device, from: &v1::Session) -> Result<Self, RequestError> {
        let features = Features::from_bits_retain(from.features);
        let protocol = ProtocolFeatures::from_bits_retain(from.protocol_features);
        let mut negotiated = Self::default();
        negotiated.set_protocol(device, protocol)?;
        let unknown = features - Self::offered_at_most(device);
        if !unknown.is_empty() {
            return Err(RequestError::Features(unknown));
        }
        Ok(Self { features, features_set: from.features_set, protocol })
    }

    /// Returns whether addresses of rings and buffers belong to a vIOMMU.
    pub(crate) fn iommu(&self) -> bool {
        self.features.contains(Features::ACCESS_PLATFORM)
    }

    /// Carries out SET_FEATURES.
    pub(crate) fn set_features(
        &mut self,
        device: &dyn Device,
        features: Features,
    ) -> Result<(), RequestError> {
        let unknown = features - self.offered(device);
        if !unknown.is_empty() {
            return Err(RequestError::Features(unknown));
        }
        self.features = features;
        self.features_set = true;
        Ok(())
    }

    /// Returns whether rings are enabled from the start. Without vhost-user's own feature bit, there is no
    /// SET_VRING_ENABLE.
    pub(crate) fn always_enabled(&self) -> bool {
        self.features_set && !self.features.contains(Features::PROTOCOL_FEATURES)
    }

    /// Returns whether rings have the packed format.
    pub(crate) fn packed(&self) -> bool {
        self.features.contains(Features::RING_PACKED)
    }

    /// Carries out SET_PROTOCOL_FEATURES.
    pub(crate) fn set_protocol(
        &mut self,
        device: &dyn Device,
        protocol: ProtocolFeatures,
    ) -> Result<(), RequestError> {
        let unknown = protocol - protocol_features(device);
        if !unknown.is_empty() {
            return Err(RequestError::ProtocolFeatures(unknown));
        }
        self.protocol = protocol;
        Ok(())
    }

    /// Returns the requests that a ring may leave when it stops, as far as the negotiation says it.
    /// `is_suspended`: the front-end has asked for this with GET_VRING_BASE_SKIP_DRAIN.
    ///
    /// With GET_VRING_BASE_INFLIGHT alone, each GET_VRING_BASE may leave requests. A front-end that also
    /// knows GET_VRING_BASE_SKIP_DRAIN chooses each time, and GET_VRING_BASE leaves nothing.
    pub(crate) fn leave(&self, is_suspended: bool) -> Leave {
        let needed = ProtocolFeatures::GET_VRING_BASE_INFLIGHT | ProtocolFeatures::INFLIGHT_SHMFD;
        let chooses = self.protocol.contains(ProtocolFeatures::GET_VRING_BASE_SKIP_DRAIN);
        let leaves = self.protocol.contains(needed) && (is_suspended || !chooses);
        if leaves { Leave::Unfinished } else { Leave::Nothing }
    }

    /// Refuses a message if its protocol feature was not negotiated.
    pub(crate) fn need(&self, feature: ProtocolFeatures) -> Result<(), RequestError> {
        if self.protocol.contains(feature) { Ok(()) } else { Err(RequestError::NotNegotiated(feature)) }
    }
}
