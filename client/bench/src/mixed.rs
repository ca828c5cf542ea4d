//! Strict writers together with async writers, and both together with a scan: the rate of each
//! alone, and the share that remains together.

use anyhow::Result;

use crate::report::{Report, ReportEntry, TargetCheck};
use crate::spec::{Level, LoadKind, Spec};
use crate::{Bench, Case, Rounds};

/// Default number of calls under way of each kind of writer.
const IN_FLIGHT: usize = 16;

/// Maximum growth of the strict writers' p99, and minimum share that must remain for async
/// ones.
const STRICT_P99: f64 = 1.5;
const ASYNC_RATE: f64 = 0.8;

/// Default appends per second of each kind where they are paced: both together leave half of
/// two processors free.
const PACE: f64 = 2_500.0;

fn specs(bench: &Bench, rate: Option<f64>) -> [Spec; 3] {
    let in_flight = bench.args.in_flight.first().copied().unwrap_or(IN_FLIGHT);
    let base = Spec {
        in_flight,
        connections: bench.args.connections.div_ceil(2),
        rate,
        ..bench.spec()
    };
    let prefix = &bench.args.prefix;
    [
        Spec {
            work: LoadKind::Append,
            durability: Level::Durable,
            prefix: format!("{prefix}/strict"),
            ..base.clone()
        },
        Spec {
            work: LoadKind::Append,
            durability: Level::Written,
            prefix: format!("{prefix}/async"),
            ..base.clone()
        },
        Spec {
            work: LoadKind::Scan,
            durability: Level::Written,
            in_flight: 1,
            connections: 1,
            rate: None,
            ..base
        },
    ]
}

/// Measures them alone and together, in turn.
pub(crate) fn run(bench: &Bench, report: &mut Report) -> Result<()> {
    report.entries = entries(bench)?;
    Ok(())
}

/// Closed loops, which compete for the processors, and open ones at a pace that leaves some
/// free. In the open ones a lower rate shows how long the server makes them wait.
pub(crate) fn entries(bench: &Bench) -> Result<Vec<ReportEntry>> {
    let paces: &[(&str, Option<f64>)] = match bench.args.rate.first() {
        Some(rate) => &[("", Some(*rate))],
        None => &[("", None), (", paced", Some(PACE))],
    };
    let cases: Vec<Case> = paces
        .iter()
        .flat_map(|(suffix, rate)| cases(&specs(bench, *rate), suffix))
        .collect();
    let rounds = bench.rounds(&cases, &bench.plan)?;
    let kinds = cases.len() / paces.len();
    Ok(cases
        .iter()
        .zip(&rounds)
        .enumerate()
        .map(|(index, (case, wald))| {
            let alone = &rounds[index - index % kinds..];
            let checks = match case.specs.len() {
                1 => Vec::new(),
                together => checks(&alone[..together], wald),
            };
            ReportEntry {
                name: case.name.clone(),
                wald: wald.clone(),
                echo: None,
                ratio: None,
                checks,
            }
        })
        .collect())
}

/// Each alone, and then together.
fn cases([strict, relaxed, scan]: &[Spec; 3], suffix: &str) -> Vec<Case> {
    let case = |name: &str, specs: &[&Spec]| Case {
        name: format!("W11 {name}{suffix}"),
        specs: specs.iter().map(|spec| (*spec).clone()).collect(),
    };
    vec![
        case("strict alone", &[strict]),
        case("async alone", &[relaxed]),
        case("scan alone", &[scan]),
        case("strict + async", &[strict, relaxed]),
        case("strict + async + scan", &[strict, relaxed, scan]),
    ]
}

/// The share of each rate alone that remains together.
fn checks(alone: &[Rounds], together: &Rounds) -> Vec<TargetCheck> {
    let quotient = |index: usize, figure: &dyn Fn(&crate::figure::Figure) -> Option<f64>| {
        let quotients =
            together
                .rounds
                .iter()
                .zip(&alone[index].rounds)
                .filter_map(|(together, alone)| {
                    Some(figure(&together.figures[index])? / figure(alone.first())?)
                });
        crate::figure::median(quotients.collect())
    };
    let p99 = |figure: &crate::figure::Figure| Some(figure.latency_us.as_ref()?.p99);
    let rate = |figure: &crate::figure::Figure| Some(figure.rate());
    let mut checks = vec![
        TargetCheck::most("strict p99, of alone", STRICT_P99, quotient(0, &p99)),
        TargetCheck::told("strict rate, of alone", quotient(0, &rate)),
        TargetCheck::least("async rate, of alone", ASYNC_RATE, quotient(1, &rate)),
    ];
    if alone.len() > 2 {
        checks.push(TargetCheck::told("scan rate, of alone", quotient(2, &rate)));
    }
    checks
}
