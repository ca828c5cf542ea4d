//! The audit log of the built daemon: its lines, their bounds, its file, and its failures.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tonic::{Code, Request};
use wald_proto::v1;

use crate::support::{Daemon, SessionClient, Told, append, output, part, until, wald};

/// Longest time for a line to be written.
const PATIENCE: Duration = Duration::from_secs(30);

/// Principals that have no token yet.
const PRINCIPALS: &str = r#"
[principal.admin]
allow = [ { do = ["create", "configure", "delete", "trim", "fence", "append", "read", "list", "cursor"], logs = "" } ]

[principal.reader]
allow = [ { do = ["read"], logs = "open/" } ]
"#;

/// Files of one test: the audit log, and perhaps principals.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Writes the principals with a token each. Returns the tokens.
    fn principals(&self) -> [String; 2] {
        fs::write(self.path("auth.toml"), PRINCIPALS).unwrap();
        fs::set_permissions(self.path("auth.toml"), fs::Permissions::from_mode(0o600)).unwrap();
        ["admin", "reader"].map(|principal| {
            let mut command = wald();
            command.args(["token", "create", "--principal", principal]);
            let made = output(command.arg("--auth-file").arg(self.path("auth.toml")));
            assert!(made.status.success(), "{made:?}");
            String::from_utf8(made.stdout).unwrap().trim().to_owned()
        })
    }

    /// Starts a daemon with this audit log and further arguments.
    fn start(&self, arguments: &[&str]) -> Daemon {
        let log = self.text("audit.log");
        let own = ["--audit-log", log.as_str()];
        Daemon::start(&[&own, arguments].concat())
    }

    fn start_with_principals(&self, arguments: &[&str]) -> Daemon {
        let auth = self.text("auth.toml");
        let own = ["--auth-file", auth.as_str(), "--metrics-open"];
        self.start(&[&own, arguments].concat())
    }

    /// The lines so far. Each is JSON without a character that acts on a terminal.
    fn lines(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(name)).unwrap_or_default();
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let lines = text[..whole].lines();
        lines
            .map(|line| {
                assert!(!line.chars().any(wald_text::shown::is_unsafe), "{line}");
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
            })
            .collect()
    }

    /// Waits until the lines of calls are as they should be.
    async fn wait_for(&self, name: &str, holds: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let lines = self.lines(name);
            if holds(&lines) {
                return lines;
            }
            assert!(Instant::now() < deadline, "{lines:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for this number of lines with `field` equal to `value`, and returns them.
    async fn with(&self, field: &str, value: &str, number: usize) -> Vec<Value> {
        let of = |lines: &[Value]| -> Vec<Value> {
            let found = lines.iter().filter(|line| line[field] == value);
            found.cloned().collect()
        };
        of(&self
            .wait_for("audit.log", |lines| of(lines).len() >= number)
            .await)
    }
}

fn with_token<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {token}").parse().unwrap();
    request.metadata_mut().insert("authorization", value);
    request
}

fn create(log: &str) -> v1::CreateLogRequest {
    v1::CreateLogRequest {
        log: log.to_owned(),
        ..v1::CreateLogRequest::default()
    }
}

