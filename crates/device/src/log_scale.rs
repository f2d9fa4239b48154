//! Buckets of a logarithmic scale.

/// A scale of numbers with buckets that are parts of an octave. It has one more bucket for numbers below
/// 2^`FIRST`, and one for 2^`END` and more. An octave has 2^`SUB_BITS` buckets; `FIRST` is not less than
/// `SUB_BITS`.
#[derive(Debug)]
pub struct LogScale<const FIRST: u32, const END: u32, const SUB_BITS: u32>;

impl<const FIRST: u32, const END: u32, const SUB_BITS: u32> LogScale<FIRST, END, SUB_BITS> {
    /// The number of buckets.
    pub const BUCKETS: usize = 2 + ((END - FIRST) << SUB_BITS) as usize;

    /// Returns the bucket of a number.
    pub fn bucket(number: u64) -> usize {
        if number < 1 << FIRST {
            return 0;
        }
        let octave = number.ilog2();
        if octave >= END {
            return Self::BUCKETS - 1;
        }
        let sub = (number >> (octave - SUB_BITS)) as usize & ((1 << SUB_BITS) - 1);
        1 + ((octave - FIRST) << SUB_BITS) as usize + sub
    }

    /// Returns the least number of a bucket. The last bucket has no end.
    pub fn start(bucket: usize) -> u64 {
        let Some(place) = bucket.checked_sub(1) else { return 0 };
        let (octave, sub) = (place >> SUB_BITS, place & ((1 << SUB_BITS) - 1));
        (((1 << SUB_BITS) + sub) as u64) << octave << (FIRST - SUB_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<const FIRST: u32, const END: u32, const SUB_BITS: u32>() {
        let start = LogScale::<FIRST, END, SUB_BITS>::start;
        let bucket = LogScale::<FIRST, END, SUB_BITS>::bucket;
        let last = LogScale::<FIRST, END, SUB_BITS>::BUCKETS - 1;
        assert_eq!((start(0), start(1), start(last)), (0, 1 << FIRST, 1 << END));
        for number in 0..last {
            assert!(start(number) < start(number + 1));
            assert_eq!([start(number), start(number + 1) - 1].map(bucket), [number; 2]);
        }
        assert_eq!([start(last), u64::MAX].map(bucket), [last; 2]);
    }

    #[test]
    fn buckets_cover_everything_in_order() {
        check::<9, 21, 2>();
        check::<8, 34, 3>();
        check::<3, 4, 3>();
        check::<0, 63, 0>();
    }
}
