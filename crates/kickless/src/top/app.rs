//! The state of the screen of `top`, and the effects of keys. Pure.

use super::view::{DeviceView, View};

/// The order of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Name,
    Requests,
    Bytes,
    Latency,
    Oldest,
}

impl Order {
    const ALL: [Self; 5] = [Self::Requests, Self::Bytes, Self::Latency, Self::Oldest, Self::Name];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Requests => "requests",
            Self::Bytes => "bytes",
            Self::Latency => "p99",
            Self::Oldest => "oldest",
        }
    }
}

/// A key, as far as `top` knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Up,
    Down,
    Enter,
    Escape,
    Backspace,
}

/// A call that a key asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Take no new requests of this device.
    Drain(String),
    /// Take requests of this device again.
    Resume(String),
    /// Limit the requests of this device, or not any more.
    Limit(String, Option<u32>),
    /// Change the polling rule.
    Poll(&'static str),
    /// End.
    Quit,
}

/// The polling rules between which a key switches.
const POLLS: [&str; 3] = ["auto", "always", "never"];

/// The state of the screen.
#[derive(Clone, Debug)]
pub(super) struct App {
    pub(super) view: View,
    pub(super) order: Order,
    /// The name of the selected device.
    pub(super) selected: Option<String>,
    /// The selected device is shown in detail.
    pub(super) is_open: bool,
    /// The limit that is being typed.
    pub(super) typed: Option<String>,
    /// The polling rule.
    pub(super) poll: String,
    /// The result of the last action, or an error.
    pub(super) message: String,
}

impl App {
    pub(super) fn new(poll: String) -> Self {
        Self {
            view: View::default(),
            order: Order::Requests,
            selected: None,
            is_open: false,
            typed: None,
            poll,
            message: String::new(),
        }
    }

    /// Shows new figures.
    pub(super) fn show(&mut self, mut view: View) {
        sort(&mut view.devices, self.order);
        self.view = view;
        let is_there = self.selected_device().is_some();
        if !is_there {
            self.selected = self.view.devices.first().map(|device| device.name.clone());
            self.is_open = false;
            self.typed = None;
        }
    }

    /// Returns the selected device.
    pub(super) fn selected_device(&self) -> Option<&DeviceView> {
        let name = self.selected.as_ref()?;
        self.view.devices.iter().find(|device| device.name == *name)
    }

    /// Returns the place of the selected device.
    pub(super) fn place(&self) -> usize {
        let name = self.selected.as_deref().unwrap_or_default();
        self.view.devices.iter().position(|device| device.name == name).unwrap_or(0)
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: Key) -> Option<Action> {
        if self.typed.is_some() {
            return self.type_limit(key);
        }
        match key {
            Key::Char('q') => return Some(Action::Quit),
            Key::Escape if self.is_open => self.is_open = false,
            Key::Escape => return Some(Action::Quit),
            Key::Up | Key::Char('k') => self.select(self.place().saturating_sub(1)),
            Key::Down | Key::Char('j') => self.select(self.place() + 1),
            Key::Enter => self.is_open = !self.is_open && self.selected.is_some(),
            Key::Char('s') => {
                let at = Order::ALL.iter().position(|order| *order == self.order).unwrap_or(0);
                self.order = Order::ALL[(at + 1) % Order::ALL.len()];
                sort(&mut self.view.devices, self.order);
            }
            Key::Char('d') => {
                let device = self.selected_device()?;
                let name = device.name.clone();
                let is_halted = matches!(device.state.as_str(), "drained" | "stopped");
                return Some(if is_halted { Action::Resume(name) } else { Action::Drain(name) });
            }
            Key::Char('l') if self.selected.is_some() => self.typed = Some(String::new()),
            Key::Char('p') => {
                let at = POLLS.iter().position(|poll| *poll == self.poll).unwrap_or(POLLS.len() - 1);
                return Some(Action::Poll(POLLS[(at + 1) % POLLS.len()]));
            }
            _ => {}
        }
        None
    }

