//! `walctl batch`: records for several logs, all or nothing.

use std::fs::File;
use std::io::{self, IsTerminal, Read};

use anyhow::{Context, Result};
use wald_client::{Check, Client, Condition, Durability, Lsn};

use crate::args::BatchArgs;
use crate::exit::{ExitKind, Usage};
use crate::input::{self, InputCommand, InputFormat, InputRecord, apart};
use crate::output::{Out, Output, say};
use crate::times::Times;

/// Entries by log, logs in the order in which they first occur.
type EntriesByLog = Vec<(String, Vec<InputRecord>)>;

fn read(input: impl Read) -> Result<EntriesByLog> {
    let mut logs = EntriesByLog::new();
    let mut count = 0;
    input::records(
        input,
        (InputCommand::Batch, InputFormat::Json),
        u64::MAX,
        &mut |entry: InputRecord| {
            count += 1;
            let log = entry.log.clone();
            let log = log.with_context(|| format!("record {count} names no `log`"))?;
            match logs.iter_mut().find(|(name, _)| *name == log) {
                Some((_, entries)) => entries.push(entry),
                None => logs.push((log, vec![entry])),
            }
            Ok(())
        },
    )?;
    Ok(logs)
}

pub(crate) async fn run(client: &Client, args: BatchArgs, output: Output) -> Result<ExitKind> {
    let file = args.file.filter(|file| file.as_os_str() != "-");
    let logs = apart(move || match file {
        None => {
            if io::stdin().is_terminal() {
                say("reading records from the terminal, one JSON object a line; Ctrl-D ends");
            }
            read(io::stdin().lock())
        }
        Some(path) => {
            read(File::open(&path).with_context(|| format!("cannot open {}", path.display()))?)
        }
    });
    let logs = logs.await?;
    if logs.is_empty() {
        return Err(Usage(
            "the input has no record; give lines such as {\"log\": \"orders\", \"text\": \"tea\"}"
                .into(),
        )
        .into());
    }
    let durability = args
        .durability
        .map_or(Durability::Unspecified, Durability::from);
    let mut expected = args.expect;
    let mut batch = client.append_batch().durability(durability);
    let mut given = Vec::with_capacity(logs.len());
    for (log, entries) in logs {
        given.push(entries.first().map_or(0, |entry| entry.timestamp_us));
        let mut condition = Condition::new();
        if let Some(place) = expected.iter().position(|(name, _)| *name == log) {
            condition = condition.expected_lsn(expected.swap_remove(place).1);
        }
        batch = batch.log_if(
            log,
            condition,
            entries.into_iter().map(InputRecord::into_record),
        );
    }
    for (log, lsn) in expected {
        batch = batch.check(Check::new(log).expected_lsn(lsn));
    }
    let ack = batch.await?;
    let mut out = Out::new(output);
    for append in &ack.appends {
        let (log, first, next) = (&append.log, append.first_lsn, append.next_lsn);
        match output {
            Output::Json | Output::Jsonl => out.json(&serde_json::json!({
                "log": log,
                "first_lsn": first.get(),
                "next_lsn": next.get(),
                "durable_lsn": append.durable_lsn.map(Lsn::get),
                "replicated_lsn": append.replicated_lsn.map(Lsn::get),
            }))?,
            Output::Text | Output::Raw | Output::Delimited => {
                out.line(&format!(
                    "{log}  lsn {first} to {}",
                    next.get().saturating_sub(1)
                ))?;
            }
        }
    }
    out.flush()?;
    let mut times = Times::default();
    for (append, given) in ack.appends.iter().zip(given) {
        times.note(append, given);
    }
    times.warn(client).await;
    Ok(ExitKind::Ok)
}

#[cfg(test)]
mod tests {
    use wald_client::Record;

    use super::*;

    #[test]
    fn lines_of_one_log_stay_together_in_order() {
        let input = br#"{"log": "b", "text": "1"}
            {"log": "a", "data": "MjM="}

            {"log": "b", "value": {"n": 1.0}, "headers": [{"key": "k", "value": "v"}]}"#;
        let logs = read(&input[..]).unwrap();
        let records =
            |entries: Vec<InputRecord>| entries.into_iter().map(InputRecord::into_record).collect();
        let logs: Vec<(String, Vec<Record>)> = logs
            .into_iter()
            .map(|(log, entries)| (log, records(entries)))
            .collect();
        let third = Record::new(r#"{"n": 1.0}"#).header("k", "v");
        assert_eq!(
            logs,
            [
                ("b".to_owned(), vec![Record::new("1"), third]),
                ("a".to_owned(), vec![Record::new("23")]),
            ]
        );
    }

    #[test]
    fn line_without_a_log_or_exactly_one_payload_is_named() {
        for (bad, part) in [
            (r#"{"log": "a"}"#, "line 2 "),
            (r#"{"log": "a", "text": "1", "data": ""}"#, "line 2 "),
            ("7", "line 2 "),
            (r#"{"text": "1"}"#, "record 2 names no `log`"),
        ] {
            let input = format!("{}\n{bad}", r#"{"log": "a", "text": ""}"#);
            let error = format!("{:#}", read(input.as_bytes()).unwrap_err());
            assert!(error.starts_with(part), "{error}");
        }
    }
}
