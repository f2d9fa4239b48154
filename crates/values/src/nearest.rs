//! The word that a mistyped one stands for.

use strsim::{jaro, osa_distance};

/// The least similarity of a suggestion. `lst` and `list` have 0.92, `explode` and `remove` 0.64.
const SIMILARITY_MIN: f64 = 0.8;
/// The similarity of a word with one slip: a letter that is missing, wrong or too many, or two that are
/// exchanged. Short words have a lower one otherwise: `wbe` and `web` have 0.56.
const ONE_SLIP: f64 = 0.9;
/// The shortest word that suggests a longer one which has it as a part: `file` stands for `blk-file`.
const PART_BYTES_MIN: usize = 3;

/// Returns the one of `known` that `word` probably stands for: the only one with `word` between its dashes,
/// the most similar one, or the only one that has `word` as a part or is a part of it.
///
/// ```
/// use kickless_values::nearest;
///
/// let keys = ["blk-file", "blk-size", "bps", "socket-path"];
/// assert_eq!(nearest("socket_path", keys), Some("socket-path"));
/// assert_eq!(nearest("file", keys), Some("blk-file"));
/// assert_eq!(nearest("colour", keys), None);
/// ```
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let word = word.to_lowercase();
    let known: Vec<&str> = known.into_iter().filter(|known| !known.is_empty()).collect();
    let only = |is_meant: &dyn Fn(&str) -> bool| {
        let mut meant = known.iter().copied().filter(|known| is_meant(known));
        meant.next().filter(|_| meant.next().is_none())
    };
    if let Some(known) = only(&|known| known.split('-').any(|part| part == word)) {
        return Some(known);
    }
    let similarity = |known: &&str| similarity(&word, known);
    let best = known.iter().map(similarity).max_by(f64::total_cmp)?;
    if best >= SIMILARITY_MIN {
        // Of two words that are as similar as one another, none is more probable.
        return only(&|known| similarity(&known) == best);
    }
    let is_part = |part: &str, whole: &str| part.len() >= PART_BYTES_MIN && whole.contains(part);
    only(&|known| is_part(&word, known) || is_part(known, &word))
}

/// Returns the similarity of two words, from 0 to 1. Of words with the same part before a point, only the
/// rest counts: `device.explode` does not stand for `device.remove`.
fn similarity(word: &str, known: &str) -> f64 {
    let rests = word.split_once('.').zip(known.split_once('.')).filter(|((a, _), (b, _))| a == b);
    let (word, known) = rests.map_or((word, known), |((_, word), (_, known))| (word, known));
    match word.len() >= PART_BYTES_MIN && osa_distance(word, known) == 1 {
        true => jaro(word, known).max(ONE_SLIP),
        false => jaro(word, known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMANDS: [&str; 8] = ["blk", "net", "serve", "ctl", "metrics", "store", "top", "bench"];

    #[test]
    fn the_most_similar_word_is_suggested() {
        for (word, suggested) in [
            ("blkk", Some("blk")),
            ("serv", Some("serve")),
            ("srve", Some("serve")),
            ("benhc", Some("bench")),
            ("Metrics", Some("metrics")),
            ("metric", Some("metrics")),
            ("frobnicate", None),
            ("", None),
            ("b", None),
        ] {
            assert_eq!(nearest(word, COMMANDS), suggested, "{word}");
        }
        assert_eq!(nearest("serve", []), None);
        assert_eq!(nearest("wbe", ["db", "web"]), Some("web"));
        assert_eq!(nearest("web3", ["web1", "web2"]), None);
        let calls = ["device.list", "device.remove", "daemon.stop"];
        assert_eq!(nearest("device.lst", calls), Some("device.list"));
        assert_eq!(nearest("device.explode", calls), None);
    }

    #[test]
    fn a_part_of_several_words_suggests_none() {
        let keys = ["blk-file", "blk-size", "socket-path", "socket-mode", "time"];
        assert_eq!(nearest("file", keys), Some("blk-file"));
        assert_eq!(nearest("queues", ["queue-size", "num-queues"]), Some("num-queues"));
        assert_eq!(nearest("runtime", keys), Some("time"));
        assert_eq!(nearest("blk", keys), None);
        assert_eq!(nearest("socket", keys), None);
    }
}
