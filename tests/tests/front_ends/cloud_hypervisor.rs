//! Cloud Hypervisor, `virtio-devices/src/vhost_user`: a disk and a card. The messages are those of its
//! version 52, and what differs in earlier ones is tested beside them.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use kickless_memory::Gpa;
use kickless_spec::blk::{self, BlkFeatures, Config};
use kickless_spec::features::Features;
use kickless_spec::net::{Header, NetFeatures};
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_testing::pattern;
use kickless_tests::daemon::{CardConfig, Daemon, DaemonConfig, check_log};
use kickless_tests::driver::Buffer;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::log::{Bitmap, PAGE};
use kickless_tests::frontend::served::{IMAGE_SIZE, Served};
use kickless_vhost_user::{FrontendMessage as Message, LogBase, Reply, Wait};
use vhost::vhost_user::message::{
    VHOST_USER_CONFIG_OFFSET, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures as Protocol,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion};
use zerocopy::FromBytes;

use super::machine::{Machine, SIZE, connect, region};

/// The features of rings that it has for each device. It also has ORDER_PLATFORM and NOTIFICATION_DATA, which
/// kickless does not offer, and for disks IN_ORDER, which Linux up to 6.18 does not accept.
const RINGS: Features = Features::VERSION_1
    .union(Features::INDIRECT_DESC)
    .union(Features::EVENT_IDX)
    .union(Features::PROTOCOL_FEATURES);
const DISK: BlkFeatures = BlkFeatures::SIZE_MAX
    .union(BlkFeatures::SEG_MAX)
    .union(BlkFeatures::GEOMETRY)
    .union(BlkFeatures::RO)
    .union(BlkFeatures::BLK_SIZE)
    .union(BlkFeatures::FLUSH)
    .union(BlkFeatures::TOPOLOGY)
    .union(BlkFeatures::CONFIG_WCE)
    .union(BlkFeatures::DISCARD)
    .union(BlkFeatures::WRITE_ZEROES)
    .union(BlkFeatures::MQ);
const CARD: NetFeatures = NetFeatures::CSUM
    .union(NetFeatures::GUEST_CSUM)
    .union(NetFeatures::GUEST_TSO4)
    .union(NetFeatures::GUEST_TSO6)
    .union(NetFeatures::HOST_TSO4)
    .union(NetFeatures::HOST_TSO6)
    .union(NetFeatures::MRG_RXBUF);
const CARD_PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::INFLIGHT_SHMFD)
    .union(Protocol::LOG_SHMFD)
    .union(Protocol::DEVICE_STATE);
const DISK_PROTOCOL: Protocol = CARD_PROTOCOL.union(Protocol::CONFIG);
/// Time in which a ring that does not rest would answer.
const REST: Duration = Duration::from_millis(100);
/// `sizeof(struct virtio_blk_config)` there.
const CONFIG_LEN: usize = 60;

/// A device of Cloud Hypervisor.
struct Vmm {
    machine: Machine,
    features: u64,
    protocol: Protocol,
    inflight: Option<(VhostUserInflight, File)>,
    log: Option<Bitmap>,
}

impl Vmm {
    /// Makes a device, as at the start of a machine or by `vm.add-disk` and `vm.add-net`.
    fn new(socket: &Path, rings: u16, features: u64, protocol: Protocol) -> Vmm {
        let mut vu = connect(socket, rings);
        vu.set_owner().unwrap();
        let features = vu.get_features().unwrap() & features;
        let protocol = vu.get_protocol_features().unwrap() & protocol;
        vu.set_protocol_features(protocol).unwrap();
        assert!(protocol.contains(Protocol::REPLY_ACK));
        vu.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(vu.get_queue_num().unwrap() >= rings.into());
        Vmm { machine: Machine::new(vu, rings, features), features, protocol, inflight: None, log: None }
    }

    fn disk(socket: &Path) -> Vmm {
        let mut vmm = Vmm::new(socket, 2, RINGS.bits() | DISK.bits(), DISK_PROTOCOL);
        // The offset of its versions until January 2026. The later ones have 0.
        assert_eq!(vmm.config(VHOST_USER_CONFIG_OFFSET).capacity, vmm.config(0).capacity);
        vmm
    }

    fn card(socket: &Path) -> Vmm {
        Vmm::new(socket, 2, RINGS.bits() | CARD.bits(), CARD_PROTOCOL)
    }

    fn vu(&mut self) -> &mut Frontend {
        &mut self.machine.vu
    }

