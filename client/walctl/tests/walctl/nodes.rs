//! walctl with several servers that share a store.

use std::sync::atomic::Ordering;

use crate::command::Fixture;

/// A port that no server of a test has.
const NOBODY: &str = "http://127.0.0.1:1";

#[tokio::test]
async fn each_command_finds_the_server_of_a_list_that_runs() {
    let fixture = Fixture::new().await;
    let list = format!("--endpoint {NOBODY},{}", fixture.endpoint);
    for (arguments, words) in [
        ("append log --text x", ""),
        ("read log -o raw", "x"),
        ("scan --all -o raw", "x"),
        ("health", "SERVING"),
        ("status", fixture.endpoint.as_str()),
    ] {
        let ran = fixture.walctl(&format!("{arguments} {list}"), "").await;
        assert_eq!(ran.code, 0, "{arguments}: {}", ran.stderr);
        assert!(ran.stdout.contains(words), "{arguments}: {}", ran.stdout);
    }
    let ran = fixture
        .walctl(&format!("health --endpoint {NOBODY},{NOBODY}"), "")
        .await;
    assert_eq!(ran.code, 4, "{}", ran.stderr);
}

#[tokio::test]
async fn each_command_goes_on_to_the_owner_that_a_server_names() {
    let fixture = Fixture::new().await;
    let (owner, at_owner) = fixture.memory.start_beside().await;
    *fixture.memory.owner.lock().unwrap() = Some(at_owner.clone());
    let lines: String = (0..3000).map(|number| format!("{number}\n")).collect();
    let ran = fixture.walctl("append log --producer p", &lines).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(owner.payloads("log").len(), 3000);
    let ran = fixture.walctl("read log --limit 1 -o raw", "").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "0\n"));
    let calls = fixture.memory.calls();
    assert!(
        calls <= 2 * 2,
        "each walctl asks the old server once: {calls}"
    );
    // These ask once, so that they describe the server that they name.
    let ran = fixture.walctl("status", "").await;
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    assert!(ran.stderr.contains("MOVED"), "{}", ran.stderr);
    let list = format!("status --endpoint {NOBODY},{}", fixture.endpoint);
    let ran = fixture.walctl(&list, "").await;
    assert!(
        ran.stdout.contains(&at_owner),
        "{} {}",
        ran.stdout,
        ran.stderr
    );
}

#[tokio::test]
async fn followers_of_any_node_never_call_for_the_tail_which_the_owner_has() {
    let fixture = Fixture::new().await;
    fixture.walctl("append log --text x", "").await;
    for command in ["tail log", "scan log --follow"] {
        let line = format!("{command} --limit 1 --any-node -o raw");
        let ran = fixture.walctl(&line, "").await;
        assert_eq!(
            (ran.code, ran.stdout.as_str()),
            (0, "x\n"),
            "{}",
            ran.stderr
        );
        assert_eq!(
            fixture.memory.tail_calls.load(Ordering::Relaxed),
            0,
            "{command}"
        );
    }
}
