//! Renders the results as one page of HTML without external files.

pub mod canvas;
mod legend;
mod of_load;
mod over_rate;
mod over_time;
mod plot;
mod rates;
mod thin;

use anyhow::Result;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::host::Host;
use super::results::{Load, Results};
use super::table::{Grid, heading, remarks};
use canvas::{DARK, stand_alone};

/// The looks of the page. Its colours are variables, because dark pages have others.
const STYLE: &str = "
:root { color-scheme: light dark; --text: #222; --faint: #555; --line: #ddd; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --text: #d8dade; --faint: #9aa0a8; --line: #383c44; --paper: #16181d } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: var(--text); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1rem 0 }
dt { color: var(--faint) } dd { margin: 0 } code { font-size: 13px }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; overflow-wrap: normal }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); font-weight: normal;
         overflow-wrap: normal }
th:first-child { text-align: left; color: var(--faint); white-space: nowrap }
thead th { font-weight: bold; vertical-align: bottom }
@media (max-width: 30rem) { table { font-size: 12.5px } th, td { padding-right: .45rem } dl { gap: .2rem .6rem } }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; margin: 1rem 0 }
figure { margin: 0; max-width: 36rem } figcaption { color: var(--faint); font-size: 13px }
svg { width: 100%; height: auto; display: block }
.interrupted { border-left: 4px solid #d55e00; padding-left: .8rem }
";

/// Renders the page.
///
/// # Errors
/// A plot cannot be drawn.
pub(crate) fn page(results: &Results) -> Result<String> {
    let title = format!("kickless bench: {}", results.targets.join(", "));
    let capital = capital(results.units().plural);
    let overview = rates::draw(results)?;
    let mut loads = Vec::new();
    for load in &results.loads {
        loads.push(section(results, load)?);
    }
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(DARK)) }
            }
            body {
                h1 { (title) }
                (circumstances(&results.host))
                @if results.is_interrupted {
                    p class="interrupted" { "The run was interrupted. These are the figures so far." }
                }
                p { (about(results)) }
                figure {
                    (PreEscaped(overview))
                    figcaption { (capital) " a second: the median of all turns, with the least and the most." }
                }
                @for load in &loads { (load) }
            }
        }
    };
    Ok(page.into_string())
}

/// Says where, when and by which command the figures were measured.
fn circumstances(host: &Host) -> Markup {
    let cpus = format!("{} x {}", host.cpus, host.cpu);
    let date = host.date.replace('T', " ").replace('Z', " UTC");
    let rows = [("host", &host.host), ("kernel", &host.kernel), ("processors", &cpus), ("date", &date)];
    html! {
        dl {
            @for (name, value) in rows { dt { (name) } dd { (value) } }
            dt { "kickless" } dd { (env!("CARGO_PKG_VERSION")) }
            dt { "command" } dd { code { (host.command) } }
        }
    }
}

/// Explains the figures in one paragraph.
fn about(results: &Results) -> String {
    let rounds = results.loads.first().and_then(|load| load.turns.first()).map_or(0, Vec::len);
    let seconds = results.loads.first().map_or(0.0, |load| load.description.time.as_secs_f64());
    let plural = results.units().plural;
    let turns = if rounds == 1 { "turn" } else { "turns" };
    let ratios = match results.targets.len() {
        1 => "",
        _ => {
            " Each round runs the targets one after the other, with the same driver. A ratio compares turns of the same round."
        }
    };
    format!(
        "Each load has {rounds} {turns} of {seconds} s for each target. Rates and costs are medians of the turns. Latencies are those of all turns together, from the time when each of the {plural} was due to the \
         time when the driver saw that it was done.{ratios}"
    )
}

/// Draws the main plot: the rates of all targets at all loads.
///
/// # Errors
/// The plot cannot be drawn.
pub(crate) fn first_plot(results: &Results) -> Result<String> {
    rates::draw(results).map(|svg| stand_alone(&svg))
}

/// Draws latency and back-end CPU against the requested rate.
///
/// # Errors
/// The plot cannot be drawn.
pub(crate) fn over_rate(results: &Results) -> Result<String> {
    over_rate::draw(results).map(|svg| stand_alone(&svg))
}

/// Draws requests, kicks and back-end CPU over the time of the first load.
///
/// # Errors
/// The plot cannot be drawn.
pub(crate) fn over_time(results: &Results) -> Result<String> {
    let load = results.loads.first();
    load.map_or_else(|| Ok(String::new()), |load| over_time::draw(results, load).map(|svg| stand_alone(&svg)))
}

fn section(results: &Results, load: &Load) -> Result<Markup> {
    // A row for each figure, so that the table is as narrow as a phone.
    let grid = Grid::of(&results.targets, load);
    let has_names = grid.names.iter().any(|name| !name.is_empty());
    let plural = load.description.units.plural;
    let (latencies, timeline) = (of_load::latencies(results, load)?, of_load::timeline(results, load)?);
    Ok(html! {
        h2 { (heading(load)) }
        div class="wide" {
            table {
                @if has_names {
                    thead { tr { th {} @for name in &grid.names { th { (name) } } } }
                }
                tbody {
                    @for column in &grid.columns {
                        tr { th { (column.heading) } @for cell in &column.cells { td { (whole(cell)) } } }
                    }
                }
            }
        }
        @for line in remarks(&results.targets, load) { p { (line) } }
        div class="plots" {
            figure {
                (PreEscaped(latencies))
                figcaption { "Latency that a share of the " (plural) " does not exceed." }
            }
            figure {
                (PreEscaped(timeline))
                figcaption { (capital(plural)) " a second, the turns of each target one after the other." }
            }
        }
    })
}

/// Keeps a number and its unit on one line. Only the spread of a ratio may go to the next one.
fn whole(cell: &str) -> String {
    cell.replace(' ', "\u{a0}").replace("\u{a0}(", " (")
}

/// Returns the words with a capital letter.
fn capital(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
