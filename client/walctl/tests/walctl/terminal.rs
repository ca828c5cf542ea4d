//! `walctl` on a terminal: nothing that a server sends orders it about, and people are asked.

use crate::command::Fixture;
use wald_client::proto::record::Payload;
use wald_client::proto::{AppendBatchRequest, Gap, GapReason, Header, LogBatch, Record};

/// Clears the screen in two ways, writes backwards, hides.
const EVIL: &str = "e\u{1b}[2J\u{9b}2J\u{202e}\u{200b}\u{7f}\u{e0041}";

async fn with_evil_log() -> Fixture {
    let fixture = Fixture::new().await;
    for data in [EVIL.to_owned(), format!("{{\"{EVIL_JSON}\": 1}}")] {
        let record = Record {
            payload: Some(Payload::Data(data.into())),
            headers: vec![Header {
                key: EVIL.to_owned(),
                value: EVIL.into(),
            }],
            ..Default::default()
        };
        let batch = LogBatch {
            log: EVIL.to_owned(),
            records: vec![record],
            ..Default::default()
        };
        let request = AppendBatchRequest {
            batches: vec![batch],
            ..Default::default()
        };
        fixture
            .memory
            .state
            .lock()
            .unwrap()
            .append(request)
            .unwrap();
    }
    *fixture.memory.gap.lock().unwrap() = Some(Gap {
        log: EVIL.to_owned(),
        from_lsn: Some(3),
        to_lsn: Some(7),
        reason: GapReason::Trimmed.into(),
    });
    fixture
}

/// The evil text without the characters that JSON forbids within strings.
const EVIL_JSON: &str = "e\u{9b}2J\u{202e}\u{200b}\u{7f}\u{e0041}";

/// Characters that a terminal got and must not get.
fn odd(screen: &str) -> Vec<char> {
    let plain = |c: &char| matches!(c, '\r' | '\n' | ' '..='~');
    screen.chars().filter(|c| !plain(c)).collect()
}

#[tokio::test]
async fn terminal_gets_names_errors_headers_and_values_escaped() {
    let fixture = with_evil_log().await;
    for form in ["text", "json", "jsonl", "raw"] {
        for command in ["scan --all", "logs", "status --segments"] {
            let arguments = format!("{command} --output {form}");
            let (_, screen) = fixture.on_terminal(&arguments, "", 120).await;
            assert!(screen.len() > 10, "{arguments}: {screen:?}");
            assert_eq!(odd(&screen), [], "{arguments}: {screen:?}");
        }
    }
    let (code, screen) = fixture
        .on_terminal("scan --all --output raw --unescaped", "", 120)
        .await;
    assert_eq!(code, 0);
    assert!(screen.contains('\u{202e}'), "{screen:?}");
    let (code, screen) = fixture
        .on_terminal("scan --all --output delimited", "", 120)
        .await;
    assert_eq!(code, 2);
    assert!(screen.contains("redirect it"), "{screen:?}");
}

#[tokio::test]
async fn terminal_gets_the_caller_and_the_contexts_escaped() {
    let fixture = Fixture::new().await;
    EVIL.clone_into(&mut fixture.memory.caller_prefix.lock().unwrap());
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("wald/config.toml");
    let context = wald_connection::Context {
        endpoint: EVIL.to_owned(),
        token_file: Some(EVIL.into()),
        tls_server_name: Some(EVIL.to_owned()),
        ..Default::default()
    };
    wald_connection::add(&file, "evil", &context, false).unwrap();
    for form in ["text", "json", "jsonl", "raw"] {
        for command in ["whoami", "context list", "context show evil"] {
            let arguments = format!("{command} --output {form}");
            let variables = [("XDG_CONFIG_HOME", home.path())];
            let (_, screen) = fixture
                .on_terminal_with(&arguments, &variables, "", 120)
                .await;
            assert!(screen.len() > 10, "{arguments}: {screen:?}");
            assert_eq!(odd(&screen), [], "{arguments}: {screen:?}");
        }
    }
}

