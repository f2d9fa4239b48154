//! Draws the screen of `top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Bar, BarChart, Block, Paragraph, TableState, Wrap};

use super::app::{App, Question};
use super::columns::{Column, table};
use super::view::{DeviceView, QueueView, Short, Time};

const HEAD: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);
const BAD: Style = Style::new().fg(Color::Red);
const GOOD: Style = Style::new().fg(Color::Green);
const DIM: Style = Style::new().fg(Color::DarkGray);

/// The columns in which queues and latencies of a device have room beside one another: half of them is a
/// table of six columns of 8, with the spaces and the frame.
const WIDE: u16 = 110;
/// The width of a bar of latencies, that of `<16.4us`, and of the space behind it.
const BAR: u16 = 7;
const BAR_GAP: u16 = 1;
/// The longest bar of a worker.
const WORK_BAR: u16 = 30;
/// The width of a worker's line without its bar.
const WORKER: u16 = 54;

/// Draws the screen.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let workers = (app.view.workers.len() as u16).min(8) + 1;
    let keys = keys(app, frame.area().width.into());
    let lines = lines_of(&keys, frame.area().width.into());
    let [top, middle, bottom] =
        Layout::vertical([Constraint::Length(workers), Constraint::Min(3), Constraint::Length(lines)])
            .areas(frame.area());
    draw_workers(frame, app, top);
    match app.selected_device().filter(|_| app.is_open) {
        Some(device) => draw_device(frame, device, middle),
        None => draw_devices(frame, app, middle),
    }
    frame.render_widget(Paragraph::new(keys).wrap(Wrap { trim: true }).style(DIM), bottom);
}

