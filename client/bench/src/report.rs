//! The report at the end: a table, JSON, plots.

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use jiff::Timestamp;
use serde::Serialize;
use wald_text::shown::{escaped, escaped_json};

use crate::Bench;
use crate::args::{BenchArgs, BenchOutput};
use crate::figure::{Figure, Measurement, Rounds};
use crate::record::Percentiles;
use crate::server::About;
use crate::spec::{LoadKind, Spec};
use crate::svg::{Line, Panel, picture};

/// A target and the reached value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TargetCheck {
    what: &'static str,
    least: Option<f64>,
    most: Option<f64>,
    /// Absent: the value is unknown.
    reached: Option<f64>,
    holds: Option<bool>,
}

impl TargetCheck {
    pub(crate) fn least(what: &'static str, least: f64, reached: Option<f64>) -> Self {
        Self {
            least: Some(least),
            holds: reached.map(|reached| reached >= least),
            ..Self::told(what, reached)
        }
    }

    pub(crate) fn most(what: &'static str, most: f64, reached: Option<f64>) -> Self {
        Self {
            most: Some(most),
            holds: reached.map(|reached| reached <= most),
            ..Self::told(what, reached)
        }
    }

    /// There is no target, but people want to know.
    pub(crate) fn told(what: &'static str, reached: Option<f64>) -> Self {
        Self {
            what,
            least: None,
            most: None,
            reached,
            holds: None,
        }
    }

    fn line(&self) -> String {
        let reached = self.reached.map_or("not known".to_owned(), number);
        let target = match (self.least, self.most) {
            (Some(least), _) => format!(", at least {}", number(least)),
            (_, Some(most)) => format!(", at most {}", number(most)),
            _ => String::new(),
        };
        let holds = match self.holds {
            Some(true) => ": reached",
            Some(false) => ": NOT reached",
            None => "",
        };
        format!("{} {reached}{target}{holds}", self.what)
    }
}

/// One load, or several at the same time, and the echo of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ReportEntry {
    pub(crate) name: String,
    pub(crate) wald: Rounds,
    pub(crate) echo: Option<Rounds>,
    /// Median of the rounds' ratios of records a second.
    pub(crate) ratio: Option<f64>,
    pub(crate) checks: Vec<TargetCheck>,
}

/// All of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Report {
    time: String,
    client_version: &'static str,
    cores: usize,
    server: About,
    rounds: u32,
    warm_up_seconds: f64,
    pub(crate) remark: Option<String>,
    pub(crate) entries: Vec<ReportEntry>,
}

