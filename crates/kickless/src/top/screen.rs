//! Draws the screen of `top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Bar, BarChart, Block, Cell, Paragraph, Row, Table, TableState};

use super::app::{App, Question};
use super::view::{DeviceView, Short, Time};

const HEAD: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);
const BAD: Style = Style::new().fg(Color::Red);
const GOOD: Style = Style::new().fg(Color::Green);
const DIM: Style = Style::new().fg(Color::DarkGray);

/// Draws the screen.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let workers = (app.view.workers.len() as u16).min(8) + 1;
    let [top, middle, bottom] =
        Layout::vertical([Constraint::Length(workers), Constraint::Min(3), Constraint::Length(1)])
            .areas(frame.area());
    draw_workers(frame, app, top);
    match app.selected_device().filter(|_| app.is_open) {
        Some(device) => draw_device(frame, device, middle),
        None => draw_devices(frame, app, middle),
    }
    draw_keys(frame, app, bottom);
}

fn draw_workers(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let mut lines = vec![Line::from(vec![
        Span::styled("kickless", HEAD),
        Span::raw(format!("  polling {}  devices {}", app.poll, app.view.devices.len())),
    ])];
    lines.extend(app.view.workers.iter().map(|worker| {
        let percent = |share: f64| format!("{:5.1} %", share * 100.0);
        let width = 30.0;
        let (work, looking) =
            ((worker.work * width).round() as usize, (worker.looking * width).round() as usize);
        let rest = (width as usize).saturating_sub(work + looking);
        Line::from(vec![
            Span::raw(format!("worker {:<2} ", worker.worker)),
            Span::styled("█".repeat(work), GOOD),
            Span::styled("▒".repeat(looking), Style::new().fg(Color::Yellow)),
            Span::styled("·".repeat(rest), DIM),
            Span::raw(format!(
                " work{} looking{} asleep{}",
                percent(worker.work),
                percent(worker.looking),
                percent(worker.asleep)
            )),
        ])
    }));
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the style of a state.
fn state_style(state: &str) -> Style {
    match state {
        "connected" => GOOD,
        "ended" | "unavailable" => BAD,
        _ => Style::new(),
    }
}

fn time(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".into(), |ns| Time(ns).to_string())
}

fn draw_devices(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let names = [
        "device", "state", "read/s", "write/s", "other/s", "bytes/s", "p50", "p99", "oldest", "flight",
        "kicks/s", "avoided", "limits",
    ];
    let rows = app.view.devices.iter().map(|device| {
        let oldest = if device.in_flight > 0 { Time(device.oldest_ns).to_string() } else { "-".into() };
        let limits = match device.throttled > 0.0 {
            true => Cell::from(device.limits.clone()).style(Style::new().fg(Color::Yellow)),
            false => Cell::from(device.limits.clone()),
        };
        Row::new([
            Cell::from(device.name.clone()),
            Cell::from(device.state.clone()).style(state_style(&device.state)),
            Cell::from(Short(device.reads).to_string()),
            Cell::from(Short(device.writes).to_string()),
            Cell::from(Short(device.others).to_string()),
            Cell::from(Short(device.bytes()).to_string()),
            Cell::from(time(device.p50_ns)),
            Cell::from(time(device.p99_ns)),
            Cell::from(oldest),
            Cell::from(device.in_flight.to_string()),
            Cell::from(Short(device.kicks).to_string()),
            Cell::from(Short(device.kicks_avoided).to_string()),
            limits,
        ])
    });
    let widths = [16, 11, 7, 7, 7, 7, 7, 7, 7, 6, 7, 7].map(Constraint::Length);
    let widths = widths.into_iter().chain([Constraint::Min(8)]);
    let table = Table::new(rows, widths)
        .header(Row::new(names).style(HEAD))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::bordered().title(format!(" devices by {} ", app.order.word())));
    let mut state = TableState::new().with_selected(Some(app.place()));
    frame.render_stateful_widget(table, area, &mut state);
}

/// Draws the queues of a device and the latencies of its requests.
fn draw_device(frame: &mut Frame<'_>, device: &DeviceView, area: Rect) {
    let [queues, latencies] = Layout::horizontal([Constraint::Percentage(50); 2]).areas(area);
    let rows = device.queues.iter().map(|queue| {
        let shown = [queue.requests, queue.kicks, queue.kicks_avoided, queue.calls]
            .map(|rate| Short(rate).to_string());
        let polled = format!("{:.0} %", queue.polled * 100.0);
        Row::new([vec![queue.queue.to_string()], shown.to_vec(), vec![polled]].concat())
    });
    let names = ["queue", "req/s", "kicks/s", "avoided", "calls/s", "polled"];
    let title = format!(" {} {} {} ", device.name, device.state, device.limits);
    let table = Table::new(rows, [Constraint::Length(8); 6])
        .header(Row::new(names).style(HEAD))
        .block(Block::bordered().title(title));
    frame.render_widget(table, queues);

    // Two octaves are one bar, so that all fit.
    let mut bars: Vec<(u64, u64)> = Vec::new();
    for (end, count) in &device.latencies {
        let end =
            end.map_or(u64::MAX, |end| 1 << (end.max(2) - 1).ilog2().div_ceil(2).saturating_mul(2).min(62));
        match bars.last_mut().filter(|(last, _)| *last == end) {
            Some((_, sum)) => *sum += count,
            None => bars.push((end, *count)),
        }
    }
    let bars: Vec<Bar<'_>> = bars
        .iter()
        .map(|(end, count)| {
            let label = if *end == u64::MAX { "more".into() } else { format!("<{}", Time(*end)) };
            Bar::default().value(*count).label(Line::from(label)).text_value(Short(*count as f64).to_string())
        })
        .collect();
    let chart = BarChart::default()
        .block(Block::bordered().title(" requests by latency "))
        .bar_width(7)
        .bar_style(GOOD)
        .data(ratatui::widgets::BarGroup::default().bars(&bars));
    frame.render_widget(chart, latencies);
}

fn draw_keys(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let text = match &app.question {
        Some(Question::Limit(typed)) => {
            let asked = format!("requests a second at most, 0 for no limit: {typed}_");
            if app.message.is_empty() { asked } else { format!("{asked}   {}", app.message) }
        }
        Some(Question::Drain(name)) => {
            format!("keep requests of {name} waiting, until d is pressed again? y/n")
        }
        Some(Question::Poll(rule)) => format!("poll={rule} for all queues? y/n"),
        None if !app.message.is_empty() => app.message.clone(),
        None => "q quit  s sort  enter open  d drain or resume  l limit  p polling  arrows select".into(),
    };
    frame.render_widget(Paragraph::new(text).style(DIM), area);
}
