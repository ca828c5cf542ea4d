//! `walctl` as scripts see it: input, output, exit codes.

use std::process::Stdio;
use std::time::Duration;

use crate::command::{Fixture, interrupt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use wald_client::proto::{Gap, GapReason};

#[tokio::test]
async fn json_array_comes_back_equal_and_in_order() {
    let fixture = Fixture::new().await;
    let elements: Vec<String> = (0..2_500)
        .map(|n| format!(r#"{{"n": {n}, "delay": {n}.50, "s": "é\u00e9"}}"#))
        .collect();
    let array = format!("[\n{}\n]", elements.join(",\n"));
    let loaded = fixture
        .walctl("append flights --format json-array", &array)
        .await;
    assert_eq!(loaded.code, 0, "{}", loaded.stderr);
    assert!(
        loaded.stderr.contains("appended 2,500 records"),
        "{}",
        loaded.stderr
    );
    assert!(loaded.stderr.contains("lsn 0 to 2499"), "{}", loaded.stderr);
    assert_eq!(
        *fixture.memory.requests.lock().unwrap(),
        [1_000, 1_000, 500]
    );
    let scanned = fixture.walctl("scan flights --output jsonl", "").await;
    assert_eq!(scanned.code, 0, "{}", scanned.stderr);
    assert_eq!(scanned.stdout, elements.join("\n") + "\n");
}

#[tokio::test]
async fn records_are_routed_by_a_field_and_read_back_by_prefix() {
    let fixture = Fixture::new().await;
    let lines = r#"{"n":1,"origin":"SEA"}
{"n":2,"origin":"BOS"}
{"n":3,"origin":"SEA"}
{"n":4,"origin":"JFK"}
"#;
    let append = "append --format jsonl --log-from-field origin --log-prefix airport/";
    let loaded = fixture.walctl(append, lines).await;
    assert_eq!(loaded.code, 0, "{}", loaded.stderr);
    let scanned = fixture
        .walctl("scan --prefix airport/ --output json", "")
        .await;
    let first = r#"{"log":"airport/BOS","lsn":0,"time":"1970-01-01T00:00:01.000000Z","value":{"n":2,"origin":"BOS"}}"#;
    assert_eq!(scanned.stdout.lines().next(), Some(first));
    assert_eq!(scanned.stdout.lines().count(), 4);
    let sea = fixture
        .walctl("scan airport/SEA --from 1 --output raw", "")
        .await;
    assert_eq!(sea.stdout, "{\"n\":3,\"origin\":\"SEA\"}\n");
    let listed = fixture
        .walctl("logs --prefix airport/ --output raw", "")
        .await;
    assert_eq!(listed.stdout, "airport/BOS\nairport/JFK\nairport/SEA\n");
}

#[tokio::test]
async fn list_of_logs_says_how_to_go_on() {
    let fixture = Fixture::new().await;
    for log in ["a", "b", "c"] {
        fixture.walctl(&format!("append {log}"), "x\n").await;
    }
    let first = fixture.walctl("logs --limit 2 --output raw", "").await;
    assert_eq!(first.stdout, "a\nb\n");
    assert!(first.stderr.contains("--page-token b"), "{}", first.stderr);
    let rest = fixture.walctl("logs --page-token b --output raw", "").await;
    assert_eq!((rest.stdout.as_str(), rest.stderr.as_str()), ("c\n", ""));
}

#[tokio::test]
async fn expected_lsn_is_chained_over_requests_and_a_mismatch_fails() {
    let fixture = Fixture::new().await;
    let lines = "x\n".repeat(2_001);
    assert_eq!(
        fixture
            .walctl("append log --expected-lsn 0", &lines)
            .await
            .code,
        0
    );
    let late = fixture.walctl("append log --expected-lsn 0", "y\n").await;
    assert_eq!(late.code, 1);
    assert!(late.stderr.contains("POSITION_MISMATCH"), "{}", late.stderr);
    assert!(
        late.stderr.contains("someone else has appended"),
        "{}",
        late.stderr
    );
    let none = fixture.walctl("append none --expected-lsn 5", "y\n").await;
    assert!(none.stderr.contains("there is none"), "{}", none.stderr);
    // Nothing was appended, and nothing is said of it.
    assert_eq!(none.stderr.lines().count(), 1, "{}", none.stderr);
}

#[tokio::test]
async fn time_before_the_newest_of_its_log_is_warned_of() {
    let fixture = Fixture::new().await;
    let ran = fixture
        .walctl("append log --time 2026-01-02T00:00:00Z --text new", "")
        .await;
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    let warning = "walctl: warning: record 1 of log has the time 2026-01-02T00:00:00.000000Z, not \
                   2026-01-01T00:00:00.000000Z";
    let ran = fixture
        .walctl("append log --time 2026-01-01T00:00:00Z --text old", "")
        .await;
    assert_eq!(ran.code, 0);
    assert!(ran.stderr.contains(warning), "{}", ran.stderr);
    let line = r#"{"log": "log", "text": "old", "time": "2026-01-01T00:00:00Z"}"#;
    let ran = fixture.walctl("batch", line).await;
    assert!(ran.stderr.contains("record 2 of log has"), "{}", ran.stderr);
}

#[tokio::test]
async fn batch_prints_what_each_log_got() {
    let fixture = Fixture::new().await;
    let lines = r#"{"log": "a", "text": "1"}
{"log": "b", "data": "/w=="}
{"log": "a", "text": "2"}
"#;
    let done = fixture.walctl("batch --expect a=0", lines).await;
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (0, "a  lsn 0 to 1\nb  lsn 0 to 0\n")
    );
    let scanned = fixture.walctl("scan --all --output jsonl", "").await;
    assert_eq!(scanned.stdout, "1\n2\n{\"data\":\"/w==\"}\n");
}

#[tokio::test]
async fn batch_of_too_many_records_names_the_setting_that_it_passes() {
    let fixture = Fixture::new().await;
    let line = "{\"log\": \"a\", \"text\": \"1\"}\n";
    let ran = fixture.walctl("batch", &line.repeat(1_500)).await;
    assert_eq!(ran.code, 1);
    let next = "split it, or raise max_batch_records of the server";
    assert!(ran.stderr.contains(next), "{}", ran.stderr);
}

#[tokio::test]
async fn unknown_log_exits_with_3_and_says_what_to_do() {
    let fixture = Fixture::new().await;
    let missing = fixture.walctl("read nothing", "").await;
    assert_eq!(missing.code, 3);
    assert_eq!(
        missing.stderr,
        "walctl: LOG_NOT_FOUND: no log nothing; `walctl logs` lists the logs\n"
    );
}

#[tokio::test]
async fn damaged_records_are_named_and_exit_with_5() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "x\n").await;
    *fixture.memory.gap.lock().unwrap() = Some(Gap {
        log: "log".into(),
        from_lsn: Some(3),
        to_lsn: Some(7),
        reason: GapReason::Quarantined.into(),
    });
    let scanned = fixture.walctl("scan log --output raw", "").await;
    assert_eq!((scanned.code, scanned.stdout.as_str()), (5, "x\n"));
    assert!(
        scanned.stderr.contains("records 3 to 6 of log are damaged"),
        "{}",
        scanned.stderr
    );
}

