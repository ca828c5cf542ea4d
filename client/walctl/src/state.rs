//! `walctl state`: the files in which durable producers and followers keep their state.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use serde_json::{Value, json};
use wald_client::proto::record::Payload;
use wald_client::proto::{FollowerState, LogBatch, ProducerState, Record, StateKind};
use wald_client::{Client, FileState, LogProducer, State as _};
use wald_text::shown::escaped_bytes;
use wald_text::units::shown_size;

use crate::args::SettleArgs;
use crate::exit::{ExitKind, Usage};
use crate::output::{Out, Output, confirmed, note, say};
use crate::producers;
use crate::table::Table;

/// Most bytes of a payload that are shown.
const PREVIEW_BYTES: usize = 40;

/// A state of either kind.
enum AnyState {
    Producer(ProducerState),
    Follower(FollowerState),
}

/// Prints a state. It needs no server, and its program may run.
pub(crate) fn show(path: &Path, output: Output) -> Result<ExitKind> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let state = decode(&bytes).with_context(|| path.display().to_string())?;
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => out.json(&document(&state))?,
        Output::Text | Output::Raw | Output::Delimited => out.line(&text(&state))?,
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

fn decode(bytes: &[u8]) -> Result<AnyState> {
    let wrong = || anyhow!("it is not the state of a producer or follower, or it is cut off");
    // Both kinds have their kind in the same field.
    if let Ok(state) = ProducerState::decode(bytes)
        && state.kind() == StateKind::Producer
    {
        let given = state.earlier_batches.checked_add(state.sequence);
        let given = given.and_then(|given| given.checked_add(state.batches.len() as u64));
        return given.map(|_| AnyState::Producer(state)).ok_or_else(wrong);
    }
    match FollowerState::decode(bytes) {
        Ok(state) if state.kind() == StateKind::Follower => Ok(AnyState::Follower(state)),
        _ => Err(wrong()),
    }
}

/// Number of batches that the program gave in all its runs.
fn next_batch(state: &ProducerState) -> u64 {
    state.earlier_batches + state.sequence + state.batches.len() as u64
}

fn payload(record: &Record) -> &[u8] {
    match &record.payload {
        Some(Payload::Data(data)) => data,
        Some(Payload::Text(text)) => text.as_bytes(),
        None => &[],
    }
}

fn bytes_of(batch: &LogBatch) -> u64 {
    let records = batch.records.iter();
    records.map(|record| payload(record).len() as u64).sum()
}

/// The beginning of some bytes, for people.
fn preview(bytes: &[u8]) -> String {
    match bytes.get(..PREVIEW_BYTES) {
        Some(start) if bytes.len() > PREVIEW_BYTES => format!("{}…", escaped_bytes(start)),
        _ => escaped_bytes(bytes).to_string(),
    }
}

/// The batches with their numbers, as the program counts them.
fn numbered(state: &ProducerState) -> impl Iterator<Item = (u64, &LogBatch)> {
    let first = state.earlier_batches + state.sequence;
    (first..).zip(&state.batches)
}

fn text(state: &AnyState) -> String {
    let mut table = Table::new();
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    match state {
        AnyState::Follower(state) => {
            row("kind", "follower".to_owned());
            row("cursor", format!("{} bytes", state.cursor.len()));
            let (bytes, start) = (state.effects.len(), preview(&state.effects));
            row("effects", format!("{bytes} bytes: {start}"));
            table.text()
        }
        AnyState::Producer(state) => {
            row("kind", "producer".to_owned());
            row("log", format!("{} (log id {})", state.log, state.log_id));
            row("producer", state.id.clone());
            let (epoch, sequence) = (state.epoch, state.sequence);
            row("epoch", epoch.to_string());
            row("sequence", format!("{sequence} in this epoch"));
            row("next batch", next_batch(state).to_string());
            let records = state.batches.iter().map(|batch| batch.records.len());
            let bytes = state.batches.iter().map(bytes_of).sum();
            let (batches, records) = (state.batches.len(), records.sum::<usize>());
            row(
                "in doubt",
                format!(
                    "{batches} batches, {records} records, {}",
                    shown_size(bytes)
                ),
            );
            let shown = table.text();
            if state.batches.is_empty() {
                return shown;
            }
            let mut batches = Table::with_header(["BATCH", "RECORDS", "BYTES", "FIRST RECORD"]);
            for (number, batch) in numbered(state) {
                batches.row([
                    number.to_string(),
                    batch.records.len().to_string(),
                    bytes_of(batch).to_string(),
                    batch
                        .records
                        .first()
                        .map_or_else(String::new, |first| preview(payload(first))),
                ]);
            }
            batches.right([0, 1, 2]);
            format!("{shown}\n\n{}", batches.text())
        }
    }
}

