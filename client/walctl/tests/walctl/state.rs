//! `walctl state`: a durable producer that cannot go on, until somebody decides what became of its batches.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::Notify;
use tonic::Code;
use wald_client::{Client, DurableProducer, FileState};

use crate::command::Fixture;
use crate::memory::{Fault, refuse};

/// A program with a durable producer, and the server.
struct Program {
    fixture: Fixture,
    _directory: TempDir,
    path: PathBuf,
}

impl Program {
    async fn new() -> Self {
        let directory = TempDir::new().unwrap();
        Self {
            fixture: Fixture::new().await,
            path: directory.path().join("orders.state"),
            _directory: directory,
        }
    }

    fn client(&self) -> Client {
        let endpoint = self.fixture.endpoint.as_str();
        Client::builder(endpoint).connect_lazy().unwrap()
    }

    /// The next start of the program.
    async fn start(&self) -> DurableProducer {
        let producer = self.client().producer("log");
        let state = FileState::new(&self.path);
        producer.open_durable(state).await.unwrap()
    }

    /// Appends "a", whose ack is seen, and "b" and "c", whose acks are not; then the program ends. `applied`: number of the
    /// two that are in the log.
    async fn end_in_doubt(&self, applied: usize) {
        let mut producer = self.start().await;
        producer.append_batch(["a"]).await.unwrap();
        producer.flush().await.unwrap();
        // Nobody opens the gate, so the batch behind it is never applied.
        let gate = || Fault::Wait(Arc::new(Notify::new()));
        let mut faults: Vec<_> = (0..applied).map(|_| Fault::Withhold).collect();
        faults.extend((applied < 2).then(gate));
        self.fixture.memory.script(faults);
        for payload in ["b", "c"] {
            producer.append_batch([payload]).await.unwrap();
        }
        let memory = &self.fixture.memory;
        while !memory.faults.lock().unwrap().is_empty()
            || memory.payloads("log").len() < 1 + applied
        {
            tokio::task::yield_now().await;
        }
    }

    /// Runs a command of `walctl state`: exit code, stdout and stderr.
    async fn state(&self, command: &str, options: &str) -> (i32, String, String) {
        let path = self.path.display();
        let line = format!("state {command} {path} {options}");
        let ran = self.fixture.walctl(&line, "").await;
        (ran.code, ran.stdout, ran.stderr)
    }

    async fn shown(&self) -> Value {
        let (code, out, error) = self.state("show", "--output json").await;
        assert_eq!(code, 0, "{error}");
        serde_json::from_str(&out).unwrap()
    }

    async fn forget(&self) {
        let id = self.shown().await["producer"].as_str().unwrap().to_owned();
        let client = self.client();
        client.forget_producer("log", id, None).await.unwrap();
    }

    /// The program appends one more, and the log is as it should be.
    async fn goes_on(&self, next: u64, wanted: &[&str]) {
        let mut producer = self.start().await;
        assert_eq!(producer.next_sequence(), next);
        producer.append_batch(["last"]).await.unwrap();
        producer.close().await.unwrap();
        assert_eq!(self.fixture.memory.payloads("log"), wanted);
    }
}

#[tokio::test]
async fn state_is_shown_while_its_program_runs() {
    let program = Program::new().await;
    let (code, _, error) = program.state("show", "").await;
    assert_eq!(code, 1);
    assert!(error.contains("orders.state"), "{error}");
    program.end_in_doubt(0).await;
    let (_, out, _) = program.state("show", "").await;
    for part in ["producer", "log (log id 1)", "next batch", "2 batches", "c"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let running = program.start().await;
    let shown = program.shown().await;
    assert_eq!(
        (&shown["kind"], &shown["next_batch"]),
        (&"producer".into(), &3.into())
    );
    // Its lock keeps others from changing it.
    let (code, _, error) = program.state("settle", "").await;
    assert_eq!(code, 1);
    assert!(
        error.contains("another producer or follower uses it"),
        "{error}"
    );
    drop(running);
    std::fs::write(&program.path, "else").unwrap();
    let (code, _, error) = program.state("show", "").await;
    assert_eq!(code, 1);
    assert!(error.contains("not the state of"), "{error}");
}

#[tokio::test]
async fn server_that_knows_the_producer_says_what_is_in_the_log() {
    for applied in 0..=2 {
        let program = Program::new().await;
        program.end_in_doubt(applied).await;
        let (code, _, error) = program.state("settle", "").await;
        assert_eq!(code, 0, "{error}");
        assert!(
            error.contains(&format!("{applied} batches are in the log")),
            "{error}"
        );
        let shown = program.shown().await;
        let in_doubt = shown["in_doubt"].as_array().unwrap();
        assert_eq!(in_doubt.len(), 2 - applied);
        program.goes_on(3, &["a", "b", "c", "last"]).await;
    }
}

#[tokio::test]
async fn batch_that_the_server_refuses_for_good_is_dropped() {
    let program = Program::new().await;
    program.end_in_doubt(0).await;
    let too_large = || Fault::Fail(refuse(Code::InvalidArgument, "RECORD_TOO_LARGE", &[]));
    program.fixture.memory.script([too_large()]);
    let mut producer = program.start().await;
    assert!(producer.flush().await.is_err());
    drop(producer);
    let (code, _, error) = program.state("settle", "--drop 3").await;
    assert_eq!(code, 2, "{error}");
    let (code, _, error) = program.state("settle", "--drop 1").await;
    assert_eq!(code, 0, "{error}");
    program.goes_on(3, &["a", "c", "last"]).await;
}

#[tokio::test]
async fn batches_of_a_forgotten_producer_are_decided_by_a_person() {
    for (applied, wanted) in [(1, ["a", "b", "c", "last"]), (2, ["a", "b", "c", "last"])] {
        let program = Program::new().await;
        program.end_in_doubt(applied).await;
        program.forget().await;
        assert!(program.start().await.flush().await.is_err());
        let (code, _, error) = program.state("settle", "").await;
        assert_eq!(code, 1);
        assert!(error.contains("--in-log"), "{error}");
        let (code, _, error) = program
            .state("settle", &format!("--in-log {applied}"))
            .await;
        assert_eq!(code, 0, "{error}");
        program.goes_on(3, &wanted).await;
    }
}

#[tokio::test]
async fn person_who_does_not_confirm_changes_nothing() {
    let program = Program::new().await;
    program.end_in_doubt(1).await;
    let before = std::fs::read(&program.path).unwrap();
    let line = format!("state settle {} --drop 1", program.path.display());
    let (code, screen) = program.fixture.on_terminal(&line, "n\n", 100).await;
    assert_eq!(code, 1, "{screen}");
    assert!(screen.contains("1 are dropped"), "{screen}");
    assert_eq!(std::fs::read(Path::new(&program.path)).unwrap(), before);
}
