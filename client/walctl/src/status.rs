//! `walctl status`: shows the server's identity, its readiness, and the real promises of its
//! flushes.

use std::time::Duration;

use anyhow::Result;
use indicatif::HumanBytes;
use serde_json::{Value, json};
use tonic::Code;
use wald_client::proto::{
    ClientCertificates, DamageSummary, DurabilityTruth, EngineKind, GetCallerResponse,
    GetServerInfoResponse, Protection, ReplicaState, ReplicaStatus, Segment, SegmentKind,
    SegmentState, ServerLimits, SyncMode,
};
use wald_client::{Client, Health};

use crate::args::StatusArgs;
use crate::exit::ExitKind;
use crate::logs::{retention, retention_json, time, word};
use crate::output::{Out, Output};
use crate::table::Table;

/// Everything asked of the server.
struct Status {
    /// Server that answered.
    endpoint: String,
    health: Health,
    info: GetServerInfoResponse,
    /// Name of the principal, or nothing.
    caller: String,
    /// `None`: the caller may not see them.
    segments: Option<Vec<Segment>>,
}

/// The status as JSON.
pub(crate) async fn whole(client: &Client) -> Result<Value> {
    Ok(ask(client).await?.json())
}

async fn ask(client: &Client) -> Result<Status> {
    let caller = caller(client).await?;
    Ok(Status {
        health: client.health("").await?,
        info: client.server_info().await?,
        segments: match sees_segments(&caller) {
            true => segments(client).await?,
            false => None,
        },
        caller: caller.principal,
        // At last: the first call may have gone on to another server.
        endpoint: client.endpoint(),
    })
}

pub(crate) async fn run(client: &Client, args: StatusArgs, output: Output) -> Result<ExitKind> {
    let status = ask(client).await?;
    let mut out = Out::new(output);
    match output {
        Output::Text | Output::Raw | Output::Delimited => {
            out.line(&status.table())?;
            if args.segments {
                out.line("")?;
                out.line(&match &status.segments {
                    Some(segments) => segment_table(segments),
                    None => NEEDS_OPS.to_owned(),
                })?;
            }
        }
        Output::Json | Output::Jsonl => out.json(&status.json())?,
    }
    out.flush()?;
    Ok(match status.health {
        Health::Serving => ExitKind::Ok,
        Health::NotServing | Health::Unknown => ExitKind::Unavailable,
    })
}

/// The caller as the server sees it. Without a name the server knows no principals.
async fn caller(client: &Client) -> Result<GetCallerResponse> {
    match client.caller().await {
        // An earlier version.
        Err(error) if error.code() == Code::Unimplemented => Ok(GetCallerResponse::default()),
        caller => Ok(caller?),
    }
}

/// Whether the caller may list segments. A refused call would count as a denial at the server.
fn sees_segments(caller: &GetCallerResponse) -> bool {
    let mut rights = caller.grants.iter().flat_map(|grant| &grant.rights);
    caller.principal.is_empty() || rights.any(|right| right == "ops")
}

/// All segments. `None`: the caller may not see them.
async fn segments(client: &Client) -> Result<Option<Vec<Segment>>> {
    let mut segments = Vec::new();
    let mut token = None;
    loop {
        let page = match client.list_segments(1_000, token).await {
            Err(error) if error.code() == Code::PermissionDenied => return Ok(None),
            page => page?,
        };
        segments.extend(page.segments);
        token = page.next_page_token;
        if token.is_none() {
            return Ok(Some(segments));
        }
    }
}

/// In place of facts that the server shows to operators alone.
const NEEDS_OPS: &str = "shown to principals with the right ops";

/// The protection of a server in words.
fn protected(protection: &Protection) -> String {
    let mut parts = Vec::new();
    parts.push(match protection.has_tls {
        true => "TLS",
        false => "plaintext",
    });
    match protection.client_certificates() {
        ClientCertificates::Required => parts.push("client certificates required"),
        ClientCertificates::Optional => parts.push("client certificates optional"),
        ClientCertificates::Off | ClientCertificates::Unspecified => {}
    }
    let knows_clients = protection.client_certificates() == ClientCertificates::Required;
    parts.push(match (protection.has_principals, knows_clients) {
        (true, _) => "each principal has its rights alone",
        (false, true) => "every client with a certificate may do everything",
        (false, false) => "everyone who reaches the port may do everything",
    });
    parts.join(", ")
}