    /// Starts the device: the guest's driver is ready, or the connection is a new one.
    fn activate(&mut self) {
        let machine = &mut self.machine;
        let rings = machine.queues.len();
        machine.vu.set_features(self.features).unwrap();
        machine.share();
        (0..rings).for_each(|index| machine.vu.set_vring_num(index, SIZE).unwrap());
        if self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            let (info, file) = self.inflight.get_or_insert_with(|| {
                let wanted = VhostUserInflight::new(0, 0, rings as u16, SIZE);
                machine.vu.get_inflight_fd(&wanted).unwrap()
            });
            machine.vu.set_inflight_fd(info, file.as_raw_fd()).unwrap();
        }
        for index in 0..rings {
            // It gives the index of the driver as the base, also when requests wait.
            machine.set_ring(index, machine.queues[index].next_avail());
        }
        self.enable(true);
    }

    /// Pauses the device and resumes it. It also does so before and after a migration.
    fn enable(&mut self, is_enabled: bool) {
        for index in 0..self.machine.queues.len() {
            self.vu().set_vring_enable(index, is_enabled).unwrap();
        }
    }

    /// Connects again, with the same negotiation.
    fn connect(&mut self, socket: &Path) {
        let mut vu = connect(socket, self.machine.queues.len() as u16);
        vu.set_owner().unwrap();
        vu.get_features().unwrap();
        vu.set_protocol_features(self.protocol).unwrap();
        vu.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        self.machine.vu = vu;
    }

    /// Continues with a back-end that was started anew.
    fn reconnect(&mut self, socket: &Path) {
        self.connect(socket);
        self.activate();
    }

    /// Continues at the destination of a migration, whose Cloud Hypervisor has no in-flight buffer.
    fn migrate(&mut self, socket: &Path) {
        self.inflight = None;
        self.log = None;
        self.reconnect(socket);
    }

    /// Gives the back-end an empty log. Returns the pages of the log before it.
    fn next_log(&mut self) -> Vec<u64> {
        let bitmap = Bitmap::covering(&self.machine.ram).unwrap();
        let ((mmap_size, mmap_offset), mmap_handle) = (bitmap.extent(), bitmap.as_fd().as_raw_fd());
        let log = VhostUserDirtyLogRegion { mmap_size, mmap_offset, mmap_handle };
        self.vu().set_log_base(0, Some(log)).unwrap();
        self.log.replace(bitmap).map(|before| before.harvest().into_iter().collect()).unwrap_or_default()
    }

    /// Starts or stops to log.
    fn set_logging(&mut self, logs: bool) {
        let features = Features::from_bits_retain(self.features);
        let set = |vmm: &mut Vmm| {
            (0..vmm.machine.queues.len()).for_each(|index| {
                let addresses = vmm.machine.addresses(index, logs);
                vmm.vu().set_vring_addr(index, &addresses).unwrap();
            });
        };
        if logs {
            self.next_log();
            self.vu().set_features((features | Features::LOG_ALL).bits()).unwrap();
            set(self);
        } else {
            set(self);
            self.vu().set_features(features.bits()).unwrap();
            self.log = None;
        }
    }

    /// Reads the configuration space at this offset.
    fn config(&mut self, offset: u32) -> Config {
        let none = [0; CONFIG_LEN];
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, bytes) = self.vu().get_config(offset, CONFIG_LEN as u32, flags, &none).unwrap();
        let mut space = vec![0; size_of::<Config>()];
        space[..CONFIG_LEN].copy_from_slice(&bytes);
        Config::read_from_bytes(&space).unwrap()
    }
}

#[test]
fn a_disk() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut vmm = Vmm::disk(served.socket());
    for offset in [VHOST_USER_CONFIG_OFFSET, 0] {
        let config = vmm.config(offset);
        assert_eq!(config.capacity.get() * blk::SECTOR_SIZE, IMAGE_SIZE, "{offset:#x}");
        assert_eq!((config.num_queues.get(), config.writeback), (4, 1), "{offset:#x}");
    }
    vmm.activate();
    vmm.machine.check_all(1);
    let write_through = |vmm: &mut Vmm, byte: u8| {
        let flags = VhostUserConfigFlags::WRITABLE;
        vmm.vu().set_config(blk::CONFIG_WRITEBACK as u32, flags, &[byte]).unwrap();
        assert_eq!(vmm.config(0).writeback, byte);
    };
    write_through(&mut vmm, 0);
    vmm.machine.check_all(2);
    write_through(&mut vmm, 1);
    // Paused, a disk completes nothing.
    vmm.enable(false);
    let request = Request::get_id();
    let used = vmm.machine.queues[0].used_idx();
    vmm.machine.submit(0, &request);
    thread::sleep(REST);
    assert_eq!(vmm.machine.queues[0].used_idx(), used);
    vmm.enable(true);
    assert_eq!(vmm.machine.outcome(0, &request).status, blk::S_OK);
    // Memory that is plugged: a request in it.
    let mut more = Ram::new(1 << 40, 1 << 20).unwrap();
    assert!(vmm.vu().add_mem_region(&region(&more)).unwrap().is_none());
    let memory = RequestMemory::new(&mut more, 4096).unwrap();
    let request = Request::read(0, 4096);
    let buffers = memory.lay_out(&more, &request, Layout::Usual).unwrap();
    vmm.machine.queues[0].submit(&vmm.machine.ram, &buffers, None).unwrap();
    vmm.machine.queues[0].flush();
    let used = vmm.machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
    assert_eq!(memory.outcome(&more, &request, used.len).unwrap().data, pattern(2, 8192)[..4096]);
    vmm.vu().remove_mem_region(&region(&more)).unwrap();
    // A reset of the driver, and a new one.
    for index in 0..2 {
        vmm.vu().set_vring_enable(index, false).unwrap();
        let base = vmm.vu().get_vring_base(index).unwrap();
        assert_eq!(base, u32::from(vmm.machine.queues[index].next_avail()));
    }
    vmm.inflight = None;
    vmm.activate();
    vmm.machine.check_all(3);
    drop(vmm);
    served.end_without_warnings().unwrap();
}

