//! Provides devices that implement only the methods that a test needs.

use kickless_device::{
    CloseError, ConfigError, Device, DeviceMessage, Disabled, Driver, GiveError, HandOver, InvalidState,
    MessageError, Operate, OwnProtocolFeatures, QueueTask, StartError, Vring, Words,
};
use kickless_handover::{Given, Giving, Part};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;

/// The methods of a [`Device`] in which fake devices differ. By default, the device has no rings.
pub trait Fake: Send + Sync {
    /// Acts as [`Device::features`].
    fn features(&self) -> Features {
        Features::VERSION_1
    }

    /// Acts as [`Device::protocol_features`].
    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::empty()
    }

    /// Acts as [`Device::protocol_features`], for those that it withholds.
    fn withheld_protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::empty()
    }

    /// Acts as [`Device::message`].
    ///
    /// # Errors
    /// The device refuses it.
    fn message(&self, message: DeviceMessage) -> Result<(), MessageError> {
        Err(MessageError::Unknown(message))
    }

    /// Acts as [`Device::queues_max`].
    fn queues_max(&self) -> u16 {
        0
    }

    /// Acts as [`Device::disabled`].
    fn disabled(&self, _index: u16) -> Disabled {
        Disabled::LeftAlone
    }

    /// Acts as [`Device::reset`].
    fn reset(&self, _driver: Driver) {}

    /// Acts as [`Device::connected`].
    fn connected(&self) {}

    /// Acts as [`Operate::refresh`].
    fn refresh(&self) {}

    /// Acts as [`Device::close`].
    ///
    /// # Errors
    /// The device keeps its resources.
    fn close(&self) -> Result<(), CloseError> {
        Ok(())
    }

    /// Acts as [`Device::limit_remote_waits`].
    fn limit_remote_waits(&self) {}

    /// Acts as [`Device::start_queue`].
    ///
    /// # Errors
    /// It starts no queue.
    fn start_queue(&self, _vring: Vring, _features: Features) -> Result<Box<dyn QueueTask>, StartError> {
        Err(StartError("a fake device without queues".into()))
    }
}

/// A [`Device`] with rings of up to 256 entries, without a configuration space and without state.
pub struct FakeDevice<T>(pub T);

impl<T: Fake> Device for FakeDevice<T> {
    fn words(&self) -> Words {
        Words { name: "fake", rings_option: "a test: rings=" }
    }

    fn features(&self) -> Features {
        self.0.features()
    }

    fn protocol_features(&self) -> OwnProtocolFeatures {
        OwnProtocolFeatures {
            offered: self.0.protocol_features(),
            withheld: self.0.withheld_protocol_features(),
            config_bytes_max: None,
        }
    }

    fn message(&self, message: DeviceMessage) -> Result<(), MessageError> {
        self.0.message(message)
    }

    fn queues_max(&self) -> u16 {
        self.0.queues_max()
    }

    fn queue_size_max(&self) -> u16 {
        256
    }

    fn disabled(&self, index: u16) -> Disabled {
        self.0.disabled(index)
    }

    fn reset(&self, driver: Driver) {
        self.0.reset(driver);
    }

    fn connected(&self) {
        self.0.connected();
    }

    fn read_config(&self, _: usize, into: &mut [u8]) {
        into.fill(0);
    }

    fn write_config(&self, offset: usize, from: &[u8]) -> Result<(), ConfigError> {
        Err(ConfigError::ReadOnly { offset, end: offset + from.len() })
    }

    fn open(&self) -> Result<(), StartError> {
        Ok(())
    }

    fn close(&self) -> Result<(), CloseError> {
        self.0.close()
    }

    fn limit_remote_waits(&self) {
        self.0.limit_remote_waits();
    }

    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    fn load(&self, _: &[u8]) -> Result<(), InvalidState> {
        Ok(())
    }

    fn start_queue(&self, vring: Vring, features: Features) -> Result<Box<dyn QueueTask>, StartError> {
        self.0.start_queue(vring, features)
    }
}

impl<T: Fake> Operate for FakeDevice<T> {
    fn refresh(&self) {
        self.0.refresh();
    }
}

/// Has nothing to give.
impl<T: Fake> HandOver for FakeDevice<T> {
    fn refuses(&self) -> Option<String> {
        None
    }

    fn changes(&self) -> u64 {
        0
    }

    fn give(&self, _: &mut Giving) -> Result<Part, GiveError> {
        Ok(Part::default())
    }

    fn gives_slowly(&self) -> bool {
        false
    }

    fn settle(&self) -> Result<(), GiveError> {
        Ok(())
    }

    fn hold(&self) {}

    fn give_final(&self, _: &mut Giving) -> Result<Part, GiveError> {
        Ok(Part::default())
    }

    fn take_back(&self) -> Result<(), StartError> {
        Ok(())
    }

    fn receive_final(&self, _: Part, _: &Given) -> Result<(), StartError> {
        Ok(())
    }

    fn begin(&self) {}
}
