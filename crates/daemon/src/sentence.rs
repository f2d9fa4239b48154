//! Shows an error as one sentence.

use std::error::Error;

/// Returns `error` and its causes on one line. Leaves out a cause that the text before it already contains.
pub fn sentence(error: &(dyn Error + 'static)) -> String {
    let mut sentence = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !sentence.contains(&text) {
            sentence = format!("{sentence}: {text}");
        }
        next = cause.source();
    }
    sentence.replace('\n', " ")
}
