//! Requests that the library has, and what becomes of them when the cluster does not answer.
//!
//! The library cannot be asked to give a request up. Where one has to end, it is answered without the library, which keeps the
//! buffer until it is done with it. There are never more of these than [`LOST_MAX`], and then nothing is asked of it any more.

use crate::IoError;
use crate::offload::{Call, Flushes, Order, Wakes};
use kickless_io::{AlignedBuf, Errno};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Requests that have been answered and that the library still has: 64 MiB of buffers at most.
const LOST_MAX: usize = 256;

/// What goes through the library: a place, and a buffer that is the library's meanwhile.
#[derive(Debug)]
pub(super) struct Flight {
    place: u32,
    pub(super) buffer: Option<AlignedBuf>,
    flights: Arc<Flights>,
}

impl Flight {
    /// It is over: bytes read, or 0, or an error below that.
    pub(super) fn land(self, returned: isize) {
        let Self { place, buffer, flights } = self;
        flights.land(place, returned, buffer);
    }
}

/// All flights of an image. Nothing is locked inside.
#[derive(Debug)]
pub(super) struct Flights {
    state: Mutex<State>,
    /// There is another hurry, or nothing more to come.
    changed: Condvar,
    stop_timeout: Duration,
}

#[derive(Debug, Default)]
struct State {
    places: Vec<Place>,
    free: Vec<u32>,
    /// The number of the next.
    next: u64,
    /// How many have been answered without the library.
    lost: usize,
    /// Until when those before a number have to be over.
    hurry: Option<(u64, Instant)>,
    /// Flushes that the library has, and those whose answer is held, with their numbers.
    flushes: Flushes<(u64, Order)>,
    /// Something has been waited for in vain, and nothing has been heard since.
    silent: bool,
    end: bool,
}

#[derive(Debug)]
enum Place {
    Free,
    /// `flush` is the number among the flushes, of one.
    Taken {
        number: u64,
        order: Order,
        flush: Option<u64>,
    },
    /// Answered without the library.
    Lost {
        was_flush: bool,
    },
}

impl Flights {
    pub(super) fn new(stop_timeout: Duration) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), stop_timeout }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an order in; its flight, with its buffer. `None`: too many have been lost, and this one has failed.
    pub(super) fn board(self: &Arc<Self>, mut order: Order) -> Option<Box<Flight>> {
        let buffer = order.buffer.take();
        let mut state = self.lock();
        if state.lost >= LOST_MAX {
            drop(state);
            order.buffer = buffer;
            order.answer(Err(IoError::Os(Errno::TIMEDOUT)), &mut Wakes::default());
            return None;
        }
        let number = state.next;
        state.next += 1;
        let flush = (order.call == Call::Flush).then(|| state.flushes.begin());
        let taken = Place::Taken { number, order, flush };
        let place = match state.free.pop() {
            Some(place) => {
                state.places[place as usize] = taken;
                place
            }
            None => {
                state.places.push(taken);
                (state.places.len() - 1) as u32
            }
        };
        drop(state);
        Some(Box::new(Flight { place, buffer, flights: self.clone() }))
    }

    fn land(&self, place: u32, returned: isize, buffer: Option<AlignedBuf>) {
        let mut state = self.lock();
        let was = std::mem::replace(&mut state.places[place as usize], Place::Free);
        state.free.push(place);
        state.silent = false;
        // Answered when nothing is locked.
        let mut answered = None;
        match was {
            Place::Free => {}
            Place::Lost { was_flush } => {
                state.lost -= 1;
                if was_flush && returned < 0 {
                    state.flushes.count_loss();
                }
            }
            Place::Taken { number, mut order, flush } => {
                order.buffer = buffer;
                let result = outcome(&order, returned);
                match (flush, result) {
                    (Some(flush), Ok(())) => state.flushes.succeed(flush, (number, order)),
                    (Some(flush), Err(_)) => {
                        state.flushes.fail(flush);
                        answered = Some((order, result));
                    }
                    (None, _) => answered = Some((order, result)),
                }
            }
        }
        let (due, lost_writes) = state.due();
        drop(state);
        let mut wakes = Wakes::default();
        for (mut order, result) in answered.into_iter().chain(due.into_iter().map(|order| (order, Ok(())))) {
            order.lost_writes = lost_writes;
            order.answer(result, &mut wakes);
        }
    }

    /// Has all that is in flight end within the time that a stop has; at once where that has been waited for in vain.
    pub(super) fn hurry(&self) {
        let mut state = self.lock();
        if state.hurry.is_none() {
            let within = if state.silent { Duration::ZERO } else { self.stop_timeout };
            state.hurry = Some((state.next, Instant::now() + within));
            self.changed.notify_one();
        }
    }

    /// How long the cluster is to be waited for by who stops.
    pub(super) fn patience(&self) -> Duration {
        if self.lock().silent { Duration::ZERO } else { self.stop_timeout }
    }

    /// Something else has been waited for in vain.
    pub(super) fn nothing_heard(&self) {
        self.lock().silent = true;
    }

    /// Somebody new uses the disk, or the cluster has answered: it is waited for anew.
    pub(super) fn renew(&self) {
        self.lock().silent = false;
    }

    /// Nothing is hurried any more.
    pub(super) fn end(&self) {
        self.lock().end = true;
        self.changed.notify_one();
    }

    /// Ends what has to end in time, until there is no more of it.
    pub(super) fn keep_time(&self) {
        let mut state = self.lock();
        while !state.end {
            let Some((before, then)) = state.hurry else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let now = Instant::now();
            if now < then {
                let waited = self.changed.wait_timeout(state, then - now);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            state.hurry = None;
            let (late, due, lost_writes) = state.take_before(before);
            for mut order in due {
                order.lost_writes = lost_writes;
                order.answer(Ok(()), &mut Wakes::default());
            }
            if late.is_empty() {
                continue;
            }
            state.silent = true;
            drop(state);
            tracing::error!(
                requests = late.len(),
                "requests have to end, and the Ceph cluster does not answer: they fail"
            );
            let mut wakes = Wakes::default();
            for order in late {
                order.answer(Err(IoError::Os(Errno::TIMEDOUT)), &mut wakes);
            }
            drop(wakes);
            state = self.lock();
        }
    }
}