/// The place of a replica, its owner and its state.
fn owned(replica: &ReplicaStatus) -> String {
    let mut text = format!(
        "{}, owned by node {} in term {}",
        replica.bucket_url, replica.node_id, replica.term
    );
    match replica.state() {
        ReplicaState::Serving | ReplicaState::Unspecified => {}
        ReplicaState::BucketDown => {
            text.push_str("; BUCKET DOWN: REPLICATED is refused until the bucket answers");
        }
        ReplicaState::Fenced => {
            text.push_str("; FENCED: another node owns the store, and this one ends");
        }
    }
    let puts = (
        replica.put_p50.as_ref().and_then(span),
        replica.put_p99.as_ref().and_then(span),
    );
    if let (Some(p50), Some(p99)) = puts {
        text.push_str(&format!("; writes take p50 {p50:.1?}, p99 {p99:.1?}"));
    }
    text
}

/// The part of the journal that a replica lacks.
fn lag(replica: &ReplicaStatus) -> String {
    let position = replica.replicated_position;
    if replica.lag_bytes == 0 {
        return format!("none: the bucket has everything below position {position}");
    }
    let age = replica.lag_age.as_ref().and_then(span).unwrap_or_default();
    format!(
        "{} of at most {}, {} records, for {age:.1?}; the bucket has everything below position {position}",
        HumanBytes(replica.lag_bytes),
        HumanBytes(replica.max_lag_bytes),
        replica.lag_records,
    )
}

impl Status {
    fn table(&self) -> String {
        let info = &self.info;
        let mut table = Table::new();
        let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
        row(
            "server",
            format!("{}, wald {}", self.endpoint, info.version),
        );
        row("health", health(self.health).to_owned());
        if let Some(time) = time(info.start_time.as_ref()) {
            row("serving since", time);
        }
        let engine = word(info.engine().as_str_name(), "ENGINE_KIND_");
        row(
            "store",
            format!("{} ({})", info.store_id, engine.unwrap_or_default()),
        );
        row("recovery epoch", info.recovery_epoch.to_string());
        if let Some(protection) = &info.protection {
            row("protection", protected(protection));
        }
        if !self.caller.is_empty() {
            row("you are", self.caller.clone());
        }
        row("sync mode", self.sync_mode());
        if info.default_retention.is_some() {
            let kept = retention(info.default_retention.as_ref());
            row("retention", format!("{kept}, in logs without their own"));
        }
        if let Some(truth) = &info.durability {
            row("flushes", flushes(truth));
            for caveat in &truth.caveats {
                row("caveat", caveat.clone());
            }
        }
        if let Some(limits) = &info.limits {
            row("limits", limits_in_words(limits));
        }
        let knows_replicas = info.sync_modes().any(|mode| mode == SyncMode::Replicated);
        match &info.replica {
            Some(replica) => {
                row("replica", owned(replica));
                row("replica lag", lag(replica));
            }
            None if knows_replicas => row("replica", NEEDS_OPS.to_owned()),
            None => {}
        }
        row(
            "journal",
            self.journal().unwrap_or_else(|| NEEDS_OPS.to_owned()),
        );
        if let Some(damage) = &info.damage {
            if damage.quarantined_records > 0 || damage.unattributed_count > 0 {
                row("damage", damaged(damage));
            }
            for why in &damage.held_back {
                row(
                    "held back",
                    format!("no checkpoint, no sorting, no space comes back: {why}"),
                );
            }
        }
        if let Some(why) = &info.archive_failure {
            row(
                "archive",
                format!("FAILING, so that nothing is dropped: {why}"),
            );
        }
        table.text()
    }

    fn sync_mode(&self) -> String {
        let mode = self.info.default_sync_mode();
        let name = mode_name(mode);
        let interval = self.info.sync_interval.as_ref().and_then(span);
        match (mode, interval) {
            (SyncMode::Async | SyncMode::Manual, _) | (_, None) => name,
            (_, Some(interval)) => format!("{name}, weaker acks are flushed within {interval:?}"),
        }
    }

    fn journal(&self) -> Option<String> {
        let segments = self.segments.as_ref()?;
        let bytes: u64 = segments.iter().map(|segment| segment.file_bytes).sum();
        let first = segments.first().and_then(|s| s.base_position);
        let last = segments.last().and_then(|s| s.end_position);
        let damaged = segments
            .iter()
            .filter(|segment| segment.state() == SegmentState::Damaged)
            .count();
        let count = segments.len();
        let plural = if count == 1 { "" } else { "s" };
        let mut text = format!("{count} segment{plural}, {}", HumanBytes(bytes));
        if let (Some(first), Some(last)) = (first, last) {
            text.push_str(&format!(", positions {first} to {last}"));
        }
        if damaged > 0 {
            text.push_str(&format!(", {damaged} DAMAGED"));
        }
        Some(text)
    }

