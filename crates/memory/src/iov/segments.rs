//! An array of segments that needs no memory of its own while it is short.

/// Segments that are stored without an allocation. Data of 4 KiB is one segment, or two if it is not aligned
/// to a page and its pages are apart. More would have to be copied each time that an operation is moved.
const INLINE: usize = 2;

/// Segments whose memory is kept for the next request. A longer array gives the rest back.
const KEPT_MAX: usize = 256;

/// The segments of an [`Iov`](super::Iov).
#[derive(Debug)]
pub(super) enum Segments {
    /// The first `count` of these.
    Inline { segments: [libc::iovec; INLINE], count: usize },
    /// All of these. A request that needed the memory leaves it to the next one.
    Heap(Vec<libc::iovec>),
}

impl Default for Segments {
    fn default() -> Self {
        Self::Inline { segments: [EMPTY; INLINE], count: 0 }
    }
}

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

impl Segments {
    #[inline]
    pub(super) fn as_slice(&self) -> &[libc::iovec] {
        match self {
            // `count` never exceeds the length.
            Self::Inline { segments, count } => segments.get(..*count).unwrap_or_default(),
            Self::Heap(segments) => segments,
        }
    }

    #[inline]
    pub(super) fn as_mut_slice(&mut self) -> &mut [libc::iovec] {
        match self {
            Self::Inline { segments, count } => segments.get_mut(..*count).unwrap_or_default(),
            Self::Heap(segments) => segments,
        }
    }

    /// Returns `true` only if there are no segments; it may also return `false` then.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Inline { count: 0, .. })
    }

    #[inline]
    pub(super) fn push(&mut self, segment: libc::iovec) {
        if let Self::Inline { segments, count } = self
            && let Some(free) = segments.get_mut(*count)
        {
            *free = segment;
            *count += 1;
        } else {
            self.push_on_heap(segment);
        }
    }

    #[inline(never)]
    fn push_on_heap(&mut self, segment: libc::iovec) {
        match self {
            Self::Heap(segments) => segments.push(segment),
            Self::Inline { .. } => {
                let mut segments = Vec::with_capacity(2 * INLINE);
                segments.extend_from_slice(self.as_slice());
                segments.push(segment);
                *self = Self::Heap(segments);
            }
        }
    }

    /// Removes all segments.
    #[inline]
    pub(super) fn clear(&mut self) {
        match self {
            Self::Inline { count, .. } => *count = 0,
            Self::Heap(segments) => {
                segments.clear();
                segments.shrink_to(KEPT_MAX);
            }
        }
    }

    /// Returns the number of segments that fit without an allocation.
    pub(super) fn capacity(&self) -> usize {
        match self {
            Self::Inline { .. } => INLINE,
            Self::Heap(segments) => segments.capacity(),
        }
    }

    /// Frees memory that neither this many segments nor the present ones need.
    pub(super) fn shrink_to(&mut self, capacity: usize) {
        if let Self::Heap(segments) = self {
            segments.shrink_to(capacity);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(number: usize) -> libc::iovec {
        libc::iovec { iov_base: std::ptr::without_provenance_mut(number), iov_len: number }
    }

    fn lens(segments: &Segments) -> Vec<usize> {
        segments.as_slice().iter().map(|segment| segment.iov_len).collect()
    }

    #[test]
    fn more_segments_than_fit_inline_stay_in_order() {
        let mut segments = Segments::default();
        for number in 1..=2 * INLINE {
            segments.push(segment(number));
            assert_eq!(lens(&segments), (1..=number).collect::<Vec<_>>());
            assert_eq!(matches!(segments, Segments::Inline { .. }), number <= INLINE);
        }
        segments.clear();
        assert_eq!((lens(&segments), segments.is_empty()), (vec![], false));
        // The memory is left to the next request.
        assert!(segments.capacity() >= 2 * INLINE);
        segments.push(segment(7));
        segments.as_mut_slice()[0].iov_len += 1;
        assert_eq!(lens(&segments), [8]);
    }

    #[test]
    fn long_arrays_give_memory_back() {
        let mut segments = Segments::default();
        (0..4 * KEPT_MAX).for_each(|number| segments.push(segment(number)));
        segments.clear();
        assert!(segments.capacity() <= KEPT_MAX);
        segments.shrink_to(1);
        assert!(segments.capacity() <= INLINE);
    }
}
