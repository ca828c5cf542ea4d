//! The audit log: who changed something, who was refused, and which files came into force.
//!
//! ```text
//! refusal (auth.rs) ──▶ limit: 10 a second for each caller ─┐
//! end of a call (metrics/calls.rs), its facts ──────────────┼─▶ line ─▶ queue ─▶ thread ─▶ file or stderr
//! start, stop, reloads, offline commands ───────────────────┘           │ full, or the output fails:
//!                                                                       ▼ counted; `refuse`: UNAVAILABLE
//! ```
//!
//! Rule: each line is JSON with names, numbers and reasons. Payloads and secrets are never given to this module. No
//! thread but its own waits for the output.
//!
//! | file | purpose |
//! |---|---|
//! | `call.rs` | one call: origin, caller, end |
//! | `facts.rs` | names and numbers that handlers add |
//! | `line.rs` | the form of a line |
//! | `limit.rs` | bounds the lines about refusals |
//! | `queue.rs`, `output.rs` | the thread, and the file that it writes |

mod call;
mod facts;
mod limit;
mod line;
mod output;
mod queue;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::config::{AuditFailurePolicy, AuditScope, Config};
use crate::metrics::Metrics;
use crate::offline::say;
use crate::serve::Exit;
pub(crate) use call::{AuditedPeer, ChangeEnd, RecordedCall, ShownCredential, Trail};
pub(crate) use facts::CallFacts;
pub(crate) use limit::network;
use limit::{RefusalLimits, RefusedCaller, Verdict};
use line::{AuditLine, FAILED, OK, UNAUTHENTICATED, shortened};
use output::AuditOutput;
use queue::{Counts, Queue};

/// Longest time that the end of the process waits for the output to take the last lines.
const FLUSH: Duration = Duration::from_secs(2);

/// The audit log of a daemon.
pub(crate) struct AuditLog {
    queue: Queue,
    callers: RefusalLimits,
    /// Whether data calls are recorded.
    records_data: bool,
    /// Whether changes are refused while no line can be written.
    refuses: bool,
}

impl AuditLog {
    /// Opens the audit log that the settings name, and starts its thread. `None`: it is off.
    ///
    /// # Errors
    /// With the exit code and a sentence.
    pub(crate) fn start(config: &Config, metrics: &Metrics) -> Result<Option<Arc<Self>>, Exit> {
        let output = AuditOutput::open(config).map_err(|why| Exit::new(Exit::CONFIG, why))?;
        let Some(output) = output else {
            return Ok(None);
        };
        let log = Arc::new(Self {
            queue: Queue::new(metrics.audit.clone()),
            callers: RefusalLimits::default(),
            records_data: config.audit == AuditScope::All,
            refuses: config.audit_on_failure == AuditFailurePolicy::Refuse,
        });
        let writer = Arc::clone(&log);
        std::thread::Builder::new()
            .name("wald-audit".to_owned())
            .spawn(move || writer.queue.write(output, &*writer, limit::PAUSE))
            .map_err(|error| Exit::new(Exit::SYSTEM, format!("cannot start a thread: {error}")))?;
        Ok(Some(log))
    }

    /// The audit log for the calls of a connection.
    pub(crate) fn peer(self: &Arc<Self>, address: Option<SocketAddr>) -> Arc<AuditedPeer> {
        Arc::new(AuditedPeer {
            log: Arc::clone(self),
            address,
        })
    }

    /// Whether calls that change something must be refused now, because their lines could be lost.
    pub(crate) fn refuses_changes(&self) -> bool {
        self.refuses && self.queue.is_unsafe()
    }

    /// Opens the file again: the earlier one was renamed.
    pub(crate) fn reopen(&self) {
        self.queue.reopen();
    }

    /// Records an event of the daemon itself, with the fields of `details`.
    pub(crate) fn event(
        &self,
        event: &'static str,
        details: Value,
        result: Result<(), &dyn std::fmt::Display>,
    ) {
        self.write(event_line(event, details, result));
    }

    /// Reports counts of refusals, and waits until the output has all lines, for at most 2 s.
    pub(crate) fn finish(&self) {
        self.report();
        self.queue.flush(FLUSH);
    }