    fn json(&self) -> Value {
        let info = &self.info;
        let seconds = |duration: Option<&prost_types::Duration>| {
            duration.and_then(span).map(|span| span.as_secs_f64())
        };
        json!({
            "endpoint": self.endpoint,
            "health": health(self.health),
            "version": info.version,
            "store_id": info.store_id,
            "recovery_epoch": info.recovery_epoch,
            "engine": word(EngineKind::as_str_name(&info.engine()), "ENGINE_KIND_"),
            "start_time": time(info.start_time.as_ref()),
            "default_sync_mode": mode_name(info.default_sync_mode()),
            "sync_modes": info.sync_modes().map(mode_name).collect::<Vec<_>>(),
            "sync_interval_seconds": seconds(info.sync_interval.as_ref()),
            "auto_create": info.auto_create,
            "default_retention": info.default_retention.as_ref().map(retention_json),
            "limits": info.limits.as_ref().map(|limits| json!({
                "max_record_bytes": limits.max_record_bytes,
                "max_request_records": limits.max_request_records,
                "max_request_bytes": limits.max_request_bytes,
                "max_log_name_bytes": limits.max_log_name_bytes,
                "max_headers": limits.max_headers,
                "max_headers_bytes": limits.max_headers_bytes,
                "max_response_bytes": limits.max_response_bytes,
                "max_timestamp_ahead_seconds": seconds(limits.max_timestamp_ahead.as_ref()),
                "producer_window": limits.producer_window,
            })),
            "durability": info.durability.as_ref().map(|truth| json!({
                "file_system": truth.file_system,
                "sync_primitive": truth.sync_primitive,
                "flush_p50_seconds": seconds(truth.flush_p50.as_ref()),
                "flush_p99_seconds": seconds(truth.flush_p99.as_ref()),
                "is_volatile": truth.is_volatile,
                "caveats": truth.caveats,
            })),
            "segments": self.segments.as_ref().map(|all| all.iter().map(|segment| json!({
                "segment_id": segment.segment_id,
                "kind": kind(segment),
                "state": state(segment),
                "base_position": segment.base_position,
                "end_position": segment.end_position,
                "file_bytes": segment.file_bytes,
                "live_bytes": (segment.kind() == SegmentKind::Sorted).then_some(segment.live_bytes),
                "first_segment_id": segment.first_segment_id,
                "last_segment_id": segment.last_segment_id,
                "record_count": segment.record_count,
                "log_count": segment.log_count,
                "seal_time": time(segment.seal_time.as_ref()),
            })).collect::<Vec<_>>()),
            "principal": (!self.caller.is_empty()).then_some(&self.caller),
            "protection": info.protection.map(|protection| json!({
                "tls": protection.has_tls,
                "client_certificates": word(
                    protection.client_certificates().as_str_name(),
                    "CLIENT_CERTIFICATES_",
                ),
                "principals": protection.has_principals,
                "http_tls": protection.has_http_tls,
            })),
            "replica": info.replica.as_ref().map(|replica| json!({
                "bucket_url": replica.bucket_url,
                "node_id": replica.node_id,
                "term": replica.term,
                "state": word(replica.state().as_str_name(), "REPLICA_STATE_"),
                "replicated_position": replica.replicated_position,
                "lag_bytes": replica.lag_bytes,
                "lag_records": replica.lag_records,
                "lag_seconds": seconds(replica.lag_age.as_ref()),
                "max_lag_bytes": replica.max_lag_bytes,
                "put_p50_seconds": seconds(replica.put_p50.as_ref()),
                "put_p99_seconds": seconds(replica.put_p99.as_ref()),
            })),
            "damage": info.damage.as_ref().map(|damage| json!({
                "quarantined_records": damage.quarantined_records,
                "log_count": damage.log_count,
                "unattributed_count": damage.unattributed_count,
                "held_back": damage.held_back,
            })),
            "archive_failure": info.archive_failure,
        })
    }
}

/// Describes the losses, and the remedy.
fn damaged(damage: &DamageSummary) -> String {
    let plural = |count: u64, word: &str| match count {
        1 => format!("1 {word}"),
        many => format!("{many} {word}s"),
    };
    let mut text = format!(
        "{} of {} QUARANTINED",
        plural(damage.quarantined_records, "record"),
        plural(damage.log_count, "log")
    );
    if damage.unattributed_count > 0 {
        text.push_str(&format!(
            "; {} with unknown losses: logs without later records refuse appends",
            plural(damage.unattributed_count, "place")
        ));
    }
    text.push_str(
        "; `walctl verify` names them; put their files back from a restored backup, which loses \
         nothing (`wald repair --help`), or accept the loss with `wald repair --accept-loss`",
    );
    text
}

