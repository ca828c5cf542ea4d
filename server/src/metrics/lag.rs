//! Lag of cursors, for the logs that `cursor_lag_logs` names.
//!
//! Names of logs and cursors become labels here and nowhere else. Both are a client's choice, so
//! their number is bounded: a scrape looks at [`LOGS`] logs and shows [`CURSORS`] cursors at most.

use wald_storage::{LogEngine, LogInfo, LogTarget};

use crate::config::{LogPattern, LogPatterns};

/// Maximum number of cursors that are shown.
const CURSORS: usize = 1_000;
/// Maximum number of logs that one scrape looks at.
const LOGS: usize = 10_000;
/// Logs that the engine lists in one step.
const PAGE: usize = 256;

/// Number of records that one cursor is behind its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lag {
    pub(crate) log: String,
    pub(crate) cursor: String,
    /// Durable records of the log from the cursor on.
    pub(crate) records: u64,
}

/// The lag of each cursor of these logs, by name, as far as the bounds allow.
pub(crate) async fn lags(logs: &LogPatterns, engine: &dyn LogEngine) -> Vec<Lag> {
    let mut lags = Vec::new();
    let mut looked_at = 0;
    for pattern in &logs.0 {
        match pattern {
            LogPattern::Name(name) => {
                // The name itself comes first of all that begin with it.
                let found = engine.list_logs(name.clone(), None, 1).await;
                let found = found.unwrap_or_default();
                if let Some(log) = found.iter().find(|log| log.name.as_str() == name) {
                    add(engine, log, &mut lags).await;
                }
            }
            LogPattern::Prefix(prefix) => {
                let mut after: Option<String> = None;
                while lags.len() < CURSORS && looked_at < LOGS {
                    let page = engine.list_logs(prefix.clone(), after, PAGE).await;
                    let page = page.unwrap_or_default();
                    for log in &page {
                        add(engine, log, &mut lags).await;
                    }
                    looked_at += page.len();
                    after = page.last().map(|log| log.name.as_str().to_owned());
                    if page.len() < PAGE {
                        break;
                    }
                }
            }
        }
    }
    lags.truncate(CURSORS);
    lags
}

async fn add(engine: &dyn LogEngine, log: &LogInfo, lags: &mut Vec<Lag>) {
    let target = LogTarget {
        name: log.name.clone(),
        log_id: Some(log.log_id),
    };
    let room = CURSORS.saturating_sub(lags.len());
    // A log that was deleted meanwhile has none.
    let cursors = engine.list_cursors(target, None, room).await;
    lags.extend(cursors.unwrap_or_default().into_iter().map(|cursor| Lag {
        log: log.name.as_str().to_owned(),
        cursor: cursor.name.as_str().to_owned(),
        records: log.durable_lsn.get().saturating_sub(cursor.lsn.get()),
    }));
}
