//! Compares Wald's engine with other log libraries: the same work, on the same device, in one run.
//!
//! ```text
//! cargo run --release --manifest-path storage/benches/peers/Cargo.toml -- [--help]
//! ```
//!
//! Each system runs every workload that it supports, in a process of its own, in rounds: round 1 of all
//! systems, then round 2. Drift of the machine affects all systems alike, and only ratios within one run are
//! meaningful. Each figure is the median of the rounds. *As published* also times set-up and tear-down, as
//! the predecessors' own benchmarks did; *steady* times a store that already exists.

#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes of workloads are small"
)]

mod measure;
mod report;
mod store;
mod systems;
mod workloads;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Parser;

use self::measure::{Bench, Row};
use self::report::Report;
use self::store::System;
use self::systems::SYSTEMS;
use self::workloads::{WORKLOADS, Workload};

/// Compares Wald's engine with other logs that are libraries.
#[derive(Debug, Parser)]
struct Arguments {
    /// Only workloads whose name contains one of these.
    names: Vec<String>,
    /// Only systems whose name contains one of these (comma-separated).
    #[arg(long, value_delimiter = ',')]
    systems: Vec<String>,
    /// Number of rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Fraction of the full size of workloads; 0.01 for a quick test.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Directory for stores, on the device to measure. Default: next to this program.
    #[arg(long)]
    directory: Option<PathBuf>,
    /// File for the figures of all rounds, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Print all workloads and systems, and run nothing.
    #[arg(long)]
    list: bool,
    /// Run one workload on one system, and print its figures as a child process does.
    #[arg(long, hide = true, num_args = 2)]
    one: Option<Vec<String>>,
}

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("stores"));
    let Some(directory) = arguments.directory.clone().or_else(beside) else {
        return Err("no directory for stores".into());
    };
    std::fs::create_dir_all(&directory)?;
    if let Some(one) = &arguments.one {
        return run_one(&one[0], &one[1], &directory, arguments.scale);
    }
    if arguments.list {
        for workload in &WORKLOADS {
            println!("{:24} {}", workload.name, workload.what);
        }
        for system in &SYSTEMS {
            println!("{:24} {}", system.name, system.about);
        }
        return Ok(());
    }
    let chosen = |wanted: &[String], name: &str| {
        wanted.is_empty() || wanted.iter().any(|part| name.contains(part))
    };
    let mut report = Report::new(&directory, arguments.rounds, arguments.scale)?;
    for workload in WORKLOADS
        .iter()
        .filter(|w| chosen(&arguments.names, w.name))
    {
        for round in 0..arguments.rounds {
            for system in SYSTEMS.iter().filter(|s| s.roles.contains(&workload.role)) {
                if system.name == "wald" || chosen(&arguments.systems, system.name) {
                    let rows = in_a_process(workload, system, &directory, arguments.scale)?;
                    report.add(workload, system, round, rows);
                }
            }
        }
        report.print(workload);
        // The figures so far stay if a later workload fails.
        if let Some(file) = &arguments.json {
            std::fs::write(file, report.json()?)?;
        }
    }
    Ok(())
}

/// Runs one workload on one system in the child process, and prints its rows as JSON.
fn run_one(workload: &str, system: &str, directory: &Path, scale: f64) -> Result<(), Failure> {
    let workload = WORKLOADS.iter().find(|known| known.name == workload);
    let system = SYSTEMS.iter().find(|known| known.name == system);
    let (Some(workload), Some(system)) = (workload, system) else {
        return Err("no such workload or system".into());
    };
    let mut bench = Bench::new(system, directory, scale);
    (workload.run)(&mut bench);
    // The parent reads the last line, since a library may have printed others.
    println!("\n{}", serde_json::to_string(&bench.rows)?);
    Ok(())
}

fn in_a_process(
    workload: &Workload,
    system: &System,
    directory: &Path,
    scale: f64,
) -> Result<Vec<Row>, Failure> {
    eprint!("\r\x1b[K{} on {} ", workload.name, system.name);
    // A directory for this child only. It is removed with all files, however the child ends.
    let stores = tempfile::tempdir_in(directory)?;
    let directory = stores.path();
    let child = Command::new(std::env::current_exe()?)
        .args(["--one", workload.name, system.name])
        .arg("--scale")
        .arg(scale.to_string())
        .arg("--directory")
        .arg(directory)
        // Directory of walrus's files, and no output for each of them.
        .env("WALRUS_DATA_DIR", directory)
        .env("WALRUS_QUIET", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()?;
    eprint!("\r\x1b[K");
    let said = String::from_utf8_lossy(&child.stdout);
    match said.lines().last().map(serde_json::from_str::<Vec<Row>>) {
        Some(Ok(rows)) if child.status.success() => Ok(rows),
        _ => Err(format!(
            "{} on {} ended with {}: {}",
            workload.name,
            system.name,
            child.status,
            String::from_utf8_lossy(&child.stderr)
        )
        .into()),
    }
}
