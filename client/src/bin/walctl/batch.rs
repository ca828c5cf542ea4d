//! `walctl batch`: records for several logs, all or nothing.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use wald_client::{Check, Client, Condition, Durability, Lsn, Record};

use crate::args::BatchArgs;
use crate::exit::Exit;
use crate::input;
use crate::output::{JsonHeader, Out, Output, from_base64};

/// One line of the input.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    log: String,
    text: Option<String>,
    data: Option<String>,
    value: Option<Box<RawValue>>,
    #[serde(default)]
    headers: Vec<JsonHeader>,
}

impl Line {
    fn into_record(self) -> Result<(String, Record)> {
        let payload = match (self.text, self.data, self.value) {
            (Some(text), None, None) => Bytes::from(text),
            (None, Some(data), None) => from_base64(&data).context("`data` is not base64")?,
            (None, None, Some(value)) => Bytes::from(String::from(Box::<str>::from(value))),
            _ => bail!("it needs exactly one of `text`, `data` (base64) and `value` (JSON)"),
        };
        let mut record = Record::new(payload);
        for header in self.headers {
            let value = match (header.value, header.data) {
                (Some(value), None) => Bytes::from(value),
                (None, Some(data)) => from_base64(&data).context("a header is not base64")?,
                _ => bail!("a header needs exactly one of `value` and `data` (base64)"),
            };
            record = record.header(header.key, value);
        }
        Ok((self.log, record))
    }
}

/// Records by log, logs in the order in which they first occur.
type Logs = Vec<(String, Vec<Record>)>;

fn read(input: &mut dyn BufRead) -> Result<Logs> {
    let mut logs = Logs::new();
    input::lines(input, &mut |number, line| {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let (log, record) = serde_json::from_slice::<Line>(line)
            .map_err(anyhow::Error::from)
            .and_then(Line::into_record)
            .with_context(|| format!("line {number}"))?;
        match logs.iter_mut().find(|(name, _)| *name == log) {
            Some((_, records)) => records.push(record),
            None => logs.push((log, vec![record])),
        }
        Ok(())
    })?;
    Ok(logs)
}

pub(crate) async fn run(client: &Client, args: BatchArgs, output: Output) -> Result<Exit> {
    let logs = match args.file.filter(|file| file.as_os_str() != "-") {
        None => read(&mut io::stdin().lock())?,
        Some(path) => {
            let file =
                File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            read(&mut BufReader::new(file))?
        }
    };
    let durability = args
        .durability
        .map_or(Durability::Unspecified, Durability::from);
    let mut expected = args.expect;
    let mut batch = client.append_batch().durability(durability);
    for (log, records) in logs {
        let mut condition = Condition::new();
        if let Some(place) = expected.iter().position(|(name, _)| *name == log) {
            condition = condition.expected_lsn(expected.swap_remove(place).1);
        }
        batch = batch.log_if(log, condition, records);
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
            }))?,
            Output::Text | Output::Raw => {
                out.line(&format!(
                    "{log}  lsn {first} to {}",
                    next.get().saturating_sub(1)
                ))?;
            }
        }
    }
    out.flush()?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_log_stay_together_in_order() {
        let input = br#"{"log": "b", "text": "1"}
            {"log": "a", "data": "MjM="}

            {"log": "b", "value": {"n": 1.0}, "headers": [{"key": "k", "value": "v"}]}"#;
        let logs = read(&mut &input[..]).unwrap();
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
    fn line_without_exactly_one_payload_is_named() {
        for bad in [
            r#"{"log": "a"}"#,
            r#"{"log": "a", "text": "1", "data": ""}"#,
            "7",
        ] {
            let input = format!("{}\n{bad}", r#"{"log": "a", "text": ""}"#);
            let error = read(&mut input.as_bytes()).unwrap_err();
            assert!(format!("{error:#}").starts_with("line 2: "), "{error:#}");
        }
    }
}
