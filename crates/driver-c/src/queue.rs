//! A queue, in C: batches of requests, and their completions.
#![expect(unsafe_code, reason = "functions that C calls by their names")]

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use driver::{Data, Events};

use crate::disk::Disk;
use crate::error::{Fault, guard};
use crate::pointer;
use crate::request::{Completion, Request};

thread_local! {
    /// The empty vector of the thread's last batch, for reuse.
    static BATCH: Cell<Vec<driver::Request>> = const { Cell::new(Vec::new()) };
}

/// One of the queues of a disk, for requests in batches.
///
/// The first thread that polls the queue gets a completion. Threads that need only their own completions must
/// use different queues.
pub struct Queue {
    queue: driver::Queue,
    /// The largest number of requests in flight.
    size: usize,
    events: OnceLock<Events>,
    /// Vectors for pieces of memory, from completed requests, for reuse.
    vectors: Mutex<Vec<Vec<driver::Buffer>>>,
}

impl Queue {
    fn vectors(&self) -> MutexGuard<'_, Vec<Vec<driver::Buffer>>> {
        self.vectors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the vector of a request's memory for reuse.
    #[inline]
    fn keep(&self, data: Data) {
        if let Data::Many(mut vector) = data {
            vector.clear();
            let mut vectors = self.vectors();
            if vectors.len() < self.size {
                vectors.push(vector);
            }
        }
    }

    /// Submits the first requests, as many as there is room for. Returns their number.
    ///
    /// # Safety
    /// As [`Request::convert`].
    unsafe fn submit(&self, requests: &[Request]) -> Result<usize, Fault> {
        // There is no room for more requests, so the rest is not converted. If there is no room at all, one
        // is converted for the error.
        let room = self.size.saturating_sub(usize::try_from(self.queue.in_flight()).unwrap_or(usize::MAX));
        let mut batch = BATCH.try_with(Cell::take).unwrap_or_default();
        let mut wrong = None;
        for request in requests.iter().take(room.max(1)) {
            // SAFETY: the caller's promise.
            match unsafe { request.convert(|| self.vectors().pop().unwrap_or_default()) } {
                Ok(request) => batch.push(request),
                Err(fault) => {
                    wrong = Some(fault);
                    break;
                }
            }
        }
        let built = batch.len();
        let submitted = if built == 0 { Ok(0) } else { self.queue.submit(&mut batch) };
        let count = built - batch.len();
        batch.drain(..).for_each(|request| self.keep(request.into_data()));
        // If the thread-local variables are destroyed already, the vector is dropped.
        let _ = BATCH.try_with(|kept| kept.set(batch));
        match (count, submitted, wrong) {
            (0, Err(error), _) => Err(error.into()),
            (0, _, Some(fault)) => Err(fault),
            _ => Ok(count),
        }
    }

    /// Returns a function that writes each completion to the next of the caller's places.
    fn into<'a>(
        &'a self,
        places: &'a mut [MaybeUninit<Completion>],
    ) -> impl FnMut(driver::Completion) + use<'a> {
        let mut places = places.iter_mut();
        move |completion| {
            if let Some(place) = places.next() {
                place.write(Completion::new(&completion));
            }
            self.keep(completion.data);
        }
    }

    #[inline]
    fn poll(&self, places: &mut [MaybeUninit<Completion>]) -> Result<usize, Fault> {
        Ok(self.queue.poll(places.len(), self.into(places))?)
    }

    fn wait(
        &self,
        places: &mut [MaybeUninit<Completion>],
        min: usize,
        timeout: Option<Duration>,
    ) -> Result<usize, Fault> {
        let mut count = self.poll(places)?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        while count < min {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let places = places.get_mut(count..).unwrap_or_default();
            match self.queue.wait(places.len(), left, self.into(places)) {
                Ok(0) if left.is_some() => break,
                Ok(more) => count += more,
                // The next call reports the error.
                Err(_) if count > 0 => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(count)
    }

    fn events(&self) -> Result<&Events, Fault> {
        if let Some(events) = self.events.get() {
            return Ok(events);
        }
        let events = self.queue.events()?;
        Ok(self.events.get_or_init(|| events))
    }
}

#[inline]
fn count(count: usize) -> Result<c_int, Fault> {
    c_int::try_from(count).map_err(|_| Fault::Overflow("a number of requests"))
}

/// Opens the disk's queue with this number, from 0 to kl_disk_queues() - 1. The same queue can be opened more
/// than once.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_open(disk: *mut Disk, index: u32, queue: *mut *mut Queue) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let disk = unsafe {
            pointer::put(queue, ptr::null_mut(), "queue")?;
            pointer::reference(disk, "disk")?
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if index >= disk.disk.queues() {
            return Err(Fault::Argument("the disk has no queue with this number"));
        }
        let opened = Queue {
            queue: disk.disk.queue(index),
            size: disk.queue_size.into(),
            events: OnceLock::new(),
            vectors: Mutex::new(Vec::with_capacity(disk.queue_size.into())),
        };
        // SAFETY: as above.
        unsafe { pointer::put(queue, pointer::handle(opened), "queue")? };
        Ok(0)
    })
}

