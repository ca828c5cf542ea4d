//! Encryption at rest, by the built binary: no plain byte in any file, starts that are refused, rotation, erasure.

mod golden;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tempfile::TempDir;
use tonic::Code;
use wald_proto::v1;

use crate::support::{Daemon, Told, append, full, output, payload, private_directory, until, wald};

/// A text that no other byte of a store has by chance.
const MARK: &str = "marked payload, for nobody else";

/// A store with a key file, in directories that go with the test.
struct Place {
    directory: TempDir,
    keys: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self {
            directory: private_directory(),
            keys: private_directory(),
        };
        let made = output(wald().args(["key", "new", "--to"]).arg(place.key_file()));
        assert!(made.status.success());
        let mode = fs::metadata(place.key_file()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        place
    }

    fn key_file(&self) -> PathBuf {
        self.keys.path().join("key")
    }

    fn store(&self) -> &Path {
        self.directory.path()
    }

    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let key = format!("--encryption-key-file={}", self.key_file().display());
        let all = ["--segment-bytes=64KiB", "--sorter-step-bytes=1MiB", &key];
        all.iter().chain(more).map(ToString::to_string).collect()
    }

    fn start(&self, more: &[&str]) -> Daemon {
        let arguments = self.arguments(more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Daemon::start_in(self.store(), &arguments)
    }

    /// The exit code of a start that must be refused, and its message.
    fn refused(&self, arguments: &[String]) -> (Option<i32>, String) {
        let mut command = wald();
        command.arg("serve").arg("--data-dir").arg(self.store());
        let refused = output(
            command
                .args(["--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"])
                .args(arguments),
        );
        (
            refused.status.code(),
            String::from_utf8_lossy(&refused.stderr).into_owned(),
        )
    }

    /// `wald key ...` on the store.
    fn key(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = wald();
        command
            .arg("key")
            .args(arguments)
            .arg("--data-dir")
            .arg(self.store());
        let done = output(command.arg("--encryption-key-file").arg(self.key_file()));
        let text = [done.stdout, done.stderr].concat();
        (
            done.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }
}

/// The message of a refused start, the change before it, and its arguments.
type RefusedStart<'a> = (&'a str, Box<dyn Fn() + 'a>, Vec<String>);

/// The files below a directory that hold these bytes.
fn with(directory: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
                continue;
            }
            // Files of the pool come and go.
            let content = fs::read(&path).unwrap_or_default();
            if bytes.is_empty() || content.windows(bytes.len()).any(|part| part == bytes) {
                found.push(path);
            }
        }
    }
    found
}

fn read(log: &str) -> v1::ReadRequest {
    v1::ReadRequest {
        log: log.to_owned(),
        ..v1::ReadRequest::default()
    }
}

async fn fill(daemon: &Daemon, log: &str, records: usize) {
    let mut wal = daemon.wal().await;
    for _ in 0..records {
        wal.append(append(log, &MARK.repeat(50))).await.unwrap();
    }
}

async fn first(daemon: &Daemon, log: &str) -> String {
    let page = daemon
        .wal()
        .await
        .read(read(log))
        .await
        .unwrap()
        .into_inner();
    payload(&page.batch.unwrap().records[0])
}

#[tokio::test]
async fn no_file_has_a_plain_byte_under_load_after_a_kill_and_after_a_sort() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 400).await;
    until(&daemon, "wald_sorted_runs", |runs| runs > 0.0).await;
    assert_eq!(
        with(place.store(), &MARK.as_bytes()[..12]),
        Vec::<PathBuf>::new()
    );
    daemon.signal(Signal::KILL);
    daemon.ended().await;
    let daemon = place.start(&[]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
    assert_eq!(
        with(place.store(), &MARK.as_bytes()[..12]),
        Vec::<PathBuf>::new()
    );
    // Nor is a wrapping key anywhere.
    let key = fs::read(place.key_file()).unwrap();
    assert_eq!(with(place.store(), &key[..16]), Vec::<PathBuf>::new());
    let status =
        fs::read_to_string(format!("/proc/{}/limits", daemon.pid().as_raw_nonzero())).unwrap();
    let cores = status
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap();
    assert_eq!(cores.split_whitespace().nth(4), Some("0"), "{cores}");
}