/// The requests that a killed process had taken, and the one that it had not, are done by the next process.
#[test]
fn a_disk_whose_back_end_is_killed() {
    let served = Served::start("io_uring", &[]).unwrap();
    let image = served.image().to_owned();
    let plain = DaemonConfig::new(&image);
    let slow = DaemonConfig::new(format!("fault:delay=60s@write:{}", image.display()));
    let mut daemon = Daemon::start(&slow).unwrap();
    let mut vmm = Vmm::disk(daemon.socket());
    vmm.activate();
    let requests = [7u64, 8].map(|sector| Request::write(sector, &pattern(sector, 512)));
    vmm.machine.submit(0, &requests[0]);
    daemon.wait_until_taken(0, 1).unwrap();
    daemon.kill_and_restart(&plain).unwrap();
    // The guest does not know that its back-end is away.
    vmm.machine.submit(1, &requests[1]);
    vmm.reconnect(daemon.socket());
    for (index, request) in requests.iter().enumerate() {
        assert_eq!(vmm.machine.outcome(index, request).status, blk::S_OK);
        assert_eq!(served.on_disk(request.sector, 512).unwrap(), request.write);
    }
    vmm.machine.check_all(4);
    drop(vmm);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(log.iter().filter(|line| line.contains("done again")).count(), 1, "{log:#?}");
}

/// Each page that the disk writes is in the log that the back-end has at that moment. A request that the
/// source had not taken when the machine was paused is done at the destination.
#[test]
fn a_disk_that_migrates() {
    let served = Served::start("io_uring", &[]).unwrap();
    let destination = served.beside("threads", &["--incoming"]).unwrap();
    let mut vmm = Vmm::disk(served.socket());
    vmm.activate();
    vmm.machine.check_all(5);
    vmm.set_logging(true);
    for seed in 6..10 {
        vmm.machine.check_all(seed);
        let pages = vmm.next_log();
        for index in 0..2 {
            let addresses = vmm.machine.addresses(index, true);
            let written = [vmm.machine.data(index).0, addresses.log_addr.unwrap()];
            assert!(written.iter().all(|gpa| pages.contains(&(gpa / PAGE))), "{written:x?}: {pages:x?}");
        }
    }
    // Cancelled once.
    vmm.set_logging(false);
    vmm.machine.check_all(10);
    vmm.set_logging(true);
    vmm.enable(false);
    let request = Request::read(0, 8192);
    vmm.machine.submit(0, &request);
    vmm.migrate(destination.socket());
    let outcome = vmm.machine.outcome(0, &request);
    assert!(outcome.status == blk::S_OK && outcome.data == pattern(10, 8192));
    vmm.machine.check_all(11);
    drop(vmm);
    check_log(&destination.stop().unwrap().1).unwrap();
    served.end_without_warnings().unwrap();
}

