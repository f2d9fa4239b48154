//! Tests front-ends that send invalid messages. The daemon refuses the message or closes the connection,
//! logs the message with the reason, and serves the next front-end.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use kickless_spec::features::Features;
use kickless_spec::vhost_user::{
    FLAG_NEED_REPLY, FLAG_REPLY, FrontendRequest as Code, ProtocolFeatures, TransferDirection, TransferPhase,
    VERSION,
};
use kickless_tests::driver::Eventfd;
use kickless_tests::driver::memory::Ram;
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_tests::frontend::served::Served;
use kickless_tests::frontend::{Answer, LIMIT, addresses};
use kickless_vhost_user::{
    Config, DeviceState, FrontendMessage as Message, Header, Inflight, LogBase, MemoryRegion, VringAddr,
    VringFd, VringState,
};

/// Returns a machine with two queues. The second one is stopped.
fn machine(served: &Served) -> Machine {
    let machine = Machine::prepare(served.socket(), &Shape { queues: 2, ..Shape::default() });
    let mut machine = machine.unwrap();
    machine.frontend.start(&machine.queues[0]).unwrap();
    machine.write(0, 1, &[1; 512]).unwrap();
    machine
}

/// A message, and the words in the log when the daemon refuses it.
type Case = (fn(&Machine) -> Message, &'static [&'static str]);

/// Sends each message in a session of its own during I/O, with and without a request for an
/// acknowledgement. Each must be refused.
fn check_refused(cases: &[Case]) {
    let served = Served::start("io_uring", &[]).unwrap();
    for (message, words) in cases {
        for acknowledged in [true, false] {
            let mut machine = machine(&served);
            let message = message(&machine);
            let seen = served.daemon.log().len();
            let answer = if acknowledged {
                machine.frontend.attempt(&message).unwrap()
            } else {
                machine.frontend.send(&message).unwrap();
                machine.frontend.answer_to_raw().unwrap()
            };
            let has_reply = matches!(message, Message::GetVringBase { .. });
            let expected = if acknowledged && !has_reply { Answer::Refused } else { Answer::Dropped };
            assert_eq!(answer, expected, "{message:?}, acknowledged: {acknowledged}");
            wait_for_warning(&served, seen, words);
            if answer == Answer::Refused {
                // Nothing else changed.
                assert_eq!(machine.read(0, 1, 512).unwrap(), [1; 512], "{message:?}");
            }
            drop(machine);
            served.check_next_frontend().unwrap();
        }
    }
    served.end().unwrap();
}

/// Waits for a warning with all these words after log line `seen`.
fn wait_for_warning(served: &Served, seen: usize, words: &[&str]) {
    let said =
        |line: &str| (line.contains(" WARN ") && words.iter().all(|word| line.contains(word))).then_some(());
    served.daemon.log().wait_from(seen, &format!("saying {words:?}"), LIMIT, said).unwrap();
}

fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

fn eventfd() -> Option<OwnedFd> {
    Some(Eventfd::new().unwrap().as_fd().try_clone_to_owned().unwrap())
}

#[test]
fn ring_indices_out_of_range_are_refused() {
    check_refused(&[
        (|_| Message::SetVringNum(state(4, 256)), &["SET_VRING_NUM", "ring index 4", "4 rings"]),
        (|_| Message::SetVringNum(state(u32::MAX, 256)), &["SET_VRING_NUM", "ring index 4294967295"]),
        (|_| Message::SetVringBase(state(4, 0)), &["SET_VRING_BASE", "ring index 4"]),
        (
            |m| Message::SetVringAddr(VringAddr { index: 4, ..addresses(&m.queues[1]) }),
            &["SET_VRING_ADDR", "ring index 4"],
        ),
        (|_| Message::SetVringKick(VringFd { index: 4, fd: eventfd() }), &["SET_VRING_KICK", "ring index 4"]),
        (
            |_| Message::SetVringCall(VringFd { index: 255, fd: eventfd() }),
            &["SET_VRING_CALL", "ring index 255"],
        ),
        (|_| Message::SetVringErr(VringFd { index: 4, fd: eventfd() }), &["SET_VRING_ERR", "ring index 4"]),
        (|_| Message::SetVringEnable { index: 4, enable: true }, &["SET_VRING_ENABLE", "ring index 4"]),
        (|_| Message::VringKick { index: 65536 }, &["VRING_KICK", "ring index 65536"]),
        (|_| Message::GetVringBase { index: 4 }, &["GET_VRING_BASE", "ring index 4"]),
    ]);
}

