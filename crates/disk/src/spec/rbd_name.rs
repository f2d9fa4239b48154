//! The names of a Ceph image and its cluster. Every build can parse them.

use super::percent;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The default time that a stop waits for a cluster that does not answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest such time. Guests and hypervisors give up long before.
const STOP_TIMEOUT_SECS_MAX: u64 = 300;

/// An image of a Ceph cluster: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?OPTION=VALUE[&...]]`.
///
/// Three options have a meaning of their own: `conf` (a file, instead of Ceph's standard one), `id` (the
/// client's name, without `client.`) and `stop-timeout` (seconds). Any other is a setting of Ceph and
/// overrides that of the file. Names and values are percent-encoded if they contain a character of this
/// syntax.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdName {
    pub(crate) pool: String,
    pub(crate) namespace: Option<String>,
    pub(crate) image: String,
    pub(crate) snapshot: Option<String>,
    pub(crate) conf: Option<PathBuf>,
    pub(crate) id: Option<String>,
    pub(crate) stop_timeout: Duration,
    /// The settings in the order in which they are written.
    pub(crate) settings: Vec<(String, String)>,
    text: String,
}

/// The reason why a text does not name an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRbdName {
    /// The number of names is wrong, or one is empty.
    #[error(
        "an image of a Ceph cluster is rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE, with an optional @SNAPSHOT"
    )]
    Form,
    /// The options are in QEMU's form, or a name has a colon.
    #[error(
        "options come after a question mark, as in rbd:POOL/IMAGE?id=NAME&conf=PATH, and a colon in a name is %3A"
    )]
    Colon,
    /// A percent sign is not followed by two digits, the bytes are not UTF-8, or there is a byte 0.
    #[error("{0:?} is not percent-encoded text")]
    Encoding(String),
    /// An option has no value or no name.
    #[error("{0:?} is not an option with a value")]
    Option(String),
    /// A key is given where every process can read it.
    #[error(
        "a key on a command line is not secret: put it into a file, and use keyring=PATH or keyfile=PATH"
    )]
    Key,
    /// The time is invalid.
    #[error("stop-timeout is a number of seconds from 1 to 300")]
    StopTimeout,
}

impl FromStr for RbdName {
    type Err = BadRbdName;

    fn from_str(text: &str) -> Result<Self, BadRbdName> {
        let rest = text.strip_prefix("rbd:").ok_or(BadRbdName::Form)?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        if path.contains(':') {
            return Err(BadRbdName::Colon);
        }
        let (path, snapshot) = match path.split_once('@') {
            Some((path, snapshot)) => (path, Some(name(snapshot)?)),
            None => (path, None),
        };
        let mut names = path.split('/');
        let mut next = || names.next().map(name).transpose();
        let (pool, namespace, image) = match (next()?, next()?, next()?) {
            (Some(pool), Some(image), None) => (pool, None, image),
            (Some(pool), Some(namespace), Some(image)) if names.next().is_none() => {
                (pool, Some(namespace), image)
            }
            _ => return Err(BadRbdName::Form),
        };
        let (mut conf, mut id, mut stop_timeout, mut settings) = (None, None, STOP_TIMEOUT, Vec::new());
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let bad = || BadRbdName::Option(option.to_owned());
            let (key, value) = option.split_once('=').ok_or_else(bad)?;
            let (key, value) = (decode(key)?, decode(value)?);
            match key.as_str() {
                "" => return Err(bad()),
                "conf" | "id" if value.is_empty() => return Err(bad()),
                "conf" => conf = Some(PathBuf::from(value)),
                "id" => id = Some(value),
                "stop-timeout" => stop_timeout = seconds(&value)?,
                "key" => return Err(BadRbdName::Key),
                _ => settings.push((key, value)),
            }
        }
        let text = text.to_owned();
        Ok(Self { pool, namespace, image, snapshot, conf, id, stop_timeout, settings, text })
    }
}

impl RbdName {
    /// Returns the files of the client that the name has: its configuration and its keys.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let keys = self.settings.iter().filter(|(key, _)| ["keyring", "keyfile"].contains(&key.as_str()));
        // A keyring can be a list of places.
        let places =
            keys.flat_map(|(_, value)| value.split([',', ';', ' '])).filter(|place| !place.is_empty());
        self.conf.clone().into_iter().chain(places.map(PathBuf::from)).collect()
    }
}

impl fmt::Display for RbdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Parses a name. It is not empty, and contains a separator only in encoded form.
fn name(text: &str) -> Result<String, BadRbdName> {
    if text.is_empty() || text.contains(['@', '/']) {
        return Err(BadRbdName::Form);
    }
    decode(text)
}

fn seconds(text: &str) -> Result<Duration, BadRbdName> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = text.parse().ok().filter(|seconds| digits && (1..=STOP_TIMEOUT_SECS_MAX).contains(seconds));
    seconds.map(Duration::from_secs).ok_or(BadRbdName::StopTimeout)
}

