//! `walctl cursor`: positions of a log's consumers.

use anyhow::Result;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use serde_json::{Value, json};
use wald_client::proto::Log;
use wald_client::{Client, CursorCommit, NamedCursor, Reason};

use crate::args::CursorCommand;
use crate::exit::ExitKind;
use crate::names::{NamePattern, PAGE};
use crate::output::{Out, Output, note};
use crate::table::Table;

/// Number of logs whose cursors are requested at a time.
const AT_A_TIME: usize = 16;

/// A cursor, and how far it is behind.
struct CursorRow {
    log: String,
    cursor: NamedCursor,
    /// The next lsn of the log, if known.
    tail: Option<u64>,
}

impl CursorRow {
    /// Records from the cursor on.
    fn lag(&self) -> Option<u64> {
        Some(self.tail?.saturating_sub(self.cursor.lsn.get()))
    }
}

pub(crate) async fn cursor(
    client: &Client,
    command: CursorCommand,
    output: Output,
) -> Result<ExitKind> {
    let rows = match command {
        CursorCommand::List {
            log: None, prefix, ..
        } => return list(client, &NamePattern::with_prefix(&prefix), output).await,
        CursorCommand::List {
            log: Some(log),
            log_id: None,
            ..
        } if NamePattern::is_pattern(&log) => {
            // A log may have this name.
            match client.get_log(log.as_str()).await {
                Ok(log) => of(client, log, None).await?,
                Err(error) if error.reason() == Some(Reason::LogNotFound) => {
                    return list(client, &NamePattern::matching(&log)?, output).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        CursorCommand::List {
            log: Some(log),
            log_id,
            ..
        } => {
            let log = client.get_log(log).await?;
            of(client, log, log_id).await?
        }
        CursorCommand::Get {
            log,
            cursor,
            log_id,
        } => {
            let found = client.get_cursor(log.as_str(), cursor, log_id).await?;
            let tail = tail(client, &log).await;
            vec![CursorRow {
                log,
                cursor: found,
                tail,
            }]
        }
        CursorCommand::Set(args) => {
            let mut commit = CursorCommit::new(args.log.as_str(), args.cursor, args.lsn);
            if let Some(lsn) = args.expected_lsn {
                commit = commit.expected_lsn(lsn);
            }
            if let Some(log_id) = args.log_id {
                commit = commit.log_id(log_id);
            }
            let moved = client.commit_cursor(commit).await?;
            let tail = tail(client, &args.log).await;
            vec![CursorRow {
                log: args.log,
                cursor: moved,
                tail,
            }]
        }
        CursorCommand::Delete {
            log,
            cursor,
            log_id,
        } => {
            let name = cursor.as_str();
            client.delete_cursor(log.as_str(), name, log_id).await?;
            note(&format!("deleted cursor {cursor} of {log}"));
            return Ok(ExitKind::Ok);
        }
    };
    print(&rows, false, output)?;
    Ok(ExitKind::Ok)
}

/// Prints the cursors of these logs.
async fn list(client: &Client, names: &NamePattern, output: Output) -> Result<ExitKind> {
    let rows = of_all(client, names).await?;
    print(&rows, true, output)?;
    Ok(ExitKind::Ok)
}

/// The cursors of all logs, as JSON.
pub(crate) async fn all(client: &Client) -> Result<Value> {
    let rows = of_all(client, &NamePattern::with_prefix("")).await?;
    Ok(rows.iter().map(as_json).collect())
}

/// The next lsn of a log. The lag is a courtesy: without it the answer stands.
async fn tail(client: &Client, log: &str) -> Option<u64> {
    client.get_log(log).await.ok()?.tail_lsn
}

/// The cursors of one log.
async fn of(client: &Client, log: Log, log_id: Option<u64>) -> Result<Vec<CursorRow>> {
    // All pages are of one log, not of a later one under the name.
    let log_id = log_id.or(Some(log.log_id));
    let mut rows = Vec::new();
    let mut token = None;
    loop {
        let page = client
            .list_cursors(log.name.as_str(), 0, token, log_id)
            .await?;
        rows.extend(page.cursors.into_iter().map(|cursor| CursorRow {
            log: log.name.clone(),
            cursor,
            tail: log.tail_lsn,
        }));
        token = page.next_page_token;
        if token.is_none() {
            return Ok(rows);
        }
    }
}

/// The cursors of these logs, by the names of the logs. Keeps one page of logs at a time: a store may have a million.
async fn of_all(client: &Client, names: &NamePattern) -> Result<Vec<CursorRow>> {
    let mut rows = Vec::new();
    let mut token = None;
    loop {
        let (logs, next) = names.page(client, PAGE, token).await?;
        let found = stream::iter(logs).map(async |log| match of(client, log, None).await {
            // It was deleted meanwhile.
            Err(error) if is_gone(&error) => Ok(Vec::new()),
            found => found,
        });
        let found: Vec<Vec<CursorRow>> = found.buffered(AT_A_TIME).try_collect().await?;
        rows.extend(found.into_iter().flatten());
        token = next;
        if token.is_none() {
            return Ok(rows);
        }
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<wald_client::Error>();
    let reason = error.and_then(wald_client::Error::reason);
    matches!(reason, Some(Reason::LogNotFound | Reason::LogReplaced))
}

fn as_json(row: &CursorRow) -> Value {
    json!({
        "log": row.log,
        "cursor": row.cursor.name,
        "lsn": row.cursor.lsn.get(),
        "lag": row.lag(),
        "log_id": row.cursor.log_id,
        "update_time": time(&row.cursor),
    })
}

fn print(rows: &[CursorRow], many: bool, output: Output) -> Result<()> {
    let mut out = Out::new(output);
    match output {
        Output::Text => out.line(&table(rows, many))?,
        Output::Json => out.json(&rows.iter().map(as_json).collect::<Vec<_>>())?,
        Output::Jsonl => {
            for row in rows {
                out.json(&as_json(row))?;
            }
        }
        Output::Raw | Output::Delimited => {
            for row in rows {
                out.line(&row.cursor.name)?;
            }
        }
    }
    out.flush()?;
    Ok(())
}

/// A table; with the name of each cursor's log if they are of many.
fn table(rows: &[CursorRow], many: bool) -> String {
    let mut table = match many {
        true => Table::with_header(["LOG", "CURSOR", "NEXT", "LAG", "MOVED"]),
        false => Table::with_header(["CURSOR", "NEXT", "LAG", "MOVED"]),
    };
    for row in rows {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let log = many.then(|| row.log.clone());
        table.row(log.into_iter().chain([
            row.cursor.name.clone(),
            row.cursor.lsn.to_string(),
            or_dash(row.lag().map(|lag| lag.to_string())),
            or_dash(time(&row.cursor)),
        ]));
    }
    let first = usize::from(many) + 1;
    table.right(first..first + 2);
    table.text()
}

/// Time of the cursor's last move.
fn time(cursor: &NamedCursor) -> Option<String> {
    let time = Timestamp::try_from(cursor.update_time?).ok()?;
    Some(format!("{time:.0}"))
}
