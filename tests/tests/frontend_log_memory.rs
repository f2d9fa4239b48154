//! Changes memory while requests are in flight and logged. The log must mark the pages at their address
//! when the request completes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::collections::BTreeSet;
use std::fs::File;
use std::time::Instant;

use kickless_memory::Gpa;
use kickless_spec::blk;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::driver::Buffer;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request, UNANSWERED};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::log::{Bitmap, PAGE};
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_tests::frontend::served::IMAGE_SIZE;
use kickless_tests::guest::image_dir;
use kickless_tests::with_each_engine;
use kickless_vhost_user::{FrontendMessage as Message, MemoryRegion};

with_each_engine! {
    memory_may_move_under_a_read
    removing_memory_waits_for_a_read
}

/// Address of further memory, before and after its move.
const FIRST: u64 = RAM_BASE + (1 << 30);
const MOVED: u64 = RAM_BASE + (2 << 30);
const LEN: u64 = 64 << 10;
/// Offsets of a request's status and data in this memory.
const STATUS: u64 = PAGE;
const DATA: u64 = 4 * PAGE;

struct Slow {
    daemon: Daemon,
    machine: Machine,
    more: Ram,
    bitmap: Bitmap,
    _dir: tempfile::TempDir,
}

impl Slow {
    /// Starts a slow disk, a machine with further memory, and a log.
    fn start(engine: &str) -> Slow {
        let dir = image_dir().unwrap();
        let image = dir.path().join("disk.img");
        File::create_new(&image).unwrap().set_len(IMAGE_SIZE).unwrap();
        let daemon = Daemon::start(&DaemonConfig {
            engine: Some(engine.to_owned()),
            ..DaemonConfig::new(format!("fault:delay=300ms:{}", image.display()))
        });
        let daemon = daemon.unwrap();
        let mut machine = Machine::start(daemon.socket(), &Shape::LINUX).unwrap();
        let more = Ram::new(FIRST, LEN).unwrap();
        let bitmap = Bitmap::new((MOVED + LEN) / PAGE / 8).unwrap();
        machine.frontend.set_log(&bitmap).unwrap();
        machine.frontend.set_logging(true).unwrap();
        Slow { daemon, machine, more, bitmap, _dir: dir }
    }

    /// Sends SET_MEM_TABLE with the machine's memory and the further memory at `gpa`.
    fn share(&mut self, gpa: u64) {
        let (region, file) = self.more.region_and_file().unwrap();
        let more = MemoryRegion { guest_addr: gpa, ..region };
        let table = vec![self.machine.ram.region_and_file().unwrap(), (more, file)];
        self.machine.frontend.order(&Message::SetMemTable(table)).unwrap();
    }

    /// Submits a read into the further memory.
    fn submit(&mut self, data: u64) {
        let Machine { ram, queues, request_memory, .. } = &mut self.machine;
        let request = Request::read(0, 0);
        let mut buffers = request_memory[0].lay_out(ram, &request, Layout::Usual).unwrap();
        buffers.truncate(1);
        let into = |offset, len| Buffer { addr: Gpa(FIRST + offset), len, writable: true };
        buffers.extend([into(data, 4096), into(STATUS, 1)]);
        self.more.map().write(Gpa(FIRST + STATUS), &[UNANSWERED]).unwrap();
        queues[0].submit(ram, &buffers, None).unwrap();
        queues[0].flush();
        // The worker answers these requests between two looks at the kicked ring.
        for _ in 0..2 {
            self.machine.frontend.set_call(&self.machine.queues[0]).unwrap();
        }
    }

    fn status(&self) -> u8 {
        self.more.map().read_obj(Gpa(FIRST + STATUS)).unwrap()
    }

    fn end(mut self) {
        self.machine.stop().unwrap();
        drop(self.machine);
        assert_eq!(self.daemon.stop().unwrap().0.code(), Some(0));
    }
}

/// Returns the pages that the read writes if the memory is at `gpa`.
fn pages(gpa: u64, data: u64) -> BTreeSet<u64> {
    let last = data + 4095;
    [STATUS, data, last].into_iter().map(|offset| (gpa + offset) / PAGE).collect()
}

/// Offsets of whole blocks, which the kernel writes, and of parts, which we copy.
const PLACES: [u64; 2] = [DATA, DATA + 7];

fn memory_may_move_under_a_read(engine: &str) {
    let mut slow = Slow::start(engine);
    for data in PLACES {
        let deadline = Instant::now() + LIMIT;
        loop {
            slow.share(FIRST);
            slow.bitmap.harvest();
            let taken = slow.machine.queues[0].used_idx();
            slow.submit(data);
            slow.share(MOVED);
            let in_flight = slow.machine.queues[0].used_idx() == taken;
            slow.machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            // When the ring has stopped, all pages of requests in flight are marked.
            slow.machine.stop().unwrap();
            let marked = slow.bitmap.harvest();
            slow.machine.resume().unwrap();
            if in_flight && slow.status() == blk::S_OK {
                assert_eq!(marked, pages(MOVED, data));
                break;
            }
            assert!(Instant::now() < deadline, "no read was in flight when memory moved");
        }
    }
    slow.end();
}

/// Checks that the device has ended its writes to removed memory, and marked them, before the removal's
/// reply.
fn removing_memory_waits_for_a_read(engine: &str) {
    let mut slow = Slow::start(engine);
    for data in PLACES {
        let deadline = Instant::now() + LIMIT;
        loop {
            slow.share(FIRST);
            slow.bitmap.harvest();
            slow.submit(data);
            slow.machine.frontend.remove(slow.more.region()).unwrap();
            let marked = slow.bitmap.harvest();
            let status = slow.status();
            slow.machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
            if status == blk::S_OK {
                assert_eq!(marked, pages(FIRST, data));
                break;
            }
            assert!(Instant::now() < deadline, "no read was in flight when memory was removed");
        }
    }
    slow.end();
}
