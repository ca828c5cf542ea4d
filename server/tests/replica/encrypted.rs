//! Encrypted stores: keys reach the bucket before the records that need them, other nodes have them from there, and keys that
//! were destroyed are nowhere any more.

use super::stand_by::{owner, until_named};
use super::*;
use wald_proto::v1::log_service_client::LogServiceClient;

/// A text that no other byte of a store has by chance.
const MARK: &str = "marked payload, for nobody else";
/// The key ring in the bucket.
const RING: &str = "wald/orders/keys/ring";

/// Wrapping keys.
struct Keys(tempfile::TempDir);

impl Keys {
    fn new() -> Self {
        let keys = Self(private_directory());
        for name in ["key", "other"] {
            let made = ends(
                wald()
                    .args(["key", "new", "--to"])
                    .arg(keys.0.path().join(name)),
            );
            assert!(made.status.success(), "{made:?}");
        }
        keys
    }

    fn file(&self, name: &str) -> String {
        format!(
            "--encryption-key-file={}",
            self.0.path().join(name).display()
        )
    }

    /// Arguments of an encrypted node.
    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let own = [&*self.file("key"), "--encryption-scope=log"];
        let small = ["--segment-bytes", "64KiB", "--max-batch-bytes", "16KiB"];
        let all = own.iter().chain(&small).chain(more);
        all.map(|&word| word.to_owned()).collect()
    }
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

fn encrypted(store: &Store, directory: &Path, node: &str, keys: &Keys, more: &[&str]) -> Daemon {
    start(store, directory, node, &words(&keys.arguments(more)))
}

const STANDS_BY: [&str; 3] = ["--stand-by", "--lease-ttl", "2s"];

/// The ring in the bucket.
fn ring(store: &Store) -> serde_json::Value {
    let text = store.text(RING);
    let (document, _digest) = text.trim_end().rsplit_once('\n').unwrap();
    serde_json::from_str(document).unwrap()
}

/// Numbers of the keys that a log has in the bucket.
fn keys_of(store: &Store, log_id: u64) -> Vec<u64> {
    let ring = ring(store);
    let keys = ring["keys"].as_array().unwrap().iter();
    let own = keys.filter(|key| key["owner"] == format!("log {log_id}"));
    own.map(|key| key["number"].as_u64().unwrap()).collect()
}

/// The files below a directory that have these bytes.
fn with(directory: &Path, bytes: &[u8]) -> Vec<std::path::PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
                continue;
            }
            // Files come and go.
            let content = std::fs::read(&path).unwrap_or_default();
            if content.windows(bytes.len()).any(|part| part == bytes) {
                found.push(path);
            }
        }
    }
    found
}

/// No object of the bucket and no file of a node has a plain byte.
fn is_hidden(store: &Store, directories: &[&Path]) {
    let mark = &MARK.as_bytes()[..12];
    for name in store.names("wald/") {
        let content = store.content(&name);
        assert!(
            !content.windows(mark.len()).any(|part| part == mark),
            "{name}"
        );
    }
    for directory in directories {
        assert_eq!(with(directory, mark), Vec::<std::path::PathBuf>::new());
    }
}

async fn marked(wal: &mut WalServiceClient<Channel>, from: usize, count: usize) {
    for number in from..from + count {
        let payload = format!("{number} {}", MARK.repeat(100));
        replicated(wal, &payload).await.unwrap();
    }
}

async fn id_of(node: &Daemon, log: &str) -> u64 {
    let request = v1::GetLogRequest {
        log: log.to_owned(),
    };
    let found = node.logs().await.get_log(request).await.unwrap();
    found.into_inner().log.unwrap().log_id
}

fn shred(log: &str) -> v1::DeleteLogRequest {
    v1::DeleteLogRequest {
        log: log.to_owned(),
        shred: true,
        ..v1::DeleteLogRequest::default()
    }
}

async fn logged(wal: &mut WalServiceClient<Channel>, log: &str) {
    let request = v1::AppendRequest {
        durability: v1::Durability::Replicated.into(),
        ..append(log, MARK)
    };
    wal.append(request).await.unwrap();
}

