//! Mistakes that people make at `wald`: each answer names the next step, and nothing is served.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails where it stands"
)]

use std::process::Command;

/// A command line, its exit code, and words of its answer that name the remedy.
type Mistake = (&'static str, i32, &'static str);

const MISTAKES: &[Mistake] = &[
    ("--segment-byte 1MiB", 2, "'--segment-bytes'"),
    ("sreve", 2, "'serve'"),
    ("./data", 2, "--data-dir ./data"),
    ("append", 2, "`walctl append --help`"),
    ("bench", 2, "`walbench --help`"),
    ("repair missing", 1, "name it on the command line"),
    ("--reflection false", 2, "--reflection=false"),
    ("config", 2, "--help"),
    ("config check --segment-bytes 1gb", 78, "write GB"),
    (
        "config check --segment-bytes 4KiB",
        78,
        "the least is 64KiB",
    ),
    ("config check --drain-delay 5", 78, "a unit is missing"),
    ("config check --drain-delay 5min", 78, "write m"),
    (
        "config check --sync-mode fast",
        78,
        "expected strict, batch",
    ),
    (
        "config check --config bad.toml",
        78,
        "did you mean \"segment_bytes\"",
    ),
    (
        "config check --config missing.toml",
        78,
        "`wald config reference`",
    ),
    (
        "config check --listen 0.0.0.0:7000",
        78,
        "--insecure-listen",
    ),
    ("config check --listen 7000", 78, "such as 127.0.0.1:6925"),
    (
        "config check --cursor-lag-logs $x",
        78,
        "expected names of logs",
    ),
    (
        "--data-dir bad.toml",
        74,
        "name a directory with --data-dir",
    ),
    ("verify missing", 1, "name it on the command line"),
    ("archive list", 2, "--archive"),
    (
        "archive restore --archive . --log nosuch --to new",
        3,
        "holds nothing of that",
    ),
    ("delete-logs", 2, "--prefix <PREFIX>"),
];

#[test]
fn each_answer_to_a_mistake_names_the_next_step() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("bad.toml"),
        "segmnt_bytes = \"1MiB\"\n",
    )
    .unwrap();
    let mut wrong = Vec::new();
    for (arguments, code, next) in MISTAKES {
        let done = Command::new(env!("CARGO_BIN_EXE_wald"))
            .args(arguments.split(' '))
            .current_dir(directory.path())
            .output()
            .unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        if done.status.code() != Some(*code) || !said.contains(next) {
            wrong.push(format!("wald {arguments}: {} {said}", done.status));
        }
    }
    let made = directory.path().join("new");
    assert!(!made.exists(), "a restore of nothing leaves no directory");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