#[tokio::test]
async fn start_with_missing_wrong_or_swapped_keys_is_refused() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 3).await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    let other = Place::new();
    drop(other.start(&[]));
    let right = place.arguments(&[]);
    let ring = |place: &Place, name: &str| place.store().join("keys").join(name);
    let saved = ["ring", "ring-2"].map(|name| fs::read(ring(&place, name)).unwrap());
    let put = |bytes: [&[u8]; 2]| {
        for (name, bytes) in ["ring", "ring-2"].into_iter().zip(bytes) {
            fs::write(ring(&place, name), bytes).unwrap();
        }
    };
    let cut = &saved[0][..saved[0].len() / 2];
    let foreign = fs::read(ring(&other, "ring")).unwrap();
    let cases: [RefusedStart<'_>; 6] = [
        ("are encrypted", Box::new(|| ()), vec![]),
        ("does not have", Box::new(|| ()), other.arguments(&[])),
        (
            "cannot be opened",
            Box::new(|| ()),
            vec!["--encryption-key-file=/no/such/key".to_owned()],
        ),
        (
            "cannot be used",
            Box::new(|| put([cut, cut])),
            right.clone(),
        ),
        (
            "another store",
            Box::new(|| put([&foreign, &foreign])),
            right.clone(),
        ),
        (
            "failed",
            Box::new(|| put([&saved[0], &saved[1]])),
            vec!["--encryption-key-command=false".to_owned()],
        ),
    ];
    for (said, prepare, arguments) in cases {
        prepare();
        let (code, message) = place.refused(&arguments);
        assert_eq!(code, Some(78), "{said}: {message}");
        assert!(message.contains(said), "{said}: {message}");
    }
    // One copy is enough.
    put([cut, &saved[1]]);
    let daemon = place.start(&[]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
    drop(daemon);
    // The keys may come from a command.
    let command = format!(
        "--encryption-key-command=cat {}",
        place.key_file().display()
    );
    let daemon = Daemon::start_in(place.store(), &["--segment-bytes=64KiB", &command]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
}

#[tokio::test]
async fn rotation_works_while_the_daemon_runs_and_an_old_ring_is_refused() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 200).await;
    let yesterday = fs::read(place.store().join("keys/ring")).unwrap();
    let (rotated, said) = place.key(&["rotate"]);
    assert!(rotated, "{said}");
    assert!(daemon.metric("wald_encryption_unrenewed_bytes") > 0.0);
    fill(&daemon, "a", 200).await;
    let (_, shown) = place.key(&["show"]);
    let ring = fs::read_to_string(place.store().join("keys/ring")).unwrap();
    let highest = ring.split_once("\"highest\": ").unwrap().1;
    let second = highest.split_once(',').unwrap().0;
    assert!(
        shown.contains(&format!("key {second}: store")) && shown.contains(", new"),
        "{shown}"
    );
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let dumped = output(wald().args(["dump"]).arg(place.store()));
    let dumped = String::from_utf8_lossy(&dumped.stdout).into_owned();
    // The sorter may have given the new key to all earlier records by now.
    assert!(
        dumped.contains(&format!("encrypted, key {second}")),
        "{dumped}"
    );
    // A key ring of yesterday would open half of the records.
    for name in ["keys/ring", "keys/ring-2"] {
        fs::write(place.store().join(name), &yesterday).unwrap();
    }
    let (code, message) = place.refused(&place.arguments(&[]));
    assert_eq!(code, Some(78), "{message}");
    assert!(message.contains("an older key ring"), "{message}");
}

#[test]
fn rotation_whose_answer_nobody_gets_is_in_the_audit_log() {
    let place = Place::new();
    drop(place.start(&[]));
    let audit = place.keys.path().join("audit.log");
    let mut rotate = wald();
    rotate
        .args(["key", "rotate", "--data-dir"])
        .arg(place.store());
    rotate.arg("--encryption-key-file").arg(place.key_file());
    rotate.arg("--audit-log").arg(&audit);
    let rotated = rotate.stdout(full()).output().unwrap();
    assert_eq!(rotated.status.code(), Some(74), "{rotated:?}");
    let line: serde_json::Value = serde_json::from_slice(&fs::read(&audit).unwrap()).unwrap();
    assert_eq!(
        (&line["command"], &line["outcome"]),
        (&"key rotate".into(), &"ok".into())
    );
}

#[test]
fn rotations_at_the_same_time_make_generations_of_their_own() {
    let place = Place::new();
    drop(place.start(&[]));
    let generation = || {
        let (shown, said) = place.key(&["show"]);
        assert!(shown, "{said}");
        let (_, number) = said.lines().next().unwrap().rsplit_once(' ').unwrap();
        number.parse::<u64>().unwrap()
    };
    let before = generation();
    let rotate = || {
        let (rotated, said) = place.key(&["rotate"]);
        assert!(rotated, "{said}");
    };
    rotate();
    let each = generation() - before;
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(rotate);
        }
    });
    assert_eq!(generation(), before + 9 * each);
    drop(place.start(&[]));
}