#[tokio::test]
async fn stand_by_follows_an_encrypted_owner_and_no_plain_byte_leaves() {
    let store = Store::start();
    let keys = Keys::new();
    let (one, two) = (private_directory(), private_directory());
    let first = encrypted(&store, one.path(), "one", &keys, &STANDS_BY);
    let mut wal = first.wal().await;
    marked(&mut wal, 0, 60).await;
    let second = encrypted(&store, two.path(), "two", &keys, &STANDS_BY);
    until_named(&store, "two").await;
    marked(&mut wal, 60, 30).await;
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    is_hidden(&store, &[one.path(), two.path()]);
    assert_eq!(
        (&ring(&store)["term"], &owner(&store)["keys"]),
        (&1.into(), &ring(&store)["generation"])
    );
    first.signal(Signal::KILL);
    drop(wal);
    first.ended().await;
    second.wait_for_log("wald is serving");
    let mut wal = second.wal().await;
    assert_eq!(filled(&mut wal).await, numbered(90));
    assert_eq!(ring(&store)["term"], 2);
    // A new log gets a key with a number that the first owner never gave.
    logged(&mut wal, "later").await;
    // The keys of the next logs are made ahead.
    for number in 0..70 {
        logged(&mut wal, &format!("later/{number}")).await;
    }
    assert!(!ring(&store)["earlier"].as_array().unwrap().is_empty());
    // The old owner stands by. Its own store keeps the ring that it had.
    let first = encrypted(&store, one.path(), "one", &keys, &STANDS_BY);
    until_named(&store, "one").await;
    for name in ["ring", "ring-2"] {
        assert!(one.path().join("diverged/1/keys").join(name).exists());
        assert!(!one.path().join("keys").join(name).exists());
    }
    marked(&mut wal, 90, 1).await;
    drop(wal);
    second.signal(Signal::TERM);
    first.wait_for_log("wald is serving");
    assert!(second.ended().await.success());
    assert_eq!(filled(&mut first.wal().await).await, numbered(91));
    is_hidden(&store, &[one.path(), two.path()]);
    // It goes on in its directory.
    first.signal(Signal::KILL);
    first.ended().await;
    let first = encrypted(&store, one.path(), "one", &keys, &STANDS_BY);
    assert_eq!(filled(&mut first.wal().await).await, numbered(91));
}

#[tokio::test]
async fn keys_of_a_shredded_log_leave_bucket_and_stand_by_before_the_answer() {
    let store = Store::start();
    let keys = Keys::new();
    let (one, two) = (private_directory(), private_directory());
    let first = encrypted(&store, one.path(), "one", &keys, &STANDS_BY);
    let mut wal = first.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    logged(&mut wal, "gone").await;
    let more = [&STANDS_BY[..], &["--log-filter", "debug"]].concat();
    let second = encrypted(&store, two.path(), "two", &keys, &more);
    until_named(&store, "two").await;
    second.wait_for_log("the key ring of the bucket is open");
    let id = id_of(&first, "gone").await;
    let number = *keys_of(&store, id).first().unwrap();
    first.logs().await.delete_log(shred("gone")).await.unwrap();
    assert_eq!(keys_of(&store, id), [0_u64; 0]);
    for name in store.names("wald/") {
        let content = String::from_utf8_lossy(&store.content(&name)).into_owned();
        assert!(
            !content.contains(&format!("\"number\": {number},")),
            "{name}"
        );
    }
    let open = ring(&store)["keys"].as_array().unwrap().len();
    second.wait_for_log(&format!("\"keys\":{open}"));
    // The bucket's ring forgets the name, too.
    until_store("nothing is to be shredded", || {
        ring(&store)["shredding"] == serde_json::json!([])
    })
    .await;
    let again = first
        .logs()
        .await
        .delete_log(shred("gone"))
        .await
        .unwrap_err();
    assert_eq!(again.code(), Code::NotFound);
}

#[tokio::test]
async fn log_is_not_shredded_while_the_bucket_is_away_and_a_repeat_succeeds() {
    let store = Store::start();
    let keys = Keys::new();
    let one = private_directory();
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    let mut wal = node.wal().await;
    logged(&mut wal, "gone").await;
    let id = id_of(&node, "gone").await;
    store.enter(Mood::Hangs);
    let refused = node
        .logs()
        .await
        .delete_log(shred("gone"))
        .await
        .unwrap_err();
    let told = Told::of(&refused);
    assert_eq!(
        (told.code, &*told.reason),
        (Code::Unavailable, "BUCKET_DOWN")
    );
    assert!(
        refused.message().contains("the key ring within 10 s"),
        "{refused:?}"
    );
    // DURABLE goes on, and the log is there.
    let durable = v1::AppendRequest {
        durability: v1::Durability::Durable.into(),
        ..append("gone", "more")
    };
    wal.append(durable).await.unwrap();
    store.enter(Mood::Answers);
    let begun = Instant::now();
    loop {
        match node.logs().await.delete_log(shred("gone")).await {
            Ok(_) => break,
            Err(status) => assert!(begun.elapsed() < PATIENCE, "{status:?}"),
        }
    }
    assert_eq!(keys_of(&store, id), [0_u64; 0]);
}

