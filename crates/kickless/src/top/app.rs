//! The state of the screen of `top`, and the effects of keys. Pure.

use kickless_values::parse_number;

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

/// A question on the last line, which the next keys answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// The limit of the selected device, as far as it is typed.
    Limit(String),
    /// Whether to drain this device.
    Drain(String),
    /// Whether to change the polling rule.
    Poll(&'static str),
}

/// The most bytes of a limit that is typed: more than a number has, so that a mistake shows.
const TYPED_MAX: usize = 16;

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
    pub(super) question: Option<Question>,
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
            question: None,
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
            self.question = None;
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
        match self.question.take() {
            Some(Question::Limit(typed)) => return self.type_limit(typed, key),
            // Any other key leaves everything as it is.
            Some(Question::Drain(name)) => return (key == Key::Char('y')).then_some(Action::Drain(name)),
            Some(Question::Poll(rule)) => return (key == Key::Char('y')).then_some(Action::Poll(rule)),
            None => {}
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
                if is_halted {
                    return Some(Action::Resume(name));
                }
                self.question = Some(Question::Drain(name));
            }
            Key::Char('l') if self.selected.is_some() => self.question = Some(Question::Limit(String::new())),
            Key::Char('p') => {
                let at = POLLS.iter().position(|poll| *poll == self.poll).unwrap_or(POLLS.len() - 1);
                self.question = Some(Question::Poll(POLLS[(at + 1) % POLLS.len()]));
            }
            _ => {}
        }
        None
    }

    fn select(&mut self, place: usize) {
        let last = self.view.devices.len().saturating_sub(1);
        self.selected = self.view.devices.get(place.min(last)).map(|device| device.name.clone());
    }

    /// Handles a key while a limit is typed. 0 stands for no limit, and nothing leaves the limit as it is.
    fn type_limit(&mut self, mut typed: String, key: Key) -> Option<Action> {
        match key {
            Key::Escape => return None,
            Key::Enter if typed.is_empty() => return None,
            Key::Enter => match parse_number(&typed, 0, u32::MAX) {
                Ok(limit) => {
                    let limit = Some(limit).filter(|limit| *limit > 0);
                    return self.selected.clone().map(|name| Action::Limit(name, limit));
                }
                Err(why) => self.message = format!("{typed}: {why}, and 0 is no limit"),
            },
            Key::Char(char) if typed.len() < TYPED_MAX => typed.push(char),
            Key::Backspace => drop(typed.pop()),
            _ => {}
        }
        self.question = Some(Question::Limit(typed));
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
        assert_eq!(app.press(Key::Char('d')), None);
        assert_eq!(app.question, Some(Question::Drain("b".into())));
        assert_eq!(app.press(Key::Char('y')), Some(Action::Drain("b".into())));
        for no in [Key::Char('n'), Key::Char('d'), Key::Enter, Key::Escape] {
            app.press(Key::Char('d'));
            assert_eq!((app.press(no), app.question.take()), (None, None));
        }
        app.view.devices[0].state = "drained".into();
        assert_eq!(app.press(Key::Char('d')), Some(Action::Resume("b".into())));
        app.press(Key::Char('p'));
        assert_eq!(app.press(Key::Char('y')), Some(Action::Poll("always")));
        app.poll = "rate".into();
        app.press(Key::Char('p'));
        assert_eq!(app.press(Key::Char('y')), Some(Action::Poll("auto")));
    }

    #[test]
    fn a_limit_is_a_whole_number() {
        let typed = |text: &str| {
            let mut app = app();
            app.press(Key::Char('l'));
            for char in text.chars() {
                assert_eq!(app.press(Key::Char(char)), None);
            }
            (app.press(Key::Enter), app)
        };
        let limit = |limit| Some(Action::Limit("b".into(), limit));
        assert_eq!(typed("500").0, limit(Some(500)));
        assert_eq!(typed("0").0, limit(None));
        // Nothing changes nothing.
        let (action, app) = typed("");
        assert_eq!((action, app.question), (None, None));
        for wrong in ["5k", "12.5", "abc", "-1", " ", "4294967296", "1234567890123456789"] {
            let (action, mut app) = typed(wrong);
            assert_eq!(action, None, "{wrong}");
            assert!(app.message.contains("must be a number"), "{}", app.message);
            // It can be mended.
            for _ in 0..20 {
                app.press(Key::Backspace);
            }
            app.press(Key::Char('7'));
            assert_eq!(app.press(Key::Enter), limit(Some(7)));
        }
        let (_, mut app) = typed("5k");
        app.press(Key::Escape);
        assert_eq!(app.question, None);
    }
}
