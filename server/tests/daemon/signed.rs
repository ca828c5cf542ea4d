//! Signed backups: forged, changed and swapped manifests are refused; backups of older versions are read.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::backups::{Saved, records, save};
use crate::support::{Daemon, append, output, private_directory, wald};
use rustix::process::Signal;
use tempfile::TempDir;
use wald_proto::backup::{self, SIGNATURE_BYTES};
use wald_proto::v1;
use wald_storage::ContentDigest;

/// The first key of RFC 8032, section 7.1, as `openssl genpkey -algorithm ed25519` would write it.
const PUBLISHED: &str = "-----BEGIN PRIVATE KEY-----\n\
    MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n\
    -----END PRIVATE KEY-----\n";

struct Key {
    private: PathBuf,
    public: PathBuf,
    /// Its 64 digits.
    name: String,
}

/// Runs a command: its exit code, stdout and stderr.
fn ran(command: &mut Command) -> (Option<i32>, String, String) {
    let ended = output(command);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

fn key_command(word: &str, path: &Path) -> (Option<i32>, String, String) {
    ran(wald().arg("backup-key").arg(word).arg(path))
}

impl Key {
    fn new(directory: &Path, name: &str) -> Self {
        let private = directory.join(format!("{name}.key"));
        let (code, pem, said) = key_command("new", &private);
        assert_eq!(code, Some(0), "{said}");
        let public = directory.join(format!("{name}.pub"));
        fs::write(&public, pem).unwrap();
        // Another test may have set the umask to 0.
        fs::set_permissions(&public, fs::Permissions::from_mode(0o644)).unwrap();
        let name = said.trim().strip_prefix("wald: public key ").unwrap();
        Self {
            private,
            public,
            name: name.to_owned(),
        }
    }

    fn setting(&self) -> [&str; 2] {
        ["--backup-signing-key-file", self.private.to_str().unwrap()]
    }
}

/// A directory of backups, for `wald verify` and `wald restore`.
struct Shelf(TempDir);

impl Shelf {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn manifest(&self, id: &str) -> PathBuf {
        let name = format!("{}/{id}{}", backup::MANIFESTS, backup::MANIFEST_SUFFIX);
        self.0.path().join(name)
    }

    fn verify(&self, more: &[&str]) -> (Option<i32>, String, String) {
        ran(wald().arg("verify").arg(self.0.path()).args(more))
    }

    fn restore(&self, target: &Path, more: &[&str]) -> (Option<i32>, String, String) {
        let mut command = wald();
        command.arg("restore").arg(self.0.path()).args(more);
        ran(command.arg("--data-dir").arg(target))
    }

    /// Both commands refuse the backup with exit code 5, and say this.
    fn refuses(&self, more: &[&str], why: &str) {
        let target = tempfile::tempdir().unwrap();
        for (code, out, said) in [self.verify(more), self.restore(target.path(), more)] {
            assert_eq!(code, Some(5), "{out} {said}");
            assert!(said.contains(why), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
    }
}

async fn pay(daemon: &Daemon, payload: &str) {
    let mut wal = daemon.wal().await;
    wal.append(append("pay", payload)).await.unwrap();
}

async fn saved(daemon: &Daemon) -> Saved {
    save(daemon, v1::BackupRequest::default()).await
}

/// The bytes of a manifest file with another signature block, and the checksum that belongs to it.
fn with_block(signed: &[u8], block: &[u8]) -> Vec<u8> {
    let mut bytes = signed.to_vec();
    bytes.extend_from_slice(block);
    backup::seal(bytes, None)
}

/// The signature block of a manifest file.
fn block(file: &[u8]) -> Vec<u8> {
    let signature = backup::decode(file).unwrap().signature.unwrap();
    [&signature.public_key[..], &signature.signature].concat()
}

fn signed_part(file: &[u8]) -> &[u8] {
    backup::decode(file).unwrap().signed
}

#[tokio::test]
async fn a_forged_backup_is_refused_by_its_signature_and_by_digests() {
    let scratch = private_directory();
    let own = Key::new(scratch.path(), "own");
    let other = Key::new(scratch.path(), "other");
    let trust = ["--trust", own.public.to_str().unwrap()];
    let daemon = Daemon::start(&own.setting());
    pay(&daemon, "pay alice 100").await;
    let first = saved(&daemon).await;
    pay(&daemon, "pay bob 7").await;
    let second = saved(&daemon).await;
    let shelf = Shelf::new();
    first.keep_signed(shelf.0.path(), "1");
    second.keep_signed(shelf.0.path(), "2");

    // The signature is shown, and counts if its key is trusted.
    let (code, out, said) = shelf.verify(&[]);
    assert_eq!(code, Some(0), "{said}");
    let shown = format!(
        "nothing is wrong; signed by {}, not trusted, for position",
        own.name
    );
    assert!(out.contains(&shown), "{out}");
    for key in [own.public.to_str().unwrap(), &own.name] {
        let (code, out, said) = shelf.verify(&["--trust", &other.name, "--trust", key]);
        assert_eq!(code, Some(0), "{said}");
        assert!(
            out.contains(&format!("signed by {}, trusted", own.name)),
            "{out}"
        );
    }
    let (code, out, _) = shelf.verify(&[&trust[..], &["--output", "json"]].concat());
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, Some(0), "{found}");
    assert_eq!(found["signature"]["key"], own.name, "{found}");
    assert_eq!(found["signature"]["trusted"], true, "{found}");
    assert_eq!(found["signature"]["position"], found["position"], "{found}");
    let target = scratch.path().join("restored");
    let (code, out, said) = shelf.restore(&target, &trust);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        out.contains(&format!("signed by {}, trusted", own.name)),
        "{out}"
    );
    shelf.refuses(
        &["--trust", &other.name],
        &format!("signed by {}, which is not trusted", own.name),
    );

    // Somebody who can write the backups pays somebody else, with the store of the backup itself.
    let forger = Daemon::start_in(&target, &other.setting());
    pay(&forger, "pay mallory 100").await;
    let forged = saved(&forger).await;
    forger.signal(Signal::TERM);
    forger.ended().await;
    let unsigned = Daemon::start_in(&target, &[]);
    let unsigned_forged = saved(&unsigned).await;
    drop(unsigned);
    let forgery = shelf.manifest("3");
    unsigned_forged.keep_signed(shelf.0.path(), "3");
    assert_eq!(shelf.verify(&[]).0, Some(0), "nothing else finds it");
    shelf.refuses(&trust, "the manifest is not signed");
    forged.keep_signed(shelf.0.path(), "3");
    shelf.refuses(
        &trust,
        &format!("signed by {}, which is not trusted", other.name),
    );
    // The signature of another manifest, of the right key, does not help, with and without trust.
    fs::write(
        &forgery,
        with_block(signed_part(&forged.file), &block(&second.file)),
    )
    .unwrap();
    let changed = format!("the manifest was changed: the signature by {}", own.name);
    shelf.refuses(&trust, &changed);
    shelf.refuses(&["--backup", "3"], &changed);
    let chosen = [&trust[..], &["--backup", "2"]].concat();
    assert_eq!(shelf.verify(&chosen).0, Some(0));
    fs::remove_file(&forgery).unwrap();

    // Forged content in the place of good content.
    let segment = second.content.values().max_by_key(|content| content.len());
    let good = segment.unwrap();
    let path = format!("{}/{}", backup::FILES, ContentDigest::of(good));
    let at = good.windows(9).position(|bytes| bytes == b"pay alice");
    let mut bad = good.clone();
    bad[at.unwrap() + 4..][..5].copy_from_slice(b"carol");
    fs::write(shelf.0.path().join(&path), bad).unwrap();
    let (code, _, said) = shelf.verify(&trust);
    assert_eq!(code, Some(5), "{said}");
    assert!(
        said.contains(&path) && said.contains("does not match its digest"),
        "{said}"
    );
    let target = scratch.path().join("refused");
    let (code, _, said) = shelf.restore(&target, &trust);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("does not match its digest"), "{said}");
}

