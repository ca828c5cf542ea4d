//! Times of records that the server stored later than they were given.
//!
//! The stored time of a log never goes back. An earlier time than the newest of the log is stored
//! as that one, and the ack does not show it. So the first record that each log got is read back.

use wald_client::{Client, LogAck, Visibility};

use crate::output::{rfc3339, say};

/// Most logs whose first record is read back.
const MOST_LOGS: usize = 16;

/// The first record with a time of its own that each log got.
#[derive(Default)]
pub(crate) struct Times {
    first: Vec<First>,
}

struct First {
    log: String,
    log_id: u64,
    lsn: u64,
    given_us: i64,
}

impl Times {
    /// Notes the ack of records whose first one was given this time, in microseconds since the
    /// Unix epoch; 0 = none.
    pub(crate) fn note(&mut self, ack: &LogAck, given_us: i64) {
        let is_known = self.first.iter().any(|first| first.log == ack.log);
        if given_us == 0 || ack.deduplicated || is_known || self.first.len() >= MOST_LOGS {
            return;
        }
        self.first.push(First {
            log: ack.log.clone(),
            log_id: ack.log_id,
            lsn: ack.first_lsn.get(),
            given_us,
        });
    }

    /// Warns of each log that stored a later time, until Ctrl-C: the records are appended, and nobody has to wait for
    /// a server that went away since. Says nothing of a log that cannot be read: the caller may have no right to.
    pub(crate) async fn warn(&self, client: &Client) {
        tokio::select! {
            () = self.read_back(client) => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    }

    async fn read_back(&self, client: &Client) {
        for first in &self.first {
            let read = client
                .read(first.log.as_str())
                .from_lsn(first.lsn)
                .max_records(1)
                .visibility(Visibility::Accepted)
                .log_id(first.log_id);
            let Ok(page) = read.await else { continue };
            let stored = page.records.first().map(|record| record.timestamp_us);
            if let Some(stored) = stored.filter(|stored| *stored > first.given_us) {
                say(&format!(
                    "warning: record {} of {} has the time {}, not {}: the stored time of a log never \
                     goes back, so records with an earlier time get the newest one",
                    first.lsn,
                    first.log,
                    rfc3339(stored),
                    rfc3339(first.given_us),
                ));
            }
        }
    }
}
