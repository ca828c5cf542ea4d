//! `walctl top`: the busiest logs, again and again.

use std::collections::HashMap;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{HumanBytes, HumanCount};
use serde_json::{Value, json};
use wald_client::Client;
use wald_client::proto::Log;

use crate::args::{TopArgs, TopOrder};
use crate::exit::ExitKind;
use crate::names::NamePattern;
use crate::output::{Out, Output, say};
use crate::table::Table;

/// Lines of a terminal that the table leaves to the rest.
const LINES_BESIDE: usize = 4;
/// Logs that are shown where nobody says how many.
const DEFAULT_LINES: usize = 20;

/// Counts of one log at one moment.
#[derive(Debug, Clone, Copy)]
struct LogCounts {
    log_id: u64,
    next_lsn: u64,
    stored_bytes: u64,
}

/// One log between two looks.
#[derive(Debug, Clone, PartialEq)]
struct LogRow {
    log: String,
    next_lsn: u64,
    records: u64,
    stored_bytes: u64,
    /// Records that are not flushed to the device.
    unflushed: u64,
    /// Records appended in a second; `None` at the first look at the log.
    records_per_second: Option<f64>,
    /// Growth of the stored bytes in a second, at least 0.
    bytes_per_second: Option<u64>,
}

/// Looks at the logs, and remembers the look before.
#[derive(Debug, Default)]
struct Looks {
    before: HashMap<String, LogCounts>,
    at: Option<Instant>,
}

impl Looks {
    fn rows(&mut self, logs: Vec<Log>, now: Instant) -> Vec<LogRow> {
        let since = self.at.map(|at| now.duration_since(at));
        let mut before = std::mem::take(&mut self.before);
        self.at = Some(now);
        let mut rows = Vec::with_capacity(logs.len());
        for log in logs {
            let counts = LogCounts {
                log_id: log.log_id,
                next_lsn: log.tail_lsn.unwrap_or(0),
                stored_bytes: log.stored_bytes,
            };
            let earlier = match before.remove(&log.name) {
                // A log of the same name that was made meanwhile began at 0.
                Some(earlier) if earlier.log_id == log.log_id => Some(earlier),
                _ => None,
            };
            // The growth of both since the look before, and the time that it took.
            let grown = earlier.zip(since).map(|(earlier, since)| {
                let records = counts.next_lsn.saturating_sub(earlier.next_lsn);
                let bytes = counts.stored_bytes.saturating_sub(earlier.stored_bytes);
                (records, bytes, since.max(LEAST_INTERVAL))
            });
            rows.push(LogRow {
                next_lsn: counts.next_lsn,
                records: counts.next_lsn.saturating_sub(log.first_lsn.unwrap_or(0)),
                stored_bytes: counts.stored_bytes,
                unflushed: counts
                    .next_lsn
                    .saturating_sub(log.durable_lsn.unwrap_or(counts.next_lsn)),
                records_per_second: grown
                    .map(|(records, _, since)| records as f64 / since.as_secs_f64()),
                bytes_per_second: grown.map(|(_, bytes, since)| {
                    let millis = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
                    bytes.saturating_mul(1000) / millis
                }),
                log: log.name.clone(),
            });
            self.before.insert(log.name, counts);
        }
        rows
    }
}

fn sort(rows: &mut [LogRow], order: TopOrder) {
    let rate = |row: &LogRow| row.records_per_second.unwrap_or(0.0);
    rows.sort_by(|a, b| {
        let by = match order {
            TopOrder::Rate => rate(b).total_cmp(&rate(a)),
            TopOrder::Stored => b.stored_bytes.cmp(&a.stored_bytes),
            TopOrder::Unflushed => b.unflushed.cmp(&a.unflushed),
            TopOrder::Name => std::cmp::Ordering::Equal,
        };
        by.then_with(|| a.log.cmp(&b.log))
    });
}

pub(crate) async fn run(client: &Client, args: TopArgs, output: Output) -> Result<ExitKind> {
    let names = NamePattern::of(args.pattern.as_deref(), "")?;
    let mut looks = Looks::default();
    let mut left = args.count;
    let mut failure = None;
    loop {
        match names.all(client).await {
            Ok(logs) => {
                failure = None;
                let mut rows = looks.rows(logs, Instant::now());
                sort(&mut rows, args.sort);
                print(client, &rows, args.lines, output)?;
            }
            // The first look fails like any command; later ones wait for the server.
            Err(error) if looks.at.is_none() => return Err(error),
            Err(error) => {
                if failure.is_none() {
                    say(&format!("{error:#}; going on"));
                }
                failure = Some(error);
            }
        }
        left = left.map(|left| left.saturating_sub(1));
        if left == Some(0) {
            return failure.map_or(Ok(ExitKind::Ok), Err);
        }
        tokio::time::sleep(args.interval.max(LEAST_INTERVAL)).await;
    }
}

/// Shortest time between two looks.
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

