//! A qcow2 image as a disk.

use super::attached::AttachedImages;
use super::blocking;
use super::decoder::Decoder;
use super::layer::{Chain, Image};
use super::open::{self, Under};
use super::request::Qcow2State;
use super::runtime::Tables;
use crate::attached::Attached;
use crate::buffers::{IoBuffers, TransferBuffers};
use crate::control::DiskControl;
use crate::fault::FaultInjector;
use crate::image_file::Source;
use crate::lock::ImageLock;
use crate::op_sender::OpSender;
use crate::{
    Error, FileDisk, IoContext, IoError, Limits, Options, RangeLimits, Request, Resized, SECTOR, Step,
};
use kickless_io::{Completion, Engine, Errno};
use kickless_qcow2::{BadImage, Header, Version, WriteImage};
use kickless_sync::lock;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tracing::Span;

/// The largest discard or write-zeroes request in bytes.
const RANGE_MAX: u64 = 1 << 30;

/// An image with its backing images.
#[derive(Debug)]
pub struct Qcow2Disk {
    path: PathBuf,
    options: Options,
    /// The file of the image itself.
    pub(super) file: Arc<FileDisk>,
    limits: Limits,
    size: AtomicU64,
    decoder: Arc<Decoder>,
    /// The open images. `None` until they are needed, and while they belong to another host.
    chain: Mutex<Option<Arc<Chain>>>,
    /// Held while the image is opened, closed or grown. Taken before `chain`, which workers take too.
    pub(super) control: Mutex<()>,
    /// Changes with each change of `chain`.
    generation: AtomicU64,
    /// The locks of the backing images, while the image is open or suspended.
    pub(super) locks: Mutex<Vec<ImageLock>>,
    /// The files of the backing images, while the disk passes from one process to another.
    pub(super) under: Mutex<Vec<Arc<FileDisk>>>,
    /// The images belong to another process, which may go on with them.
    pub(super) is_of_other: AtomicBool,
    /// The number of queues that were attached. Each gets a number.
    queues: AtomicU32,
    /// Space of the image's file stays allocated. Changes under the lock of `chain`.
    keeps_space: AtomicBool,
    /// Identifies the disk in the log.
    span: Span,
}