    fn write(&self, line: AuditLine<'_>) {
        self.queue.push(&line.text());
    }

    /// Records a handshake of TLS that ends because the certificate of the client is missing or refused.
    pub(crate) fn refused_handshake(
        &self,
        address: Option<SocketAddr>,
        has_certificate: bool,
        why: &dyn std::fmt::Display,
    ) {
        self.refused(address, None, UNAUTHENTICATED, |log| {
            log.write(AuditLine {
                event: "handshake",
                peer: address.map(|address| address.to_string()),
                principal: Some(""),
                credential: Some(if has_certificate {
                    "certificate"
                } else {
                    "none"
                }),
                outcome: UNAUTHENTICATED,
                reason: Some(shortened(&why.to_string())),
                ..AuditLine::default()
            });
        });
    }

    /// Writes the line of a refusal, or counts it.
    fn refused(
        &self,
        address: Option<SocketAddr>,
        principal: Option<&str>,
        outcome: &'static str,
        write: impl FnOnce(&Self),
    ) {
        let caller = match (principal, address) {
            (Some(name), _) => RefusedCaller::Principal(name),
            (None, Some(address)) => RefusedCaller::Address(limit::network(address.ip())),
            (None, None) => RefusedCaller::Unknown,
        };
        match self.callers.judge(caller, outcome, Instant::now()) {
            Verdict::Line => write(self),
            Verdict::Counted(true) => self.queue.wake(),
            Verdict::Counted(false) => {}
        }
    }
}

impl Counts for AuditLog {
    fn has_counts(&self) -> bool {
        self.callers.has_counts()
    }

    fn report(&self) {
        for count in self.callers.take() {
            self.write(AuditLine {
                event: "refusals",
                peer: count.address.map(|address| address.to_string()),
                principal: Some(&count.principal),
                details: Some(json!({ "count": count.refusals })),
                outcome: count.outcome,
                ..AuditLine::default()
            });
        }
    }

    fn reopened(&self) {
        self.event("reopen", json!({}), Ok(()));
    }
}

fn event_line<'a>(
    event: &'static str,
    details: Value,
    result: Result<(), &dyn std::fmt::Display>,
) -> AuditLine<'a> {
    AuditLine {
        event,
        details: Some(details),
        outcome: if result.is_ok() { OK } else { FAILED },
        reason: result.err().map(|why| shortened(&why.to_string())),
        ..AuditLine::default()
    }
}

/// Records the commands that change a store while no daemon serves it.
pub(crate) struct OfflineAudit {
    output: Option<AuditOutput>,
    refuses: bool,
}

impl OfflineAudit {
    /// Opens the audit log before the change. A failure is printed, or refuses the command.
    ///
    /// # Errors
    /// If it cannot be opened and `audit_on_failure` is refuse.
    pub(crate) fn open(config: &Config) -> Result<Self, Exit> {
        let mut audit = Self {
            output: None,
            refuses: config.audit_on_failure == AuditFailurePolicy::Refuse,
        };
        match AuditOutput::open(config) {
            Ok(output) => audit.output = output,
            Err(why) => audit.failed(why)?,
        }
        Ok(audit)
    }

    /// Records that the command was run.
    ///
    /// # Errors
    /// If the line cannot be written and `audit_on_failure` is refuse.
    pub(crate) fn ran(
        &mut self,
        command: &str,
        directory: &Path,
        by: &str,
        result: Result<(), &dyn std::fmt::Display>,
    ) -> Result<(), Exit> {
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        let details = json!({
            "command": command,
            "data_dir": directory.display().to_string(),
            "user": by,
        });
        let line = event_line("offline", details, result).text();
        match output.write(line.as_bytes()) {
            Ok(()) => Ok(()),
            Err(error) => {
                let name = output.name();
                self.failed(format!("audit_log: {name}: {error}"))
            }
        }
    }

    fn failed(&self, why: String) -> Result<(), Exit> {
        match self.refuses {
            true => Err(Exit::new(Exit::CONFIG, why)),
            false => {
                say(&format!("warning: {why}"));
                Ok(())
            }
        }
    }
}
