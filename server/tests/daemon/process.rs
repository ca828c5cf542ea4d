//! The binary as a process: starting, stopping, and its messages when it cannot.

use crate::support::{Daemon, append, output, records, wald};
use rustix::process::Signal;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use wald_proto::v1;

fn read(log: &str) -> v1::ReadRequest {
    v1::ReadRequest {
        log: log.to_owned(),
        ..v1::ReadRequest::default()
    }
}

#[tokio::test]
async fn stopping_ends_clean_and_keeps_everything() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    assert_eq!(daemon.start["recovery"], "new store");
    daemon
        .wal()
        .await
        .append(append("a", "kept"))
        .await
        .unwrap();
    let epoch = daemon.start["recovery_epoch"].clone();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    let daemon = Daemon::start_in(directory.path(), &[]);
    assert_eq!(daemon.start["recovery"], "clean");
    assert_eq!(daemon.start["recovery_epoch"], epoch);
    let page = daemon
        .wal()
        .await
        .read(read("a"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(records(&[page.batch.unwrap()])[0].2, "kept");
}

#[tokio::test]
async fn kill_loses_nothing_acked_and_raises_the_epoch() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    daemon
        .wal()
        .await
        .append(append("a", "kept"))
        .await
        .unwrap();
    let epoch = daemon.start["recovery_epoch"].as_u64().unwrap();
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &[]);
    assert_eq!(daemon.start["recovery_epoch"], epoch + 1);
    let page = daemon
        .wal()
        .await
        .read(read("a"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(page.recovery_epoch, epoch + 1);
    assert_eq!(records(&[page.batch.unwrap()])[0].2, "kept");
}

/// Appends until the server does not answer any more; how many were acked.
async fn append_until_refused(daemon: &Daemon, log: String) -> tokio::task::JoinHandle<usize> {
    let mut wal = daemon.wal().await;
    wal.append(append(&log, "first")).await.unwrap();
    tokio::spawn(async move {
        let mut acked = 1;
        while wal.append(append(&log, "more")).await.is_ok() {
            acked += 1;
        }
        acked
    })
}

async fn stop_under_load(sync_mode: &str) {
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--sync-mode", sync_mode];
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let epoch = daemon.start["recovery_epoch"].clone();
    let mut writers = Vec::new();
    for writer in 0..16 {
        writers.push(append_until_refused(&daemon, writer.to_string()).await);
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0), "{sync_mode}");
    let daemon = Daemon::start_in(directory.path(), &arguments);
    assert_eq!(daemon.start["recovery"], "clean", "{sync_mode}");
    assert_eq!(daemon.start["recovery_epoch"], epoch, "{sync_mode}");
    let mut wal = daemon.wal().await;
    for (log, writer) in writers.into_iter().enumerate() {
        let page = wal.read(read(&log.to_string())).await.unwrap().into_inner();
        let acked = u64::try_from(writer.await.unwrap()).unwrap();
        assert_eq!(page.tail_lsn, Some(acked), "{sync_mode}, log {log}");
    }
}

#[tokio::test]
async fn stopping_under_load_answers_every_append_that_it_applies_in_every_mode() {
    for sync_mode in ["strict", "batch", "interval", "async", "manual"] {
        stop_under_load(sync_mode).await;
    }
}

#[tokio::test]
async fn before_it_stops_it_says_not_ready_and_goes_on_accepting() {
    let daemon = Daemon::start(&["--drain-delay", "1h"]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("not ready any more");
    assert_eq!(daemon.http("/readyz").0, 503);
    assert_eq!(daemon.http("/livez").0, 200);
    let mut health = HealthClient::new(daemon.channel().await);
    let answer = health
        .check(HealthCheckRequest {
            service: "wald.v1.WalService".to_owned(),
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.status(), ServingStatus::NotServing);
    wal.append(append("a", "1")).await.unwrap();
    // An echo of the first signal is none.
    daemon.signal(Signal::INT);
    wal.append(append("a", "2")).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(1_200)).await;
    wal.append(append("a", "3")).await.unwrap();
    // The second signal does not wait for the hour to pass.
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(1));
}

#[tokio::test]
async fn watcher_of_health_is_told_and_does_not_hold_up_the_end() {
    let daemon = Daemon::start(&[]);
    let mut health = HealthClient::new(daemon.channel().await);
    let mut watch = health
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    let first = watch.message().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    daemon.signal(Signal::TERM);
    let mut last = first.status();
    while let Some(message) = watch.message().await.unwrap() {
        last = message.status();
    }
    assert_eq!(last, ServingStatus::NotServing);
    assert_eq!(daemon.ended().await.code(), Some(0));
}

