//! The files that an engine may use.

use std::fs::File;
use std::sync::Arc;

/// A file registered with one engine. Means nothing to another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    index: u32,
    /// Tells a file from the one that had its place before.
    generation: u32,
}

#[derive(Debug, Default)]
struct Entry {
    file: Option<Arc<File>>,
    generation: u32,
    in_flight: u32,
    /// Unregistered; goes when nothing is in flight.
    closing: bool,
    /// The kernel knows it by this index too.
    fixed: bool,
    /// Its transfers go by kernel AIO.
    aio: bool,
    /// Its transfers are merged.
    merge: bool,
}

/// Which file an operation in flight holds open; `None` for one that had been unregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held(Option<u32>);

/// What to tell the kernel about a file that is no longer used.
pub(crate) struct Gone {
    pub(crate) index: u32,
    pub(crate) fixed: bool,
}

/// A table of files. A place is free again when its file is unregistered and its last operation is over.
#[derive(Debug, Default)]
pub(crate) struct Files {
    entries: Vec<Entry>,
}

impl Files {
    /// Takes the file; its identity and its place.
    pub(crate) fn insert(&mut self, file: Arc<File>) -> (FileId, u32) {
        let place = self.entries.iter().position(|e| e.file.is_none()).unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.entries.len() - 1
        });
        let entry = &mut self.entries[place];
        *entry = Entry { file: Some(file), generation: entry.generation.wrapping_add(1), ..Entry::default() };
        let index = place as u32;
        (FileId { index, generation: entry.generation }, index)
    }

    pub(crate) fn set_fixed(&mut self, index: u32) {
        self.entries[index as usize].fixed = true;
    }

    pub(crate) fn set_aio(&mut self, index: u32) {
        self.entries[index as usize].aio = true;
    }

    /// Whether transfers of this file are merged from now on.
    pub(crate) fn set_merge(&mut self, id: FileId, merge: bool) {
        if let Some(entry) = self.find(id) {
            entry.merge = merge;
        }
    }

    /// Whether transfers of the file that an operation holds are merged.
    #[inline]
    pub(crate) fn merges(&self, held: Held) -> bool {
        held.0.is_some_and(|index| self.entries[index as usize].merge)
    }

    /// Whether transfers of the file that an operation holds go by kernel AIO.
    #[inline]
    pub(crate) fn is_aio(&self, held: Held) -> bool {
        held.0.is_some_and(|index| self.entries[index as usize].aio)
    }

    /// Whether transfers of this file go by kernel AIO; not those of one that is not here.
    pub(crate) fn is_aio_file(&mut self, id: FileId) -> bool {
        self.find(id).is_some_and(|entry| entry.aio)
    }

    fn find(&mut self, id: FileId) -> Option<&mut Entry> {
        self.entries.get_mut(id.index as usize).filter(|e| e.generation == id.generation && !e.closing)
    }

    /// The file goes as soon as nothing of it is in flight; what went at once.
    pub(crate) fn remove(&mut self, id: FileId) -> Option<Gone> {
        self.find(id)?.closing = true;
        self.settle(id.index)
    }

    /// One more operation in flight.
    #[inline]
    pub(crate) fn hold(&mut self, id: FileId) -> Held {
        Held(self.find(id).map(|entry| {
            entry.in_flight += 1;
            id.index
        }))
    }

    /// One operation fewer; the file that went with it.
    #[inline]
    pub(crate) fn release(&mut self, held: Held) -> Option<Gone> {
        let index = held.0?;
        let entry = &mut self.entries[index as usize];
        entry.in_flight -= 1;
        if entry.closing { self.settle(index) } else { None }
    }

    fn settle(&mut self, index: u32) -> Option<Gone> {
        let entry = &mut self.entries[index as usize];
        if entry.in_flight > 0 {
            return None;
        }
        entry.file = None;
        Some(Gone { index, fixed: entry.fixed })
    }

    /// The file that an operation holds, its place, and whether the kernel knows it by that.
    #[inline]
    pub(crate) fn get(&self, held: Held) -> Option<(&Arc<File>, u32, bool)> {
        let index = held.0?;
        let entry = &self.entries[index as usize];
        entry.file.as_ref().map(|file| (file, index, entry.fixed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_outlives_its_registration_while_in_flight() {
        let file = Arc::new(File::open("/dev/null").unwrap());
        let mut files = Files::default();
        let (id, _) = files.insert(file.clone());
        let held = files.hold(id);
        assert!(files.remove(id).is_none());
        assert!(files.remove(id).is_none());
        assert!(files.get(held).is_some());
        let stale = files.hold(id);
        assert!(files.get(stale).is_none());
        assert_eq!(Arc::strong_count(&file), 2);
        assert!(files.release(held).is_some());
        assert_eq!(Arc::strong_count(&file), 1);

        let (next, index) = files.insert(file);
        assert_eq!(index, 0);
        assert_ne!(next, id);
        let stale = files.hold(id);
        assert!(files.get(stale).is_none());
    }
}
