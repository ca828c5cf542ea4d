//! Verifying, online and offline: the reports of the RPC and of the commands.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{Daemon, append, output, wald};
use rustix::process::Signal;
use tonic::Code;
use wald_proto::v1;

/// All that a verification says: progress at its end, and findings.
async fn verified(daemon: &Daemon, request: v1::VerifyRequest) -> (u64, Vec<v1::Finding>) {
    let mut ops = daemon.ops().await;
    let mut stream = ops.verify(request).await.unwrap().into_inner();
    let mut findings = Vec::new();
    loop {
        let answer = stream.message().await.unwrap().expect("it ends with done");
        assert!(answer.checked_bytes <= answer.total_bytes);
        findings.extend(answer.findings);
        if answer.done {
            assert!(stream.message().await.unwrap().is_none());
            return (answer.checked_bytes, findings);
        }
    }
}

/// Changes one byte of the first segment, there where `bytes` are.
fn damage(directory: &Path, bytes: &[u8]) -> PathBuf {
    let path = directory.join("journal/0000000000000001.seg");
    let mut held = std::fs::read(&path).unwrap();
    let at = held.windows(bytes.len()).position(|part| part == bytes);
    held[at.unwrap()] ^= 1;
    std::fs::write(&path, held).unwrap();
    path
}

fn offline(directory: &Path, arguments: &[&str]) -> Output {
    output(wald().args(arguments).arg(directory))
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn damage_under_a_running_daemon_is_named_and_quarantined_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    for payload in ["first", "an unmistakable payload", "third"] {
        wal.append(append("a", payload)).await.unwrap();
    }
    let (checked, findings) = verified(&daemon, v1::VerifyRequest::default()).await;
    assert!(checked > 8192 && findings.is_empty(), "{findings:#?}");
    damage(directory.path(), b"an unmistakable payload");
    let request = v1::VerifyRequest {
        segment_id: Some(1),
        max_bytes_per_second: 0,
    };
    let (_, findings) = verified(&daemon, request).await;
    assert_eq!(findings.len(), 1, "{findings:#?}");
    let finding = &findings[0];
    assert_eq!(finding.kind(), v1::FindingKind::Checksum);
    assert_eq!(finding.severity(), v1::FindingSeverity::Loss);
    assert_eq!((finding.log.as_str(), finding.segment_id), ("a", Some(1)));
    assert_eq!((finding.from_lsn, finding.to_lsn), (Some(1), Some(2)));
    assert_eq!(finding.file, "journal/0000000000000001.seg");
    assert!(!finding.advice.is_empty() && finding.from_position < finding.to_position);
    let read = v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(1)),
        ..v1::ReadRequest::default()
    };
    assert_eq!(wal.read(read).await.unwrap_err().code(), Code::DataLoss);
    let rejected = r#"wald_rejected_total{operation="read",reason="QUARANTINED"}"#;
    assert_eq!(daemon.metric(rejected), 1.0);
    assert_eq!(daemon.metric("wald_quarantined_records"), 1.0);
    assert_eq!(
        daemon.metric("wald_checksum_failures_total{where=\"verify\"}"),
        1.0
    );
    let info = daemon
        .ops()
        .await
        .get_server_info(v1::GetServerInfoRequest {})
        .await
        .unwrap();
    let summary = info.into_inner().damage.unwrap();
    assert_eq!((summary.quarantined_records, summary.log_count), (1, 1));
    let listed = daemon
        .ops()
        .await
        .list_segments(v1::ListSegmentsRequest::default())
        .await
        .unwrap();
    let first = &listed.into_inner().segments[0];
    assert_eq!(first.state(), v1::SegmentState::Damaged);
    wal.append(append("a", "goes on")).await.unwrap();
}

