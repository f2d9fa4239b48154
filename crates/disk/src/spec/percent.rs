//! Percent-encoding (RFC 3986, section 2.1).

/// Decodes a text. Returns `None` if a percent sign is not followed by two digits, or the bytes are not
/// UTF-8.
pub(super) fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
                (digit()? << 4 | digit()?) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}