fn document(state: &AnyState) -> Value {
    match state {
        AnyState::Follower(state) => json!({
            "kind": "follower",
            "cursor": STANDARD.encode(&state.cursor),
            "effects": STANDARD.encode(&state.effects),
        }),
        AnyState::Producer(state) => {
            let batches = numbered(state).map(|(number, batch)| {
                let records = batch.records.iter().map(payload);
                let records: Vec<_> = records.map(|bytes| STANDARD.encode(bytes)).collect();
                json!({ "batch": number, "records": records })
            });
            json!({
                "kind": "producer",
                "log": state.log,
                "log_id": state.log_id,
                "producer": state.id,
                "epoch": state.epoch,
                "sequence": state.sequence,
                "next_batch": next_batch(state),
                "in_doubt": batches.collect::<Vec<_>>(),
            })
        }
    }
}

/// Number of batches that settle: those in the log, and those that are dropped.
#[derive(Debug, PartialEq, Eq)]
struct StateDecision {
    in_log: u64,
    dropped: u64,
    /// The epoch that begins, if the server has forgotten the producer.
    new_epoch: Option<u64>,
}

impl StateDecision {
    fn apply(&self, state: &mut ProducerState) {
        let gone = usize::try_from(self.in_log + self.dropped).unwrap_or(usize::MAX);
        state.batches.drain(..gone.min(state.batches.len()));
        state.sequence += self.in_log;
        state.earlier_batches += self.dropped;
        if let Some(epoch) = self.new_epoch {
            state.earlier_batches += std::mem::take(&mut state.sequence);
            state.epoch = epoch;
        }
    }
}

/// Decides the fate of the batches in doubt. `known` is the server's entry of the producer, `first_epoch` the lowest epoch
/// that the log takes of a producer that it does not know.
fn decide(
    state: &ProducerState,
    known: Option<&LogProducer>,
    first_epoch: u64,
    args: &SettleArgs,
) -> Result<StateDecision> {
    let batches = state.batches.len() as u64;
    if known.is_some() && args.in_log.is_some() {
        return Err(Usage(
            "--in-log is for producers that the server has forgotten; it knows this one".into(),
        )
        .into());
    }
    let (in_log, new_epoch) = match known {
        Some(known) if known.epoch > state.epoch => bail!(
            "another incarnation of producer {} has epoch {} now, this state has {}: it is an old copy of a state, or \
             another program took over; begin with a new state",
            state.id,
            known.epoch,
            state.epoch
        ),
        Some(known) if known.epoch == state.epoch => {
            let next = known.next_sequence;
            match next.checked_sub(state.sequence) {
                Some(in_log) if in_log <= batches => (in_log, None),
                Some(_) => bail!(
                    "the log has batches of producer {} up to sequence {next}, the state up to {}: it is an old copy of a \
                     state; begin with a new one",
                    state.id,
                    state.sequence + batches
                ),
                None => bail!(
                    "the log has batches of producer {} up to sequence {next}, and {} were acked: a crash of the server \
                     has lost acked batches; read the log, and begin with a new state",
                    state.id,
                    state.sequence
                ),
            }
        }
        // The epoch of the state has not begun: none of its batches is there.
        Some(_) => (0, None),
        None => {
            let epoch = first_epoch.max(state.epoch.saturating_add(1));
            match args.in_log {
                Some(in_log) => (in_log, Some(epoch)),
                None => bail!(
                    "the server does not know producer {}, or has forgotten it, and nobody else knows whether its {batches} batches are in the log; \
                     compare `walctl state show` with the end of the log (`walctl tail {}`), and say with --in-log N how many \
                     of them are there, from the first one on (0 = none)",
                    state.id,
                    state.log
                ),
            }
        }
    };
    if in_log.saturating_add(args.drop) > batches {
        return Err(Usage(format!(
            "the state has {batches} batches in doubt; {in_log} in the log and {} to drop are more",
            args.drop
        ))
        .into());
    }
    Ok(StateDecision {
        in_log,
        dropped: args.drop,
        new_epoch,
    })
}

