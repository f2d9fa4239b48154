//! `kickless top`: shows what the workers and the devices of a running daemon do.

mod app;
mod columns;
mod screen;
mod view;

use std::io::{IsTerminal, stdout};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kickless_control::{Client, ClientError, Stats};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cli::Top;
use app::{Action, App, Key};
use view::compare;

/// The time that the daemon has for an answer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Shows the figures until a key ends it, or prints them once with `print`.
///
/// # Errors
/// No daemon answers, or there is no terminal. The error is one sentence.
pub(crate) fn top(options: &Top, print: fn(&str) -> Result<()>) -> Result<()> {
    let path = options.control.path();
    let mut daemon = Daemon::connect(&path)?;
    let interval = options.interval;
    if options.once {
        let before = daemon.stats()?;
        thread::sleep(interval);
        let view = compare(&before, &daemon.stats()?);
        return print(&format!("{:#}\n", serde_json::to_value(view)?));
    }
    if !stdout().is_terminal() {
        bail!("standard output is no terminal: --once --json prints the figures of one interval");
    }
    let app = App::new(daemon.poll()?);
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let shown = show(&mut terminal, app, &mut daemon, interval);
    ratatui::restore();
    shown
}

/// The daemon on the other end of the control socket.
struct Daemon<'a> {
    client: Client,
    path: &'a Path,
}

impl<'a> Daemon<'a> {
    fn connect(path: &'a Path) -> Result<Self> {
        let client = Client::connect(path).and_then(|client| client.within(ANSWER_WAIT));
        Ok(Self { client: client.with_context(|| format!("--control={}", path.display()))?, path })
    }

    fn stats(&mut self) -> Result<Stats> {
        let stats = self.client.call("stats.get", Map::new());
        let stats = stats.with_context(|| format!("--control={}", self.path.display()))?;
        Stats::deserialize(stats).context("the daemon is of another version")
    }

    fn poll(&mut self) -> Result<String> {
        let pool = self.client.call("pool.get", Map::new());
        let pool = pool.with_context(|| format!("--control={}", self.path.display()))?;
        // Without the key it is the default, unless a key that implies the other rule is there.
        let is_rate = ["poll-start-rate", "poll-stop-idle"].iter().any(|key| !pool[key].is_null());
        let default = if is_rate { "rate" } else { "auto" };
        Ok(pool["poll"].as_str().unwrap_or(default).to_owned())
    }

    /// Carries out an action. Returns the call and its result as a message.
    fn carry_out(&mut self, action: &Action) -> Result<String> {
        let (method, params) = match action {
            Action::Quit => return Ok(String::new()),
            // The requests in flight are shown on the screen, so there is no need to wait for them.
            Action::Drain(name) => ("device.drain", json!({ "name": name, "timeout": "0s" })),
            Action::Resume(name) => ("device.resume", json!({ "name": name })),
            Action::Limit(name, limit) => ("device.set", json!({ "name": name, "iops": limit })),
            Action::Poll(rule) => ("pool.set", json!({ "poll": rule })),
        };
        let Value::Object(params) = params else { return Ok(String::new()) };
        let shown = serde_json::to_string(&params)?;
        match self.client.call(method, params) {
            Ok(_) => Ok(format!("{method} {shown}: done")),
            Err(ClientError::Call(error)) => Ok(format!("{method}: {error}")),
            Err(error) => Err(error).with_context(|| format!("--control={}", self.path.display())),
        }
    }
}

/// Draws the screen and handles keys until one ends the program.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    mut app: App,
    daemon: &mut Daemon<'_>,
    interval: Duration,
) -> Result<()> {
    let mut before = daemon.stats()?;
    let mut due = Instant::now() + interval;
    loop {
        terminal.draw(|frame| screen::draw(frame, &app)).context("the terminal cannot be written to")?;
        let left = due.saturating_duration_since(Instant::now());
        if event::poll(left).context("the terminal cannot be read")? {
            if let Some(key) = key(&event::read().context("the terminal cannot be read")?) {
                app.message.clear();
                match app.press(key) {
                    Some(Action::Quit) => return Ok(()),
                    Some(action) => {
                        app.message = daemon.carry_out(&action)?;
                        app.poll = daemon.poll()?;
                    }
                    None => {}
                }
            }
            continue;
        }
        let after = daemon.stats()?;
        app.show(compare(&before, &after));
        before = after;
        due = Instant::now() + interval;
    }
}

/// Returns the key of an event of the terminal, if `top` knows it.
fn key(event: &Event) -> Option<Key> {
    let Event::Key(key) = event else { return None };
    if key.kind == KeyEventKind::Release {
        return None;
    }
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Key::Char('q')),
        KeyCode::Char(char) => Some(Key::Char(char)),
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        KeyCode::Enter => Some(Key::Enter),
        KeyCode::Esc => Some(Key::Escape),
        KeyCode::Backspace => Some(Key::Backspace),
        _ => None,
    }
}
