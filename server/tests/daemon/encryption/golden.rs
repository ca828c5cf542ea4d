//! An encrypted store of version 1: today's daemon reads every record of it, and goes on.
//!
//! `server/tests/golden/encrypted-1.tar.gz` is a data directory that was killed, with keys of single logs that were rotated
//! once, a sorted run, a shredded log, and [`KEY`] as its wrapping key. It is never changed. A later form of the key
//! ring or of encrypted records gets a store of its own beside it:
//! `cargo test -p wald-server --test daemon encryption::golden -- --ignored`.

use std::process::Command;

use serde_json::Value;

use super::*;

/// The wrapping key of the store.
const KEY: &str = "5a31c4e97f02d86b1e94a7d03cf85b62e0179d4ac68f233b50e7d9128ab4761f\n";

/// The logs, and the number of their records.
const LOGS: [(&str, usize); 2] = [("orders", 230), ("packed", 230)];

const SHREDDED: &str = "gone";

fn archive() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/encrypted-1.tar.gz")
}

/// A record, which no compression makes very short.
fn words(log: &str, number: usize) -> String {
    let words: Vec<String> = (0..60)
        .map(|word| {
            format!(
                "{log}{}",
                (number + 1) * (word + 7) * 2_654_435_761 % 1_000_003
            )
        })
        .collect();
    words.join(" ")
}

/// An empty place whose key is [`KEY`].
fn place() -> Place {
    let place = Place {
        directory: private_directory(),
        keys: private_directory(),
    };
    fs::write(place.key_file(), KEY).unwrap();
    fs::set_permissions(place.key_file(), fs::Permissions::from_mode(0o600)).unwrap();
    place
}

fn tar(arguments: &[&str], place: &Place) {
    let mut tar = Command::new("tar");
    tar.arg(arguments[0]).arg(archive()).arg("-C");
    let done = output(tar.arg(place.store()).args(&arguments[1..]));
    assert!(done.status.success(), "{done:?}");
}

async fn contents(daemon: &Daemon, log: &str) -> Vec<String> {
    let mut wal = daemon.wal().await;
    let mut found = Vec::new();
    loop {
        let request = v1::ReadRequest {
            start: Some(v1::read_request::Start::Lsn(found.len() as u64)),
            ..read(log)
        };
        let page = wal.read(request).await.unwrap().into_inner();
        let batch = page.batch.unwrap_or_default();
        found.extend(batch.records.iter().map(payload));
        if page.next_lsn == page.tail_lsn {
            return found;
        }
    }
}

/// The frames with records that `wald dump` shows.
fn dumped(place: &Place, more: &[&str]) -> Vec<Value> {
    let mut dump = wald();
    dump.args(["dump", "--output=jsonl"]).arg(place.store());
    let done = output(dump.args(more));
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && said.is_empty(), "{said}");
    let text = String::from_utf8(done.stdout).unwrap();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.collect()
}

#[tokio::test]
async fn store_of_version_1_is_read_with_its_keys_and_goes_on() {
    let place = place();
    tar(&["-xzf"], &place);
    // The archive has the cases that this test is about.
    let frames = dumped(&place, &[]);
    let run = frames
        .iter()
        .filter(|frame| !frame["segment"]["sorted"].is_null());
    assert!(run.count() > 0, "a sorted run");
    for (log, _) in LOGS {
        let of_log = frames.iter().filter(|frame| frame["frame"]["log"] == log);
        let keys = of_log.filter_map(|frame| frame["frame"]["encrypted_with_keys"].as_array());
        let mut keys: Vec<_> = keys.flatten().filter_map(Value::as_u64).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(
            keys.len(),
            2,
            "{log} has records of before and after the rotation"
        );
    }
    assert!(
        frames
            .iter()
            .all(|frame| frame["frame"]["records"].is_null())
    );
    // With the key a dump shows all records except in the log that was shredded.
    let key = format!("--encryption-key-file={}", place.key_file().display());
    for frame in dumped(&place, &[&key]) {
        let is_gone = frame["frame"]["log"] == SHREDDED;
        let is_encrypted = !frame["frame"]["encrypted_with_keys"].is_null();
        assert!(!is_encrypted || is_gone, "{frame}");
    }
    let verified = output(wald().arg("verify").arg(place.store()));
    assert!(verified.status.success(), "{verified:?}");
    let own = "--encryption-scope=log";
    for start in 0..3 {
        let daemon = place.start(&[own]);
        for (log, count) in LOGS {
            let mut expected: Vec<String> = (0..count).map(|number| words(log, number)).collect();
            expected.extend((0..start).map(|_| "more".to_owned()));
            assert!(
                contents(&daemon, log).await == expected,
                "{log}, start {start}"
            );
            daemon
                .wal()
                .await
                .append(append(log, "more"))
                .await
                .unwrap();
        }
        let gone = daemon.wal().await.read(read(SHREDDED)).await.unwrap_err();
        assert_eq!(gone.code(), Code::NotFound);
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
    }
}

#[tokio::test]
#[ignore = "writes the golden store: run once for each form of the ring and of encrypted records"]
async fn write_golden_store() {
    assert!(!archive().exists(), "a golden store is never changed");
    let place = place();
    let own = "--encryption-scope=log";
    let daemon = place.start(&[own]);
    let packed = v1::CreateLogRequest {
        log: "packed".to_owned(),
        config: Some(v1::LogConfig {
            compression: v1::Compression::Lz4.into(),
            ..v1::LogConfig::default()
        }),
    };
    daemon.logs().await.create_log(packed).await.unwrap();
    let fill = async |daemon: &Daemon, numbers: std::ops::Range<usize>| {
        let mut wal = daemon.wal().await;
        for number in numbers {
            for log in ["orders", "packed", SHREDDED] {
                wal.append(append(log, &words(log, number))).await.unwrap();
            }
        }
    };
    fill(&daemon, 0..150).await;
    until(&daemon, "wald_sorted_runs", |runs| runs > 0.0).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    // The sorter would give the new keys to the run.
    let daemon = place.start(&[own, "--sorter-enabled=false"]);
    fill(&daemon, 150..190).await;
    let (rotated, said) = place.key(&["rotate"]);
    assert!(rotated, "{said}");
    fill(&daemon, 190..230).await;
    let shred = v1::DeleteLogRequest {
        log: SHREDDED.to_owned(),
        shred: true,
        ..v1::DeleteLogRequest::default()
    };
    daemon.logs().await.delete_log(shred).await.unwrap();
    daemon.signal(Signal::KILL);
    daemon.ended().await;
    // Files of the pool have no records.
    tar(&["-czf", "--exclude=./pool/*", "."], &place);
}
