//! Facts that the server reports: /metrics before and after, and the quality of its flushes.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tonic::codegen::http::HeaderValue;
use wald_client::proto;

/// Maximum time of a scrape.
const PATIENCE: Duration = Duration::from_secs(10);

/// One scrape: samples by name and labels.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scrape(HashMap<String, f64>);

impl Scrape {
    /// Asks `http://HOST:PORT[/PATH]`; the path is /metrics unless another is given. `token`: the header
    /// `authorization`.
    pub(crate) fn take(url: &str, token: Option<&HeaderValue>) -> Result<Self> {
        ensure!(
            !url.starts_with("https://"),
            "--metrics {url}: metrics are read in plaintext only; leave --metrics out"
        );
        let rest = url.strip_prefix("http://").unwrap_or(url);
        let (authority, path) = match rest.split_once('/') {
            Some((authority, path)) if !path.is_empty() => (authority, format!("/{path}")),
            Some((authority, _)) => (authority, "/metrics".to_owned()),
            None => (rest, "/metrics".to_owned()),
        };
        let text =
            get(authority, &path, token).with_context(|| format!("no metrics from {url}"))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(lines.filter_map(sample).collect())
    }

    /// The sum of a metric over its labels; `None` if there is no such metric.
    pub(crate) fn sum(&self, name: &str) -> Option<f64> {
        let mut values = self
            .0
            .iter()
            .filter(|(key, _)| {
                let rest = key.strip_prefix(name);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
            })
            .map(|(_, value)| *value)
            .peekable();
        values.peek()?;
        Some(values.sum())
    }
}

fn get(authority: &str, path: &str, token: Option<&HeaderValue>) -> Result<String> {
    let address = authority
        .to_socket_addrs()?
        .next()
        .context("no such host")?;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // In plaintext a token must not reach another machine.
    let token = match token {
        Some(token) if address.ip().is_loopback() => {
            format!("authorization: {}\r\n", token.to_str()?)
        }
        _ => String::new(),
    };
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {authority}\r\n{token}Connection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("not HTTP")?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    ensure!(status == "200", "HTTP status {status}");
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        bail!("a chunked answer; this is not Wald's");
    }
    Ok(body.to_owned())
}

/// Resources and work of the server between two scrapes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ServerUse {
    pub(crate) cpu_seconds: f64,
    pub(crate) rss_bytes: f64,
    pub(crate) descriptors: f64,
    pub(crate) flushes: f64,
    /// `None` if there was none.
    pub(crate) flush_mean_us: Option<f64>,
    pub(crate) groups: f64,
    pub(crate) requests_per_group: Option<f64>,
    pub(crate) records_per_group: Option<f64>,
    /// Bytes written to the journal.
    pub(crate) journal_bytes: f64,
    /// Bytes that the sorter wrote meanwhile.
    pub(crate) sorter_written_bytes: f64,
    /// Growth of everything on the disk.
    pub(crate) disk_growth_bytes: f64,
}

impl ServerUse {
    /// `None` if one of the scrapes is not Wald's.
    pub(crate) fn between(before: &Scrape, after: &Scrape) -> Option<Self> {
        let delta = |name: &str| Some(after.sum(name)? - before.sum(name)?);
        let mean = |sum: f64, count: f64| (count > 0.0).then(|| sum / count);
        let flushes = delta("wald_flush_duration_seconds_count")?;
        let groups = delta("wald_group_requests_count")?;
        Some(Self {
            cpu_seconds: delta("process_cpu_seconds_total")?,
            rss_bytes: after.sum("process_resident_memory_bytes")?,
            descriptors: after.sum("process_open_fds")?,
            flushes,
            flush_mean_us: mean(delta("wald_flush_duration_seconds_sum")? * 1e6, flushes),
            groups,
            requests_per_group: mean(delta("wald_group_requests_sum")?, groups),
            records_per_group: mean(delta("wald_group_records_sum")?, groups),
            journal_bytes: delta("wald_group_bytes_sum")?,
            sorter_written_bytes: delta("wald_sorter_written_bytes_total")?,
            disk_growth_bytes: delta("wald_disk_bytes")?,
        })
    }
}

/// The server's description of itself, published with every figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) version: String,
    pub(crate) file_system: String,
    pub(crate) sync_primitive: String,
    /// Median of the newest flushes that the server has made, two of its start first.
    pub(crate) flush_p50_us: Option<f64>,
    pub(crate) flush_p99_us: Option<f64>,
    pub(crate) is_volatile: bool,
    pub(crate) caveats: Vec<String>,
}

impl About {
    pub(crate) fn of(info: &proto::GetServerInfoResponse) -> Self {
        let truth = info.durability.clone().unwrap_or_default();
        let micros = |span: Option<prost_types::Duration>| {
            span.map(|span| span.seconds as f64 * 1e6 + f64::from(span.nanos) / 1e3)
        };
        Self {
            version: info.version.clone(),
            file_system: truth.file_system,
            sync_primitive: truth.sync_primitive,
            flush_p50_us: micros(truth.flush_p50),
            flush_p99_us: micros(truth.flush_p99),
            is_volatile: truth.is_volatile,
            caveats: truth.caveats,
        }
    }

    /// One line for people.
    pub(crate) fn line(&self) -> String {
        let flush = match (self.flush_p50_us, self.flush_p99_us) {
            (Some(p50), Some(p99)) => format!("a flush takes {p50:.0} us (p99 {p99:.0} us)"),
            _ => "no flush was made yet".to_owned(),
        };
        let volatile = if self.is_volatile { ", volatile" } else { "" };
        format!(
            "wald {} on {}{volatile} by {}: {flush}",
            self.version, self.file_system, self.sync_primitive
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrape_sums_over_labels_and_tells_nothing_from_zero() {
        let scrape = Scrape::parse(
            "# HELP a_total Help.\na_total{kind=\"x\"} 1\na_total{kind=\"y z\"} 2.5\n\
             a_total_more 100\nb 0\n",
        );
        assert_eq!(scrape.sum("a_total"), Some(3.5));
        assert_eq!(scrape.sum("b"), Some(0.0));
        assert_eq!(scrape.sum("c"), None);
        assert_eq!(ServerUse::between(&scrape, &scrape), None);
    }
}