#[tokio::test]
async fn closed_pipe_is_not_an_error() {
    let fixture = Fixture::new().await;
    let lines = format!("{}\n", "x".repeat(100)).repeat(5_000);
    fixture.walctl("append log", &lines).await;
    let mut child = fixture
        .command("scan log --output raw")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    // Longer than a pipe's buffer, and nobody reads it.
    drop(child.stdout.take());
    let ended = child.wait_with_output().await.unwrap();
    assert_eq!(
        (ended.status.code(), ended.stderr.as_slice()),
        (Some(0), &b""[..])
    );
}

#[tokio::test]
async fn failures_and_losses_keep_their_exit_codes_if_nobody_reads() {
    let fixture = Fixture::new().await;
    let records = format!("{}\n", "x".repeat(100)).repeat(5_000);
    fixture.walctl("append log", &records).await;
    *fixture.memory.gap.lock().unwrap() = Some(Gap {
        log: "log".into(),
        from_lsn: Some(3),
        to_lsn: Some(7),
        reason: GapReason::Quarantined.into(),
    });
    let logs = "logs:\n  - name: orders\n  - name: $system\n";
    for (command, input, code) in [
        ("scan log --output raw", "", 5),
        ("append log --format jsonl --output json", "1\n{oops\n", 1),
        ("apply -f -", logs, 1),
        ("logs", "", 0),
    ] {
        let ran = fixture.unread(command, input).await;
        assert_eq!(ran.code, code, "{command}: {}", ran.stderr);
    }
}

