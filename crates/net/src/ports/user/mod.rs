//! The port `user[,OPTION...]`: the network of this user, through a `passt` process behind a stream socket.

use super::port::{Name, OpenPort, Opening, Pairs, PortError, PortKind};
use super::stream;
use kickless_net_port::{Passt, StreamPort, UserOptions};
use kickless_opener::Target;
use std::fmt;
use std::sync::Arc;

/// The port `user`.
pub(crate) const USER: PortKind = PortKind {
    form: "user",
    help: "user[,OPTION...] is the network of this user, without privileges, through the program passt with these \
           options",
    pairs: Pairs::One,
    parse: |text| {
        let options = match text.strip_prefix("user")? {
            "" => Ok(UserOptions::default()),
            options => options.strip_prefix(',')?.parse(),
        };
        Some(match options {
            Ok(options) => Ok(Arc::new(UserName(options))),
            Err(error) => Err(error.into()),
        })
    },
};

/// The options of passt.
#[derive(Debug)]
struct UserName(UserOptions);

impl Name for UserName {
    fn pairs(&self) -> Option<u16> {
        Some(1)
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn target(&self) -> Option<Target> {
        Some(Target::Passt { arguments: self.0.arguments().to_vec() })
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        stream::open(StreamPort::to_passt(Passt::find(self.0.clone())?)?, opening)
    }
}

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user{}", self.0)
    }
}