#[tokio::test]
async fn shredded_log_is_in_no_backup_and_a_log_without_its_own_key_stays() {
    let place = Place::new();
    let audit = place.keys.path().join("audit");
    let audit_log = format!("--audit-log={}", audit.display());
    let daemon = place.start(&["--encryption-scope=log", &audit_log]);
    fill(&daemon, "gone", 3).await;
    fill(&daemon, "stays", 3).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    // A copy of the store, as a backup has it.
    let copy = private_directory();
    let copied = output(
        std::process::Command::new("cp")
            .arg("-r")
            .arg(place.store())
            .arg(copy.path().join("store")),
    );
    assert!(copied.status.success());
    let daemon = place.start(&["--encryption-scope=log", &audit_log]);
    let mut logs = daemon.logs().await;
    let shred = |log: &str| v1::DeleteLogRequest {
        log: log.to_owned(),
        shred: true,
        ..v1::DeleteLogRequest::default()
    };
    logs.delete_log(shred("gone")).await.unwrap();
    let again = logs.delete_log(shred("gone")).await.unwrap_err();
    assert_eq!(again.code(), Code::NotFound);
    assert_eq!(first(&daemon, "stays").await, MARK.repeat(50));
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let lines = fs::read_to_string(&audit).unwrap();
    assert!(
        lines
            .lines()
            .any(|line| line.contains("\"shredded\":true") && line.contains("\"gone\"")),
        "{lines}"
    );
    // The copy of the store, with the key ring of today.
    let old = copy.path().join("store");
    for name in ["keys/ring", "keys/ring-2", "ENCRYPTED"] {
        fs::copy(place.store().join(name), old.join(name)).unwrap();
    }
    let arguments = place.arguments(&["--encryption-scope=log"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let restored = Daemon::start_in(&old, &arguments);
    let mut wal = restored.wal().await;
    let refused = wal.read(read("gone")).await.unwrap_err();
    assert_eq!(refused.code(), Code::DataLoss);
    assert_eq!(Told::of(&refused).reason, "KEY_MISSING");
    assert_eq!(first(&restored, "stays").await, MARK.repeat(50));
}

#[tokio::test]
async fn log_without_a_key_of_its_own_is_not_shredded() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 1).await;
    let request = v1::DeleteLogRequest {
        log: "a".to_owned(),
        shred: true,
        ..v1::DeleteLogRequest::default()
    };
    let refused = daemon.logs().await.delete_log(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(Told::of(&refused).reason, "NO_OWN_KEY");
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
}

#[tokio::test]
async fn log_that_was_served_under_another_scope_is_not_shredded() {
    let place = Place::new();
    let own = "--encryption-scope=log";
    let daemon = place.start(&[own]);
    fill(&daemon, "early", 1).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let daemon = place.start(&[]);
    fill(&daemon, "early", 1).await;
    fill(&daemon, "between", 1).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let daemon = place.start(&[own]);
    fill(&daemon, "late", 1).await;
    let mut logs = daemon.logs().await;
    let shred = |log: &str| v1::DeleteLogRequest {
        log: log.to_owned(),
        shred: true,
        ..v1::DeleteLogRequest::default()
    };
    for log in ["early", "between"] {
        let refused = logs.delete_log(shred(log)).await.unwrap_err();
        assert_eq!(Told::of(&refused).reason, "NO_OWN_KEY");
        assert_eq!(first(&daemon, log).await, MARK.repeat(50));
    }
    logs.delete_log(shred("late")).await.unwrap();
}

#[tokio::test]
async fn sorted_store_with_the_ring_of_another_store_is_refused_unchanged() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 400).await;
    until(&daemon, "wald_sorted_runs", |runs| runs > 0.0).await;
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    // Another store under the same wrapping key.
    let other = private_directory();
    let arguments = place.arguments(&[]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let daemon = Daemon::start_in(other.path(), &arguments);
    fill(&daemon, "a", 1).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    // A restored directory has no ENCRYPTED.
    fs::remove_file(place.store().join("ENCRYPTED")).unwrap();
    for name in ["keys/ring", "keys/ring-2"] {
        fs::copy(other.path().join(name), place.store().join(name)).unwrap();
    }
    let names = |place: &Path| {
        let mut all: Vec<_> = with(place, b"")
            .into_iter()
            .map(|path| (fs::read(&path).unwrap(), path))
            .collect();
        all.retain(|(_, path)| !path.ends_with("LOCK"));
        all.sort();
        all
    };
    let before = names(place.store());
    let (code, message) = place.refused(&place.arguments(&[]));
    assert_eq!(code, Some(78), "{message}");
    assert!(message.contains("the key ring never had"), "{message}");
    assert!(before == names(place.store()), "the start changed files");
}

