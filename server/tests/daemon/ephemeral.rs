//! `wald --ephemeral`: a store and ports of its own, and nothing left at the end.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{output, wald};
use rustix::process::{Pid, Signal, kill_process};
use wald_client::Client;

fn ephemeral(directory: &Path) -> Command {
    let mut command = wald();
    command.arg("--ephemeral").env("TMPDIR", directory);
    command
}

fn is_empty(directory: &Path) -> bool {
    directory.read_dir().unwrap().next().is_none()
}

fn stop(child: &Child) {
    kill_process(Pid::from_child(child), Signal::TERM).unwrap();
}

#[tokio::test]
async fn ephemeral_daemons_share_nothing_and_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut children = Vec::new();
    for _ in 0..2 {
        let mut command = ephemeral(directory.path());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let (grpc, http) = line.trim_end().split_once(' ').unwrap();
        let grpc = grpc.strip_prefix("grpc=").unwrap();
        assert!(http.starts_with("http=127.0.0.1:"), "{line}");
        let client = Client::connect(grpc).await.unwrap();
        let ack = client.append("a", "first").await.unwrap();
        assert_eq!(ack.lsn.get(), 0, "its store is new");
        children.push((child, stdout));
    }
    for (mut child, mut stdout) in children {
        stop(&child);
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "", "one line says it all");
    }
    assert!(is_empty(directory.path()));
}

#[test]
fn ephemeral_daemon_ends_if_nobody_can_read_its_ports() {
    let directory = tempfile::tempdir().unwrap();
    // The reader has ended; the parent of the daemon lives on.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = ephemeral(directory.path());
    command.stdout(writer).stderr(Stdio::null());
    let ended = command.spawn().unwrap().wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    assert!(is_empty(directory.path()));
}

#[test]
fn ephemeral_daemon_refuses_a_directory_and_a_bucket() {
    let directory = tempfile::tempdir().unwrap();
    let mut refusals = vec![(
        ["--data-dir", "data"],
        "--ephemeral makes a data directory of its own",
    )];
    if cfg!(feature = "object") {
        refusals.push((
            ["--bucket-url", "s3://b/p"],
            "an ephemeral store has no replica",
        ));
    }
    for (arguments, said) in refusals {
        let refused = output(ephemeral(directory.path()).args(arguments));
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(78), "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
        assert!(is_empty(directory.path()));
    }
    let refused = output(wald().args(["--ephemeral", "verify"]));
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--ephemeral is an option"), "{stderr}");
}