#[tokio::test]
async fn what_is_not_there_is_not_verified() {
    let daemon = Daemon::start(&[]);
    let request = v1::VerifyRequest {
        segment_id: Some(77),
        max_bytes_per_second: 0,
    };
    let refused = daemon.ops().await.verify(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    let details = tonic_types::StatusExt::get_details_error_info(&refused).unwrap();
    assert_eq!(details.reason, "SEGMENT_NOT_FOUND");
}

#[tokio::test]
async fn commands_look_at_a_directory_that_nobody_serves_and_say_how_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    for payload in ["first", "an unmistakable\u{1b} payload", "third"] {
        wal.append(append("a", payload)).await.unwrap();
    }
    for command in ["verify", "dump"] {
        let refused = offline(directory.path(), &[command]);
        assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));

    let whole = offline(directory.path(), &["verify", "--output", "json"]);
    assert_eq!(whole.status.code(), Some(0), "{whole:?}");
    assert_eq!(json(&whole)["records"], 3);
    let dumped = offline(directory.path(), &["dump", "--output", "json"]);
    assert_eq!(dumped.status.code(), Some(0));
    let pieces = json(&dumped);
    let texts: Vec<&str> = pieces
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|piece| piece["frame"]["records"].as_array())
        .flatten()
        .map(|record| record["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["first", "an unmistakable\u{1b} payload", "third"]);
    let only = offline(
        directory.path(),
        &["dump", "--log", "a", "--from-lsn", "2", "--output", "jsonl"],
    );
    let lines = String::from_utf8(only.stdout).unwrap();
    assert_eq!(lines.matches("\"frame\"").count(), 1, "{lines}");
    for what in [
        &["dump", "--log", "nosuch"][..],
        &["dump", "--log", "nosuch", "--index"],
    ] {
        let none = offline(directory.path(), what);
        assert_eq!(none.status.code(), Some(1), "{none:?}");
        let said = String::from_utf8(none.stderr).unwrap();
        assert!(said.contains("nothing of log \"nosuch\""), "{said}");
    }
    let text = offline(directory.path(), &["dump"]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("unmistakable\\u{1b} payload") && !text.contains('\u{1b}'));
    assert!(text.contains("clean end"), "{text}");
    for what in ["--index", "--checkpoint"] {
        let told = offline(directory.path(), &["dump", what]).stdout;
        let told = String::from_utf8(told).unwrap();
        assert!(told.contains("log \"a\""), "{what}: {told}");
    }

    damage(directory.path(), b"an unmistakable");
    let broken = offline(directory.path(), &["verify", "--output", "json"]);
    assert_eq!(broken.status.code(), Some(5));
    let finding = &json(&broken)["findings"][0];
    assert_eq!(
        (&finding["log"], &finding["from_lsn"]),
        (&"a".into(), &1.into())
    );
    let text = String::from_utf8(offline(directory.path(), &["verify"]).stdout).unwrap();
    assert!(
        text.starts_with("LOSS    log \"a\", lsn 1, journal/"),
        "{text}"
    );
    let text = String::from_utf8(offline(directory.path(), &["dump"]).stdout).unwrap();
    assert!(text.contains("DAMAGED"), "{text}");

    let nothing = tempfile::tempdir().unwrap();
    assert_eq!(offline(nothing.path(), &["verify"]).status.code(), Some(1));
    assert_eq!(
        offline(nothing.path(), &["verify", "--no"]).status.code(),
        Some(2)
    );
}

#[tokio::test]
async fn options_that_do_not_hold_for_the_place_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    daemon.signal(Signal::TERM);
    assert!(daemon.ended().await.success());
    let store = offline(directory.path(), &["verify", "--backup", "20261201"]);
    assert_eq!(store.status.code(), Some(2), "{store:?}");
    let backups = tempfile::tempdir().unwrap();
    std::fs::create_dir(backups.path().join("backups")).unwrap();
    let line = ["verify", "--max-bytes-per-second", "1MiB"];
    let backups = offline(backups.path(), &line);
    assert_eq!(backups.status.code(), Some(2), "{backups:?}");
    assert_eq!(offline(directory.path(), &line).status.code(), Some(0));
}
