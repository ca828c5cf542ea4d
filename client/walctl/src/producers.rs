//! `walctl producer`: the producers of a log.

use anyhow::Result;
use jiff::Timestamp;
use serde_json::json;
use wald_client::{Client, LogProducer};

use crate::args::ProducerCommand;
use crate::exit::ExitKind;
use crate::output::{Out, Output, note};
use crate::table::Table;

pub(crate) async fn producer(
    client: &Client,
    command: ProducerCommand,
    output: Output,
) -> Result<ExitKind> {
    match command {
        ProducerCommand::List { log, log_id } => list(client, &log, log_id, output).await,
        ProducerCommand::Forget { log, id, log_id } => {
            client
                .forget_producer(log.as_str(), id.as_str(), log_id)
                .await?;
            note(&format!(
                "forgot producer {id} of {log}; it may begin again with a higher epoch"
            ));
            Ok(ExitKind::Ok)
        }
    }
}

/// The producers of a log, by id.
pub(crate) async fn all(
    client: &Client,
    log: &str,
    log_id: Option<u64>,
) -> Result<Vec<LogProducer>> {
    let mut all = Vec::new();
    let mut token = None;
    loop {
        let page = client.list_producers(log, 1000, token, log_id).await?;
        all.extend(page.producers);
        token = page.next_page_token;
        if token.is_none() {
            return Ok(all);
        }
    }
}

async fn list(client: &Client, log: &str, log_id: Option<u64>, output: Output) -> Result<ExitKind> {
    let mut out = Out::new(output);
    let all = all(client, log, log_id).await?;
    match output {
        Output::Text => out.line(&table(&all))?,
        Output::Json => out.json(&all.iter().map(|one| shown(log, one)).collect::<Vec<_>>())?,
        Output::Jsonl => {
            for producer in &all {
                out.json(&shown(log, producer))?;
            }
        }
        Output::Raw | Output::Delimited => {
            for producer in &all {
                out.line(&producer.id)?;
            }
        }
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

fn shown(log: &str, producer: &LogProducer) -> serde_json::Value {
    json!({
        "log": log,
        "id": producer.id,
        "epoch": producer.epoch,
        "next_sequence": producer.next_sequence,
        "last_append_time": time(producer),
    })
}

fn table(producers: &[LogProducer]) -> String {
    let mut table = Table::with_header(["PRODUCER", "EPOCH", "NEXT", "LAST APPEND"]);
    for producer in producers {
        table.row([
            producer.id.clone(),
            producer.epoch.to_string(),
            producer.next_sequence.to_string(),
            time(producer).unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table.right([1, 2]);
    table.text()
}

/// Arrival time of the producer's newest batch.
fn time(producer: &LogProducer) -> Option<String> {
    let time = Timestamp::try_from(producer.last_append_time?).ok()?;
    Some(format!("{time:.0}"))
}
