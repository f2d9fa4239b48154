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
    number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
        let bounds = format!("it must be a number from {min} to {max}");
        match without_unit(text).filter(|number| (min..=max).contains(number)) {
            Some(number) => format!("{bounds}, without a unit: write {number}"),
            None => bounds,
        }
    })
}

/// Returns the number that somebody means who writes a unit of thousands after it, such as `5k`.
fn without_unit(text: &str) -> Option<u32> {
    let thousand = match text.chars().next_back()? {
        'k' | 'K' => 1_000,
        'm' | 'M' => 1_000_000,
        'g' | 'G' => 1_000_000_000,
        _ => return None,
    };
    text[..text.len() - 1].parse::<u32>().ok()?.checked_mul(thousand)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_with_a_unit_is_refused_with_the_number() {
        let refused = |text| parse_number::<u32>(text, 1, u32::MAX).unwrap_err();
        assert_eq!(refused("5k"), "it must be a number from 1 to 4294967295, without a unit: write 5000");
        for text in ["", "k", "0k", "9G", "5kk", "+5", "-1", "5 ", "five", "\u{663}k", "k\u{e9}"] {
            assert_eq!(refused(text), "it must be a number from 1 to 4294967295", "{text}");
        }
        assert_eq!(parse_number("5000", 1, 9000), Ok(5000u16));
    }
}