/// A token that no file has: the digits of one that was drawn and thrown away.
fn unknown_token() -> String {
    let made = output(wald().args(["token", "create", "--principal", "nobody"]));
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn change_denial_and_bad_credential_have_one_line_each() {
    let files = Files::new();
    let [admin, reader] = files.principals();
    let daemon = files.start_with_principals(&[]);
    let mut logs = daemon.logs().await;
    let mut request = with_token(create("a"), &admin);
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let trace = trace.parse().unwrap();
    request.metadata_mut().insert("traceparent", trace);
    let made = logs.create_log(request).await.unwrap().into_inner();
    let denied = logs.create_log(with_token(create("b"), &reader)).await;
    assert_eq!(denied.unwrap_err().code(), Code::PermissionDenied);
    let unknown = unknown_token();
    let refused = logs.create_log(with_token(create("c"), &unknown)).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unauthenticated);
    let again = logs.create_log(with_token(create("a"), &admin)).await;
    assert_eq!(again.unwrap_err().code(), Code::AlreadyExists);
    let mut wal = daemon.wal().await;
    // Data calls have no line.
    wal.append(with_token(append("a", "x"), &admin))
        .await
        .unwrap();
    let trim = v1::TrimRequest {
        log: "a".to_owned(),
        before_lsn: 1,
        ..v1::TrimRequest::default()
    };
    wal.trim(with_token(trim, &admin)).await.unwrap();

    let lines = files.with("event", "call", 5).await;
    assert_eq!(lines.len(), 5, "{lines:#?}");
    let id = |token: &str| token["wald1_".len()..][..8].to_owned();
    let log_id = made.log.unwrap().log_id;
    let rpc = "wald.v1.LogService/CreateLog";
    let line = &lines[0];
    assert_eq!(line["request_id"], "0af7651916cd43dd8448eb211c80319c");
    assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:"));
    assert_eq!(line["principal"], "admin");
    assert_eq!(line["credential"], "token");
    assert_eq!(line["token_id"], id(&admin));
    assert_eq!((&line["rpc"], &line["op"]), (&rpc.into(), &"create".into()));
    assert_eq!(
        (&line["log"], &line["log_id"]),
        (&"a".into(), &log_id.into())
    );
    assert_eq!(line["outcome"], "ok");
    assert!(line.get("reason").is_none());
    let line = &lines[1];
    assert_eq!(
        (&line["principal"], &line["log"]),
        (&"reader".into(), &"b".into())
    );
    assert_eq!(
        (&line["outcome"], &line["reason"]),
        (&"denied".into(), &"NOT_ALLOWED".into())
    );
    assert_eq!((&line["rpc"], &line["op"]), (&rpc.into(), &"create".into()));
    let line = &lines[2];
    assert_eq!(line["principal"], "");
    assert_eq!(line["token_id"], id(&unknown));
    assert_eq!(
        (&line["outcome"], &line["reason"]),
        (&"unauthenticated".into(), &"BAD_CREDENTIAL".into())
    );
    let line = &lines[3];
    assert_eq!(
        (&line["outcome"], &line["reason"]),
        (&"failed".into(), &"LOG_EXISTS".into())
    );
    let line = &lines[4];
    assert_eq!(line["rpc"], "wald.v1.WalService/Trim");
    assert_eq!(
        (&line["before_lsn"], &line["first_lsn"]),
        (&1.into(), &1.into())
    );
}

#[tokio::test]
async fn flood_of_denials_gets_ten_lines_a_second_and_a_count() {
    const DENIALS: u64 = 3000;
    let files = Files::new();
    let [_, reader] = files.principals();
    let daemon = files.start_with_principals(&[]);
    let logs = daemon.logs().await;
    let mut floods = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let (mut logs, reader) = (logs.clone(), reader.clone());
        floods.spawn(async move {
            for _ in 0..DENIALS / 10 {
                let denied = logs.create_log(with_token(create("x"), &reader)).await;
                assert_eq!(denied.unwrap_err().code(), Code::PermissionDenied);
            }
        });
    }
    floods.join_all().await;
    let single = |line: &Value| line["event"] == "call" && line["outcome"] == "denied";
    let told = |lines: &[Value]| -> u64 {
        let singles = lines.iter().filter(|line| single(line)).count() as u64;
        let counts = lines.iter().filter_map(|line| line["count"].as_u64());
        singles + counts.sum::<u64>()
    };
    let lines = files
        .wait_for("audit.log", |lines| told(lines) >= DENIALS)
        .await;
    assert_eq!(told(&lines), DENIALS);
    let count = lines.iter().find(|line| line["event"] == "refusals");
    let count = count.unwrap();
    assert_eq!(count["principal"], "reader");
    assert_eq!(count["outcome"], "denied");
    let times: Vec<i64> = (lines.iter().filter(|line| single(line)))
        .map(|line| {
            let time = line["time"].as_str().unwrap();
            time.parse::<jiff::Timestamp>().unwrap().as_microsecond()
        })
        .collect();
    // The daemon judges a refusal shortly before its line gets a time.
    for eleven in times.windows(11) {
        assert!(eleven[10] - eleven[0] > 900_000, "{eleven:?}");
    }
    assert_eq!(
        daemon.metric("wald_authz_denied_total{op=\"create\"}"),
        DENIALS as f64
    );
}

