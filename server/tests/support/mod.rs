//! A daemon of its own for every test: the built binary on free ports and a directory
//! that goes away with it.

// Each test binary uses its own part of this; a failure here fails the test that asked.
#![allow(dead_code, clippy::unwrap_used)]

mod contract;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use wald_proto::v1;
use wald_proto::v1::cursor_service_client::CursorServiceClient;
use wald_proto::v1::log_service_client::LogServiceClient;
use wald_proto::v1::ops_service_client::OpsServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

/// A running daemon; killed when it is dropped.
pub(crate) struct Daemon {
    child: Child,
    directory: Option<TempDir>,
    /// Content of the start line.
    pub(crate) start: serde_json::Value,
    /// The lines before it.
    pub(crate) before: Vec<String>,
    pub(crate) log: mpsc::Receiver<String>,
}

/// The command without a subcommand, with nothing taken from the environment; but
/// `WALD_BINARY` names another build to test, such as the one to be released.
pub(crate) fn wald() -> Command {
    let built = env!("CARGO_BIN_EXE_wald").into();
    let mut command = Command::new(std::env::var_os("WALD_BINARY").unwrap_or(built));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WALD_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Arguments that every daemon of a test gets besides `own`, the arguments of the test itself: those in
/// the variable `WALD_TEST_ARGS`. A setting that the test chooses itself is left out.
pub(crate) fn start_arguments(own: &[&str]) -> Vec<String> {
    let given = std::env::var("WALD_TEST_ARGS").unwrap_or_default();
    let setting = |flag: &str| flag.split('=').next().map(str::to_owned);
    let mut kept = true;
    given
        .split_whitespace()
        .filter(|word| {
            if word.starts_with("--") {
                kept = !own.iter().any(|own| setting(own) == setting(word));
            }
            kept
        })
        .map(str::to_owned)
        .collect()
}

/// Runs a command that must end by itself; one that serves instead is killed, and its
/// exit status then fails the test.
pub(crate) fn output(command: &mut Command) -> Output {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    let (ended, watched) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_secs(30)) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(ended);
    watchdog.join().unwrap();
    output
}

/// The writing side of a pipe that nobody reads.
pub(crate) fn unread() -> Stdio {
    let (_reader, writer) = std::io::pipe().unwrap();
    writer.into()
}

/// A file on a device without space.
pub(crate) fn full() -> Stdio {
    let full = std::fs::File::options().write(true).open("/dev/full");
    full.unwrap().into()
}

/// A directory that only its owner can open, as a daemon with `auth_file` needs it.
pub(crate) fn private_directory() -> TempDir {
    let mut directory = tempfile::Builder::new();
    let directory = directory.permissions(std::fs::Permissions::from_mode(0o700));
    directory.tempdir().unwrap()
}