#[tokio::test]
async fn append_that_a_bad_line_stops_says_how_to_go_on() {
    let fixture = Fixture::new().await;
    let input = format!("{}{{oops\n", "1\n".repeat(1_200));
    let ran = fixture.walctl("append log --format jsonl", &input).await;
    assert_eq!(ran.code, 1);
    assert_eq!(fixture.memory.payloads("log").len(), 1_200);
    let next = "the first 1,200 records of the input are appended; give only the rest";
    assert!(ran.stderr.contains(next), "{}", ran.stderr);
}

#[tokio::test]
async fn full_stdout_is_named() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log --text x", "").await;
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = fixture.command("scan log");
    let ran = command
        .stdin(Stdio::null())
        .stdout(full)
        .spawn()
        .unwrap()
        .wait_with_output()
        .await
        .unwrap();
    let said = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(1));
    assert!(
        said.contains("cannot write to stdout: No space left"),
        "{said}"
    );
}

#[tokio::test]
async fn interrupted_append_says_how_far_it_came_and_exits_with_130() {
    let fixture = Fixture::new().await;
    let mut child = fixture
        .command("append log")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // More than one request: the first goes out, and stdin stays open.
    stdin
        .write_all("x\n".repeat(1_500).as_bytes())
        .await
        .unwrap();
    while fixture.memory.requests.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    interrupt(child.id().unwrap()).await;
    let ended = child.wait_with_output().await.unwrap();
    assert_eq!(ended.status.code(), Some(130));
    let stderr = String::from_utf8(ended.stderr).unwrap();
    assert!(stderr.contains("interrupted"), "{stderr}");
    drop(stdin);
    // The records of the batch that was not full are not sent, as the help says.
    assert_eq!(*fixture.memory.requests.lock().unwrap(), [1_000]);
    let help = fixture.walctl("append --help", "").await.stdout;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "records of a slow pipe, such as `tail -f FILE | walctl append LOG`, wait in walctl",
        "1,000 or 4 MiB by default",
        "They are lost if walctl is killed or gets Ctrl-C",
    ] {
        assert!(help.contains(words), "{words}: {help}");
    }
}

#[tokio::test]
async fn interrupted_append_reads_nothing_back_from_a_server_that_went_away() {
    let fixture = Fixture::new().await;
    let mut child = fixture
        .command("append log --format json --timeout 60s")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let line = "{\"text\": \"x\", \"time\": \"2026-01-01T00:00:00Z\"}\n";
    stdin
        .write_all(line.repeat(1_500).as_bytes())
        .await
        .unwrap();
    while fixture.memory.requests.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    // Every later call is referred to nobody.
    *fixture.memory.owner.lock().unwrap() = Some("http://127.0.0.1:1".to_owned());
    interrupt(child.id().unwrap()).await;
    let ended = tokio::time::timeout(Duration::from_secs(20), child.wait_with_output()).await;
    assert_eq!(ended.unwrap().unwrap().status.code(), Some(130));
    drop(stdin);
}

