//! `walctl logs` and `walctl log`.

use anyhow::Result;
use indicatif::HumanBytes;
use jiff::Timestamp;
use serde_json::json;
use wald_client::proto::{Compression, Log, LogConfig, Retention, SyncMode};
use wald_client::{Client, Outcome, Reason};
use wald_text::units::shown_span;

use crate::args::{ConfigureArgs, LogCommand, LogsArgs};
use crate::exit::{ExitKind, Usage};
use crate::names::NamePattern;
use crate::output::{Out, Output, confirmed, note, say};
use crate::progress::counted;
use crate::table::Table;

pub(crate) async fn list(client: &Client, args: LogsArgs, output: Output) -> Result<ExitKind> {
    let names = NamePattern::of(args.pattern.as_deref(), &args.prefix)?;
    let chosen = names.list(client, args.limit, args.page_token).await?;
    print(&chosen.logs, output)?;
    match chosen.token {
        Some(token) => say(&format!(
            "there are more: --page-token {token} continues, --limit 0 shows all"
        )),
        None if chosen.has_more => say("there are more: --limit 0 shows all"),
        None => {}
    }
    Ok(ExitKind::Ok)
}

/// All logs, as JSON.
pub(crate) async fn all(client: &Client) -> Result<serde_json::Value> {
    let logs = NamePattern::with_prefix("").all(client).await?;
    Ok(logs.iter().map(as_json).collect())
}

pub(crate) async fn log(client: &Client, command: LogCommand, output: Output) -> Result<ExitKind> {
    let log = match command {
        LogCommand::Get { log } => client.get_log(log).await?,
        LogCommand::Create(args) => {
            let (config, _) = configuration(&args);
            client.create_log(args.log, config).await?
        }
        LogCommand::Update(args) => {
            let (config, paths) = configuration(&args);
            if paths.is_empty() {
                return Err(Usage(
                    "name a setting to change, such as --max-age 7d or --sync-mode batch".into(),
                )
                .into());
            }
            client.update_log(args.log, config, paths).await?
        }
        LogCommand::Delete {
            log,
            log_id,
            shred,
            yes,
        } => {
            let there = match client.get_log(log.as_str()).await {
                // A later log of the name is not the one to erase.
                Ok(there) if shred && log_id.is_some_and(|id| id != there.log_id) => None,
                Ok(there) => Some(there),
                // An erasure that was cut off after the deletion: the server continues it.
                Err(error) if shred && error.reason() == Some(Reason::LogNotFound) => None,
                Err(error) => return Err(error.into()),
            };
            let Some(there) = there else {
                // Nobody is asked again: the log is gone, and its records with it.
                client.shred_log(log.as_str(), log_id).await?;
                note(&format!(
                    "destroyed the keys of {log}, which was deleted before"
                ));
                return Ok(ExitKind::Ok);
            };
            if !confirmed(&question(&there), yes).await? {
                say("nothing was deleted");
                return Ok(ExitKind::Failed);
            }
            // The log that was asked about, not a later one of its name.
            let id = log_id.unwrap_or(there.log_id);
            if shred {
                erase(client, &log, id).await?;
                note(&format!("deleted {log}, and destroyed its keys"));
                return Ok(ExitKind::Ok);
            }
            client.delete_log(log.as_str(), Some(id)).await?;
            note(&format!("deleted {log}"));
            return Ok(ExitKind::Ok);
        }
    };
    if output == Output::Text {
        let mut out = Out::new(output);
        out.line(&details(&log))?;
        out.flush()?;
    } else {
        print(&[log], output)?;
    }
    Ok(ExitKind::Ok)
}

/// Deletes a log and destroys its keys. The error of an erasure that may be half done has the number of the log: a repeat
/// with it never meets a later log of the name.
async fn erase(client: &Client, log: &str, id: u64) -> Result<()> {
    let erased = client.shred_log(log, Some(id)).await;
    erased.map_err(|error| match error.outcome() {
        Outcome::Unknown => anyhow::Error::from(error)
            .context(format!("erasing {log} (repeat it with --log-id {id})")),
        Outcome::NotApplied => error.into(),
    })
}

/// The configuration that the flags make, and the paths of the fields they set.
fn configuration(args: &ConfigureArgs) -> (LogConfig, Vec<&'static str>) {
    let mut paths = Vec::new();
    let mut set = |path, given: bool| {
        if given {
            paths.push(path);
        }
        given
    };
    let mut config = LogConfig::default();
    set("sync_mode", args.sync_mode.is_some());
    config.set_sync_mode(args.sync_mode.map_or(SyncMode::Unspecified, SyncMode::from));
    let bounds = [
        set("retention.max_age", args.max_age.is_some()),
        set("retention.max_bytes", args.max_bytes.is_some()),
        set("retention.max_records", args.max_records.is_some()),
        set("retention.respect_cursors", args.respect_cursors.is_some()),
    ];
    set("retention", args.default_retention);
    config.retention = bounds.contains(&true).then(|| Retention {
        max_age: args.max_age.and_then(|age| age.try_into().ok()),
        max_bytes: args.max_bytes.unwrap_or_default(),
        max_records: args.max_records.unwrap_or_default(),
        respect_cursors: args.respect_cursors.unwrap_or_default(),
    });
    set("compression", args.compression.is_some());
    config.set_compression(
        args.compression
            .map_or(Compression::Unspecified, Compression::from),
    );
    set("max_record_bytes", args.max_record_bytes.is_some());
    config.max_record_bytes = args.max_record_bytes.unwrap_or_default();
    (config, paths)
}

