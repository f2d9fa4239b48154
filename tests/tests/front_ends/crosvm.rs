//! crosvm, `devices/src/virtio/vhost_user_frontend` of 2025: a disk. crosvm has a front-end of its own, which
//! asks for no acknowledgements and sends the same messages.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use kickless_spec::blk;
use kickless_spec::features::Features;
use kickless_tests::driver::request::Request;
use kickless_tests::frontend::served::{IMAGE_SIZE, Served};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{
    VhostTransferStateDirection as Direction, VhostTransferStatePhase as Phase, VhostUserConfigFlags,
    VhostUserProtocolFeatures as Protocol,
};

use super::machine::{Machine, SIZE, connect};

/// Feature bits of the type of the device (virtio 1.3, section 6), all of which it passes on.
const OF_TYPE: u64 = 0xff_ffff | 0x3fff << 50;
const RINGS: Features = Features::VERSION_1.union(Features::EVENT_IDX).union(Features::PROTOCOL_FEATURES);
const PROTOCOL: Protocol = Protocol::CONFIG
    .union(Protocol::MQ)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::DEVICE_STATE)
    .union(Protocol::REPLY_ACK);

struct Vmm {
    machine: Machine,
    features: u64,
    /// Its end of the channel for requests of the back-end.
    _requests: UnixStream,
}

impl Vmm {
    fn connect(socket: &Path) -> (vhost::vhost_user::Frontend, u64, UnixStream) {
        // It learns the number of rings from the back-end.
        let mut vu = connect(socket, 1);
        vu.set_owner().unwrap();
        let offered = vu.get_features().unwrap();
        let protocol = vu.get_protocol_features().unwrap() & PROTOCOL;
        assert_eq!(protocol, PROTOCOL);
        vu.set_protocol_features(protocol).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        vu.set_backend_request_fd(&theirs).unwrap();
        assert_eq!(vu.get_queue_num().unwrap(), 4);
        (vu, offered & (OF_TYPE | RINGS.bits()), ours)
    }

    fn new(socket: &Path) -> Vmm {
        let (vu, features, requests) = Vmm::connect(socket);
        Vmm { machine: Machine::new(vu, 4, features), features, _requests: requests }
    }

    /// Reads a part of the configuration space, as the guest does.
    fn config<const LEN: usize>(&mut self, offset: usize) -> [u8; LEN] {
        let flags = VhostUserConfigFlags::WRITABLE;
        let read = self.machine.vu.get_config(offset as u32, LEN as u32, flags, &[0; LEN]);
        read.unwrap().1.try_into().unwrap()
    }

    /// Starts the device at these indices of its rings.
    fn activate(&mut self, bases: &[u16]) {
        self.machine.share();
        for (index, base) in bases.iter().enumerate() {
            self.machine.vu.set_vring_num(index, SIZE).unwrap();
            self.machine.set_ring(index, *base);
            self.machine.vu.set_vring_enable(index, true).unwrap();
        }
    }

    /// Stops all rings, for a suspended machine and for a snapshot. Returns their indices.
    fn sleep(&mut self) -> Vec<u16> {
        let stop = |index| {
            self.machine.vu.set_vring_enable(index, false).unwrap();
            self.machine.vu.get_vring_base(index).unwrap().try_into().unwrap()
        };
        (0..self.machine.queues.len()).map(stop).collect()
    }

    fn snapshot(&mut self) -> Vec<u8> {
        let (mut from, to) = std::io::pipe().unwrap();
        let (save, stopped) = (Direction::SAVE, Phase::STOPPED);
        let instead = self.machine.vu.set_device_state_fd(save, stopped, to.into()).unwrap();
        assert!(instead.is_none(), "the back-end uses the pipe of the front-end");
        let mut state = Vec::new();
        from.read_to_end(&mut state).unwrap();
        self.machine.vu.check_device_state().unwrap();
        state
    }

    fn restore(&mut self, state: &[u8]) {
        let (from, mut to) = std::io::pipe().unwrap();
        let (load, stopped) = (Direction::LOAD, Phase::STOPPED);
        assert!(self.machine.vu.set_device_state_fd(load, stopped, from.into()).unwrap().is_none());
        to.write_all(state).unwrap();
        drop(to);
        self.machine.vu.check_device_state().unwrap();
    }
}

#[test]
fn a_disk() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut vmm = Vmm::new(served.socket());
    let capacity = u64::from_le_bytes(vmm.config(0));
    assert_eq!(capacity * blk::SECTOR_SIZE, IMAGE_SIZE);
    vmm.machine.vu.set_features(vmm.features).unwrap();
    // The driver turns its write cache off.
    vmm.machine.vu.set_config(blk::CONFIG_WRITEBACK as u32, VhostUserConfigFlags::empty(), &[0]).unwrap();
    vmm.activate(&[0; 4]);
    vmm.machine.check_all(1);
    let bases = vmm.sleep();
    assert!(bases.iter().all(|base| *base > 0), "{bases:?}");
    vmm.activate(&bases);
    vmm.machine.check_all(2);
    // A snapshot, and a request that waits meanwhile. Another process restores it.
    let bases = vmm.sleep();
    let state = vmm.snapshot();
    let request = Request::get_id();
    vmm.machine.submit(3, &request);
    let next = served.beside("threads", &["--incoming"]).unwrap();
    (vmm.machine.vu, _, vmm._requests) = Vmm::connect(next.socket());
    vmm.machine.vu.set_features(vmm.features).unwrap();
    vmm.restore(&state);
    assert_eq!(vmm.config(blk::CONFIG_WRITEBACK), [0], "the choice of the driver is in the state");
    vmm.activate(&bases);
    assert_eq!(vmm.machine.outcome(3, &request).status, blk::S_OK);
    vmm.machine.check_all(3);
    // A reset stops the rings in the same way.
    vmm.sleep();
    drop(vmm);
    assert_eq!(next.stop().unwrap().0.code(), Some(0));
    served.end_without_warnings().unwrap();
}