#[tokio::test]
async fn interrupted_change_says_that_its_request_may_be_carried_out() {
    let mut fixture = Fixture::new().await;
    for (command, said) in [
        (
            "fence log",
            "walctl: interrupted; the request underway may have been carried out\n",
        ),
        ("logs", ""),
    ] {
        // It takes connections, and says nothing.
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        fixture.endpoint = format!("http://{}", silent.local_addr().unwrap());
        let child = fixture.command(command).stdin(Stdio::null()).spawn();
        let child = child.unwrap();
        let (mut connection, _) = silent.accept().await.unwrap();
        // The beginning of HTTP/2.
        connection.read_exact(&mut [0; 24]).await.unwrap();
        interrupt(child.id().unwrap()).await;
        let ended = child.wait_with_output().await.unwrap();
        assert_eq!(ended.status.code(), Some(130), "{command}");
        assert_eq!(String::from_utf8(ended.stderr).unwrap(), said, "{command}");
    }
}

#[tokio::test]
async fn erasure_that_was_cut_off_after_the_deletion_can_be_repeated() {
    let fixture = Fixture::new().await;
    *fixture.memory.unerased.lock().unwrap() = vec![("gone".to_owned(), 7)];
    let ran = fixture.walctl("log delete gone", "").await;
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let ran = fixture.walctl("log delete --shred gone", "").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(fixture.memory.unerased.lock().unwrap().is_empty());
    let ran = fixture.walctl("log delete --shred gone", "").await;
    assert_eq!(ran.code, 3, "{}", ran.stderr);
}

#[tokio::test]
async fn repeat_of_an_erasure_by_number_leaves_a_new_log_of_the_name() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log --text x", "").await;
    let get = fixture.walctl("log get log -o json", "").await;
    let there: serde_json::Value = serde_json::from_str(&get.stdout).unwrap();
    let earlier = there[0]["log_id"].as_u64().unwrap() + 7;
    *fixture.memory.unerased.lock().unwrap() = vec![("log".to_owned(), earlier)];
    let line = format!("log delete --shred log --log-id {earlier}");
    let ran = fixture.walctl(&line, "").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(fixture.memory.unerased.lock().unwrap().is_empty());
    assert_eq!(fixture.memory.payloads("log"), ["x"]);
}

#[tokio::test]
async fn sync_and_health_answer() {
    let fixture = Fixture::new().await;
    assert_eq!(
        fixture.walctl("sync", "").await.stdout,
        "durable position 42\n"
    );
    assert_eq!(fixture.walctl("health", "").await.stdout, "SERVING\n");
    assert_eq!(fixture.walctl("health unknown.Service", "").await.code, 3);
}

#[tokio::test]
async fn trim_prints_the_first_lsn_kept_and_refuses_past_the_tail() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "x\ny\nz\n").await;
    let done = fixture.walctl("trim log --before 2", "").await;
    assert_eq!((done.code, done.stdout.as_str()), (0, "first lsn 2\n"));
    let done = fixture
        .walctl("trim log --before 2 --output json", "")
        .await;
    assert_eq!(done.stdout, "{\"log\":\"log\",\"first_lsn\":2}\n");
    let beyond = fixture.walctl("trim log --before 9", "").await;
    assert_eq!(beyond.code, 3);
    assert!(beyond.stderr.contains("BEYOND_TAIL"), "{}", beyond.stderr);
    assert_eq!(fixture.walctl("trim log", "").await.code, 2);
}

#[tokio::test]
async fn fenced_log_takes_appends_that_name_its_epoch() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "x\n").await;
    let fenced = fixture.walctl("fence log", "").await;
    assert_eq!(
        (fenced.code, fenced.stdout.as_str()),
        (0, "next lsn 1, writer epoch 1\n")
    );
    let refused = fixture.walctl("append log", "y\n").await;
    assert_eq!(refused.code, 1);
    let advice = "a writer has taken the log over, and only that one may append";
    assert!(refused.stderr.contains(advice), "{}", refused.stderr);
    let taken = fixture.walctl("append log --writer-epoch 1", "y\n").await;
    assert_eq!(taken.code, 0, "{}", taken.stderr);
    let again = fixture.walctl("fence log --writer-epoch 1", "").await;
    assert_eq!(again.code, 1);
    let advice = "--writer-epoch must exceed 1; omit it to use 2";
    assert!(again.stderr.contains(advice), "{}", again.stderr);
}

