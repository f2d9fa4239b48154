//! An error as one sentence.

use std::error::Error;

/// Writes `error` and its causes on one line. Leaves out a cause that the text before it already contains.
pub fn sentence(error: &(dyn Error + 'static)) -> String {
    let mut said = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !said.contains(&text) {
            said = format!("{said}: {text}");
        }
        next = cause.source();
    }
    said.replace('\n', " ")
}