#[tokio::test]
async fn backups_of_two_stores_with_one_key_are_not_mixed_up() {
    let scratch = private_directory();
    let own = Key::new(scratch.path(), "own");
    let shelf = Shelf::new();
    for (id, payload) in [("1", "pay alice 100"), ("2", "pay bob 7")] {
        let daemon = Daemon::start(&own.setting());
        pay(&daemon, payload).await;
        pay(&daemon, payload).await;
        let saved = saved(&daemon).await;
        saved.keep_signed(shelf.0.path(), id);
    }
    let trust = ["--trust", own.public.to_str().unwrap()];
    let target = scratch.path().join("restored");
    for (code, _, said) in [shelf.verify(&trust), shelf.restore(&target, &trust)] {
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("backups of several stores"), "{said}");
    }
    assert!(!target.exists());
    // The operator may name one, and sees its store.
    let chosen = [&trust[..], &["--backup", "1"]].concat();
    let (code, out, said) = shelf.restore(&target, &chosen);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains(" of store "), "{out}");
}

#[tokio::test]
async fn changed_and_swapped_signatures_are_refused_each_with_a_sentence() {
    let scratch = private_directory();
    let own = Key::new(scratch.path(), "own");
    let trust = ["--trust", own.name.as_str()];
    let daemon = Daemon::start(&own.setting());
    pay(&daemon, "one").await;
    let first = saved(&daemon).await;
    pay(&daemon, "two").await;
    let second = saved(&daemon).await;
    let shelf = Shelf::new();
    first.keep_signed(shelf.0.path(), "1");
    second.keep_signed(shelf.0.path(), "2");
    let manifest = shelf.manifest("2");
    let signed = signed_part(&second.file);
    let good = block(&second.file);
    assert_eq!(with_block(signed, &good), second.file);

    let changed = "the manifest was changed";
    fs::write(&manifest, with_block(signed, &block(&first.file))).unwrap();
    shelf.refuses(&trust, changed);
    fs::write(&manifest, with_block(signed, &[])).unwrap();
    shelf.refuses(&trust, "the manifest is not signed");
    for length in [1, 32, good.len() - SIGNATURE_BYTES, good.len() - 1] {
        fs::write(&manifest, with_block(signed, &good[..length])).unwrap();
        shelf.refuses(&trust, "the manifest is damaged");
    }
    // Every byte of the signature counts, and bytes of the message.
    for at in (backup::KEY_BYTES..good.len()).step_by(7) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&manifest, with_block(signed, &bad)).unwrap();
        let (code, _, said) = shelf.verify(&trust);
        assert_eq!(code, Some(5), "byte {at}: {said}");
        assert!(said.contains(changed), "byte {at}: {said}");
    }
    for at in (20..signed.len()).step_by(signed.len() / 9) {
        let mut bad = signed.to_vec();
        bad[at] ^= 1;
        fs::write(&manifest, with_block(&bad, &good)).unwrap();
        let (code, _, said) = shelf.verify(&trust);
        assert_eq!(code, Some(5), "byte {at}: {said}");
        assert!(said.contains("the manifest"), "byte {at}: {said}");
    }
    // An older manifest in the place of the newest one has its signature: only its time shows it.
    fs::write(&manifest, &first.file).unwrap();
    let (code, out, _) = shelf.verify(&trust);
    assert_eq!(code, Some(0), "{out}");
    let position = first.manifest.position.unwrap();
    assert!(
        out.contains(&format!("trusted, for position {position} at 20")),
        "{out}"
    );
    // The setting asks like the option, and a store has no signature.
    fs::write(&manifest, with_block(signed, &[])).unwrap();
    shelf.refuses(&["--backup-trust", &own.name], "the manifest is not signed");
    let (code, _, said) = ran(wald().arg("verify").arg(scratch.path()).args(trust));
    assert_eq!(code, Some(2), "{said}");
}