/// A caller can make a call fail as often as it likes, also with its own rights.
#[tokio::test]
async fn flood_of_failed_calls_gets_ten_lines_a_second_and_a_count() {
    const CALLS: u64 = 300;
    let files = Files::new();
    let [admin, _] = files.principals();
    let daemon = files.start_with_principals(&[]);
    let mut logs = daemon.logs().await;
    logs.create_log(with_token(create("x"), &admin))
        .await
        .unwrap();
    for _ in 0..CALLS {
        let failed = logs.create_log(with_token(create("x"), &admin)).await;
        assert_eq!(failed.unwrap_err().code(), Code::AlreadyExists);
    }
    let single = |line: &Value| line["event"] == "call" && line["outcome"] == "failed";
    let told = |lines: &[Value]| -> u64 {
        let singles = lines.iter().filter(|line| single(line)).count() as u64;
        singles + (lines.iter().filter_map(|line| line["count"].as_u64())).sum::<u64>()
    };
    let lines = files
        .wait_for("audit.log", |lines| told(lines) >= CALLS)
        .await;
    assert_eq!(told(&lines), CALLS);
    assert!(lines.iter().any(|line| line["event"] == "refusals"));
}

/// Its failed calls have used up the lines of refusals. A deletion whose client leaves early must have a line nevertheless.
#[tokio::test]
async fn change_whose_client_leaves_early_has_a_line_with_its_end() {
    let files = Files::new();
    let [admin, _] = files.principals();
    let daemon = files.start_with_principals(&[]);
    let mut logs = daemon.logs().await;
    let delete = |log: &str| v1::DeleteLogRequest {
        log: log.to_owned(),
        ..v1::DeleteLogRequest::default()
    };
    let mut left = Vec::new();
    for number in 0.. {
        let name = format!("log-{number}");
        logs.create_log(with_token(create(&name), &admin))
            .await
            .unwrap();
        for _ in 0..12 {
            let missing = logs.delete_log(with_token(delete("none"), &admin)).await;
            assert_eq!(missing.unwrap_err().code(), Code::NotFound);
        }
        // The flush takes longer than some of these.
        let given_up = Duration::from_micros(300 * (1 + number % 8));
        let mut leaving = logs.clone();
        let deletion = leaving.delete_log(with_token(delete(&name), &admin));
        if tokio::time::timeout(given_up, deletion).await.is_ok() {
            continue;
        }
        // Changes keep their order, so the deletion has ended if it ever began.
        logs.create_log(with_token(create(&format!("{name}-after")), &admin))
            .await
            .unwrap();
        let get = v1::GetLogRequest { log: name.clone() };
        if logs.get_log(with_token(get, &admin)).await.is_err() {
            left.push(name);
        }
        if left.len() == 5 {
            break;
        }
    }
    for name in left {
        let line = files
            .wait_for("audit.log", |lines| {
                lines.iter().any(|line| {
                    let is_deletion = line["rpc"] == "wald.v1.LogService/DeleteLog";
                    is_deletion && line["log"] == name && line["outcome"] == "ok"
                })
            })
            .await;
        drop(line);
    }
}

#[tokio::test]
async fn refused_request_to_the_http_port_has_a_line() {
    let files = Files::new();
    files.principals();
    let auth = files.text("auth.toml");
    let daemon = files.start(&["--auth-file", &auth]);
    assert_eq!(daemon.http("/metrics").0, 401);
    assert_eq!(daemon.http("/console/api/logs").0, 401);
    let lines = files.with("outcome", "unauthenticated", 2).await;
    for (line, op) in lines.iter().zip(["metrics", "console"]) {
        assert_eq!(
            (&line["rpc"], &line["op"], &line["reason"]),
            (
                &format!("/{op}").into(),
                &op.into(),
                &"NO_CREDENTIAL".into()
            )
        );
    }
}

