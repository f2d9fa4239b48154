//! A front-end's log while its memory changes under requests in flight: what they write is marked where it lies when they are done.

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
    memory_that_moves_under_a_read
    memory_that_is_removed_under_a_read
}

/// Where memory beside the machine's own is, and where it goes.
const FIRST: u64 = RAM_BASE + (1 << 30);
const MOVED: u64 = RAM_BASE + (2 << 30);
const LEN: u64 = 64 << 10;
/// Where in it a request has its status and its data.
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
    /// A disk that takes its time, a machine with more memory, and a log.
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

    /// SET_MEM_TABLE: the machine's own memory, and the other one here.
    fn share(&mut self, gpa: u64) {
        let (region, file) = self.more.region_and_file().unwrap();
        let more = MemoryRegion { guest_addr: gpa, ..region };
        let table = vec![self.machine.ram.region_and_file().unwrap(), (more, file)];
        self.machine.frontend.order(&Message::SetMemTable(table)).unwrap();
    }

    /// Offers a read to this place in the other memory.
    fn submit(&mut self, data: u64) {
        let Machine { ram, queues, places, .. } = &mut self.machine;
        let request = Request::read(0, 0);
        let mut buffers = places[0].lay_out(ram, &request, Layout::Usual).unwrap();
        buffers.truncate(1);
        let into = |offset, len| Buffer { addr: Gpa(FIRST + offset), len, writable: true };
        buffers.extend([into(data, 4096), into(STATUS, 1)]);
        self.more.map().write(Gpa(FIRST + STATUS), &[UNANSWERED]).unwrap();
        queues[0].submit(ram, &buffers, None).unwrap();
        queues[0].flush();
        // What its worker is asked after the kick, it answers between two looks at what it was kicked for.
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

/// The pages that the read writes, when the memory lies at `gpa`.
fn pages(gpa: u64, data: u64) -> BTreeSet<u64> {
    let last = data + 4095;
    [STATUS, data, last].into_iter().map(|offset| (gpa + offset) / PAGE).collect()
}

/// Whole blocks, that the kernel writes; and what we copy.
const PLACES: [u64; 2] = [DATA, DATA + 7];

fn memory_that_moves_under_a_read(engine: &str) {
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
            // All that was in flight is marked when the ring has stopped.
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

/// When the removal is answered, nobody writes to the memory any more, and what was written is marked.
fn memory_that_is_removed_under_a_read(engine: &str) {
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
