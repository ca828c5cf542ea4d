//! Medians, ratios, a table for each workload, and everything as JSON.

use std::path::Path;
use std::process::Command;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};

use crate::measure::Row;
use crate::store::System;
use crate::systems::SYSTEMS;
use crate::workloads::Workload;

/// All figures of a run.
pub struct Report {
    figures: Vec<Figure>,
    about: Value,
}

struct Figure {
    workload: &'static str,
    system: &'static str,
    round: usize,
    row: Row,
}

/// One step of one system, over the rounds.
struct Line<'a> {
    system: &'static str,
    /// Values of the rounds, least first.
    values: Vec<f64>,
    /// Row of the median round.
    row: &'a Row,
}

impl Report {
    pub fn new(directory: &Path, rounds: usize, scale: f64) -> std::io::Result<Self> {
        let of = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output();
            let text = output.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned());
            text.unwrap_or_default()
        };
        let place = directory.to_string_lossy();
        let cores = std::thread::available_parallelism()?;
        Ok(Self {
            figures: Vec::new(),
            about: json!({
                "at": of("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]),
                "kernel": of("uname", &["-sr"]),
                "cores": cores.get(),
                "file_system": of("findmnt", &["-no", "FSTYPE,SOURCE", "-T", &place]),
                "rounds": rounds,
                "scale": scale,
            }),
        })
    }

    pub fn add(
        &mut self,
        workload: &Workload,
        system: &'static System,
        round: usize,
        rows: Vec<Row>,
    ) {
        self.figures.extend(rows.into_iter().map(|row| Figure {
            workload: workload.name,
            system: system.name,
            round,
            row,
        }));
    }

    /// Steps of a workload, in the order in which they came.
    fn steps(&self, workload: &str) -> Vec<&str> {
        let mut steps: Vec<&str> = Vec::new();
        for figure in self.figures.iter().filter(|f| f.workload == workload) {
            // A system that cannot run the workload reports that under the workload's name.
            if figure.row.value.is_some() && !steps.contains(&figure.row.step.as_str()) {
                steps.push(&figure.row.step);
            }
        }
        steps
    }

    fn lines(&self, workload: &str, step: &str) -> Vec<Line<'_>> {
        let line = |system: &'static System| {
            let of = |f: &&Figure| {
                f.workload == workload && f.system == system.name && f.row.step == step
            };
            let mut rows: Vec<&Row> = self.figures.iter().filter(of).map(|f| &f.row).collect();
            let order = |row: &&Row| row.value.unwrap_or(f64::MAX);
            rows.sort_by(|a, b| order(a).total_cmp(&order(b)));
            let row = *rows.get(rows.len() / 2)?;
            Some(Line {
                system: system.name,
                values: rows.iter().filter_map(|row| row.value).collect(),
                row,
            })
        };
        SYSTEMS.iter().filter_map(line).collect()
    }

    /// Prints the tables of one workload.
    pub fn print(&self, workload: &Workload) {
        println!("\n{}: {}", workload.name, workload.what);
        for step in self.steps(workload.name) {
            let lines = self.lines(workload.name, step);
            let wald = lines.iter().find(|line| line.system == "wald");
            let wald = wald.and_then(|line| line.row.value);
            let mut table = Table::new();
            table.load_style(presets::NOTHING).set_header([
                step,
                "median",
                "least",
                "most",
                "a second",
                "MB/s",
                "p50",
                "p99",
                "p99.9",
                "cpu",
                "written",
                "peak",
                "of Wald's",
                "flush",
            ]);
            for line in lines.iter().filter(|line| line.row.value.is_some()) {
                table.add_row(cells(line, wald));
            }
            for index in 1..13 {
                if let Some(column) = table.column_mut(index) {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
            println!("{table}");
            for line in &lines {
                if let Some(note) = &line.row.note {
                    println!("   {}: {note}", line.system);
                }
            }
        }
        // A system without any figure for the workload says why, once.
        for figure in self.figures.iter().filter(|f| f.workload == workload.name) {
            let unknown = !self
                .steps(workload.name)
                .contains(&figure.row.step.as_str());
            if unknown && figure.round == 0 {
                let why = figure.row.note.as_deref().unwrap_or_default();
                println!("   {} ({}): {why}", figure.system, figure.row.step);
            }
        }
    }

    pub fn json(&self) -> serde_json::Result<String> {
        let figure = |figure: &Figure| {
            json!({
                "workload": figure.workload,
                "system": figure.system,
                "round": figure.round,
                "row": figure.row,
            })
        };
        let medians = self.medians();
        let figures: Vec<Value> = self.figures.iter().map(figure).collect();
        serde_json::to_string_pretty(&json!({
            "about": self.about,
            "medians": medians,
            "figures": figures,
        }))
    }

    fn medians(&self) -> Vec<Value> {
        let mut workloads: Vec<&str> = self.figures.iter().map(|f| f.workload).collect();
        workloads.dedup();
        let mut medians = Vec::new();
        for workload in workloads {
            for step in self.steps(workload) {
                let lines = self.lines(workload, step);
                let wald = lines.iter().find(|line| line.system == "wald");
                let wald = wald.and_then(|line| line.row.value);
                medians.extend(lines.iter().map(|line| {
                    json!({
                        "workload": workload,
                        "step": step,
                        "system": line.system,
                        "unit": line.row.unit,
                        "median": line.row.value,
                        "least": line.values.first(),
                        "most": line.values.last(),
                        "of_wald": line.row.value.zip(wald).map(|(value, wald)| value / wald).filter(|r| r.is_finite()),
                        "flush": line.row.flush,
                        "note": line.row.note,
                    })
                }));
            }
        }
        medians
    }
}

fn cells(line: &Line<'_>, wald: Option<f64>) -> Vec<String> {
    let row = line.row;
    let is_time = row.unit == "s";
    let show = |value: f64| if is_time { time(value) } else { bytes(value) };
    let value = row.value.unwrap_or(f64::NAN);
    let latency = |index: usize| row.latency.map_or(String::new(), |of| time(of[index]));
    vec![
        line.system.to_owned(),
        show(value),
        line.values.first().copied().map_or(String::new(), show),
        line.values.last().copied().map_or(String::new(), show),
        if is_time {
            rate(1.0 / value)
        } else {
            String::new()
        },
        row.bytes_per_second
            .map_or(String::new(), |rate| format!("{:.0}", rate / 1e6)),
        latency(0),
        latency(1),
        latency(2),
        row.cpu.map_or(String::new(), time),
        row.written.map_or(String::new(), bytes),
        row.peak_bytes
            .map_or(String::new(), |peak| bytes(peak as f64)),
        ratio(value, wald),
        row.flush.clone(),
    ]
}

fn ratio(value: f64, wald: Option<f64>) -> String {
    match wald {
        Some(wald) if wald > 0.0 => format!("{:.2} x", value / wald),
        _ => String::new(),
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s if s >= 1e-6 => format!("{:.2} us", s * 1e6),
        s => format!("{:.1} ns", s * 1e9),
    }
}

fn bytes(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e4 => format!("{:.0} kB", b / 1e3),
        b => format!("{b:.0} B"),
    }
}

fn rate(rate: f64) -> String {
    match rate {
        r if r >= 1e6 => format!("{:.2} M", r / 1e6),
        r if r >= 1e4 => format!("{:.1} k", r / 1e3),
        r => format!("{r:.0}"),
    }
}
