//! Reservations of a logical unit: persistent ones (SPC-4, section 5.13), and those of RESERVE and RELEASE
//! (SPC-2, section 5.5).

mod change;
mod nexus;
mod report;
mod request;
mod saved;
mod state;

pub use nexus::{InvalidTransportId, TRANSPORT_ID_LEN_MAX, TransportId};
pub use request::PersistentOut;
pub use saved::{SAVED_LEN_MAX, SavedError};
pub use state::{Effects, Permits, REGISTRATIONS_MAX, Refused, Reservations};
