//! What is offered and what was taken.

use crate::error::Refusal;
use kickless_device::Device;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;

/// The protocol features that we offer for every device.
///
/// Without STATUS: QEMU resets it before it asks for the ring's bases, and nothing here would come of it.
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
    (PROTOCOL_FEATURES | device.protocol_features()) - device.withheld_protocol_features()
}

/// The state of negotiation.
#[derive(Debug, Default)]
pub(crate) struct Negotiated {
    /// Feature bits, the driver's part and vhost-user's own.
    pub(crate) features: Features,
    /// SET_FEATURES has come on this connection.
    pub(crate) features_set: bool,
    /// Protocol features.
    pub(crate) protocol: ProtocolFeatures,
}

impl Negotiated {
    /// Feature bits of the device and of vhost-user.
    ///
    /// A vIOMMU only where misses can be told and their answers acknowledged. So it is offered once the protocol features have
    /// been chosen: QEMU asks for feature bits a first time before that, and a second time, which counts, afterwards. (With the bit
    /// in the first answer, it insists on those protocol features.)
    pub(crate) fn offered(&self, device: &dyn Device) -> Features {
        let vhost_user = Features::PROTOCOL_FEATURES | Features::LOG_ALL;
        let needed = ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::REPLY_ACK;
        let iommu = match self.protocol.contains(needed) {
            true => Features::ACCESS_PLATFORM,
            false => Features::empty(),
        };
        device.features() | vhost_user | iommu
    }

    /// Whether addresses of rings and buffers are a vIOMMU's.
    pub(crate) fn iommu(&self) -> bool {
        self.features.contains(Features::ACCESS_PLATFORM)
    }

    /// SET_FEATURES.
    pub(crate) fn set_features(&mut self, device: &dyn Device, features: Features) -> Result<(), Refusal> {
        let unknown = features - self.offered(device);
        if !unknown.is_empty() {
            return Err(Refusal::Features(unknown));
        }
        self.features = features;
        self.features_set = true;
        Ok(())
    }

    /// Whether rings are enabled from the beginning: there is no SET_VRING_ENABLE without vhost-user's own feature bit.
    pub(crate) fn always_enabled(&self) -> bool {
        self.features_set && !self.features.contains(Features::PROTOCOL_FEATURES)
    }

    /// Whether rings have the packed format.
    pub(crate) fn packed(&self) -> bool {
        self.features.contains(Features::RING_PACKED)
    }

    /// SET_PROTOCOL_FEATURES.
    pub(crate) fn set_protocol(
        &mut self,
        device: &dyn Device,
        protocol: ProtocolFeatures,
    ) -> Result<(), Refusal> {
        let unknown = protocol - protocol_features(device);
        if !unknown.is_empty() {
            return Err(Refusal::ProtocolFeatures(unknown));
        }
        self.protocol = protocol;
        Ok(())
    }

    /// A message that needs a protocol feature.
    pub(crate) fn need(&self, feature: ProtocolFeatures) -> Result<(), Refusal> {
        if self.protocol.contains(feature) { Ok(()) } else { Err(Refusal::NotNegotiated(feature)) }
    }
}