#[test]
fn invalid_ring_settings_are_refused() {
    check_refused(&[
        (|_| Message::SetVringNum(state(1, 0)), &["SET_VRING_NUM", "queue size 0"]),
        (|_| Message::SetVringNum(state(1, 3)), &["SET_VRING_NUM", "queue size 3"]),
        (|_| Message::SetVringNum(state(1, 2048)), &["SET_VRING_NUM", "ring size 2048", "at most 1024"]),
        (|_| Message::SetVringNum(state(1, 65536 + 256)), &["SET_VRING_NUM", "ring size 65792"]),
        (|_| Message::SetVringNum(state(0, 128)), &["SET_VRING_NUM", "ring 0 is running"]),
        (|_| Message::SetVringBase(state(1, 65536)), &["SET_VRING_BASE", "0x10000"]),
        (|_| Message::SetVringBase(state(0, 0)), &["SET_VRING_BASE", "ring 0 is running"]),
        (
            |_| Message::SetVringKick(VringFd { index: 1, fd: None }),
            &["SET_VRING_KICK", "no file descriptor"],
        ),
        (
            // A regular file never signals a kick.
            |m| {
                Message::SetVringKick(VringFd {
                    index: 1,
                    fd: Some(m.ram.as_fd().try_clone_to_owned().unwrap()),
                })
            },
            &["SET_VRING_KICK", "descriptor cannot be used"],
        ),
    ]);
}

/// Changes the addresses of queue 0. It runs, so the addresses that it needs are known.
fn addr(machine: &Machine, change: impl FnOnce(&mut VringAddr)) -> Message {
    let mut addr = addresses(&machine.queues[0]);
    change(&mut addr);
    Message::SetVringAddr(addr)
}

#[test]
fn ring_addresses_outside_memory_are_refused() {
    const WORDS: &[&str] = &["SET_VRING_ADDR", "ring 0", "not in guest memory"];
    check_refused(&[
        (|m| addr(m, |a| a.desc_addr = 0), WORDS),
        (|m| addr(m, |a| a.avail_addr = u64::MAX - 1), WORDS),
        (|m| addr(m, |a| a.used_addr = RAM_BASE), WORDS),
        // The last byte of each area is outside memory.
        (|m| addr(m, |a| a.desc_addr = m.ram.region().user_addr + m.ram.region().size - 4080), WORDS),
        (|m| addr(m, |a| a.avail_addr = m.ram.region().user_addr + m.ram.region().size - 516), WORDS),
        (|m| addr(m, |a| a.used_addr = m.ram.region().user_addr + m.ram.region().size - 2052), WORDS),
        (|m| addr(m, |a| a.desc_addr = m.ram.region().user_addr - 16), WORDS),
        (|m| addr(m, |a| a.desc_addr += 8), &["SET_VRING_ADDR", "misaligned"]),
        (|m| addr(m, |a| a.avail_addr += 1), &["SET_VRING_ADDR", "misaligned"]),
        (|m| addr(m, |a| a.used_addr += 2), &["SET_VRING_ADDR", "misaligned"]),
        (|m| addr(m, |a| a.log = true), WORDS),
    ]);
}

/// Sends the machine's memory and one region more, which `change` makes invalid.
fn table(machine: &Machine, change: impl FnOnce(&mut MemoryRegion)) -> Message {
    let more = Ram::new(1 << 40, 1 << 20).unwrap();
    let (mut region, file) = more.region_and_file().unwrap();
    change(&mut region);
    Message::SetMemTable(vec![machine.ram.region_and_file().unwrap(), (region, file)])
}