fn health(health: Health) -> &'static str {
    match health {
        Health::Serving => "SERVING",
        Health::NotServing => "NOT_SERVING",
        Health::Unknown => "UNKNOWN",
    }
}

fn mode_name(mode: SyncMode) -> String {
    word(mode.as_str_name(), "SYNC_MODE_").unwrap_or_else(|| "unspecified".to_owned())
}

fn kind(segment: &Segment) -> Option<String> {
    word(SegmentKind::as_str_name(&segment.kind()), "SEGMENT_KIND_")
}

fn state(segment: &Segment) -> Option<String> {
    word(
        SegmentState::as_str_name(&segment.state()),
        "SEGMENT_STATE_",
    )
}

fn span(duration: &prost_types::Duration) -> Option<Duration> {
    Duration::try_from(*duration).ok()
}

/// The meaning of DURABLE on that machine.
fn flushes(truth: &DurabilityTruth) -> String {
    let mut text = format!("{} on {}", truth.sync_primitive, truth.file_system);
    let measured = (
        truth.flush_p50.as_ref().and_then(span),
        truth.flush_p99.as_ref().and_then(span),
    );
    if let (Some(p50), Some(p99)) = measured {
        text.push_str(&format!(", p50 {p50:.1?}, p99 {p99:.1?}"));
    }
    if truth.is_volatile {
        text.push_str("; VOLATILE: a power cut takes everything, flushed or not");
    }
    text
}

fn limits_in_words(limits: &ServerLimits) -> String {
    format!(
        "record {}, request {} records of {}",
        HumanBytes(limits.max_record_bytes),
        limits.max_request_records,
        HumanBytes(limits.max_request_bytes)
    )
}

