//! CallFacts about one call that its request and its answer give: names and numbers, never a payload.

use serde::Serialize;
use wald_storage::{Appended, Batch, LogId, LogName, LogTarget, Lsn, Selector};

use super::line::shortened;

/// Maximum number of logs that a line names.
const MOST_LOGS: usize = 16;

/// Names and numbers of a call.
#[derive(Debug, Default)]
pub(crate) struct CallFacts {
    /// Logs that it names, each once.
    logs: Vec<LogFacts>,
    has_more_logs: bool,
    prefix: Option<String>,
    cursor: Option<String>,
    producer: Option<String>,
    before_lsn: Option<u64>,
    writer_epoch: Option<u64>,
    requests: Option<u64>,
    records: Option<u64>,
    shredded: bool,
}

/// One log of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct LogFacts {
    log: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_lsn: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_lsn: Option<u64>,
}

/// The facts as a line has them: one log beside the other fields, several in a list.
#[derive(Serialize)]
pub(super) struct ShownFacts<'a> {
    #[serde(flatten)]
    log: Option<&'a LogFacts>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    logs: &'a [LogFacts],
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    more_logs: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    producer: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before_lsn: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    writer_epoch: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    records: Option<u64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    shredded: bool,
}

impl CallFacts {
    pub(super) fn shown(&self) -> ShownFacts<'_> {
        let (log, logs) = match self.logs.as_slice() {
            [log] => (Some(log), &[][..]),
            logs => (None, logs),
        };
        ShownFacts {
            log,
            logs,
            more_logs: self.has_more_logs,
            prefix: self.prefix.as_deref(),
            cursor: self.cursor.as_deref(),
            producer: self.producer.as_deref(),
            before_lsn: self.before_lsn,
            writer_epoch: self.writer_epoch,
            requests: self.requests,
            records: self.records,
            shredded: self.shredded,
        }
    }

    /// The request names a log.
    pub(crate) fn log(&mut self, name: &LogName) {
        self.named(name.as_str(), None);
    }

    /// The request names a log, perhaps with its id.
    pub(crate) fn target(&mut self, target: &LogTarget) {
        self.named(target.name.as_str(), target.log_id);
    }

    fn named(&mut self, name: &str, id: Option<LogId>) {
        if self.logs.iter().any(|log| log.log == name) {
            return;
        }
        if self.logs.len() >= MOST_LOGS {
            self.has_more_logs = true;
            return;
        }
        self.logs.push(LogFacts {
            log: shortened(name),
            log_id: id.map(LogId::get),
            first_lsn: None,
            next_lsn: None,
        });
    }

    /// The request is for the logs whose names begin with a prefix.
    pub(crate) fn prefix(&mut self, prefix: &str) {
        self.prefix = Some(shortened(prefix));
    }

    /// The request is for these logs.
    pub(crate) fn selector(&mut self, selector: &Selector) {
        match selector {
            Selector::Log(target) => self.target(target),
            Selector::Prefix(prefix) => self.prefix(prefix.as_str()),
            Selector::All => self.prefix(""),
        }
    }

    /// The logs of an append, of its checks and of its cursors.
    pub(crate) fn batch(&mut self, batch: &Batch) {
        let parts = batch.logs.iter().map(|part| &part.log);
        let checks = batch.checks.iter().map(|check| &check.log);
        let cursors = batch.cursors.iter().map(|commit| &commit.log);
        for log in parts.chain(checks).chain(cursors) {
            self.log(log);
        }
    }

    /// A value of a field that was refused: a log, or a prefix.
    pub(super) fn asked(&mut self, field: &str, value: &str) {
        match field {
            "prefix" | "all" => self.prefix(value),
            _ => self.named(value, None),
        }
    }

    pub(crate) fn cursor(&mut self, name: &str) {
        self.cursor = Some(shortened(name));
    }

    pub(crate) fn producer(&mut self, id: &str) {
        self.producer = Some(shortened(id));
    }

    /// The log that the engine found.
    pub(crate) fn found(&mut self, id: LogId) {
        if let [log] = self.logs.as_mut_slice() {
            log.log_id = Some(id.get());
        }
    }

    /// The keys of the log, which has this number, are destroyed.
    pub(crate) fn shredded(&mut self, id: LogId) {
        self.found(id);
        self.shredded = true;
    }

    /// Records of the log.
    pub(crate) fn range(&mut self, first: Option<Lsn>, next: Option<Lsn>) {
        if let [log] = self.logs.as_mut_slice() {
            log.first_lsn = first.map(Lsn::get);
            log.next_lsn = next.map(Lsn::get);
        }
    }

    /// A trim up to this lsn.
    pub(crate) fn before(&mut self, lsn: u64) {
        self.before_lsn = Some(lsn);
    }

    pub(crate) fn epoch(&mut self, epoch: u64) {
        self.writer_epoch = Some(epoch);
    }

    /// Requests and records of an append, or of a session.
    pub(crate) fn appended(
        &mut self,
        requests: u32,
        records: u64,
        is_session: bool,
        appended: &Appended,
    ) {
        if is_session {
            *self.requests.get_or_insert(0) += u64::from(requests);
        } else {
            for (log, done) in self.logs.iter_mut().zip(&appended.appends) {
                log.log_id = Some(done.log_id.get());
                log.first_lsn = Some(done.first_lsn.get());
                log.next_lsn = Some(done.next_lsn.get());
            }
        }
        *self.records.get_or_insert(0) += records;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shown(facts: &CallFacts) -> Value {
        serde_json::to_value(facts.shown()).unwrap()
    }

    fn name(text: &str) -> LogName {
        LogName::new(text).unwrap()
    }

    #[test]
    fn one_log_stands_beside_the_other_fields_and_several_in_a_list() {
        let mut facts = CallFacts::default();
        assert_eq!(shown(&facts), json!({}));
        facts.log(&name("a"));
        facts.log(&name("a"));
        facts.found(LogId::new(7));
        facts.range(Some(Lsn::new(1)), Some(Lsn::new(3)));
        facts.before(3);
        assert_eq!(
            shown(&facts),
            json!({"log": "a", "log_id": 7, "first_lsn": 1, "next_lsn": 3, "before_lsn": 3})
        );
        for number in 0..20 {
            facts.log(&name(&format!("b/{number}")));
        }
        let shown = shown(&facts);
        assert_eq!(shown["logs"].as_array().unwrap().len(), MOST_LOGS);
        assert_eq!(shown["more_logs"], true);
        assert!(shown.get("log").is_none());
    }
}