fn added(change: impl FnOnce(&mut MemoryRegion)) -> Message {
    let (mut region, file) = Ram::new(1 << 40, 1 << 20).unwrap().region_and_file().unwrap();
    change(&mut region);
    Message::AddMemReg(region, file)
}

#[test]
fn invalid_memory_is_refused() {
    const WRAPS: &[&str] = &["wraps"];
    const SHORT: &[&str] = &["bytes of its file, which has"];
    const OVERLAPS: &[&str] = &["overlaps the region"];
    check_refused(&[
        (|m| table(m, |r| r.guest_addr = u64::MAX - 4096), &["SET_MEM_TABLE", "guest address", "wraps"]),
        (|m| table(m, |r| r.user_addr = u64::MAX - 4096), &["SET_MEM_TABLE", "user address", "wraps"]),
        (|m| table(m, |r| r.mmap_offset = u64::MAX - 4096), &["SET_MEM_TABLE", "mmap offset", "wraps"]),
        (|m| table(m, |r| r.size = u64::MAX), WRAPS),
        (|m| table(m, |r| r.size = 0), &["SET_MEM_TABLE", "is empty"]),
        (|m| table(m, |r| r.size *= 2), SHORT),
        (|m| table(m, |r| r.size = 1 << 62), SHORT),
        (|m| table(m, |r| r.mmap_offset += 1), SHORT),
        (|m| table(m, |r| r.guest_addr = m.ram.end() - 1), OVERLAPS),
        (|m| table(m, |r| r.guest_addr = RAM_BASE), OVERLAPS),
        (|m| table(m, |r| r.guest_addr = RAM_BASE - (1 << 20) + 1), OVERLAPS),
        (|_| added(|r| r.guest_addr = u64::MAX - 4096), &["ADD_MEM_REG", "guest address", "wraps"]),
        (|_| added(|r| r.user_addr = u64::MAX), &["ADD_MEM_REG", "user address", "wraps"]),
        (|_| added(|r| r.mmap_offset = u64::MAX), &["ADD_MEM_REG", "mmap offset", "wraps"]),
        (|_| added(|r| r.size = 0), &["ADD_MEM_REG", "is empty"]),
        (|_| added(|r| r.size += 1), &["ADD_MEM_REG", "bytes of its file, which has"]),
        (|_| added(|r| r.guest_addr = RAM_BASE + 4096), &["ADD_MEM_REG", "overlaps the region"]),
        (
            |_| {
                Message::AddMemReg(
                    Ram::new(1 << 40, 4096).unwrap().region(),
                    std::fs::File::open("/").unwrap().into(),
                )
            },
            &["ADD_MEM_REG", "cannot be mapped"],
        ),
        (|_| Message::RemMemReg(Ram::new(1 << 40, 4096).unwrap().region()), &["REM_MEM_REG", "no region at"]),
        (
            |m| Message::RemMemReg(MemoryRegion { size: 4096, ..m.ram.region() }),
            &["REM_MEM_REG", "no region at", "size 0x1000"],
        ),
    ]);
}

#[test]
fn features_not_offered_are_refused() {
    check_refused(&[
        (
            |_| Message::SetFeatures(Features::from_bits_retain(1 << 36) | Features::PROTOCOL_FEATURES),
            &["SET_FEATURES", "0x1000000000"],
        ),
        (
            |_| Message::SetFeatures(Features::from_bits_retain(1 << 63)),
            &["SET_FEATURES", "0x8000000000000000"],
        ),
        (|_| Message::SetProtocolFeatures(ProtocolFeatures::SHMEM), &["SET_PROTOCOL_FEATURES", "0x400000"]),
        (|_| Message::SetLogFd(File::open("/dev/null").unwrap().into()), &["SET_LOG_FD", "no eventfd"]),
        (|_| Message::NetSetMtu(1500), &["NET_SET_MTU", "not offered"]),
        (|_| Message::SendRarp([0; 6]), &["SEND_RARP", "not offered"]),
        (|_| Message::SetBackendReqFd(eventfd().unwrap()), &["SET_BACKEND_REQ_FD", "no unix stream socket"]),
        (
            |_| {
                Message::SetInflightFd(
                    Inflight { mmap_size: 4096, num_queues: 1, queue_size: 8, ..Inflight::default() },
                    eventfd().unwrap(),
                )
            },
            &["SET_INFLIGHT_FD", "ring 0 is running"],
        ),
        (
            |_| Message::SetConfig(Config { data: vec![1; 8], ..Config::default() }),
            &["SET_CONFIG", "0..8", "not writable"],
        ),
        (
            |_| Message::SetConfig(Config { offset: 32, data: vec![2], ..Config::default() }),
            &["SET_CONFIG", "writeback", "2"],
        ),
        (
            |_| Message::SetConfig(Config { offset: u32::MAX, data: vec![1], ..Config::default() }),
            &["SET_CONFIG", "not writable"],
        ),
    ]);
}

