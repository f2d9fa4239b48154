//! The needed parts of librados and librbd, behind types that own their handles.
//!
//! The declarations are those of `rados/librados.h` and `rbd/librbd.h` of Ceph 16, the first version with all
//! of them. Every call except [`Image::submit`] may wait for the cluster, possibly for ever. Several threads
//! may use any handle at a time.
#![expect(unsafe_code, reason = "two libraries in C")]

use super::control::Control;
use super::in_flight::Submission;
use crate::offload::OffloadKind;
use libc::{c_char, c_int, c_void, size_t, ssize_t};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::io;
use std::ptr;
use std::sync::Arc;

/// `RBD_LOCK_MODE_EXCLUSIVE`.
const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: the zeroes take space.
const WRITE_ZEROES_THICK: c_int = 1;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`, of `rbd/features.h`.
const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// The largest number of owners of a lock, and of watchers of an image, in one list. Further watchers are not
/// seen.
const LISTED_MAX: usize = 64;
/// The largest id of an image, which has one or two dozen bytes, and the largest value of a setting.
const TEXT_BYTES_MAX: usize = 256;

type Completion = *mut c_void;

#[repr(C)]
struct ImageInfo {
    size: u64,
    obj_size: u64,
    num_objs: u64,
    op: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Watcher {
    addr: *mut c_char,
    id: i64,
    cookie: u64,
}

#[link(name = "rados")]
unsafe extern "C" {
    fn rados_create(cluster: *mut *mut c_void, id: *const c_char) -> c_int;
    fn rados_shutdown(cluster: *mut c_void);
    fn rados_conf_read_file(cluster: *mut c_void, path: *const c_char) -> c_int;
    fn rados_conf_set(cluster: *mut c_void, option: *const c_char, value: *const c_char) -> c_int;
    fn rados_conf_get(cluster: *mut c_void, option: *const c_char, value: *mut c_char, len: size_t) -> c_int;
    fn rados_connect(cluster: *mut c_void) -> c_int;
    fn rados_ioctx_create(cluster: *mut c_void, pool: *const c_char, io: *mut *mut c_void) -> c_int;
    fn rados_ioctx_destroy(io: *mut c_void);
    fn rados_ioctx_set_namespace(io: *mut c_void, namespace: *const c_char);
    fn rados_notify2(
        io: *mut c_void,
        object: *const c_char,
        message: *const c_char,
        len: c_int,
        timeout_ms: u64,
        reply: *mut *mut c_char,
        reply_len: *mut size_t,
    ) -> c_int;
}

#[link(name = "rbd")]
unsafe extern "C" {
    fn rbd_namespace_exists(io: *mut c_void, namespace: *const c_char, exists: *mut bool) -> c_int;
    fn rbd_open(
        io: *mut c_void,
        name: *const c_char,
        image: *mut *mut c_void,
        snapshot: *const c_char,
    ) -> c_int;
    fn rbd_open_read_only(
        io: *mut c_void,
        name: *const c_char,
        image: *mut *mut c_void,
        snapshot: *const c_char,
    ) -> c_int;
    fn rbd_close(image: *mut c_void) -> c_int;
    fn rbd_stat(image: *mut c_void, info: *mut ImageInfo, len: size_t) -> c_int;
    fn rbd_get_size(image: *mut c_void, size: *mut u64) -> c_int;
    fn rbd_get_features(image: *mut c_void, features: *mut u64) -> c_int;
    fn rbd_get_stripe_count(image: *mut c_void, count: *mut u64) -> c_int;
    fn rbd_get_id(image: *mut c_void, id: *mut c_char, len: size_t) -> c_int;
    fn rbd_is_exclusive_lock_owner(image: *mut c_void, owner: *mut c_int) -> c_int;
    fn rbd_lock_acquire(image: *mut c_void, mode: c_int) -> c_int;
    fn rbd_lock_release(image: *mut c_void) -> c_int;
    fn rbd_lock_get_owners(
        image: *mut c_void,
        mode: *mut c_int,
        owners: *mut *mut c_char,
        count: *mut size_t,
    ) -> c_int;
    fn rbd_lock_get_owners_cleanup(owners: *mut *mut c_char, count: size_t);
    fn rbd_watchers_list(image: *mut c_void, watchers: *mut Watcher, count: *mut size_t) -> c_int;
    fn rbd_watchers_list_cleanup(watchers: *mut Watcher, count: size_t);
    fn rbd_flush(image: *mut c_void) -> c_int;
    fn rbd_invalidate_cache(image: *mut c_void) -> c_int;
    fn rbd_update_watch(
        image: *mut c_void,
        handle: *mut u64,
        changed: extern "C" fn(*mut c_void),
        arg: *mut c_void,
    ) -> c_int;
    fn rbd_update_unwatch(image: *mut c_void, handle: u64) -> c_int;
    fn rbd_aio_create_completion(
        arg: *mut c_void,
        landed: extern "C" fn(Completion, *mut c_void),
        completion: *mut Completion,
    ) -> c_int;
    fn rbd_aio_get_return_value(completion: Completion) -> ssize_t;
    fn rbd_aio_release(completion: Completion);
    fn rbd_aio_read(
        image: *mut c_void,
        at: u64,
        len: size_t,
        into: *mut c_char,
        completion: Completion,
    ) -> c_int;
    fn rbd_aio_write(
        image: *mut c_void,
        at: u64,
        len: size_t,
        from: *const c_char,
        completion: Completion,
    ) -> c_int;
    fn rbd_aio_flush(image: *mut c_void, completion: Completion) -> c_int;
    fn rbd_aio_discard(image: *mut c_void, at: u64, len: u64, completion: Completion) -> c_int;
    fn rbd_aio_write_zeroes(
        image: *mut c_void,
        at: u64,
        len: size_t,
        completion: Completion,
        zero_flags: c_int,
        op_flags: c_int,
    ) -> c_int;
}

/// Converts the result of a call: a negative number is an error.
fn checked(returned: c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::from_raw_os_error(-returned)) } else { Ok(()) }
}

/// Returns the text that the library has stored.
fn text(bytes: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

fn or_null(text: Option<&CStr>) -> *const c_char {
    text.map_or(ptr::null(), CStr::as_ptr)
}

/// A client of a cluster, connected or not.
#[derive(Debug)]
pub(super) struct Cluster(*mut c_void);

// SAFETY:
// - on any thread: librados ties no handle to a thread (`librados.h`, "Thread safety": several threads may
//   make all calls).
unsafe impl Send for Cluster {}

impl Cluster {
    /// Makes a client of this name (without `client.`) with no configuration.
    pub(super) fn new(id: Option<&CStr>) -> io::Result<Self> {
        let mut cluster = ptr::null_mut();
        // SAFETY:
        // - pointers: to a place for the handle, and to a terminated text, or null, for which the library
        //   uses "admin".
        checked(unsafe { rados_create(&mut cluster, or_null(id)) })?;
        Ok(Self(cluster))
    }

    /// Reads a configuration file. `None` means the first one in Ceph's standard places.
    pub(super) fn read_conf(&self, path: Option<&CStr>) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped;
        // - text: terminated, or null.
        checked(unsafe { rados_conf_read_file(self.0, or_null(path)) })
    }

    /// Sets a value that the file could have set. Only before connecting.
    pub(super) fn set(&self, option: &CStr, value: &CStr) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped;
        // - texts: terminated.
        checked(unsafe { rados_conf_set(self.0, option.as_ptr(), value.as_ptr()) })
    }

    /// Returns the value of a setting, if it is not too long.
    pub(super) fn get(&self, option: &CStr) -> io::Result<String> {
        let mut value = [0u8; TEXT_BYTES_MAX];
        // SAFETY:
        // - handle: owned until it is dropped;
        // - texts: the name is terminated; the value has the given length, and is terminated within it.
        checked(unsafe { rados_conf_get(self.0, option.as_ptr(), value.as_mut_ptr().cast(), value.len()) })?;
        Ok(text(&value))
    }

    pub(super) fn connect(&self) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped.
        checked(unsafe { rados_connect(self.0) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY:
        // - handle: owned, and not used from now on; pools are dropped before their cluster.
        unsafe { rados_shutdown(self.0) }
    }
}

/// A pool, or a namespace of one.
#[derive(Debug)]
pub(super) struct Pool {
    io: *mut c_void,
    /// Dropped after the pool.
    _cluster: Cluster,
}

// SAFETY:
// - on any thread: as for a cluster.
unsafe impl Send for Pool {}
// SAFETY:
// - on several threads: `librados.h` allows all calls from several threads; setting the namespace takes `&mut
//   self`.
unsafe impl Sync for Pool {}

