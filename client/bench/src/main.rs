//! `walbench`: measures a server under load, and the transport alone for comparison.
//!
//! ```text
//! Spec ── measure ──▶ Measurement ── rounds, in turn with its echo ──▶ Rounds ──▶ table,
//!  what    threads,    figures of     (medians; ratios round by round)            JSON,
//!          window      one window                                                 plots
//! ```
//!
//! The client shares the machine with the server, so it is cheap: the generated stubs on bare
//! HTTP/2 connections ([`connection`]), an event loop for each core, one lock without
//! contention for each answer. Each figure reports the client's processor time.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod caller;
mod connection;
mod fan_out;
mod figure;
mod fill;
mod gate;
mod istio;
mod measure;
mod mixed;
mod record;
mod report;
mod server;
mod session;
mod spec;
mod stream;
mod suite;
mod svg;

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use wald_client::DEFAULT_ENDPOINT;
use wald_connection::ConnectionChoice;
use wald_text::shown::escaped;

use args::{BenchArgs, Workload};
use figure::{Rounds, ratio};
use measure::{LoadTarget, MeasurePlan, measure};
use report::{Report, ReportEntry};
use server::About;
use spec::{Extent, Level, LoadKind, Spec};

/// Default address of a server's metrics.
const DEFAULT_METRICS: &str = "http://127.0.0.1:6926/metrics";

/// Loads to measure at the same time, under a name.
struct Case {
    name: String,
    specs: Vec<Spec>,
}

impl Case {
    fn one(name: impl Into<String>, spec: Spec) -> Self {
        Self {
            name: name.into(),
            specs: vec![spec],
        }
    }
}

/// One run of the command.
struct Bench {
    args: BenchArgs,
    target: LoadTarget,
    about: About,
    plan: MeasurePlan,
}

