//! One of the loads of a card that the command line asks for.

use std::path::Path;
use std::time::Duration;

use kickless_driver::{CardOptions, Choice};
use serde::Serialize;

use super::options::{Direction, NetLoadOptions};
use super::packet::Work;
use crate::common_options::BackEnds;
use crate::description::{Description, FRAMES};
use crate::pace;
use crate::wait::Wait;

/// One load of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Scenario {
    pub(crate) direction: Direction,
    /// The number of frames that each thread keeps in flight.
    pub(crate) depth: u16,
    /// The bytes of a frame.
    pub(crate) frame_size: u32,
    /// The work that frames leave to the card, if they are packets of TCP.
    pub(crate) work: Option<Work>,
    /// All bytes of each frame are written and read.
    pub(crate) touch: bool,
    pub(crate) wait: Wait,
    /// The largest number of frames of one call.
    pub(crate) batch: u16,
    pub(crate) pairs: u16,
    /// Frames a second of all threads. `None` means as many as come back.
    pub(crate) rate: Option<u32>,
    /// The measured seconds.
    #[serde(serialize_with = "pace::as_seconds")]
    pub(crate) time: Duration,
    /// The seconds of load before the measurement.
    #[serde(serialize_with = "pace::as_seconds")]
    pub(crate) warm_up: Duration,
}

/// Returns every load that the command line asks for.
pub(crate) fn scenarios(bench: &BackEnds<'_, NetLoadOptions>) -> Vec<Scenario> {
    let load = bench.load();
    let rates = load.common.rates();
    let mut all = Vec::new();
    for &direction in &load.direction {
        for &frame_size in &load.frame_size {
            for &wait in &load.wait {
                for depth in load.common.depths() {
                    all.extend(rates.iter().map(|&rate| Scenario {
                        direction,
                        depth,
                        frame_size,
                        work: load.work(),
                        touch: load.touch,
                        wait,
                        batch: load.batch,
                        pairs: load.pairs,
                        rate,
                        time: bench.time(),
                        warm_up: load.common.warm_up,
                    }));
                }
            }
        }
    }
    all
}

impl Scenario {
    /// Returns the options for the connection of the driver.
    pub(crate) fn card_options(&self, socket: &Path, load: &NetLoadOptions) -> CardOptions {
        let needs = self.depth.checked_next_power_of_two().unwrap_or(32768).max(256);
        CardOptions {
            pairs: self.pairs,
            queue_size: load.common.queue_size.unwrap_or(needs),
            packed: load.common.rings.packed,
            event_idx: load.common.rings.event_idx,
            indirect: load.common.rings.indirect,
            in_order: load.common.rings.in_order,
            mergeable: load.mergeable,
            transmit_offloads: if self.work.is_some() { Choice::On } else { Choice::Auto },
            receive_offloads: match self.work {
                Some(_) => Choice::On,
                // Frames that are longer than the MTU come back only with these.
                None if self.frame_size > 1514 => Choice::Auto,
                None => Choice::Off,
            },
            huge_pages: load.common.rings.huge_pages,
            reconnect_limit: Duration::ZERO,
            waiting: self.wait.waiting(),
            ..CardOptions::new(socket)
        }
    }

    /// Describes the load for the results.
    pub(crate) fn describe(&self) -> Description {
        Description {
            parts: self.parts(),
            rate: self.rate,
            time: self.time,
            whole_time: self.warm_up + self.time,
            bytes: self.frame_size,
            units: FRAMES,
            silence: Some(self.silence()),
            json: serde_json::to_value(self).unwrap_or_default(),
        }
    }

    /// Returns the error if no frame was counted.
    fn silence(&self) -> &'static str {
        match self.direction {
            Direction::Echo => {
                "no frame came back: the card has to return frames, as one with --port=loop does"
            }
            Direction::Transmit => "the card took no frame",
            Direction::Receive | Direction::Forward => "the card delivered no frame",
            Direction::Pass => "no frame arrived at the second card",
        }
    }

    /// Returns the load in words, part by part.
    fn parts(&self) -> Vec<String> {
        let Self { depth, frame_size, pairs, .. } = self;
        let frames = match self.work {
            Some(Work::Segments(_)) => "packets with TSO",
            Some(Work::Checksum) => "packets without checksums",
            None => "frames",
        };
        let mut parts = vec![match self.direction {
            Direction::Echo => format!("echo of {frames} of {frame_size} B"),
            Direction::Transmit => format!("{frames} of {frame_size} B sent"),
            Direction::Pass => format!("{frames} of {frame_size} B sent to another card"),
            Direction::Receive => "frames received".into(),
            Direction::Forward => "frames received and sent back".into(),
        }];
        match (self.direction, self.rate) {
            (Direction::Receive | Direction::Forward, _) => parts.push(format!("{} a call", self.batch)),
            (_, Some(rate)) => {
                parts.extend([format!("{rate} a second"), format!("at most {depth} in flight")]);
            }
            (_, None) => parts.push(format!("{depth} in flight")),
        }
        parts.push(format!("{pairs} queue pair{}", if *pairs == 1 { "" } else { "s" }));
        parts.push(self.wait.word().into());
        parts.extend(self.touch.then(|| "all bytes touched".into()));
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

    #[test]
    fn each_combination_once() {
        let Bench::Net(net) =
            bench("net --socket-path=s --depth=1,32 --frame-size=64,1514 --wait=sleep,poll")
        else {
            panic!("not a card")
        };
        let all = scenarios(&BackEnds::One(&net));
        assert_eq!(all.len(), 8);
        let words = "echo of frames of 64 B, 1 in flight, 1 queue pair, sleeping";
        assert_eq!(all.first().unwrap().describe().words(), words);
        assert_eq!(all.first().unwrap().card_options("s".as_ref(), &net.load).queue_size, 256);
    }

    #[test]
    fn refuses_contradicting_options() {
        for (line, named) in [
            ("net --socket-path=s --rate=100 --direction=receive", "--rate"),
            ("compare-net a b --rate=100 --plot-rate=f.svg", "--plot-rate"),
            ("compare-net a b --depth=512 --queue-size=256", "--queue-size"),
            ("net --socket-path=s --gso-size=1448 --direction=forward --frame-size=65000", "--gso-size"),
            ("net --socket-path=s --gso-size=1448 --frame-size=60", "--frame-size"),
            ("net --socket-path=s --gso-size=1448 --frame-size=65550", "--frame-size"),
            ("net --socket-path=s --partial-checksum --frame-size=60", "--partial-checksum"),
            ("net --socket-path=s --partial-checksum --direction=receive", "--partial-checksum"),
            ("net --socket-path=s --touch --direction=forward", "--touch"),
        ] {
            assert!(bench(line).check().unwrap_err().contains(named), "{line}");
        }
        for line in [
            "compare-net a b --rate=100,200 --plot-rate=f.svg",
            "compare-net a b --gso-size=1448 --frame-size=62,65549 --direction=pass",
            "compare-net a b --partial-checksum --touch --frame-size=64,1514 --direction=pass",
        ] {
            bench(line).check().unwrap();
        }
    }
}