impl Pool {
    /// Opens a pool of a connected cluster.
    pub(super) fn open(cluster: Cluster, name: &CStr) -> io::Result<Self> {
        let mut io = ptr::null_mut();
        // SAFETY:
        // - handle: of a cluster that lives as long as the pool;
        // - pointers: to a terminated text, and a place for the handle.
        checked(unsafe { rados_ioctx_create(cluster.0, name.as_ptr(), &mut io) })?;
        Ok(Self { io, _cluster: cluster })
    }

    pub(super) fn has_namespace(&self, name: &CStr) -> io::Result<bool> {
        let mut exists = false;
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointers: to a terminated text, and a place for the answer.
        checked(unsafe { rbd_namespace_exists(self.io, name.as_ptr(), &mut exists) })?;
        Ok(exists)
    }

    pub(super) fn enter_namespace(&mut self, name: &CStr) {
        // SAFETY:
        // - handle: owned until it is dropped, and borrowed mutably here;
        // - text: terminated.
        unsafe { rados_ioctx_set_namespace(self.io, name.as_ptr()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY:
        // - handle: owned, and not used from now on; images are closed before their pool.
        unsafe { rados_ioctx_destroy(self.io) }
    }
}

/// The size and the layout of an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// The size in bytes.
    pub(super) size: u64,
    /// The bytes of an object.
    pub(super) object: u64,
    /// The number of objects over which a run of bytes is spread.
    pub(super) stripes: u64,
    /// The image has the exclusive-lock feature.
    pub(super) has_lock: bool,
}

/// An open image. Dropping it closes it, which waits for all operations in flight.
#[derive(Debug)]
pub(super) struct Image {
    image: *mut c_void,
    watch: Option<(u64, *const Control)>,
    pool: Pool,
}

// SAFETY:
// - on any thread: librbd ties no handle to a thread, and the watch points to a `Sync` object.
unsafe impl Send for Image {}
// SAFETY:
// - on several threads: librbd locks the shared state of an image; only `&mut self` and `drop` set and end
//   the watch.
unsafe impl Sync for Image {}

impl Image {
    /// Opens an image of a pool, or a snapshot of it, which is read-only.
    pub(super) fn open(
        pool: Pool,
        name: &CStr,
        snapshot: Option<&CStr>,
        read_only: bool,
    ) -> io::Result<Self> {
        let (mut image, snapshot) = (ptr::null_mut(), or_null(snapshot));
        let open = if read_only { rbd_open_read_only } else { rbd_open };
        // SAFETY:
        // - handle: of a pool that lives as long as the image;
        // - pointers: to terminated texts, or null for no snapshot, and a place for the handle.
        checked(unsafe { open(pool.io, name.as_ptr(), &mut image, snapshot) })?;
        Ok(Self { image, watch: None, pool })
    }

