//! `wald repair`: its report on a damaged store, its changes with `--accept-loss`, and the store
//! afterwards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{Daemon, Told, append, output, records, wald};
use rustix::process::Signal;
use tonic::Code;
use wald_proto::v1;

const REPAIRS: &str = "REPAIRS";
const ACCEPT: &[&str] = &["--accept-loss"];

fn offline(command: &str, directory: &Path, arguments: &[&str]) -> Output {
    let mut wald = wald();
    wald.env("WALD_SEGMENT_BYTES", "1MiB")
        .env_remove("SUDO_USER")
        .env("USER", "grace");
    output(wald.arg(command).args(arguments).arg(directory))
}

fn repair(directory: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let ended = offline("repair", directory, arguments);
    let said = [ended.stdout, ended.stderr].concat();
    (ended.status.code(), String::from_utf8(said).unwrap())
}

fn repair_as_json(directory: &Path, arguments: &[&str]) -> (Option<i32>, serde_json::Value) {
    let arguments = [arguments, &["--output", "json"]].concat();
    let ended = offline("repair", directory, &arguments);
    let told = serde_json::from_slice(&ended.stdout);
    let told = told.unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    (ended.status.code(), told)
}

/// How severe each finding of a verification is, and its exit code.
fn verified(directory: &Path) -> (Option<i32>, Vec<String>) {
    let ended = offline("verify", directory, &["--output", "json"]);
    let told: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    let findings = told["findings"].as_array().unwrap();
    let severities = findings
        .iter()
        .map(|finding| finding["severity"].as_str().unwrap().to_owned());
    (ended.status.code(), severities.collect())
}

/// Every file below a directory.
fn everything(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(everything(&path));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            files.insert(path, bytes);
        }
    }
    files
}

/// Segments with frames in them, in order.
fn used(directory: &Path) -> Vec<PathBuf> {
    let files = everything(&directory.join("journal"));
    let frames = |bytes: &[u8]| bytes.iter().skip(8192).any(|byte| *byte != 0);
    let used = files.into_iter().filter(|(_, bytes)| frames(bytes));
    used.map(|(path, _)| path).collect()
}

/// Serves a directory for the time of these appends, and stops as it should be.
async fn run(directory: &Path, appends: &[(&str, &str)]) {
    let daemon = Daemon::start_in(directory, &[]);
    let mut wal = daemon.wal().await;
    for (log, payload) in appends {
        wal.append(append(log, payload)).await.unwrap();
    }
    stop(daemon).await;
}

async fn stop(daemon: Daemon) {
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
}

/// Payloads of a log from an lsn on.
async fn contents(daemon: &Daemon, log: &str, from: u64) -> Result<Vec<String>, tonic::Status> {
    let request = v1::ReadRequest {
        log: log.to_owned(),
        start: Some(v1::read_request::Start::Lsn(from)),
        ..v1::ReadRequest::default()
    };
    let page = daemon.wal().await.read(request).await?.into_inner();
    let read = records(page.batch.as_slice());
    Ok(read.into_iter().map(|(_, _, payload)| payload).collect())
}

async fn recovery_epoch(daemon: &Daemon) -> u64 {
    let request = v1::GetServerInfoRequest {};
    let info = daemon.ops().await.get_server_info(request).await;
    info.unwrap().into_inner().recovery_epoch
}