#[tokio::test]
async fn exported_ring_is_put_back_into_a_restored_directory() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 3).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let copy = place.keys.path().join("ring");
    let (exported, said) = place.key(&["export", "--to", copy.to_str().unwrap()]);
    assert!(exported, "{said}");
    // A restored directory has neither the ring nor ENCRYPTED.
    fs::remove_dir_all(place.store().join("keys")).unwrap();
    fs::remove_file(place.store().join("ENCRYPTED")).unwrap();
    let (code, message) = place.refused(&place.arguments(&[]));
    assert_eq!(code, Some(78), "{message}");
    assert!(message.contains("no key ring"), "{message}");
    let (imported, said) = place.key(&["import", copy.to_str().unwrap()]);
    assert!(imported, "{said}");
    let daemon = place.start(&[]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
}

#[test]
fn key_that_a_full_disk_cuts_off_leaves_no_file() {
    let place = Place::new();
    let new = place.keys.path().join("new");
    let binary = wald();
    // The process gets an error instead of a signal.
    let limited = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", limited]).arg(binary.get_program());
    let refused = output(command.args(["key", "new", "--to"]).arg(&new));
    assert!(!refused.status.success());
    assert!(!new.exists());
    // An existing file stays.
    let before = fs::read(place.key_file()).unwrap();
    let refused = output(wald().args(["key", "new", "--to"]).arg(place.key_file()));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("the only copy of a secret"), "{said}");
    assert!(fs::read(place.key_file()).unwrap() == before);
}

#[tokio::test]
async fn logs_stay_erasable_after_an_offline_command_without_the_scope() {
    let place = Place::new();
    let scope = "--encryption-scope=log";
    let daemon = place.start(&[scope]);
    fill(&daemon, "kept", 1).await;
    fill(&daemon, "tmp/a", 1).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let mut delete = wald();
    delete.arg("delete-logs").arg(place.store());
    delete.args(["--prefix=tmp/", "--yes"]);
    let deleted = output(delete.arg("--encryption-key-file").arg(place.key_file()));
    let said = String::from_utf8_lossy(&deleted.stderr).into_owned();
    assert!(deleted.status.success(), "{said}");
    let ring = fs::read_to_string(place.store().join("keys/ring")).unwrap();
    assert!(ring.contains("\"scope\": \"log\""), "{ring}");
    let daemon = place.start(&[scope]);
    let request = v1::DeleteLogRequest {
        log: "kept".to_owned(),
        shred: true,
        ..v1::DeleteLogRequest::default()
    };
    daemon.logs().await.delete_log(request).await.unwrap();
}

#[tokio::test]
async fn ring_that_the_wrapping_key_does_not_open_is_not_put_back() {
    let place = Place::new();
    drop(place.start(&[]));
    let other = Place::new();
    drop(other.start(&[]));
    let files = || {
        ["keys/ring", "keys/ring-2", "ENCRYPTED"]
            .map(|name| fs::read(place.store().join(name)).ok())
    };
    let import = |copy: &Path, more: &[&str]| {
        let mut import = wald();
        import.args(["key", "import"]).arg(copy).args(more);
        let done = output(import.arg("--data-dir").arg(place.store()));
        (
            done.status.code(),
            String::from_utf8_lossy(&done.stderr).into_owned(),
        )
    };
    let own = format!("--encryption-key-file={}", place.key_file().display());
    let foreign = format!("--encryption-key-file={}", other.key_file().display());
    let copies = private_directory();
    let copy = copies.path().join("ring");
    fs::copy(place.store().join("keys/ring"), &copy).unwrap();
    for keeps_note in [true, false] {
        if !keeps_note {
            fs::remove_file(place.store().join("ENCRYPTED")).unwrap();
        }
        let before = files();
        for (copy, more, said) in [
            (&copy, vec![], "set encryption_key_file"),
            (&copy, vec![&*foreign], "does not have"),
            (
                &other.store().join("keys/ring"),
                vec![&*own],
                "does not have",
            ),
        ] {
            let (code, message) = import(copy, &more);
            assert_eq!(code, Some(78), "{message}");
            assert!(message.contains(said), "{message}");
            assert!(before == files(), "{said}: the ring was changed");
        }
    }
    let (code, message) = import(&copy, &[&own]);
    assert_eq!(code, Some(0), "{message}");
    drop(place.start(&[]));
}

