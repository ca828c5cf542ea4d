//! Nodes that stand by: an owner that dies, sleeps, is cut off, or hands the store over.

use super::*;
use tonic_types::StatusExt as _;

/// Short, so that the tests are.
const TTL: Duration = Duration::from_secs(2);

struct Node {
    daemon: Daemon,
    directory: tempfile::TempDir,
}

fn node_in(store: &Store, directory: &Path, name: &str) -> Daemon {
    let more = ["--stand-by", "--lease-ttl", "2s"];
    start(store, directory, name, &more)
}

fn node(store: &Store, name: &str) -> Node {
    let directory = private_directory();
    let daemon = node_in(store, directory.path(), name);
    Node { daemon, directory }
}

impl Node {
    fn name(&self) -> &str {
        self.daemon.start["grpc"].as_str().unwrap()
    }

    /// Kills the process, and starts it again with the same directory.
    async fn killed(self, store: &Store, name: &str) -> Self {
        self.daemon.signal(Signal::KILL);
        self.daemon.ended().await;
        Self {
            daemon: node_in(store, self.directory.path(), name),
            directory: self.directory,
        }
    }

    /// Appends at a level as soon as this node takes it.
    async fn takes(&self, payload: &str, level: v1::Durability) -> Duration {
        let begun = Instant::now();
        loop {
            match self
                .daemon
                .wal()
                .await
                .append(request(payload, level))
                .await
            {
                Ok(_) => return begun.elapsed(),
                Err(status) => assert!(begun.elapsed() < PATIENCE, "{status:?}"),
            }
            tokio::task::yield_now().await;
        }
    }
}

/// The owner's record.
pub(crate) fn owner(store: &Store) -> serde_json::Value {
    let text = store.text("wald/orders/shards/0/owner");
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["value"].clone()
}

