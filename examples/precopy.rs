//! Moves guest memory to another process while threads write to it: live migration by pre-copy, without a
//! guest.
//!
//!     cargo run --release -p kickless-dirty-log --example precopy -- \
//!         [--mib=1024] [--writers=2] [--method=marks|protect]
//!
//! This process has the memory and the writers. It starts a second process and sends it all of the memory.
//! Then it sends, round by round, the pages that the dirty log reports as written. When few pages are left,
//! it stops the writers, takes the last harvest and sends the rest. Both sides then print the checksum of
//! their memory.

use kickless_dirty_log::{Harvester, Method, Mmu, Pages, Writer};
use kickless_memory::{Gpa, Iova, Map, Slot, UserAddr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write, stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, thread};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const PAGE: u64 = 4096;
/// Largest number of bytes of one send.
const CHUNK: u64 = 256 << 10;
/// Bytes of a message's head: the address and the length of the data, 8 bytes each.
const HEAD: usize = 16;
/// Time within which the rest must be sent after the writers have stopped.
const DOWNTIME_MAX: Duration = Duration::from_millis(20);
/// Number of rounds after which the writers stop in any case.
const ROUNDS_MAX: u32 = 30;

fn main() -> Result<()> {
    let argument = |name: &str| env::args().find_map(|word| word.strip_prefix(name).map(str::to_owned));
    let len = argument("--mib=").map_or(Ok(1024), |mib| mib.parse::<u64>())? << 20;
    if len == 0 {
        return Err("no memory".into());
    }
    if env::args().any(|word| word == "--destination") {
        return destination(len);
    }
    let writers = argument("--writers=").map_or(Ok(2), |writers| writers.parse())?;
    let method = match argument("--method=").as_deref() {
        None | Some("marks") => Method::Marks,
        Some("protect") => Method::Protect,
        Some(other) => return Err(format!("{other}: marks or protect").into()),
    };
    source(len, writers, method)
}

fn memory(len: u64) -> Result<Slot> {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, len)?;
    Ok(Slot::map(&file, 0, Gpa(0), UserAddr(0), len)?)
}

/// Hashes words by FNV-1a.
fn checksum(map: &Map, len: u64) -> Result<u64> {
    let mut chunk = vec![0; CHUNK as usize];
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    for at in (0..len).step_by(chunk.len()) {
        map.read(Gpa(at), &mut chunk)?;
        for word in chunk.as_chunks().0 {
            sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x100_0000_01b3);
        }
    }
    Ok(sum)
}

/// Writes until `stop` is set: most often to a few pages, which change slowly, and at times to any page.
fn keep_writing(
    mut writer: Writer,
    seed: u64,
    len: u64,
    stop: &AtomicBool,
    written: &AtomicU64,
) -> Result<()> {
    let (pages, mut random) = (len / PAGE, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let hot = (pages / 128).max(1);
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..64 {
            number += 1;
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = match random >> 60 {
                0 => (random >> 20) % pages,
                _ => (seed * pages / 4 + number / 4096 + (random >> 20) % hot) % pages,
            };
            writer.write_obj(Iova(page * PAGE + random % 512 * 8), &number)?;
        }
        written.fetch_add(64, Ordering::Relaxed);
        writer.quiesce();
        // No thread waits for a sleeping writer.
        let _asleep = writer.offline();
        thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

fn source(len: u64, writers: u64, method: Method) -> Result<()> {
    let slot = memory(len)?;
    let map = Map::new(vec![slot.clone()])?;
    let fill: Vec<u8> = (0..CHUNK).map(|at| (at % 251) as u8).collect();
    (0..len).step_by(fill.len()).try_for_each(|at| map.write(Gpa(at), &fill))?;
    let mmu = Mmu::new();
    mmu.add(slot)?;

    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let (stop, written) = (&stop, &written);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..writers)
            .map(|seed| (seed, Writer::direct(&mmu)))
            .map(|(seed, writer)| scope.spawn(move || keep_writing(writer, seed, len, stop, written)))
            .collect();
        let moved = migrate(&mmu, &map, len, method, || {
            stop.store(true, Ordering::Relaxed);
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a writer failed")?)
        });
        // Stops the writers in any case.
        stop.store(true, Ordering::Relaxed);
        moved
    })?;
    println!("{} writes were made meanwhile", written.load(Ordering::Relaxed));
    Ok(())
}

