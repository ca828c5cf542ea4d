//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use wald_connection::ConnectionArgs;

use crate::spec::Level;

const HELP: &str = "\
It appends real records, to logs named PREFIX/...: measure a daemon of its own, on the disk that \
matters, and throw its directory away.

A closed loop (default) sends the next call when one is answered. An open loop (--rate) sends when a \
call is due, and times it from then, so that a server that stands still is not spared the calls that \
would have come meanwhile; --in-flight bounds the calls under way.

--echo measures the same load on a service that does nothing, in turn with each round; the daemon \
must have been started with --echo. The ratio is the median of the rounds' ratios. Figures of the \
server come from its metrics; without metrics they are missing.

Figures of different runs differ by a fifth on an idle machine, and more where others work. Compare \
only figures of one run.";

/// Benchmark throughput, latency and resource use of a Wald server, and the transport's share
#[derive(Debug, Clone, Parser)]
#[command(name = "walbench", version = wald_text::VERSION, after_help = HELP)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Form of the output on stdout
    #[arg(long, short = 'o', value_enum, default_value_t = BenchOutput::Text)]
    pub(crate) output: BenchOutput,
    /// The load to measure
    #[arg(value_enum)]
    pub(crate) workload: Workload,
    /// Calls, or messages of sessions, under way at a time; several, such as 1,16,64, are
    /// measured one after the other [default: 64; session 1024; scan, follow 1].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) in_flight: Vec<usize>,
    /// Open loop: calls per second; several values are measured one after the other
    #[arg(long, value_name = "PER_SECOND", value_delimiter = ',')]
    pub(crate) rate: Vec<f64>,
    /// Connections that the calls share; at most one for each call.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) connections: usize,
    /// Logs that are appended to in turn.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) logs: usize,
    /// Bytes of each record.
    #[arg(long, value_name = "BYTES", default_value_t = 128)]
    pub(crate) record_bytes: u32,
    /// Records of each call or message [default: batch 100, otherwise 1].
    #[arg(long, value_name = "N")]
    pub(crate) batch: Option<u32>,
    /// Durability of records before they are acked, or seen by readers [default: durable]
    #[arg(long, value_enum)]
    pub(crate) durability: Option<Level>,
    /// Time to measure, after the warm-up
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = wald_text::units::span)]
    pub(crate) duration: Duration,
    /// Number of calls, messages or scans to measure instead of a duration
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    pub(crate) count: Option<u64>,
    /// Time under load before anything counts.
    #[arg(long, value_name = "SPAN", default_value = "2s", value_parser = wald_text::units::span)]
    pub(crate) warm_up: Duration,
    /// Number of rounds; loads take turns, and the median is reported
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Measure the echo service, too, and print the ratio
    #[arg(long)]
    pub(crate) echo: bool,
    /// Address of the server's metrics, http:// only [default: http://127.0.0.1:6926/metrics if the
    /// endpoint is the default, otherwise none]. The token goes along to this machine only
    #[arg(long, value_name = "URL")]
    pub(crate) metrics: Option<String>,
    /// Followers of the log: fan-out only.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) followers: u32,
    /// Records of the log that is scanned or read; they are appended first if they are not
    /// there.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub(crate) filled: u64,
    /// Items to send: istio only.
    #[arg(long, value_name = "N", default_value_t = crate::istio::ITEMS)]
    pub(crate) items: u64,
    /// Prefix of the logs' names, before a slash
    #[arg(long, default_value = "bench")]
    pub(crate) prefix: String,
    /// Write all figures of all rounds there.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw latency percentiles over throughput there, a point for each of several
    /// --in-flight or --rate.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Draw throughput, latency, memory and descriptors of each second there.
    #[arg(long, value_name = "FILE")]
    pub(crate) time_series: Option<PathBuf>,
}

impl BenchArgs {
    /// The first fault that clap cannot express.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let workload = self.workload;
        let side_by_side = [Workload::Mixed, Workload::FanOut, Workload::Suite];
        let without_echo = [Workload::Mixed, Workload::FanOut, Workload::Follow];
        let rate_is_valid = |rate: &f64| rate.is_normal() && *rate > 0.0;
        if !self.rate.iter().all(rate_is_valid) {
            return Some("--rate must be more than 0");
        }
        if self.in_flight.contains(&0) || self.connections == 0 {
            return Some("--in-flight and --connections must be at least 1");
        }
        if !self.rate.is_empty() && workload == Workload::Scan {
            return Some("scans go on as fast as they can: there is no --rate for them");
        }
        if self.count.is_some() && side_by_side.contains(&workload) {
            return Some("loads that run side by side end with --duration, not with --count");
        }
        if self.echo && without_echo.contains(&workload) {
            return Some("there is no echo of this workload");
        }
        None
    }
}

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchOutput {
    /// A table and lines
    Text,
    /// One JSON document with all figures of all rounds
    Json,
}

/// A load that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// Unary appends of one record, durable by default (W1)
    Append,
    /// Unary appends of one record, acked when written (W2)
    Written,
    /// AppendBatch (W3).
    Batch,
    /// Pipelined batches on a session for each connection (W1 by session).
    Session,
    /// Scans of a whole log (W4).
    Scan,
    /// Reads of one record at a random lsn, from a log written in batches of 100 (W5)
    Read,
    /// Appends, timed until a follower has them (W6).
    Follow,
    /// Strict writers with async writers, and with scans, each alone and all together (W11)
    Mixed,
    /// Appends at a rate (default 10,000 a second), alone and with 1,000 followers of their log
    FanOut,
    /// Every row of the table of targets that goes over gRPC.
    Suite,
    /// The traffic of a service mesh: 2,048 instances, items of 262 bytes, in bursts of 2,000
    /// on sessions.
    Istio,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        BenchArgs::command().debug_assert();
    }
}
