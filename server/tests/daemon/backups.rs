//! Backups over the wire, and stores restored by the built binary.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::support::{Daemon, Told, append, output, part, unread, wald};
use rustix::process::Signal;
use tempfile::TempDir;
use tonic::Code;
use wald_proto::backup;
use wald_proto::v1;
use wald_proto::v1::backup_response::Part;
use wald_storage::ContentDigest;

/// The messages of one backup.
pub(crate) struct Saved {
    /// The bytes of the manifest file.
    pub(crate) file: bytes::Bytes,
    pub(crate) manifest: v1::BackupManifest,
    pub(crate) content: BTreeMap<u32, Vec<u8>>,
}

pub(crate) async fn save(daemon: &Daemon, request: v1::BackupRequest) -> Saved {
    let mut ops = daemon.ops().await;
    let mut parts = ops.backup(request).await.unwrap().into_inner();
    let first = parts.message().await.unwrap().unwrap();
    let Some(Part::ManifestFile(file)) = first.part else {
        panic!("the manifest comes first");
    };
    let manifest = backup::decode(&file).unwrap().manifest;
    let mut content: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    let mut last = 0;
    while let Some(message) = parts.message().await.unwrap() {
        let Some(Part::Chunk(chunk)) = message.part else {
            panic!("content after the manifest");
        };
        assert!(chunk.file >= last, "in the order of the manifest");
        last = chunk.file;
        let file = content.entry(chunk.file).or_default();
        assert_eq!(chunk.offset, file.len() as u64);
        file.extend_from_slice(&chunk.data);
    }
    for (index, file) in manifest.files.iter().enumerate() {
        let sent = content.get(&u32::try_from(index).unwrap());
        assert_eq!(sent.is_none(), file.known, "{}", file.path);
        if let Some(sent) = sent {
            assert_eq!(sent.len() as u64, file.file_bytes);
            assert_eq!(ContentDigest::of(sent).to_bytes(), file.digest);
        }
    }
    Saved {
        file,
        manifest,
        content,
    }
}

impl Saved {
    fn digests(&self) -> Vec<bytes::Bytes> {
        self.manifest
            .files
            .iter()
            .map(|f| f.digest.clone())
            .collect()
    }

    /// Keeps it as walctl does, with the manifest as it is now.
    fn keep(&self, directory: &Path, id: &str) {
        let file = backup::seal(backup::encode(&self.manifest), None);
        self.keep_with(directory, id, &file);
    }

    /// Keeps it as walctl does.
    pub(crate) fn keep_signed(&self, directory: &Path, id: &str) {
        self.keep_with(directory, id, &self.file);
    }

    fn keep_with(&self, directory: &Path, id: &str, file: &[u8]) {
        for part in [backup::FILES, backup::MANIFESTS] {
            std::fs::create_dir_all(directory.join(part)).unwrap();
        }
        for (index, content) in &self.content {
            let digest = ContentDigest::of(content);
            let path = directory.join(format!("{}/{digest}", backup::FILES));
            assert!(usize::try_from(*index).unwrap() < self.manifest.files.len());
            std::fs::write(path, content).unwrap();
        }
        let name = format!("{}/{id}{}", backup::MANIFESTS, backup::MANIFEST_SUFFIX);
        std::fs::write(directory.join(name), file).unwrap();
    }
}

pub(crate) async fn records(daemon: &Daemon) -> Vec<(String, u64, String)> {
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
        ..v1::ScanRequest::default()
    };
    let mut wal = daemon.wal().await;
    let mut stream = wal.scan(request).await.unwrap().into_inner();
    let mut found = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        found.extend(crate::support::records(&message.batches));
    }
    found.sort();
    found
}

async fn fill(daemon: &Daemon, from: usize, batches: usize) {
    let mut wal = daemon.wal().await;
    let text = "x".repeat(20_000);
    for number in from..from + batches {
        let payload = format!("{number} {text}");
        let request = v1::AppendBatchRequest {
            batches: vec![part("a", &[&payload, "second"]), part("b/c", &[&payload])],
            ..v1::AppendBatchRequest::default()
        };
        wal.append_batch(request).await.unwrap();
    }
}