fn print(client: &Client, rows: &[LogRow], lines: Option<usize>, output: Output) -> Result<()> {
    let mut out = Out::while_read(output);
    match output {
        Output::Json | Output::Jsonl => {
            let time = jiff::Timestamp::now();
            let logs: Vec<_> = rows.iter().map(document).collect();
            out.json(&json!({ "time": format!("{time:.3}"), "logs": logs }))?;
        }
        Output::Text | Output::Raw | Output::Delimited => {
            let screen = screen_lines();
            let room = screen.map(|lines| lines.saturating_sub(LINES_BESIDE).max(1));
            let shown = lines.or(room).unwrap_or(DEFAULT_LINES).min(rows.len());
            if screen.is_some() {
                // Home, and clear to the end: the frame replaces the one before.
                out.bytes(b"\x1b[H\x1b[J")?;
            }
            out.line(&summary(&client.endpoint(), rows, shown))?;
            out.line(&table(&rows[..shown]))?;
            if screen.is_none() {
                out.line("")?;
            }
        }
    }
    out.flush()?;
    Ok(())
}

/// Lines of the terminal that stdout is; `None` if it is none.
fn screen_lines() -> Option<usize> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&stdout).ok();
    let lines = size.map_or(0, |size| usize::from(size.ws_row));
    Some(if lines == 0 { DEFAULT_LINES } else { lines })
}

/// All logs in one line.
fn summary(endpoint: &str, rows: &[LogRow], shown: usize) -> String {
    let rates = rows.iter().filter_map(|row| row.records_per_second);
    let rate = rates.fold(0.0, |sum, rate| sum + rate);
    let stored: u64 = rows.iter().map(|row| row.stored_bytes).sum();
    let hidden = match rows.len() - shown {
        0 => String::new(),
        hidden => format!(", {hidden} not shown"),
    };
    format!(
        "{endpoint}: {} logs{hidden}, {} stored, {rate:.0} records/s",
        rows.len(),
        HumanBytes(stored)
    )
}

fn table(rows: &[LogRow]) -> String {
    let mut table = Table::with_header([
        "LOG",
        "RECORDS/S",
        "BYTES/S",
        "NEXT",
        "RECORDS",
        "STORED",
        "UNFLUSHED",
    ]);
    for row in rows {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        table.row([
            row.log.clone(),
            or_dash(row.records_per_second.map(|rate| format!("{rate:.0}"))),
            or_dash(
                row.bytes_per_second
                    .map(|rate| HumanBytes(rate).to_string()),
            ),
            row.next_lsn.to_string(),
            HumanCount(row.records).to_string(),
            HumanBytes(row.stored_bytes).to_string(),
            row.unflushed.to_string(),
        ]);
    }
    table.right(1..7);
    table.text()
}

fn document(row: &LogRow) -> Value {
    json!({
        "log": row.log,
        "next_lsn": row.next_lsn,
        "records": row.records,
        "stored_bytes": row.stored_bytes,
        "unflushed_records": row.unflushed,
        "records_per_second": row.records_per_second,
        "bytes_per_second": row.bytes_per_second,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(name: &str, log_id: u64, next: u64, stored: u64) -> Log {
        Log {
            name: name.to_owned(),
            log_id,
            first_lsn: Some(10),
            tail_lsn: Some(next),
            durable_lsn: Some(next - 1),
            stored_bytes: stored,
            ..Log::default()
        }
    }

    #[test]
    fn rates_are_between_two_looks_at_the_same_log() {
        let mut looks = Looks::default();
        let begun = Instant::now();
        let logs = vec![log("a", 1, 20, 100), log("b", 2, 20, 100)];
        let first = looks.rows(logs, begun);
        assert_eq!(first[0].records_per_second, None);
        assert_eq!((first[0].records, first[0].unflushed), (10, 1));
        let later = begun + Duration::from_secs(2);
        // Log a was trimmed meanwhile, and b is another log.
        let logs = vec![
            log("a", 1, 50, 40),
            log("b", 3, 50, 400),
            log("c", 4, 11, 1),
        ];
        let rows = looks.rows(logs, later);
        assert_eq!(rows[0].records_per_second, Some(15.0));
        assert_eq!(rows[0].bytes_per_second, Some(0));
        assert_eq!(rows[1].records_per_second, None);
        assert_eq!(rows[2].records_per_second, None);
    }

    #[test]
    fn busiest_log_comes_first_and_equal_ones_by_name() {
        let row = |log: &str, rate, stored_bytes| LogRow {
            log: log.to_owned(),
            next_lsn: 0,
            records: 0,
            stored_bytes,
            unflushed: 0,
            records_per_second: rate,
            bytes_per_second: None,
        };
        let mut rows = [
            row("c", None, 9),
            row("b", Some(2.0), 1),
            row("a", Some(0.0), 5),
        ];
        let names = |rows: &[LogRow]| rows.iter().map(|row| row.log.clone()).collect::<String>();
        sort(&mut rows, TopOrder::Rate);
        assert_eq!(names(&rows), "bac");
        sort(&mut rows, TopOrder::Stored);
        assert_eq!(names(&rows), "cab");
        sort(&mut rows, TopOrder::Name);
        assert_eq!(names(&rows), "abc");
        assert!(summary("e", &rows, 2).contains("3 logs, 1 not shown, 15 B stored, 2 records/s"));
    }
}