    /// Notifies the control whenever something about the image has changed, such as its size.
    pub(super) fn watch(&mut self, control: Arc<Control>) -> io::Result<()> {
        let (mut handle, control) = (0, Arc::into_raw(control));
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointers: to a place for the watch's handle, and to an object that is kept until the watch has
        //   ended.
        let watched =
            checked(unsafe { rbd_update_watch(self.image, &mut handle, changed, control.cast_mut().cast()) });
        if let Err(error) = watched {
            // SAFETY:
            // - origin: from `into_raw` above, and the library has not kept it.
            drop(unsafe { Arc::from_raw(control) });
            return Err(error);
        }
        self.watch = Some((handle, control));
        Ok(())
    }

    pub(super) fn shape(&self) -> io::Result<Shape> {
        let (mut info, mut stripes, mut features) = (
            ImageInfo {
                size: 0,
                obj_size: 0,
                num_objs: 0,
                op: 0,
                block_name_prefix: [0; 24],
                parent_pool: 0,
                parent_name: [0; 96],
            },
            0,
            0,
        );
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointers: to places of the types that the library writes, with the given length.
        unsafe {
            checked(rbd_stat(self.image, &mut info, size_of::<ImageInfo>()))?;
            checked(rbd_get_stripe_count(self.image, &mut stripes))?;
            checked(rbd_get_features(self.image, &mut features))?;
        }
        let has_lock = features & FEATURE_EXCLUSIVE_LOCK != 0;
        Ok(Shape { size: info.size, object: info.obj_size, stripes, has_lock })
    }

