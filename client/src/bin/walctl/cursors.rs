//! `walctl cursor`: where consumers of a log go on reading.

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use jiff::Timestamp;
use serde_json::json;
use wald_client::{Client, CursorCommit, NamedCursor};

use crate::args::CursorCommand;
use crate::exit::Exit;
use crate::output::{Out, Output};

pub(crate) async fn cursor(
    client: &Client,
    command: CursorCommand,
    output: Output,
) -> Result<Exit> {
    let (log, cursors) = match command {
        CursorCommand::List { log, log_id } => {
            let cursors = list(client, &log, log_id).await?;
            (log, cursors)
        }
        CursorCommand::Get {
            log,
            cursor,
            log_id,
        } => {
            let found = client.get_cursor(log.as_str(), cursor, log_id).await?;
            (log, vec![found])
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
            (args.log, vec![moved])
        }
        CursorCommand::Delete {
            log,
            cursor,
            log_id,
        } => {
            let name = cursor.as_str();
            client.delete_cursor(log.as_str(), name, log_id).await?;
            eprintln!("deleted cursor {cursor} of {log}");
            return Ok(Exit::Ok);
        }
    };
    print(&log, &cursors, output)?;
    Ok(Exit::Ok)
}

async fn list(client: &Client, log: &str, log_id: Option<u64>) -> Result<Vec<NamedCursor>> {
    let mut cursors = Vec::new();
    let mut token = None;
    loop {
        // All pages are of one log, not of a later one under the name.
        let first = cursors.first().map(|cursor: &NamedCursor| cursor.log_id);
        let log_id = log_id.or(first);
        let page = client.list_cursors(log, 0, token, log_id).await?;
        cursors.extend(page.cursors);
        token = page.next_page_token;
        if token.is_none() {
            return Ok(cursors);
        }
    }
}

fn print(log: &str, cursors: &[NamedCursor], output: Output) -> Result<()> {
    let as_json = |cursor: &NamedCursor| {
        json!({
            "log": log,
            "cursor": cursor.name,
            "lsn": cursor.lsn.get(),
            "log_id": cursor.log_id,
            "update_time": time(cursor),
        })
    };
    let mut out = Out::new(output);
    match output {
        Output::Text => out.line(&table(cursors))?,
        Output::Json => out.json(&cursors.iter().map(as_json).collect::<Vec<_>>())?,
        Output::Jsonl => {
            for cursor in cursors {
                out.json(&as_json(cursor))?;
            }
        }
        Output::Raw => {
            for cursor in cursors {
                out.line(&cursor.name)?;
            }
        }
    }
    out.flush()?;
    Ok(())
}

fn table(cursors: &[NamedCursor]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(["CURSOR", "NEXT", "MOVED"]);
    for cursor in cursors {
        table.add_row([
            cursor.name.clone(),
            cursor.lsn.to_string(),
            time(cursor).unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    for column in table.column_iter_mut().skip(1).take(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

/// When the cursor was last moved.
fn time(cursor: &NamedCursor) -> Option<String> {
    let time = Timestamp::try_from(cursor.update_time?).ok()?;
    Some(format!("{time:.0}"))
}
