//! Tests a device behind a vIOMMU whose front-end answers late, wrongly, too often or not at all.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::time::Duration;

use kickless_spec::blk;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, IotlbAccess, IotlbKind, ProtocolFeatures};
use kickless_testing::pattern;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{LAYOUTS, Layout, Request};
use kickless_tests::frontend::Frontend;
use kickless_tests::frontend::iommu::{
    DISTANCE, Iommu, PAGE, addresses, at_iova, expect_refused, invalidate, start, update,
};
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_tests::frontend::served::Served;
use kickless_tests::with_each_engine;
use kickless_vhost_user::{FrontendMessage as Message, Iotlb, VringAddr};

with_each_engine! {
    a_viommu_needs_the_channel_for_misses
    every_layout_works_with_translations
    a_waiting_queue_can_stop_and_continue
    only_requests_without_translation_fail
    bad_updates_are_refused
    unrequested_translations_are_bounded
    a_front_end_may_leave_with_a_miss_open
    a_closed_channel_is_reported_while_a_ring_runs
    memory_may_change_under_translations
}

const QUIET_TIME: Duration = Duration::from_millis(100);
const RW: IotlbAccess = IotlbAccess::READ.union(IotlbAccess::WRITE);

/// Returns a machine with one queue behind a vIOMMU. The vIOMMU has translations for all memory.
fn machine(served: &Served, shape: &Shape) -> (Machine, Iommu) {
    let mut machine = Machine::prepare(served.socket(), shape).unwrap();
    let mut iommu = Iommu::connect(&mut machine.frontend).unwrap();
    iommu.map_all(&machine.ram);
    start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
    (machine, iommu)
}

/// Submits a request without waiting.
fn submit(machine: &mut Machine, request: &Request, layout: Layout) {
    let buffers = machine.request_memory[0].lay_out(&machine.ram, request, layout).unwrap();
    machine.queues[0].submit(&machine.ram, &at_iova(&buffers), None).unwrap();
    machine.queues[0].flush();
}

/// Performs a request. Returns its status and the data read.
fn perform(machine: &mut Machine, iommu: &mut Iommu, request: &Request, layout: Layout) -> (u8, Vec<u8>) {
    submit(machine, request, layout);
    finish(machine, iommu, request)
}

fn finish(machine: &mut Machine, iommu: &mut Iommu, request: &Request) -> (u8, Vec<u8>) {
    let len = iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();
    let outcome = machine.request_memory[0].outcome(&machine.ram, request, len).unwrap();
    (outcome.status, outcome.data)
}

fn write_and_verify(machine: &mut Machine, iommu: &mut Iommu, seed: u64) {
    let data = pattern(seed, 4096);
    assert_eq!(perform(machine, iommu, &Request::write(8, &data), Layout::Usual).0, blk::S_OK);
    assert_eq!(perform(machine, iommu, &Request::read(8, 4096), Layout::Usual), (blk::S_OK, data));
}

fn a_viommu_needs_the_channel_for_misses(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut frontend = Frontend::connect(served.socket()).unwrap();
    let offered = |frontend: &mut Frontend| {
        Features::from_bits_retain(frontend.number(&Message::GetFeatures).unwrap())
            .contains(Features::ACCESS_PLATFORM)
    };
    assert!(!offered(&mut frontend), "before protocol features are chosen");
    for (protocol, expected) in [
        (ProtocolFeatures::BACKEND_REQ, false),
        (ProtocolFeatures::REPLY_ACK, false),
        (ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::REPLY_ACK, true),
    ] {
        frontend.send(&Message::SetProtocolFeatures(protocol)).unwrap();
        assert_eq!(offered(&mut frontend), expected, "{protocol:?}");
    }
}

fn every_layout_works_with_translations(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for packed in [false, true] {
        let (mut machine, mut iommu) = machine(&served, &Shape { packed, ..Shape::default() });
        for (round, layout) in
            LAYOUTS.iter().filter(|layout| !matches!(layout, Layout::Pieces(_))).enumerate()
        {
            let data = pattern(round as u64, 64 << 10);
            let write = Request::write(64, &data);
            assert_eq!(perform(&mut machine, &mut iommu, &write, *layout).0, blk::S_OK, "{layout:?}");
            let read = Request::read(64, data.len());
            assert_eq!(perform(&mut machine, &mut iommu, &read, *layout), (blk::S_OK, data), "{layout:?}");
        }
        let known = iommu.misses;
        assert!(known >= 3 + 17, "{known} misses");
        write_and_verify(&mut machine, &mut iommu, 1);
        assert_eq!(iommu.misses, known, "the device asked for a known translation");
        // Invalidates all translations, also those of the rings. The device asks again.
        machine.frontend.order(&invalidate(0, 0)).unwrap();
        write_and_verify(&mut machine, &mut iommu, 2);
        assert!(iommu.misses >= known + 5, "{} misses", iommu.misses);
        // Moves one page of data to another address.
        let data = machine.request_memory[0].data();
        let other_page = machine.ram.take(PAGE as usize, PAGE).unwrap();
        iommu.map(data.0 + DISTANCE, machine.ram.user(other_page));
        machine.frontend.order(&invalidate(data.0 + DISTANCE, PAGE)).unwrap();
        machine.ram.map().write(other_page, &[7; PAGE as usize]).unwrap();
        let write = Request::write(8, &[1; 4096]);
        assert_eq!(perform(&mut machine, &mut iommu, &write, Layout::Usual).0, blk::S_OK);
        iommu.map(data.0 + DISTANCE, machine.ram.user(data));
        machine.frontend.order(&update(data.0 + DISTANCE, PAGE, machine.ram.user(data), RW)).unwrap();
        let read = Request::read(8, 4096);
        assert_eq!(perform(&mut machine, &mut iommu, &read, Layout::Usual), (blk::S_OK, vec![7; 4096]));
    }
    served.check_next_frontend().unwrap();
}

