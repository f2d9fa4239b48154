//! Formats the results as text.

use std::io::stdout;

use super::core_latency;
use super::description::Units;
use super::layout::{columns, rate, time, wrapped};
use super::results::{Load, Results, Spread};
use super::terminal;
use super::turn::{Latencies, Turn, Verified};

/// The tables of a run, which fit into the terminal.
#[derive(Debug)]
pub(crate) struct Tables {
    width: usize,
    /// The headings of the columns for which there was no room.
    left_out: Vec<String>,
    is_first: bool,
}

impl Tables {
    /// Makes tables for standard output.
    pub(crate) fn new() -> Self {
        Self::of_width(terminal::width(stdout()))
    }

    fn of_width(width: usize) -> Self {
        Self { width, left_out: Vec::new(), is_first: true }
    }

    /// Formats the table of a load.
    pub(crate) fn load(&mut self, targets: &[String], load: &Load) -> String {
        let mut text = if self.is_first { String::new() } else { "\n".into() };
        self.is_first = false;
        let mut grid = Grid::of(targets, load);
        for heading in grid.fit(self.width) {
            if !self.left_out.contains(&heading) {
                self.left_out.push(heading);
            }
        }
        text += &wrapped(&heading(load), self.width);
        text += &columns(&grid.rows());
        for line in remarks(targets, load) {
            text += &wrapped(&line, self.width);
        }
        text
    }

    /// Says which columns were left out.
    pub(crate) fn note(&self) -> String {
        match self.left_out.is_empty() {
            true => String::new(),
            false => {
                let (width, left_out) = (self.width, self.left_out.join(", "));
                "\n".to_owned()
                    + &wrapped(
                        &format!("not in {width} columns, but in wider ones and in --json: {left_out}"),
                        width,
                    )
            }
        }
    }
}

/// Formats the load, and says if it was interrupted.
pub(crate) fn heading(load: &Load) -> String {
    let words = load.description.words();
    match load.turns.iter().flatten().find(|turn| turn.is_interrupted) {
        Some(turn) => format!("{words}; interrupted after {:.1} s of a turn", turn.seconds),
        None => words,
    }
}

/// Returns the sentences below a table.
pub(crate) fn remarks(targets: &[String], load: &Load) -> Vec<String> {
    let verified = targets.iter().enumerate().filter_map(|(at, name)| {
        let name = if targets.len() > 1 { format!("{name}: ") } else { String::new() };
        Some(name + &checks(load.verified(at)?))
    });
    verified.chain(core_latencies(targets, load)).collect()
}

/// Says what was verified.
fn checks(Verified { reads, unknown_reads, read_back }: Verified) -> String {
    let after = match read_back {
        // Nothing was read at the end of a turn that a signal has ended.
        0 => String::new(),
        _ => format!(", and all {read_back} written blocks after it,"),
    };
    let unknown = match unknown_reads {
        0 => String::new(),
        _ => format!("; {unknown_reads} reads found blocks that were not written yet"),
    };
    format!("verified: {reads} reads during the load{after} return what was written{unknown}")
}

/// The figures of a load: a row for each target, and for its reads and its writes.
#[derive(Debug)]
pub(crate) struct Grid {
    /// The headings of the rows. All are empty if there is one row.
    pub(crate) names: Vec<String>,
    pub(crate) columns: Vec<Column>,
}

/// A figure of all rows.
#[derive(Debug)]
pub(crate) struct Column {
    pub(crate) heading: String,
    pub(crate) cells: Vec<String>,
    /// Columns of a high rank are left out if there is no room.
    rank: u8,
}

/// The rank of the columns that are always there.
const RANK_ALWAYS: u8 = 0;

impl Column {
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.fold(self.heading.chars().count(), usize::max)
    }
}

/// A row before its figures are formatted.
struct RowFigures {
    name: String,
    rate: Option<Spread>,
    latencies: Option<Latencies>,
    /// The number of the target, if the row is of all its requests.
    target: Option<usize>,
}