pub(crate) async fn until_named(store: &Store, name: &str) {
    let begun = Instant::now();
    while owner(store)["stand_bys"] != serde_json::json!([name]) {
        assert!(begun.elapsed() < PATIENCE, "{}", owner(store));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn stand_by_whose_directory_takes_no_store_is_not_named() {
    let store = Store::start();
    let one = node(&store, "one");
    let mut wal = one.daemon.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    let directory = private_directory();
    // As a start that was killed leaves it.
    let left = directory.path().join("FORMAT.new");
    std::fs::write(&left, "").unwrap();
    let two = node_in(&store, directory.path(), "two");
    // The line may come before the node stands by.
    let is_said = |line: &String| line.contains("FORMAT.new");
    if !two.before.iter().any(is_said) {
        two.wait_for_log("FORMAT.new");
    }
    assert_ne!(owner(&store)["stand_bys"], serde_json::json!(["two"]));
    std::fs::remove_file(&left).unwrap();
    until_named(&store, "two").await;
}

/// logrotate renames the file and sends SIGHUP.
#[tokio::test]
async fn stand_by_opens_its_audit_log_again_on_sighup() {
    let store = Store::start();
    let _one = node(&store, "one");
    let (directory, logs) = (private_directory(), private_directory());
    let path = logs.path().join("audit.log");
    let audit = format!("--audit-log={}", path.display());
    let more = ["--stand-by", "--lease-ttl", "2s", audit.as_str()];
    let two = start(&store, directory.path(), "two", &more);
    assert_eq!(two.start["message"], "wald is standing by");
    std::fs::rename(&path, logs.path().join("audit.1")).unwrap();
    two.signal(Signal::HUP);
    let is_open = || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        text.contains("\"event\":\"reopen\"")
    };
    until_store("a new audit log begins", is_open).await;
}

#[tokio::test]
async fn stand_by_follows_a_dead_owner_and_the_old_one_stands_by_then() {
    let store = Store::start();
    let one = node(&store, "one");
    let mut wal = one.daemon.wal().await;
    for payload in numbered(19) {
        replicated(&mut wal, &payload).await.unwrap();
    }
    let two = node(&store, "two");
    assert_eq!(two.daemon.start["message"], "wald is standing by");
    assert_eq!(two.daemon.start["owner"], one.name());
    // The owner answers.
    let answer = replicated(&mut two.daemon.wal().await, "19").await.unwrap();
    assert_eq!(answer.durability(), v1::Durability::Replicated);
    until_named(&store, "two").await;
    let died = Instant::now();
    let one = one.killed_only().await;
    two.takes("20", v1::Durability::Replicated).await;
    println!("the stand-by serves after {:?}", died.elapsed());
    // A take-over needs one term: it serves in the one that fenced the owner.
    assert_eq!(owner(&store)["term"], 2);
    let mut wal = two.daemon.wal().await;
    assert_eq!(payloads(&mut wal).await, numbered(21));

    // The old owner comes back: its directory has another end.
    let one = Node {
        daemon: node_in(&store, one.path(), "one"),
        directory: one,
    };
    assert_eq!(one.daemon.start["owner"], two.name());
    until_named(&store, "one").await;
    assert!(one.directory.path().join("diverged/1/FORMAT").exists());
    replicated(&mut wal, "21").await.unwrap();

    // A planned end hands the store over.
    drop(wal);
    let begun = Instant::now();
    two.daemon.signal(Signal::TERM);
    // Calls before go on to the owner.
    one.daemon.wait_for_log("wald is serving");
    one.takes("22", v1::Durability::Replicated).await;
    println!("handed over within {:?}", begun.elapsed());
    assert!(two.daemon.ended().await.success());
    assert_eq!(payloads(&mut one.daemon.wal().await).await, numbered(23));
    assert!(
        !one.directory
            .path()
            .join("standby")
            .read_dir()
            .unwrap()
            .any(|_| true)
    );
}

impl Node {
    async fn killed_only(self) -> tempfile::TempDir {
        self.daemon.signal(Signal::KILL);
        self.daemon.ended().await;
        self.directory
    }
}

#[tokio::test]
async fn killed_owner_goes_on_in_its_directory_before_anybody_follows() {
    let store = Store::start();
    let one = node(&store, "one");
    let two = node(&store, "two");
    until_named(&store, "two").await;
    one.takes("0", v1::Durability::Durable).await;
    let one = one.killed(&store, "one").await;
    assert_eq!(one.daemon.start["message"], "wald is serving");
    one.takes("1", v1::Durability::Replicated).await;
    assert_eq!(payloads(&mut one.daemon.wal().await).await, numbered(2));
    assert_eq!(owner(&store)["node"], "one");
    until_named(&store, "two").await;
    drop(two);
}

#[tokio::test]
async fn stand_by_follows_an_owner_that_dies_at_each_start() {
    let store = Store::start();
    let one = node(&store, "one");
    one.takes("0", v1::Durability::Replicated).await;
    let two = node(&store, "two");
    until_named(&store, "two").await;
    let directory = one.killed_only().await;
    // The end of the journal cannot be read any more.
    let segments = std::fs::read_dir(directory.path().join("journal")).unwrap();
    let segments = segments.map(|entry| entry.unwrap().path());
    let newest = segments.filter(|path| path.extension().is_some_and(|end| end == "seg"));
    let newest = newest.max().unwrap();
    std::fs::remove_file(&newest).unwrap();
    std::fs::create_dir(&newest).unwrap();
    // A service manager starts it again at once.
    let starts = || {
        wald()
            .arg("--data-dir")
            .arg(directory.path())
            .args(["--listen", ":0", "--http-listen", ":0"])
            .args(arguments(
                &store,
                "one",
                &["--stand-by", "--lease-ttl", "2s"],
            ))
            .envs(CREDENTIALS)
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let (mut old, mut ends, begun) = (starts(), 0, Instant::now());
    let serves = |line: String| line.contains("wald is serving");
    while !two.daemon.log.try_iter().any(serves) {
        if let Some(status) = old.try_wait().unwrap() {
            assert_eq!(status.code(), Some(74));
            (old, ends) = (starts(), ends + 1);
        }
        assert!(begun.elapsed() < PATIENCE / 2, "{}", owner(&store));
        tokio::time::sleep(TTL / 100).await;
    }
    old.kill().unwrap();
    old.wait().unwrap();
    // On a slow machine the starts may be further apart than the ttl.
    assert!(ends <= 3, "the next process leaves the store alone");
    two.takes("1", v1::Durability::Replicated).await;
    assert_eq!(payloads(&mut two.daemon.wal().await).await, numbered(2));
    assert!(owner(&store)["starts"].is_null());
}

#[tokio::test]
async fn fenced_owner_stands_by_although_a_signal_came_meanwhile() {
    let store = Store::start();
    let secrets = private_directory();
    let file = secrets.path().join("credentials");
    let text = "aws_access_key_id = test1234\naws_secret_access_key = test12345678\n";
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let (one, two) = (private_directory(), private_directory());
    let more = [
        "--stand-by",
        "--lease-ttl",
        "2s",
        "--bucket-credentials-file",
        file.to_str().unwrap(),
    ];
    let old = start(&store, one.path(), "one", &more);
    let mut wal = old.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    // The old owner asks whether another process has its name, and gets no answer.
    store.hold(vec!["nodes/one".to_owned()]);
    let _new = start(&store, two.path(), "two", &["--take-over"]);
    replicated(&mut wal, "lost").await.unwrap_err();
    drop(wal);
    let fenced = || old.metric("wald_fenced_total") > 0.0;
    until_store("the old owner is fenced", fenced).await;
    old.signal(Signal::HUP);
    old.wait_for_log("the credentials of the bucket were read again");
    store.hold(Vec::new());
    old.wait_for_log("wald is standing by");
}

/// Whether an old owner has said that it may not be the owner, or has closed the connection.
fn is_refusal(status: &Status) -> bool {
    let details = status.get_error_details();
    let reason = details.error_info().map(|info| info.reason.clone());
    let known = ["BUCKET_DOWN", "MOVED", "REPLICATION_UNKNOWN"];
    reason.is_none_or(|reason| known.contains(&&*reason))
}

#[tokio::test]
async fn owner_that_sleeps_acks_nothing_after_another_has_taken_over() {
    let store = Store::start();
    let one = node(&store, "one");
    let two = node(&store, "two");
    one.takes("0", v1::Durability::Replicated).await;
    until_named(&store, "two").await;
    let (mut asleep, mut reader) = (one.daemon.wal().await, one.daemon.wal().await);
    one.daemon.signal(Signal::STOP);
    two.takes("1", v1::Durability::Durable).await;
    // These reach the old owner the moment it wakes. It has no lease any more.
    let late = request("lost", v1::Durability::Durable);
    let late = tokio::spawn(async move { asleep.append(late).await });
    let tail = v1::GetTailRequest {
        log: "a".to_owned(),
        ..v1::GetTailRequest::default()
    };
    let stale = tokio::spawn(async move { reader.get_tail(tail).await });
    one.daemon.signal(Signal::CONT);
    let late = late.await.unwrap().unwrap_err();
    assert!(is_refusal(&late), "{late:?}");
    let stale = stale.await.unwrap().unwrap_err();
    assert!(is_refusal(&stale), "{stale:?}");
    // It begins again, in the same process, as a stand-by.
    one.daemon.wait_for_log("wald is standing by");
    until_named(&store, "one").await;
    assert_eq!(payloads(&mut two.daemon.wal().await).await, numbered(2));
}

#[tokio::test]
async fn new_nodes_that_start_together_make_one_store() {
    let store = Store::start();
    let names = ["one", "two", "three"];
    let starts = names.map(|name| {
        let directory = private_directory();
        let path = directory.path().to_owned();
        let arguments = arguments(&store, name, &["--stand-by", "--lease-ttl", "2s"]);
        let started = std::thread::spawn(move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            Daemon::start_with(&path, &arguments, &CREDENTIALS)
        });
        (directory, started)
    });
    let nodes = starts.map(|(directory, started)| Node {
        daemon: started.join().unwrap(),
        directory,
    });
    let serving = nodes
        .iter()
        .filter(|node| node.daemon.start["message"] == "wald is serving");
    assert_eq!(serving.count(), 1);
    let begun = Instant::now();
    while owner(&store)["stand_bys"]
        .as_array()
        .is_none_or(|names| names.len() < 2)
    {
        assert!(begun.elapsed() < PATIENCE, "{}", owner(&store));
        tokio::time::sleep(TTL / 100).await;
    }
}

#[tokio::test]
async fn node_id_of_two_processes_is_named_and_one_of_them_ends() {
    let store = Store::start();
    let one = node(&store, "one");
    one.takes("0", v1::Durability::Replicated).await;
    // The stand-by, and then the owner.
    for (first, name) in [(node(&store, "two"), "two"), (one, "one")] {
        let second = node(&store, name);
        let line = first.daemon.wait_for_log("with the node_id");
        assert!(line.contains(&format!("{name}\\\"")), "{line}");
        assert!(
            line.contains(second.name()) && line.contains("of its own"),
            "{line}"
        );
        let ended = tokio::time::timeout(PATIENCE, first.daemon.ended()).await;
        assert_eq!(ended.unwrap().code(), Some(78));
    }
}

#[tokio::test]
async fn values_of_lease_ttl_that_differ_are_reported_and_each_counts() {
    let store = Store::start();
    let one = node(&store, "one");
    one.takes("0", v1::Durability::Replicated).await;
    let directory = private_directory();
    let two = start(
        &store,
        directory.path(),
        "two",
        &["--stand-by", "--lease-ttl", "4s"],
    );
    let line = one.daemon.wait_for_log("different values of lease_ttl");
    assert!(line.contains("one 2000 ms, two 4000 ms"), "{line}");
    // Longer than the owner's own ttl, and shorter than that of the stand-by.
    until_named(&store, "two").await;
    for _ in 0..15 {
        tokio::time::sleep(TTL / 10).await;
        assert_eq!(owner(&store)["stand_bys"], serde_json::json!(["two"]));
    }
    let begun = Instant::now();
    one.killed_only().await;
    two.wait_for_log("this node takes the store over");
    assert!(begun.elapsed() >= TTL * 9 / 10, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn node_id_that_no_list_shows_is_refused() {
    let store = Store::start();
    let directory = private_directory();
    for name in ["n".repeat(101), "rack/one".to_owned()] {
        let (code, log) = refused(&store, directory.path(), &name, &["--stand-by"]);
        assert_eq!(code, Some(78), "{log}");
        assert!(
            log.contains("node_id") && log.contains("at most 100"),
            "{log}"
        );
    }
}

/// Whether the stand-by keeps these files of content.
fn keeps_all(names: &[String], directory: &Path) -> bool {
    let mut digests = names.iter().filter_map(|name| name.rsplit('/').next());
    digests.all(|digest| directory.join("standby").join(digest).exists())
}

#[tokio::test]
async fn stand_by_stays_named_while_it_fetches_new_content_for_long() {
    let store = Store::start();
    let one = private_directory();
    let arguments = [&SMALL[..6], &["--stand-by", "--lease-ttl", "2s"]].concat();
    let first = start(&store, one.path(), "one", &arguments);
    fill(&mut first.wal().await, 0, 60).await;
    let two = node(&store, "two");
    until_named(&store, "two").await;
    store.hold(vec!["/content/".to_owned()]);
    fill(&mut first.wal().await, 60, 60).await;
    until_store("the stand-by fetches", || !store.held().is_empty()).await;
    // A stand-by without news counts for 10 s.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(13) {
        tokio::time::sleep(TTL / 10).await;
        assert_eq!(owner(&store)["stand_bys"], serde_json::json!(["two"]));
    }
    first.signal(Signal::KILL);
    first.ended().await;
    store.hold(Vec::new());
    two.takes("120", v1::Durability::Replicated).await;
    let mut wal = two.daemon.wal().await;
    assert_eq!(filled(&mut wal).await, numbered(121));
}

#[tokio::test]
async fn take_over_reads_no_content_that_the_stand_by_keeps() {
    let store = Store::start();
    let one = private_directory();
    // Content stays in the bucket.
    let arguments = [&SMALL[..6], &["--stand-by", "--lease-ttl", "2s"]].concat();
    let owner = start(&store, one.path(), "one", &arguments);
    fill(&mut owner.wal().await, 0, 60).await;
    let two = node(&store, "two");
    until_named(&store, "two").await;
    // The owner may upload more at any time: the stand-by need not keep that yet.
    let mut kept = Vec::new();
    until_store("the stand-by keeps the content", || {
        kept = store.names(CONTENT);
        !kept.is_empty() && keeps_all(&kept, two.directory.path())
    })
    .await;
    store.hold(kept);
    owner.signal(Signal::KILL);
    owner.ended().await;
    two.takes("60", v1::Durability::Replicated).await;
    assert_eq!(
        filled(&mut two.daemon.wal().await).await,
        numbered(61),
        "nothing is lost"
    );
    store.hold(Vec::new());
}