impl Report {
    pub(crate) fn new(bench: &Bench) -> Self {
        Self {
            time: Timestamp::now().to_string(),
            client_version: env!("CARGO_PKG_VERSION"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            server: bench.about.clone(),
            rounds: bench.args.rounds,
            warm_up_seconds: bench.args.warm_up.as_secs_f64(),
            remark: None,
            entries: Vec::new(),
        }
    }

    /// Prints it, and writes the requested files.
    pub(crate) fn put(&self, args: &BenchArgs) -> Result<()> {
        if let Some(path) = &args.json {
            write(path, &(serde_json::to_string_pretty(self)? + "\n"))?;
        }
        if let Some(path) = &args.svg {
            write(path, &picture(&[self.latency_over_throughput()]))?;
        }
        if let Some(path) = &args.time_series {
            write(path, &picture(&self.over_time()))?;
        }
        let mut stdout = std::io::stdout();
        let text = match args.output {
            BenchOutput::Json if stdout.is_terminal() => {
                escaped_json(&serde_json::to_string(self)?)
            }
            BenchOutput::Json => serde_json::to_string(self)?,
            BenchOutput::Text => self.text(),
        };
        writeln!(stdout, "{text}").context("cannot write to stdout")
    }

    fn text(&self) -> String {
        let mut lines = vec![self.server.line()];
        lines.extend(
            self.server
                .caveats
                .iter()
                .map(|caveat| format!("  {caveat}")),
        );
        lines.push(format!(
            "client and its raw HTTP/2 connections on {} cores; {} round(s), medians",
            self.cores, self.rounds
        ));
        lines.push(String::new());
        lines.extend(self.table().lines().map(str::to_owned));
        for entry in &self.entries {
            for check in &entry.checks {
                lines.push(format!("{}: {}", entry.name, check.line()));
            }
        }
        for (name, figure) in self.figures() {
            for (error, count) in &figure.errors {
                lines.push(format!("{name}: {count} x {error}"));
            }
        }
        lines.extend(
            self.remark
                .iter()
                .flat_map(|text| text.lines())
                .map(str::to_owned),
        );
        // Names and errors come from a server.
        let lines: Vec<String> = lines.iter().map(|line| escaped(line)).collect();
        lines.join("\n")
    }

    fn figures(&self) -> impl Iterator<Item = (&str, &Figure)> {
        self.entries.iter().flat_map(|entry| {
            [Some(&entry.wald), entry.echo.as_ref()]
                .into_iter()
                .flatten()
                .flat_map(|rounds| &rounds.rounds)
                .flat_map(|round| &round.figures)
                .map(|figure| (entry.name.as_str(), figure))
        })
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header(COLUMNS);
        for entry in &self.entries {
            rows(&mut table, &entry.name, &entry.wald.median, entry.ratio);
            if let Some(echo) = &entry.echo {
                rows(&mut table, "  echo", &echo.median, None);
            }
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            if index > 0 {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.to_string()
    }

    /// Percentiles of each load over its rate.
    fn latency_over_throughput(&self) -> Panel {
        let mut lines: Vec<Line> = Vec::new();
        let mut add = |name: String, figure: &Figure, time: Option<f64>| {
            let Some(time) = time else { return };
            let point = (figure.acks_per_second, time);
            match lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push(point),
                None => lines.push(Line {
                    name,
                    points: vec![point],
                }),
            }
        };
        for entry in &self.entries {
            let both = [("wald", Some(&entry.wald)), ("echo", entry.echo.as_ref())];
            for (who, rounds) in both {
                let Some(figure) = rounds.map(|rounds| rounds.median.first()) else {
                    continue;
                };
                let times = figure.latency_us.as_ref();
                add(format!("{who} p50"), figure, times.map(|t| t.p50));
                add(format!("{who} p99"), figure, times.map(|t| t.p99));
                add(format!("{who} p99.9"), figure, times.map(|t| t.p999));
            }
        }
        Panel {
            title: self.title(),
            x: "acks a second".to_owned(),
            y: "latency, us".to_owned(),
            logarithmic: true,
            lines,
        }
    }

    fn title(&self) -> String {
        let load = self.entries.first().map(|entry| {
            let load = &entry.wald.median.first().load;
            format!(
                "{} of {} x {} B, {} connections, {} logs, acks {}",
                work(load.work),
                load.batch,
                load.record_bytes,
                load.connections,
                load.logs,
                level(load)
            )
        });
        format!(
            "{} on {}",
            load.unwrap_or_default(),
            self.server.file_system
        )
    }

    /// The seconds of the first load's first round.
    fn over_time(&self) -> Vec<Panel> {
        let round = self.entries.first().and_then(|e| e.wald.rounds.first());
        let series = round.map_or(&[][..], |round| &round.series);
        let panel = |title: &str, y: &str, lines: Vec<Line>| Panel {
            title: title.to_owned(),
            x: "seconds".to_owned(),
            y: y.to_owned(),
            logarithmic: false,
            lines,
        };
        let line = |name: &str, value: &dyn Fn(&crate::figure::Second) -> Option<f64>| Line {
            name: name.to_owned(),
            points: series
                .iter()
                .filter_map(|second| Some((second.at, value(second)?)))
                .collect(),
        };
        let rate = line("records", &|second| Some(second.records_per_second));
        let times = [
            line("p50", &|second| second.p50_us),
            line("p99.9", &|second| second.p999_us),
        ];
        let rss = line("RSS", &|second| second.rss_bytes);
        let open = line("descriptors", &|second| second.descriptors);
        let mut times = panel("Latency", "us", times.to_vec());
        times.logarithmic = true;
        vec![
            panel(&self.title(), "records a second", vec![rate]),
            times,
            panel("Memory of the server", "bytes", vec![rss]),
            panel("Open descriptors of the server", "", vec![open]),
        ]
    }
}

const COLUMNS: [&str; 16] = [
    "",
    "acks/s",
    "records/s",
    "MB/s",
    "of echo",
    "p50 us",
    "p90",
    "p99",
    "p99.9",
    "max",
    "server CPU s/M",
    "RSS MB",
    "flushes/s",
    "flush us",
    "records/group",
    "client CPU s/M",
];

/// A row for each load of a measurement; shared values are in the last.
fn rows(table: &mut Table, name: &str, measured: &Measurement, ratio: Option<f64>) {
    let loads = measured.figures.len();
    for (index, figure) in measured.figures.iter().enumerate() {
        let name = match loads {
            1 => name.to_owned(),
            _ => format!("{name}: {}", self::name(&figure.load)),
        };
        row(
            table,
            name,
            figure,
            figure.latency_us.as_ref(),
            measured,
            ratio,
            index + 1 == loads,
        );
        if let Some(seen) = &figure.delivery_us {
            row(
                table,
                "  seen by a follower".to_owned(),
                figure,
                Some(seen),
                measured,
                None,
                false,
            );
        }
    }
}

fn row(
    table: &mut Table,
    name: String,
    figure: &Figure,
    times: Option<&Percentiles>,
    measured: &Measurement,
    ratio: Option<f64>,
    shared: bool,
) {
    let server = measured.server.as_ref().filter(|_| shared);
    let records: u64 = measured.figures.iter().map(|figure| figure.records).sum();
    let per_million = |seconds: f64| (records > 0).then(|| seconds / records as f64 * 1e6);
    let told = |value: Option<f64>| value.map(number).unwrap_or_default();
    let time = |value: fn(&Percentiles) -> f64| told(times.map(value));
    table.add_row([
        name,
        number(figure.acks_per_second),
        number(figure.records_per_second),
        number(figure.bytes_per_second / 1e6),
        told(ratio),
        time(|times| times.p50),
        time(|times| times.p90),
        time(|times| times.p99),
        time(|times| times.p999),
        time(|times| times.max),
        told(server.and_then(|used| per_million(used.cpu_seconds))),
        told(server.map(|used| used.rss_bytes / 1e6)),
        told(server.map(|used| used.flushes / figure.seconds.max(1e-9))),
        told(server.and_then(|used| used.flush_mean_us)),
        told(server.and_then(|used| used.records_per_group)),
        told(per_million(measured.client_cpu_seconds).filter(|_| shared)),
    ]);
}

/// A load in a few words.
pub(crate) fn name(load: &Spec) -> String {
    let mut name = format!("{} {}, {}", level(load), work(load.work), load.in_flight);
    if let Some(rate) = load.rate {
        name += &format!(", {} a second", number(rate));
    }
    name
}

fn work(work: LoadKind) -> &'static str {
    match work {
        LoadKind::Append => "append",
        LoadKind::Batch => "batch",
        LoadKind::Session => "session",
        LoadKind::Scan => "scan",
        LoadKind::Read => "read",
        LoadKind::Follow => "follow",
        LoadKind::Followers => "followers",
    }
}

fn level(load: &Spec) -> &'static str {
    use crate::spec::Level;
    match load.durability {
        Level::Accepted => "accepted",
        Level::Written => "written",
        Level::Durable => "durable",
        Level::Replicated => "replicated",
    }
}

/// A number with its significant digits.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && digit.is_ascii_digit() && (whole.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + rest
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_mean_something() {
        let shown = [0.0, 0.5237, 4.0, 12.34, 999.6, 1234567.0].map(number);
        assert_eq!(shown, ["0", "0.524", "4.00", "12.3", "1,000", "1,234,567"]);
    }

    #[test]
    fn check_holds_on_its_side_of_the_bound_and_says_what_it_does_not_know() {
        assert_eq!(TargetCheck::least("x", 0.5, Some(0.5)).holds, Some(true));
        assert_eq!(TargetCheck::most("x", 0.5, Some(0.6)).holds, Some(false));
        let unknown = TargetCheck::most("RSS", 0.5, None);
        assert_eq!(unknown.holds, None);
        assert!(unknown.line().contains("not known"));
    }
}
