//! Interleaves the actions of a driver, a timer and a worker on a receive ring. Frames arrive whole, in
//! order, and as soon as they fit.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

mod rig;

use kickless_device::{Device, Interest, Next, Update};
use kickless_net::{Net, NullPort};
use kickless_spec::features::Features;
use kickless_spec::net::NetFeatures;
use kickless_testing::{GuestRing, parse_test_frame};
use proptest::prelude::*;
use rig::{Guest, Kind, Rig, card, counter};
use std::sync::Arc;

const HEADER: u64 = 12;

#[derive(Clone, Debug)]
enum Step {
    /// The driver makes this many chains available, as far as the ring has room.
    Offer(usize),
    /// The timer expires.
    Expire,
    /// The worker polls with this budget, with or without the far side due.
    Poll(u32, bool),
    ReturnCredit,
    Memory,
    Addresses,
    /// The ring stops, and another task continues.
    Restart,
    /// The process is killed, and another continues. Only with an in-flight buffer.
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..40usize).prop_map(Step::Offer),
        3 => Just(Step::Expire),
        6 => (1..30u32, any::<bool>()).prop_map(|(budget, far_side)| Step::Poll(budget, far_side)),
        1 => Just(Step::ReturnCredit),
        1 => Just(Step::Memory),
        1 => Just(Step::Addresses),
        1 => Just(Step::Restart),
        1 => Just(Step::Kill),
    ]
}

struct Run {
    rig: Rig,
    card: Arc<Net>,
    features: Features,
    port: NullPort,
    merges: bool,
    inflight: bool,
    lens: Vec<u32>,
    /// The number of the next frame.
    number: u64,
    /// The timer has expired since the task last read it.
    expired: bool,
    /// The task has read an expiration, and no frame has arrived since.
    due: bool,
}

impl Run {
    fn step(&mut self, step: Step) {
        match step {
            Step::Offer(chains) => {
                for _ in 0..chains {
                    self.rig.offer(&self.lens, true);
                }
            }
            Step::Expire => {
                self.rig.wait_readable();
                self.expired = true;
            }
            Step::Poll(budget, far_side) => self.poll(budget, far_side),
            Step::ReturnCredit => self.rig.task.return_credit(),
            Step::Memory => drop(self.rig.change_memory()),
            Step::Addresses => self.rig.apply(Update::Addresses(GuestRing::addresses())),
            Step::Restart => self.replace_task(|rig| rig.stop_task()),
            // The ring continues from the in-flight buffer and ignores this index.
            Step::Kill if self.inflight => self.replace_task(|rig| (0x1234, rig.kill())),
            Step::Kill => {}
        }
    }

    fn replace_task(&mut self, end: impl FnOnce(Rig) -> (u16, Guest)) {
        let placeholder = Rig::start(&self.card, 1, Kind::default(), 2, self.features);
        let offered = self.rig.with_device();
        let (next_avail, guest) = end(std::mem::replace(&mut self.rig, placeholder));
        let vring = guest.vring(0, next_avail, None);
        self.rig = Rig::start_on(&self.card, guest, vring, self.features);
        assert_eq!((self.rig.with_device(), self.rig.task.in_flight()), (offered, 0));
        (self.number, self.expired, self.due) = (0, false, false);
    }

    fn poll(&mut self, budget: u32, far_side: bool) {
        let polled = self.rig.poll_with(budget, far_side);
        if far_side {
            self.due |= std::mem::take(&mut self.expired);
        }
        let mut frames = 0;
        while let Some((header, frame)) = self.rig.receive(HEADER as usize) {
            assert_eq!(parse_test_frame(&frame), Some((0, self.number)));
            assert_eq!(frame.len() as u32, self.port.length(self.number));
            assert!(self.merges || header.num_buffers.get() == 1);
            (self.number, frames, self.due) = (self.number + 1, frames + 1, false);
        }
        assert_eq!(polled.served, frames);
        let interest = self.rig.interest();
        match polled.next {
            Next::More => assert!(polled.cost >= budget),
            Next::Quiet => assert_eq!((interest, self.due), (Some(Interest::Readable), false)),
            Next::Idle => {
                assert_eq!(interest, Some(Interest::None));
                assert!(!self.fits(), "a frame waits although it fits");
            }
            next => panic!("{next:?}"),
        }
    }

    /// Returns whether the driver has room for the next frame.
    fn fits(&self) -> bool {
        let len = HEADER + u64::from(self.port.length(self.number));
        match self.merges {
            true => self.rig.bytes_with_device().sum::<u64>() >= len,
            false => self.rig.with_device() > 0,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn frames_arrive_whole_in_order_and_as_soon_as_they_fit(
        bits in 0..32u8,
        min in 60..3000u32,
        span in 0..5000u32,
        order in 3..8u32,
        lens in prop::collection::vec(1..3000u32, 1..4),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let is = |bit: u8| bits & 1 << bit != 0;
        let kind = Kind { packed: is(0), event_idx: is(1), in_order: is(2) };
        let (merges, inflight) = (is(3), is(4));
        let port = NullPort { rate: 20_000, lengths: min..=min + span };
        let (size, chain) = (1u16 << order, lens.iter().sum::<u32>());
        let room = if merges { u32::from(size) / lens.len() as u32 * chain } else { chain };
        // The ring can hold the longest frame, and each chain a header.
        prop_assume!(room >= HEADER as u32 + min + span && chain >= HEADER as u32);
        let card = card(1, port.clone());
        let features = if merges { card.features() } else { rig::without(&card, NetFeatures::MRG_RXBUF) };
        let guest = Guest::prepare(kind, size);
        let guest = if inflight { guest.with_inflight() } else { guest };
        let vring = guest.vring(0, guest.first_avail(), None);
        let rig = Rig::start_on(&card, guest, vring, features);
        let (number, expired, due) = (0, false, false);
        let mut run = Run { rig, card, features, port, merges, inflight, lens, number, expired, due };
        for step in steps {
            run.step(step);
        }
        // The next frame arrives after any steps.
        let number = run.number;
        run.step(Step::Expire);
        while run.number == number {
            run.step(Step::Offer(size.into()));
            run.step(Step::Poll(10, true));
        }
        prop_assert_eq!(counter(&run.card, "dropped_long"), 0);
        let offered = run.rig.with_device();
        prop_assert_eq!(run.rig.stop().1, offered);
    }
}