#[tokio::test]
async fn without_its_format_file_a_store_is_refused_and_gets_it_back_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    run(directory, &[("a", "0"), ("b", "1"), ("a", "2")]).await;
    assert_eq!(
        repair(directory, &[]),
        (
            Some(0),
            "nothing is lost, or all of it was accepted before\n".to_owned()
        )
    );
    let format = std::fs::read(directory.join("FORMAT")).unwrap();
    std::fs::remove_file(directory.join("FORMAT")).unwrap();
    let started = output(wald().arg("--data-dir").arg(directory).args([
        "--listen",
        ":0",
        "--http-listen",
        ":0",
    ]));
    assert_eq!(started.status.code(), Some(65), "{started:?}");

    let before = everything(directory);
    let (code, said) = repair(directory, &[]);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("FORMAT is gone or damaged"), "{said}");
    let (code, told) = repair_as_json(directory, &[]);
    assert_eq!((code, &told["format_gone"]), (Some(5), &true.into()));
    assert_eq!(everything(directory), before, "to look changes nothing");

    let (code, said) = repair(directory, ACCEPT);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(std::fs::read(directory.join("FORMAT")).unwrap(), format);
    let daemon = Daemon::start_in(directory, &[]);
    assert_eq!(contents(&daemon, "a", 0).await.unwrap(), ["0", "2"]);
    assert_eq!(contents(&daemon, "b", 0).await.unwrap(), ["1"]);
    let mut wal = daemon.wal().await;
    let answer = wal.append(append("a", "3")).await.unwrap().into_inner();
    assert_eq!(answer.lsn, Some(2));
    stop(daemon).await;
    assert_eq!(verified(directory), (Some(0), Vec::new()));
}

#[tokio::test]
async fn logs_whose_newest_segments_are_gone_go_on_when_the_loss_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    run(directory, &[("a", "0"), ("a", "1"), ("b", "0")]).await;
    run(directory, &[("a", "lost")]).await;
    run(directory, &[("b", "lost")]).await;
    for newest in used(directory).into_iter().rev().take(2) {
        std::fs::remove_file(newest).unwrap();
    }

    // It serves the rest. Lsns that may have been given out are not given out again.
    let daemon = Daemon::start_in(directory, &[]);
    assert_eq!(contents(&daemon, "b", 0).await.unwrap(), ["0"]);
    for log in ["a", "b", "new"] {
        let refused = daemon.wal().await.append(append(log, "x")).await;
        let refused = refused.unwrap_err();
        assert!(refused.message().contains("repaired"), "{refused:?}");
        let told = Told::of(&refused);
        assert_eq!(
            (told.code, told.reason.as_str(), told.fact("outcome")),
            (Code::DataLoss, "QUARANTINED", "NOT_APPLIED")
        );
    }
    let epoch = recovery_epoch(&daemon).await;
    for arguments in [&[], ACCEPT] {
        let (code, said) = repair(directory, arguments);
        assert_eq!(code, Some(4), "beside a daemon: {said}");
        assert!(said.contains("in use by process"), "{said}");
    }
    assert!(!directory.join(REPAIRS).exists());
    stop(daemon).await;

    let (code, severities) = verified(directory);
    assert_eq!(code, Some(5));
    assert!(severities.contains(&"loss".to_owned()), "{severities:?}");
    let (before, segments) = (everything(directory), used(directory));
    let (code, said) = repair(directory, &[]);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("in doubt: log \"a\""), "{said}");
    assert!(said.contains("wald repair --accept-loss"), "{said}");
    let (code, told) = repair_as_json(directory, &[]);
    assert_eq!(code, Some(5), "{told}");
    assert_eq!(told["in_doubt"], serde_json::json!(["a", "b"]));
    assert_eq!(
        (&told["unknown_logs"], &told["accepted"]),
        (&true.into(), &false.into())
    );
    assert_eq!(everything(directory), before, "to look changes nothing");

    let (code, told) = repair_as_json(directory, ACCEPT);
    assert_eq!((code, &told["accepted"]), (Some(0), &true.into()), "{told}");
    let accepted_in = told["recovery_epoch"].as_u64().unwrap();
    assert!(accepted_in > epoch, "{accepted_in} after {epoch}");
    let noted = std::fs::read_to_string(directory.join(REPAIRS)).unwrap();
    let first = noted.lines().next().unwrap();
    let time = first.strip_prefix("loss accepted at ").unwrap();
    let (time, by) = time.split_once(", by ").unwrap();
    assert!(time.parse::<jiff::Timestamp>().is_ok(), "{first}");
    assert!(by.starts_with("grace, wald "), "{first}");
    for line in [
        "  goes on although newer records may be lost: log \"a\"",
        "  goes on although newer records may be lost: log \"b\"",
        &format!("  done: recovery epoch {accepted_in} began"),
    ] {
        assert!(noted.lines().any(|noted| noted == line), "{noted}");
    }
    assert!(used(directory).starts_with(&segments), "{segments:?}");

    let daemon = Daemon::start_in(directory, &[]);
    assert!(recovery_epoch(&daemon).await >= accepted_in);
    for (log, lsn) in [("a", 2), ("b", 1), ("new", 0)] {
        let answer = daemon.wal().await.append(append(log, "on")).await;
        let answer = answer.unwrap().into_inner();
        assert_eq!(answer.lsn, Some(lsn), "{log}");
    }
    assert_eq!(contents(&daemon, "a", 0).await.unwrap(), ["0", "1", "on"]);
    stop(daemon).await;
    let (code, severities) = verified(directory);
    assert_eq!(code, Some(0), "{severities:?}");
    assert!(severities.iter().all(|severity| severity == "note"));
    let (code, said) = repair(directory, ACCEPT);
    assert_eq!(code, Some(0));
    assert!(said.starts_with("nothing is lost"), "{said}");
    let again = std::fs::read_to_string(directory.join(REPAIRS)).unwrap();
    assert_eq!(again, noted, "there was nothing to accept");
}

