//! Appends with many followers of their log: the share of the rate without followers that
//! remains.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use bytes::Buf as _;
use prost::encoding::{
    DecodeContext, WireType, check_wire_type, decode_key, decode_varint, skip_field,
};
use tonic::Code;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use wald_client::proto;
use wald_proto::codec::{MessageCodec, Sent};

use crate::caller::Load;
use crate::connection::Connection;
use crate::figure::{Figure, median, ratio};
use crate::gate::Gate;
use crate::record::{Percentiles, SharedRecorder};
use crate::report::{Report, ReportEntry, TargetCheck};
use crate::spec::{LoadKind, Spec};
use crate::{Bench, Case, Rounds};

/// Default appends per second.
const RATE: f64 = 10_000.0;

/// From a refused follower to its next attempt.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// Connections that the followers share.
const CONNECTIONS: usize = 10;

/// Minimum share of the appends' rate that must remain.
const LEAST_RATE: f64 = 0.8;

const SCAN: &str = "/wald.v1.WalService/Scan";

/// Measures the appends alone and with the followers, in turn.
pub(crate) fn run(bench: &Bench, report: &mut Report) -> Result<()> {
    let args = &bench.args;
    let followers_of_log = args.followers as usize;
    let appends = Spec {
        in_flight: args.in_flight.first().copied().unwrap_or(64),
        rate: Some(args.rate.first().copied().unwrap_or(RATE)),
        logs: 1,
        ..bench.spec()
    };
    let followers = Spec {
        work: LoadKind::Followers,
        in_flight: followers_of_log,
        connections: CONNECTIONS,
        rate: None,
        ..appends.clone()
    };
    let beside = format!("appends beside {} followers", args.followers);
    let cases = [
        Case::one("appends alone", appends.clone()),
        Case {
            name: beside,
            specs: vec![appends, followers],
        },
    ];
    let rounds = bench.rounds(&cases, &bench.plan)?;
    let alone = rounds[0].clone();
    report.entries = cases
        .iter()
        .zip(rounds)
        .map(|(case, wald)| ReportEntry {
            name: case.name.clone(),
            checks: match case.specs.len() {
                1 => Vec::new(),
                _ => checks(&alone, &wald, followers_of_log),
            },
            wald,
            echo: None,
            ratio: None,
        })
        .collect();
    Ok(())
}

fn checks(alone: &Rounds, beside: &Rounds, followers: usize) -> Vec<TargetCheck> {
    let of_alone = |figure: &dyn Fn(&Figure) -> f64| ratio(beside, alone, figure);
    let time = |figure: &Figure, which: fn(&Percentiles) -> f64| {
        figure.latency_us.as_ref().map_or(0.0, which)
    };
    let age = |which: fn(&Percentiles) -> f64| {
        let of_round = beside.rounds.iter().filter_map(|round| {
            let times = round.figures.get(1)?.latency_us.as_ref()?;
            Some(which(times) / 1e3)
        });
        median(of_round.collect())
    };
    let given = beside.rounds.iter().filter_map(|round| {
        let [appends, followers_got] = round.figures.as_slice() else {
            return None;
        };
        Some(followers_got.rate() / (appends.rate() * followers as f64))
    });
    vec![
        TargetCheck::least("rate, of alone", LEAST_RATE, of_alone(&Figure::rate)),
        TargetCheck::told(
            "p50, of alone",
            of_alone(&|figure| time(figure, |times| times.p50)),
        ),
        TargetCheck::told(
            "p99, of alone",
            of_alone(&|figure| time(figure, |times| times.p99)),
        ),
        TargetCheck::told(
            "given to followers, of all there was",
            median(given.collect()),
        ),
        TargetCheck::told(
            "p50 of the age of what they are given, ms",
            age(|times| times.p50),
        ),
        TargetCheck::told(
            "p99 of the age of what they are given, ms",
            age(|times| times.p99),
        ),
    ]
}