/// An empty variable of a script must not turn the verification off.
#[tokio::test]
async fn empty_names_of_trusted_keys_are_refused() {
    let scratch = private_directory();
    let own = Key::new(scratch.path(), "own");
    let daemon = Daemon::start(&[]);
    pay(&daemon, "one").await;
    let shelf = Shelf::new();
    saved(&daemon).await.keep_signed(shelf.0.path(), "1");
    let public = own.public.to_str().unwrap();
    let listed = format!("{public},{}", own.name);
    let is_empty = "the key is empty";
    for (more, code, why) in [
        (&["--trust", ""][..], 2, is_empty),
        (&["--trust", " "], 2, is_empty),
        (&["--trust", ","], 2, "it takes one key"),
        (&["--trust", &listed], 2, "it takes one key"),
        (&["--trust", public, "--trust", ""], 2, is_empty),
        (
            &["--backup-trust", ",", "--trust", public],
            78,
            "backup_trust",
        ),
        (&["--backup-trust", ","], 78, "backup_trust"),
        (&["--backup-trust", " "], 78, "backup_trust"),
        (
            &["--backup-trust", &format!("{public},")],
            78,
            "backup_trust",
        ),
    ] {
        let target = scratch.path().join("restored");
        for (ended, out, said) in [shelf.verify(more), shelf.restore(&target, more)] {
            assert_eq!(ended, Some(code), "{more:?}: {out} {said}");
            assert!(said.contains(why), "{more:?}: {said}");
        }
        assert!(!target.exists(), "{more:?}");
    }
    // The setting takes a list, and an empty setting asks for no signature.
    shelf.refuses(&["--backup-trust", &listed], "the manifest is not signed");
    assert_eq!(shelf.verify(&["--backup-trust", ""]).0, Some(0));
}