#[tokio::test]
async fn erasures_whose_deadline_passes_while_they_wait_do_nothing() {
    let store = Store::start();
    let keys = Keys::new();
    let one = private_directory();
    // Shorter than an erasure waits for the bucket.
    let node = encrypted(&store, one.path(), "one", &keys, &["--request-timeout=5s"]);
    let mut wal = node.wal().await;
    logged(&mut wal, "gone").await;
    logged(&mut wal, "last").await;
    let id = id_of(&node, "gone").await;
    let erases = |mut logs: LogServiceClient<Channel>| {
        tokio::spawn(async move { logs.delete_log(shred("gone")).await })
    };
    let outcome = |answer: Result<_, Status>| {
        let told = Told::of(&answer.unwrap_err());
        assert_eq!(told.reason, "DEADLINE_EXCEEDED");
        told.fact("outcome").to_owned()
    };
    let is_begun = || {
        let ring = std::fs::read_to_string(one.path().join("keys/ring"));
        ring.is_ok_and(|ring| ring.contains("\"gone\""))
    };
    store.enter(Mood::Hangs);
    let first = erases(node.logs().await);
    until_store("the first one has begun", is_begun).await;
    let logs = [node.logs().await, node.logs().await, node.logs().await];
    let others = logs.map(erases);
    assert_eq!(outcome(first.await.unwrap()), "UNKNOWN");
    for other in others {
        assert_eq!(outcome(other.await.unwrap()), "NOT_APPLIED");
    }
    until_store("the first one has given up", || !is_begun()).await;
    store.enter(Mood::Answers);
    // Erasures take turns: this one comes after all of those.
    let begun = Instant::now();
    while let Err(status) = node.logs().await.delete_log(shred("last")).await {
        assert!(begun.elapsed() < PATIENCE, "{status:?}");
    }
    assert_eq!(id_of(&node, "gone").await, id);
    assert!(!keys_of(&store, id).is_empty());
}

