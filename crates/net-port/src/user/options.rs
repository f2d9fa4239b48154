//! The options of passt, as an operator writes them behind `user,`.

use std::fmt;
use std::str::FromStr;

/// Options of passt that this program chooses itself, or that would end it at once.
const REFUSED: [&str; 9] =
    ["fd", "socket", "foreground", "one-off", "help", "version", "pid", "quiet", "daemon"];
/// Their letters.
const REFUSED_LETTERS: &[u8] = b"Fsf1hPq";
/// The letters of the others that have no value. Further letters can follow them in one option.
const FLAG_LETTERS: &[u8] = b"de46";

/// The options of passt, each with its value if it has one. They are separated by commas, and a comma in a
/// value is written twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserOptions(Vec<String>);

/// The error of an option that passt cannot have here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUserOption {
    /// It does not begin as an option does.
    #[error(
        "{0:?} is no option of passt: write each with its value in one, as in user,--tcp-ports=8080:80, and a comma \
         in a value twice"
    )]
    Form(String),
    /// This program chooses it.
    #[error("passt cannot have the option {0:?} here, because kickless starts it with a socket of its own")]
    Refused(String),
}

impl UserOptions {
    /// Returns the arguments for passt.
    pub fn arguments(&self) -> &[String] {
        &self.0
    }
}

impl FromStr for UserOptions {
    type Err = InvalidUserOption;

    fn from_str(text: &str) -> Result<Self, InvalidUserOption> {
        let mut options = vec![String::new()];
        let mut signs = text.chars().peekable();
        while let Some(sign) = signs.next() {
            match (sign, options.last_mut()) {
                (',', _) if signs.next_if_eq(&',').is_none() => options.push(String::new()),
                (sign, Some(option)) => option.push(sign),
                (_, None) => {}
            }
        }
        options.iter().try_for_each(|option| check(option))?;
        Ok(Self(options))
    }
}

fn check(option: &str) -> Result<(), InvalidUserOption> {
    let is_refused = match option.strip_prefix("--") {
        Some(long) => {
            let name = long.split('=').next().unwrap_or_default();
            // passt accepts each beginning of a name that no other has.
            !name.is_empty() && REFUSED.iter().any(|refused| refused.starts_with(name))
        }
        None => {
            let mut letters = option.strip_prefix('-').unwrap_or_default().bytes();
            let last = letters.find(|letter| !FLAG_LETTERS.contains(letter));
            last.is_some_and(|letter| REFUSED_LETTERS.contains(&letter))
        }
    };
    let is_option = option.len() > 1 && option.starts_with('-') && option != "--" && !option.contains('\0');
    match (is_option, is_refused) {
        (false, _) => Err(InvalidUserOption::Form(option.to_owned())),
        (true, true) => Err(InvalidUserOption::Refused(option.to_owned())),
        (true, false) => Ok(()),
    }
}

impl fmt::Display for UserOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|option| write!(f, ",{}", option.replace(',', ",,")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_separated_by_commas() {
        let options: UserOptions = "--tcp-ports=22,,80:8080,-4,--mtu=1500".parse().unwrap();
        assert_eq!(options.arguments(), ["--tcp-ports=22,80:8080", "-4", "--mtu=1500"]);
        assert_eq!(options.to_string(), ",--tcp-ports=22,,80:8080,-4,--mtu=1500");
        assert_eq!(UserOptions::default().to_string(), "");
    }

    #[test]
    fn options_that_the_port_chooses_are_refused() {
        for option in [
            "--fd=3",
            "--socket=/s",
            "-F3",
            "-f",
            "-4f",
            "--foreground",
            "--one",
            "--pid=p",
            "-h",
            "--versio",
        ] {
            assert_eq!(option.parse::<UserOptions>(), Err(InvalidUserOption::Refused(option.into())));
        }
        // The letters of a value mean nothing.
        assert!("-ifast,-46".parse::<UserOptions>().is_ok());
        for option in ["", "8080", "-", "--", "-4,", "-4,x"] {
            let error = option.parse::<UserOptions>().unwrap_err();
            assert!(matches!(error, InvalidUserOption::Form(_)), "{option}: {error}");
        }
    }
}