#[test]
fn second_daemon_on_a_directory_names_the_holder() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let taken = daemon.start["grpc"].as_str().unwrap();
    // Whether it has ports of its own or finds them taken too.
    for listen in [":0", taken] {
        let mut second = wald();
        second
            .arg("--data-dir")
            .arg(directory.path())
            .args(["--listen", listen, "--http-listen", ":0"])
            .args(["--log-format", "text"]);
        let second = output(&mut second);
        let said = String::from_utf8(second.stderr).unwrap();
        assert_eq!(second.status.code(), Some(75), "{said}");
        assert!(said.contains("in use by"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn taken_port_is_one_line_and_an_exit_code() {
    let daemon = Daemon::start(&[]);
    let other = tempfile::tempdir().unwrap();
    let mut second = wald();
    second
        .arg("--data-dir")
        .arg(other.path().join("new"))
        .args(["--listen", daemon.start["grpc"].as_str().unwrap()])
        .args(["--log-format", "text"]);
    let second = output(&mut second);
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(69), "{said}");
    assert!(said.contains("--listen"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    // A start that fails makes nothing.
    assert!(!other.path().join("new").exists());
}

#[test]
fn store_is_not_made_among_other_files() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("thesis.tex");
    std::fs::write(&file, "").unwrap();
    for (data_dir, code, words) in [
        (directory.path(), 65, "thesis.tex"),
        (file.as_path(), 74, "is a file; name a directory"),
    ] {
        let mut wald = wald();
        wald.args(["--listen", ":0", "--http-listen", ":0", "--data-dir"]);
        let refused = output(wald.arg(data_dir));
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(code), "{said}");
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn what_ends_a_start_is_said_once_and_in_the_form_of_the_log() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("thesis.tex"), "").unwrap();
    let data_dir = directory.path().to_str().unwrap();
    for (arguments, words) in [
        (["--data-dir", data_dir], "thesis.tex"),
        (["--pool-segments", "0"], "flag --pool-segments"),
    ] {
        for format in ["json", "text"] {
            let mut wald = wald();
            wald.args([
                "--listen",
                ":0",
                "--http-listen",
                ":0",
                "--log-format",
                format,
            ]);
            let refused = output(wald.args(arguments));
            let said = String::from_utf8(refused.stderr).unwrap();
            assert_eq!(said.lines().count(), 1, "{said}");
            let json = serde_json::from_str::<serde_json::Value>(&said);
            assert_eq!(json.is_ok(), format == "json", "{said}");
            if let Ok(json) = json {
                assert_eq!(json["level"], "ERROR", "{said}");
                assert!(json["message"].as_str().unwrap().contains(words), "{said}");
            }
            assert!(said.contains("ERROR") && said.contains(words), "{said}");
        }
    }
}

#[test]
fn misspelt_variable_is_warned_of_at_start_and_by_config_check() {
    let checked = output(
        wald()
            .args(["config", "check"])
            .env("WALD_SYNC_MOD", "async")
            .env("WALD_PORT", "tcp://10.0.0.1:6925"),
    );
    assert_eq!(checked.status.code(), Some(0));
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(said.contains("WALD_SYNC_MODE?"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("thesis.tex"), "").unwrap();
    let mut started = wald();
    started.args(["--listen", ":0", "--http-listen", ":0", "--data-dir"]);
    started.arg(directory.path()).env("WALD_SYNC_MOD", "async");
    let said = String::from_utf8(output(&mut started).stderr).unwrap();
    assert!(said.lines().next().unwrap().contains("WALD_SYNC_MODE?"));
}

#[test]
fn full_device_is_an_error_of_what_prints() {
    for command in ["show", "reference"] {
        let full = std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut wald = wald();
        wald.args(["config", command]).stdout(full);
        wald.stderr(std::process::Stdio::null());
        assert_eq!(wald.status().unwrap().code(), Some(74), "{command}");
    }
}

#[test]
fn configuration_is_shown_with_origins_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("wald.toml");
    std::fs::write(&file, "segment_bytes = \"1MiB\"\npool_segments = 3\n").unwrap();
    let config = |command: &str| {
        let mut wald = wald();
        wald.args(["config", command, "--config"]).arg(&file);
        wald.env("WALD_POOL_SEGMENTS", "5");
        wald.args(["--max-batch-records", "9"]);
        output(&mut wald)
    };
    let shown = String::from_utf8(config("show").stdout).unwrap();
    let line = |name: &str| {
        let line = shown.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(line("segment_bytes").starts_with("segment_bytes = \"1MiB\" # file"));
    assert_eq!(
        line("pool_segments"),
        "pool_segments = 5 # environment WALD_POOL_SEGMENTS"
    );
    assert_eq!(
        line("max_batch_records"),
        "max_batch_records = 9 # flag --max-batch-records"
    );
    assert!(line("listen").ends_with("# default"));
    assert_eq!(config("check").status.code(), Some(0));
    std::fs::write(&file, "segmnt_bytes = \"1MiB\"\n").unwrap();
    let refused = config("check");
    assert_eq!(refused.status.code(), Some(78));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("did you mean \"segment_bytes\""), "{said}");
}

#[test]
fn completions_and_man_page_have_every_setting() {
    let completions = output(wald().args(["completion", "bash"]));
    let page = output(wald().arg("man"));
    for (output, flag) in [(completions, "--sync-mode"), (page, "\\-\\-sync\\-mode")] {
        assert_eq!(output.status.code(), Some(0));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(flag), "no {flag} in {text}");
    }
}

#[test]
fn plaintext_for_everyone_has_to_be_asked_for() {
    let refused = output(wald().args(["--listen", "0.0.0.0:0"]));
    assert_eq!(refused.status.code(), Some(78));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("--insecure-listen"), "{said}");
}

#[test]
fn hangup_reads_the_log_filter_anew() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("wald.toml");
    std::fs::write(&file, "log_filter = \"info\"\n").unwrap();
    let daemon = Daemon::start(&["--config", file.to_str().unwrap()]);
    std::fs::write(&file, "log_filter = \"info,h2=warn\"\n").unwrap();
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for_log("log filter changed");
    assert!(line.contains("h2=warn"), "{line}");
}

#[test]
fn changed_settings_that_need_a_restart_are_named_on_sighup() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("wald.toml");
    std::fs::write(&file, "max_logs = 100\n").unwrap();
    let daemon = Daemon::start(&["--config", file.to_str().unwrap()]);
    std::fs::write(
        &file,
        "max_logs = 200\nlog_filter = \"info\"\naudit_log = \"stderr\"\n",
    )
    .unwrap();
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for_log("come into force at the next start");
    assert!(
        line.contains("audit_log, max_logs") || line.contains("max_logs, audit_log"),
        "{line}"
    );
    assert!(!line.contains("log_filter"), "{line}");
}