fn a_waiting_queue_can_stop_and_continue(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let (mut machine, mut iommu) = machine(&served, &Shape::default());
    write_and_verify(&mut machine, &mut iommu, 3);
    let used = machine.queues[0].used_idx();
    machine.frontend.order(&invalidate(machine.request_memory[0].data().0 + DISTANCE, PAGE)).unwrap();
    let read = Request::read(8, 4096);
    submit(&mut machine, &read, Layout::Usual);
    let asked = iommu.miss(Duration::from_secs(30)).unwrap().unwrap();
    assert_eq!(asked.iova, machine.request_memory[0].data().0 + DISTANCE);
    assert_eq!(asked.access, IotlbAccess::WRITE);
    // More requests cause no further misses.
    machine.queues[0].kick();
    assert!(iommu.miss(QUIET_TIME).unwrap().is_none());
    assert_eq!(machine.queues[0].used_idx(), used);
    // The queue continues with the head that waits.
    let base = machine.frontend.stop(&mut machine.queues[0]).unwrap();
    assert_eq!(base, used);
    // The answer comes late.
    iommu.answer(&mut machine.frontend, &asked).unwrap();
    start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
    assert_eq!(finish(&mut machine, &mut iommu, &read), (blk::S_OK, pattern(3, 4096)));
    // A translation that is known in advance causes no miss.
    let known = iommu.misses;
    write_and_verify(&mut machine, &mut iommu, 4);
    assert_eq!(iommu.misses, known);
    drop((machine, iommu));
    served.check_next_frontend().unwrap();
}

fn only_requests_without_translation_fail(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let (mut machine, mut iommu) = machine(&served, &Shape::default());
    write_and_verify(&mut machine, &mut iommu, 5);
    let data = machine.request_memory[0].data().0 + DISTANCE;
    iommu.unmap(data);
    machine.frontend.order(&invalidate(data, PAGE)).unwrap();
    let status = perform(&mut machine, &mut iommu, &Request::read(8, 4096), Layout::Usual).0;
    assert_eq!(status, blk::S_IOERR);
    // The device must not read into a page that is read-only.
    let user = machine.ram.user(machine.request_memory[0].data());
    machine.frontend.order(&update(data, PAGE, user, IotlbAccess::READ)).unwrap();
    let status = perform(&mut machine, &mut iommu, &Request::read(8, 4096), Layout::Usual).0;
    assert_eq!(status, blk::S_IOERR);
    let write = Request::write(8, &pattern(6, 4096));
    assert_eq!(perform(&mut machine, &mut iommu, &write, Layout::Usual).0, blk::S_OK);
    iommu.map(data, user);
    write_and_verify(&mut machine, &mut iommu, 7);
    drop((machine, iommu));
    served.check_next_frontend().unwrap();
}

fn bad_updates_are_refused(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let mut plain = Machine::start(served.socket(), &Shape::default()).unwrap();
    let user = plain.ram.region().user_addr;
    expect_refused(&mut plain.frontend, &update(0, PAGE, user, RW)).unwrap();
    plain.stop().unwrap();
    drop(plain);
    let (mut machine, mut iommu) = machine(&served, &Shape::default());
    let end = user + machine.ram.region().size;
    for (iova, size, user, access) in [
        (0, 0, user, RW),
        (0, PAGE, user, IotlbAccess::empty()),
        (u64::MAX - PAGE + 1, 2 * PAGE, user, RW),
        (0, 2 * PAGE, u64::MAX - PAGE + 1, RW),
        (0, u64::MAX, user, RW),
        (0, PAGE, user - PAGE, RW),
        (0, PAGE, end, RW),
        (0, 2 * PAGE, end - PAGE, RW),
        (1, PAGE, user, RW),
        (0, PAGE, user + 8, RW),
        (0, PAGE + 512, user, RW),
    ] {
        expect_refused(&mut machine.frontend, &update(iova, size, user, access)).unwrap();
    }
    for kind in [IotlbKind::Miss, IotlbKind::AccessFail] {
        let message = Iotlb { kind, iova: 0, size: PAGE, user_addr: user, access: RW };
        expect_refused(&mut machine.frontend, &Message::IotlbMsg(message)).unwrap();
    }
    // The ring is not aligned at the device's address.
    let addr = addresses(&machine.ram, &machine.queues[0]);
    let askew = VringAddr { desc_addr: addr.desc_addr + 8, ..addr };
    expect_refused(&mut machine.frontend, &Message::SetVringAddr(askew)).unwrap();
    write_and_verify(&mut machine, &mut iommu, 8);
    drop((machine, iommu));
    served.check_next_frontend().unwrap();
}

