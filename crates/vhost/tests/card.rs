//! A device with protocol features of its own, and with a ring that is drained while it is disabled.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use kickless_device::{
    Context, DeviceMessage, Disabled, Driver, Executor, Leave, MessageError, Polled, Position, QueueTask,
    StartError, Stopped, TaskHandle, Update, Vring,
};
use kickless_handover::Giving;
use kickless_handover::v1::{Device as Record, Final};
use kickless_memory::Mapper;
use kickless_memory::quota::AddressSpace;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_testing::{Fake, FakeDevice, memfd};
use kickless_vhost::{HandOverError, Server};
use kickless_vhost_user::{
    Frontend, FrontendMessage as Message, MemoryRegion, Reply, VringAddr, VringFd, VringState, Wait,
};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const USER: u64 = 0x10_0000;
const MEMORY: u64 = 1 << 20;
const MTU_MAX: u64 = 9000;
/// The index at which each ring is parked.
const PARKED_AT: u16 = 7;

/// Calls to the device and its tasks.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<String>>>);

impl Asked {
    fn note(&self, what: String) {
        self.0.lock().unwrap().push(what);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// A device with a receive ring and a transmit ring.
struct Card(Asked);

impl Fake for Card {
    fn features(&self) -> Features {
        Features::VERSION_1 | Features::RING_PACKED
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::MTU | ProtocolFeatures::RARP
    }

    fn withheld_protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn message(&self, message: DeviceMessage) -> Result<(), MessageError> {
        if let DeviceMessage::SetMtu(mtu) = message
            && mtu > MTU_MAX
        {
            return Err(MessageError::Mtu { mtu, min: 68, max: MTU_MAX });
        }
        self.0.note(format!("{message:?}"));
        Ok(())
    }

    fn queues_max(&self) -> u16 {
        2
    }

    fn disabled(&self, index: u16) -> Disabled {
        if index == 1 { Disabled::Drained } else { Disabled::LeftAlone }
    }

    fn reset(&self, _: Driver) {
        self.0.note("reset".into());
    }

    fn connected(&self) {
        self.0.note("connected".into());
    }

    fn start_queue(&self, mut vring: Vring, _: Features) -> Result<Box<dyn QueueTask>, StartError> {
        let doubt = if vring.may_be_beyond_base() { ", may be beyond its base" } else { "" };
        let used = vring
            .continue_from_used()
            .map_or(String::new(), |(given, used)| format!(", {used} instead of {given}"));
        self.0.note(format!("start {}{doubt}{used}", vring.index()));
        Ok(Box::new(Task { vring, asked: self.0.clone() }))
    }
}

/// A task that is not run.
struct Task {
    vring: Vring,
    asked: Asked,
}

impl QueueTask for Task {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _: &mut Context<'_>, _: u32) -> Polled {
        panic!("it is never run")
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn set_enabled(&mut self, enabled: bool) {
        self.asked.note(format!("begin {} enabled: {enabled}", self.vring.index()));
    }
}

/// An executor that runs nothing, and records the calls.
struct Noting(Asked);

struct Handle {
    index: u16,
    asked: Asked,
}

impl Executor for Noting {
    fn spawn(&self, mut task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        if task.vring().position().next_avail == PARKED_AT {
            self.0.note(format!("spawn {}", task.vring().index()));
        }
        Ok(Box::new(Handle { index: task.vring().index(), asked: self.0.clone() }))
    }
}

impl TaskHandle for Handle {
    fn update(&self, update: Update) -> Receiver<()> {
        if let Update::Enable(enabled) = update {
            self.asked.note(format!("{} enabled: {enabled}", self.index));
        }
        let (done, answer) = channel();
        done.send(()).unwrap();
        answer
    }

    fn stop_leaving(&self, _: Leave) -> Receiver<Stopped> {
        self.asked.note(format!("stop {}", self.index));
        let (done, answer) = channel();
        done.send(Stopped { next_avail: 0, has_work: false, left: 0, unpublished: Vec::new() }).unwrap();
        answer
    }

    fn park(&self) -> Receiver<Position> {
        self.asked.note(format!("park {}", self.index));
        let (done, answer) = channel();
        let position =
            Position { next_avail: PARKED_AT, in_flight: 0, unpublished: Vec::new(), is_broken: false };
        done.send(position).unwrap();
        answer
    }

    fn unpark(&self) {
        self.asked.note(format!("unpark {}", self.index));
    }
}

struct Session {
    frontend: Frontend,
    /// The front-end's memory, at [`USER`].
    memory: File,
}

impl Session {
    /// Sends a message. Returns the reply, or whether it was acknowledged.
    fn call(&mut self, message: &Message) -> Option<Reply> {
        self.frontend.call(message, true, &Wait::FOREVER.at_most(Duration::from_secs(60))).unwrap()
    }

    fn number(&mut self, message: &Message) -> u64 {
        match self.call(message) {
            Some(Reply::U64(number)) => number,
            other => panic!("{other:?}"),
        }
    }

    fn stop(&mut self, index: u32) {
        assert!(matches!(self.call(&Message::GetVringBase { index }), Some(Reply::VringBase(_))));
    }

    fn order(&mut self, message: &Message) {
        assert_eq!(self.number(message), 0, "{message:?} was refused");
    }

    fn negotiate(&mut self, also: ProtocolFeatures) {
        let protocol = ProtocolFeatures::REPLY_ACK | also;
        self.call(&Message::GetProtocolFeatures);
        self.frontend.call(&Message::SetProtocolFeatures(protocol), false, &Wait::FOREVER).unwrap();
        self.order(&Message::SetFeatures(Features::VERSION_1 | Features::PROTOCOL_FEATURES));
        let region = MemoryRegion { size: MEMORY, user_addr: USER, ..MemoryRegion::default() };
        let memory = self.memory.try_clone().unwrap();
        self.order(&Message::SetMemTable(vec![(region, memory.into())]));
    }

    /// Sets a ring up and starts it.
    fn start(&mut self, ring: u8) {
        self.order(&Message::SetVringBase(VringState { index: ring.into(), num: 0 }));
        self.start_without_base(ring);
    }

    /// Starts a ring and does not say where it begins.
    fn start_without_base(&mut self, ring: u8) {
        let index = u32::from(ring);
        let at = USER + (u64::from(ring) << 16);
        self.order(&Message::SetVringNum(VringState { index, num: 256 }));
        let (avail_addr, used_addr) = (at + 0x1000, at + 0x2000);
        let addr = VringAddr { index, desc_addr: at, avail_addr, used_addr, ..VringAddr::default() };
        self.order(&Message::SetVringAddr(addr));
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        self.order(&Message::SetVringKick(VringFd { index: ring, fd: Some(kick) }));
    }

    fn enable(&mut self, index: u32, enable: bool) {
        self.order(&Message::SetVringEnable { index, enable });
    }
}

/// Runs a front-end against a session of the device.
fn with_card(frontend: impl FnOnce(Session, &Server, &Asked)) {
    let (server, asked) = server();
    connect(&server, &asked, |session| frontend(session, &server, &asked));
}

fn server() -> (Server, Asked) {
    let asked = Asked::default();
    let server = Server::new(Arc::new(FakeDevice(Card(asked.clone()))), Arc::new(Noting(asked.clone())));
    (server.with_mapper(Mapper::within(Arc::new(AddressSpace::default()).join(1 << 40))), asked)
}

/// Runs a front-end against a session of this server.
fn connect(server: &Server, asked: &Asked, frontend: impl FnOnce(Session)) {
    let ((ours, theirs), (stop, _stopping)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    std::thread::scope(|scope| {
        let session = scope.spawn(|| server.serve_connection(theirs, stop.as_fd()));
        let mut connected = Session { frontend: Frontend::new(ours), memory: memfd(MEMORY).into() };
        connected.call(&Message::GetFeatures);
        assert_eq!(asked.take(), ["connected"]);
        frontend(connected);
        session.join().unwrap().unwrap();
    });
}

#[test]
fn a_device_has_protocol_features_and_messages_of_its_own() {
    with_card(|mut session, _, asked| {
        let offered = ProtocolFeatures::from_bits_retain(session.number(&Message::GetProtocolFeatures));
        assert!(offered.contains(ProtocolFeatures::MTU | ProtocolFeatures::RARP | ProtocolFeatures::MQ));
        assert!(!offered.contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS), "it is withheld");
        assert_eq!(session.number(&Message::GetQueueNum), 2, "in rings, not in pairs");
        session.negotiate(ProtocolFeatures::MTU);
        session.order(&Message::NetSetMtu(1500));
        assert_ne!(session.number(&Message::NetSetMtu(65_000)), 0);
        assert_ne!(session.number(&Message::SendRarp([2; 6])), 0, "it was not negotiated");
        session.negotiate(ProtocolFeatures::MTU | ProtocolFeatures::RARP);
        session.order(&Message::SendRarp([2; 6]));
        assert_eq!(asked.take(), ["SetMtu(1500)", "SendRarp([2, 2, 2, 2, 2, 2])"]);
    });
}

#[test]
fn a_back_ends_channel_is_a_unix_stream() {
    with_card(|mut session, _, _| {
        session.negotiate(ProtocolFeatures::BACKEND_REQ);
        let (datagrams, _others) = UnixDatagram::pair().unwrap();
        let (stream, _other) = UnixStream::pair().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        for socket in [datagrams.into(), tcp.into(), udp.into(), memfd(4096)] {
            assert_ne!(session.number(&Message::SetBackendReqFd(socket)), 0);
        }
        session.order(&Message::SetBackendReqFd(stream.into()));
    });
}

#[test]
fn a_reset_is_one_of_the_device() {
    with_card(|mut session, _, asked| {
        session.negotiate(ProtocolFeatures::RESET_DEVICE);
        session.start(0);
        session.enable(0, true);
        session.order(&Message::ResetDevice);
        assert_eq!(asked.take(), ["start 0", "stop 0", "reset"]);
        // The settings of a new driver start anew.
        session.start(0);
        session.enable(0, true);
        assert_eq!(asked.take(), ["start 0"]);
    });
}

#[test]
fn a_ring_that_is_drained_runs_while_it_is_disabled() {
    with_card(|mut session, _, asked| {
        session.negotiate(ProtocolFeatures::empty());
        session.start(0);
        assert!(asked.take().is_empty(), "this one is left alone");
        session.start(1);
        assert_eq!(asked.take(), ["start 1", "begin 1 enabled: false"]);
        session.enable(0, true);
        assert_eq!(asked.take(), ["start 0"]);
        session.enable(1, true);
        session.enable(1, true);
        assert_eq!(asked.take(), ["1 enabled: true"], "in force before the reply, and sent once");
        session.enable(1, false);
        session.enable(0, false);
        assert_eq!(asked.take(), ["1 enabled: false", "stop 0"]);
        session.stop(1);
        assert_eq!(asked.take(), ["stop 1"]);
        // The ring starts enabled if it was enabled meanwhile.
        session.enable(1, true);
        session.start(1);
        assert_eq!(asked.take(), ["start 1", "begin 1 enabled: true"]);
    });
}

#[test]
fn only_a_base_that_the_ring_did_not_stop_at_is_doubtful() {
    with_card(|mut session, _, asked| {
        session.negotiate(ProtocolFeatures::empty());
        let packed = Features::VERSION_1 | Features::PROTOCOL_FEATURES | Features::RING_PACKED;
        session.order(&Message::SetFeatures(packed));
        // Its base, 0, is not where a packed ring begins.
        session.start(0);
        session.enable(0, true);
        assert_eq!(asked.take(), ["start 0, may be beyond its base"]);
        // It stops there.
        session.enable(0, false);
        session.enable(0, true);
        assert_eq!(asked.take(), ["stop 0", "start 0"]);
        session.stop(0);
        session.start(0);
        assert_eq!(asked.take(), ["stop 0", "start 0"]);
    });
}

/// Nothing says where a ring begins: its front-end does not, and it did not stop in this process.
#[test]
fn a_ring_without_a_base_is_doubtful() {
    const USED_INDEX: u64 = 0x2002;
    with_card(|mut session, _, asked| {
        session.negotiate(ProtocolFeatures::empty());
        // A device that was killed has used 5 chains.
        session.memory.write_all_at(&5u16.to_le_bytes(), USED_INDEX).unwrap();
        session.start_without_base(0);
        session.enable(0, true);
        assert_eq!(asked.take(), ["start 0, 5 instead of 0"]);
        // It stops at 0.
        session.stop(0);
        session.start_without_base(0);
        assert_eq!(asked.take(), ["stop 0", "start 0"]);
    });
}

/// The process remembers where a ring stopped, so the same base is not doubtful in the next session.
#[test]
fn a_ring_continues_in_another_session() {
    let (server, asked) = server();
    let packed = Features::VERSION_1 | Features::PROTOCOL_FEATURES | Features::RING_PACKED;
    for started in ["start 0, may be beyond its base", "start 0"] {
        connect(&server, &asked, |mut session| {
            session.negotiate(ProtocolFeatures::empty());
            session.order(&Message::SetFeatures(packed));
            // Its base, 0, is not where a packed ring begins.
            session.start(0);
            session.enable(0, true);
        });
        assert_eq!(asked.take()[..2], [started, "stop 0"]);
    }
    // After a reset, the process does not know where the ring stopped.
    connect(&server, &asked, |mut session| {
        session.negotiate(ProtocolFeatures::RESET_DEVICE);
        session.order(&Message::SetFeatures(packed));
        session.order(&Message::ResetDevice);
        asked.take();
        session.start(0);
        session.enable(0, true);
        assert_eq!(asked.take(), ["start 0, may be beyond its base"]);
    });
}

/// Older versions of Cloud Hypervisor only disable rings and do not send GET_VRING_BASE.
#[test]
fn rings_that_are_only_disabled_can_be_set_up_anew() {
    with_card(|mut session, _, asked| {
        session.negotiate(ProtocolFeatures::empty());
        for ring in 0..2 {
            session.start(ring);
            session.enable(ring.into(), true);
        }
        for index in 0..2 {
            let size = Message::SetVringNum(VringState { index, num: 128 });
            assert_ne!(session.number(&size), 0, "the ring runs");
            session.enable(index, false);
        }
        asked.take();
        session.start(0);
        assert!(asked.take().is_empty());
        session.start(1);
        assert_eq!(asked.take(), ["stop 1", "start 1", "begin 1 enabled: false"]);
        for message in [
            Message::SetVringBase(VringState { index: 1, num: 7 }),
            Message::SetVringNum(VringState { index: 1, num: 128 }),
        ] {
            session.order(&message);
        }
        assert_eq!(asked.take(), ["stop 1"], "it waits for a kick descriptor");
        session.enable(1, true);
        assert!(asked.take().is_empty());
        session.start(1);
        assert_eq!(asked.take(), ["start 1", "begin 1 enabled: true"]);
    });
}

/// The device of the next process is told of its rings, drained or not, and of nothing else.
#[test]
fn a_session_goes_on_in_another_process() {
    let ((old, asked), (new, asked_new)) = (server(), server());
    let deadline = || Instant::now() + Duration::from_secs(60);
    connect(&old, &asked, |mut session| {
        session.negotiate(ProtocolFeatures::MTU);
        session.start(0);
        session.start(1);
        session.enable(0, true);
        session.order(&Message::VringKick { index: 0 });
        asked.take();
        let mut parked = old.park().wait(deadline()).unwrap();
        let mut to = Giving::default();
        let record = Record { session: parked.give(&mut to).unwrap(), ..Record::default() };
        let (record, mut given) = to.record(&record).unwrap().read::<Record>().unwrap();
        let mut restored = new.restore(&record, &mut given).unwrap();
        assert_eq!(asked_new.take(), ["start 0", "start 1", "begin 1 enabled: false"]);
        parked.park_rings();
        assert!(parked.wait_for_rings(deadline()).unwrap());
        assert_eq!(asked.take(), ["park 0", "park 1"]);
        let mut state = Final::default();
        parked.give_final(&mut state).unwrap();
        restored.receive_final(&state).unwrap();
        assert!(asked_new.take().is_empty());
        restored.begin().unwrap();
        restored.go_on();
        assert_eq!(asked_new.take(), ["spawn 0", "spawn 1"]);
        std::thread::scope(|scope| {
            let (stop, _stopping) = UnixStream::pair().unwrap();
            let new = &new;
            let served = scope.spawn(move || new.serve_restored(stop.as_fd()));
            session.enable(1, true);
            session.order(&Message::NetSetMtu(1500));
            assert_eq!(asked_new.take(), ["1 enabled: true", "SetMtu(1500)"]);
            session.stop(0);
            assert_eq!(asked_new.take(), ["stop 0"]);
            drop(session);
            served.join().unwrap().unwrap();
        });
        assert!(asked.take().is_empty());
        // The old session goes on here, and finds that its front-end has left.
        drop(parked);
    });
    assert_eq!(asked.take(), ["unpark 0", "unpark 1", "stop 0", "stop 1"]);
    let error = old.park().wait(deadline()).err().unwrap();
    assert!(matches!(error, HandOverError::Ended), "{error}");
}
