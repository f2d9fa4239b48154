//! One of the loads that the command line asks for.

use std::time::Duration;

use kickless_driver::Options;
use serde::Serialize;

use super::common_options::BackEnds;
use super::description::{Description, REQUESTS};
use super::layout::bytes;
use super::options::LoadOptions;
use super::pace::OnOff;
use super::pattern::Pattern;
use super::wait::Wait;

/// One load of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Scenario {
    /// The number of requests that each thread keeps in flight.
    pub(crate) depth: u16,
    /// The bytes of a request.
    pub(crate) block_size: u32,
    /// The percentage of reads.
    pub(crate) read: u8,
    pub(crate) pattern: Pattern,
    pub(crate) wait: Wait,
    pub(crate) queues: u16,
    pub(crate) threads: u16,
    /// Requests a second of all threads. `None` means as many as complete.
    pub(crate) rate: Option<u32>,
    /// The periods with and without load. `None` means load all the time.
    pub(crate) on_off: Option<OnOff>,
    /// The measured seconds.
    #[serde(serialize_with = "super::pace::as_seconds")]
    pub(crate) time: Duration,
    /// The seconds of load before the measurement.
    #[serde(serialize_with = "super::pace::as_seconds")]
    pub(crate) warm_up: Duration,
    /// The bytes of the disk to use. `None` means all.
    pub(crate) range: Option<u64>,
    pub(crate) verify: bool,
    pub(crate) seed: u64,
}

/// Returns every load that the command line asks for.
pub(crate) fn scenarios(bench: &BackEnds<'_, LoadOptions>) -> Vec<Scenario> {
    let load = bench.load();
    let rates = load.common.rates();
    let mut all = Vec::new();
    for &pattern in &load.pattern {
        for &read in &load.read {
            for &block_size in &load.block_size {
                for &wait in &load.wait {
                    for depth in load.common.depths() {
                        all.extend(rates.iter().map(|&rate| Scenario {
                            depth,
                            block_size,
                            read,
                            pattern,
                            wait,
                            queues: load.queues,
                            threads: load.threads.unwrap_or(load.queues),
                            rate,
                            on_off: load.on_off,
                            time: bench.time(),
                            warm_up: load.common.warm_up,
                            range: load.range,
                            verify: load.verify,
                            seed: load.seed,
                        }));
                    }
                }
            }
        }
    }
    all
}

impl Scenario {
    /// Returns the largest number of requests in flight at one queue.
    pub(crate) fn in_flight(&self) -> usize {
        usize::from(self.depth) * usize::from(self.threads.div_ceil(self.queues))
    }

    /// Returns the options for the connection of the driver.
    ///
    /// # Errors
    /// The depth does not fit into a queue.
    pub(crate) fn driver_options(
        &self,
        socket: &std::path::Path,
        load: &LoadOptions,
    ) -> Result<Options, String> {
        let needs = self.in_flight().next_power_of_two().max(256);
        let size = match load.common.queue_size {
            Some(size) if usize::from(size) < self.in_flight() => {
                return Err(format!(
                    "--queue-size={size} is less than the {} requests that a queue has in flight",
                    self.in_flight()
                ));
            }
            Some(size) => size,
            None => u16::try_from(needs).ok().filter(|size| *size <= 32768).ok_or_else(|| {
                format!(
                    "{} requests in flight do not fit into a queue: lower --depth or --threads",
                    self.in_flight()
                )
            })?,
        };
        // Room for the blocks, and for the bytes that the pool wastes when it rounds sizes up.
        let in_all = u64::from(self.depth) * u64::from(self.threads);
        let memory = in_all * (u64::from(self.block_size).next_power_of_two() + 4096) + (4 << 20);
        Ok(Options {
            queues: self.queues,
            queue_size: size,
            packed: load.common.rings.packed,
            event_idx: load.common.rings.event_idx,
            indirect: load.common.rings.indirect,
            in_order: load.common.rings.in_order,
            huge_pages: load.common.rings.huge_pages,
            buffer_memory: memory,
            reconnect_limit: Duration::ZERO,
            waiting: self.wait.waiting(),
            reactor: false,
            ..Options::new(socket)
        })
    }

    /// Describes the load for the results.
    pub(crate) fn describe(&self) -> Description {
        Description {
            parts: self.parts(),
            rate: self.rate,
            time: self.time,
            whole_time: self.warm_up + self.time,
            bytes: self.block_size,
            units: REQUESTS,
            silence: None,
            json: serde_json::to_value(self).unwrap_or_default(),
        }
    }