fn unrequested_translations_are_bounded(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let (mut machine, mut iommu) = machine(&served, &Shape::default());
    write_and_verify(&mut machine, &mut iommu, 9);
    let user = machine.ram.region().user_addr;
    // Each translation needs a node, and the number of nodes is limited.
    for i in 0..10_000u64 {
        machine.frontend.order(&update(i << 21, PAGE, user, RW)).unwrap();
    }
    write_and_verify(&mut machine, &mut iommu, 10);
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.daemon.pid())).unwrap();
    let resident = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    let kib: u64 = resident.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < 128 << 10, "{resident}");
    drop((machine, iommu));
    served.check_next_frontend().unwrap();
}

fn a_front_end_may_leave_with_a_miss_open(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    for answered in [false, true] {
        let (mut machine, mut iommu) = machine(&served, &Shape::default());
        submit(&mut machine, &Request::read(8, 512), Layout::Usual);
        let asked = iommu.miss(Duration::from_secs(30)).unwrap().unwrap();
        if answered {
            // The front-end leaves in the middle of the answer.
            let user = machine.ram.region().user_addr;
            machine.frontend.send(&update(asked.iova, PAGE, user, RW)).unwrap();
        }
        drop((machine, iommu));
    }
    let (mut machine, mut iommu) = machine(&served, &Shape::default());
    write_and_verify(&mut machine, &mut iommu, 11);
    // The front-end closes its channel, opens another one and goes on answering.
    drop(iommu);
    machine.frontend.order(&invalidate(0, 0)).unwrap();
    let read = Request::read(8, 4096);
    submit(&mut machine, &read, Layout::Usual);
    assert!(!machine.frontend.replies_within(Code::GetFeatures, QUIET_TIME).unwrap());
    let mut iommu = Iommu::connect(&mut machine.frontend).unwrap();
    iommu.map_all(&machine.ram);
    assert_eq!(finish(&mut machine, &mut iommu, &read), (blk::S_OK, pattern(11, 4096)));
    drop((machine, iommu));
    served.check_next_frontend().unwrap();
}

fn a_closed_channel_is_reported_while_a_ring_runs(engine: &str) {
    const WARNING: &str = "queues that wait for translations stay blocked";
    let served = Served::start(engine, &[]).unwrap();
    let (mut stopped, iommu) = machine(&served, &Shape::default());
    stopped.frontend.stop(&mut stopped.queues[0]).unwrap();
    drop(iommu);
    // The daemon would warn within this time if the ring ran.
    std::thread::sleep(Duration::from_millis(1500));
    drop(stopped);
    let (running, iommu) = machine(&served, &Shape::default());
    assert_eq!(served.daemon.log().grep(WARNING), Vec::<String>::new());
    drop(iommu);
    let warned = |line: &str| line.contains(WARNING).then_some(());
    served.daemon.log().wait_for(WARNING, Duration::from_secs(30), warned).unwrap();
    drop(running);
    served.check_next_frontend().unwrap();
}

fn memory_may_change_under_translations(engine: &str) {
    let served = Served::start(engine, &[]).unwrap();
    let (mut machine, mut iommu) = machine(&served, &Shape::default());
    write_and_verify(&mut machine, &mut iommu, 12);
    let known = iommu.misses;
    let more = Ram::new(RAM_BASE + (1 << 30), 64 << 10).unwrap();
    machine.frontend.add(&more).unwrap();
    write_and_verify(&mut machine, &mut iommu, 13);
    assert_eq!(iommu.misses, known, "the device asked for a known translation");
    // Puts data into the new memory, then removes that memory.
    let data = machine.request_memory[0].data().0 + DISTANCE;
    machine.frontend.order(&update(data, PAGE, more.region().user_addr, RW)).unwrap();
    let write = Request::write(8, &pattern(14, 4096));
    assert_eq!(perform(&mut machine, &mut iommu, &write, Layout::Usual).0, blk::S_OK);
    machine.frontend.remove(more.region()).unwrap();
    assert_eq!(perform(&mut machine, &mut iommu, &write, Layout::Usual).0, blk::S_IOERR);
    machine.frontend.order(&invalidate(data, PAGE)).unwrap();
    write_and_verify(&mut machine, &mut iommu, 15);
    drop((machine, iommu));
    served.check_next_frontend().unwrap();
}