impl State {
    /// Takes flushes that are to be answered as successful, and the count of lost writes for them.
    fn due(&mut self) -> (Vec<Order>, u64) {
        let due = std::iter::from_fn(|| self.flushes.due()).map(|(_, order)| order).collect();
        (due, self.flushes.lost_writes())
    }

    /// Takes the orders of those with smaller numbers, whose buffers stay with the library; and, as [`State::due`], flushes that
    /// waited for one of them.
    fn take_before(&mut self, before: u64) -> (Vec<Order>, Vec<Order>, u64) {
        let mut late = Vec::new();
        for place in &mut self.places {
            if !matches!(place, Place::Taken { number, .. } if *number < before) {
                continue;
            }
            let lost = Place::Lost { was_flush: matches!(place, Place::Taken { flush: Some(_), .. }) };
            if let Place::Taken { order, flush, .. } = std::mem::replace(place, lost) {
                // It may never land.
                if let Some(flush) = flush {
                    self.flushes.give_up(flush);
                }
                late.push(order);
            }
        }
        self.lost += late.len();
        let (due, lost_writes) = self.due();
        let held = || self.flushes.take_if(|_, (number, _)| *number < before);
        late.extend(std::iter::from_fn(held).map(|(_, order)| order));
        (late, due, lost_writes)
    }
}

