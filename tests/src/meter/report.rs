//! Reduces the rounds of a behaviour to a row, and prints tables.

use std::time::Duration;

use crate::meter::behaviour::{Behaviour, Bound};
use crate::meter::turn::{Place, Round};

/// The largest loss of rate, in hundredths.
const LOSS_MAX: f64 = 30.0;
/// The longest request.
const WORST_MAX: Duration = Duration::from_millis(50);

/// The medians of the rounds of a behaviour.
#[derive(Clone, Debug)]
pub struct Row {
    /// The name of the behaviour.
    pub name: &'static str,
    /// The worker of the attacker.
    pub place: Place,
    bound: Bound,
    victims: Vec<Medians>,
    /// Deeds in a round.
    done: u64,
    /// Frames of others that the attacker saw, in all rounds.
    seen: u64,
}

#[derive(Clone, Debug)]
struct Medians {
    name: &'static str,
    idle_rate: f64,
    /// In hundredths. Negative if the victim was faster.
    loss: f64,
    idle_worst: Duration,
    worst: Duration,
    lost: u64,
}

impl Row {
    /// Takes the medians of the rounds of each victim.
    pub fn new(behaviour: &Behaviour, place: Place, rounds: &[Round]) -> Row {
        let mut names: Vec<&str> = rounds.iter().map(|round| round.victim.name).collect();
        names.sort_unstable_by(|a, b| b.cmp(a));
        names.dedup();
        let victims = names.into_iter().map(|name| {
            let of = || rounds.iter().map(|round| round.victim).filter(move |victim| victim.name == name);
            Medians {
                name,
                idle_rate: median(of().map(|figures| figures.idle_rate)),
                loss: median(of().map(|figures| 100.0 * (1.0 - figures.rate / figures.idle_rate.max(1.0)))),
                idle_worst: seconds(median(of().map(|figures| figures.idle_worst.as_secs_f64()))),
                worst: seconds(median(of().map(|figures| figures.worst.as_secs_f64()))),
                lost: median(of().map(|figures| figures.lost as f64)) as u64,
            }
        });
        Row {
            name: behaviour.name,
            place,
            bound: behaviour.bound,
            victims: victims.collect(),
            done: median(rounds.iter().map(|round| round.deed.done as f64)) as u64,
            seen: rounds.iter().map(|round| round.deed.seen).sum(),
        }
    }

    /// Returns the limits that the row does not keep, as the ends of a sentence.
    pub fn offences(&self) -> Vec<String> {
        let mut offences = Vec::new();
        if self.seen > 0 {
            offences.push(format!("the attacker saw {} frames of others", self.seen));
        }
        for victim in self.victims.iter().filter(|_| self.bound == Bound::Strict) {
            if victim.loss > LOSS_MAX {
                offences
                    .push(format!("the victim's {} lost {:.0} % of their rate", victim.name, victim.loss));
            }
            if victim.worst > WORST_MAX {
                let worst = milliseconds(victim.worst);
                offences.push(format!("the worst request of the victim's {} took {worst}", victim.name));
            }
        }
        offences
    }

    /// Returns the loss and the worst request of the victim that suffered more, for a table of a page.
    fn cell(&self) -> String {
        let loss = self.victims.iter().map(|victim| victim.loss).fold(0.0, f64::max);
        let worst = self.victims.iter().map(|victim| victim.worst).max().unwrap_or_default();
        let seen = if self.seen > 0 { format!(", sees {} frames", self.seen) } else { String::new() };
        format!("{loss:.0} %, {}{seen}", milliseconds(worst))
    }

    fn mark(&self) -> &'static str {
        match self.bound {
            Bound::Strict => "",
            Bound::Kernel(_) => " (kernel)",
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.place == Place::SameWorker { "same" } else { "other" };
        write!(f, "{:<44} {place:<5} {:>8} deeds", format!("{}{}", self.name, self.mark()), self.done)?;
        for victim in &self.victims {
            let Medians { name, idle_rate, loss, idle_worst, worst, lost } = victim;
            let (idle, worst) = (milliseconds(*idle_worst), milliseconds(*worst));
            write!(f, " | {name} {:>4.0} k/s {loss:>4.0} %, {idle} -> {worst}", idle_rate / 1000.0)?;
            if *lost > 0 {
                write!(f, ", {lost} lost")?;
            }
        }
        if self.seen > 0 {
            write!(f, " | sees {} frames of others", self.seen)?;
        }
        Ok(())
    }
}

/// Prints the rows of one kind as a table of a page.
pub fn print_page(kind: &str, rows: &[Row]) {
    println!("\n### {kind}\n\n| behaviour | loss of rate, worst request |\n| --- | --- |");
    for row in rows {
        println!("| {}{} | {} |", row.name, row.mark(), row.cell());
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn milliseconds(time: Duration) -> String {
    let time = time.as_secs_f64() * 1000.0;
    if time < 10.0 { format!("{time:.1} ms") } else { format!("{time:.0} ms") }
}