#[tokio::test]
async fn a_backup_is_restored_as_of_its_end_and_as_of_a_position() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, 0, 60).await;
    let early = records(&daemon).await;
    let mut wal = daemon.wal().await;
    let synced = wal.sync(v1::SyncRequest::default()).await.unwrap();
    let early_position = synced.into_inner().durable_position.unwrap();
    fill(&daemon, 60, 60).await;
    let first = save(&daemon, v1::BackupRequest::default()).await;
    assert_eq!(first.manifest.findings, []);
    assert_eq!(daemon.metric("wald_backup_last_sent_bytes"), {
        let sent: usize = first.content.values().map(Vec::len).sum();
        f64::from(u32::try_from(sent).unwrap())
    });
    // Files that the client holds are not sent again.
    fill(&daemon, 120, 1).await;
    let more = v1::BackupRequest {
        known_digests: first.digests(),
        ..v1::BackupRequest::default()
    };
    let second = save(&daemon, more).await;
    assert!(second.content.len() < first.content.len());
    assert!(second.manifest.position > first.manifest.position);
    let late = records(&daemon).await;

    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("backups");
    first.keep(&kept, "1");
    second.keep(&kept, "2");
    let verified = output(wald().arg("verify").arg(&kept));
    assert_eq!(verified.status.code(), Some(0), "{verified:?}");
    let epoch = first.manifest.recovery_epoch;
    for (name, at, expected) in [
        ("all", None, &late),
        ("early", Some(early_position.to_string()), &early),
    ] {
        let target = scratch.path().join(name);
        let mut command = wald();
        command
            .arg("restore")
            .arg(&kept)
            .arg("--data-dir")
            .arg(&target);
        command.args(["--output", "json"]);
        if let Some(at) = &at {
            command.args(["--at-position", at]);
        }
        let restored = output(&mut command);
        assert_eq!(restored.status.code(), Some(0), "{restored:?}");
        let told: serde_json::Value = serde_json::from_slice(&restored.stdout).unwrap();
        assert_eq!(told["records"], expected.len());
        assert_eq!(told["logs"], 2);
        let daemon = Daemon::start_in(&target, &[]);
        assert_eq!(records(&daemon).await, **expected);
        let mut wal = daemon.wal().await;
        let answer = wal.append(append("a", "on")).await.unwrap().into_inner();
        assert!(answer.recovery_epoch > epoch);
        assert_eq!(told["recovery_epoch"], answer.recovery_epoch);
        assert!(answer.position > second.manifest.position);
    }
    let again = output(
        wald()
            .arg("restore")
            .arg(&kept)
            .arg("--data-dir")
            .arg(scratch.path().join("all")),
    );
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    let drill = output(
        wald()
            .args(["restore", "--drill", "--drill-in"])
            .arg(scratch.path())
            .arg(&kept),
    );
    assert_eq!(drill.status.code(), Some(0), "{drill:?}");
    let text = String::from_utf8(drill.stdout).unwrap();
    assert!(text.contains("363 records were read back"), "{text}");
}