/// The other process, and the socket to it.
struct Destination {
    socket: UnixStream,
    answers: BufReader<UnixStream>,
    message: Vec<u8>,
}

impl Destination {
    fn send(&mut self, map: &Map, gpa: Gpa, len: u64) -> Result<()> {
        for at in (gpa.0..gpa.0 + len).step_by(CHUNK as usize) {
            let here = (gpa.0 + len - at).min(CHUNK);
            let message = &mut self.message[..HEAD + here as usize];
            message[..8].copy_from_slice(&at.to_le_bytes());
            message[8..HEAD].copy_from_slice(&here.to_le_bytes());
            map.read(Gpa(at), &mut message[HEAD..])?;
            self.socket.write_all(message)?;
        }
        Ok(())
    }

    fn send_pages(&mut self, map: &Map, pages: &Pages) -> Result<()> {
        pages.ranges().try_for_each(|(gpa, len)| self.send(map, gpa, len))
    }

    fn send_end(&mut self) -> Result<()> {
        Ok(self.socket.write_all(&[0; HEAD])?)
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

fn migrate(
    mmu: &Arc<Mmu>,
    map: &Map,
    len: u64,
    method: Method,
    stop_writers: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new(env::current_exe()?)
        .args(["--destination", &format!("--mib={}", len >> 20)])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let answers = BufReader::new(ours.try_clone()?);
    let mut destination = Destination { socket: ours, answers, message: vec![0; HEAD + CHUNK as usize] };

    // Each write from here on is in a harvest. Earlier writes are in the first round, which is all of the
    // memory.
    let mut log = Harvester::enable(mmu, Gpa(0), method)?;
    let mut pages = Pages::default();
    let mut left = len;
    println!("round      MiB      ms    MiB/s   harvest ms (and wait)   MiB written meanwhile");
    for round in 1..=ROUNDS_MAX {
        let begun = Instant::now();
        if round == 1 {
            destination.send(map, Gpa(0), len)?;
        } else {
            destination.send_pages(map, &pages)?;
        }
        let spent = begun.elapsed();
        let rate = left as f64 / spent.as_secs_f64();
        let took = log.harvest(.., &mut pages);
        let next = pages.count() * PAGE;
        println!(
            "{round:>5} {:>8.1} {:>7.1} {:>8.0} {:>12.2} ({:.2}) {:>20.1}",
            mib(left),
            spent.as_secs_f64() * 1e3,
            mib(rate as u64),
            (took.walk + took.wait).as_secs_f64() * 1e3,
            took.wait.as_secs_f64() * 1e3,
            mib(next),
        );
        left = next;
        if left as f64 / rate <= DOWNTIME_MAX.as_secs_f64() {
            break;
        }
    }

    let stopped = Instant::now();
    stop_writers()?;
    // The rest of the last round, and the pages that were written since.
    destination.send_pages(map, &pages)?;
    log.harvest_last(.., &mut pages);
    destination.send_pages(map, &pages)?;
    destination.send_end()?;
    if destination.answer()? != "complete" {
        return Err("the destination failed".into());
    }
    println!("last  {:>8.1}   downtime {:.1} ms", mib(left), stopped.elapsed().as_secs_f64() * 1e3);
    log.disable();

    let (here, there) = (format!("{:016x}", checksum(map, len)?), destination.answer()?);
    println!("checksums: {here} here, {there} there");
    if !child.wait()?.success() || here != there {
        return Err("the copy differs".into());
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Runs the second process: receives memory on its standard input, a socket, and answers there.
fn destination(len: u64) -> Result<()> {
    let map = Map::new(vec![memory(len)?])?;
    let mut socket = UnixStream::from(stdin().as_fd().try_clone_to_owned()?);
    let mut input = BufReader::with_capacity(CHUNK as usize, socket.try_clone()?);
    let mut chunk = vec![0; CHUNK as usize];
    let mut word = [0; 8];
    loop {
        input.read_exact(&mut word)?;
        let gpa = Gpa(u64::from_le_bytes(word));
        input.read_exact(&mut word)?;
        let bytes = chunk.get_mut(..u64::from_le_bytes(word) as usize).ok_or("more than a chunk")?;
        if bytes.is_empty() {
            break;
        }
        input.read_exact(bytes)?;
        map.write(gpa, bytes)?;
    }
    writeln!(socket, "complete")?;
    writeln!(socket, "{:016x}", checksum(&map, len)?)?;
    Ok(())
}
