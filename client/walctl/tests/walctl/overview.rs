//! Many logs at a look: patterns, `top`, followers of a prefix, completion, and the document for a person who helps.

use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;

use crate::command::{Fixture, interrupt};

/// A server with four logs, and a cursor on one of them.
async fn shop() -> Fixture {
    let fixture = Fixture::new().await;
    for log in ["shop/de/audit", "shop/de/orders", "shop/fr/orders", "other"] {
        append(&fixture, log).await;
    }
    let set = "cursor set shop/de/orders billing 1";
    assert_eq!(fixture.walctl(set, "").await.code, 0);
    fixture
}

async fn append(fixture: &Fixture, log: &str) {
    let ran = fixture.walctl(&format!("append {log}"), "x\n").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[tokio::test]
async fn patterns_choose_logs() {
    let fixture = shop().await;
    let raw = fixture.walctl("logs shop/*/or?ers --output raw", "").await;
    assert_eq!(raw.stdout, "shop/de/orders\nshop/fr/orders\n");
    // The number is of logs that match, not of logs that were looked at.
    let first = fixture
        .walctl("logs *orders --limit 1 --output raw", "")
        .await;
    assert_eq!(first.stdout, "shop/de/orders\n");
    assert!(first.stderr.contains("there are more"), "{}", first.stderr);
    let cursors = fixture.walctl("cursor list shop/* --output json", "").await;
    let cursors: Value = serde_json::from_str(&cursors.stdout).unwrap();
    assert_eq!(cursors.as_array().unwrap().len(), 1);
    assert_eq!(cursors[0]["log"], "shop/de/orders");
    let bad = fixture.walctl("logs [a", "").await;
    assert_eq!(bad.code, 2);
    assert!(bad.stderr.contains("[a"), "{}", bad.stderr);
}

#[tokio::test]
async fn tail_of_a_prefix_names_the_log_of_each_record() {
    let fixture = shop().await;
    let ran = fixture.walctl("tail --prefix shop/ --limit 3", "").await;
    let logs: Vec<_> = (ran.stdout.lines())
        .map(|line| line.split("  ").next().unwrap())
        .collect();
    assert_eq!(logs, ["shop/de/audit", "shop/de/orders", "shop/fr/orders"]);
}

#[tokio::test]
async fn top_shows_rates_from_the_second_look_on() {
    let fixture = shop().await;
    let looks = "top shop/* --count 2 --interval 100ms --output json";
    let ran = fixture.walctl(looks, "").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let looks: Vec<Value> = (ran.stdout.lines())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(looks.len(), 2);
    for look in &looks {
        assert_eq!(look["logs"].as_array().unwrap().len(), 3);
        assert_eq!(look["logs"][0]["next_lsn"], 1);
    }
    assert_eq!(looks[0]["logs"][0]["records_per_second"], Value::Null);
    assert_eq!(looks[1]["logs"][0]["records_per_second"], 0.0);
    let text = fixture
        .walctl("top --count 1 --lines 1 --sort name", "")
        .await;
    assert!(
        text.stdout.contains("4 logs, 3 not shown"),
        "{}",
        text.stdout
    );
    assert_eq!(text.stdout.matches("other").count(), 1);
    assert!(!text.stdout.contains("\u{1b}"), "{}", text.stdout);
    let (code, screen) = fixture
        .on_terminal("top --count 2 --interval 100ms", "", 100)
        .await;
    assert_eq!(code, 0, "{screen}");
    assert_eq!(screen.matches("\u{1b}[H").count(), 2, "{screen}");
}

#[tokio::test]
async fn versions_of_both_sides_are_printed() {
    let mut fixture = Fixture::new().await;
    let both = fixture.walctl("version", "").await;
    assert_eq!(both.code, 0, "{}", both.stderr);
    let mut lines = both.stdout.lines();
    assert!(lines.next().unwrap().starts_with("walctl "));
    assert!(lines.next().unwrap().starts_with("wald "));
    fixture.endpoint = "http://127.0.0.1:1".to_owned();
    let one = fixture.walctl("version", "").await;
    assert_eq!(one.code, 4);
    assert!(one.stdout.starts_with("walctl "), "{}", one.stdout);
}

#[tokio::test]
async fn names_of_logs_are_completed_by_the_server_of_the_line() {
    let fixture = shop().await;
    let complete = async |words: &str| {
        let line = format!("-- walctl {words}");
        let index = words.split_whitespace().count().to_string();
        let mut command = fixture.command(&line);
        command
            .env("WALCTL_COMPLETE", "bash")
            .env("_CLAP_IFS", "\n")
            .env("_CLAP_COMPLETE_INDEX", index)
            .env_remove("WALD_ENDPOINT");
        String::from_utf8(command.output().await.unwrap().stdout).unwrap()
    };
    let here = format!("--endpoint {}", fixture.endpoint);
    for words in ["read shop/d", "log get shop/d", "trim --before 3 shop/d"] {
        let offered = complete(&format!("{here} {words}")).await;
        assert_eq!(offered, "shop/de/audit\nshop/de/orders", "{words}");
    }
    assert_eq!(complete(&format!("logs {here} oth")).await, "other");
    // A shell would run this.
    for name in [
        "odd$(touch x)",
        "odd name",
        "odd;ls",
        "odd*",
        "-odd",
        "odd:1",
    ] {
        let created = fixture.command("log create").arg("--").arg(name).output();
        assert!(created.await.unwrap().status.success(), "{name}");
    }
    append(&fixture, "odd-plain").await;
    assert_eq!(complete(&format!("{here} read od")).await, "odd-plain");
    // A server that is not there offers nothing, and commands are offered without one.
    let absent = "--endpoint http://127.0.0.1:1";
    assert_eq!(complete(&format!("{absent} read shop/d")).await, "");
    assert_eq!(complete("vers").await, "version");
}

#[tokio::test]
async fn bundle_has_everything_but_records_and_names_if_so_wanted() {
    let fixture = shop().await;
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("bundle.json");
    let line = format!("support-bundle {} --metrics -", path.display());
    let ran = fixture.walctl(&line, "wald_up 1\n").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let bundle: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(bundle["metrics"], "wald_up 1\n");
    assert_eq!(bundle["status"]["health"], "SERVING");
    assert_eq!(bundle["logs"].as_array().unwrap().len(), 4);
    assert_eq!(bundle["cursors"][0]["cursor"], "billing");
    // Never over another file.
    assert_eq!(fixture.walctl(&line, "").await.code, 1);
    let hidden = fixture.walctl("support-bundle - --without-names", "").await;
    for name in ["shop", "other", "billing"] {
        assert!(!hidden.stdout.contains(name), "{}", hidden.stdout);
    }
}

#[tokio::test]
async fn bundle_of_a_dead_server_has_its_errors() {
    let mut fixture = Fixture::new().await;
    fixture.endpoint = "http://127.0.0.1:1".to_owned();
    let ran = fixture.walctl("support-bundle - --timeout 1s", "").await;
    assert_eq!(ran.code, 4);
    let bundle: Value = serde_json::from_str(&ran.stdout).unwrap();
    let error = bundle["status"]["error"].as_str().unwrap();
    assert!(error.contains("127.0.0.1:1"), "{error}");
}

#[tokio::test]
async fn interrupted_bundle_leaves_no_file_in_the_way_of_the_next() {
    let mut fixture = Fixture::new().await;
    let served = fixture.endpoint.clone();
    // It takes connections, and says nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.endpoint = format!("http://{}", silent.local_addr().unwrap());
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("bundle.json");
    let line = format!("support-bundle {}", path.display());
    let child = fixture.command(&line).stdin(Stdio::null()).spawn();
    let child = child.unwrap();
    let (mut connection, _) = silent.accept().await.unwrap();
    // The beginning of HTTP/2.
    connection.read_exact(&mut [0; 24]).await.unwrap();
    interrupt(child.id().unwrap()).await;
    let ended = child.wait_with_output().await.unwrap();
    assert_eq!(ended.status.code(), Some(130));
    assert!(!path.exists());
    fixture.endpoint = served;
    let ran = fixture.walctl(&line, "").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}