#[tokio::test]
async fn records_whose_loss_was_accepted_stay_named_and_alarm_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    run(
        directory,
        &[("a", "first"), ("a", "unmistakable"), ("a", "third")],
    )
    .await;
    let path = used(directory).remove(0);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(12).position(|part| part == b"unmistakable");
    bytes[at.unwrap()] ^= 1;
    std::fs::write(&path, &bytes).unwrap();

    let (code, said) = repair(directory, &[]);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.starts_with("lost: log \"a\", record 1\n"), "{said}");
    let (code, told) = repair_as_json(directory, ACCEPT);
    assert_eq!(code, Some(0), "{told}");
    let lost = serde_json::json!([{"log": "a", "from_lsn": 1, "to_lsn": 2}]);
    assert_eq!(told["lost"], lost);
    // Nothing is removed but the unused end, as by any start.
    let kept = std::fs::read(&path).unwrap();
    assert!(bytes.starts_with(&kept) && bytes[kept.len()..].iter().all(|byte| *byte == 0));
    let noted = std::fs::read_to_string(directory.join(REPAIRS)).unwrap();
    assert!(noted.contains("\n  lost: log \"a\", record 1\n"), "{noted}");

    let daemon = Daemon::start_in(directory, &[]);
    let refused = Told::of(&contents(&daemon, "a", 1).await.unwrap_err());
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::DataLoss, "QUARANTINED")
    );
    assert_eq!(contents(&daemon, "a", 2).await.unwrap(), ["third"]);
    assert_eq!(daemon.metric("wald_quarantined_records"), 0.0);
    stop(daemon).await;
    let (code, severities) = verified(directory);
    assert_eq!(code, Some(0), "{severities:?}");
    assert!(!severities.is_empty() && severities.iter().all(|severity| severity == "note"));
}

#[test]
fn what_is_no_store_is_not_repaired() {
    let nothing = tempfile::tempdir().unwrap();
    for arguments in [&[], ACCEPT] {
        assert_eq!(repair(nothing.path(), arguments).0, Some(1));
        assert_eq!(repair(&nothing.path().join("gone"), arguments).0, Some(1));
    }
    assert_eq!(repair(nothing.path(), &["--accept"]).0, Some(2));
    let names: Vec<_> = std::fs::read_dir(nothing.path()).unwrap().collect();
    assert!(names.is_empty(), "{names:?}");
}