pub(crate) async fn settle(client: &Client, args: SettleArgs) -> Result<ExitKind> {
    // The file itself, not a link to it: its lock and its new version are beside it. A lock also makes no file beside a
    // state that is not there.
    let path = fs::canonicalize(&args.file).with_context(|| args.file.display().to_string())?;
    let path = path.as_path();
    let mut file = FileState::new(path);
    let bytes = file.load()?.unwrap_or_default();
    let AnyState::Producer(mut state) =
        decode(&bytes).with_context(|| path.display().to_string())?
    else {
        bail!(
            "{}: it is the state of a follower, in which nothing is in doubt",
            path.display()
        );
    };
    if state.batches.is_empty() {
        note("nothing is in doubt: the next start of the program continues");
        return Ok(ExitKind::Ok);
    }
    let log = client.get_log(state.log.as_str()).await?;
    let producers = producers::all(client, &state.log, Some(state.log_id)).await?;
    let known = producers.iter().find(|one| one.id == state.id);
    let settled = decide(&state, known, log.first_producer_epoch, &args)?;
    let remain = state.batches.len() as u64 - settled.in_log - settled.dropped;
    let summary = format!(
        "{} batches are in the log, {} are dropped, {remain} are sent by the next start",
        settled.in_log, settled.dropped
    );
    let decided = settled.dropped > 0 || settled.new_epoch.is_some();
    if decided && !confirmed(&format!("{summary}: is this right?"), args.yes).await? {
        say("the state is as it was");
        return Ok(ExitKind::Failed);
    }
    settled.apply(&mut state);
    file.save(&state.encode_to_vec())?;
    note(&summary);
    Ok(ExitKind::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(epoch: u64, sequence: u64, batches: usize) -> ProducerState {
        ProducerState {
            log: "log".to_owned(),
            id: "p".to_owned(),
            epoch,
            sequence,
            batches: vec![LogBatch::default(); batches],
            earlier_batches: 100,
            ..ProducerState::default()
        }
    }

    fn known(epoch: u64, next_sequence: u64) -> LogProducer {
        LogProducer {
            id: "p".to_owned(),
            epoch,
            next_sequence,
            last_append_time: None,
        }
    }

    fn args(in_log: Option<u64>, drop: u64) -> SettleArgs {
        SettleArgs {
            file: "x".into(),
            in_log,
            drop,
            yes: true,
        }
    }

    #[test]
    fn server_that_knows_the_producer_decides() {
        for in_log in 0..=3 {
            let mut state = state(2, 10, 3);
            let producer = known(2, 10 + in_log);
            let settled = decide(&state, Some(&producer), 0, &args(None, 0)).unwrap();
            let next = next_batch(&state);
            settled.apply(&mut state);
            assert_eq!(next_batch(&state), next);
            assert_eq!((state.epoch, state.sequence), (2, 10 + in_log));
            assert_eq!(state.batches.len() as u64, 3 - in_log);
        }
        for next in [0, 9, 14] {
            assert!(decide(&state(2, 10, 3), Some(&known(2, next)), 0, &args(None, 0)).is_err());
        }
        // The server has not seen the epoch of the state.
        let settled = decide(&state(2, 0, 3), Some(&known(1, 7)), 0, &args(None, 0)).unwrap();
        assert_eq!((settled.in_log, settled.new_epoch), (0, None));
        let wrong = decide(&state(2, 10, 3), Some(&known(2, 10)), 0, &args(Some(1), 0));
        assert!(wrong.unwrap_err().downcast_ref::<Usage>().is_some());
        assert!(decide(&state(2, 10, 3), Some(&known(3, 0)), 0, &args(Some(0), 0)).is_err());
    }

    #[test]
    fn dropped_batch_counts_for_the_program_and_not_for_the_server() {
        let mut state = state(2, 10, 3);
        let settled = decide(&state, Some(&known(2, 11)), 0, &args(None, 1)).unwrap();
        settled.apply(&mut state);
        assert_eq!((state.sequence, state.earlier_batches), (11, 101));
        assert_eq!((state.batches.len(), next_batch(&state)), (1, 113));
        let most = decide(&state, Some(&known(2, 11)), 0, &args(None, 2));
        assert!(most.unwrap_err().downcast_ref::<Usage>().is_some());
    }

    #[test]
    fn forgotten_producer_begins_again_once_somebody_has_decided() {
        let refused = decide(&state(2, 10, 3), None, 0, &args(None, 0)).unwrap_err();
        assert!(refused.to_string().contains("--in-log"), "{refused}");
        for (first_epoch, epoch) in [(0, 3), (7, 7)] {
            let mut state = state(2, 10, 3);
            let settled = decide(&state, None, first_epoch, &args(Some(1), 1)).unwrap();
            settled.apply(&mut state);
            assert_eq!((state.epoch, state.sequence), (epoch, 0));
            assert_eq!((state.batches.len(), next_batch(&state)), (1, 113));
        }
    }
}
