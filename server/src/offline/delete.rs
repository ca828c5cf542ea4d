//! `wald delete-logs`: deletes logs by the beginning of their names, for a store that is full of them.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use clap::{Arg, ArgMatches, Command};
use serde_json::json;
use wald_storage::{
    Administer as _, Disk, LocalEngine, LogInfo, LogTarget, NoObserver, Operate as _,
    StorageConfig, SystemClock, block_on,
};

use super::{
    OfflineOutput, escaped, failed, look_then_open, not_opened, output_of, written, yes_argument,
};
use crate::config::Config;
use crate::encryption;
use crate::serve::Exit;

/// Deletions under way at a time: they share flushes.
const AT_ONCE: usize = 1000;

/// Names that are printed for people.
const SHOWN: usize = 20;

pub(super) fn command() -> Command {
    Command::new("delete-logs")
        .about("Delete all logs of an offline store whose names begin with a prefix")
        .long_about(
            "Lists the logs of an offline store whose names begin with the prefix, and counts their \
             records. With --yes the command deletes them, durably and as DeleteLog does: each log is there with all its \
             records or gone, also after a power cut in between. Then max_logs and max_name_bytes have room again; \
             a daemon that serves the store gives the space back.\n\n\
             Exit codes: 0 done, 1 failed, 2 usage, 4 a daemon has the directory.",
        )
        .arg(super::directory_argument())
        .arg(super::output_argument())
        .arg(
            Arg::new("prefix")
                .long("prefix")
                .value_name("PREFIX")
                .help("Prefix of the names; \"\" selects every log")
                .required(true),
        )
        .arg(yes_argument("Delete the logs; without it nothing is changed"))
}

pub(super) fn run(directory: &Path, matches: &ArgMatches, settings: &Config) -> Result<u8, Exit> {
    let config = &settings.storage_without_replica();
    let prefix = matches
        .get_one::<String>("prefix")
        .map_or("", String::as_str);
    let look = |disk: &Arc<dyn Disk>| {
        let logs = wald_storage::logs(disk, config, prefix)?;
        let any = !logs.is_empty();
        Ok((logs, any))
    };
    let (logs, disk) = look_then_open(directory, matches, look)?;
    let deletes = disk.is_some();
    if let Some(disk) = disk {
        let (clock, observer) = (Arc::new(SystemClock), Arc::new(NoObserver));
        let keys = encryption::start_offline(settings, &disk, Box::new(|_| None))?;
        let config = StorageConfig {
            cipher: keys.as_ref().map(encryption::cipher),
            ..config.clone()
        };
        let (engine, _) = LocalEngine::open(disk, config, clock, observer).map_err(not_opened)?;
        let deleted = delete(&engine, &logs);
        // Also after an error: deleted files stay deleted.
        let closed = block_on(engine.drain());
        deleted?;
        closed.map_err(|error| failed(&error))?;
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match output_of(matches) {
        OfflineOutput::Text => text(&mut out, &logs, deletes),
        OfflineOutput::Json | OfflineOutput::Jsonl => {
            super::json_line(&mut out, &document(&logs, deletes))
        }
    };
    written(printed.and_then(|()| out.flush()))?;
    Ok(0)
}

fn delete(engine: &LocalEngine, logs: &[LogInfo]) -> Result<(), Exit> {
    for some in logs.chunks(AT_ONCE) {
        let target = |log: &LogInfo| LogTarget {
            name: log.name.clone(),
            log_id: Some(log.log_id),
        };
        // All are submitted before the first is waited for.
        let deletions: Vec<_> = (some.iter())
            .map(|log| (log, engine.delete_log(target(log))))
            .collect();
        for (log, deletion) in deletions {
            block_on(deletion).map_err(|error| {
                let name = escaped(log.name.as_str());
                failed(&format!("deleting log \"{name}\": {error}"))
            })?;
        }
    }
    Ok(())
}

fn records(log: &LogInfo) -> u64 {
    log.tail_lsn.get() - log.first_lsn.get()
}

fn text(out: &mut impl Write, logs: &[LogInfo], deleted: bool) -> io::Result<()> {
    for log in logs.iter().take(SHOWN) {
        let name = escaped(log.name.as_str());
        writeln!(out, "{name}: {} records", records(log))?;
    }
    if logs.len() > SHOWN {
        writeln!(out, "... and {} more", logs.len() - SHOWN)?;
    }
    let (count, all) = (logs.len(), logs.iter().map(records).sum::<u64>());
    match (logs.is_empty(), deleted) {
        (true, _) => writeln!(out, "no log has such a name; nothing was changed"),
        (_, true) => writeln!(out, "deleted {count} logs with {all} records"),
        _ => writeln!(
            out,
            "{count} logs with {all} records would go; nothing was changed, delete them with --yes"
        ),
    }
}

fn document(logs: &[LogInfo], deleted: bool) -> serde_json::Value {
    let each: Vec<_> = logs
        .iter()
        .map(|log| json!({ "log": log.name.as_str(), "records": records(log) }))
        .collect();
    json!({ "deleted": deleted, "logs": each })
}