fn print(logs: &[Log], output: Output) -> Result<()> {
    let mut out = Out::new(output);
    match output {
        Output::Text => out.line(&table(logs))?,
        Output::Json => out.json(&logs.iter().map(as_json).collect::<Vec<_>>())?,
        Output::Jsonl => {
            for log in logs {
                out.json(&as_json(log))?;
            }
        }
        Output::Raw | Output::Delimited => {
            for log in logs {
                out.line(&log.name)?;
            }
        }
    }
    out.flush()?;
    Ok(())
}

/// Names the records that a deletion removes.
fn question(log: &Log) -> String {
    let (first, next) = (log.first_lsn.unwrap_or(0), log.tail_lsn.unwrap_or(0));
    match next.saturating_sub(first) {
        0 => format!("delete the empty log {}?", log.name),
        many => format!(
            "delete the log {} with {}, lsn {first} to {}, for ever?",
            log.name,
            counted(many),
            next.saturating_sub(1)
        ),
    }
}

fn table(logs: &[Log]) -> String {
    let mut table = Table::with_header([
        "LOG", "FIRST", "NEXT", "DURABLE", "STORED", "SYNC", "CREATED",
    ]);
    for log in logs {
        let number = |lsn: Option<u64>| lsn.map_or_else(|| "-".to_owned(), |lsn| lsn.to_string());
        table.row([
            log.name.clone(),
            number(log.first_lsn),
            number(log.tail_lsn),
            number(log.durable_lsn),
            HumanBytes(log.stored_bytes).to_string(),
            sync_mode(log).unwrap_or_else(|| "default".to_owned()),
            time(log.create_time.as_ref()).unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table.right(1..5);
    table.text()
}

/// Everything about one log.
fn details(log: &Log) -> String {
    let config = log.config.unwrap_or_default();
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let number = |lsn: Option<u64>| or_dash(lsn.map(|lsn| lsn.to_string()));
    let [sync_mode, retention, compression, max_record_bytes] = setting_words(&config);
    let mut table = Table::new();
    for (name, value) in [
        ("log", log.name.clone()),
        ("log id", log.log_id.to_string()),
        ("first lsn", number(log.first_lsn)),
        ("next lsn", number(log.tail_lsn)),
        ("durable below", number(log.durable_lsn)),
        ("replicated below", number(log.replicated_lsn)),
        ("writer epoch", number(log.writer_epoch)),
        ("stored", HumanBytes(log.stored_bytes).to_string()),
        ("sync mode", sync_mode),
        ("compression", compression),
        ("max record bytes", max_record_bytes),
        ("retention", retention),
        ("created", or_dash(time(log.create_time.as_ref()))),
        ("updated", or_dash(time(log.update_time.as_ref()))),
    ] {
        table.row([name.to_owned(), value]);
    }
    table.text()
}

/// Paths of all settings of a log.
pub(crate) const SETTINGS: [&str; 4] =
    ["sync_mode", "retention", "compression", "max_record_bytes"];

/// The values of [`SETTINGS`] in words.
pub(crate) fn setting_words(config: &LogConfig) -> [String; SETTINGS.len()] {
    let or_default = |text: Option<String>| text.unwrap_or_else(|| "the server's".to_owned());
    let most = Some(config.max_record_bytes).filter(|bytes| *bytes != 0);
    [
        or_default(word(config.sync_mode().as_str_name(), "SYNC_MODE_")),
        retention(config.retention.as_ref()),
        or_default(word(config.compression().as_str_name(), "COMPRESSION_")),
        or_default(most.map(|bytes| bytes.to_string())),
    ]
}

/// Describes a log's retention in words.
pub(crate) fn retention(retention: Option<&Retention>) -> String {
    let Some(retention) = retention else {
        return "the server's".to_owned();
    };
    let mut bounds = Vec::new();
    if let Some(age) = retention.max_age {
        let span = std::time::Duration::try_from(age).ok();
        bounds.push(span.map_or_else(|| age.to_string(), shown_span));
    }
    if retention.max_bytes != 0 {
        bounds.push(HumanBytes(retention.max_bytes).to_string());
    }
    if retention.max_records != 0 {
        bounds.push(counted(retention.max_records));
    }
    if bounds.is_empty() {
        return "everything is kept".to_owned();
    }
    let held = match retention.respect_cursors {
        true => "; nothing beyond the lowest cursor is forgotten",
        false => "",
    };
    format!("at most {}{held}", bounds.join(", "))
}

pub(crate) fn retention_json(retention: &Retention) -> serde_json::Value {
    json!({
        "max_age": retention.max_age.as_ref().map(ToString::to_string),
        "max_bytes": retention.max_bytes,
        "max_records": retention.max_records,
        "respect_cursors": retention.respect_cursors,
    })
}

pub(crate) fn as_json(log: &Log) -> serde_json::Value {
    let config = log.config.unwrap_or_default();
    let retention = config.retention.as_ref();
    json!({
        "name": log.name,
        "log_id": log.log_id,
        "first_lsn": log.first_lsn,
        "tail_lsn": log.tail_lsn,
        "durable_lsn": log.durable_lsn,
        "replicated_lsn": log.replicated_lsn,
        "writer_epoch": log.writer_epoch,
        "stored_bytes": log.stored_bytes,
        "sync_mode": sync_mode(log),
        "compression": word(config.compression().as_str_name(), "COMPRESSION_"),
        "max_record_bytes": config.max_record_bytes,
        "retention": retention.map(retention_json),
        "create_time": time(log.create_time.as_ref()),
        "update_time": time(log.update_time.as_ref()),
    })
}

/// The log's own sync mode, if it has one.
fn sync_mode(log: &Log) -> Option<String> {
    word(log.config.as_ref()?.sync_mode().as_str_name(), "SYNC_MODE_")
}

/// A value of an enumeration as people write it; none if it is unspecified.
pub(crate) fn word(name: &str, prefix: &str) -> Option<String> {
    let word = name.strip_prefix(prefix).unwrap_or(name).to_lowercase();
    (word != "unspecified").then_some(word)
}

pub(crate) fn time(time: Option<&prost_types::Timestamp>) -> Option<String> {
    let time = time?;
    let time = Timestamp::new(time.seconds, time.nanos).ok()?;
    Some(format!("{time:.0}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command};

    #[test]
    fn update_names_only_what_was_given() {
        let line = "walctl log update orders --sync-mode batch --max-records 5";
        let args = Args::try_parse_from(line.split(' ')).unwrap();
        let Command::Log(LogCommand::Update(args)) = args.command else {
            panic!("an update");
        };
        let (config, paths) = configuration(&args);
        assert_eq!(paths, ["sync_mode", "retention.max_records"]);
        assert_eq!(config.sync_mode(), SyncMode::Batch);
        assert_eq!(config.retention.unwrap().max_records, 5);
    }

    #[test]
    fn retention_is_set_bound_by_bound_or_given_back_to_the_server() {
        let made = |line: &str| {
            let args = Args::try_parse_from(line.split(' '));
            let Command::Log(LogCommand::Update(args)) = args.unwrap().command else {
                panic!("an update");
            };
            configuration(&args)
        };
        let (config, paths) = made("walctl log update l --max-age 7d --respect-cursors");
        assert_eq!(paths, ["retention.max_age", "retention.respect_cursors"]);
        let own = config.retention.unwrap();
        assert_eq!(
            (own.max_age.unwrap().seconds, own.respect_cursors),
            (168 * 3600, true)
        );
        assert_eq!(
            retention(Some(&own)),
            "at most 168h; nothing beyond the lowest cursor is forgotten"
        );
        let (config, _) = made("walctl log update l --respect-cursors false --max-bytes 0");
        assert_eq!(config.retention, Some(Retention::default()));
        assert_eq!(retention(config.retention.as_ref()), "everything is kept");
        let (config, paths) = made("walctl log update l --default-retention");
        assert_eq!((config.retention, paths), (None, vec!["retention"]));
        let both = "walctl log update l --default-retention --max-records 1";
        assert!(Args::try_parse_from(both.split(' ')).is_err());
    }

    #[test]
    fn details_have_the_id_and_every_setting() {
        let mut log = Log {
            name: "orders".into(),
            log_id: 7,
            config: Some(LogConfig {
                max_record_bytes: 512,
                ..Default::default()
            }),
            ..Default::default()
        };
        if let Some(config) = &mut log.config {
            config.set_sync_mode(SyncMode::Batch);
            config.set_compression(Compression::Lz4);
        }
        let shown = details(&log);
        let row = |name: &str| {
            let line = shown.lines().find(|line| line.trim().starts_with(name));
            line.unwrap_or_default().trim().to_owned()
        };
        assert!(row("log id").ends_with(" 7"), "{shown}");
        assert!(row("sync mode").ends_with(" batch"), "{shown}");
        assert!(row("compression").ends_with(" lz4"), "{shown}");
        assert!(row("max record bytes").ends_with(" 512"), "{shown}");
        assert!(row("retention").ends_with("the server's"), "{shown}");
    }

    #[test]
    fn table_shows_a_first_lsn_of_zero() {
        let log = Log {
            name: "orders".into(),
            first_lsn: Some(0),
            tail_lsn: Some(12),
            stored_bytes: 2_048,
            ..Default::default()
        };
        let table = table(&[log]);
        let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["orders", "0", "12", "-", "2.00", "KiB", "default", "-"]
        );
    }
}