#[tokio::test]
async fn hint_of_a_fenced_append_does_not_tell_the_new_writers_epoch() {
    let fixture = Fixture::new().await;
    fixture.walctl("fence log --writer-epoch 77", "").await;
    let line = r#"{"log": "log", "text": "x"}"#;
    for (command, advice) in [
        (
            "append log --writer-epoch 76",
            "another writer has taken the log over",
        ),
        (
            "append log --writer-epoch 78",
            "no fence has given that epoch out",
        ),
        ("append log", "a writer has taken the log over"),
        (
            "append --log-from-field log",
            "this command cannot write fenced logs",
        ),
        ("batch", "this command cannot write fenced logs"),
    ] {
        let refused = fixture.walctl(command, line).await;
        assert_eq!(refused.code, 1, "{command}");
        assert!(refused.stderr.contains(advice), "{}", refused.stderr);
        assert!(!refused.stderr.contains("77"), "{}", refused.stderr);
    }
}

#[tokio::test]
async fn cursors_are_set_shown_listed_and_deleted() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "x\ny\nz\n").await;
    for name in ["a", "b", "c"] {
        let line = format!("cursor set log {name} 2");
        let set = fixture.walctl(&line, "").await;
        assert_eq!(set.code, 0, "{}", set.stderr);
    }
    let line = "cursor set log a 3 --expected-lsn 1";
    let refused = fixture.walctl(line, "").await;
    assert_eq!(refused.code, 1);
    assert!(refused.stderr.contains("POSITION_MISMATCH"));
    let advice = "someone else has moved the cursor on; `walctl cursor get log a`";
    assert!(refused.stderr.contains(advice), "{}", refused.stderr);
    let line = "cursor set log a 3 --expected-lsn 3";
    let refused = fixture.walctl(line, "").await;
    let advice = "`walctl cursor get log a` shows where it is";
    assert!(refused.stderr.contains(advice), "{}", refused.stderr);
    let line = "cursor set log new 3 --expected-lsn 1";
    let refused = fixture.walctl(line, "").await;
    let advice = "no such cursor has been set yet";
    assert!(refused.stderr.contains(advice), "{}", refused.stderr);
    let moved = fixture
        .walctl("cursor set log a 3 --expected-lsn 2 --output jsonl", "")
        .await;
    let moved: serde_json::Value = serde_json::from_str(&moved.stdout).unwrap();
    assert_eq!((&moved["cursor"], &moved["lsn"]), (&"a".into(), &3.into()));
    let deleted = fixture.walctl("cursor delete log b", "").await;
    assert_eq!(deleted.code, 0, "{}", deleted.stderr);
    let shown = fixture.walctl("cursor get log b", "").await;
    assert_eq!(shown.code, 3);
    let listed = fixture.walctl("cursor list log", "").await;
    let rows: Vec<Vec<&str>> = listed
        .stdout
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let expected = [
        ["CURSOR", "NEXT", "LAG", "MOVED"],
        ["a", "3", "0", "-"],
        ["c", "2", "1", "-"],
    ];
    assert_eq!(rows, expected);
}

#[tokio::test]
async fn cursors_of_a_log_that_was_replaced_are_not_shown() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "x\n").await;
    let set = fixture.walctl("cursor set log a 1 --output json", "").await;
    let set: serde_json::Value = serde_json::from_str(&set.stdout).unwrap();
    let log_id = set[0]["log_id"].as_u64().unwrap();
    for command in ["cursor get log a", "cursor list log"] {
        let same = format!("{command} --log-id {log_id}");
        assert_eq!(fixture.walctl(&same, "").await.code, 0);
        let other = format!("{command} --log-id {}", log_id + 1);
        let refused = fixture.walctl(&other, "").await;
        assert_eq!(refused.code, 1);
        assert!(
            refused.stderr.contains("LOG_REPLACED"),
            "{}",
            refused.stderr
        );
    }
}