#[tokio::test]
async fn keys_are_made_shown_and_refused_with_the_reason() {
    let scratch = private_directory();
    let own = Key::new(scratch.path(), "own");
    let mode = fs::metadata(&own.private).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (code, pem, said) = key_command("public", &own.private);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(pem, fs::read_to_string(&own.public).unwrap());
    let before = fs::read(&own.private).unwrap();
    let (code, _, said) = key_command("new", &own.private);
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("the file exists"), "{said}");
    assert_eq!(fs::read(&own.private).unwrap(), before);

    // A key of another program.
    let published = scratch.path().join("published");
    fs::write(&published, PUBLISHED).unwrap();
    fs::set_permissions(&published, fs::Permissions::from_mode(0o600)).unwrap();
    let (code, pem, said) = key_command("public", &published);
    assert_eq!(code, Some(0), "{said}");
    let name = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
    assert_eq!(said, format!("wald: public key {name}\n"));
    assert_eq!(
        pem,
        "-----BEGIN PUBLIC KEY-----\n\
         MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n\
         -----END PUBLIC KEY-----\n"
    );

    // Lost, truncated, swapped for another kind, readable by everybody: the start is refused.
    let start = |path: &Path| {
        let new = scratch.path().join("new");
        let mut command = wald();
        command.args(["--listen", ":0", "--http-listen", ":0", "--data-dir"]);
        command.arg(&new).arg("--backup-signing-key-file").arg(path);
        let (code, _, said) = ran(&mut command);
        assert_eq!(code, Some(78), "{said}");
        assert!(!new.join("FORMAT").exists(), "nothing is written");
        said
    };
    assert!(start(&scratch.path().join("lost")).contains("cannot be opened"));
    let bad = scratch.path().join("bad");
    for content in [
        &before[..before.len() / 2],
        &fs::read(&own.public).unwrap(),
        b"",
    ] {
        fs::write(&bad, content).unwrap();
        fs::set_permissions(&bad, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(start(&bad).contains("expected a private key of Ed25519"));
    }
    fs::write(&bad, &before).unwrap();
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(start(&bad).contains("chmod o-rwx"));
    let shelf = Shelf::new();
    fs::create_dir(shelf.0.path().join(backup::MANIFESTS)).unwrap();
    for (key, why) in [
        (
            own.private.to_str().unwrap(),
            "expected a public key of Ed25519",
        ),
        ("nowhere", "cannot be opened"),
        (&own.name.to_uppercase(), "cannot be opened"),
    ] {
        let (code, _, said) = shelf.verify(&["--trust", key]);
        assert_eq!(code, Some(78), "{said}");
        assert!(said.contains(why), "{said}");
    }
}

/// A command that runs in a group of its own: the system gives hidden processes to user and group 0, and this shows it where
/// the tests run as root.
fn grouped() -> Command {
    let mut command = wald();
    if rustix::process::geteuid().is_root() {
        command.gid(65534);
    }
    command
}

/// Whether other processes of the user cannot read the memory of a process, and whether it writes no core file.
fn is_hidden(daemon: &Daemon) -> (bool, bool) {
    let directory = format!("/proc/{}", daemon.pid().as_raw_nonzero());
    let owner = |name: &str| {
        let about = fs::metadata(format!("{directory}{name}")).unwrap();
        (about.uid(), about.gid())
    };
    let limits = fs::read_to_string(format!("{directory}/limits")).unwrap();
    let is_core = |line: &&str| line.starts_with("Max core file size");
    let core = limits.lines().find(is_core).unwrap();
    let core = core.split_whitespace().nth(4);
    (owner("") != owner("/environ"), core == Some("0"))
}