    /// Returns the current size in bytes.
    pub(super) fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointer: to a place for the size.
        checked(unsafe { rbd_get_size(self.image, &mut size) })?;
        Ok(size)
    }

    /// Returns the id that is unique in the cluster. Images of the old format have none.
    pub(super) fn id(&self) -> io::Result<String> {
        let mut id = [0u8; TEXT_BYTES_MAX];
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointer: to a buffer of the given length, within which the text is terminated.
        checked(unsafe { rbd_get_id(self.image, id.as_mut_ptr().cast(), id.len()) })?;
        Ok(text(&id))
    }

    pub(super) fn owns_lock(&self) -> io::Result<bool> {
        let mut owner = 0;
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointer: to a place for the answer.
        checked(unsafe { rbd_is_exclusive_lock_owner(self.image, &mut owner) })?;
        Ok(owner != 0)
    }

    /// Takes the lock and keeps it. A client that has the lock only by default loses it.
    pub(super) fn acquire_lock(&self) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped.
        checked(unsafe { rbd_lock_acquire(self.image, LOCK_MODE_EXCLUSIVE) })
    }

    pub(super) fn release_lock(&self) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped.
        checked(unsafe { rbd_lock_release(self.image) })
    }

    /// Returns the addresses of the clients that have the lock.
    pub(super) fn lock_owners(&self) -> io::Result<Vec<String>> {
        let (mut mode, mut owners, mut count) = (0, [ptr::null_mut(); LISTED_MAX], LISTED_MAX);
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointers: to places for the mode, and for the given number of texts.
        let listed = unsafe { rbd_lock_get_owners(self.image, &mut mode, owners.as_mut_ptr(), &mut count) };
        match listed {
            // No client has it.
            error if error == -libc::ENOENT => return Ok(Vec::new()),
            listed => checked(listed)?,
        }
        let count = count.min(owners.len());
        let found = owners[..count].iter().map(|&owner| {
            // SAFETY:
            // - text: the library has stored this many, each terminated, and they are not cleaned up yet.
            unsafe { CStr::from_ptr(owner) }.to_string_lossy().into_owned()
        });
        let found = found.collect();
        // SAFETY:
        // - texts: those of the call above, and they are not used any more.
        unsafe { rbd_lock_get_owners_cleanup(owners.as_mut_ptr(), count) }
        Ok(found)
    }

    /// Returns the addresses of the clients that have the image open, or had until a moment ago.
    pub(super) fn watchers(&self) -> io::Result<Vec<String>> {
        let none = Watcher { addr: ptr::null_mut(), id: 0, cookie: 0 };
        let (mut watchers, mut count) = ([none; LISTED_MAX], LISTED_MAX);
        // SAFETY:
        // - handle: owned until it is dropped;
        // - pointers: to places for the given number of watchers.
        checked(unsafe { rbd_watchers_list(self.image, watchers.as_mut_ptr(), &mut count) })?;
        let count = count.min(watchers.len());
        let found = watchers[..count].iter().map(|watcher| {
            // SAFETY:
            // - text: the library has stored this many, each terminated, and they are not cleaned up yet.
            unsafe { CStr::from_ptr(watcher.addr) }.to_string_lossy().into_owned()
        });
        let found = found.collect();
        // SAFETY:
        // - watchers: those of the call above, and their texts are not used any more.
        unsafe { rbd_watchers_list_cleanup(watchers.as_mut_ptr(), count) }
        Ok(found)
    }

    /// Notifies all clients that have the image open to read its header. Returns whether all of them answer
    /// in time.
    pub(super) fn all_answer(&self, header: &CStr, timeout_ms: u64) -> bool {
        let (io, none, no_len) = (self.pool.io, ptr::null_mut(), ptr::null_mut());
        // SAFETY:
        // - handle: of the pool, which lives as long as the image;
        // - pointers: to a terminated text; to no message; and null, because the answers themselves are not
        //   needed.
        checked(unsafe { rados_notify2(io, header.as_ptr(), ptr::null(), 0, timeout_ms, none, no_len) })
            .is_ok()
    }

    /// Writes all data to stable storage.
    pub(super) fn flush(&self) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped.
        checked(unsafe { rbd_flush(self.image) })
    }

    /// Discards all cached data.
    pub(super) fn invalidate_cache(&self) -> io::Result<()> {
        // SAFETY:
        // - handle: owned until it is dropped.
        checked(unsafe { rbd_invalidate_cache(self.image) })
    }

    /// Starts an operation on `len` bytes at `at`. A transfer uses the buffer of the submission.
    ///
    /// The submission completes once: on a thread of the library, or here if the operation cannot begin.
    pub(super) fn submit(&self, kind: OffloadKind, (at, len): (u64, u64), mut submission: Box<Submission>) {
        let bytes = match (kind, &mut submission.buffer) {
            (OffloadKind::Read | OffloadKind::Write { .. }, Some(buffer)) if buffer.len() as u64 >= len => {
                buffer.as_mut_ptr().cast()
            }
            (OffloadKind::Read | OffloadKind::Write { .. }, _) => {
                return submission.complete(-(Errno::INVAL.raw_os_error() as isize));
            }
            _ => ptr::null_mut(),
        };
        let (arg, mut completion) = (Box::into_raw(submission), ptr::null_mut());
        // SAFETY:
        // - pointers: to a function that accepts this argument, and a place for the handle.
        let made = unsafe { rbd_aio_create_completion(arg.cast(), landed, &mut completion) };
        let begun = if made < 0 { made } else { self.begin(kind, (at, len), bytes, completion) };
        if begun < 0 {
            if made >= 0 {
                // SAFETY:
                // - handle: made above; a call that fails at once has not kept it.
                unsafe { rbd_aio_release(completion) }
            }
            // SAFETY:
            // - origin: from `into_raw` above; the library does not complete an operation that has not begun.
            unsafe { Box::from_raw(arg) }.complete(begun as isize);
        }
    }

    fn begin(
        &self,
        kind: OffloadKind,
        (at, len): (u64, u64),
        bytes: *mut c_char,
        completion: Completion,
    ) -> c_int {
        let (image, size) = (self.image, len as size_t);
        // SAFETY:
        // - handles: the image is owned until it is dropped, which waits for all operations in flight; the
        //   completion is new;
        // - bytes: `len` of them in the buffer of the submission, which nothing else uses until it completes.
        unsafe {
            match kind {
                OffloadKind::Read => rbd_aio_read(image, at, size, bytes, completion),
                OffloadKind::Write { .. } => rbd_aio_write(image, at, size, bytes, completion),
                OffloadKind::Flush => rbd_aio_flush(image, completion),
                OffloadKind::Discard { .. } => rbd_aio_discard(image, at, len, completion),
                OffloadKind::Zeroes { unmap, .. } => {
                    let flags = if unmap { 0 } else { WRITE_ZEROES_THICK };
                    rbd_aio_write_zeroes(image, at, size, completion, flags, 0)
                }
            }
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some((handle, control)) = self.watch.take() {
            // SAFETY:
            // - handles: owned, and the watch belongs to this image;
            // - order: after this call, the library makes no more callbacks, so their argument can be
            //   dropped.
            unsafe {
                rbd_update_unwatch(self.image, handle);
                drop(Arc::from_raw(control));
            }
        }
        // SAFETY:
        // - handle: owned, and not used from now on.
        unsafe { rbd_close(self.image) };
    }
}

/// Handles the completion of an operation.
extern "C" fn landed(completion: Completion, arg: *mut c_void) {
    // SAFETY:
    // - handle: of a completed operation, not used after this;
    // - origin: the argument was the box of a submission, and the library calls once for each.
    let (returned, submission) = unsafe {
        let returned = rbd_aio_get_return_value(completion);
        rbd_aio_release(completion);
        (returned, Box::from_raw(arg.cast::<Submission>()))
    };
    submission.complete(returned);
}

/// Handles a change of an image.
extern "C" fn changed(arg: *mut c_void) {
    // SAFETY:
    // - origin: the object that the watch was made with, which is kept until the watch has ended.
    unsafe { &*arg.cast::<Control>() }.image_changed();
}

/// Converts a text for the libraries, which end texts at a byte 0. The parser of names allows no such byte.
pub(super) fn c_text(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(io::Error::other)
}