#[tokio::test]
async fn status_shows_server_and_journal_as_a_table_or_json() {
    let fixture = Fixture::new().await;
    let shown = fixture.walctl("status", "").await;
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    for words in ["wald 9.9.9", "SERVING", "batch", "3 segments, 3.00 KiB"] {
        assert!(
            shown.stdout.contains(words),
            "no {words} in {}",
            shown.stdout
        );
    }
    assert!(!shown.stdout.contains("0000000000000002"));
    let shown = fixture.walctl("status --segments", "").await;
    assert!(shown.stdout.contains("0000000000000002"));
    let json = fixture.walctl("status --output json", "").await.stdout;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["health"], "SERVING");
    assert_eq!(json["segments"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn completions_and_man_pages_are_printed_without_a_server() {
    let mut fixture = Fixture::new().await;
    fixture.endpoint = "http://127.0.0.1:1".to_owned();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let printed = fixture.walctl(&format!("completion {shell}"), "").await;
        assert_eq!(printed.code, 0, "{}", printed.stderr);
        assert!(printed.stdout.contains("WALCTL_COMPLETE"), "{shell}");
    }
    let page = fixture.walctl("man", "").await.stdout;
    assert!(page.contains(".TH walctl 1") && page.contains("walctl\\-append(1)"));
    let page = fixture.walctl("man log create", "").await.stdout;
    assert!(page.contains(".TH walctl-log-create 1") && page.contains("sync\\-mode"));
    assert_eq!(fixture.walctl("man nothing", "").await.code, 2);
}

#[tokio::test]
async fn absent_server_exits_with_4_and_wrong_usage_with_2() {
    let mut fixture = Fixture::new().await;
    assert_eq!(fixture.walctl("append", "").await.code, 2);
    assert_eq!(fixture.walctl("scan", "").await.code, 2);
    fixture.endpoint = "http://127.0.0.1:1".to_owned();
    let absent = fixture.walctl("health", "").await;
    assert_eq!(absent.code, 4);
    assert!(
        absent.stderr.contains("is the server running?"),
        "{}",
        absent.stderr
    );
    assert_eq!(absent.stderr.lines().count(), 1);
}

#[tokio::test]
async fn server_without_an_answer_is_named_and_so_is_the_outcome() {
    let mut fixture = Fixture::new().await;
    // It takes connections, and says nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.endpoint = format!("http://{}", silent.local_addr().unwrap());
    let no_answer = format!("no answer from {} within 300ms", fixture.endpoint);
    for (command, outcome) in [
        (
            "append log --text x --timeout 300ms",
            "nothing was appended: ",
        ),
        ("batch --timeout 300ms", "may or may not be made"),
        ("log create log --timeout 300ms", "may or may not be made"),
        ("logs --timeout 300ms", "--timeout allows more"),
    ] {
        let ran = fixture
            .walctl(command, r#"{"log": "log", "text": "x"}"#)
            .await;
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        assert!(ran.stderr.contains(&no_answer), "{}", ran.stderr);
        assert!(ran.stderr.contains(outcome), "{}", ran.stderr);
    }
    let read = fixture.walctl("logs --timeout 300ms", "").await.stderr;
    assert!(!read.contains("may or may not"), "{read}");
}

#[tokio::test]
async fn server_of_http_1_is_said_to_be_no_wald_server() {
    let mut fixture = Fixture::new().await;
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.endpoint = format!("http://{}", other.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = other.accept().await {
            tokio::spawn(async move {
                // Preface, settings and window update of HTTP/2, and a part of the request.
                let _ = connection.read_exact(&mut [0; 150]).await;
                let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
                let _ = connection.write_all(answer).await;
                // A close before the client has read would take the answer with it.
                let _ = tokio::io::copy(&mut connection, &mut tokio::io::sink()).await;
            });
        }
    });
    for command in [
        "logs --timeout 2s",
        "health",
        "append log --text x --timeout 2s",
    ] {
        // On a busy machine the timeout may end the last of several attempts before its answer has come.
        let mut said = String::new();
        for _ in 0..10 {
            said = fixture.walctl(command, "").await.stderr;
            if !said.contains("no answer from") {
                break;
            }
        }
        assert!(said.contains("no Wald server"), "{said}");
    }
}

#[tokio::test]
async fn absent_server_is_complained_about_once_and_a_scan_gives_up_too() {
    let mut fixture = Fixture::new().await;
    fixture.endpoint = "127.0.0.1:1".to_owned();
    for command in ["scan log --timeout 600ms", "tail log --timeout 600ms"] {
        let absent = fixture.walctl(command, "").await;
        assert_eq!(absent.code, 4, "{}", absent.stderr);
        assert!(absent.stderr.lines().count() <= 2, "{}", absent.stderr);
    }
}

#[tokio::test]
async fn server_that_comes_within_the_timeout_is_waited_for() {
    let mut fixture = Fixture::new().await;
    let behind = fixture.endpoint.replace("http://", "");
    // The port refuses connections until the socket listens.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    // Without a scheme, too.
    fixture.endpoint = socket.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        // The client must meet an absent server first, and nothing shows its attempts from outside.
        tokio::time::sleep(std::time::Duration::from_millis(1_200)).await;
        let listener = socket.listen(16).unwrap();
        while let Ok((mut near, _)) = listener.accept().await {
            let mut far = tokio::net::TcpStream::connect(&behind).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
        }
    });
    let loaded = fixture.walctl("append log", "x\n").await;
    assert_eq!(loaded.code, 0, "{}", loaded.stderr);
    assert!(
        loaded.stderr.contains("appended 1 record ("),
        "{}",
        loaded.stderr
    );
}