#[tokio::test]
async fn dump_shows_records_to_whoever_has_the_wrapping_key() {
    let place = Place::new();
    let daemon = place.start(&[]);
    fill(&daemon, "a", 2).await;
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let dump = |more: &[String]| {
        let done = output(wald().arg("dump").arg(place.store()).args(more));
        assert_eq!(done.status.code(), Some(0));
        [done.stdout, done.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [shown, said] = dump(&place.arguments(&[])[2..]);
    assert!(
        shown.contains(MARK) && !shown.contains("encrypted, key"),
        "{shown}"
    );
    assert_eq!(said, "");
    let [shown, said] = dump(&[]);
    assert!(
        !shown.contains(MARK) && shown.contains("encrypted, key"),
        "{shown}"
    );
    assert_eq!(said, "");
    // A wrong key shows as much as none.
    let [shown, said] = dump(&Place::new().arguments(&[])[2..]);
    assert!(
        !shown.contains(MARK) && shown.contains("encrypted, key"),
        "{shown}"
    );
    assert!(said.contains("does not have"), "{said}");
    // Only the keys are read: nothing was changed, and the store is served.
    let daemon = place.start(&[]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
}

#[tokio::test]
async fn unsorted_store_that_ended_cleanly_refuses_the_ring_of_another() {
    let place = Place::new();
    for _ in 0..2 {
        let daemon = place.start(&["--sorter-enabled=false"]);
        fill(&daemon, "a", 3).await;
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
    }
    // Another store under the same wrapping key, whose ring and note take the place of the store's.
    let other = private_directory();
    let arguments = place.arguments(&[]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let daemon = Daemon::start_in(other.path(), &arguments);
    daemon.signal(Signal::TERM);
    daemon.ended().await;
    let names = ["keys/ring", "keys/ring-2", "ENCRYPTED"];
    let own = names.map(|name| fs::read(place.store().join(name)).unwrap());
    for name in names {
        fs::copy(other.path().join(name), place.store().join(name)).unwrap();
    }
    let (code, message) = place.refused(&place.arguments(&[]));
    assert_eq!(code, Some(78), "{message}");
    assert!(message.contains("the key ring never had"), "{message}");
    for (name, bytes) in names.iter().zip(own) {
        fs::write(place.store().join(name), bytes).unwrap();
    }
    let daemon = place.start(&[]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
}

#[tokio::test]
async fn changed_wrapping_key_is_taken_while_the_daemon_runs() {
    const FAILURES: &str = "wald_reload_failures_total{kind=\"encryption_key\"}";
    let place = Place::new();
    let audit = place.keys.path().join("audit");
    let daemon = place.start(&[&format!("--audit-log={}", audit.display())]);
    fill(&daemon, "a", 1).await;
    let ring = || fs::read_to_string(place.store().join("keys/ring")).unwrap();
    let (before, old) = (ring(), fs::read_to_string(place.key_file()).unwrap());
    let new = String::from_utf8(output(wald().args(["key", "new"])).stdout).unwrap();
    // Without the earlier key the ring could not be opened: it stays as it is.
    for bad in [&new[..], "no key", ""] {
        let failures = daemon.metric(FAILURES);
        fs::write(place.key_file(), bad).unwrap();
        daemon.signal(Signal::HUP);
        until(&daemon, FAILURES, |now| now > failures).await;
        assert_eq!(ring(), before);
        fill(&daemon, "a", 1).await;
    }
    fs::write(place.key_file(), format!("{old}{new}")).unwrap();
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("the changed encryption_key_file is in force");
    assert_ne!(ring(), before);
    let lines = fs::read_to_string(&audit).unwrap();
    assert!(
        lines.contains("\"encryption_key\"") && !lines.contains(new.trim()),
        "{lines}"
    );
    // The earlier key is no longer needed, not even for data keys of later.
    fs::write(place.key_file(), &new).unwrap();
    daemon.signal(Signal::HUP);
    let (rotated, said) = place.key(&["rotate"]);
    assert!(rotated, "{said}");
    fill(&daemon, "a", 1).await;
    daemon.signal(Signal::KILL);
    daemon.ended().await;
    let daemon = place.start(&[]);
    assert_eq!(first(&daemon, "a").await, MARK.repeat(50));
}