impl Daemon {
    /// Starts a daemon with further arguments on a new directory.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let directory = private_directory();
        let mut daemon = Self::start_in(directory.path(), arguments);
        daemon.directory = Some(directory);
        daemon
    }

    /// Starts a daemon on a directory that the caller keeps.
    pub(crate) fn start_in(directory: &Path, arguments: &[&str]) -> Self {
        Self::start_with(directory, arguments, &[])
    }

    /// Starts a daemon with further variables of the environment.
    pub(crate) fn start_with(
        directory: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        Self::start_as(&mut wald(), directory, arguments, variables)
    }

    /// Starts a daemon by a command that the caller prepared.
    pub(crate) fn start_as(
        command: &mut Command,
        directory: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        let own_http = arguments.contains(&"--http-listen");
        let mut child = command
            .arg("--data-dir")
            .arg(directory)
            .args(["--listen", ":0"])
            .args(if own_http {
                &[][..]
            } else {
                &["--http-listen", ":0"]
            })
            .args(["--log-format", "json"])
            .args(start_arguments(arguments))
            .args(arguments)
            .env("WALD_SEGMENT_BYTES", "1MiB")
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = Vec::new();
        let start = loop {
            let Some(line) = lines.next() else {
                panic!("the daemon ended before it served: {seen:#?}");
            };
            let line = line.unwrap();
            if let Ok(event) = serde_json::from_str::<serde_json::Value>(&line)
                && ["wald is serving", "wald is standing by"]
                    .map(Into::into)
                    .contains(&event["message"])
            {
                break event;
            }
            seen.push(line);
        };
        // Goes on reading, so that the daemon never waits for a full pipe.
        let (sender, log) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self {
            child,
            directory: None,
            start,
            before: seen,
            log,
        }
    }

    /// Where it serves gRPC.
    pub(crate) fn port(&self) -> u16 {
        let address = self.start["grpc"].as_str().unwrap();
        address.parse::<SocketAddr>().unwrap().port()
    }

    pub(crate) async fn channel(&self) -> Channel {
        let address = self.start["grpc"].as_str().unwrap();
        Channel::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    pub(crate) async fn wal(&self) -> WalServiceClient<Channel> {
        WalServiceClient::new(self.channel().await).max_decoding_message_size(16 << 20)
    }

    pub(crate) async fn logs(&self) -> LogServiceClient<Channel> {
        LogServiceClient::new(self.channel().await)
    }

    pub(crate) async fn cursors(&self) -> CursorServiceClient<Channel> {
        CursorServiceClient::new(self.channel().await)
    }

    pub(crate) async fn ops(&self) -> OpsServiceClient<Channel> {
        OpsServiceClient::new(self.channel().await)
    }

    /// Status and body of one page of the HTTP port.
    pub(crate) fn http(&self, path: &str) -> (u16, String) {
        self.http_with(path, "")
    }

    /// Status and body of one page of the HTTP port, requested with a token.
    pub(crate) fn http_as(&self, path: &str, token: &str) -> (u16, String) {
        self.http_with(path, &format!("Authorization: Bearer {token}\r\n"))
    }

    fn http_with(&self, path: &str, headers: &str) -> (u16, String) {
        let answer = self.send_http("GET", path, headers, "");
        (answer.0, answer.2)
    }

    /// Status, head and body of the answer to a request with further header lines, each with its end.
    pub(crate) fn send_http(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> (u16, String, String) {
        let answer = String::from_utf8(self.http_bytes(method, path, headers, body)).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_owned(), body.to_owned())
    }

    /// The whole answer to that request, as it comes.
    pub(crate) fn http_bytes(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> Vec<u8> {
        let address = self.start["http"].as_str().unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let length = match body.len() {
            0 => String::new(),
            bytes => format!("Content-Length: {bytes}\r\n"),
        };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\n{headers}{length}Connection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    }

    /// Value of one line of /metrics, named with its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        value_of(name, &self.http("/metrics").1)
    }

    /// Value of a line of /metrics, requested with a token.
    pub(crate) fn metric_as(&self, name: &str, token: &str) -> f64 {
        value_of(name, &self.http_as("/metrics", token).1)
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for the end, while clients of this test go on: a connection whose client
    /// is blocked does not close.
    pub(crate) async fn ended(mut self) -> ExitStatus {
        tokio::task::spawn_blocking(move || self.child.wait().unwrap())
            .await
            .unwrap()
    }

    /// Blocks until the log says `message`.
    pub(crate) fn wait_for_log(&self, message: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let line = self
                .log
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
                .unwrap_or_else(|error| panic!("the log has no {message:?}: {error}"));
            if line.contains(message) {
                return line;
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits, for as long as a slow machine may need, until the metric is as it should be.
pub(crate) async fn until(daemon: &Daemon, metric: &str, holds: impl Fn(f64) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds(daemon.metric(metric)) {
        assert!(Instant::now() < deadline, "{metric} stays as it is");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Value of one line of /metrics, named with its labels.
fn value_of(name: &str, metrics: &str) -> f64 {
    let line = (metrics.lines()).find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let line = line.unwrap_or_else(|| panic!("no metric {name}"));
    line.parse().unwrap()
}

/// Waits, for as long as a slow machine may need, until the metric is as it should be. Scrapes with a token.
pub(crate) async fn until_as(
    daemon: &Daemon,
    metric: &str,
    token: &str,
    holds: impl Fn(f64) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds(daemon.metric_as(metric, token)) {
        assert!(Instant::now() < deadline, "{metric} stays as it is");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A record with text.
pub(crate) fn text(text: &str) -> v1::Record {
    v1::Record {
        payload: Some(v1::record::Payload::Text(text.to_owned())),
        ..v1::Record::default()
    }
}

/// An append of one text.
pub(crate) fn append(log: &str, payload: &str) -> v1::AppendRequest {
    v1::AppendRequest {
        log: log.to_owned(),
        record: Some(text(payload)),
        ..v1::AppendRequest::default()
    }
}

/// A batch of texts for one log.
pub(crate) fn part(log: &str, payloads: &[&str]) -> v1::LogBatch {
    v1::LogBatch {
        log: log.to_owned(),
        records: payloads.iter().map(|payload| text(payload)).collect(),
        ..v1::LogBatch::default()
    }
}

/// A session under way, as its client sees it.
pub(crate) struct SessionClient {
    /// Dropped: the client half-closes.
    pub(crate) requests: tokio::sync::mpsc::Sender<v1::AppendSessionRequest>,
    pub(crate) answers: tonic::Streaming<v1::AppendSessionResponse>,
}

impl SessionClient {
    /// Opens a session.
    pub(crate) async fn open(wal: &mut WalServiceClient<Channel>) -> Self {
        Self::open_with(wal, None).await
    }

    /// Opens a session that ends after `timeout`.
    pub(crate) async fn open_with(
        wal: &mut WalServiceClient<Channel>,
        timeout: Option<Duration>,
    ) -> Self {
        let (requests, sent) = tokio::sync::mpsc::channel(1);
        let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
        let mut request = tonic::Request::new(sent);
        if let Some(timeout) = timeout {
            request.set_timeout(timeout);
        }
        let answers = wal.append_session(request).await.unwrap().into_inner();
        Self { requests, answers }
    }

    pub(crate) async fn send(&self, request_id: u64, batches: Vec<v1::LogBatch>) {
        self.send_batch(
            request_id,
            v1::AppendBatchRequest {
                batches,
                ..v1::AppendBatchRequest::default()
            },
        )
        .await;
    }

    /// Sends, unless the session has ended: the answers report its end.
    pub(crate) async fn send_batch(&self, request_id: u64, batch: v1::AppendBatchRequest) {
        let batch = Some(batch);
        let request = v1::AppendSessionRequest {
            request_id,
            batch,
            ..v1::AppendSessionRequest::default()
        };
        let _ = self.requests.send(request).await;
    }

    /// The numbers of the requests acked until the end, and how that came.
    pub(crate) async fn rest(&mut self) -> (Vec<u64>, Result<(), Status>) {
        let mut acked = Vec::new();
        loop {
            match self.answers.message().await {
                Ok(Some(answer)) => acked.push(answer.request_id),
                Ok(None) => return (acked, Ok(())),
                Err(status) => return (acked, Err(status)),
            }
        }
    }
}

/// The payload as a person would see it.
pub(crate) fn payload(record: &v1::Record) -> String {
    match &record.payload {
        Some(v1::record::Payload::Data(data)) => String::from_utf8(data.to_vec()).unwrap(),
        Some(v1::record::Payload::Text(text)) => text.clone(),
        None => String::new(),
    }
}

/// Log, lsn and payload of every record, in order.
pub(crate) fn records(batches: &[v1::RecordBatch]) -> Vec<(String, u64, String)> {
    let mut found = Vec::new();
    for batch in batches {
        for (lsn, record) in (batch.first_lsn.unwrap()..).zip(&batch.records) {
            found.push((batch.log.clone(), lsn, payload(record)));
        }
    }
    found
}

/// The details of an error.
pub(crate) struct Told {
    pub(crate) code: Code,
    pub(crate) reason: String,
    pub(crate) facts: std::collections::HashMap<String, String>,
    pub(crate) violations: usize,
}

impl Told {
    pub(crate) fn of(status: &Status) -> Self {
        let details = status.get_error_details();
        let info = details
            .error_info()
            .unwrap_or_else(|| panic!("no ErrorInfo in {status:?}"));
        assert_eq!(info.domain, "wald.dev");
        contract::assert_in_contract(status);
        Self {
            code: status.code(),
            reason: info.reason.clone(),
            facts: info.metadata.clone(),
            violations: details
                .precondition_failure()
                .map_or(0, |failure| failure.violations.len()),
        }
    }

    pub(crate) fn fact(&self, key: &str) -> &str {
        self.facts
            .get(key)
            .unwrap_or_else(|| panic!("no {key} in {:?}", self.facts))
    }
}
