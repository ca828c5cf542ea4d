//! `walbench` against a real daemon: every workload, for a short count. The daemon must hold
//! all records that it reports as acked.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails where it stands"
)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;
use wald_client::{Client, SyncTarget};

/// The daemon's binary, which is another package's: the one that `WALD_BINARY` names, or that
/// was built beside this test, as with the whole workspace; else it is built.
fn daemon_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(binary) = std::env::var_os("WALD_BINARY") {
            return binary.into();
        }
        let beside = Path::new(env!("CARGO_BIN_EXE_walbench")).with_file_name("wald");
        if beside.is_file() {
            return beside;
        }
        let mut build = Command::new(env!("CARGO"));
        build.current_dir(env!("CARGO_MANIFEST_DIR")).args([
            "build",
            "--quiet",
            "-p",
            "wald-server",
            "--bin",
            "wald",
        ]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
        beside
    })
}

/// A daemon on free ports and a directory that goes away with it.
struct Daemon {
    child: Child,
    _directory: TempDir,
    grpc: String,
    http: String,
}

impl Daemon {
    fn start(arguments: &[&str]) -> Self {
        // With auth_file a daemon refuses a directory that others can open.
        let directory = tempfile::Builder::new()
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir()
            .unwrap();
        let mut command = Command::new(daemon_binary());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("WALD_") {
                command.env_remove(name);
            }
        }
        let mut child = command
            .arg("--data-dir")
            .arg(directory.path())
            .args(["--listen", ":0", "--http-listen", ":0"])
            .args(["--log-format", "json", "--segment-bytes", "16MiB"])
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let start = loop {
            let line = lines.next().expect("the daemon ended").unwrap();
            let event: Value = serde_json::from_str(&line).unwrap_or_default();
            if event["message"] == "wald is serving" {
                break event;
            }
        };
        // Goes on reading, so that the daemon never waits for a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let address = |name: &str| start[name].as_str().unwrap().to_owned();
        Self {
            child,
            _directory: directory,
            grpc: format!("http://{}", address("grpc")),
            http: format!("http://{}", address("http")),
        }
    }

    fn bench(&self, arguments: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_walbench"))
            .args(arguments.split_whitespace())
            .args(["--endpoint", &self.grpc, "--metrics", &self.http])
            .output()
            .unwrap()
    }

    /// The report of a run that must go well.
    fn report(&self, arguments: &str) -> Value {
        let ran = self.bench(&format!("{arguments} --output json"));
        let stderr = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{arguments}: {stderr}");
        serde_json::from_slice(&ran.stdout).unwrap()
    }

    /// Records that the daemon holds in the logs with that prefix.
    async fn records(&self, prefix: &str) -> u64 {
        let client = Client::connect(self.grpc.clone()).await.unwrap();
        // A record that was acked when written is listed once it is flushed.
        client.sync(SyncTarget::Device, None).await.unwrap();
        let mut records = 0;
        let mut token = None;
        loop {
            let page = client.list_logs(prefix, 1_000, token).await.unwrap();
            records += page.logs.iter().map(|log| log.tail_lsn()).sum::<u64>();
            token = page.next_page_token;
            if token.is_none() {
                return records;
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn figure(report: &Value) -> &Value {
    &report["entries"][0]["wald"]["median"]["figures"][0]
}

#[tokio::test]
async fn appends_of_every_kind_are_counted_as_the_daemon_holds_them() {
    let daemon = Daemon::start(&["--echo"]);
    for (load, acks, records) in [
        ("append --logs 10", 200, 200),
        ("written --in-flight 3", 200, 200),
        ("append --in-flight 8 --rate 2000", 200, 200),
        ("batch --batch 7 --in-flight 2", 30, 210),
        ("session --in-flight 50", 300, 300),
        ("session --batch 5 --in-flight 9 --rate 2000", 40, 200),
        ("follow", 50, 50),
        ("follow --rate 1000 --in-flight 4", 50, 50),
        ("istio --items 5000", 5_000, 5_000),
    ] {
        let prefix = load.replace([' ', '-'], "");
        let echo = if load.starts_with("follow") {
            ""
        } else {
            "--echo"
        };
        let count = if load.starts_with("istio") {
            ""
        } else {
            "--count"
        };
        let count = count.replace("--count", &format!("--count {acks}"));
        let report = daemon.report(&format!(
            "{load} {count} {echo} --warm-up 0s --prefix {prefix}"
        ));
        let figure = figure(&report);
        assert_eq!(figure["acks"], acks, "{load}");
        assert_eq!(figure["records"], records, "{load}");
        assert_eq!(figure["records_in_all"], records, "{load}");
        assert_eq!(figure["errors"], serde_json::json!({}), "{load}");
        assert!(figure["latency_us"]["p50"].as_f64() > Some(0.0), "{load}");
        // A follower's log begins with a record that makes it.
        let made = u64::from(load.starts_with("follow"));
        assert_eq!(daemon.records(&prefix).await, records + made, "{load}");
        let entry = &report["entries"][0];
        if echo.is_empty() {
            assert!(figure["delivery_us"]["p50"].as_f64() > Some(0.0));
            assert!(entry["echo"].is_null());
        } else {
            let echo = &entry["echo"]["median"]["figures"][0];
            assert_eq!(echo["records"], records, "{load}");
            assert!(entry["ratio"].as_f64() > Some(0.0), "{load}");
        }
    }
}

#[test]
fn loads_go_over_tls_with_a_token() {
    let files = tempfile::tempdir().unwrap();
    let path = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let private = |name: &str, text: &str| {
        let mut options = std::fs::OpenOptions::new();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path(name));
        file.unwrap().write_all(text.as_bytes()).unwrap();
    };
    std::fs::write(path("cert.pem"), made.cert.pem()).unwrap();
    private("key.pem", &made.signing_key.serialize_pem());
    private(
        "auth.toml",
        "[principal.bench]\nallow = [{ do = [\"append\", \"create\", \"read\"], logs = \"\" }, { do = [\"metrics\"] }]\n",
    );
    let created = Command::new(daemon_binary())
        .args(["token", "create", "--principal", "bench", "--expires", "1d"])
        .args(["--to", &path("token"), "--auth-file", &path("auth.toml")])
        .output()
        .unwrap();
    assert!(created.status.success(), "{created:?}");
    let daemon = Daemon::start(&[
        "--tls-cert",
        &path("cert.pem"),
        "--tls-key",
        &path("key.pem"),
        "--auth-file",
        &path("auth.toml"),
    ]);
    let bench = |arguments: &str, token: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_walbench"));
        command
            .args(arguments.split_whitespace())
            .args([
                "--endpoint",
                &daemon.grpc.replace("http://127.0.0.1", "https://localhost"),
            ])
            .args(["--tls-ca", &path("cert.pem"), "--metrics", &daemon.http])
            .args(["--warm-up", "0s", "--output", "json"]);
        if token {
            command.args(["--token-file", &path("token")]);
        }
        command.output().unwrap()
    };
    for load in [
        "append --count 100",
        "session --count 100 --in-flight 10",
        "scan --count 1 --filled 100",
        "follow --count 20",
    ] {
        let ran = bench(load, true);
        let stderr = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{load}: {stderr}");
        let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
        assert!(figure(&report)["records"].as_u64() > Some(0), "{load}");
        assert!(
            !report["entries"][0]["wald"]["median"]["server"].is_null(),
            "{load}"
        );
    }
    let ran = bench("append --count 1", false);
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert!(
        !ran.status.success() && stderr.contains("NO_CREDENTIAL"),
        "{stderr}"
    );
}

#[tokio::test]
async fn warm_up_is_not_counted_and_is_acked_all_the_same() {
    let daemon = Daemon::start(&[]);
    let report = daemon.report("append --count 100 --warm-up 300ms --prefix warm --rounds 3");
    let rounds = report["entries"][0]["wald"]["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 3);
    let mut acked = 0;
    for round in rounds {
        let figure = &round["figures"][0];
        assert_eq!(figure["acks"], 100);
        assert!(figure["records_in_all"].as_u64() > Some(100));
        acked += figure["records_in_all"].as_u64().unwrap();
    }
    assert_eq!(daemon.records("warm").await, acked);
    let server = &report["entries"][0]["wald"]["median"]["server"];
    assert!(server["flushes"].as_f64() > Some(0.0), "{server}");
    assert!(server["rss_bytes"].as_f64() > Some(0.0), "{server}");
    assert!(server["cpu_seconds"].as_f64() > Some(0.0), "{server}");
}

#[tokio::test]
async fn scans_and_reads_get_what_was_filled_in() {
    let daemon = Daemon::start(&["--echo"]);
    let scanned = daemon.report("scan --filled 3000 --count 4 --echo --warm-up 0s");
    let scan = figure(&scanned);
    assert_eq!(scan["acks"], 4);
    assert_eq!(scan["records"], 12_000);
    assert_eq!(scan["bytes"], 12_000 * 128);
    assert_eq!(daemon.records("bench").await, 3_000);
    let read = daemon.report("read --filled 3000 --count 500 --echo --warm-up 0s");
    assert_eq!(figure(&read)["records"], 500);
    assert_eq!(figure(&read)["bytes"], 500 * 128);
    // Reads use a log of their own, in smaller batches; the second time it already exists.
    assert_eq!(daemon.records("bench").await, 6_000);
    daemon.report("read --filled 3000 --count 10 --warm-up 0s");
    assert_eq!(daemon.records("bench").await, 6_000);
}

#[tokio::test]
async fn mixed_loads_are_measured_alone_and_together() {
    let daemon = Daemon::start(&[]);
    let report = daemon.report("mixed --filled 2000 --duration 300ms --warm-up 100ms");
    let entries = report["entries"].as_array().unwrap();
    let loads: Vec<usize> = entries
        .iter()
        .map(|entry| {
            let figures = entry["wald"]["median"]["figures"].as_array().unwrap();
            assert!(
                figures.iter().all(|f| f["records"].as_u64() > Some(0)),
                "{entry}"
            );
            figures.len()
        })
        .collect();
    // As fast as they can, and paced.
    assert_eq!(loads, [1, 1, 1, 2, 3].repeat(2));
    for together in [&entries[4], &entries[9]] {
        assert_eq!(together["checks"].as_array().unwrap().len(), 4);
    }
    assert_eq!(
        entries[9]["wald"]["median"]["figures"][0]["load"]["rate"],
        2500.0
    );
    let acked: u64 = entries
        .iter()
        .flat_map(|entry| entry["wald"]["median"]["figures"].as_array().unwrap())
        .filter(|figure| figure["load"]["work"] == "append")
        .map(|figure| figure["records_in_all"].as_u64().unwrap())
        .sum();
    assert_eq!(daemon.records("bench").await, acked + 2_000);
}

#[tokio::test]
async fn appends_are_measured_beside_followers_who_get_all_of_them() {
    let daemon = Daemon::start(&[]);
    let report = daemon.report("fan-out --followers 5 --rate 500 --duration 1s --warm-up 300ms");
    let [alone, beside] = report["entries"].as_array().unwrap().as_slice() else {
        panic!("{report}");
    };
    assert_eq!(alone["checks"], serde_json::json!([]));
    let checks = beside["checks"].as_array().unwrap();
    let reached = |what: &str| {
        let found = checks.iter().find(|check| check["what"] == what);
        found.unwrap()["reached"].as_f64().unwrap()
    };
    // Records on their way when the window begins count for it; at its end they do not.
    let given = reached("given to followers, of all there was");
    assert!((0.5..=1.5).contains(&given), "{beside}");
    let [p50, p99] =
        ["p50", "p99"].map(|at| reached(&format!("{at} of the age of what they are given, ms")));
    assert!(0.0 < p50 && p50 <= p99, "{beside}");
    let figures = beside["wald"]["median"]["figures"].as_array().unwrap();
    assert_eq!(figures[1]["load"]["work"], "followers");
    assert_eq!(figures[1]["load"]["in_flight"], 5);
}

#[tokio::test]
async fn suite_has_every_row_with_its_targets_and_files_are_written() {
    let daemon = Daemon::start(&["--echo"]);
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let suite = |duration: &str| {
        let ran = daemon.bench(&format!(
            "suite --filled 2000 --duration {duration} --warm-up 0s --json {} --svg {}",
            file("json"),
            file("svg")
        ));
        assert!(
            ran.status.success(),
            "{}",
            String::from_utf8_lossy(&ran.stderr)
        );
        let table = String::from_utf8(ran.stdout).unwrap();
        assert!(table.contains("W1, 64 over 1,000 logs"), "{table}");
        serde_json::from_slice::<Value>(&std::fs::read(file("json")).unwrap()).unwrap()
    };
    // The first entry without a check, or with one that has no figure.
    let unjudged = |report: &Value| {
        let entries = report["entries"].as_array().unwrap();
        assert_eq!(entries.len(), 25);
        let is_judged = |entry: &&Value| {
            let checks = entry["checks"].as_array().unwrap();
            !checks.is_empty() && checks.iter().all(|check| check["holds"].is_boolean())
        };
        let found = entries[..15].iter().find(|entry| !is_judged(entry));
        found.map(Value::to_string)
    };
    let mut report = suite("250ms");
    // On a busy machine a load of 256 may have no ack in such a short time.
    if unjudged(&report).is_some() {
        report = suite("2s");
    }
    assert_eq!(unjudged(&report), None);
    assert!(report["server"]["file_system"].as_str().is_some());
    assert!(
        std::fs::read_to_string(file("svg"))
            .unwrap()
            .starts_with("<svg")
    );
}

#[tokio::test]
async fn seconds_are_drawn_one_by_one() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().unwrap();
    let svg = directory.path().join("time.svg");
    let arguments = format!(
        "append --duration 2s --warm-up 0s --time-series {}",
        svg.display()
    );
    let report = daemon.report(&arguments);
    let series = report["entries"][0]["wald"]["rounds"][0]["series"].as_array();
    let series = series.unwrap();
    assert_eq!(series.len(), 2);
    let acks: f64 = series
        .iter()
        .map(|second| second["acks_per_second"].as_f64().unwrap())
        .sum();
    assert!(acks > 0.0 && series[0]["rss_bytes"].as_f64() > Some(0.0));
    assert!(std::fs::read_to_string(svg).unwrap().contains("<polyline"));
}

#[tokio::test]
async fn server_without_echo_or_metrics_gets_advice_and_no_invented_figures() {
    let daemon = Daemon::start(&[]);
    let refused = daemon.bench("append --echo --count 1 --warm-up 0s");
    assert_eq!(refused.status.code(), Some(1));
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(stderr.contains("start it with --echo"), "{stderr}");
    let ran = Command::new(env!("CARGO_BIN_EXE_walbench"))
        .args(["append", "--count", "5", "--warm-up", "0s"])
        .args(["--endpoint", &daemon.grpc, "--output", "json"])
        .output()
        .unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert!(
        stderr.contains("the server's use of resources is not measured"),
        "{stderr}"
    );
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert!(report["entries"][0]["wald"]["median"]["server"].is_null());
}

#[test]
fn of_several_servers_the_one_that_runs_is_measured() {
    let daemon = Daemon::start(&[]);
    let list = format!("http://127.0.0.1:1,{}", daemon.grpc);
    let ran = Command::new(env!("CARGO_BIN_EXE_walbench"))
        .args(["append", "--count", "5", "--warm-up", "0s"])
        .args(["--endpoint", &list, "--output", "json"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{stderr}");
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(figure(&report)["records"].as_u64(), Some(5));
}

#[test]
fn loads_that_make_no_sense_are_refused() {
    for arguments in [
        "append --rate 0",
        "append --in-flight 0",
        "scan --rate 5",
        "mixed --count 5",
        "follow --echo",
    ] {
        let refused = Command::new(env!("CARGO_BIN_EXE_walbench"))
            .args(arguments.split_whitespace())
            .output()
            .unwrap();
        assert_eq!(refused.status.code(), Some(2), "{arguments}");
    }
}