#[tokio::test]
async fn restore_of_a_position_says_if_a_sorted_run_may_lack_records() {
    let daemon = Daemon::start(&["--segment-bytes=128KiB", "--sorter-step-bytes=512KiB"]);
    fill(&daemon, 0, 60).await;
    let is_sorted = |saved: &Saved| {
        let mut files = saved.manifest.files.iter();
        files.any(|file| file.path.starts_with("sorted/"))
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_sorted(&save(&daemon, v1::BackupRequest::default()).await) {
        assert!(std::time::Instant::now() < deadline, "nothing is sorted");
    }
    let mut wal = daemon.wal().await;
    let synced = wal.sync(v1::SyncRequest::default()).await.unwrap();
    let position = synced.into_inner().durable_position.unwrap().to_string();
    wal.append(append("a", "later")).await.unwrap();
    let saved = save(&daemon, v1::BackupRequest::default()).await;
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("backups");
    saved.keep(&kept, "1");
    for (name, at, may_lack) in [
        ("all", &[][..], false),
        ("early", &["--at-position", &position], true),
    ] {
        let mut command = wald();
        command.args(["restore", "--output", "json"]).arg(&kept);
        command.arg("--data-dir").arg(scratch.path().join(name));
        let restored = output(command.args(at));
        assert_eq!(restored.status.code(), Some(0), "{restored:?}");
        let told: serde_json::Value = serde_json::from_slice(&restored.stdout).unwrap();
        assert_eq!(told["may_lack_records"], may_lack, "{name}");
        let said = String::from_utf8(restored.stderr).unwrap();
        assert_eq!(said.contains("may be missing"), may_lack, "{said}");
    }
}

#[tokio::test]
async fn four_backups_run_at_a_time_and_a_client_that_goes_away_ends_its_own() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, 0, 60).await;
    let slowly = v1::BackupRequest {
        max_bytes_per_second: 1 << 20,
        ..v1::BackupRequest::default()
    };
    let mut running = Vec::new();
    for _ in 0..4 {
        let mut ops = daemon.ops().await;
        running.push((ops.backup(slowly.clone()).await.unwrap().into_inner(), ops));
    }
    let mut other = daemon.ops().await;
    let refused = other.backup(v1::BackupRequest::default()).await;
    let told = Told::of(&refused.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::ResourceExhausted, "BUSY")
    );
    drop(running.pop());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while other.backup(v1::BackupRequest::default()).await.is_err() {
        assert!(std::time::Instant::now() < deadline, "it is never let go");
    }
}

/// A daemon, and the backup of its store in a directory that is kept.
async fn backed_up() -> (Daemon, Saved, TempDir, PathBuf) {
    let daemon = Daemon::start(&[]);
    fill(&daemon, 0, 3).await;
    let saved = save(&daemon, v1::BackupRequest::default()).await;
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("backups");
    saved.keep(&kept, "1");
    (daemon, saved, scratch, kept)
}

#[tokio::test]
async fn a_restore_is_refused_with_its_own_exit_codes() {
    let (_daemon, saved, scratch, kept) = backed_up().await;
    let target = scratch.path().join("target");
    let restore = |more: &[&str]| {
        let ended = output(
            wald()
                .arg("restore")
                .arg(&kept)
                .arg("--data-dir")
                .arg(&target)
                .args(more),
        );
        (
            ended.status.code(),
            String::from_utf8(ended.stderr).unwrap(),
        )
    };
    let (code, said) = restore(&["--backup", "7"]);
    assert_eq!(code, Some(3), "{said}");
    let beyond = (saved.manifest.position.unwrap() + 1).to_string();
    let (code, said) = restore(&["--at-position", &beyond]);
    assert_eq!(code, Some(2), "{said}");
    // A byte of the largest file is flipped.
    let largest = saved.content.values().max_by_key(|c| c.len()).unwrap();
    let path = kept.join(format!("files/{}", ContentDigest::of(largest)));
    let mut bad = largest.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    std::fs::write(&path, bad).unwrap();
    let verified = output(wald().arg("verify").arg(&kept));
    assert_eq!(verified.status.code(), Some(5), "{verified:?}");
    let said = String::from_utf8(verified.stderr).unwrap();
    let name = format!("files/{}", ContentDigest::of(largest));
    assert!(said.contains(&name) && said.contains("delete"), "{said}");
    let (code, said) = restore(&[]);
    assert_eq!(code, Some(5), "{said}");
    // The files written until then are no store.
    let started = output(wald().arg("--data-dir").arg(&target).args([
        "--listen",
        ":0",
        "--http-listen",
        ":0",
    ]));
    assert_eq!(started.status.code(), Some(65), "{started:?}");
}

