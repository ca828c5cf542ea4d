//! Progress of a load: a bar while it runs, a line at its end. All on stderr.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use wald_client::{BatchAck, LogAck};

use crate::output::note;

/// Records appended so far.
pub(crate) struct AppendProgress {
    bar: ProgressBar,
    began: Instant,
    pub(crate) records: u64,
    /// Records that were there before.
    known: u64,
    bytes: u64,
    /// First and next lsn of each log.
    pub(crate) logs: BTreeMap<String, (u64, u64)>,
}

impl AppendProgress {
    /// Begins. `input_bytes` is the size of the input if it is known. Nothing is drawn if
    /// stderr is no terminal.
    pub(crate) fn begin(input_bytes: Option<u64>) -> Self {
        let bar = match input_bytes {
            Some(bytes) => ProgressBar::new(bytes).with_style(style(
                "{wide_bar} {percent:>3}%  {msg}  {binary_bytes_per_sec}  {eta} left",
            )),
            None => ProgressBar::no_length()
                .with_style(style("{spinner} {msg}  {binary_bytes_per_sec}  {elapsed}")),
        };
        Self {
            bar,
            began: Instant::now(),
            records: 0,
            known: 0,
            bytes: 0,
            logs: BTreeMap::new(),
        }
    }

    /// One request is acked; `consumed` bytes of input have been read for it and before.
    pub(crate) fn acked(&mut self, records: u64, bytes: u64, consumed: u64, ack: &BatchAck) {
        self.records += records;
        self.bytes += bytes;
        for LogAck {
            log,
            first_lsn,
            next_lsn,
            ..
        } in &ack.appends
        {
            self.logs
                .entry(log.clone())
                .and_modify(|(_, next)| *next = next_lsn.get())
                .or_insert((first_lsn.get(), next_lsn.get()));
        }
        self.bar.set_position(consumed);
        self.bar.set_message(counted(self.records));
    }

    /// The records of one request were there before.
    pub(crate) fn known(&mut self, records: u64, consumed: u64) {
        self.known += records;
        self.bar.set_position(consumed);
        self.bar
            .set_message(format!("{} known", counted(self.known)));
    }

    /// Nothing shows any more that the known records were there before.
    pub(crate) fn doubt(&mut self) {
        self.known = 0;
    }

    /// Records at the beginning of the input that are in their logs.
    pub(crate) fn done(&self) -> u64 {
        self.records + self.known
    }

    /// Whether there was no record at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.done() == 0
    }

    /// Removes the bar and reports the appended records. Reports nothing if the load failed and
    /// appended none.
    pub(crate) fn end(&self, well: bool) {
        self.bar.finish_and_clear();
        if well || !self.is_empty() {
            note(&self.summary(self.began.elapsed()));
        }
    }

    fn summary(&self, took: Duration) -> String {
        let place = match self.logs.iter().next() {
            None => String::new(),
            Some((log, (first, next))) if self.logs.len() == 1 => match next.saturating_sub(1) {
                last if last == *first => format!(" to {log}, lsn {first}"),
                last => format!(" to {log}, lsn {first} to {last}"),
            },
            Some(_) => format!(" to {} logs", self.logs.len()),
        };
        // A rate is for people; the precision of f64 is plenty.
        let seconds = took.as_secs_f64();
        let rate = self.records as f64 / seconds.max(1e-6);
        let known = match self.known {
            0 => String::new(),
            1 => "; 1 record was there already".to_owned(),
            known => format!("; {} were there already", counted(known)),
        };
        format!(
            "appended {} ({}){place}, in {seconds:.2} s, {rate:.0} records/s{known}",
            counted(self.records),
            HumanBytes(self.bytes),
        )
    }
}

/// A number of records in words.
pub(crate) fn counted(records: u64) -> String {
    match records {
        1 => "1 record".to_owned(),
        many => format!("{} records", HumanCount(many)),
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_names_one_log_with_its_lsns_and_counts_many() {
        let mut progress = AppendProgress::begin(None);
        progress.records = 2_000;
        progress.bytes = 4_096;
        progress.logs.insert("flights".into(), (5, 2_005));
        assert_eq!(
            progress.summary(Duration::from_secs(2)),
            "appended 2,000 records (4.00 KiB) to flights, lsn 5 to 2004, in 2.00 s, 1000 records/s"
        );
        progress.logs.insert("other".into(), (0, 1));
        assert!(
            progress
                .summary(Duration::from_secs(2))
                .contains(" to 2 logs,")
        );
        progress.logs.remove("flights");
        progress.records = 1;
        let summary = progress.summary(Duration::from_secs(1));
        assert!(summary.starts_with("appended 1 record ("), "{summary}");
        assert!(summary.contains(" to other, lsn 0, in "), "{summary}");
    }
}