/// The reply to this request carries the refusal.
#[test]
fn an_invalid_inflight_buffer_is_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = machine(&served);
    let seen = served.daemon.log().len();
    let wanted = Message::GetInflightFd(Inflight::default());
    assert_eq!(machine.frontend.attempt(&wanted).unwrap(), Answer::Refused);
    wait_for_warning(&served, seen, &["number of queues 0"]);
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// The front-end could have negotiated these features.
#[test]
fn requests_not_negotiated_are_refused() {
    let file = || eventfd().unwrap();
    let inflight = Inflight { mmap_size: 4096, num_queues: 1, queue_size: 8, ..Inflight::default() };
    let log = || LogBase::Shared { mmap_size: 4096, mmap_offset: 0, fd: Some(file()) };
    let state = DeviceState { direction: TransferDirection::Save, phase: TransferPhase::Stopped };
    let region = Ram::new(1 << 40, 4096).unwrap().region();
    let cases: [(Message, Answer, &str); 10] = [
        (Message::GetInflightFd(inflight), Answer::Refused, "INFLIGHT_SHMFD"),
        (Message::SetInflightFd(inflight, file()), Answer::Refused, "INFLIGHT_SHMFD"),
        (Message::AddMemReg(region, file()), Answer::Refused, "CONFIGURE_MEM_SLOTS"),
        (Message::RemMemReg(region), Answer::Refused, "CONFIGURE_MEM_SLOTS"),
        (Message::SetBackendReqFd(file()), Answer::Refused, "BACKEND_REQ"),
        (Message::SetDeviceStateFd(state, file()), Answer::Refused, "DEVICE_STATE"),
        (Message::CheckDeviceState, Answer::Refused, "DEVICE_STATE"),
        (Message::SetLogBase(log()), Answer::Refused, "LOG_SHMFD"),
        (Message::ResetDevice, Answer::Refused, "RESET_DEVICE"),
        (Message::GetVringBaseSkipDrain { index: 0 }, Answer::Dropped, "GET_VRING_BASE_SKIP_DRAIN"),
    ];
    let served = Served::start("io_uring", &[]).unwrap();
    for (message, expected, feature) in cases {
        let mut machine = machine(&served);
        machine.frontend.order(&Message::SetProtocolFeatures(ProtocolFeatures::REPLY_ACK)).unwrap();
        let seen = served.daemon.log().len();
        assert_eq!(machine.frontend.attempt(&message).unwrap(), expected, "{message:?}");
        wait_for_warning(&served, seen, &[feature, "was not negotiated"]);
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end().unwrap();
}

/// Reads beyond the configuration space return zeroes. It appears at 256 once more.
#[test]
fn the_configuration_reads_as_zeroes_beyond_its_end() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = machine(&served);
    for (offset, len) in [(0, 256), (60, 100), (72, 184), (328, 100), (u32::MAX, 256)] {
        let config = Config { offset, data: vec![0xff; len], ..Config::default() };
        let kickless_vhost_user::Reply::Config(Some(reply)) =
            machine.frontend.ask(&Message::GetConfig(config)).unwrap()
        else {
            panic!("refused")
        };
        assert_eq!(reply.data.len(), len);
        assert!(reply.data.iter().skip(72usize.saturating_sub(offset as usize)).all(|byte| *byte == 0));
    }
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// The bytes of a message.
struct Raw {
    request: u32,
    flags: u32,
    /// A wrong size in the header.
    size: Option<u32>,
    payload: Vec<u8>,
    fds: usize,
    answer: Answer,
    words: &'static [&'static str],
}