impl Qcow2Disk {
    /// Opens an image and checks it without writing to it, because another process may still use it.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(source: Source<'_>, options: &Options) -> Result<Self, Error> {
        let path = source.path();
        let failed = |source| Error::Library { disk: format!("qcow2:{}", path.display()), source };
        // A file that cannot be opened has a sentence of its own.
        drop(source.open(options)?);
        let (file, header) = open::open_file(source, options).map_err(|error| {
            match error.get_ref().and_then(|error| error.downcast_ref()) {
                Some(BadImage::Magic) => Error::NotQcow2 { path: path.to_owned() },
                _ => failed(error),
            }
        })?;
        let (file, decoder) = (Arc::new(file), Arc::default());
        // The images may belong to another host, so this only looks at them.
        let read_only = Options { read_only: true, ..*options };
        open::chain(path, &file, &read_only, Under::Named { locks: false }, &decoder).map_err(failed)?;
        if header.is_corrupt() && !options.read_only {
            return Err(failed(io::Error::other(BadImage::Corrupt)));
        }
        Self::closed(path, *options, (file, decoder), &header).map_err(failed)
    }

    /// Makes a disk whose images are not open.
    ///
    /// # Errors
    /// No disk can have the size of the image.
    pub(super) fn closed(
        path: &Path,
        options: Options,
        (file, decoder): (Arc<FileDisk>, Arc<Decoder>),
        header: &Header,
    ) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            options,
            limits: limits(header, options.read_only),
            file,
            size: AtomicU64::new(disk_size(header.size)?),
            decoder,
            chain: Mutex::default(),
            control: Mutex::default(),
            generation: AtomicU64::new(0),
            locks: Mutex::default(),
            under: Mutex::default(),
            is_of_other: AtomicBool::new(false),
            queues: AtomicU32::new(0),
            keeps_space: AtomicBool::new(false),
            span: Span::current(),
        })
    }

    /// Opens the image again if it was made anew in a shape that this disk does not have, or if `by_name` and
    /// its path names another file now.
    ///
    /// # Errors
    /// One sentence for the operator: the new image cannot be used.
    pub(crate) fn replacement(&self, by_name: bool) -> Result<Option<Self>, Error> {
        let open = |source: Source<'_>| self.span.in_scope(|| Self::open(source, &self.options)).map(Some);
        let is_other = if self.file.is_replaced() { by_name } else { self.has_other_shape() };
        match self.file.named() {
            _ if !is_other => Ok(None),
            Some(path) => open(Source::Path(path)),
            None => open(Source::Descriptor(&self.path, self.file.os_file().as_fd())),
        }
    }

    /// Returns whether the image in the file has other limits than this disk, or needs smaller transfers.
    fn has_other_shape(&self) -> bool {
        self.file.drop_cache();
        // The next step says what is wrong with a header.
        open::header(&self.file).is_ok_and(|(header, _)| {
            limits(&header, self.options.read_only) != self.limits || !open::is_fit(&self.file, &header)
        })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Takes the size of the image.
    ///
    /// # Errors
    /// No disk can have it.
    pub(super) fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.size.store(disk_size(bytes)?, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the alignment of operations.
    pub(crate) fn unit(&self) -> u64 {
        self.file.unit()
    }

    /// Returns the open images. `None` while they may belong to another host.
    pub(super) fn chain(&self) -> Option<(Arc<Chain>, u64)> {
        let chain = lock(&self.chain);
        Some((chain.clone()?, self.generation.load(Ordering::Acquire)))
    }

    /// Keeps these locks of backing images, and unlocks those of before.
    pub(super) fn lock_backing(&self, locks: Vec<ImageLock>) {
        *lock(&self.locks) = locks;
    }

    /// Opens the images. Returns the locks of those that are found by name.
    pub(super) fn open_chain(&self, under: Under<'_>) -> io::Result<Vec<ImageLock>> {
        let (opened, locks) = self
            .span
            .in_scope(|| open::chain(&self.path, &self.file, &self.options, under, &self.decoder))?;
        if let Some(image) = opened.top() {
            // It may have grown, or shrunk: `qemu-img snapshot -a` and `resize --shrink`.
            self.set_size(image.size.load(Ordering::Relaxed))?;
        }
        self.set_chain(Some(Arc::new(opened)));
        Ok(locks)
    }

    /// Returns the image of a chain that is written.
    pub(super) fn written<'c>(&self, chain: &'c Chain) -> Option<&'c Arc<Image>> {
        chain.top().filter(|_| !self.options.read_only)
    }

    /// Writes the host's cache of the image to its file, before it is closed.
    pub(super) fn sync(&self, image: Option<&Arc<Image>>) -> io::Result<()> {
        if image.is_none() {
            return Ok(());
        }
        if self.file.is_cut() {
            return Err(io::Error::other(IoError::Shrunk));
        }
        blocking::BlockingFile(&self.file).sync()
    }

    /// Returns the reserve of an image that no queue uses any more, and writes its tables.
    pub(super) fn close(&self, image: Option<&Arc<Image>>) -> io::Result<()> {
        let Some(image) = image else { return Ok(()) };
        image.with_tables(Tables::close);
        let closed = blocking::run(image, Tables::closed).map_err(io::Error::from);
        closed.and_then(|()| blocking::BlockingFile(&self.file).sync()).inspect_err(|error| {
            tracing::warn!(
                parent: &self.span, %error,
                "the image has clusters that nothing uses: `qemu-img check -r leaks` returns them"
            );
        })
    }

    /// Replaces the open images.
    pub(super) fn set_chain(&self, opened: Option<Arc<Chain>>) {
        let mut chain = lock(&self.chain);
        *chain = opened;
        self.pass_keeps_space(chain.as_deref());
        // Release. Partner: the load in `with_images`.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Tells the tables of the image whether its space stays allocated.
    fn pass_keeps_space(&self, chain: Option<&Chain>) {
        if let Some(image) = chain.and_then(Chain::top) {
            image.with_tables(|tables| tables.set_keeps_space(self.keeps_space.load(Ordering::Relaxed)));
        }
    }

    /// Registers the images with a worker's engine.
    ///
    /// # Errors
    /// The image is not open: see [`DiskControl::reload`].
    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<Attached, Error> {
        let failed = |source| Error::Library { disk: format!("qcow2:{}", self.path.display()), source };
        // Opening it here would write to an image that may belong to another host.
        let closed = || failed(io::Error::other("the image is closed"));
        let (chain, generation) = self.chain().ok_or_else(closed)?;
        let file = self.file.attach(engine)?;
        let under = attach_under(&chain, engine)?;
        let shard = self.queues.fetch_add(1, Ordering::Relaxed);
        let images = AttachedImages::new(chain, generation, shard);
        Ok(Attached { file: Some(file), under, images: Some(Box::new(images)) })
    }

    /// Calls `f` with the images of the context.
    #[inline]
    pub(crate) fn with_images(
        &self,
        context: &mut IoContext<'_>,
        f: impl FnOnce(&mut AttachedImages, &mut IoContext<'_>) -> Step,
    ) -> Step {
        let Some(mut images) = context.attached.images.take() else {
            return Step::Done(Err(IoError::Os(Errno::BADF)));
        };
        if images.generation != self.generation.load(Ordering::Acquire) {
            self.refresh(&mut images, context);
        }
        let step = f(&mut images, context);
        context.attached.images = Some(images);
        step
    }

    /// Uses the images that were opened last.
    #[cold]
    fn refresh(&self, images: &mut AttachedImages, context: &mut IoContext<'_>) {
        if images.requests > 0 || images.in_flight > 0 {
            return;
        }
        let opened = self.chain();
        images.is_open = opened.is_some();
        if let Some((chain, generation)) = opened
            && let Ok(under) = attach_under(&chain, context.engine)
        {
            for file in std::mem::replace(&mut context.attached.under, under) {
                context.engine.unregister(file);
            }
            (images.chain, images.generation, images.busy) = (chain, generation, 0);
        }
    }

    /// Starts a request on these buffers.
    #[inline]
    pub(crate) fn start<S: OpSender>(
        &self,
        images: &mut AttachedImages,
        sender: &mut S,
        buffers: &mut IoBuffers,
        state: &mut Qcow2State,
        request: Request,
    ) -> Step {
        let at = match buffers.check(request, self.size(), self.limits.read_only) {
            Ok(_) if !images.is_open => Err(IoError::Os(Errno::IO)),
            checked => checked,
        };
        match at {
            Ok(at) => state.start((images, self.size()), sender, buffers, (request, at)),
            Err(error) => {
                buffers.drop_extents();
                Step::Done(Err(error))
            }
        }
    }

    /// Starts operations for the tables.
    pub(crate) fn submit_table_ops(&self, context: &mut IoContext<'_>, injector: Option<&FaultInjector>) {
        if let Some(mut images) = context.attached.images.take() {
            images.submit_table_ops(context, injector);
            context.attached.images = Some(images);
        }
    }

    /// Takes the completion of one.
    pub(crate) fn resume_table_op(
        &self,
        context: &mut IoContext<'_>,
        injector: Option<&FaultInjector>,
        completion: Completion,
    ) {
        if let Some(mut images) = context.attached.images.take() {
            images.resume_table_op(context, injector, completion);
            context.attached.images = Some(images);
        }
    }
}

fn attach_under(chain: &Chain, engine: &mut Engine) -> Result<Vec<kickless_io::FileId>, Error> {
    chain.layers.iter().skip(1).map(|layer| layer.file().attach(engine)).collect()
}

/// Returns the size of a disk whose image has this one.
fn disk_size(bytes: u64) -> io::Result<u64> {
    let size = bytes - bytes % SECTOR;
    let is_possible = size > 0 && size <= i64::MAX as u64;
    if is_possible { Ok(size) } else { Err(io::Error::other(Error::Size(bytes))) }
}

fn limits(header: &Header, read_only: bool) -> Limits {
    // Version 2 has no zero clusters, so an unallocated cluster shows the backing image.
    let can_clear = header.geometry.version == Version::V3 || header.backing.is_none();
    let ranges =
        (!read_only && can_clear).then(|| RangeLimits::bytes(RANGE_MAX, header.geometry.subcluster()));
    Limits {
        discard: ranges,
        write_zeroes: ranges.map(|ranges| RangeLimits { alignment: 1, ..ranges }),
        zeroes_may_unmap: ranges.is_some(),
        ..Limits::plain(read_only)
    }
}

impl DiskControl for Qcow2Disk {
    fn identity(&self) -> &str {
        DiskControl::identity(&*self.file)
    }

    fn is_replaced(&self) -> bool {
        self.file.is_replaced()
    }

    fn file(&self) -> Option<&File> {
        Some(self.file.os_file())
    }

    /// Writes everything to the file, and closes the image: returns its reserve.
    ///
    /// All that the guest was told is written is in the file already, in tables too (R4). So the first sync
    /// is enough for it. What a later failure loses leaks clusters.
    fn write_back(&self) -> io::Result<()> {
        let _control = lock(&self.control);
        let Some((open, _)) = self.chain() else { return Ok(()) };
        let image = self.written(&open);
        self.sync(image)?;
        self.set_chain(None);
        // The warning says what a failure means.
        let _ = self.close(image);
        self.lock_backing(Vec::new());
        Ok(())
    }

    /// Reads the image's tables again, because another host may have written since.
    fn reload(&self, locks: bool) -> io::Result<()> {
        let _control = lock(&self.control);
        self.set_chain(None);
        self.lock_backing(Vec::new());
        let locks = self.open_chain(Under::Named { locks })?;
        self.lock_backing(locks);
        Ok(())
    }

    fn look(&self) -> io::Result<()> {
        let _control = lock(&self.control);
        if lock(&self.chain).is_none() {
            self.file.drop_cache();
            let (header, _) = open::header(&self.file)?;
            self.set_size(header.size)?;
        }
        Ok(())
    }

    /// Reads how much room the device under the image has. The disk itself grows by
    /// [`DiskControl::grow`] only.
    fn refresh_size(&self) -> io::Result<Resized> {
        if self.file.is_device()
            && let Some(image) = lock(&self.chain).clone().as_ref().and_then(|chain| chain.top())
        {
            let bytes = self.file.bytes()?;
            image.with_tables(|tables| tables.device_has(bytes));
        }
        Ok(Resized::Same)
    }

    fn set_keeps_space(&self, keeps: bool) {
        let chain = lock(&self.chain);
        self.keeps_space.store(keeps, Ordering::Relaxed);
        self.pass_keeps_space(chain.as_deref());
    }

    fn grow(&self, size: u64) -> io::Result<Resized> {
        if self.options.read_only || !size.is_multiple_of(SECTOR) || size > i64::MAX as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let _control = lock(&self.control);
        // A closed image may belong to another host.
        let Some(chain) = lock(&self.chain).clone() else { return Ok(Resized::Same) };
        let image = chain.top().ok_or(io::ErrorKind::Unsupported)?;
        let from = self.size();
        if size <= from {
            return Ok(Resized::Same);
        }
        if chain.layers.get(1).is_some_and(|under| under.size() > from) {
            // New clusters would show its bytes.
            return Err(io::Error::other(
                "its backing image is longer, and the guest would see bytes of that",
            ));
        }
        // An attempt that failed before, to another size, goes on first.
        let mut to = from;
        while to < size {
            image.with_tables(|tables| tables.grow(size)).map_err(io::Error::other)?;
            to = blocking::run(image, Tables::grown)?;
            image.size.fetch_max(to, Ordering::Relaxed);
            self.size.fetch_max(to, Ordering::Relaxed);
        }
        Ok(Resized::Grown { from, to })
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        if self.is_of_other.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.write_back() {
            tracing::debug!(parent: &self.span, %error, "the image cannot be closed");
        }
    }
}