impl RowFigures {
    /// Returns the rows of all targets.
    fn all(targets: &[String], load: &Load) -> Vec<Self> {
        let operations = load.operations();
        let mut rows = Vec::new();
        for (at, name) in targets.iter().enumerate() {
            let name = match (targets.len(), operations.is_empty()) {
                (1, true) => String::new(),
                (1, false) => "all".into(),
                _ => name.clone(),
            };
            let latencies = load.latencies(at);
            rows.push(Self { name, rate: load.spread(at, Turn::rate), latencies, target: Some(at) });
            for &operation in &operations {
                let (rate, latencies) = load.operation(at, operation).unzip();
                rows.push(Self { name: format!("  {operation}"), rate, latencies, target: None });
            }
        }
        rows
    }

    fn latency(&self, quantile: f64) -> Option<String> {
        let all = self.latencies.as_ref().filter(|all| !all.is_empty())?;
        Some(time(all.value_at_quantile(quantile) as f64))
    }
}

impl Grid {
    /// Makes the figures of a load. A figure that no row has is left out.
    pub(crate) fn of(targets: &[String], load: &Load) -> Self {
        let rows = RowFigures::all(targets, load);
        let Units { rate: rate_heading, bytes: bytes_heading, bytes_unit, each, .. } = load.description.units;
        let mut columns = Vec::new();
        let mut column = |heading: &str, rank: u8, cell: &dyn Fn(&RowFigures) -> Option<String>| {
            let cells: Vec<Option<String>> = rows.iter().map(cell).collect();
            if cells.iter().any(Option::is_some) {
                let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".into())).collect();
                columns.push(Column { heading: heading.into(), cells, rank });
            }
        };
        let median = |row: &RowFigures, figure: fn(&Turn) -> Option<f64>| {
            load.spread_of_some(row.target?, figure).map(|spread| spread.median)
        };
        let bytes = |row: &RowFigures| {
            let bytes = row.rate?.median * f64::from(load.description.bytes) / bytes_unit;
            // A gigabit is a lot, so it gets more digits than a mebibyte.
            Some(if bytes < 100.0 { format!("{bytes:.2}") } else { format!("{bytes:.0}") })
        };
        let each_time =
            |row: &RowFigures, figure: fn(&Turn) -> Option<f64>| Some(time(median(row, figure)?.round()));
        let each_number =
            |row: &RowFigures, figure: fn(&Turn) -> Option<f64>| Some(format!("{:.4}", median(row, figure)?));
        let count = |count: u64| (count > 0).then(|| count.to_string());
        column(rate_heading, RANK_ALWAYS, &|row| Some(rate(row.rate?.median.round())));
        column(bytes_heading, 4, &bytes);
        column("p50", 1, &|row| row.latency(0.5));
        column("p99", 2, &|row| row.latency(0.99));
        column("p99.9", 6, &|row| row.latency(0.999));
        column("max", 5, &|row| row.latency(1.0));
        column(&format!("kicks/{each}"), 9, &|row| each_number(row, |turn| Some(turn.kicks_per_request())));
        column(&format!("calls/{each}"), 10, &|row| each_number(row, |turn| Some(turn.calls_per_request())));
        column(&format!("driver CPU/{each}"), 8, &|row| {
            each_time(row, |turn| Some(turn.driver_cpu_per_request()))
        });
        column(&format!("back-end CPU/{each}"), 7, &|row| each_time(row, Turn::back_end_cpu_per_request));
        column("of a core", 3, &|row| {
            median(row, Turn::back_end_cores).map(|share| format!("{:.1} %", share * 100.0))
        });
        let first = targets.first().map(String::as_str).unwrap_or_default();
        column(&format!("{first} / this"), RANK_ALWAYS, &|row| {
            row.target.filter(|at| *at > 0).and_then(|at| load.ratio(at)).map(ratio)
        });
        column("lost", RANK_ALWAYS, &|row| count(load.lost(row.target?)));
        column("failed", RANK_ALWAYS, &|row| count(load.failed(row.target?).0));
        Self { names: rows.into_iter().map(|row| row.name).collect(), columns }
    }

    /// Leaves out columns until a row has at most `width` characters. Returns their headings.
    fn fit(&mut self, width: usize) -> Vec<String> {
        let names = self.names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let mut left_out = Vec::new();
        loop {
            let all = self.columns.iter().map(|column| 2 + column.width()).sum::<usize>() + names;
            let last =
                (0..self.columns.len()).max_by_key(|at| self.columns.get(*at).map(|column| column.rank));
            match last.and_then(|at| Some((at, self.columns.get(at)?.rank))) {
                Some((at, rank)) if all > width && rank > RANK_ALWAYS => {
                    left_out.push(self.columns.remove(at).heading);
                }
                _ => return left_out,
            }
        }
    }

