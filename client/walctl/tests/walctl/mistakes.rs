//! Mistakes that people make at `walctl`: each answer names the next step.

use crate::command::Fixture;

/// A command line, its stdin, its exit code, and words of its answer that name the remedy.
type Mistake = (&'static str, &'static str, i32, &'static str);

const MISTAKES: &[Mistake] = &[
    ("append", "", 2, "write walctl append LOG [FILE], or"),
    ("append Cargo.toml", "", 0, "walctl append LOG Cargo.toml"),
    ("append log src", "", 2, "name a file"),
    (
        "append log missing.txt",
        "",
        1,
        "cannot open \"missing.txt\"",
    ),
    (
        "append log --format csv",
        "",
        2,
        "possible values: lines, jsonl",
    ),
    (
        "append log --header trace",
        "x",
        2,
        "KEY=VALUE, such as trace=abc",
    ),
    (
        "append log --time yesterday",
        "x",
        2,
        "expected a time such as 2026",
    ),
    ("append log --producer p --expected-lsn 0", "x", 2, "--help"),
    ("append log --producer-epoch 1", "x", 2, "--producer <ID>"),
    (
        "append log --log-prefix shop/",
        "x",
        2,
        "write the whole name",
    ),
    (
        "append log Cargo.toml --text x",
        "",
        2,
        "leave one of them out",
    ),
    ("append log --format jsonl", "{oops", 1, "--format lines"),
    (
        "append log --format json",
        "{\"n\": 1}",
        1,
        "--format jsonl",
    ),
    (
        "append log --format delimited",
        "text",
        1,
        "scan --output delimited",
    ),
    (
        "append log --expected-lsn 7",
        "x",
        1,
        "read the log and decide again",
    ),
    (
        "append fenced",
        "x",
        1,
        "only that one may append, with --writer-epoch",
    ),
    ("fence fenced --writer-epoch 1", "", 1, "omit it to use 2"),
    ("batch", "", 2, "give lines such as {\"log\": \"orders\""),
    ("batch", "{\"text\": \"x\"}", 1, "names no `log`"),
    ("batch", "{oops", 1, "see walctl batch --help"),
    (
        "batch",
        "{\n\"log\": \"a\"}",
        1,
        "each record on one line; see walctl",
    ),
    (
        "batch",
        "{\"n\": 1}",
        1,
        "line 1 is not a record (see walctl",
    ),
    ("read nothing", "", 3, "`walctl logs` lists"),
    ("read log --from x", "", 2, "--help"),
    ("scan", "", 2, "<LOG|--prefix <PREFIX>|--all>"),
    ("scan --all --from 5", "", 2, "--from 10m"),
    (
        "scan log --from yesterday",
        "",
        2,
        "expected a time such as",
    ),
    ("logs --output delimited", "", 2, "try --output json"),
    ("log update log", "", 2, "--max-age 7d"),
    ("log create new --max-age 7days", "", 2, "write d"),
    ("log create new --max-age 7", "", 2, "a unit is missing"),
    ("log create new --max-bytes 10gb", "", 2, "write GB"),
    ("log create log", "", 1, "`walctl log update` changes it"),
    ("log delete nothing", "", 3, "`walctl logs` lists"),
    ("cursor get log none", "", 3, "`walctl cursor list` lists"),
    (
        "cursor set log c 99",
        "",
        3,
        "`walctl log get` shows the next lsn",
    ),
    ("trim log", "", 2, "--before <LSN>"),
    (
        "trim log --before 99",
        "",
        3,
        "`walctl log get` shows the next lsn",
    ),
    ("verify --max-bytes-per-second 5mb", "", 2, "write MB"),
    (
        "verify --max-bytes-per-second 50",
        "",
        1,
        "is 50B, which is very slow",
    ),
    ("logs --timeout 5", "", 2, "a unit is missing"),
    (
        "scan log --from 3 --until 2",
        "",
        2,
        "--until is the lsn after the last one",
    ),
    ("backup lits", "", 2, "looks like `walctl backup list`"),
    ("backup verfy", "", 2, "looks like `wald verify`"),
    ("restore", "", 2, "`wald restore --help`"),
    ("repair DIR", "", 2, "`wald repair --help`"),
    ("archive list", "", 2, "`wald archive --help`"),
    ("bench append", "", 2, "`walbench --help`"),
    ("tail -1 log", "", 2, "`walctl tail -n 1 LOG`"),
    (
        "trim log --before 10m",
        "",
        2,
        "expected an lsn, a whole number",
    ),
    (
        "log create new --max-records 1e6",
        "",
        2,
        "expected a whole number",
    ),
    ("backup DIR --keep 0", "", 2, "expected 1 or more"),
    ("read log --limit 1 -o json", "", 0, ""),
    ("scan log --max 1 -o json", "", 0, ""),
    ("tail log -f --limit 1", "", 0, ""),
    ("tial log", "", 2, "similar subcommand exists: 'tail'"),
    (
        "logs --endpoint http://",
        "",
        2,
        "HOST:PORT, such as 127.0.0.1:6925",
    ),
    (
        "logs --endpoint 127.0.0.1:179250",
        "",
        2,
        "its port is not a number from 1 to 65535",
    ),
    (
        "logs --endpoint localhost,127.0.0.1:0",
        "",
        2,
        "`127.0.0.1:0` is not an endpoint",
    ),
    (
        "logs --endpoint localhost,,127.0.0.1",
        "",
        2,
        "one part of the list is empty",
    ),
    (
        "status --endpoint http://me:secret@localhost",
        "",
        2,
        "http://...@localhost` is not",
    ),
    (
        "logs --endpoint 127.0.0.1:1 --timeout 900ms",
        "",
        4,
        "is the server running?",
    ),
    (
        "logs --endpoint 127.0.0.1:1 --timeout 1500ms",
        "",
        4,
        "nothing listens at http://127.0.0.1:1",
    ),
];

#[tokio::test]
async fn each_answer_to_a_mistake_names_the_next_step() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log --text x", "").await;
    fixture.walctl("fence fenced", "").await;
    let mut wrong = Vec::new();
    for (arguments, stdin, code, next) in MISTAKES {
        let ran = fixture.walctl(arguments, stdin).await;
        if ran.code != *code || !ran.stderr.contains(next) {
            wrong.push(format!(
                "walctl {arguments}: {} {}",
                ran.code,
                ran.stderr.trim()
            ));
        }
    }
    assert!(MISTAKES.len() >= 40);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