    /// Describes the mix of reads and writes.
    pub(crate) fn mix(&self) -> String {
        match self.read {
            100 => "reads".into(),
            0 => "writes".into(),
            read => format!("{read} % reads"),
        }
    }

    /// Returns the load in words, part by part.
    fn parts(&self) -> Vec<String> {
        let plural = |count: u16| if count == 1 { "" } else { "s" };
        let mut parts =
            vec![format!("{} {} of {}", self.pattern.name(), self.mix(), bytes(self.block_size.into()))];
        let threads = match self.threads {
            1 => String::new(),
            threads => format!(" each of {threads} threads"),
        };
        match self.rate {
            Some(rate) => {
                parts.extend([
                    format!("{rate} a second"),
                    format!("at most {} in flight{threads}", self.depth),
                ]);
            }
            None => parts.push(format!("{} in flight{threads}", self.depth)),
        }
        parts.push(format!("{} queue{}", self.queues, plural(self.queues)));
        parts.push(self.wait.word().into());
        parts.extend(self.on_off.map(|OnOff { on, off }| format!("{on:?} on and {off:?} off")));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Bench;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        bench: Bench,
    }

    fn bench(line: &str) -> Bench {
        Line::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).unwrap().bench
    }

    fn asked(bench: &Bench) -> BackEnds<'_, LoadOptions> {
        match bench {
            Bench::Blk(blk) => BackEnds::One(blk),
            Bench::Compare(compare) => BackEnds::Several(compare),
            _ => panic!("no load of disks"),
        }
    }

    #[test]
    fn each_combination_once() {
        let line =
            bench("blk --socket-path=s --depth=1,32 --block-size=4K,64K --wait=sleep,poll --read=0,50,100");
        let all = scenarios(&asked(&line));
        assert_eq!(all.len(), 24);
        assert!(all.iter().enumerate().all(|(at, one)| !all.get(..at).unwrap().contains(one)));
        assert_eq!(
            all.first().unwrap().describe().words(),
            "random writes of 4 KiB, 1 in flight, 1 queue, sleeping"
        );
        let line = bench("blk --socket-path=s --rate=100,2000 --on-off=100ms,900ms");
        let words: Vec<String> = scenarios(&asked(&line)).iter().map(|one| one.describe().words()).collect();
        assert_eq!(
            words,
            [100, 2000].map(|rate| format!(
                "random reads of 4 KiB, {rate} a second, at most 256 in flight, 1 queue, sleeping, 100ms on and 900ms off"
            ))
        );
    }

    #[test]
    fn a_queue_holds_what_its_threads_have_in_flight() {
        let line = bench("blk --socket-path=s --depth=100 --threads=5 --queues=2");
        let scenario = scenarios(&asked(&line)).remove(0);
        assert_eq!(scenario.in_flight(), 300);
        assert_eq!(scenario.driver_options("s".as_ref(), asked(&line).load()).unwrap().queue_size, 512);
        let line = bench("blk --socket-path=s --depth=100 --queue-size=64");
        let scenario = scenarios(&asked(&line)).remove(0);
        assert!(
            scenario
                .driver_options("s".as_ref(), asked(&line).load())
                .unwrap_err()
                .contains("--queue-size=64")
        );
        let line = bench("blk --socket-path=s --depth=32768 --threads=2");
        assert!(
            scenarios(&asked(&line)).remove(0).driver_options("s".as_ref(), asked(&line).load()).is_err()
        );
    }

    #[test]
    fn refuses_contradicting_options() {
        for (line, named) in [
            ("blk --socket-path=s --read=100,0", "--destroy"),
            ("blk --socket-path=s --read=99", "--destroy"),
            ("compare a b --read=50 --verify", "--destroy"),
            ("blk --socket-path=s --queues=4 --threads=2", "--threads"),
            ("blk --socket-path=s --threads=2 --rate=100", "--rate"),
            ("blk --socket-path=s --verify", "--verify"),
            ("compare a b --threads=2 --in-order=on", "--in-order"),
            ("compare a b --rate=100 --plot-rate=f.svg", "--plot-rate"),
        ] {
            assert!(bench(line).check().unwrap_err().contains(named), "{line}");
        }
        bench("compare a b --queues=2 --rate=100 --verify --read=50 --destroy").check().unwrap();
        // By default it only reads.
        bench("blk --socket-path=s").check().unwrap();
        bench("compare a b --depth=1,32 --pattern=sequential,random --rate=100").check().unwrap();
    }
}
