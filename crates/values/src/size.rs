//! Sizes in bytes with an optional unit: `512`, `64K`, `1.5GiB`.

/// Parses a number of bytes: digits, an optional fraction, and an optional unit.
///
/// The units are `B`, `K`, `M`, `G`, `T`, `P` and `E`, alone or as `KiB` and so on, in upper or lower case.
/// Each is a power of 1024.
///
/// # Errors
/// The reason why `text` is not a size, as the end of a sentence.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bytes = parse_any_size(text)?;
    bytes.ok_or_else(|| format!("{text:?} is too large: it must be below 16E"))
}

/// Parses a number of bytes from `min` to `max`, as [`parse_size`] does.
///
/// # Errors
/// The reason why `text` is not such a size, as the end of a sentence.
pub fn parse_size_within(text: &str, min: u64, max: u64) -> Result<u64, String> {
    let bytes = parse_any_size(text)?.filter(|bytes| (min..=max).contains(bytes));
    bytes.ok_or_else(|| format!("it must be from {} to {}", format_size(min), format_size(max)))
}

/// Parses a number of bytes, as [`parse_size`] does. Returns `None` for one that does not fit into 64 bits,
/// for a caller whose sentence has a lower maximum.
///
/// # Errors
/// The reason why `text` is not a size, as the end of a sentence.
pub fn parse_any_size(text: &str) -> Result<Option<u64>, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit_bytes(unit).ok_or_else(|| match decimal_prefix(unit).filter(|_| !number.is_empty()) {
        Some(prefix) => format!("{unit:?} is not a unit: write {number}{prefix}, in units of 1024"),
        None if number.is_empty() => format!("{text:?} is not a size (write it like 64G)"),
        None => format!("{unit:?} is not a unit (use K, M, G or T)"),
    })?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(format!("{text:?} is not a size (write it like 64G)"));
    }
    let Ok(whole) = whole.parse::<u128>() else { return Ok(None) };
    // With at most 18 digits, `parts * unit` is below 2^120: the largest unit is 2^60.
    let fraction = fraction.trim_end_matches('0');
    let scale = 10u128.checked_pow(fraction.len() as u32).filter(|_| fraction.len() <= 18);
    let parts = if fraction.is_empty() { Some(0) } else { fraction.parse::<u128>().ok() };
    let (Some(scale), Some(parts)) = (scale, parts) else {
        return Err(format!("{text:?} has too many digits after the point"));
    };
    if !(parts * unit).is_multiple_of(scale) {
        return Err(format!("{text:?} is not a whole number of bytes"));
    }
    let bytes = whole.checked_mul(unit).and_then(|bytes| bytes.checked_add(parts * unit / scale));
    Ok(bytes.and_then(|bytes| u64::try_from(bytes).ok()))
}

/// Returns the prefix of a decimal unit, such as that of `MB`.
fn decimal_prefix(unit: &str) -> Option<char> {
    match unit.as_bytes() {
        [prefix @ (b'k' | b'K' | b'M' | b'G' | b'T' | b'P' | b'E'), b'B' | b'b'] => {
            Some(prefix.to_ascii_uppercase().into())
        }
        _ => None,
    }
}

/// Returns a number of bytes as [`parse_size`] reads it, in the largest unit that divides it.
pub fn format_size(bytes: u64) -> String {
    let power = if bytes == 0 { 0 } else { bytes.trailing_zeros() / 10 };
    let unit = ["", "K", "M", "G", "T", "P", "E"].get(power as usize).copied().unwrap_or_default();
    format!("{}{unit}", bytes >> (10 * power))
}

/// Returns the number of bytes in `unit`.
fn unit_bytes(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_uppercase();
    let power = match unit.as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 1,
        "M" | "MIB" => 2,
        "G" | "GIB" => 3,
        "T" | "TIB" => 4,
        "P" | "PIB" => 5,
        "E" | "EIB" => 6,
        _ => return None,
    };
    Some(1 << (10 * power))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];

    #[test]
    fn parses_every_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("64k", 64 << 10),
            ("64KiB", 64 << 10),
            ("1.5G", 3 << 29),
            ("1.50gib", 3 << 29),
            ("2T", 2 << 40),
            ("0.000000000000000000E", 0),
            ("15E", 15 << 60),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn writes_the_largest_unit() {
        for (bytes, text) in [(0, "0"), (512, "512"), (1536, "1536"), (64 << 10, "64K"), (16 << 30, "16G")] {
            assert_eq!(format_size(bytes), text);
        }
        assert_eq!(format_size(15 << 60), "15E");
    }

    #[test]
    fn refuses_other_text() {
        for text in [
            "", "G", ".5G", "5.", "1.2.3G", "-1", "+1", "1 G", "1KB", "1X", "16E", "0.3K", "0x10", "1e3", "٣",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert!(parse_size(&"9".repeat(100)).is_err());
        assert!(parse_size(&format!("0.{}", "1".repeat(100))).is_err());
    }

    #[test]
    fn a_refusal_says_the_right_form() {
        for (text, why) in [
            ("64E", "\"64E\" is too large: it must be below 16E"),
            ("100MB", "\"MB\" is not a unit: write 100M, in units of 1024"),
            ("1kb", "\"kb\" is not a unit: write 1K, in units of 1024"),
            ("MB", "\"MB\" is not a size (write it like 64G)"),
            ("5X", "\"X\" is not a unit (use K, M, G or T)"),
        ] {
            assert_eq!(parse_size(text), Err(why.into()));
        }
    }

    #[test]
    fn a_size_within_bounds() {
        let within = |text| parse_size_within(text, 64 << 10, 64 << 30);
        assert_eq!((within("64K"), within("64G")), (Ok(64 << 10), Ok(64 << 30)));
        for text in ["0", "63K", "65G", "64E"] {
            assert_eq!(within(text), Err("it must be from 64K to 64G".into()), "{text}");
        }
        assert!(within("1X").unwrap_err().contains("not a unit"));
    }

    proptest! {
        #[test]
        fn every_whole_number_of_units(n in any::<u64>(), unit in 0..UNITS.len()) {
            let n = n >> (10 * unit);
            let bytes = n << (10 * unit);
            prop_assert_eq!(parse_size(&format!("{}{}", n, UNITS[unit])), Ok(bytes));
            prop_assert_eq!(parse_size(&format!("{}.0{}", n, UNITS[unit].to_lowercase())), Ok(bytes));
        }

        #[test]
        fn what_is_written_is_read(bytes: u64, zeros in 0..64) {
            for bytes in [bytes, bytes >> zeros, bytes & u64::MAX << zeros] {
                prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
            }
        }

        #[test]
        fn every_number_of_bytes_in_kibibytes(bytes in 0..1u64 << 53) {
            // 1/1024 has ten digits after the point.
            let text = format!("{}.{:010}K", bytes >> 10, (bytes & 1023) * 10_000_000_000 / 1024);
            prop_assert_eq!(parse_size(&text), Ok(bytes));
        }

        #[test]
        fn never_panics(text in "\\PC{0,40}", digits in "[0-9.]{0,50}[kKmMgGtTpPeEiIbB]{0,3}") {
            let _ = parse_size(&text);
            let _ = parse_size(&digits);
        }
    }
}