#[tokio::test]
async fn names_that_act_on_terminals_are_escaped_in_their_lines() {
    let files = Files::new();
    let [admin, reader] = files.principals();
    let daemon = files.start_with_principals(&["--audit", "all"]);
    let (mut logs, mut wal) = (daemon.logs().await, daemon.wal().await);
    let odd = "a\u{202e}\"\n";
    let hidden = "a\u{202e}\"";
    for name in [odd, hidden] {
        let refused = logs.create_log(with_token(create(name), &admin)).await;
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    }
    let denied = logs.create_log(with_token(create(hidden), &reader)).await;
    assert_eq!(denied.unwrap_err().code(), Code::PermissionDenied);
    let list = v1::ListLogsRequest {
        prefix: odd.to_owned(),
        ..v1::ListLogsRequest::default()
    };
    logs.list_logs(with_token(list, &admin)).await.unwrap();
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Prefix("\u{9b}31m".to_owned())),
        ..v1::ScanRequest::default()
    };
    let _ = wal.scan(with_token(scan, &reader)).await;
    let lines = files.with("event", "call", 5).await;
    assert_eq!(lines[0]["reason"], "INVALID_LOG_NAME");
    assert_eq!(lines[1]["log"], hidden);
    assert_eq!(
        (&lines[2]["log"], &lines[2]["outcome"]),
        (&hidden.into(), &"denied".into())
    );
    assert_eq!(lines[3]["prefix"], odd);
}

#[tokio::test]
async fn no_log_and_no_metric_has_a_secret_or_a_payload() {
    const PAYLOAD: &str = "payload-4711-of-a-record";
    let files = Files::new();
    let [admin, reader] = files.principals();
    let filter = ["--audit", "all", "--log-filter", "trace"];
    let daemon = files.start_with_principals(&filter);
    let mut wal = daemon.wal().await;
    for token in [&admin, &reader, &unknown_token(), &"wald1_short".to_owned()] {
        let _ = wal.append(with_token(append("a", PAYLOAD), token)).await;
    }
    let mut basic = Request::new(append("a", PAYLOAD));
    let value = format!("Bearer {admin}").parse().unwrap();
    basic.metadata_mut().append("authorization", value);
    let value = format!("Basic {reader}").parse().unwrap();
    basic.metadata_mut().append("authorization", value);
    assert_eq!(
        wal.append(basic).await.unwrap_err().code(),
        Code::Unauthenticated
    );
    let read = v1::ReadRequest {
        log: "a".to_owned(),
        ..v1::ReadRequest::default()
    };
    wal.read(with_token(read, &admin)).await.unwrap();
    files.with("event", "call", 6).await;
    let (status, metrics) = daemon.http("/metrics");
    assert_eq!(status, 200);
    daemon.signal(Signal::TERM);
    let mut log = String::new();
    while let Ok(line) = daemon.log.recv_timeout(PATIENCE) {
        log += &line;
    }
    assert!(log.contains("stopped: everything accepted"), "{log}");
    let audit = fs::read_to_string(files.path("audit.log")).unwrap();
    for (name, text) in [("log", &log), ("metrics", &metrics), ("audit", &audit)] {
        let secret = &admin[20..40];
        for searched in ["wald1_", "Bearer ", PAYLOAD, secret] {
            assert!(!text.contains(searched), "{searched} in {name}");
        }
    }
}