/// Follows the log from now on until the time is over. Records are counted, not decoded:
/// the client shares the processor with the server.
pub(crate) async fn follow(
    load: Arc<Load>,
    connection: Connection,
    gate: Arc<Gate>,
    shared: SharedRecorder,
) -> Result<()> {
    let end = gate.end().context("followers end at a time")?;
    let request = proto::ScanRequest {
        selector: Some(proto::scan_request::Selector::Log(load.log(0))),
        start: Some(proto::scan_request::Start::TailOffset(0)),
        visibility: load.spec.durability.visibility(),
        follow: true,
        ..proto::ScanRequest::default()
    };
    let mut next = None;
    let listening = async {
        let mut grpc: Grpc<Connection> = connection.grpc();
        let mut messages = loop {
            grpc.ready().await?;
            let codec = MessageCodec::<proto::ScanRequest, Sent<proto::ScanResponse>>::default();
            let path = PathAndQuery::from_static(SCAN);
            let request = tonic::Request::new(request.clone());
            match grpc.server_streaming(request, path, codec).await {
                Ok(answer) => break answer.into_inner(),
                // The server bounds the requests that arrive at one moment.
                Err(status) if status.code() == Code::ResourceExhausted => {
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
                Err(status) => return Err(status.into()),
            }
        };
        while let Some(message) = messages.message().await? {
            let given = count(&message.bytes, &mut next)?;
            let age = given.arrival_us.map(age);
            let mut shared = shared.lock();
            shared.arrived(Instant::now(), given.records, given.bytes, age);
        }
        anyhow::bail!("a follower's stream ended")
    };
    tokio::time::timeout_at(end.into(), listening)
        .await
        .unwrap_or(Ok(()))
}

/// Time since then by the clock, which is the server's: it is on this machine.
fn age(arrival_us: i64) -> Duration {
    let arrival = Duration::from_micros(arrival_us.try_into().unwrap_or(0));
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().saturating_sub(arrival)
}

/// `ScanResponse.batches`; `RecordBatch.first_lsn`, `.records` and `.timestamp_us`.
const BATCHES: u32 = 1;
const FIRST_LSN: u32 = 2;
const RECORDS: u32 = 3;
const TIMESTAMP_US: u32 = 4;

/// The contents of a response.
#[derive(Debug, Default, PartialEq)]
struct ResponseContents {
    records: u64,
    /// Bytes of the records.
    bytes: u64,
    /// Arrival time of the first of them at the server.
    arrival_us: Option<i64>,
}

/// Counts the contents of a response. Records must continue from `next`, if that is known.
fn count(mut message: &[u8], next: &mut Option<u64>) -> Result<ResponseContents> {
    let mut given = ResponseContents::default();
    while !message.is_empty() {
        let (field, wire_type) = decode_key(&mut message)?;
        if field != BATCHES {
            skip_field(wire_type, field, &mut message, DecodeContext::default())?;
            continue;
        }
        let mut batch = delimited(wire_type, &mut message)?;
        let (mut first, mut found) = (0, 0);
        while !batch.is_empty() {
            match decode_key(&mut batch)? {
                (FIRST_LSN, WireType::Varint) => first = decode_varint(&mut batch)?,
                (RECORDS, wire_type) => {
                    given.bytes += delimited(wire_type, &mut batch)?.len() as u64;
                    found += 1;
                }
                (TIMESTAMP_US, WireType::SixtyFourBit) => {
                    let arrival_us = batch.try_get_i64_le()?;
                    given.arrival_us.get_or_insert(arrival_us);
                }
                (field, wire_type) => {
                    skip_field(wire_type, field, &mut batch, DecodeContext::default())?;
                }
            }
        }
        let expected = next.unwrap_or(first);
        ensure!(
            first == expected,
            "a follower got lsn {first}, not {expected}"
        );
        *next = Some(first + found);
        given.records += found;
    }
    Ok(given)
}

/// The bytes of a field.
fn delimited<'a>(wire_type: WireType, rest: &mut &'a [u8]) -> Result<&'a [u8]> {
    check_wire_type(WireType::LengthDelimited, wire_type)?;
    let length = usize::try_from(decode_varint(rest)?)?;
    let (field, later) = rest
        .split_at_checked(length)
        .context("a field that is cut")?;
    *rest = later;
    Ok(field)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::caller::record;

    fn response(first: u64, records: u64) -> Vec<u8> {
        let batch = proto::RecordBatch {
            log: "a".to_owned(),
            first_lsn: Some(first),
            records: (0..records).map(|_| record(vec![7; 300].into())).collect(),
            timestamp_us: 1,
            log_id: 2,
        };
        let response = proto::ScanResponse {
            batches: vec![batch],
            caught_up: true,
            recovery_epoch: 3,
            ..proto::ScanResponse::default()
        };
        response.encode_to_vec()
    }

    #[test]
    fn records_are_counted_and_none_may_be_missing() {
        let mut next = None;
        let given = count(&response(5, 2), &mut next).unwrap();
        assert_eq!((given.records, given.arrival_us), (2, Some(1)));
        assert!(given.bytes > 600);
        assert_eq!(count(&response(7, 1), &mut next).unwrap().records, 1);
        let heartbeat = proto::ScanResponse::default().encode_to_vec();
        assert_eq!(
            count(&heartbeat, &mut next).unwrap(),
            ResponseContents::default()
        );
        assert_eq!(next, Some(8));
        let missing = count(&response(9, 1), &mut next).unwrap_err();
        assert_eq!(missing.to_string(), "a follower got lsn 9, not 8");
        let whole = response(8, 1);
        count(&whole[..whole.len() - 20], &mut next).unwrap_err();
    }
}
