//! Strict writers beside async writers, and both beside a scan: what each gets alone, and
//! what is left of it together.

use anyhow::Result;

use super::report::{Check, Entry, Report};
use super::spec::{Level, Spec, Work};
use super::{Bench, Case, Rounds};

/// Calls under way of each kind of writer, unless told otherwise.
const IN_FLIGHT: usize = 16;

/// Most that strict writers' p99 may grow, and least that is to be left to async ones.
const STRICT_P99: f64 = 1.5;
const ASYNC_RATE: f64 = 0.8;

fn specs(bench: &Bench) -> [Spec; 3] {
    let in_flight = bench.args.in_flight.first().copied().unwrap_or(IN_FLIGHT);
    let base = Spec {
        in_flight,
        connections: bench.args.connections.div_ceil(2),
        rate: bench.args.rate.first().copied(),
        ..bench.spec()
    };
    let prefix = &bench.args.prefix;
    [
        Spec {
            work: Work::Append,
            durability: Level::Durable,
            prefix: format!("{prefix}/strict"),
            ..base.clone()
        },
        Spec {
            work: Work::Append,
            durability: Level::Written,
            prefix: format!("{prefix}/async"),
            ..base.clone()
        },
        Spec {
            work: Work::Scan,
            durability: Level::Written,
            in_flight: 1,
            connections: 1,
            rate: None,
            ..base
        },
    ]
}

/// Measures them alone and together, in turn.
pub(super) fn run(bench: &Bench, report: &mut Report) -> Result<()> {
    report.entries = entries(bench)?;
    Ok(())
}

pub(super) fn entries(bench: &Bench) -> Result<Vec<Entry>> {
    let [strict, relaxed, scan] = specs(bench);
    let case = |name: &str, specs: &[&Spec]| Case {
        name: name.to_owned(),
        specs: specs.iter().map(|spec| (*spec).clone()).collect(),
    };
    let cases = [
        case("W11 strict alone", &[&strict]),
        case("W11 async alone", &[&relaxed]),
        case("W11 scan alone", &[&scan]),
        case("W11 strict + async", &[&strict, &relaxed]),
        case("W11 strict + async + scan", &[&strict, &relaxed, &scan]),
    ];
    let rounds = bench.rounds(&cases, &bench.plan)?;
    let [strict, relaxed, scan, ..] = rounds.as_slice() else {
        return Ok(Vec::new());
    };
    let alone = [strict, relaxed, scan].map(Clone::clone);
    Ok(cases
        .iter()
        .zip(rounds)
        .map(|(case, wald)| {
            let checks = match case.specs.len() {
                1 => Vec::new(),
                together => checks(&alone[..together], &wald),
            };
            Entry {
                name: case.name.clone(),
                wald,
                echo: None,
                ratio: None,
                checks,
            }
        })
        .collect())
}

/// What is left together of what each had alone.
fn checks(alone: &[Rounds], together: &Rounds) -> Vec<Check> {
    let quotient = |index: usize, figure: &dyn Fn(&super::figure::Figure) -> Option<f64>| {
        let quotients =
            together
                .rounds
                .iter()
                .zip(&alone[index].rounds)
                .filter_map(|(together, alone)| {
                    Some(figure(&together.figures[index])? / figure(alone.first())?)
                });
        super::figure::median(quotients.collect())
    };
    let p99 = |figure: &super::figure::Figure| Some(figure.latency_us.as_ref()?.p99);
    let rate = |figure: &super::figure::Figure| Some(figure.rate());
    let mut checks = vec![
        Check::most("strict p99, of alone", STRICT_P99, quotient(0, &p99)),
        Check::told("strict rate, of alone", quotient(0, &rate)),
        Check::least("async rate, of alone", ASYNC_RATE, quotient(1, &rate)),
    ];
    if alone.len() > 2 {
        checks.push(Check::told("scan rate, of alone", quotient(2, &rate)));
    }
    checks
}
