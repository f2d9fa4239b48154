//! Provides a virtqueue in guest memory, with both of its ends.

use std::sync::Arc;

use kickless_device::{Areas, Counters, VringParts};
use kickless_memory::{Area, UserAddr, View};
use kickless_virtqueue::device::{Addresses, Options};
use kickless_virtqueue::driver::{self, Completer, Submitter};

/// The driver's end of a virtqueue of at most 1024 descriptors, and the guest memory that holds the
/// virtqueue.
pub struct GuestRing {
    /// The guest's memory.
    pub view: Arc<View>,
    /// Makes chains available.
    pub submitter: Submitter,
    /// Takes used chains.
    pub completer: Completer,
    options: Options,
}

impl GuestRing {
    /// The front-end address of the guest's memory.
    pub const USER: u64 = 0x7f00_0000_0000;
    /// The guest-physical address of the avail ring. The descriptor table is at 0.
    pub const AVAIL: u64 = 0x4000;
    /// The guest-physical address of the used ring.
    pub const USED: u64 = 0x6000;
    /// The virtqueue ends before this guest-physical address; the memory behind it is free for buffers.
    pub const BUFFERS: u64 = 0x1_0000;

    /// Creates a virtqueue in guest memory that begins at [`GuestRing::USER`] and is zero up to
    /// [`GuestRing::BUFFERS`].
    pub fn new(view: Arc<View>, options: Options) -> Self {
        let areas = driver::Areas {
            desc: area(&view, 0, Self::AVAIL),
            driver: area(&view, Self::AVAIL, Self::USED),
            device: area(&view, Self::USED, Self::BUFFERS),
        };
        let (submitter, completer) = driver::queue(options, areas);
        Self { view, submitter, completer, options }
    }

    /// Returns the front-end addresses of the virtqueue.
    pub fn addresses() -> Areas {
        let [desc, avail, used] = [0, Self::AVAIL, Self::USED].map(|at| UserAddr(Self::USER + at));
        Areas::User(Addresses { desc, avail, used, log: None })
    }

    /// Returns the parts of the device's end of the virtqueue.
    pub fn parts(&self) -> VringParts {
        vring_parts(&self.view, self.options, Self::addresses())
    }

    /// Returns the memory for buffers, from [`GuestRing::BUFFERS`] to its end.
    pub fn buffers(&self) -> Area {
        let len: u64 = self.view.map().slots().iter().map(|slot| slot.len()).sum();
        area(&self.view, Self::BUFFERS, len)
    }
}

fn area(view: &View, start: u64, end: u64) -> Area {
    view.map().area(UserAddr(GuestRing::USER + start), (end - start) as usize, 16).unwrap()
}

/// Returns the parts of a fresh [`Vring`](kickless_device::Vring) with number 0 and without descriptors,
/// vIOMMU, log and in-flight buffer.
pub fn vring_parts(view: &Arc<View>, options: Options, areas: Areas) -> VringParts {
    VringParts {
        index: 0,
        options,
        areas,
        iommu: None,
        next_avail: if options.is_packed() { 1 << 15 } else { 0 },
        is_unconfirmed: false,
        unpublished: Vec::new(),
        inflight: None,
        view: view.clone(),
        kick: None,
        call: None,
        err: None,
        logged: None,
        counters: Arc::new(Counters::default()),
    }
}