#[tokio::test]
async fn every_call_has_a_line_and_streams_have_two_with_audit_all() {
    let files = Files::new();
    let daemon = files.start(&["--audit", "all"]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    let read = v1::ReadRequest {
        log: "a".to_owned(),
        ..v1::ReadRequest::default()
    };
    wal.read(read).await.unwrap();
    let session = SessionClient::open(&mut wal).await;
    for request in 0..3 {
        session.send(request, vec![part("a", &["1", "2"])]).await;
    }
    let SessionClient {
        requests,
        mut answers,
    } = session;
    drop(requests);
    while answers.message().await.unwrap().is_some() {}
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
        ..v1::ScanRequest::default()
    };
    let mut messages = wal.scan(scan).await.unwrap().into_inner();
    while messages.message().await.unwrap().is_some() {}
    let lines = files
        .wait_for("audit.log", |lines| {
            lines.iter().filter(|line| line["event"] == "end").count() == 2
        })
        .await;
    let calls: Vec<&Value> = lines
        .iter()
        .filter(|line| line.get("rpc").is_some())
        .collect();
    let kinds: Vec<(&str, &str)> = (calls.iter())
        .map(|line| {
            let rpc = line["rpc"].as_str().unwrap();
            (
                rpc.rsplit('/').next().unwrap(),
                line["event"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        kinds,
        [
            ("Append", "call"),
            ("Read", "call"),
            ("AppendSession", "begin"),
            ("AppendSession", "end"),
            ("Scan", "begin"),
            ("Scan", "end"),
        ]
    );
    for line in &calls {
        assert_eq!(
            (&line["principal"], &line["outcome"]),
            (&"".into(), &"ok".into())
        );
    }
    assert_eq!(
        (&calls[0]["first_lsn"], &calls[0]["next_lsn"]),
        (&0.into(), &1.into())
    );
    assert_eq!(calls[1]["next_lsn"], 1);
    let session = calls[3];
    assert_eq!(session["log"], "a");
    assert_eq!(
        (&session["requests"], &session["records"]),
        (&3.into(), &6.into())
    );
    assert_eq!(calls[4]["prefix"], "");
}

#[tokio::test]
async fn renamed_file_is_followed_by_a_new_one_on_sighup() {
    let files = Files::new();
    rustix::process::umask(rustix::fs::Mode::empty());
    let daemon = files.start(&[]);
    let mut logs = daemon.logs().await;
    logs.create_log(create("a")).await.unwrap();
    files.with("rpc", "wald.v1.LogService/CreateLog", 1).await;
    fs::rename(files.path("audit.log"), files.path("audit.1")).unwrap();
    daemon.signal(Signal::HUP);
    files.with("event", "reopen", 1).await;
    logs.create_log(create("b")).await.unwrap();
    let lines = files.with("rpc", "wald.v1.LogService/CreateLog", 1).await;
    assert_eq!(lines[0]["log"], "b");
    let earlier = files.lines("audit.1");
    assert_eq!(earlier[0]["event"], "start");
    assert_eq!(earlier.last().unwrap()["log"], "a");
    for name in ["audit.log", "audit.1"] {
        let mode = files.path(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{name}");
    }
    daemon.signal(Signal::TERM);
    assert!(daemon.ended().await.success());
    let last = files.lines("audit.log").pop().unwrap();
    assert_eq!(
        (&last["event"], &last["outcome"]),
        (&"stop".into(), &"ok".into())
    );
}

/// A daemon whose audit log has lost its directory.
async fn broken(files: &Files, arguments: &[&str]) -> Daemon {
    fs::create_dir(files.path("audit")).unwrap();
    let log = files.text("audit/audit.log");
    let daemon = Daemon::start(&[&["--audit-log", log.as_str()], arguments].concat());
    let mut logs = daemon.logs().await;
    logs.create_log(create("a")).await.unwrap();
    fs::rename(files.path("audit"), files.path("away")).unwrap();
    daemon.signal(Signal::HUP);
    let failures = "wald_audit_failures_total{reason=\"write\"}";
    until(&daemon, failures, |failures| failures >= 1.0).await;
    let line = daemon.wait_for_log("the audit log cannot be written");
    assert!(
        line.contains("ERROR") && line.contains("audit.log"),
        "{line}"
    );
    daemon
}

#[tokio::test]
async fn changes_go_on_while_the_audit_log_fails_and_lines_follow() {
    let files = Files::new();
    let daemon = broken(&files, &[]).await;
    let mut logs = daemon.logs().await;
    logs.create_log(create("b")).await.unwrap();
    fs::rename(files.path("away"), files.path("audit")).unwrap();
    daemon.wait_for_log("the audit log is written again");
    // The line of "a" may have waited too: "b" follows it then.
    let lines = files
        .wait_for("audit/audit.log", |lines| {
            lines.iter().any(|line| line["log"] == "b")
        })
        .await;
    let names: Vec<&str> = lines
        .iter()
        .filter_map(|line| line["log"].as_str())
        .collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(
        daemon.metric("wald_audit_failures_total{reason=\"lost\"}"),
        0.0
    );
}

#[tokio::test]
async fn changes_are_refused_while_the_audit_log_fails_if_set_so() {
    let files = Files::new();
    let daemon = broken(&files, &["--audit-on-failure", "refuse"]).await;
    let mut logs = daemon.logs().await;
    let refused = logs.create_log(create("b")).await.unwrap_err();
    let told = Told::of(&refused);
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::Unavailable, "AUDIT_FAILED")
    );
    assert_eq!(
        (told.fact("outcome"), told.fact("retry")),
        ("NOT_APPLIED", "SAFE")
    );
    // Data calls go on.
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    fs::rename(files.path("away"), files.path("audit")).unwrap();
    daemon.wait_for_log("the audit log is written again");
    logs.create_log(create("b")).await.unwrap();
}

#[test]
fn audit_log_that_must_not_be_opened_ends_the_start_with_a_sentence() {
    let files = Files::new();
    fs::write(files.path("target"), "kept").unwrap();
    std::os::unix::fs::symlink(files.path("target"), files.path("link")).unwrap();
    let data = files.path("data");
    fs::create_dir(&data).unwrap();
    for (path, why) in [
        ("link", "it is a symbolic link"),
        ("missing/audit.log", "cannot be opened"),
        ("data/audit.log", "it is in the data directory"),
    ] {
        let mut command = wald();
        command.args(["--listen", ":0", "--http-listen", ":0", "--data-dir"]);
        command.arg(&data).arg("--audit-log").arg(files.path(path));
        let ended = output(&mut command);
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(78), "{said}");
        assert!(said.contains(why) && said.contains(path), "{said}");
    }
    assert_eq!(fs::read(files.path("target")).unwrap(), b"kept");
}

#[tokio::test]
async fn reload_of_principals_is_recorded_with_the_digest_of_the_file() {
    let files = Files::new();
    files.principals();
    let sha256 = |name: &str| {
        let done = Command::new("sha256sum").arg(files.path(name)).output();
        let text = String::from_utf8(done.unwrap().stdout).unwrap();
        format!("sha256:{}", text.split(' ').next().unwrap())
    };
    let daemon = files.start_with_principals(&[]);
    let first = sha256("auth.toml");
    let lines = files.with("event", "reload", 1).await;
    assert_eq!(lines[0]["files"], "auth");
    assert_eq!(lines[0]["in_force"]["auth_file"], first);
    let good = fs::read_to_string(files.path("auth.toml")).unwrap();
    fs::write(files.path("auth.toml"), "[principal.a]\nwrong = 1\n").unwrap();
    daemon.signal(Signal::HUP);
    let lines = files.with("event", "reload", 2).await;
    assert_eq!(lines[1]["outcome"], "failed");
    assert_eq!(lines[1]["in_force"]["auth_file"], first);
    assert!(lines[1]["reason"].as_str().unwrap().contains("auth.toml"));
    fs::write(files.path("auth.toml"), good + "# changed\n").unwrap();
    daemon.signal(Signal::HUP);
    let lines = files.with("event", "reload", 3).await;
    assert_eq!(lines[2]["outcome"], "ok");
    assert_eq!(lines[2]["in_force"]["auth_file"], sha256("auth.toml"));
}

#[tokio::test]
async fn commands_that_change_an_offline_store_are_recorded() {
    let files = Files::new();
    let data = files.path("data");
    let daemon = Daemon::start_in(&data, &[]);
    let mut logs = daemon.logs().await;
    logs.create_log(create("junk/a")).await.unwrap();
    daemon.signal(Signal::TERM);
    assert!(daemon.ended().await.success());
    for arguments in [
        &["repair"][..],
        &["repair", "--accept-loss"],
        &["delete-logs", "--prefix", "junk/"],
        &["delete-logs", "--prefix", "junk/", "--yes"],
    ] {
        let mut command = wald();
        command.args(arguments).arg(&data).arg("--audit-log");
        command.arg(files.path("audit.log")).env("USER", "erna");
        command.env_remove("SUDO_USER");
        let done = output(&mut command);
        assert!(done.status.success(), "{done:?}");
    }
    let lines = files.lines("audit.log");
    let commands: Vec<&Value> = lines.iter().map(|line| &line["command"]).collect();
    assert_eq!(
        commands,
        [
            "repair --accept-loss",
            "delete-logs --prefix \"junk/\" --yes"
        ]
    );
    for line in &lines {
        assert_eq!(
            (&line["event"], &line["user"], &line["outcome"]),
            (&"offline".into(), &"erna".into(), &"ok".into())
        );
        assert_eq!(line["data_dir"], data.to_str().unwrap());
    }
}