    /// Returns the headings, and the rows.
    fn rows(&self) -> Vec<Vec<String>> {
        let headings =
            std::iter::once(String::new()).chain(self.columns.iter().map(|column| column.heading.clone()));
        let rows = self.names.iter().enumerate().map(|(at, name)| {
            let cells = self.columns.iter().map(|column| column.cells.get(at).cloned().unwrap_or_default());
            std::iter::once(name.clone()).chain(cells).collect()
        });
        std::iter::once(headings.collect()).chain(rows).collect()
    }
}

/// Formats the rates of all loads as a table of Markdown, each with the ratios of the first target to the
/// others.
pub(crate) fn markdown(results: &Results) -> String {
    let Some(first) = results.loads.first() else { return String::new() };
    let targets = &results.targets;
    let name = |at: usize| targets.get(at).map(String::as_str).unwrap_or_default();
    let mut headings = vec![if results.loads.len() > 1 {
        first.description.common(results.descriptions())
    } else {
        String::new()
    }];
    headings.extend(targets.iter().cloned());
    headings.extend((1..targets.len()).map(|at| format!("{} / {}", name(0), name(at))));
    let mut rows = vec![headings, vec!["---".to_owned(); 2 * targets.len()]];
    for load in &results.loads {
        let mut row = vec![load.description.label(results.descriptions())];
        let of = |spread: Option<Spread>| {
            spread.map_or("-".into(), |spread| format!("{}/s", rate(spread.median.round())))
        };
        row.extend((0..targets.len()).map(|at| of(load.spread(at, Turn::rate))));
        row.extend((1..targets.len()).map(|at| load.ratio(at).map_or("-".into(), ratio)));
        rows.push(row);
    }
    let line = |row: Vec<String>| format!("| {} |\n", row.join(" | "));
    // The bar of a command's name would end the cell.
    rows.into_iter().map(|row| line(row.into_iter().map(|cell| cell.replace('|', "\\|")).collect())).collect()
}

/// Returns sentences about the core-to-core latency in each round, and about the ratios at each latency if
/// there are several. Empty if it was not measured.
pub(crate) fn core_latencies(targets: &[String], load: &Load) -> Vec<String> {
    let each: Vec<String> =
        load.core_latencies.iter().filter_map(|latencies| latency_of_round(latencies)).collect();
    if each.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![format!("core-to-core latency in each round: {}", each.join(", "))];
    if load.repeats > 0 {
        lines.push(format!("rounds repeated because it changed: {}", load.repeats));
    }
    let groups = core_latency::groups(&load.core_latencies);
    for group in if groups.len() > 1 { groups } else { Vec::new() } {
        let latencies = group.iter().filter_map(|round| load.core_latencies.get(*round)).flatten();
        let Some(Spread { median, .. }) = Spread::of(latencies.copied().flatten()) else { continue };
        let ratios: Vec<String> = (1..targets.len())
            .filter_map(|at| {
                let ratio = ratio(load.ratio_in(at, |round| group.contains(&round))?);
                Some(format!("{} / {} {ratio}", targets.first()?, targets.get(at)?))
            })
            .collect();
        let (latency, rounds, all) = (time(median.round()), group.len(), load.core_latencies.len());
        lines.push(format!("with {latency}, {rounds} of {all} rounds: {}", ratios.join(", ")));
    }
    lines
}

/// Formats the core-to-core latency in a round.
fn latency_of_round(latencies: &[Option<f64>]) -> Option<String> {
    let Spread { median, least, most } = Spread::of(latencies.iter().copied().flatten())?;
    Some(match core_latency::is_same(latencies) {
        true => time(median.round()),
        false => format!("{} to {} (changed)", time(least.round()), time(most.round())),
    })
}