#[tokio::test]
async fn pipe_gets_text_escaped_and_everything_else_as_it_is() {
    let fixture = with_evil_log().await;
    for arguments in ["scan --all", "logs", "scan --all --output text"] {
        let ran = fixture.walctl(arguments, "").await;
        assert_eq!(odd(&ran.stdout), [], "{:?}", ran.stdout);
        assert_eq!(odd(&ran.stderr), [], "{:?}", ran.stderr);
    }
    let raw = fixture.walctl("scan --all --output raw", "").await;
    assert!(raw.stdout.starts_with(EVIL), "{:?}", raw.stdout);
    assert_eq!(odd(&raw.stderr), [], "{:?}", raw.stderr);
}

#[tokio::test]
async fn deleting_and_trimming_ask_on_a_terminal() {
    let fixture = Fixture::new().await;
    fixture.walctl("append orders --text a --text b", "").await;
    let (code, screen) = fixture
        .on_terminal("trim orders --before 1", "n\n", 80)
        .await;
    assert_eq!(code, 1, "{screen}");
    assert!(screen.contains("below lsn 1"), "{screen}");
    assert!(screen.contains("nothing was trimmed"), "{screen}");
    let (code, screen) = fixture
        .on_terminal("trim orders --before 1", "y\n", 80)
        .await;
    assert_eq!(code, 0, "{screen}");
    let (code, screen) = fixture.on_terminal("log delete orders", "\n", 80).await;
    assert_eq!(code, 1, "{screen}");
    assert!(
        screen.contains("delete the log orders with 2 records, lsn 0 to 1"),
        "{screen}"
    );
    assert!(
        fixture
            .memory
            .state
            .lock()
            .unwrap()
            .logs
            .contains_key("orders")
    );
    let (code, screen) = fixture.on_terminal("log delete orders --yes", "", 80).await;
    assert_eq!(code, 0, "{screen}");
    assert!(!screen.contains("[y/N]"), "{screen}");
    assert!(fixture.memory.state.lock().unwrap().logs.is_empty());
}

#[tokio::test]
async fn table_on_a_terminal_of_unknown_width_has_a_line_per_row() {
    let fixture = Fixture::new().await;
    let name = "orders/of-a-long-name/that-does-not-fit";
    fixture.walctl(&format!("append {name} --text x"), "").await;
    for columns in [0, 5] {
        let (_, screen) = fixture.on_terminal("logs", "", columns).await;
        assert_eq!(screen.lines().count(), 2, "{screen}");
        assert!(screen.contains(name), "{screen}");
    }
    let (_, screen) = fixture.on_terminal("logs", "", 60).await;
    assert!(
        screen
            .lines()
            .all(|line| line.trim_end().chars().count() <= 60),
        "{screen}"
    );
}

#[tokio::test]
async fn follower_of_a_missing_log_says_that_it_waits() {
    let fixture = Fixture::new().await;
    for command in ["tail nothing", "scan nothing --follow"] {
        let mut child = fixture
            .command(command)
            .stdin(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = tokio::io::BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        tokio::io::AsyncBufReadExt::read_line(&mut lines, &mut said)
            .await
            .unwrap();
        assert!(
            said.contains("there is no log nothing yet; waiting"),
            "{said}"
        );
        child.kill().await.unwrap();
    }
}

#[tokio::test]
async fn interruption_at_a_question_ends_the_command_and_changes_nothing() {
    let fixture = Fixture::new().await;
    fixture.walctl("append orders --text a", "").await;
    for command in ["log delete orders", "trim orders --before 1"] {
        let (code, screen) = fixture.interrupted_at(command, "[y/N]").await;
        assert_eq!(code, 130, "{screen}");
    }
    assert_eq!(fixture.memory.payloads("orders"), ["a"]);
}

#[tokio::test]
async fn interruption_while_a_batch_is_typed_ends_the_command() {
    let fixture = Fixture::new().await;
    let (code, screen) = fixture.interrupted_at("batch", "Ctrl-D ends").await;
    assert_eq!(code, 130, "{screen}");
    assert!(fixture.memory.requests.lock().unwrap().is_empty());
}
