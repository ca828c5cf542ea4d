//! `walctl producer`: the producers of a log, listed and forgotten.

use crate::command::{Fixture, Ran};
use crate::memory::StoredProducer;
use serde_json::{Value, json};

/// A log with two batches of producer `a`, and one each of `b` and `c`.
async fn with_producers() -> Fixture {
    let fixture = Fixture::new().await;
    let lines = "x\n".repeat(1_001);
    for (producer, lines) in [("b --producer-epoch 3", "x\n"), ("a", &lines), ("c", "x\n")] {
        let append = format!("append log --producer {producer}");
        let ran = fixture.walctl(&append, lines).await;
        assert_eq!(ran.code, 0, "{}", ran.stderr);
    }
    fixture
}

/// Runs `walctl producer forget` with an id that may hold any character.
async fn forget(fixture: &Fixture, id: &str) -> Ran {
    let mut command = fixture.command("producer forget log --");
    let ended = command.arg(id).output().await.unwrap();
    Ran {
        code: ended.status.code().unwrap(),
        stdout: String::from_utf8(ended.stdout).unwrap(),
        stderr: String::from_utf8(ended.stderr).unwrap(),
    }
}

/// Runs a command that must fail with this exit code and this text.
async fn fails(fixture: &Fixture, command: &str, code: i32, text: &str) {
    let ran = fixture.walctl(command, "").await;
    assert_eq!(ran.code, code, "{command}");
    assert!(ran.stderr.contains(text), "{}", ran.stderr);
}

#[tokio::test]
async fn producers_are_listed_by_id_over_all_pages() {
    let fixture = with_producers().await;
    let listed = fixture.walctl("producer list log", "").await;
    assert_eq!(
        (listed.code, listed.stdout.as_str()),
        (
            0,
            concat!(
                " PRODUCER  EPOCH  NEXT  LAST APPEND\n",
                " a             0     2  1970-01-02T00:00:00Z\n",
                " b             3     1  1970-01-02T00:00:00Z\n",
                " c             0     1  1970-01-02T00:00:00Z\n",
            )
        )
    );
    let raw = fixture.walctl("producer list log --output raw", "").await;
    assert_eq!(raw.stdout, "a\nb\nc\n");
}

#[tokio::test]
async fn producers_are_listed_as_json() {
    let fixture = with_producers().await;
    let shown = |id: &str, epoch: u64, next: u64| {
        json!({
            "log": "log",
            "id": id,
            "epoch": epoch,
            "next_sequence": next,
            "last_append_time": "1970-01-02T00:00:00Z",
        })
    };
    let expected = [shown("a", 0, 2), shown("b", 3, 1), shown("c", 0, 1)];
    let whole = fixture.walctl("producer list log --output json", "").await;
    let whole: Vec<Value> = serde_json::from_str(&whole.stdout).unwrap();
    assert_eq!(whole, expected);
    let lines = fixture.walctl("producer list log --output jsonl", "").await;
    let lines: Vec<Value> = (lines.stdout.lines())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines, expected);
}

#[tokio::test]
async fn list_of_a_log_without_producers_is_empty() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log", "x\n").await;
    let json = fixture.walctl("producer list log --output json", "").await;
    assert_eq!((json.code, json.stdout.as_str()), (0, "[]\n"));
    fails(&fixture, "producer list other", 3, "LOG_NOT_FOUND").await;
}

#[tokio::test]
async fn late_duplicate_of_a_forgotten_producer_is_refused() {
    let fixture = with_producers().await;
    let forgotten = fixture.walctl("producer forget log b", "").await;
    assert_eq!(
        (
            forgotten.code,
            forgotten.stdout.as_str(),
            forgotten.stderr.as_str()
        ),
        (
            0,
            "",
            "forgot producer b of log; it may begin again with a higher epoch\n"
        )
    );
    let left = fixture.walctl("producer list log --output raw", "").await;
    assert_eq!(left.stdout, "a\nc\n");
    let records = fixture.memory.payloads("log").len();
    let late = "append log --producer b --producer-epoch 3";
    let late = fixture.walctl(late, "x\n").await;
    assert_eq!(late.code, 1);
    assert!(late.stderr.contains("PRODUCER_EXPIRED"), "{}", late.stderr);
    assert!(
        late.stderr
            .contains("the server has forgotten this producer"),
        "{}",
        late.stderr
    );
    assert_eq!(fixture.memory.payloads("log").len(), records);
    let next = "append log --producer b --producer-epoch 4";
    assert_eq!(fixture.walctl(next, "x\n").await.code, 0);
    assert_eq!(fixture.memory.payloads("log").len(), records + 1);
}

#[tokio::test]
async fn forget_of_a_missing_producer_says_where_to_look() {
    let fixture = with_producers().await;
    fixture.walctl("producer forget log b", "").await;
    for id in ["b", "nobody"] {
        let missing = forget(&fixture, id).await;
        assert_eq!((missing.code, missing.stdout.as_str()), (3, ""));
        let told = &missing.stderr;
        assert!(told.contains("PRODUCER_NOT_FOUND"), "{told}");
        assert!(told.contains("walctl producer list"), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
    }
    fails(&fixture, "producer forget other a", 3, "LOG_NOT_FOUND").await;
}

#[tokio::test]
async fn bad_ids_are_refused_and_nothing_is_forgotten() {
    let fixture = with_producers().await;
    for id in ["", "a\n", "\u{1b}[2J", &"a".repeat(256)] {
        let refused = forget(&fixture, id).await;
        assert_eq!(refused.code, 1, "{id:?}");
        let told = &refused.stderr;
        assert!(told.contains("INVALID_PRODUCER"), "{told}");
        assert!(!told.contains('\u{1b}'), "{told:?}");
    }
    for (usage, part) in [
        ("producer forget log", "<ID>"),
        ("producer forget", "<LOG>"),
        ("producer forget log a b", "'b'"),
        ("producer forget log a --log-id x", "--log-id"),
        ("producer list", "<LOG>"),
    ] {
        fails(&fixture, usage, 2, part).await;
    }
    for command in ["forget log a", "list log"] {
        let command = format!("producer {command} --log-id 99");
        fails(&fixture, &command, 1, "LOG_REPLACED").await;
    }
    let left = fixture.walctl("producer list log --output raw", "").await;
    assert_eq!(left.stdout, "a\nb\nc\n");
}

#[tokio::test]
async fn ids_cannot_break_out_of_the_list() {
    let fixture = Fixture::new().await;
    let odd = "p\n\u{1b}[2J\u{202e}q";
    (fixture.memory.state.lock().unwrap().log("log").producers)
        .insert(odd.to_owned(), StoredProducer::default());
    let listed = fixture.walctl("producer list log", "").await;
    assert_eq!(listed.stdout.lines().count(), 2, "{}", listed.stdout);
    let escaped = "p\\n\\u{1b}[2J\\u{202e}q";
    assert!(listed.stdout.contains(escaped), "{}", listed.stdout);
    let json = fixture.walctl("producer list log --output json", "").await;
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json[0]["id"], odd);
    for output in ["text", "json", "jsonl", "raw"] {
        let list = format!("producer list log --output {output}");
        let (code, screen) = fixture.on_terminal(&list, "", 120).await;
        assert_eq!(code, 0);
        assert!(!screen.contains('\u{1b}'), "{output}: {screen:?}");
        assert!(!screen.contains('\u{202e}'), "{output}: {screen:?}");
    }
}