#[tokio::test]
async fn memory_of_a_process_is_hidden_before_it_holds_a_key() {
    let scratch = private_directory();
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let own = Key::new(scratch.path(), "own");
    let start = |name: &str, arguments: &[&str]| {
        let directory = scratch.path().join(name);
        Daemon::start_as(&mut grouped(), &directory, arguments, &[])
    };
    let plain = start("plain", &[]);
    assert!(!is_hidden(&plain).0, "the look at /proc finds nothing");
    let signing = start("signing", &own.setting());
    assert_eq!(is_hidden(&signing), (true, true));

    // The command with the key looks at its parent, which has no key yet then.
    let (key, seen, script) = (path("key"), path("seen"), path("script"));
    assert_eq!(ran(wald().args(["key", "new", "--to", &key])).0, Some(0));
    let look = format!(
        "{{ stat -c %u:%g /proc/$PPID /proc/$PPID/environ; grep core /proc/$PPID/limits; }} > {seen}\ncat {key}\n"
    );
    fs::write(&script, look).unwrap();
    let was_hidden = || {
        let seen = fs::read_to_string(&seen).unwrap();
        let lines: Vec<&str> = seen.lines().collect();
        assert_eq!(lines.len(), 3, "{seen}");
        lines[0] != lines[1] && lines[2].split_whitespace().nth(4) == Some("0")
    };
    let command = format!("--encryption-key-command=sh {script}");
    let encrypting = start("encrypting", &[&command]);
    assert!(was_hidden());
    assert_eq!(is_hidden(&encrypting), (true, true));
    fs::remove_file(&seen).unwrap();
    let mut rotate = grouped();
    rotate.args(["key", "rotate", &command, "--data-dir", &path("encrypting")]);
    let (code, _, said) = ran(&mut rotate);
    assert_eq!(code, Some(0), "{said}");
    assert!(was_hidden());
}

#[tokio::test]
async fn backups_of_version_1_are_read_and_the_next_one_stands_beside_them() {
    let shelf = Shelf::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/backups-1.tar.gz");
    let mut unpack = Command::new("tar");
    unpack.arg("-xzf").arg(golden).arg("-C").arg(shelf.0.path());
    assert_eq!(ran(&mut unpack).0, Some(0));
    let (backups, data) = (shelf.0.path().join("backups"), shelf.0.path().join("data"));
    let verify = |more: &[&str]| ran(wald().arg("verify").arg(&backups).args(more));
    for (id, records) in [
        ("20261130T023353.940225Z-8920", 3),
        ("20261130T023353.964469Z-74096", 4),
    ] {
        let (code, out, said) = verify(&["--backup", id]);
        assert_eq!(code, Some(0), "{said}");
        assert!(
            out.contains(&format!("{records} records of 2 logs: nothing is wrong\n")),
            "{out}"
        );
        let target = tempfile::tempdir().unwrap();
        let mut restore = wald();
        restore.arg("restore").arg(&backups).args(["--backup", id]);
        let (code, _, said) = ran(restore.arg("--data-dir").arg(target.path()));
        assert_eq!(code, Some(0), "{said}");
        let daemon = Daemon::start_in(target.path(), &["--segment-bytes", "64KiB"]);
        assert_eq!(self::records(&daemon).await.len(), records);
    }
    // The store goes on, and its next backup lies in the same directory.
    let key = Key::new(shelf.0.path(), "own");
    let arguments = [&key.setting()[..], &["--segment-bytes", "64KiB"]].concat();
    let daemon = Daemon::start_in(&data, &arguments);
    pay(&daemon, "after the upgrade").await;
    let saved = saved(&daemon).await;
    assert!(saved.manifest.files.iter().all(|file| !file.known));
    saved.keep_signed(&backups, "next");
    let (code, out, said) = verify(&["--trust", &key.name]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        out.starts_with("backup next,") && out.contains("5 records"),
        "{out}"
    );
    let (code, _, said) = verify(&[
        "--trust",
        &key.name,
        "--backup",
        "20261130T023353.964469Z-74096",
    ]);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("the manifest is not signed"), "{said}");
}