fn raw(code: Code, payload: &[u8], fds: usize, answer: Answer, words: &'static [&'static str]) -> Raw {
    let flags = VERSION | FLAG_NEED_REPLY;
    Raw { request: code.raw(), flags, size: None, payload: payload.to_vec(), fds, answer, words }
}

fn wrong_bytes() -> Vec<Raw> {
    use Answer::{Dropped, Refused};
    let with_flags = |flags, words| Raw { flags, ..raw(Code::GetFeatures, &[], 0, Dropped, words) };
    let unanswered = |raw: Raw| Raw { flags: VERSION, answer: Dropped, ..raw };
    let unknown = |request, words| Raw { request, ..raw(Code::SetOwner, &[1, 2, 3], 0, Refused, words) };
    let regions = |count: u32, len: usize| [&count.to_le_bytes()[..], &vec![0; 4 + len]].concat();
    vec![
        // Requests that do not exist.
        unknown(0, &["unknown request 0"]),
        unknown(999, &["unknown request 999"]),
        unanswered(unknown(46, &["unknown request 46"])),
        // Requests that are not decoded, whatever their payload. The reply carries the refusal if it can.
        raw(Code::SetStatus, &[0; 8], 0, Refused, &["SET_STATUS", "not supported"]),
        unanswered(raw(Code::SetStatus, &[0; 8], 0, Refused, &["SET_STATUS", "not supported"])),
        raw(Code::SetVringEndian, &[1; 8], 1, Refused, &["SET_VRING_ENDIAN", "not supported"]),
        raw(Code::PostcopyAdvise, &[], 0, Refused, &["POSTCOPY_ADVISE", "not supported"]),
        raw(Code::PostcopyEnd, &[7; 3], 0, Refused, &["POSTCOPY_END", "not supported"]),
        raw(Code::GetStatus, &[], 0, Dropped, &["GET_STATUS", "not supported"]),
        raw(Code::GetShmemConfig, &[], 0, Dropped, &["GET_SHMEM_CONFIG", "not supported"]),
        // Headers.
        with_flags(0, &["version 0"]),
        with_flags(2, &["version 2"]),
        with_flags(VERSION | FLAG_REPLY, &["GET_FEATURES", "expected a request"]),
        Raw { size: Some(4097), ..raw(Code::SetOwner, &[], 0, Dropped, &["payload of 4097 bytes"]) },
        Raw {
            size: Some(u32::MAX),
            ..raw(Code::SetMemTable, &[], 0, Dropped, &["payload of 4294967295 bytes"])
        },
        // Payloads that are too short or too long.
        raw(Code::SetVringNum, &[0; 4], 0, Refused, &["SET_VRING_NUM", "payload is 4 bytes, expected 8"]),
        unanswered(raw(Code::SetVringNum, &[0; 4], 0, Refused, &["SET_VRING_NUM", "payload is 4 bytes"])),
        raw(Code::SetVringNum, &[0; 12], 0, Refused, &["SET_VRING_NUM", "payload is 12 bytes"]),
        raw(
            Code::SetVringAddr,
            &[0; 39],
            0,
            Refused,
            &["SET_VRING_ADDR", "payload is 39 bytes, expected 40"],
        ),
        raw(Code::SetFeatures, &[], 0, Refused, &["SET_FEATURES", "payload is 0 bytes, expected 8"]),
        raw(Code::SetOwner, &[0; 8], 0, Refused, &["SET_OWNER", "payload is 8 bytes, expected 0"]),
        raw(Code::GetFeatures, &[0; 8], 0, Dropped, &["GET_FEATURES", "payload is 8 bytes, expected 0"]),
        raw(Code::SetVringKick, &[0; 7], 1, Refused, &["SET_VRING_KICK", "payload is 7 bytes"]),
        raw(Code::SetMemTable, &[0; 3], 0, Refused, &["SET_MEM_TABLE", "payload is 3 bytes"]),
        raw(
            Code::SetMemTable,
            &regions(2, 32),
            2,
            Refused,
            &["SET_MEM_TABLE", "payload is 40 bytes, expected 72"],
        ),
        raw(Code::AddMemReg, &[0; 32], 1, Refused, &["ADD_MEM_REG", "payload is 32 bytes, expected 40"]),
        // With the fields of Xen.
        raw(Code::AddMemReg, &[0; 48], 1, Refused, &["ADD_MEM_REG", "payload is 48 bytes, expected 40"]),
        raw(Code::SetMemTable, &regions(1, 40), 1, Refused, &["SET_MEM_TABLE", "48 bytes, expected 40"]),
        raw(Code::SetConfig, &[0; 11], 0, Refused, &["SET_CONFIG", "payload is 11 bytes"]),
        raw(
            Code::SetConfig,
            &[0, 0, 0, 0, 200, 0, 0, 0, 0, 0, 0, 0, 1],
            0,
            Refused,
            &["SET_CONFIG", "payload is 13 bytes"],
        ),
        raw(
            Code::SetConfig,
            &[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1],
            0,
            Refused,
            &["SET_CONFIG", "size is 0x101"],
        ),
        // Descriptors.
        raw(Code::SetVringCall, &[0; 8], 0, Refused, &["SET_VRING_CALL", "0 file descriptors, expected 1"]),
        raw(Code::SetVringCall, &[0; 8], 2, Refused, &["SET_VRING_CALL", "2 file descriptors, expected 1"]),
        raw(
            Code::SetVringCall,
            &[0, 1, 0, 0, 0, 0, 0, 0],
            1,
            Refused,
            &["SET_VRING_CALL", "1 file descriptors, expected 0"],
        ),
        raw(Code::SetVringNum, &[0; 8], 1, Refused, &["SET_VRING_NUM", "1 file descriptors, expected 0"]),
        raw(Code::SetVringCall, &[0; 8], 9, Dropped, &["more than 8 file descriptors"]),
        raw(Code::SetOwner, &[], 60, Dropped, &["more than 8 file descriptors"]),
        raw(
            Code::SetMemTable,
            &regions(1, 32),
            0,
            Refused,
            &["SET_MEM_TABLE", "1 regions but 0 file descriptors"],
        ),
        raw(
            Code::SetMemTable,
            &regions(1, 32),
            3,
            Refused,
            &["SET_MEM_TABLE", "1 regions but 3 file descriptors"],
        ),
        raw(Code::AddMemReg, &[0; 40], 0, Refused, &["ADD_MEM_REG", "0 file descriptors, expected 1"]),
        // Fields.
        raw(Code::SetMemTable, &regions(9, 288), 8, Refused, &["SET_MEM_TABLE", "number of regions is 0x9"]),
        raw(
            Code::SetMemTable,
            &regions(u32::MAX, 32),
            1,
            Refused,
            &["SET_MEM_TABLE", "number of regions is 0xffffffff"],
        ),
        raw(Code::SetVringEnable, &[0, 0, 0, 0, 2, 0, 0, 0], 0, Refused, &["SET_VRING_ENABLE", "num is 0x2"]),
        raw(Code::SetVringKick, &[0, 2, 0, 0, 0, 0, 0, 0], 1, Refused, &["SET_VRING_KICK", "ring index"]),
    ]
}

