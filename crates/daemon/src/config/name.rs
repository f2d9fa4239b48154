//! The names of devices.

/// Limits the length of names, because each log line about a device contains its name.
const NAME_BYTES_MAX: usize = 64;

/// Parses the name of a device.
///
/// # Errors
/// The name is invalid. The error is the end of a sentence and tells which names are valid.
pub fn parse_device_name(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:@".contains(&byte);
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.bytes().all(allowed) {
        return Err(format!("it must be 1 to {NAME_BYTES_MAX} letters, digits and . _ - : @"));
    }
    Ok(text.into())
}