fn segment_table(segments: &[Segment]) -> String {
    let mut table = Table::with_header(["SEGMENT", "KIND", "STATE", "FROM", "TO", "FILE", "LIVE"]);
    for segment in segments {
        let number = |position: Option<u64>| {
            position.map_or_else(|| "-".to_owned(), |position| position.to_string())
        };
        table.row([
            format!("{:016x}", segment.segment_id),
            kind(segment).unwrap_or_default(),
            state(segment).unwrap_or_default(),
            number(segment.base_position),
            number(segment.end_position),
            HumanBytes(segment.file_bytes).to_string(),
            match segment.kind() {
                SegmentKind::Sorted => HumanBytes(segment.live_bytes).to_string(),
                _ => "-".to_owned(),
            },
        ]);
    }
    table.right(3..7);
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica() -> ReplicaStatus {
        let millis = |millis: i32| {
            Some(prost_types::Duration {
                seconds: 0,
                nanos: millis * 1_000_000,
            })
        };
        ReplicaStatus {
            bucket_url: "s3://wald/orders".into(),
            node_id: "wald-0".into(),
            term: 7,
            state: ReplicaState::Serving.into(),
            replicated_position: 4096,
            lag_bytes: 2048,
            lag_records: 12,
            lag_age: millis(400),
            max_lag_bytes: 64 << 20,
            put_p50: millis(25),
            put_p99: millis(90),
            ..ReplicaStatus::default()
        }
    }

    fn status() -> Status {
        let mut info = GetServerInfoResponse {
            version: "1.2.3".into(),
            recovery_epoch: 4,
            sync_interval: Some(prost_types::Duration {
                seconds: 0,
                nanos: 100_000_000,
            }),
            durability: Some(DurabilityTruth {
                file_system: "tmpfs".into(),
                sync_primitive: "fdatasync".into(),
                flush_p50: Some(prost_types::Duration {
                    seconds: 0,
                    nanos: 1_500_000,
                }),
                flush_p99: Some(prost_types::Duration {
                    seconds: 0,
                    nanos: 20_000_000,
                }),
                is_volatile: true,
                caveats: vec!["a reboot empties it".into()],
            }),
            damage: Some(DamageSummary {
                quarantined_records: 12,
                log_count: 1,
                unattributed_count: 0,
                held_back: vec!["records are missing".into()],
            }),
            archive_failure: Some("archive /mnt/a: no space".into()),
            protection: Some(Protection {
                has_tls: true,
                has_principals: true,
                ..Default::default()
            }),
            replica: Some(replica()),
            ..Default::default()
        };
        info.set_default_sync_mode(SyncMode::Interval);
        let segment = |id: u64, state: SegmentState| Segment {
            segment_id: id,
            kind: SegmentKind::Journal.into(),
            state: state.into(),
            base_position: Some(id * 1024),
            end_position: Some(id * 1024 + 512),
            file_bytes: 1024,
            ..Default::default()
        };
        Status {
            endpoint: "http://there".to_owned(),
            health: Health::Serving,
            info,
            caller: "writer".to_owned(),
            segments: Some(vec![
                segment(0, SegmentState::Damaged),
                segment(1, SegmentState::Active),
            ]),
        }
    }

    #[test]
    fn caller_without_ops_is_told_what_it_does_not_see() {
        let status = Status {
            segments: None,
            ..status()
        };
        assert!(status.table().contains(NEEDS_OPS));
        assert!(status.json()["segments"].is_null());
    }

    #[test]
    fn table_says_what_is_promised_and_what_is_not() {
        let table = status().table();
        for words in [
            "http://there, wald 1.2.3",
            "TLS, each principal has its rights alone",
            "writer",
            "SERVING",
            "interval, weaker acks are flushed within 100ms",
            "fdatasync on tmpfs, p50 1.5ms, p99 20.0ms; VOLATILE",
            "a reboot empties it",
            "12 records of 1 log QUARANTINED; `walctl verify` names them",
            "2 segments, 2.00 KiB, positions 0 to 1536, 1 DAMAGED",
            "FAILING, so that nothing is dropped: archive /mnt/a: no space",
            "no checkpoint, no sorting, no space comes back: records are missing",
        ] {
            assert!(table.contains(words), "no {words:?} in\n{table}");
        }
    }

    #[test]
    fn replica_is_shown_with_its_lag_its_state_and_who_may_see_it() {
        let table = status().table();
        for words in [
            "s3://wald/orders, owned by node wald-0 in term 7; writes take p50 25.0ms, p99 90.0ms",
            "2.00 KiB of at most 64.00 MiB, 12 records, for 400.0ms; the bucket has everything below position 4096",
        ] {
            assert!(table.contains(words), "no {words:?} in\n{table}");
        }
        let json = &status().json()["replica"];
        assert_eq!(json["state"], "serving");
        assert_eq!(
            (&json["term"], &json["lag_records"]),
            (&7.into(), &12.into())
        );
        assert_eq!(json["lag_seconds"], 0.4);
        for (state, words) in [
            (
                ReplicaState::BucketDown,
                "BUCKET DOWN: REPLICATED is refused",
            ),
            (ReplicaState::Fenced, "FENCED: another node owns the store"),
        ] {
            let mut status = status();
            let shown = ReplicaStatus {
                state: state.into(),
                lag_bytes: 0,
                ..replica()
            };
            status.info.replica = Some(shown);
            let table = status.table();
            assert!(table.contains(words), "no {words:?} in\n{table}");
            assert!(table.contains("none: the bucket has everything below position 4096"));
        }
        let mut status = status();
        status.info.replica = None;
        assert!(
            !status.table().contains("replica"),
            "a server without a bucket"
        );
        assert!(status.json()["replica"].is_null());
        status.info.sync_modes = vec![SyncMode::Replicated.into()];
        let table = status.table();
        let row = table.lines().find(|line| line.contains("replica"));
        assert!(row.is_some_and(|row| row.contains(NEEDS_OPS)), "{table}");
    }

    #[test]
    fn json_has_numbers_and_words_for_programs() {
        let json = status().json();
        assert_eq!(json["default_sync_mode"], "interval");
        assert_eq!(json["sync_interval_seconds"], 0.1);
        assert_eq!(json["durability"]["flush_p50_seconds"], 0.0015);
        assert_eq!(json["segments"][0]["state"], "damaged");
        assert_eq!(json["segments"][1]["end_position"], 1536);
    }

    #[test]
    fn segments_are_named_as_their_files() {
        let table = segment_table(&status().segments.unwrap());
        let row: Vec<&str> = table.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            [
                "0000000000000001",
                "journal",
                "active",
                "1024",
                "1536",
                "1.00",
                "KiB",
                "-"
            ]
        );
        let run = Segment {
            kind: SegmentKind::Sorted.into(),
            live_bytes: 512,
            ..status().segments.unwrap().remove(1)
        };
        let table = segment_table(&[run]);
        assert!(
            table.contains("sorted") && table.contains("512 B"),
            "{table}"
        );
    }
}
