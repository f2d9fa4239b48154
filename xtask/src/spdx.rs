//! Evaluates SPDX licence expressions, such as `MIT OR (Apache-2.0 AND ISC)`.

/// Returns whether licences that `allowed` accepts satisfy `expression`. Returns false if `expression`
/// cannot be read.
pub(crate) fn satisfied(expression: &str, allowed: impl Fn(&str) -> bool) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    // Older packages use Cargo's own notation.
    let spaced = spaced.replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Reader { words: &words, allowed: &allowed };
    reader.any() == Some(true) && reader.words.is_empty()
}

/// Reads words from the front of an expression. Its methods return `None` for an invalid expression.
struct Reader<'a> {
    words: &'a [&'a str],
    allowed: &'a dyn Fn(&str) -> bool,
}

impl Reader<'_> {
    fn take(&mut self, word: &str) -> bool {
        let found = self.words.first() == Some(&word);
        if found {
            self.words = &self.words[1..];
        }
        found
    }

    fn any(&mut self) -> Option<bool> {
        let mut one = self.all()?;
        while self.take("OR") {
            one |= self.all()?;
        }
        Some(one)
    }

    fn all(&mut self) -> Option<bool> {
        let mut every = self.one()?;
        while self.take("AND") {
            every &= self.one()?;
        }
        Some(every)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let inner = self.any()?;
            return self.take(")").then_some(inner);
        }
        let (licence, rest) = self.words.split_first()?;
        self.words = rest;
        if [")", "OR", "AND", "WITH"].contains(licence) {
            return None;
        }
        if self.take("WITH") {
            let (exception, rest) = self.words.split_first()?;
            self.words = rest;
            return Some((self.allowed)(&format!("{licence} WITH {exception}")));
        }
        Some((self.allowed)(licence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_evaluated() {
        let allowed = |name: &str| ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].contains(&name);
        for good in [
            "MIT",
            "MIT/GPL-2.0",
            "GPL-2.0 OR MIT",
            "(GPL-2.0 OR MIT) AND ISC",
            "Apache-2.0 WITH LLVM-exception",
            "Apache-2.0 OR (MIT AND (ISC))",
        ] {
            assert!(satisfied(good, allowed), "{good}");
        }
        for bad in [
            "",
            "GPL-2.0",
            "MIT AND GPL-2.0",
            "Apache-2.0",
            "MIT OR",
            "(MIT",
            "MIT)",
            "MIT ISC",
            "AND",
            "MIT WITH",
        ] {
            assert!(!satisfied(bad, allowed), "{bad}");
        }
    }
}
