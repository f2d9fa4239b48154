//! States as old processes write them, at random.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, reason = "a test may")]

use kickless_handover::v1::*;
use kickless_handover::{Amounts, Fd, Giving, Part, Record};
use kickless_testing::Random;
use serde_json::json;
use std::fs::File;
use std::os::fd::OwnedFd;

/// Returns this number of descriptors.
pub(crate) fn descriptors(count: usize) -> Vec<OwnedFd> {
    let null = File::open("/dev/null").unwrap();
    (0..count).map(|_| null.try_clone().unwrap().into()).collect()
}

/// Makes the parts of one record.
pub(crate) struct Maker {
    random: Random,
    giving: Giving,
    null: File,
}

impl Maker {
    pub(crate) fn new(seed: u64) -> Self {
        Self { random: Random(seed), giving: Giving::default(), null: File::open("/dev/null").unwrap() }
    }

    fn fd(&mut self) -> Fd {
        self.giving.fd(&self.null).unwrap()
    }

    pub(crate) fn fds(&mut self, count: usize) -> Vec<Fd> {
        (0..count).map(|_| self.fd()).collect()
    }

    fn bool(&mut self) -> bool {
        self.random.one_in(2)
    }

    fn maybe<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.bool() { Some(make(self)) } else { None }
    }

    fn some<T>(&mut self, most: u64, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.random.below(most + 1)).map(|_| make(self)).collect()
    }

    fn u16(&mut self) -> u16 {
        self.random.next() as u16
    }

    fn u32(&mut self) -> u32 {
        self.random.next() as u32
    }

    fn u64(&mut self) -> u64 {
        // Small numbers, and all bits.
        let bits = self.random.below(64);
        self.random.next() >> bits
    }

    fn text(&mut self) -> String {
        let texts = ["", "a", "/srv/\u{e4}\"\\.img", "it cannot be opened:\nno such file"];
        texts[self.random.below(4) as usize].into()
    }

    fn amounts(&mut self) -> Amounts {
        let names = ["requests", "errors", "kicks"];
        let number = |maker: &mut Self| maker.u64();
        names.into_iter().filter_map(|name| Some((name.to_owned(), self.maybe(number)?))).collect()
    }

    fn span(&mut self) -> kickless_handover::Span {
        let len = self.random.below(40);
        let bytes = self.random.bytes(len);
        self.giving.bytes(&bytes).unwrap()
    }

    fn config(&mut self) -> Config {
        let config = json!({
            "kind": "blk", "name": self.text(), "num-queues": self.u16(), "read-only": self.bool(),
        });
        config.as_object().unwrap().clone()
    }

    fn listener(&mut self) -> Listener {
        let name =
            |maker: &mut Self| SocketName { path: maker.text(), device: maker.u64(), inode: maker.u64() };
        Listener { socket: self.fd(), name: self.maybe(name) }
    }

    pub(crate) fn plan(&mut self) -> Plan {
        let device = |maker: &mut Self| Planned {
            config: maker.config(),
            is_inherited: maker.bool(),
            phase: match maker.random.below(3) {
                0 => Phase::Served,
                1 => Phase::Unavailable { error: maker.text() },
                _ => Phase::Ended { error: maker.maybe(Self::text) },
            },
        };
        Plan {
            version: self.text(),
            devices: self.some(5, device),
            of_file: self.some(3, Self::config),
            control: self.some(2, Self::listener),
            passed: self.some(2, |maker| Passed { name: maker.text(), listener: maker.listener() }),
            log_filter: self.maybe(Self::text),
            watchdog_us: self.maybe(Self::u64),
            counters: self.amounts(),
        }
    }

    fn half_message(&mut self) -> HalfMessage {
        HalfMessage { bytes: self.span(), descriptors: self.some(8, Self::fd) }
    }

    fn size(&mut self, is_packed: bool) -> u16 {
        if is_packed { self.random.from(1..32769) as u16 } else { 1 << self.random.below(16) }
    }

    fn ring(&mut self, index: u16) -> Ring {
        let is_packed = self.bool();
        let addresses = |maker: &mut Self| Addresses {
            desc: maker.u64(),
            avail: maker.u64(),
            used: maker.u64(),
            log: maker.maybe(Self::u64),
        };
        let loaded = |maker: &mut Self| {
            let is_packed = maker.bool();
            Shape { size: maker.size(is_packed), is_packed }
        };
        Ring {
            index,
            size: self.maybe(|maker| maker.size(is_packed)),
            addresses: self.maybe(addresses),
            loaded: if self.random.one_in(8) { Some(loaded(self)) } else { None },
            is_started: self.bool(),
            is_enabled: self.bool(),
            runs_with: self.maybe(|maker| u64::from(is_packed) << 34 | maker.u64() & !(1 << 34)),
            kick: self.maybe(Self::fd),
            call: self.maybe(Self::fd),
            err: self.maybe(Self::fd),
        }
    }

    fn inflight(&mut self) -> Inflight {
        Inflight {
            file: self.fd(),
            offset: self.u64() >> 1,
            len: 9,
            queues: self.u16(),
            queue_size: self.u16(),
        }
    }

    fn session(&mut self) -> Session {
        let files: Vec<Fd> = self.some(3, Self::fd);
        // A file has a region or two.
        let of_regions =
            (0..files.len()).flat_map(|file| [file, file]).step_by(1 + self.random.below(2) as usize);
        let regions: Vec<_> = of_regions
            .map(|file| Region {
                gpa: self.u64() >> 1,
                user: self.u64() >> 1,
                len: self.u32().max(1).into(),
                file: file as u16,
                offset: self.u64() >> 1,
            })
            .collect();
        let (mut index, count) = (0, self.random.below(5));
        let rings = (0..count).map(|_| {
            index += self.random.from(1..4) as u16;
            self.ring(index - 1)
        });
        Session {
            rings: rings.collect(),
            connection: self.fd(),
            half_message: self.maybe(Self::half_message),
            features: self.u64(),
            features_set: self.bool(),
            protocol_features: self.u64(),
            files,
            regions,
            log: self.maybe(|maker| Log { file: maker.fd(), offset: maker.u64() >> 1, len: 9 }),
            logs: self.bool(),
            logged: self.maybe(Self::fd),
            inflight: self.maybe(Self::inflight),
            own_inflight: self.maybe(Self::inflight),
            backend_channel: self.maybe(|maker| BackendChannel {
                socket: maker.fd(),
                half_reply: maker.maybe(Self::half_message),
            }),
        }
    }

    fn image(&mut self) -> Image {
        Image {
            file: self.fd(),
            witness: self.maybe(Self::fd),
            device: self.u64(),
            inode: self.u64(),
            alignment: self.maybe(|maker| (1 << maker.random.below(17), 512 << maker.random.below(8))),
            size: self.u64(),
            punches_holes: self.bool(),
        }
    }

    pub(crate) fn disk(&mut self) -> Disk {
        let medium = match self.random.below(4) {
            0 => Medium::Anew,
            1 => Medium::Memory { file: self.fd(), len: self.u64().max(1) },
            2 => Medium::Nbd(Nbd {
                socket: self.maybe(Self::fd),
                size: self.u64(),
                flags: self.u16(),
                block_sizes: (self.u32(), self.u32(), self.u32()),
                is_structured: self.bool(),
            }),
            _ => Medium::Images((0..=self.random.below(3)).map(|_| self.image()).collect()),
        };
        Disk { config_space: self.span(), medium }
    }

    fn tap(&mut self) -> Tap {
        Tap {
            name: self.text(),
            queues: (0..=self.random.below(4)).map(|_| self.fd()).collect(),
            detaches: self.bool(),
            segments_udp: self.bool(),
        }
    }

    pub(crate) fn card(&mut self) -> Card {
        let port = match self.random.below(3) {
            0 => Part::default(),
            1 => Part::new(&self.tap()).unwrap(),
            _ => Part::new(&Stream { socket: self.maybe(Self::fd), errors: self.maybe(Self::fd) }).unwrap(),
        };
        let capture = |maker: &mut Self| Capture {
            file: maker.fd(),
            statistics_at: 60,
            end: maker.u64().max(60),
            counts: maker.amounts(),
        };
        Card { mtu: self.u16(), capture: self.maybe(capture), port }
    }

    pub(crate) fn device(&mut self) -> Device {
        let own = if self.bool() { Part::new(&self.disk()) } else { Part::new(&self.card()) };
        Device { listener: self.maybe(Self::listener), session: self.maybe(Self::session), own: own.unwrap() }
    }

    pub(crate) fn disk_final(&mut self) -> DiskFinal {
        let nbd = |maker: &mut Self| NbdFinal {
            is_dirty: maker.bool(),
            losses: maker.u64() >> 16,
            at_driver_start: maker.u64() >> 16,
            reported: maker.some(3, |maker| maker.maybe(|maker| maker.u64() >> 16)),
        };
        DiskFinal {
            is_taken: self.bool(),
            is_new_guest: self.bool(),
            writeback: self.bool(),
            driver_known: self.bool(),
            fresh_driver: self.bool(),
            has_lost_writes: self.bool(),
            is_paused: self.bool(),
            stops: self.u64(),
            images: self.some(2, |maker| ImageFinal { lost_writes: maker.random.below(134) as i32 }),
            nbd: self.maybe(nbd),
            operations: self.amounts(),
        }
    }

    pub(crate) fn card_final(&mut self) -> CardFinal {
        let tap = |maker: &mut Self| TapFinal { attached: maker.some(4, Self::bool), offloads: maker.u32() };
        let stream = |maker: &mut Self| StreamFinal {
            is_connected: maker.bool(),
            received: maker.span(),
            unsent: maker.span(),
        };
        let port = match self.random.below(4) {
            0 => Part::default(),
            1 => Part::new(&tap(self)).unwrap(),
            2 => Part::new(&UplinkFinal { tap: tap(self), counters: self.amounts() }).unwrap(),
            _ => Part::new(&stream(self)).unwrap(),
        };
        CardFinal {
            settings: self.span(),
            settings_are_known: self.bool(),
            has_control_ring: self.bool(),
            is_open: self.bool(),
            features: self.u64(),
            announces_in_ns: self.u64(),
            rings: self.some(3, Self::amounts),
            counters: self.amounts(),
            capture_dropped: self.u64(),
            port,
        }
    }

    fn ring_final(&mut self, ring: &Ring) -> RingFinal {
        let runs = ring.size.zip(ring.runs_with);
        let shape = ring.loaded.or(runs.map(|(size, bits)| Shape { size, is_packed: bits & 1 << 34 != 0 }));
        let place = |maker: &mut Self| match shape {
            Some(Shape { size, is_packed: true }) => {
                maker.random.below(size.into()) as u16 | u16::from(maker.bool()) << 15
            }
            _ => maker.u16(),
        };
        let completion = |maker: &mut Self, shape: Shape| Completion {
            id: maker.random.below(shape.size.into()) as u16,
            len: maker.u32(),
            descriptors: shape.is_packed.into(),
        };
        let most = shape.map_or(0, |shape| u64::from(shape.size).min(3));
        let unpublished = self.some(most, |maker| shape.map(|shape| completion(maker, shape)));
        RingFinal {
            index: ring.index,
            next_avail: self.maybe(place),
            stopped_at: self.maybe(Self::u16),
            unpublished: unpublished.into_iter().flatten().collect(),
            is_broken: self.bool(),
            had_work: self.bool(),
            has_left: self.bool(),
        }
    }

    pub(crate) fn final_of(&mut self, device: &Device) -> Final {
        let session = |maker: &mut Self| {
            let miss = |maker: &mut Self| Miss {
                page: maker.u64(),
                access: [Access::Read, Access::Write, Access::ReadWrite][maker.random.below(3) as usize],
            };
            let awaiting = maker.some(3, miss);
            SessionFinal {
                replies: maker.random.below(awaiting.len() as u64 + 1) as u32,
                awaiting,
                config_changed: maker.bool(),
                was_running: maker.bool(),
                driver_known: maker.bool(),
                expects_new_driver: maker.bool(),
                is_open: maker.bool(),
                has_closed: maker.bool(),
                transferred: maker.maybe(Self::bool),
            }
        };
        let rings = device
            .session
            .as_ref()
            .map(|session| session.rings.iter().map(|ring| self.ring_final(ring)).collect());
        let own = if self.bool() { Part::new(&self.disk_final()) } else { Part::new(&self.card_final()) };
        Final {
            rings: rings.unwrap_or_default(),
            session: device.session.as_ref().map(|_| session(self)),
            stops: self.some(3, |maker| maker.maybe(Self::u16)),
            is_last_session: self.bool(),
            tokens: self.amounts(),
            is_drained: self.bool(),
            queue_counters: self.some(3, Self::amounts),
            counters: self.amounts(),
            parked_ns: self.u64(),
            own: own.unwrap(),
        }
    }

    pub(crate) fn record(self, state: &impl kickless_handover::Checked) -> Record {
        self.giving.record(state).unwrap()
    }
}