#[tokio::test]
async fn restore_and_verify_end_as_usual_where_nobody_reads_their_findings() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, 0, 3).await;
    let mut saved = save(&daemon, v1::BackupRequest::default()).await;
    saved.manifest.findings.push(v1::Finding {
        log: "a".to_owned(),
        from_lsn: Some(7),
        to_lsn: Some(9),
        from_position: Some(1),
        ..v1::Finding::default()
    });
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("backups");
    saved.keep(&kept, "1");
    let target = scratch.path().join("target");
    let mut restore = wald();
    restore.arg("restore").arg(&kept).arg("--data-dir");
    let restored = restore.arg(&target).stderr(unread()).output().unwrap();
    assert_eq!(restored.status.code(), Some(5), "{restored:?}");
    assert!(target.join("FORMAT").exists());
    assert!(!target.join("RESTORING").exists());
    let mut verify = wald();
    let verified = verify.arg("verify").arg(&kept).stderr(unread()).output();
    let verified = verified.unwrap();
    assert_eq!(verified.status.code(), Some(5), "{verified:?}");
}

#[tokio::test]
async fn restore_into_the_directory_of_a_running_daemon_exits_with_4() {
    let (_daemon, _, scratch, kept) = backed_up().await;
    let target = scratch.path().join("target");
    let served = Daemon::start_in(&target, &[]);
    let restore = || {
        let mut restore = wald();
        restore.arg("restore").arg(&kept);
        output(restore.arg("--data-dir").arg(&target))
    };
    let refused = restore();
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    served.signal(Signal::TERM);
    assert!(served.ended().await.success());
    // It is free now, and not empty.
    let refused = restore();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}

#[tokio::test]
async fn latest_backup_is_the_furthest_and_an_unreadable_one_is_skipped() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, 0, 3).await;
    let mut saved = save(&daemon, v1::BackupRequest::default()).await;
    let scratch = tempfile::tempdir().unwrap();
    let kept = scratch.path().join("backups");
    saved.keep(&kept, "2");
    fill(&daemon, 3, 3).await;
    saved = save(&daemon, v1::BackupRequest::default()).await;
    // The clock went back, and the id with it.
    saved.manifest.create_time = None;
    saved.keep(&kept, "1");
    let verify = |directory: &Path, more: &[&str]| {
        let ended = output(wald().arg("verify").arg(directory).args(more));
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (ended.status.code(), text(ended.stdout), text(ended.stderr))
    };
    let (code, said, _) = verify(&kept, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.starts_with("backup 1,"), "{said}");
    let manifests = kept.join(backup::MANIFESTS);
    let bad = manifests.join("0.manifest");
    std::fs::write(&bad, b"").unwrap();
    let (code, said, warned) = verify(&kept, &[]);
    assert_eq!(code, Some(0), "{warned}");
    assert!(said.starts_with("backup 1,"), "{said}");
    assert!(warned.contains("0.manifest"), "{warned}");
    assert_eq!(verify(&kept, &["--backup", "0"]).0, Some(5));
    for id in ["1", "2"] {
        std::fs::remove_file(manifests.join(format!("{id}.manifest"))).unwrap();
    }
    let (code, _, said) = verify(&kept, &[]);
    assert_eq!(code, Some(5), "none is left: {said}");
    // Backups that somebody has put into a store do not hide it.
    let store = scratch.path().join("store");
    saved.keep(&store, "1");
    std::fs::create_dir(store.join("journal")).unwrap();
    std::fs::write(store.join("FORMAT"), b"").unwrap();
    let restored = output(
        wald()
            .arg("restore")
            .arg(&store)
            .arg("--data-dir")
            .arg(scratch.path().join("new")),
    );
    assert_eq!(restored.status.code(), Some(1), "{restored:?}");
    let said = String::from_utf8(restored.stderr).unwrap();
    assert!(said.contains("is a store"), "{said}");
    let (code, out, _) = verify(&store, &[]);
    assert!(
        code != Some(0) && !out.starts_with("backup"),
        "{code:?} {out}"
    );
}

#[cfg(not(feature = "object"))]
#[test]
fn a_url_is_refused_in_a_sentence_by_a_build_without_buckets() {
    let scratch = tempfile::tempdir().unwrap();
    for arguments in [
        &["verify", "s3://bucket/orders"][..],
        &["restore", "gs://bucket/orders"],
        &["restore", "--drill", "az://container"],
    ] {
        let ended = output(wald().args(arguments).arg("--data-dir").arg(scratch.path()));
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(said.contains("--features object"), "{said}");
    }
}
