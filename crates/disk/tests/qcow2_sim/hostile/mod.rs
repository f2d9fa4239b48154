//! Runs real requests on images whose bytes are hostile, for a fuzz target and a test.
//!
//! An input makes an image ([`image`]) and a script of requests ([`script`]). The requests go through a whole
//! disk, and an engine ([`engine`]) that completes operations when the script says so, or fails them. Each
//! image is refused, or each request ends. The file stays as long as an image of its size may be. The part of
//! the header that names other files stays as it is. An image that was sound stays sound.
#![allow(clippy::expect_used, clippy::panic, reason = "a fault that a run finds is a panic")]

mod engine;
mod image;
pub(in super::super) mod script;

/// The bytes of an input. Behind its end are zeroes.
#[derive(Debug)]
pub(super) struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    /// Returns a number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        let number = match end {
            0..=256 => u64::from(self.byte()),
            _ => u64::from(self.byte()) << 8 | u64::from(self.byte()),
        };
        number % end
    }

    fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }
}

#[cfg(test)]
mod tests {
    use super::script::requests;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    /// `KICKLESS_HOSTILE` is the number of inputs, `KICKLESS_SEED` the first one.
    #[test]
    fn requests_on_hostile_images_end() {
        let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
        let (first, count) = (number("KICKLESS_SEED", 0), number("KICKLESS_HOSTILE", 1000));
        let files = [kickless_testing::memfd(0), kickless_testing::memfd(0)];
        let [disk, below] =
            files.each_ref().map(|file| PathBuf::from("/proc/self/fd").join(file.as_raw_fd().to_string()));
        let memory = kickless_testing::guest_memory(super::script::MEMORY_BYTES, 0);
        let (mut opened, mut failed) = (0, 0);
        for seed in first..first + count {
            let mut rng = fastrand::Rng::with_seed(seed);
            let input: Vec<u8> = (0..rng.usize(20..400)).map(|_| rng.u8(..)).collect();
            let seen = std::panic::catch_unwind(|| requests(&memory, [&disk, &below], &input));
            let Ok(seen) = seen else { panic!("seed {seed}") };
            opened += u64::from(seen.is_opened);
            failed += seen.failed;
        }
        println!("{opened} of {count} images are opened, {failed} requests fail");
        assert!(opened > count / 4 && failed > count / 10);
    }
}