#[tokio::test]
async fn erasure_that_waits_does_nothing_once_its_right_has_ended() {
    let store = Store::start();
    let keys = Keys::new();
    let (one, secrets) = (private_directory(), private_directory());
    let file = secrets.path().join("auth.toml");
    let write = |text: &str| {
        let new = secrets.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::set_permissions(&new, Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(new, &file).unwrap();
    };
    let all = r#"["append", "create", "read", "delete"]"#;
    write(&format!(
        "[principal.first]\nallow = [{{ do = {all}, logs = \"\" }}]\n\
         [principal.second]\nallow = [{{ do = [\"list\", \"delete\"], logs = \"\" }}]\n"
    ));
    let [first, second] = ["first", "second"].map(|principal| {
        let mut command = wald();
        command.args(["token", "create", "--principal", principal, "--auth-file"]);
        let made = ends(command.arg(&file));
        format!("Bearer {}", String::from_utf8(made.stdout).unwrap().trim())
    });
    let argument = format!("--auth-file={}", file.display());
    let more = ["--metrics-open", argument.as_str()];
    let node = encrypted(&store, one.path(), "one", &keys, &more);
    let mut wal = node.wal().await;
    for log in ["gone", "kept"] {
        let mut request = Request::new(append(log, MARK));
        request
            .metadata_mut()
            .insert("authorization", first.parse().unwrap());
        wal.append(request).await.unwrap();
    }
    let erases = |mut logs: LogServiceClient<Channel>, log: &str, bearer: &str| {
        let mut request = Request::new(shred(log));
        request
            .metadata_mut()
            .insert("authorization", bearer.parse().unwrap());
        tokio::spawn(async move { logs.delete_log(request).await })
    };
    store.enter(Mood::Hangs);
    let earlier = erases(node.logs().await, "gone", &first);
    until_store("the first one has begun", || {
        let ring = std::fs::read_to_string(one.path().join("keys/ring"));
        ring.is_ok_and(|ring| ring.contains("\"gone\""))
    })
    .await;
    let waits = erases(node.logs().await, "kept", &second);
    let started = "grpc_server_started_total{grpc_method=\"DeleteLog\",grpc_service=\"wald.v1.LogService\",\
                   grpc_type=\"unary\"}";
    until_store("the second one waits", || node.metric(started) == 2.0).await;
    let text = std::fs::read_to_string(&file).unwrap();
    write(&text.replace("[\"list\", \"delete\"]", "[\"list\"]"));
    node.signal(Signal::HUP);
    node.wait_for_log("the changed auth_file is in force");
    store.enter(Mood::Answers);
    let refused = waits.await.unwrap().unwrap_err();
    assert_eq!(Told::of(&refused).reason, "NOT_ALLOWED", "{refused:?}");
    let mut request = Request::new(v1::GetLogRequest {
        log: "kept".to_owned(),
    });
    request
        .metadata_mut()
        .insert("authorization", second.parse().unwrap());
    node.logs().await.get_log(request).await.unwrap();
    let _ = earlier.await.unwrap();
}

#[tokio::test]
async fn ring_that_someone_replaced_in_the_bucket_is_named_until_it_is_gone() {
    let store = Store::start();
    let keys = Keys::new();
    let one = private_directory();
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    let mut wal = node.wal().await;
    logged(&mut wal, "gone").await;
    store.add(RING, b"no ring".to_vec());
    let refused = node.logs().await.delete_log(shred("gone")).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(
        refused.message().contains("keys/ring: it is damaged"),
        "{refused:?}"
    );
    node.wait_for_log("the key ring in the bucket cannot be replaced");
    store.change(RING, |_| None);
    node.logs().await.delete_log(shred("gone")).await.unwrap();
    until_store("nothing is to be shredded", || {
        ring(&store)["shredding"] == serde_json::json!([])
    })
    .await;
}

#[tokio::test]
async fn stand_by_takes_over_with_a_wrapping_key_that_came_later() {
    let store = Store::start();
    let keys = Keys::new();
    let (one, two) = (private_directory(), private_directory());
    let first = encrypted(&store, one.path(), "one", &keys, &STANDS_BY);
    let mut wal = first.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    let second = encrypted(&store, two.path(), "two", &keys, &STANDS_BY);
    until_named(&store, "two").await;
    let wrapped = |store: &Store| ring(store)["keys"][0]["wrapped_by"].clone();
    let before = wrapped(&store);
    let file = keys.0.path().join("key");
    let [old, new] = ["key", "other"].map(|name| std::fs::read(keys.0.path().join(name)).unwrap());
    for lines in [[&*old, &*new].concat(), new] {
        std::fs::write(&file, lines).unwrap();
        let written = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        first.signal(Signal::HUP);
        let read = "wald_reload_last_success_timestamp_seconds{kind=\"encryption_key\"}";
        until_store("the file is in force", || first.metric(read) > written).await;
    }
    replicated(&mut wal, "1").await.unwrap();
    drop(wal);
    first.signal(Signal::KILL);
    first.ended().await;
    second.wait_for_log("wald is serving");
    let mut wal = second.wal().await;
    assert_eq!(payloads(&mut wal).await, numbered(2));
    replicated(&mut wal, "2").await.unwrap();
    assert_ne!(wrapped(&store), before);
}

#[tokio::test]
async fn nodes_without_the_key_are_refused_before_they_change_anything() {
    let store = Store::start();
    let keys = Keys::new();
    let (one, two) = (private_directory(), private_directory());
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    replicated(&mut node.wal().await, MARK).await.unwrap();
    node.signal(Signal::TERM);
    assert!(node.ended().await.success());
    let before = store.names("wald/");
    let other = keys.file("other");
    for more in [&[][..], &[&*other]] {
        for how in [&["--take-over"][..], &STANDS_BY] {
            let all = [more, how].concat();
            let (code, log) = refused(&store, two.path(), "two", &all);
            assert_eq!(code, Some(78), "{log}");
            let reason = match more {
                [] => "s3://wald/orders: the records of this store are encrypted",
                _ => "is wrapped with the key",
            };
            assert!(log.contains(reason), "{log}");
            assert!(
                more.is_empty() || log.contains("s3://wald/orders/keys/ring: data key"),
                "{log}"
            );
        }
    }
    assert_eq!(std::fs::read_dir(two.path()).unwrap().count(), 0);
    assert_eq!(store.names("wald/"), before);
    let (code, log) = refused(&store, one.path(), "one", &[]);
    assert_eq!(code, Some(78), "{log}");
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    assert_eq!(payloads(&mut node.wal().await).await, [MARK]);
}

#[tokio::test]
async fn copy_of_an_encrypted_replica_has_its_keys_by_itself() {
    let store = Store::start();
    let keys = Keys::new();
    let (one, copy) = (private_directory(), private_directory());
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    marked(&mut node.wal().await, 0, 30).await;
    let (code, _, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(0), "{log}");
    let data_dir = copy.path().join("copy");
    let target = ["restore", "--data-dir", data_dir.to_str().unwrap()];
    let (code, out, log) = command(&store, &target);
    assert_eq!(code, Some(0), "{out} {log}");
    let key = keys.file("key");
    let copied = Daemon::start_in(&data_dir, &[&*key, "--encryption-scope=log"]);
    assert_eq!(filled(&mut copied.wal().await).await, numbered(30));
    let drill = [
        "restore",
        "--drill",
        "--drill-in",
        copy.path().to_str().unwrap(),
        &*key,
    ];
    let (code, out, log) = command(&store, &drill);
    assert_eq!(code, Some(0), "{out} {log}");
    assert!(out.contains("30 records were read back"), "{out}");
    // A copy that an operator names comes first.
    let foreign = copy.path().join("foreign");
    std::fs::write(&foreign, "no ring").unwrap();
    let data_dir = copy.path().join("second");
    let named = [
        "restore",
        "--key-ring",
        foreign.to_str().unwrap(),
        "--data-dir",
        data_dir.to_str().unwrap(),
    ];
    let (code, _, log) = command(&store, &named);
    assert_eq!(code, Some(78), "{log}");
}

/// `wald key` on a directory: whether it succeeds, and its words.
fn key(keys: &Keys, directory: &Path, words: &[&str]) -> (bool, String) {
    let mut command = wald();
    command
        .arg("key")
        .args(words)
        .arg("--data-dir")
        .arg(directory)
        .arg(keys.file("key"));
    let done = ends(&mut command);
    let text = [done.stdout, done.stderr].concat();
    (
        done.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[tokio::test]
async fn rotated_lost_and_older_rings_agree_with_the_bucket() {
    let store = Store::start();
    let keys = Keys::new();
    let one = private_directory();
    // A replica that was plain before.
    let node = start(&store, one.path(), "one", &[]);
    replicated(&mut node.wal().await, "0").await.unwrap();
    node.signal(Signal::TERM);
    node.ended().await;
    assert!(store.names("wald/orders/keys/").is_empty());
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    let mut wal = node.wal().await;
    replicated(&mut wal, "1").await.unwrap();
    let exported = keys.0.path().join("exported");
    let (is_done, said) = key(
        &keys,
        one.path(),
        &["export", "--to", exported.to_str().unwrap()],
    );
    assert!(is_done, "{said}");
    // A running daemon answers once the bucket has the new keys.
    let before = ring(&store)["highest"].as_u64().unwrap();
    let (is_done, said) = key(&keys, one.path(), &["rotate"]);
    assert!(is_done, "{said}");
    assert!(ring(&store)["highest"].as_u64().unwrap() > before);
    replicated(&mut wal, "2").await.unwrap();
    drop(wal);
    node.signal(Signal::TERM);
    node.ended().await;
    // Without a daemon the next start writes it.
    let before = ring(&store)["highest"].as_u64().unwrap();
    let (is_done, said) = key(&keys, one.path(), &["rotate"]);
    assert!(is_done, "{said}");
    assert_eq!(ring(&store)["highest"].as_u64().unwrap(), before);
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    assert!(ring(&store)["highest"].as_u64().unwrap() > before);
    node.signal(Signal::TERM);
    node.ended().await;
    // Both copies are lost: the bucket has the ring.
    for name in ["ring", "ring-2"] {
        std::fs::remove_file(one.path().join("keys").join(name)).unwrap();
    }
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    assert_eq!(payloads(&mut node.wal().await).await, numbered(3));
    node.signal(Signal::TERM);
    node.ended().await;
    // An older copy takes the place of the bucket's ring only if an operator says so.
    let (is_done, said) = key(&keys, one.path(), &["import", exported.to_str().unwrap()]);
    assert!(!is_done && said.contains("with --older"), "{said}");
    let older = ["import", "--older", exported.to_str().unwrap()];
    let (is_done, said) = key(&keys, one.path(), &older);
    assert!(is_done, "{said}");
    let node = encrypted(&store, one.path(), "one", &keys, &[]);
    let mut wal = node.wal().await;
    let now = ring(&store);
    assert_eq!(now["replaces"], false);
    replicated(&mut wal, "3").await.unwrap();
    let scan = v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(2)),
        ..v1::ReadRequest::default()
    };
    // Its key is in no ring any more, unless the sorter was faster.
    if let Err(lost) = wal.read(scan).await {
        assert_eq!(Told::of(&lost).reason, "KEY_MISSING");
    }
}
