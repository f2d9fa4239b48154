//! Passes a TAP to the next process of this host, with the frames that wait in its queues.
//!
//! A queue that is detached loses its frames, and so does one that is read. So the new process asks for names
//! and flags only (TUNGETIFF), and believes the settings that the old one had.

use super::{KIND, Offloads, Settings, Tap, TapError, sys};
use kickless_handover::{Error, Given, Giving, Part, v1};
use kickless_sync::lock;
use rustix::fs::{OFlags, fcntl_getfl};
use std::os::fd::AsFd;
use std::sync::Mutex;

impl Tap {
    /// Returns the TAP for the next process, with duplicates of its descriptors.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn give(&self, to: &mut Giving) -> Result<Part, Error> {
        let queues = self.queues.iter().map(|queue| to.fd(queue)).collect::<Result<_, _>>()?;
        let (name, detaches) = (self.name.clone(), lock(&self.settings).detaches);
        Part::new(&v1::Tap { name, queues, detaches, segments_udp: self.segments_udp })
    }

    /// Returns the settings that the kernel has now. The next process believes them, so the caller makes sure
    /// that they do not change any more.
    pub fn settings(&self) -> v1::TapFinal {
        let settings = lock(&self.settings);
        v1::TapFinal { attached: settings.attached.clone(), offloads: settings.offloads.bits() }
    }

    /// Takes a TAP over that another process has given, with this number of queues, and changes nothing.
    /// `name` is the interface that it must be, if that is known.
    ///
    /// # Errors
    /// A descriptor is no such queue.
    pub fn taken_over(
        given: Part,
        from: &mut Given,
        name: Option<&str>,
        queues: u16,
    ) -> Result<Self, TapError> {
        let v1::Tap { name: found, queues: fds, detaches, segments_udp } = given.read()?;
        if let Some(wanted) = name.filter(|wanted| *wanted != found) {
            return Err(TapError::Another { name: found, wanted: wanted.to_owned() });
        }
        if fds.len() != usize::from(queues) {
            return Err(TapError::OtherQueues { name: found, given: fds.len(), queues });
        }
        let mut taken = Vec::with_capacity(fds.len());
        for fd in fds {
            let queue = from.fd(fd)?;
            let Ok((name, flags)) = sys::interface(queue.as_fd()) else { return Err(TapError::NotTapFd) };
            if name != found {
                return Err(TapError::Several { name, other: found });
            }
            let flags_of_file = fcntl_getfl(&queue).map_err(|error| TapError::of(&name, error))?;
            if flags & KIND != KIND {
                return Err(TapError::Mode { name });
            }
            // It belongs to the description, which the other process uses too. So it is not set here.
            if !flags_of_file.contains(OFlags::NONBLOCK) {
                return Err(TapError::Waits { name });
            }
            if (flags & libc::IFF_MULTI_QUEUE != 0) != detaches {
                return Err(TapError::OneQueue { name, queues });
            }
            taken.push(queue);
        }
        let (offloads, attached) = (Offloads::empty(), vec![true; taken.len()]);
        let settings = Settings { offloads, attached, detaches, is_socket: false };
        Ok(Self { name: found, queues: taken, segments_udp, settings: Mutex::new(settings) })
    }

    /// Takes note of the settings that the other process had at last.
    ///
    /// # Errors
    /// They are no settings of this TAP.
    pub fn believe(&self, given: &v1::TapFinal) -> Result<(), Error> {
        let mut settings = lock(&self.settings);
        given.check_against(self.queues.len(), settings.detaches)?;
        // The kernel has set no bit that this version does not know: each process sets all of them.
        settings.offloads = Offloads::from_bits_truncate(given.offloads);
        settings.attached.clone_from(&given.attached);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::in_network_namespace;
    use rustix::fs::fcntl_setfl;
    use std::fs::File;
    use std::os::fd::OwnedFd;

    /// Passes a TAP as from one process to another. `change` is what a hostile process does to it.
    fn pass(tap: &Tap, name: &str, queues: u16, change: impl Fn(&mut v1::Tap)) -> Result<Tap, TapError> {
        let mut giving = Giving::default();
        let mut state: v1::Tap = tap.give(&mut giving).unwrap().read().unwrap();
        change(&mut state);
        let device = v1::Device { own: Part::new(&state).unwrap(), ..v1::Device::default() };
        let (device, mut given): (v1::Device, _) = giving.record(&device).unwrap().read().unwrap();
        Tap::taken_over(device.own, &mut given, Some(name), queues)
    }

    /// The taker makes no call that could cost a frame: only one that asks.
    #[test]
    fn a_taker_with_the_same_wishes_changes_nothing() {
        in_network_namespace(|| {
            let tap = Tap::open("tap", 3).unwrap();
            let offloads = Offloads::CHECKSUM | Offloads::TSO4;
            tap.set(offloads, |pair| pair != 1);
            let before = sys::changes();
            let taken = pass(&tap, "tap", 3, |_| {}).unwrap();
            taken.believe(&tap.settings()).unwrap();
            taken.set(offloads, |pair| pair != 1);
            assert_eq!(sys::changes(), before);
            assert_eq!((taken.name(), taken.segments_udp()), ("tap", tap.segments_udp()));
            assert_eq!(taken.settings(), tap.settings());
            // From now on it changes what is to change, and nothing else.
            taken.set(offloads, |_| true);
            assert_eq!(sys::changes(), before + 1);
        });
    }

    #[test]
    fn lies_about_a_tap_are_refused() {
        in_network_namespace(|| {
            let (tap, other) = (Tap::open("tap", 2).unwrap(), Tap::open("other", 2).unwrap());
            let refused = |name: &str, queues, change: &dyn Fn(&mut v1::Tap)| {
                pass(&tap, name, queues, change).unwrap_err().to_string()
            };
            assert_eq!(
                refused("wanted", 2, &|_| {}),
                "the other process gives the TAP tap, and the port is the TAP wanted"
            );
            assert_eq!(
                refused("tap", 3, &|_| {}),
                "the other process gives 2 queues of the TAP tap, and the card has 3 pairs of queues"
            );
            let renamed = refused("wanted", 2, &|state| state.name = "wanted".into());
            assert_eq!(renamed, "the descriptors are queues of two TAPs, wanted and tap");
            assert!(refused("tap", 2, &|state| state.detaches = false).contains("has one queue"));
            // A descriptor of another thing, and one of another TAP.
            let with = |queue: &dyn Fn() -> OwnedFd| {
                let queues = vec![tap.queues[0].try_clone().unwrap(), queue()];
                let attached = vec![true; 2];
                let settings =
                    Settings { offloads: Offloads::empty(), attached, detaches: true, is_socket: false };
                let settings = Mutex::new(settings);
                let lie = Tap { name: "tap".into(), queues, segments_udp: true, settings };
                pass(&lie, "tap", 2, |_| {}).unwrap_err()
            };
            let error = with(&|| File::open("/dev/null").unwrap().into());
            assert!(matches!(error, TapError::NotTapFd), "{error}");
            let error = with(&|| other.queues[1].try_clone().unwrap());
            assert!(matches!(error, TapError::Several { .. }), "{error}");
            // Settings that it cannot have.
            let taken = pass(&tap, "tap", 2, |_| {}).unwrap();
            assert!(taken.believe(&v1::TapFinal { attached: vec![true], offloads: 0 }).is_err());
            // A read of a queue that waits would hold a worker.
            let flags = fcntl_getfl(&tap.queues[0]).unwrap();
            fcntl_setfl(&tap.queues[0], flags - OFlags::NONBLOCK).unwrap();
            let error = pass(&tap, "tap", 2, |_| {}).unwrap_err();
            assert!(matches!(error, TapError::Waits { .. }), "{error}");
        });
    }
}