#[test]
fn invalid_bytes_are_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    for Raw { request, flags, size, payload, fds, answer, words } in wrong_bytes() {
        let mut machine = machine(&served);
        let seen = served.daemon.log().len();
        let size = size.unwrap_or(payload.len() as u32);
        let sent = Eventfd::new().unwrap();
        let fds = vec![sent.as_fd(); fds];
        machine.frontend.send_raw(&Header { request, flags, size }, &payload, &fds).unwrap();
        assert_eq!(machine.frontend.answer_to_raw().unwrap(), answer, "{words:?}");
        wait_for_warning(&served, seen, words);
        if answer == Answer::Refused {
            assert_eq!(machine.read(0, 1, 512).unwrap(), [1; 512], "{words:?}");
        }
        drop(machine);
        served.check_next_frontend().unwrap();
    }
    served.end().unwrap();
}

#[test]
fn a_connection_closed_within_a_message_is_reported() {
    let served = Served::start("io_uring", &[]).unwrap();
    let header = Header { request: Code::SetVringNum.raw(), flags: VERSION, size: 8 };
    let message = [&header.to_bytes()[..], &[0; 8]].concat();
    for len in 1..message.len() {
        let mut machine = machine(&served);
        let seen = served.daemon.log().len();
        machine.frontend.send_bytes(&message[..len]).unwrap();
        drop(machine);
        wait_for_warning(&served, seen, &["closed the connection after", &format!("{len} bytes")]);
    }
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// A slow message, one byte at a time, is valid.
#[test]
fn a_message_may_come_in_pieces() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = machine(&served);
    let flags = VERSION | FLAG_NEED_REPLY;
    let header = Header { request: Code::SetVringBase.raw(), flags, size: 8 };
    for byte in [&header.to_bytes()[..], &[1, 0, 0, 0, 5, 0, 0, 0]].concat() {
        machine.frontend.send_bytes(&[byte]).unwrap();
    }
    assert_eq!(machine.frontend.answer_to_raw().unwrap(), Answer::Done);
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// A ring with half of its set-up does not start. Its kicks are ignored; kicks by message count.
#[test]
fn kicks_for_incomplete_rings_are_ignored() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = machine(&served);
    for _ in 0..3 {
        machine.frontend.order(&Message::VringKick { index: 1 }).unwrap();
    }
    machine.queues[1].kick();
    machine.frontend.set_kick(&machine.queues[1]).unwrap();
    machine.queues[1].kick();
    machine.frontend.order(&Message::SetVringEnable { index: 1, enable: true }).unwrap();
    machine.queues[1].kick();
    machine.frontend.order(&Message::VringKick { index: 1 }).unwrap();
    assert_eq!(machine.read(0, 1, 512).unwrap(), [1; 512]);
    // The ring runs after the rest of its set-up.
    machine.frontend.order(&Message::SetVringNum(state(1, 256))).unwrap();
    let addr = addresses(&machine.queues[1]);
    machine.frontend.order(&Message::SetVringAddr(addr)).unwrap();
    machine.frontend.set_call(&machine.queues[1]).unwrap();
    assert_eq!(machine.read(1, 1, 512).unwrap(), [1; 512]);
    drop(machine);
    served.check_next_frontend().unwrap();
    let log = served.end().unwrap();
    assert!(log.iter().any(|line| line.contains("kicks_ignored=4")), "{log:#?}");
    assert!(!log.iter().any(|line| line.contains(" WARN ")), "{log:#?}");
}

/// A front-end passes its own end of the connection as the channel for requests of the back-end, and leaves.
/// The back-end must not keep the session because it holds the other end itself.
#[test]
fn a_session_does_not_keep_itself() {
    let served = Served::start("io_uring", &[]).unwrap();
    for protocol in [ProtocolFeatures::BACKEND_REQ, ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::CONFIG]
    {
        let path = served.socket();
        let socket = std::os::unix::net::UnixStream::connect(path).unwrap();
        let mut frontend = kickless_vhost_user::Frontend::new(socket.try_clone().unwrap());
        let wait = kickless_vhost_user::Wait::FOREVER.at_most(LIMIT);
        frontend.send(&Message::SetProtocolFeatures(protocol), false, &wait).unwrap();
        frontend.send(&Message::SetBackendReqFd(OwnedFd::from(socket)), false, &wait).unwrap();
        drop(frontend);
        served.check_next_frontend().unwrap();
    }
    served.end().unwrap();
}