/// The reply to SET_LOG_BASE is a number for the versions before DEVICE_STATE, and a description of the log
/// since then. Another length, or a refusal that looks like a success, is fatal to each.
#[test]
fn a_log_for_each_version() {
    let served = Served::start("io_uring", &[]).unwrap();
    let log = Bitmap::new(PAGE).unwrap();
    let (mmap_size, mmap_offset) = log.extent();
    for features in [ProtocolFeatures::empty(), ProtocolFeatures::DEVICE_STATE] {
        let mut vu = kickless_vhost_user::Frontend::new(UnixStream::connect(served.socket()).unwrap());
        let mut call = |message: Message| vu.call(&message, true, &Wait::FOREVER.at_most(LIMIT)).unwrap();
        let features = features | ProtocolFeatures::REPLY_ACK | ProtocolFeatures::LOG_SHMFD;
        call(Message::SetProtocolFeatures(features));
        let done = call(log.message().unwrap());
        let refused = call(Message::SetLogBase(LogBase::Shared { mmap_size: 0, mmap_offset, fd: None }));
        if features.contains(ProtocolFeatures::DEVICE_STATE) {
            assert!(
                matches!(done, Some(Reply::Log { mmap_size: size, .. }) if size == mmap_size),
                "{done:?}"
            );
            assert!(matches!(refused, Some(Reply::Log { mmap_size: 0, .. })), "{refused:?}");
        } else {
            assert!(matches!(done, Some(Reply::U64(0))), "{done:?}");
            assert!(matches!(refused, Some(Reply::U64(1))), "{refused:?}");
        }
    }
}

/// A card that returns its frames.
struct Looped {
    vmm: Vmm,
    receive: Gpa,
    transmit: Gpa,
    number: u64,
    received: u64,
}

/// Bytes of each buffer for a received frame.
const BUFFER: usize = 2048;
/// The number of these buffers. It is more than one frame of 64 KiB needs.
const BUFFERS: u64 = 64;
/// Bytes of a frame.
const FRAME: usize = 600;

impl Looped {
    fn new(socket: &Path) -> Looped {
        let mut vmm = Vmm::card(socket);
        let ram = &mut vmm.machine.ram;
        let receive = ram.take(BUFFER * BUFFERS as usize, PAGE).unwrap();
        let transmit = ram.take(BUFFER, PAGE).unwrap();
        vmm.activate();
        let mut card = Looped { vmm, receive, transmit, number: 0, received: 0 };
        (0..BUFFERS).for_each(|number| card.offer(number));
        card
    }

    /// Makes a buffer for a received frame available.
    fn offer(&mut self, number: u64) {
        let addr = Gpa(self.receive.0 + number % BUFFERS * BUFFER as u64);
        let machine = &mut self.vmm.machine;
        let buffer = Buffer { addr, len: BUFFER as u32, writable: true };
        machine.queues[0].submit(&machine.ram, &[buffer], None).unwrap();
        machine.queues[0].flush();
    }

    /// Sends a frame.
    fn send(&mut self) -> Vec<u8> {
        self.number += 1;
        let frame = [&[0xff; 6][..], &[2; 6], &pattern(self.number, FRAME - 12)].concat();
        let machine = &mut self.vmm.machine;
        let bytes = [&[0; size_of::<Header>()][..], &frame].concat();
        machine.ram.map().write(self.transmit, &bytes).unwrap();
        let buffer = Buffer { addr: self.transmit, len: bytes.len() as u32, writable: false };
        machine.queues[1].submit(&machine.ram, &[buffer], None).unwrap();
        machine.queues[1].flush();
        frame
    }

    /// Waits for the frame, and gives its buffer back.
    fn receive(&mut self, frame: &[u8]) {
        self.vmm.machine.queues[1].wait_used(Instant::now() + LIMIT).unwrap();
        let used = self.vmm.machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
        let mut bytes = vec![0; used.len as usize];
        let addr = Gpa(self.receive.0 + self.received % BUFFERS * BUFFER as u64);
        self.vmm.machine.ram.map().read(addr, &mut bytes).unwrap();
        assert!(bytes[size_of::<Header>()..] == *frame, "another frame came back");
        self.offer(self.received);
        self.received += 1;
    }

    /// Sends frames, and receives each.
    fn check(&mut self) {
        for _ in 0..2 * BUFFERS {
            let frame = self.send();
            self.receive(&frame);
        }
    }
}

/// The buffers that a card holds are available again after a pause, a kill and a migration.
#[test]
fn a_card() {
    let config = CardConfig::new("loop");
    let mut daemon = Daemon::start_card(&config).unwrap();
    let destination = Daemon::start_card(&config).unwrap();
    let mut card = Looped::new(daemon.socket());
    card.check();
    card.vmm.enable(false);
    card.vmm.enable(true);
    card.check();
    daemon.kill_and_restart_card(&config).unwrap();
    card.vmm.reconnect(daemon.socket());
    card.check();
    card.vmm.set_logging(true);
    card.check();
    let pages = card.vmm.next_log();
    assert!(pages.contains(&(card.receive.0 / PAGE)), "{pages:x?}");
    card.vmm.enable(false);
    card.vmm.migrate(destination.socket());
    card.check();
    drop(card);
    for daemon in [daemon, destination] {
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        check_log(&log).unwrap();
    }
}