/// Closes a queue. Ignores null.
///
/// Requests in flight go on. A thread that polls another handle of the same queue gets their completions.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_close(queue: *mut Queue) {
    guard(|| {
        // SAFETY: a handle as the crate's documentation requires.
        unsafe { pointer::take_back(queue)? };
        Ok(())
    });
}

/// Submits the first of `count` requests, as many as there is room for, with at most one kick. Returns their
/// number.
///
/// The number is less than `count` if the queue is full or the next request is invalid. Submit the rest again
/// to learn the reason.
///
/// Fails only if not even the first request could be submitted: with -EAGAIN if the queue is full (poll or
/// wait first), -EINVAL if the request is invalid, -EROFS if it would change a read-only disk, -EOPNOTSUPP if
/// the back-end does not offer its kind.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_submit(queue: *mut Queue, requests: *const Request, count: usize) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let submitted = unsafe {
            let queue = pointer::reference(queue, "queue")?;
            queue.submit(pointer::array(requests, count, "requests")?)?
        };
        self::count(submitted)
    })
}

/// Takes up to `max` completions without waiting, but not always all that there are. Returns their number,
/// which may be 0.
///
/// Fails with -ENODEV if the disk is dead and no completion is left.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_poll(queue: *mut Queue, completions: *mut Completion, max: usize) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let taken = unsafe {
            let queue = pointer::reference(queue, "queue")?;
            queue.poll(pointer::room(completions, max, "completions")?)?
        };
        count(taken)
    })
}

/// Waits for at least `min` completions, and takes up to `max`. Returns their number.
///
/// The wait ends after `timeout_ns` nanoseconds; -1 means no limit, even if nothing is in flight. The number
/// is less than `min` only if the time has passed or the disk is dead.
///
/// Fails as kl_queue_poll() does.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_wait(
    queue: *mut Queue,
    completions: *mut Completion,
    min: usize,
    max: usize,
    timeout_ns: i64,
) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let (queue, places) = unsafe {
            let queue = pointer::reference(queue, "queue")?;
            (queue, pointer::room(completions, max, "completions")?)
        };
        if min > max {
            return Err(Fault::Argument("min is more than max"));
        }
        let timeout = match timeout_ns {
            -1 => None,
            time => Some(u64::try_from(time).map_err(|_| Fault::Argument("timeout_ns is negative"))?),
        };
        count(queue.wait(places, min, timeout.map(Duration::from_nanos))?)
    })
}

/// Returns the number of requests of this queue that are in flight.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_in_flight(queue: *mut Queue) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let queue = unsafe { pointer::reference(queue, "queue")? };
        c_int::try_from(queue.queue.in_flight()).map_err(|_| Fault::Overflow("a number of requests"))
    })
}

/// Returns a descriptor for poll() or epoll, which becomes readable when the queue may have completions.
///
/// Call kl_queue_arm() before each sleep, and kl_queue_poll() after it. The descriptor belongs to the handle
/// and is closed with it.
///
/// It is for one sleeping thread at a time. Each thread that sleeps on the same queue of the disk opens its
/// own kl_queue. A sleeper wakes when a request completes that no other thread takes. Other threads may poll
/// or wait meanwhile.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_fd(queue: *mut Queue) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let queue = unsafe { pointer::reference(queue, "queue")? };
        Ok(queue.events()?.as_fd().as_raw_fd())
    })
}

/// Asks the device to signal the descriptor of kl_queue_fd(). Returns 1 if the caller may sleep on it, or 0
/// if there is something to poll already.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_queue_arm(queue: *mut Queue) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let queue = unsafe { pointer::reference(queue, "queue")? };
        Ok(queue.events()?.arm().into())
    })
}
