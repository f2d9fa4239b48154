//! The lengths of the data that a driver has room for, and those that a command has (virtio 1.3, section
//! 5.6.6.1).

use crate::command::Data;
use crate::number::at_most_u32;
use kickless_spec::scsi::{S_FAILURE, S_OVERRUN};

/// The lengths of the data buffers of a request, without its headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Bytes that the device may read.
    pub data_out: u64,
    /// Bytes that the device may write.
    pub data_in: u64,
}

/// The reason why the lengths of a request are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LengthError {
    /// There are data in both directions. The device does not offer INOUT.
    #[error("the request has data in both directions")]
    Bidirectional,
    /// The command has more data than the buffers.
    #[error("the command has more data than the buffers of the request")]
    Overrun,
}

impl LengthError {
    /// Returns the response, one of `S_*`.
    pub fn response(self) -> u8 {
        match self {
            Self::Bidirectional => S_FAILURE,
            Self::Overrun => S_OVERRUN,
        }
    }
}

impl Buffers {
    /// Checks that there are data in one direction at most. The device does this before it looks at the
    /// command.
    ///
    /// # Errors
    /// [`LengthError::Bidirectional`].
    #[inline]
    pub fn check_direction(self) -> Result<(), LengthError> {
        match self {
            Self { data_out: 1.., data_in: 1.. } => Err(LengthError::Bidirectional),
            _ => Ok(()),
        }
    }

    /// Checks that the data of a command fit into the buffers. Longer buffers are no error, and leave a
    /// [`residual`](Self::residual). An answer is checked when its length is known
    /// ([`check_answer`](Self::check_answer)).
    ///
    /// # Errors
    /// [`LengthError::Overrun`].
    #[inline]
    pub fn check(self, data: Data) -> Result<(), LengthError> {
        let fits = match data {
            Data::Out(len) => len <= self.data_out,
            Data::In(len) => len <= self.data_in,
            Data::None | Data::Answer(_) => true,
        };
        if fits { Ok(()) } else { Err(LengthError::Overrun) }
    }

    /// Checks that an answer of `len` bytes, which is cut to the allocation length already, fits.
    ///
    /// An allocation length that is longer than the buffer is no error if the answer is not.
    ///
    /// # Errors
    /// [`LengthError::Overrun`].
    pub fn check_answer(self, len: usize) -> Result<(), LengthError> {
        self.check(Data::In(len as u64))
    }

    /// Returns the residual of a response after this many bytes were transferred.
    #[inline]
    pub fn residual(self, transferred: u64) -> u32 {
        at_most_u32(self.data_out.saturating_add(self.data_in).saturating_sub(transferred))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_are_refused() {
        for (data_out, data_in) in [(0, 0), (u64::MAX, 0), (0, u64::MAX)] {
            assert_eq!(Buffers { data_out, data_in }.check_direction(), Ok(()));
        }
        let error = Buffers { data_out: 1, data_in: 1 }.check_direction().unwrap_err();
        assert_eq!((error, error.response()), (LengthError::Bidirectional, S_FAILURE));
    }

    #[test]
    fn data_fit_into_their_buffers() {
        let out = Buffers { data_out: 512, data_in: 0 };
        let both =
            |data| (out.check(data).is_ok(), Buffers { data_out: 0, data_in: 512 }.check(data).is_ok());
        assert_eq!(both(Data::None), (true, true));
        assert_eq!(both(Data::Out(512)), (true, false));
        assert_eq!(both(Data::In(512)), (false, true));
        assert_eq!(both(Data::In(513)), (false, false));
        assert_eq!(both(Data::Out(u64::MAX)), (false, false));
        // Buffers of the wrong direction are no error if there are no data.
        assert_eq!((both(Data::In(0)), both(Data::Out(0))), ((true, true), (true, true)));
        // An answer is as long as it is, and not as long as it might be.
        assert_eq!(both(Data::Answer(u32::MAX)), (true, true));
        assert_eq!(out.check_answer(1).map_err(LengthError::response), Err(S_OVERRUN));
    }

    #[test]
    fn residuals() {
        assert_eq!(Buffers { data_out: 0, data_in: 255 }.residual(36), 219);
        assert_eq!(Buffers { data_out: 512, data_in: 0 }.residual(512), 0);
        assert_eq!(Buffers { data_out: 512, data_in: 0 }.residual(1024), 0);
        assert_eq!(Buffers { data_out: u64::MAX, data_in: 1 }.residual(0), u32::MAX);
    }
}