fn main() -> ExitCode {
    let matches = BenchArgs::command().get_matches();
    let args = BenchArgs::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if let Some(fault) = args.fault() {
        let mut command = BenchArgs::command();
        command.error(ErrorKind::ValueValidation, fault).exit();
    }
    match run(args, &matches) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("walbench: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes a line to stderr.
#[allow(clippy::print_stderr, reason = "the one place")]
fn say(text: &str) {
    eprintln!("{}", escaped(text));
}

/// The error of a first connection, with the next step if no server answered.
fn with_remedy(error: wald_client::Error) -> anyhow::Error {
    match error.kind() {
        wald_client::ErrorKind::Connect { .. } => {
            anyhow!("{error}; is the server running? --endpoint or WALD_ENDPOINT gives its address")
        }
        _ => error.into(),
    }
}

fn run(args: BenchArgs, matches: &ArgMatches) -> Result<()> {
    let settings = ConnectionChoice::new(&args.connection, matches)?;
    if let Some(remark) = settings.remark() {
        say(&remark);
    }
    let builder = settings.builder()?;
    let (info, endpoint) = fill::block_on(async {
        let client = builder.clone().connect().await.map_err(with_remedy)?;
        let info = client.server_info().await?;
        // Of several servers the one that owns the store.
        Ok((info, client.endpoint()))
    })?;
    let dialer = builder.endpoint(endpoint).dialer()?;
    let default = (dialer.endpoint() == DEFAULT_ENDPOINT).then(|| DEFAULT_METRICS.to_owned());
    let target = LoadTarget {
        dialer,
        metrics: args.metrics.clone().or(default),
    };
    if target.metrics.is_none() {
        say("no --metrics: the server's use of resources is not measured");
    }
    let plan = MeasurePlan {
        warm_up: args.warm_up,
        extent: match args.count {
            Some(count) => Extent::Count(count),
            None => Extent::For(args.duration),
        },
        series: args.time_series.is_some(),
    };
    let about = About::of(&info);
    Bench {
        args,
        target,
        about,
        plan,
    }
    .run()
}

impl Bench {
    fn run(self) -> Result<()> {
        if self.needs_echo() {
            fill::check_echo(&self.target)?;
        }
        let mut report = Report::new(&self);
        match self.args.workload {
            Workload::Mixed => mixed::run(&self, &mut report)?,
            Workload::FanOut => fan_out::run(&self, &mut report)?,
            Workload::Suite => suite::run(&self, &mut report)?,
            Workload::Istio => self.istio(&mut report)?,
            _ => self.sweep(&mut report)?,
        }
        report.put(&self.args)
    }

    fn needs_echo(&self) -> bool {
        self.args.echo || self.args.workload == Workload::Suite
    }

    /// The load that the command line describes, without --in-flight and --rate.
    fn spec(&self) -> Spec {
        let args = &self.args;
        let (work, in_flight, batch, durability) = match args.workload {
            Workload::Written => (LoadKind::Append, 64, 1, Level::Written),
            Workload::Batch => (LoadKind::Batch, 64, 100, Level::Durable),
            Workload::Session => (LoadKind::Session, 1024, 1, Level::Durable),
            Workload::Scan => (LoadKind::Scan, 1, 1, Level::Durable),
            Workload::Read => (LoadKind::Read, 64, 1, Level::Durable),
            Workload::Follow => (LoadKind::Follow, 1, 1, Level::Durable),
            _ => (LoadKind::Append, 64, 1, Level::Durable),
        };
        Spec {
            work,
            in_flight,
            connections: args.connections,
            logs: args.logs,
            record_bytes: args.record_bytes,
            batch: args.batch.unwrap_or(batch).max(1),
            durability: args.durability.unwrap_or(durability),
            filled: args.filled,
            prefix: args.prefix.clone(),
            ..Spec::default()
        }
    }

    /// Each combination of --in-flight and --rate.
    fn sweep(&self, report: &mut Report) -> Result<()> {
        let base = self.spec();
        let in_flight = match self.args.in_flight.as_slice() {
            [] => vec![base.in_flight],
            given => given.to_vec(),
        };
        let rates: Vec<Option<f64>> = match self.args.rate.as_slice() {
            [] => vec![None],
            given => given.iter().copied().map(Some).collect(),
        };
        let mut specs = Vec::new();
        for in_flight in in_flight {
            for rate in &rates {
                specs.push(Spec {
                    in_flight,
                    rate: *rate,
                    ..base.clone()
                });
            }
        }
        let named: Vec<Case> = specs
            .into_iter()
            .map(|spec| Case::one(report::name(&spec), spec))
            .collect();
        report.entries = self.pairs(&named, self.args.echo)?;
        Ok(())
    }

    fn istio(&self, report: &mut Report) -> Result<()> {
        let durability = self.args.durability.unwrap_or(Level::Durable);
        let rate = self.args.rate.first().copied();
        let spec = istio::spec(self.args.connections, &self.args.prefix, durability, rate);
        let plan = MeasurePlan {
            extent: Extent::Count(self.args.items),
            ..self.plan
        };
        let case = Case::one("istio", spec);
        report.entries = self.pairs_with(&[case], self.args.echo, &plan)?;
        let measured = &report.entries[0].wald.median;
        let used = istio::used(measured).unwrap_or_default();
        report.remark = Some(format!("{used}{}", istio::PUBLISHED));
        Ok(())
    }

    /// Measures each case, and its echo right after it.
    fn pairs(&self, cases: &[Case], echo: bool) -> Result<Vec<ReportEntry>> {
        self.pairs_with(cases, echo, &self.plan)
    }

    fn pairs_with(
        &self,
        cases: &[Case],
        echo: bool,
        plan: &MeasurePlan,
    ) -> Result<Vec<ReportEntry>> {
        let mut all = Vec::new();
        for case in cases {
            all.push(Case {
                name: case.name.clone(),
                specs: case.specs.clone(),
            });
            if let ([spec], true) = (case.specs.as_slice(), echo)
                && spec.has_echo()
            {
                all.push(Case::one(format!("{} (echo)", case.name), spec.echoed()));
            }
        }
        let mut measured = self.rounds(&all, plan)?.into_iter().zip(&all).peekable();
        let mut entries = Vec::new();
        while let Some((wald, case)) = measured.next() {
            let echo = measured
                .next_if(|(_, case)| case.specs[0].echo)
                .map(|(echo, _)| echo);
            let ratio = echo
                .as_ref()
                .and_then(|echo| ratio(&wald, echo, |figure| figure.rate()));
            entries.push(ReportEntry {
                name: case.name.clone(),
                wald,
                echo,
                ratio,
                checks: Vec::new(),
            });
        }
        Ok(entries)
    }

    /// All cases in turn, for the requested number of rounds.
    fn rounds(&self, cases: &[Case], plan: &MeasurePlan) -> Result<Vec<Rounds>> {
        for spec in cases.iter().flat_map(|case| &case.specs) {
            if matches!(spec.work, LoadKind::Scan | LoadKind::Read) && !spec.echo {
                fill::fill(&self.target, spec)?;
            }
        }
        let mut measured: Vec<Vec<_>> = cases.iter().map(|_| Vec::new()).collect();
        for round in 1..=self.args.rounds {
            for (case, measured) in cases.iter().zip(&mut measured) {
                say(&format!(
                    "round {round} of {}: {}",
                    self.args.rounds, case.name
                ));
                measured.push(measure(&self.target, &case.specs, plan)?);
            }
        }
        let rounds: Vec<Rounds> = measured
            .into_iter()
            .map(Rounds::new)
            .collect::<Result<_>>()?;
        if rounds.is_empty() {
            bail!("nothing to measure");
        }
        Ok(rounds)
    }
}