/// What becomes of an order of which the library says this.
fn outcome(order: &Order, returned: isize) -> Result<(), IoError> {
    match (order.call, returned) {
        (_, error) if error < 0 => Err(IoError::Os(Errno::from_raw_os_error(-error as i32))),
        // The image has become shorter.
        (Call::Read, bytes) if bytes as u64 != order.len => Err(IoError::Shrunk),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::Ticket;
    use kickless_io::Waker;
    use std::thread;

    const LEN: u64 = 4096;
    const GONE: Result<(), IoError> = Err(IoError::Os(Errno::TIMEDOUT));

    struct Request {
        ticket: Arc<Ticket>,
        flight: Option<Box<Flight>>,
    }

    fn read(flights: &Arc<Flights>) -> Request {
        board(flights, Call::Read)
    }

    fn board(flights: &Arc<Flights>, call: Call) -> Request {
        let ticket = Arc::new(Ticket::default());
        let buffer = (call == Call::Read).then(|| AlignedBuf::new(LEN as usize, 512).unwrap());
        let order = ticket.order(call, (0, LEN), buffer, &Waker::new().unwrap());
        let flight = flights.board(order);
        Request { ticket, flight }
    }

    fn answer(request: &Request) -> Option<(Result<(), IoError>, bool)> {
        request.ticket.take().map(|answer| (answer.result, answer.buffer.is_some()))
    }

    /// Has the thread end, whatever becomes of the test.
    struct Ends<'a>(&'a Flights);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.end();
        }
    }

    /// Flights with a thread that keeps time.
    fn with_clock(stop_timeout: Duration, check: impl FnOnce(&Arc<Flights>)) {
        time(&Arc::new(Flights::new(stop_timeout)), check);
    }

    fn time(flights: &Arc<Flights>, check: impl FnOnce(&Arc<Flights>)) {
        thread::scope(|scope| {
            let _ends = Ends(flights);
            scope.spawn(|| flights.keep_time());
            check(flights);
        });
    }

    fn wait_for(request: &Request) -> (Result<(), IoError>, bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match answer(request) {
                Some(answer) => return answer,
                None => assert!(Instant::now() < deadline, "it is not answered"),
            }
            thread::yield_now();
        }
    }

    #[test]
    fn what_the_library_returns() {
        let flights = Arc::new(Flights::new(Duration::MAX));
        for (returned, result) in [
            (LEN as isize, Ok(())),
            (512, Err(IoError::Shrunk)),
            (-(Errno::ROFS.raw_os_error() as isize), Err(IoError::Os(Errno::ROFS))),
        ] {
            let mut request = read(&flights);
            assert_eq!(answer(&request), None);
            request.flight.take().unwrap().land(returned);
            assert_eq!(answer(&request), Some((result, true)));
        }
        assert_eq!(flights.lock().places.len(), 1);
    }

    /// The library tells one flush that writes are lost. Others have the count of lost writes from then on.
    #[test]
    fn a_flush_that_failed_counts_for_those_beside_it() {
        let flights = Arc::new(Flights::new(Duration::MAX));
        let answer = |request: &Request| request.ticket.take().map(|a| (a.result, a.lost_writes));
        let land = |request: &mut Request, returned| request.flight.take().unwrap().land(returned);
        let [mut told, mut beside, mut write] =
            [Call::Flush, Call::Flush, Call::Write { durable: false }].map(|call| board(&flights, call));
        land(&mut write, 0);
        assert_eq!(answer(&write), Some((Ok(()), 0)));
        land(&mut beside, 0);
        assert_eq!(answer(&beside), None, "the other one may have been told");
        land(&mut told, -(Errno::IO.raw_os_error() as isize));
        assert_eq!(answer(&told), Some((Err(IoError::Os(Errno::IO)), 1)));
        assert_eq!(answer(&beside), Some((Ok(()), 1)));
        let mut after = board(&flights, Call::Flush);
        land(&mut after, 0);
        assert_eq!(answer(&after), Some((Ok(()), 1)));
    }

    /// Nor is a flush held for one that is given up.
    #[test]
    fn a_hurry_ends_flushes_that_are_held() {
        with_clock(Duration::from_millis(1), |flights| {
            let mut requests = [(); 3].map(|()| board(flights, Call::Flush));
            requests[1].flight.take().unwrap().land(0);
            assert_eq!(answer(&requests[1]), None);
            flights.hurry();
            assert_eq!([0, 2].map(|at| wait_for(&requests[at]).0), [GONE; 2]);
            assert_eq!(wait_for(&requests[1]).0, Ok(()));
            let mut after = board(flights, Call::Flush);
            after.flight.take().unwrap().land(0);
            assert_eq!(answer(&after), Some((Ok(()), false)));
            for request in [0, 2] {
                requests[request].flight.take().unwrap().land(0);
            }
        });
    }

    #[test]
    fn a_hurry_ends_what_there_is_and_no_more() {
        with_clock(Duration::from_millis(1), |flights| {
            let mut before = read(flights);
            flights.hurry();
            assert_eq!(wait_for(&before), (GONE, false));
            let mut after = read(flights);
            // It lands when its request is over, and its buffer is given up then.
            before.flight.take().unwrap().land(LEN as isize);
            assert_eq!(answer(&before), None);
            after.flight.take().unwrap().land(LEN as isize);
            assert_eq!(answer(&after), Some((Ok(()), true)));
        });
    }

    #[test]
    fn what_comes_after_a_hurry_is_not_ended_by_it() {
        let flights = Arc::new(Flights::new(Duration::from_millis(1)));
        let before = read(&flights);
        flights.hurry();
        let mut after = read(&flights);
        time(&flights, |_| {
            assert_eq!(wait_for(&before), (GONE, false));
            after.flight.take().unwrap().land(LEN as isize);
            assert_eq!(answer(&after), Some((Ok(()), true)));
        });
    }

    /// Nor does it begin anew when it is said again.
    #[test]
    fn a_hurry_is_over_at_once_where_nothing_is_heard() {
        with_clock(Duration::from_secs(3600), |flights| {
            flights.hurry();
            let hurry = flights.lock().hurry;
            flights.hurry();
            assert_eq!(flights.lock().hurry, hurry);
            flights.lock().hurry = None;
            flights.nothing_heard();
            let request = read(flights);
            flights.hurry();
            assert_eq!(wait_for(&request), (GONE, false));
            request.flight.unwrap().land(0);
        });
    }

    #[test]
    fn who_has_waited_in_vain_does_not_wait_again_until_something_is_heard() {
        with_clock(Duration::from_millis(1), |flights| {
            let first = read(flights);
            flights.hurry();
            assert_eq!(wait_for(&first), (GONE, false));
            assert_eq!(flights.patience(), Duration::ZERO);
            first.flight.unwrap().land(0);
            assert_eq!(flights.patience(), Duration::from_millis(1));
            flights.nothing_heard();
            assert_eq!(flights.patience(), Duration::ZERO);
            flights.renew();
            assert_eq!(flights.patience(), Duration::from_millis(1));
        });
    }

    #[test]
    fn the_library_is_not_asked_without_end() {
        with_clock(Duration::from_millis(1), |flights| {
            let lost: Vec<_> = (0..LOST_MAX).map(|_| read(flights)).collect();
            flights.hurry();
            lost.iter().for_each(|request| assert_eq!(wait_for(request), (GONE, false)));
            let refused = read(flights);
            assert!(refused.flight.is_none());
            assert_eq!(answer(&refused), Some((GONE, true)));
            lost.into_iter().for_each(|request| request.flight.unwrap().land(0));
            assert!(read(flights).flight.is_some());
        });
    }
}