#[tokio::test]
async fn read_that_stops_early_says_how_to_go_on() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "a\nb\nc\n").await;
    let part = fixture.walctl("read log --max 2 --output raw", "").await;
    assert_eq!((part.code, part.stdout.as_str()), (0, "a\nb\n"));
    assert!(part.stderr.contains("--from 2"), "{}", part.stderr);
    assert!(part.stderr.contains("--max"), "{}", part.stderr);
    let all = fixture.walctl("read log --output raw", "").await;
    assert_eq!(
        (all.stdout.as_str(), all.stderr.as_str()),
        ("a\nb\nc\n", "")
    );
}

#[tokio::test]
async fn page_that_its_bytes_end_says_how_to_go_on() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", &"x\n".repeat(1_600)).await;
    let part = fixture
        .walctl("read log --max 100000 --output raw", "")
        .await;
    assert_eq!(part.stdout.lines().count(), 1_500);
    assert!(
        part.stderr.contains("--from 1500 continues"),
        "{}",
        part.stderr
    );
    assert!(part.stderr.contains("walctl scan"), "{}", part.stderr);
    assert!(!part.stderr.contains("--max"), "{}", part.stderr);
}

#[tokio::test]
async fn read_of_no_records_prints_none() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log --text x", "").await;
    let none = fixture.walctl("read log --max 0", "").await;
    assert_eq!((none.code, none.stdout.as_str()), (0, ""));
}

#[tokio::test]
async fn file_where_the_log_belongs_is_noticed() {
    let fixture = Fixture::new().await;
    let done = fixture.walctl("append Cargo.toml", "").await;
    assert!(
        done.stderr.contains("walctl append LOG Cargo.toml"),
        "{}",
        done.stderr
    );
    let done = fixture.walctl("append log", "").await;
    assert!(!done.stderr.contains("forget"), "{}", done.stderr);
}