    fn select(&mut self, place: usize) {
        let last = self.view.devices.len().saturating_sub(1);
        self.selected = self.view.devices.get(place.min(last)).map(|device| device.name.clone());
    }

    /// Handles a key while a limit is typed. Nothing, or 0, stands for no limit.
    fn type_limit(&mut self, key: Key) -> Option<Action> {
        let typed = self.typed.as_mut()?;
        match key {
            // A limit has at most 32 bits.
            Key::Char(digit @ '0'..='9') if typed.len() < 9 => typed.push(digit),
            Key::Backspace => drop(typed.pop()),
            Key::Escape => self.typed = None,
            Key::Enter => {
                let limit = typed.parse().ok().filter(|limit| *limit > 0);
                self.typed = None;
                return self.selected.clone().map(|name| Action::Limit(name, limit));
            }
            _ => {}
        }
        None
    }
}

fn sort(devices: &mut [DeviceView], order: Order) {
    // Devices that are equal keep the order of their names, so that lines do not jump.
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    let most = |a: f64, b: f64| b.total_cmp(&a);
    devices.sort_by(|a, b| match order {
        Order::Name => std::cmp::Ordering::Equal,
        Order::Requests => most(a.requests(), b.requests()),
        Order::Bytes => most(a.bytes(), b.bytes()),
        Order::Latency => b.p99_ns.cmp(&a.p99_ns),
        Order::Oldest => b.oldest_ns.cmp(&a.oldest_ns),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app() -> App {
        let device = |name: &str, reads: f64, p99_ns| DeviceView {
            name: name.into(),
            reads,
            p99_ns,
            ..Default::default()
        };
        let devices = vec![device("a", 1.0, Some(9)), device("b", 3.0, Some(1)), device("c", 2.0, None)];
        let mut app = App::new("auto".into());
        app.show(View { devices, ..View::default() });
        app
    }

    fn names(app: &App) -> Vec<&str> {
        app.view.devices.iter().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn keys_sort_and_select() {
        let mut app = app();
        assert_eq!((names(&app), app.selected.as_deref()), (vec!["b", "c", "a"], Some("b")));
        assert_eq!(app.press(Key::Down), None);
        app.press(Key::Char('s'));
        app.press(Key::Char('s'));
        assert_eq!((names(&app), app.selected.as_deref()), (vec!["a", "b", "c"], Some("c")));
        app.press(Key::Enter);
        assert!(app.is_open);
        app.press(Key::Escape);
        assert!(!app.is_open);
        for _ in 0..5 {
            app.press(Key::Up);
        }
        assert_eq!(app.selected.as_deref(), Some("a"));
        app.show(View::default());
        assert_eq!(
            (app.selected.clone(), app.press(Key::Char('d')), app.press(Key::Enter)),
            (None, None, None)
        );
        assert!(!app.is_open);
        assert_eq!(app.press(Key::Char('q')), Some(Action::Quit));
    }

    #[test]
    fn keys_change_the_daemon() {
        let mut app = app();
        assert_eq!(app.press(Key::Char('d')), Some(Action::Drain("b".into())));
        app.view.devices[0].state = "drained".into();
        assert_eq!(app.press(Key::Char('d')), Some(Action::Resume("b".into())));
        assert_eq!(app.press(Key::Char('p')), Some(Action::Poll("always")));
        app.poll = "rate".into();
        assert_eq!(app.press(Key::Char('p')), Some(Action::Poll("auto")));
        app.press(Key::Char('l'));
        for key in ['5', 'q', '0', '0', '7'] {
            assert_eq!(app.press(Key::Char(key)), None);
        }
        app.press(Key::Backspace);
        assert_eq!(app.press(Key::Enter), Some(Action::Limit("b".into(), Some(500))));
        app.press(Key::Char('l'));
        assert_eq!(app.press(Key::Enter), Some(Action::Limit("b".into(), None)));
        app.press(Key::Char('l'));
        app.press(Key::Escape);
        assert!(app.typed.is_none());
    }
}
