//! `walctl apply`: logs as a file says.

use std::process::Stdio;

use crate::command::{Fixture, interrupt};

const FILE: &str = "
logs:
  - name: shop/orders
    sync_mode: batch
  - name: shop/audit
";

#[tokio::test]
async fn second_run_changes_nothing() {
    let fixture = Fixture::new().await;
    let first = fixture.walctl("apply -f -", FILE).await;
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert_eq!(first.stdout, "created shop/orders\ncreated shop/audit\n");
    let second = fixture.walctl("apply -f -", FILE).await;
    assert_eq!(
        second.stdout,
        "unchanged shop/orders\nunchanged shop/audit\n"
    );
}

#[tokio::test]
async fn change_is_shown_before_it_is_made() {
    let fixture = Fixture::new().await;
    fixture.walctl("apply -f -", FILE).await;
    let changed = FILE.replace("batch", "strict");
    let shown = fixture.walctl("apply -f - --dry-run", &changed).await;
    assert_eq!(
        shown.stdout,
        "would change shop/orders: sync_mode: batch -> strict\nunchanged shop/audit\n"
    );
    let made = fixture.walctl("apply -f - -o jsonl", &changed).await;
    let line = made.stdout.lines().next().unwrap();
    assert_eq!(
        line,
        r#"{"log":"shop/orders","step":"changed","changes":[{"setting":"sync_mode","before":"batch","after":"strict"}],"dry_run":false}"#
    );
    let again = fixture.walctl("apply -f - --dry-run", &changed).await;
    assert_eq!(
        again.stdout,
        "unchanged shop/orders\nunchanged shop/audit\n"
    );
}

#[tokio::test]
async fn prune_deletes_other_logs_of_the_prefix_alone() {
    let fixture = Fixture::new().await;
    for log in ["shop/old", "shop/older", "shopping", "other"] {
        fixture.walctl(&format!("log create {log}"), "").await;
    }
    let shown = fixture
        .walctl("apply -f - --prune shop/ --dry-run", FILE)
        .await;
    let lines: Vec<_> = shown.stdout.lines().skip(2).collect();
    assert_eq!(lines, ["would delete shop/old", "would delete shop/older"]);
    let pruned = fixture.walctl("apply -f - --prune shop/ --yes", FILE).await;
    assert_eq!(pruned.code, 0, "{}", pruned.stderr);
    let left = fixture.walctl("logs --limit 0 -o raw", "").await;
    assert_eq!(left.stdout, "other\nshop/audit\nshop/orders\nshopping\n");
    let empty = fixture.walctl("apply -f - --prune= --yes", FILE).await;
    assert_eq!(empty.code, 2, "every log has the empty prefix");
}

#[tokio::test]
async fn prune_asks_a_person() {
    let fixture = Fixture::new().await;
    fixture.walctl("log create shop/old", "").await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("logs.yaml");
    std::fs::write(&path, FILE).unwrap();
    let command = format!("apply -f {} --prune shop/", path.display());
    let (code, screen) = fixture.on_terminal(&command, "n\n", 200).await;
    assert_eq!(code, 1, "{screen}");
    assert!(
        screen.contains("delete 1 log with all records, for ever: shop/old?"),
        "{screen}"
    );
    // With the file on stdin there is nobody to ask.
    let unasked = fixture.walctl("apply -f - --prune shop/", FILE).await;
    assert_eq!(unasked.code, 2, "{}", unasked.stderr);
    assert!(unasked.stderr.contains("add --yes"), "{}", unasked.stderr);
    let left = fixture.walctl("logs --limit 0 -o raw", "").await;
    assert!(left.stdout.contains("shop/old"), "{}", left.stdout);
}

#[tokio::test]
async fn file_with_a_mistake_changes_nothing() {
    let fixture = Fixture::new().await;
    let wrong = FILE.replace("name: shop/audit", "nam: shop/audit");
    let refused = fixture.walctl("apply -f -", &wrong).await;
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("nam"), "{}", refused.stderr);
    assert!(refused.stderr.contains("line 5"), "{}", refused.stderr);
    let left = fixture.walctl("logs --limit 0 -o raw", "").await;
    assert_eq!(left.stdout, "");
}

#[tokio::test]
async fn error_names_the_log_and_the_steps_before_are_shown() {
    let fixture = Fixture::new().await;
    let wrong = format!("{FILE}  - name: $system\n");
    let failed = fixture.walctl("apply -f -", &wrong).await;
    assert_eq!(failed.code, 1, "{}", failed.stderr);
    assert!(failed.stderr.contains("$system"), "{}", failed.stderr);
    assert_eq!(failed.stdout, "created shop/orders\ncreated shop/audit\n");
}

#[tokio::test]
async fn interrupted_run_shows_the_steps_that_are_done() {
    let fixture = Fixture::new().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("logs.yaml");
    let logs: String = (0..5_000).map(|at| format!("  - name: l{at}\n")).collect();
    std::fs::write(&path, format!("logs:\n{logs}")).unwrap();
    let command = format!("apply -f {} --timeout 60s", path.display());
    let child = fixture.command(&command).stdin(Stdio::null()).spawn();
    let child = child.unwrap();
    while fixture.memory.state.lock().unwrap().logs.len() < 2 {
        tokio::task::yield_now().await;
    }
    // Every later call is referred to nobody.
    *fixture.memory.owner.lock().unwrap() = Some("http://127.0.0.1:1".to_owned());
    interrupt(child.id().unwrap()).await;
    let ended = child.wait_with_output().await.unwrap();
    assert_eq!(ended.status.code(), Some(130));
    let (stdout, stderr) = (ended.stdout, String::from_utf8(ended.stderr).unwrap());
    assert!(stdout.starts_with(b"created l0\n"), "{stderr}");
    assert!(stderr.contains("may have been carried out"), "{stderr}");
}