/// Formats a ratio with its spread.
pub(crate) fn ratio(Spread { median, least, most }: Spread) -> String {
    if least == most { format!("{median:.2}") } else { format!("{median:.2} ({least:.2} to {most:.2})") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::Description;
    use crate::host::Host;
    use crate::turn::Operation;

    fn load(rates: &[&[u64]]) -> Load {
        let turns = rates.iter().map(|rates| rates.iter().copied().map(Turn::fake).collect()).collect();
        Load { description: Description::fake(&["reads"]), turns, core_latencies: Vec::new(), repeats: 0 }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_latency_of_each_round_and_the_ratios_at_each_latency_are_shown() {
        let targets = names(&["a", "b"]);
        let mut load = Load {
            core_latencies: [
                &[Some(80.0), Some(81.2)] as &[_],
                &[Some(79.0), None],
                &[Some(80.0), Some(400.0)],
            ]
            .map(<[_]>::to_vec)
            .to_vec(),
            repeats: 2,
            ..load(&[&[300, 150, 100], &[200, 100, 100]])
        };
        let first = "core-to-core latency in each round: 81 ns, 79 ns, 80 ns to 400 ns (changed)";
        assert_eq!(core_latencies(&targets, &load), [first, "rounds repeated because it changed: 2"]);
        load.core_latencies[1] = vec![Some(400.0)];
        assert_eq!(
            core_latencies(&targets, &load)[2..],
            ["with 81 ns, 1 of 3 rounds: a / b 1.50", "with 400 ns, 1 of 3 rounds: a / b 1.50"]
        );
        load.core_latencies = vec![vec![]; 3];
        assert!(core_latencies(&targets, &load).is_empty());
        let text = Tables::of_width(80).load(&targets, &load);
        assert!(text.starts_with("reads\n") && !text.contains("latency in each"));
    }

    #[test]
    fn columns_go_and_words_stay() {
        let targets = names(&["kickless", "qemu-storage-daemon"]);
        for width in [40, 60, 80, 120, 200] {
            let mut tables = Tables::of_width(width);
            let text = tables.load(&targets, &load(&[&[300, 150], &[200, 100]])) + &tables.note();
            // The columns that are always there are wider than the narrowest terminal.
            let most = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(most <= width.max(60), "{width}:\n{text}");
            assert!(text.contains("kickless / this") && text.contains("IOPS"), "{text}");
            let is_shown = text.lines().nth(1).unwrap().contains("calls/req");
            assert!(is_shown != text.contains("not in "), "{width}:\n{text}");
        }
    }

    #[test]
    fn reads_and_writes_have_rows_of_their_own() {
        let mut mixed = load(&[&[300]]);
        for (name, done, latency) in [("reads", 200, 1000), ("writes", 100, 5000)] {
            let mut operation = Operation { done, ..Operation::new(name).unwrap() };
            operation.latencies.record(latency).unwrap();
            mixed.turns[0][0].operations.push(operation);
        }
        let text = Tables::of_width(80).load(&names(&["/run/disk.sock"]), &mixed);
        let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(row("all ").contains(" 300 ") && row("  reads ").contains(" 200 "), "{text}");
        assert!(row("  writes ").contains("5.00 us"), "{text}");
        assert!(!text.contains("disk.sock"), "{text}");
    }

    #[test]
    fn a_table_of_markdown() {
        let mut results = Results::new(Host::this(), names(&["a", "b|c"]));
        for parts in [["reads", "sleeping"], ["reads", "polling"]] {
            let load = load(&[&[3000, 1500], &[1000, 500]]);
            results.loads.push(Load { description: Description::fake(&parts), ..load });
        }
        let table = markdown(&results);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines,
            [
                r"| reads | a | b\|c | a / b\|c |",
                "| --- | --- | --- | --- |",
                "| sleeping | 2.25 k/s | 750/s | 3.00 |",
                "| polling | 2.25 k/s | 750/s | 3.00 |",
            ]
        );
    }

    #[test]
    fn checks_are_named() {
        let verified = Verified { reads: 3, unknown_reads: 0, read_back: 2 };
        let said =
            "verified: 3 reads during the load, and all 2 written blocks after it, return what was written";
        assert_eq!(checks(verified), said);
        assert!(
            checks(Verified { unknown_reads: 7, ..verified })
                .ends_with("7 reads found blocks that were not written yet")
        );
    }
}