fn draw_workers(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let mut lines = vec![Line::from(vec![
        Span::styled("kickless", HEAD),
        Span::raw(format!("  polling {}  devices {}", app.poll, app.view.devices.len())),
    ])];
    lines.extend(app.view.workers.iter().map(|worker| {
        let percent = |share: f64| format!("{:5.1} %", share * 100.0);
        let width = usize::from(area.width.saturating_sub(WORKER).min(WORK_BAR));
        let part = |share: f64| (share * width as f64).round() as usize;
        let (work, looking) = (part(worker.work), part(worker.looking));
        let rest = width.saturating_sub(work + looking);
        Line::from(vec![
            Span::raw(format!("worker {:<2} ", worker.worker)),
            Span::styled("█".repeat(work), GOOD),
            Span::styled("▒".repeat(looking), Style::new().fg(Color::Yellow)),
            Span::styled("·".repeat(rest), DIM),
            Span::raw(format!(
                " work {} looking {} asleep {}",
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

/// Returns a column of figures, each of which has at most 7 characters.
fn figures<'a>(
    devices: &'a [DeviceView],
    heading: &'static str,
    rank: u8,
    figure: impl Fn(&'a DeviceView) -> String,
) -> Column<'a> {
    Column::new(heading, rank, 7, devices.iter().map(|device| Span::raw(figure(device))))
}

fn draw_devices(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let devices = &app.view.devices;
    let names = devices.iter().map(|device| Span::raw(device.name.as_str()));
    let states = devices.iter().map(|device| Span::styled(device.state.as_str(), state_style(&device.state)));
    let limits = devices.iter().map(|device| match device.throttled > 0.0 {
        true => Span::styled(device.limits.as_str(), Style::new().fg(Color::Yellow)),
        false => Span::raw(device.limits.as_str()),
    });
    let oldest = |device: &DeviceView| match device.in_flight {
        0 => "-".into(),
        _ => Time(device.oldest_ns).to_string(),
    };
    let short = |figure: f64| Short(figure).to_string();
    let columns = vec![
        Column::new("device", 0, 8, names),
        Column::new("state", 1, 9, states),
        figures(devices, "read/s", 2, |device| short(device.reads)),
        figures(devices, "write/s", 3, |device| short(device.writes)),
        figures(devices, "other/s", 12, |device| short(device.others)),
        figures(devices, "bytes/s", 4, |device| short(device.bytes())),
        figures(devices, "p50", 8, |device| time(device.p50_ns)),
        figures(devices, "p99", 5, |device| time(device.p99_ns)),
        figures(devices, "oldest", 9, oldest),
        figures(devices, "flight", 6, |device| device.in_flight.to_string()),
        figures(devices, "kicks/s", 10, |device| short(device.kicks)),
        figures(devices, "avoided", 11, |device| short(device.kicks_avoided)),
        Column::new("limits", 7, 8, limits),
    ];
    let block = Block::bordered().title(format!(" devices by {} ", app.order.word()));
    let table = table(columns, block.inner(area).width, HEAD)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(block);
    let mut state = TableState::new().with_selected(Some(app.place()));
    frame.render_stateful_widget(table, area, &mut state);
}

/// Draws the queues of a device and the latencies of its requests.
fn draw_device(frame: &mut Frame<'_>, device: &DeviceView, area: Rect) {
    // The table has a frame and headings.
    let rows = u16::try_from(device.queues.len()).unwrap_or(u16::MAX).saturating_add(3);
    let [queues, latencies] = match area.width >= WIDE {
        true => Layout::horizontal([Constraint::Percentage(50); 2]).areas(area),
        false => {
            let parts = [Constraint::Length(rows.min(area.height / 2)), Constraint::Min(0)];
            Layout::vertical(parts).areas(area)
        }
    };
    let figure = |heading, rank, of: &dyn Fn(&QueueView) -> String| {
        Column::new(heading, rank, 8, device.queues.iter().map(|queue| Span::raw(of(queue))))
    };
    let columns = vec![
        figure("queue", 0, &|queue| queue.queue.to_string()),
        figure("req/s", 1, &|queue| Short(queue.requests).to_string()),
        figure("kicks/s", 3, &|queue| Short(queue.kicks).to_string()),
        figure("avoided", 4, &|queue| Short(queue.kicks_avoided).to_string()),
        figure("calls/s", 5, &|queue| Short(queue.calls).to_string()),
        figure("polled", 2, &|queue| format!("{:.0} %", queue.polled * 100.0)),
    ];
    let block = Block::bordered().title(format!(" {} {} {} ", device.name, device.state, device.limits));
    frame.render_widget(table(columns, block.inner(queues).width, HEAD).block(block), queues);

    let block = Block::bordered().title(" requests by latency ");
    let room = (block.inner(latencies).width + BAR_GAP) / (BAR + BAR_GAP);
    let bars: Vec<Bar<'_>> = bars(&device.latencies, room.into())
        .into_iter()
        .map(|(end, count)| {
            let label = if end == u64::MAX { "more".into() } else { format!("<{}", Time(end)) };
            Bar::default().value(count).label(Line::from(label)).text_value(Short(count as f64).to_string())
        })
        .collect();
    let chart = BarChart::default()
        .block(block)
        .bar_width(BAR)
        .bar_gap(BAR_GAP)
        .bar_style(GOOD)
        .data(ratatui::widgets::BarGroup::default().bars(&bars));
    frame.render_widget(chart, latencies);
}

/// Returns the ends of at most `room` bars, and the number of requests in each. As many octaves are one bar
/// as it takes.
fn bars(latencies: &[(Option<u64>, u64)], room: usize) -> Vec<(u64, u64)> {
    let of = |octaves: u32| {
        let mut bars: Vec<(u64, u64)> = Vec::new();
        for (end, count) in latencies {
            let power = |end: u64| (end.max(2) - 1).ilog2().div_ceil(octaves).saturating_mul(octaves).min(62);
            let end = end.map_or(u64::MAX, |end| 1 << power(end));
            match bars.last_mut().filter(|(last, _)| *last == end) {
                Some((_, sum)) => *sum += count,
                None => bars.push((end, *count)),
            }
        }
        bars
    };
    // With 64 octaves, all are one bar.
    let fits = |octaves: &u32| of(*octaves).len() <= room.max(2);
    of((2..64).find(fits).unwrap_or(64))
}

/// Returns the last line: a question, a message, or as many keys as it has room for.
fn keys(app: &App, width: usize) -> String {
    match &app.question {
        Some(Question::Limit(typed)) => {
            let asked = format!("requests a second at most, 0 for no limit: {typed}_");
            if app.message.is_empty() { asked } else { format!("{asked}   {}", app.message) }
        }
        Some(Question::Drain(name)) => {
            format!("keep requests of {name} waiting, until d is pressed again? y/n")
        }
        Some(Question::Poll(rule)) => format!("poll={rule} for all queues? y/n"),
        None if !app.message.is_empty() => app.message.clone(),
        None => {
            let mut text = String::from("q quit");
            for key in ["s sort", "enter open", "d drain or resume", "l limit", "p polling", "arrows select"]
            {
                if text.len() + 2 + key.len() <= width {
                    text = text + "  " + key;
                }
            }
            text
        }
    }
}

/// Returns the number of lines that the words of a text need.
fn lines_of(text: &str, width: usize) -> u16 {
    let (mut lines, mut used) = (1, 0);
    for word in text.split(' ').map(|word| word.chars().count()) {
        if used > 0 && used + 1 + word > width {
            (lines, used) = (lines + 1, 0);
        }
        used += word + usize::from(used > 0);
        // A word that is longer than a line goes on in the next one.
        lines += (used.saturating_sub(1) / width.max(1)) as u16;
        used = if used > width { used % width.max(1) } else { used };
    }
    lines
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::app::Key;
    use crate::top::view::{View, WorkerView};

    /// Draws a screen of this width, and returns its lines.
    fn drawn(app: &App, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
        terminal.draw(|frame| draw(frame, app)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |row: u16| (0..width).map(|column| buffer[(column, row)].symbol().to_owned()).collect();
        (0..24).map(line).collect()
    }

    fn app() -> App {
        let device = |name: &str, limits: &str| DeviceView {
            name: name.into(),
            state: "connected".into(),
            limits: limits.into(),
            latencies: (0..40).map(|power| (Some(1 << power), power)).chain([(None, 1)]).collect(),
            queues: vec![QueueView { queue: 12, ..QueueView::default() }; 2],
            ..DeviceView::default()
        };
        let workers = vec![WorkerView { work: 1.0, ..WorkerView::default() }; 2];
        let devices = vec![device("database-of-the-shop", "iops=2000"), device("web", "")];
        let mut app = App::new("auto".into());
        app.show(View { workers, devices, ..View::default() });
        app
    }

    #[test]
    fn columns_go_and_names_stay() {
        let all =
            ["state", "read/s", "p99", "flight", "limits", "p50", "oldest", "kicks/s", "avoided", "other/s"];
        for (width, columns) in [(60, 2), (80, 4), (100, 6), (160, 10)] {
            let lines = drawn(&app(), width);
            let text = lines.join("\n");
            assert!(text.contains("database-of-the-shop connected"), "{width}:\n{text}");
            let shown = all.iter().filter(|heading| text.contains(**heading)).count();
            assert!(shown >= columns && (shown == 10 || width < 160), "{width}: {shown}\n{text}");
            // No heading is cut.
            let heads = lines.iter().find(|line| line.contains("device ")).unwrap();
            let known =
                |word: &str| ["device", "write/s", "bytes/s", "│"].contains(&word) || all.contains(&word);
            assert!(
                heads
                    .split_whitespace()
                    .flat_map(|word| word.split('│'))
                    .all(|word| word.is_empty() || known(word)),
                "{heads}"
            );
            assert!(text.contains("asleep   0.0 %") && text.contains("q quit"), "{width}:\n{text}");
        }
    }

    #[test]
    fn a_device_is_shown_whole() {
        for width in [60, 80, 130] {
            let mut app = app();
            app.press(Key::Enter);
            let text = drawn(&app, width).join("\n");
            for word in ["queue", "req/s", "polled", "requests by latency", "more"] {
                assert!(text.contains(word), "{width}: {word}\n{text}");
            }
        }
    }

    #[test]
    fn a_long_question_has_several_lines() {
        let mut app = app();
        app.press(Key::Char('d'));
        let text = drawn(&app, 40).join(" ");
        assert!(text.contains("database-of-the-shop") && text.contains("y/n"), "{text}");
        assert_eq!(lines_of("one two three", 80), 1);
        assert_eq!(lines_of("one two three", 8), 2);
        assert_eq!(lines_of("1234567890", 4), 3);
    }
}
