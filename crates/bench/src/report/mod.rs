//! Renders the results as one page of HTML without external files.

mod over_rate;
mod over_time;
mod plot;
mod thin;

use anyhow::Result;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::results::{Load, Results};
use super::table::{core_latencies, rows};

const STYLE: &str = "
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
figure { margin: 1rem 0; display: inline-block } figcaption { color: #555; font-size: 13px }
svg { max-width: 100%; height: auto }
";

/// Renders the page.
///
/// # Errors
/// A plot cannot be drawn.
pub(crate) fn page(results: &Results) -> Result<String> {
    let title = format!("kickless bench: {}", results.targets.join(", "));
    let capital = capital(results.units().plural);
    let overview = first_plot(results)?;
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
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
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

/// Explains the figures in one paragraph.
fn about(results: &Results) -> String {
    let rounds = results.loads.first().and_then(|load| load.turns.first()).map_or(0, Vec::len);
    let seconds = results.loads.first().map_or(0.0, |load| load.description.time.as_secs_f64());
    let plural = results.units().plural;
    format!(
        "{rounds} turns of {seconds} s each, with the same driver. Each round runs the targets one after the other. Rates and costs are \
         medians of the turns. Latencies are those of all turns together, from the time when each of the {plural} was due to the \
         time when the driver saw that it was done. A ratio compares turns of the same round. kickless {}.",
        env!("CARGO_PKG_VERSION")
    )
}

/// Draws the main plot: the rates of all targets at all loads.
///
/// # Errors
/// The plot cannot be drawn.
pub(crate) fn first_plot(results: &Results) -> Result<String> {
    plot::rates(results)
}

/// Draws latency and back-end CPU against the requested rate.
///
/// # Errors
/// The plot cannot be drawn.
pub(crate) fn over_rate(results: &Results) -> Result<String> {
    over_rate::draw(results)
}

/// Draws requests, kicks and back-end CPU over the time of the first load.
///
/// # Errors
/// The plot cannot be drawn.
pub(crate) fn over_time(results: &Results) -> Result<String> {
    results.loads.first().map_or_else(|| Ok(String::new()), |load| over_time::draw(results, load))
}

fn section(results: &Results, load: &Load) -> Result<Markup> {
    let table = rows(results, load);
    let plural = load.description.units.plural;
    let (latencies, timeline) = (plot::latencies(results, load)?, plot::timeline(results, load)?);
    Ok(html! {
        h2 { (load.description.words) }
        table {
            @for (at, row) in table.iter().enumerate() {
                tr {
                    @for cell in row {
                        @if at == 0 { th { (cell) } } @else { td { (cell) } }
                    }
                }
            }
        }
        @for line in core_latencies(results, load) { p { (line) } }
        figure { (PreEscaped(latencies)) figcaption { "Latency that a share of the " (plural) " does not exceed." } }
        figure { (PreEscaped(timeline)) figcaption { (capital(plural)) " a second, the turns of each target one after the other." } }
    })
}

/// Returns the words with a capital letter.
fn capital(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
