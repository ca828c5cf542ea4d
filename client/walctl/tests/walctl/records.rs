//! Records in and out of `walctl`: every form that it prints comes back, and files are loaded as
//! people have them.

use crate::command::Fixture;
use wald_client::proto::record::Payload;
use wald_client::proto::{AppendBatchRequest, Header, LogBatch, Record};

/// Payloads that text forms are bad at.
fn odd_payloads() -> Vec<Vec<u8>> {
    vec![
        Vec::new(),
        b"\0".to_vec(),
        b"\xff\xfe\0".to_vec(),
        b" {\"n\": 1}\n".to_vec(),
        b"{\"n\":\r\n1.50, \"s\": \"\\ud800\"}".to_vec(),
        b"\"a string\"".to_vec(),
        b"line\nfeed\rreturn\t\x1b[2J".to_vec(),
        "\u{202e}\u{200b}\u{9b}\u{e0041}".as_bytes().to_vec(),
        vec![b'x'; 4 << 20],
        vec![0xfe; 1 << 20],
    ]
}

/// A log with odd payloads, headers and times.
fn fill(fixture: &Fixture) {
    let record = |(number, data): (usize, Vec<u8>)| Record {
        payload: Some(Payload::Data(data.into())),
        headers: match number % 3 {
            0 => Vec::new(),
            _ => vec![
                header("trace", b"a b"),
                header("raw", b"\xff\0"),
                header("", b""),
            ],
        },
        timestamp_us: 1_000_000 + i64::try_from(number).unwrap(),
        ..Default::default()
    };
    for log in ["orders", "audit/é = \u{a0}b"] {
        let batch = LogBatch {
            log: log.to_owned(),
            records: odd_payloads().into_iter().enumerate().map(record).collect(),
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
}

fn header(key: &str, value: &'static [u8]) -> Header {
    Header {
        key: key.to_owned(),
        value: value.into(),
    }
}

fn content(fixture: &Fixture) -> Vec<(String, Vec<Record>)> {
    let state = fixture.memory.state.lock().unwrap();
    let logs = state.logs.iter();
    logs.map(|(name, log)| (name.clone(), log.records.clone()))
        .collect()
}

async fn copy_of_everything(form: &str) {
    let (here, there) = (Fixture::new().await, Fixture::new().await);
    fill(&here);
    let scan = format!("scan --all --output {form}");
    let printed = here.walctl_bytes(&scan, b"").await;
    assert_eq!((printed.code, printed.stderr.as_str()), (0, ""));
    let append = format!("append --format {form}");
    let loaded = there.walctl_bytes(&append, &printed.stdout).await;
    assert_eq!(loaded.code, 0, "{}", loaded.stderr);
    assert!(loaded.stderr.contains("20 records"), "{}", loaded.stderr);
    assert!(content(&here) == content(&there), "the copy differs");
}

#[tokio::test]
async fn delimited_output_of_all_logs_is_appended_equal() {
    copy_of_everything("delimited").await;
}

#[tokio::test]
async fn json_output_of_all_logs_is_appended_equal() {
    copy_of_everything("json").await;
}

#[tokio::test]
async fn page_of_a_log_is_appended_to_another_log() {
    let fixture = Fixture::new().await;
    fill(&fixture);
    for form in ["json", "delimited"] {
        let read = format!("read orders --output {form}");
        let page = fixture.walctl_bytes(&read, b"").await;
        let append = format!("append {form} --format {form}");
        let done = fixture.walctl_bytes(&append, &page.stdout).await;
        assert_eq!(done.code, 0, "{}", done.stderr);
        let state = fixture.memory.state.lock().unwrap();
        assert!(state.logs[form].records == state.logs["orders"].records);
    }
}

#[tokio::test]
async fn headers_time_and_text_come_from_the_command_line() {
    let fixture = Fixture::new().await;
    let append = "append log --text one --text two --header k=v=w --header n=1 \
                  --time 1970-01-01T00:00:05Z";
    let done = fixture.walctl(append, "not read").await;
    assert_eq!(done.code, 0, "{}", done.stderr);
    let shown = fixture.walctl("read log", "").await;
    assert_eq!(
        shown.stdout,
        "0  1970-01-01T00:00:05.000000Z  [k=v=w, n=1]  one\n\
         1  1970-01-01T00:00:05.000000Z  [k=v=w, n=1]  two\n"
    );
    let both = fixture.walctl("append log Cargo.toml --text x", "").await;
    assert_eq!(both.code, 2, "{}", both.stderr);
}

#[tokio::test]
async fn jsonl_says_what_it_leaves_out() {
    let fixture = Fixture::new().await;
    fixture
        .walctl("append log --text hello --header k=v", "")
        .await;
    let printed = fixture.walctl("scan log --output jsonl", "").await;
    assert_eq!(printed.stdout, "\"hello\"\n");
    let left_out = "1 records have headers that it leaves out, 1 are not JSON";
    assert!(printed.stderr.contains(left_out), "{}", printed.stderr);
}

#[tokio::test]
async fn lines_come_back_to_the_byte() {
    let fixture = Fixture::new().await;
    let odd = b"a\0b\n\0\n\xff\xfe\n\x1b[31mred\x1b[0m\ncr\ronly\n";
    let done = fixture.walctl_bytes("append log", odd).await;
    assert_eq!(done.code, 0, "{}", done.stderr);
    let back = fixture.walctl_bytes("scan log --output raw", b"").await;
    assert_eq!(back.stdout, odd);
}

#[tokio::test]
async fn load_of_a_producer_is_run_again_without_duplicates() {
    let fixture = Fixture::new().await;
    let lines: String = (0..2_500).map(|number| format!("{number}\n")).collect();
    // The first run ends in the middle, as after a kill.
    let part: String = lines
        .lines()
        .take(1_000)
        .map(|line| format!("{line}\n"))
        .collect();
    let first = fixture.walctl("append log --producer load-1", &part).await;
    assert_eq!(first.code, 0, "{}", first.stderr);
    for (run, known) in [("second", "1,000"), ("third", "2,500")] {
        let again = fixture.walctl("append log --producer load-1", &lines).await;
        assert_eq!(again.code, 0, "{run}: {}", again.stderr);
        let there = format!("{known} records were there already");
        assert!(again.stderr.contains(&there), "{run}: {}", again.stderr);
    }
    assert_eq!(fixture.memory.payloads("log").len(), 2_500);
    let other = fixture
        .walctl("append log --producer load-1", "other\n")
        .await;
    assert_eq!(other.code, 1);
    assert!(
        other.stderr.contains("use another --producer"),
        "{}",
        other.stderr
    );
}

#[tokio::test]
async fn load_of_a_producer_goes_by_logs_and_restarts_over_many() {
    let fixture = Fixture::new().await;
    let lines: String = (0..1_500)
        .map(|number| format!("{{\"log\":\"l{}\",\"n\":{number}}}\n", number % 3))
        .collect();
    let append = "append --format jsonl --log-from-field log --producer p";
    for _ in 0..2 {
        let done = fixture.walctl(append, &lines).await;
        assert_eq!(done.code, 0, "{}", done.stderr);
    }
    for log in ["l0", "l1", "l2"] {
        assert_eq!(fixture.memory.payloads(log).len(), 500);
    }
}

#[tokio::test]
async fn input_that_no_remembered_batch_proves_is_no_repetition() {
    let fixture = Fixture::new().await;
    fixture.memory.state.lock().unwrap().producer_window = Some(2);
    let lines: String = (0..4_500).map(|number| format!("{number}\n")).collect();
    for _ in 0..2 {
        let done = fixture.walctl("append log --producer p", &lines).await;
        assert_eq!(done.code, 0, "{}", done.stderr);
    }
    // Its batches are as old as those that the server does not remember.
    let other = fixture.walctl("append log --producer p", "other\n").await;
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(
        other.stderr.contains("use another --producer") && !other.stderr.contains("already"),
        "{}",
        other.stderr
    );
    assert_eq!(fixture.memory.payloads("log").len(), 4_500);
}
