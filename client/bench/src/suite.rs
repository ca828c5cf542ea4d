//! Every row of the table of targets that uses gRPC, each next to its echo.

use anyhow::Result;

use crate::figure::{Figure, ratio};
use crate::report::{Report, ReportEntry, TargetCheck};
use crate::spec::{Level, LoadKind, Spec};
use crate::{Bench, Case, mixed};

/// The value that a row must reach. Times in microseconds.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// Share of the echo's rate.
    Echo(f64),
    /// Records a second.
    Rate(f64),
    /// Bytes a second.
    Bytes(f64),
    P99(f64),
    /// Median, of the sum of the echo's median and a flush's.
    RoundTripAndFlush(f64),
    /// Share of the rate of the row with this name.
    OfRow(&'static str, f64),
    Delivery50(f64),
    Delivery99(f64),
    /// The server's processor seconds for a million records.
    Cpu(f64),
    Rss(f64),
}

fn rows(bench: &Bench) -> Vec<(&'static str, Spec, Vec<Target>)> {
    use Target::{
        Bytes, Cpu, Delivery50, Delivery99, Echo, OfRow, P99, Rate, RoundTripAndFlush, Rss,
    };
    let append = |in_flight: usize| Spec {
        in_flight,
        connections: bench.args.connections,
        filled: bench.args.filled,
        prefix: bench.args.prefix.clone(),
        ..Spec::default()
    };
    let of = |work: LoadKind, in_flight: usize| Spec {
        work,
        ..append(in_flight)
    };
    let batches = |in_flight: usize| Spec {
        batch: 100,
        ..of(LoadKind::Batch, in_flight)
    };
    let kibibyte = |spec: Spec| Spec {
        record_bytes: 1024,
        ..spec
    };
    let written = |spec: Spec| Spec {
        durability: Level::Written,
        ..spec
    };
    let thousand = Spec {
        logs: 1_000,
        ..append(64)
    };
    vec![
        (
            "W1, 1 in flight",
            append(1),
            vec![Rate(4_500.0), RoundTripAndFlush(1.1)],
        ),
        ("W1, 16", append(16), vec![Echo(0.5)]),
        (
            "W1, 64",
            append(64),
            vec![Echo(0.52), P99(1_500.0), Cpu(11.0)],
        ),
        ("W1, 256", append(256), vec![Echo(0.8), Cpu(8.5), Rss(50e6)]),
        ("W1, 64, 1 KiB", kibibyte(append(64)), vec![Echo(0.58)]),
        (
            "W1, 64 over 1,000 logs",
            thousand,
            vec![OfRow("W1, 64", 0.9)],
        ),
        (
            "W1 by session, 1,024",
            of(LoadKind::Session, 1_024),
            vec![Echo(0.5), Cpu(1.0)],
        ),
        ("W2, 64", written(append(64)), vec![Echo(0.8)]),
        ("W3, 1", batches(1), vec![Rate(400_000.0)]),
        ("W3, 16", batches(16), vec![Rate(1_700_000.0), Cpu(0.5)]),
        ("W4", of(LoadKind::Scan, 1), vec![Rate(3_500_000.0)]),
        (
            "W4, 1 KiB",
            kibibyte(of(LoadKind::Scan, 1)),
            vec![Bytes(0.8e9)],
        ),
        ("W5, 64", of(LoadKind::Read, 64), vec![Echo(0.85)]),
        (
            "W6 durable",
            of(LoadKind::Follow, 1),
            vec![Delivery50(330.0), Delivery99(700.0)],
        ),
        (
            "W6 written",
            written(of(LoadKind::Follow, 1)),
            vec![Delivery50(180.0)],
        ),
    ]
}

/// Measures all rows, in turn.
pub(crate) fn run(bench: &Bench, report: &mut Report) -> Result<()> {
    let rows = rows(bench);
    let cases: Vec<Case> = rows
        .iter()
        .map(|(name, spec, _)| Case::one(*name, spec.clone()))
        .collect();
    let mut entries = bench.pairs(&cases, true)?;
    for (index, (_, _, targets)) in rows.iter().enumerate() {
        let checks = targets
            .iter()
            .map(|target| check(*target, &entries[index], &entries, bench))
            .collect();
        entries[index].checks = checks;
    }
    entries.extend(mixed::entries(bench)?);
    report.entries = entries;
    Ok(())
}

fn check(target: Target, row: &ReportEntry, rows: &[ReportEntry], bench: &Bench) -> TargetCheck {
    let figure = row.wald.median.first();
    let latency = figure.latency_us.as_ref();
    let delivery = figure.delivery_us.as_ref();
    match target {
        Target::Echo(least) => TargetCheck::least("of echo", least, row.ratio),
        Target::Rate(least) => TargetCheck::least("records/s", least, Some(figure.rate())),
        Target::Bytes(least) => TargetCheck::least("bytes/s", least, Some(figure.bytes_per_second)),
        Target::P99(most) => TargetCheck::most("p99 us", most, latency.map(|times| times.p99)),
        Target::RoundTripAndFlush(most) => {
            let echo = row.echo.as_ref().map(|echo| echo.median.first());
            let quotient = || {
                let round_trip = echo?.latency_us.as_ref()?.p50;
                Some(latency?.p50 / (round_trip + bench.about.flush_p50_us?))
            };
            TargetCheck::most("p50, of echo + flush", most, quotient())
        }
        Target::OfRow(name, least) => {
            let base = rows.iter().find(|row| row.name == name);
            let ratio = base.and_then(|base| ratio(&row.wald, &base.wald, Figure::rate));
            TargetCheck::least("of one log", least, ratio)
        }
        Target::Delivery50(most) => {
            TargetCheck::most("seen, p50 us", most, delivery.map(|times| times.p50))
        }
        Target::Delivery99(most) => {
            TargetCheck::most("seen, p99 us", most, delivery.map(|times| times.p99))
        }
        Target::Cpu(most) => {
            let used = row.wald.median.server_cpu_seconds_per_million_records;
            TargetCheck::most("server CPU s/M records", most, used)
        }
        Target::Rss(most) => {
            let used = row.wald.median.server.as_ref().map(|used| used.rss_bytes);
            TargetCheck::most("RSS bytes", most, used)
        }
    }
}