/// Decodes percent-encoding. Ceph's names and values end at a byte 0, so there must be none.
fn decode(text: &str) -> Result<String, BadRbdName> {
    let decoded = percent::decode(text).filter(|decoded| !decoded.contains('\0'));
    decoded.ok_or_else(|| BadRbdName::Encoding(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> RbdName {
        text.parse().unwrap()
    }

    #[test]
    fn images() {
        type Names<'a> = (&'a str, Option<&'a str>, &'a str, Option<&'a str>);
        let cases: [(&str, Names<'_>); 6] = [
            ("rbd:rbd/web", ("rbd", None, "web", None)),
            ("rbd:rbd/tenant/web", ("rbd", Some("tenant"), "web", None)),
            ("rbd:rbd/web@monday", ("rbd", None, "web", Some("monday"))),
            ("rbd:p/n/i@s?", ("p", Some("n"), "i", Some("s"))),
            ("rbd:a%20b/c%2Fd%3ae%40f", ("a b", None, "c/d:e@f", None)),
            ("rbd:p/%3F?", ("p", None, "?", None)),
        ];
        for (text, names) in cases {
            let RbdName { pool, namespace, image, snapshot, .. } = &parsed(text);
            let found = (pool.as_str(), namespace.as_deref(), image.as_str(), snapshot.as_deref());
            assert_eq!(found, names, "{text}");
            assert_eq!(parsed(text).to_string(), text);
        }
    }

    #[test]
    fn options() {
        let plain = parsed("rbd:p/i");
        assert_eq!((plain.conf, plain.id, plain.stop_timeout), (None, None, STOP_TIMEOUT));
        assert_eq!(plain.settings, []);
        let text = "rbd:p/i?conf=/etc/ceph/a%26b.conf&id=web&&stop-timeout=1&mon_host=[::1]:3300&rbd_cache=";
        let name = parsed(text);
        assert_eq!(name.conf, Some("/etc/ceph/a&b.conf".into()));
        assert_eq!((name.id.as_deref(), name.stop_timeout), (Some("web"), Duration::from_secs(1)));
        let settings = [("mon_host", "[::1]:3300"), ("rbd_cache", "")];
        assert_eq!(name.settings, settings.map(|(key, value)| (key.to_owned(), value.to_owned())));
    }

    #[test]
    fn refuses_other_names() {
        for (text, error) in [
            ("rbd:", BadRbdName::Form),
            ("rbd:image", BadRbdName::Form),
            ("rbd:/image", BadRbdName::Form),
            ("rbd:pool/", BadRbdName::Form),
            ("rbd:pool/image@", BadRbdName::Form),
            ("rbd:pool/image@a@b", BadRbdName::Form),
            ("rbd:pool@a/image", BadRbdName::Form),
            ("rbd:pool//image", BadRbdName::Form),
            ("rbd:a/b/c/d", BadRbdName::Form),
            ("nbd:a/b", BadRbdName::Form),
            ("rbd:pool/image:id=admin:conf=/etc/ceph/ceph.conf", BadRbdName::Colon),
            ("rbd:pool/%4", BadRbdName::Encoding("%4".into())),
            ("rbd:pool/%ff", BadRbdName::Encoding("%ff".into())),
            ("rbd:pool/a%00", BadRbdName::Encoding("a%00".into())),
            ("rbd:p/i?conf=%00", BadRbdName::Encoding("%00".into())),
            ("rbd:p/i?conf", BadRbdName::Option("conf".into())),
            ("rbd:p/i?conf=", BadRbdName::Option("conf=".into())),
            ("rbd:p/i?=a", BadRbdName::Option("=a".into())),
            ("rbd:p/i?key=AQ==", BadRbdName::Key),
            ("rbd:p/i?ke%79=AQ==", BadRbdName::Key),
            ("rbd:p/i?stop-timeout=0", BadRbdName::StopTimeout),
            ("rbd:p/i?stop-timeout=+1", BadRbdName::StopTimeout),
            ("rbd:p/i?stop-timeout=301", BadRbdName::StopTimeout),
        ] {
            assert_eq!(text.parse::<RbdName>(), Err(error), "{text}");
        }
    }

    fn encode(text: &str) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let each = |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") };
        text.bytes().map(each).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        /// Any names can be encoded and parsed again.
        #[test]
        fn any_names_come_back(
            (pool, image) in ("[^\0]{1,20}", "[^\0]{1,20}"),
            (namespace, snapshot) in (prop::option::of("[^\0]{1,9}"), prop::option::of("[^\0]{1,9}")),
            options in prop::collection::vec(("x[^\0]{0,9}", "[^\0]{0,9}"), 0..4),
        ) {
            let mut text = format!("rbd:{}/", encode(&pool));
            text.extend(namespace.iter().map(|namespace| format!("{}/", encode(namespace))));
            text += &encode(&image);
            text.extend(snapshot.iter().map(|snapshot| format!("@{}", encode(snapshot))));
            for (number, (key, value)) in options.iter().enumerate() {
                text += if number == 0 { "?" } else { "&" };
                text += &format!("{}={}", encode(key), encode(value));
            }
            let found = parsed(&text);
            prop_assert_eq!((&found.pool, &found.image), (&pool, &image));
            prop_assert_eq!((&found.namespace, &found.snapshot), (&namespace, &snapshot));
            prop_assert_eq!(&found.settings, &options);
            prop_assert_eq!(found.to_string(), text);
        }

        /// Any text is a name without a byte 0, or an error.
        #[test]
        fn any_text(text in "(rbd:)?[a-z/@?&=%:0-9\0é]{0,40}") {
            if let Ok(name) = text.parse::<RbdName>() {
                let RbdName { pool, namespace, image, snapshot, .. } = &name;
                for part in [Some(pool), namespace.as_ref(), Some(image), snapshot.as_ref()].into_iter().flatten() {
                    prop_assert!(!part.is_empty() && !part.contains('\0'));
                }
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
