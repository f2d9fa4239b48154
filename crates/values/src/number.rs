//! Numbers within bounds.

/// The largest size of a virtqueue (virtio 1.3, section 2.7).
pub const QUEUE_SIZE_MAX: u16 = 32768;

/// Parses a decimal number from `min` to `max`, without a sign.
///
/// # Errors
/// The bounds, as the end of a sentence.
pub fn parse_number<T: TryFrom<u32>>(text: &str, min: u32, max: u32) -> Result<T, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && (min..=max).contains(number));
    number
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| format!("it must be a number from {min} to {max}"))
}

/// Parses the size of a virtqueue: a power of two.
///
/// # Errors
/// The bounds, as the end of a sentence.
pub fn parse_queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(size) if size.is_power_of_two() && size <= QUEUE_SIZE_MAX => Ok(size),
        _ => Err(format!("it must be a power of two from 1 to {QUEUE_SIZE_MAX}")),
    }
}
