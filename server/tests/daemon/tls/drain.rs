//! The end of the daemon over TLS.

use std::time::Duration;

use rustix::process::Signal;
use tokio::io::AsyncReadExt as _;
use wald_proto::v1;

use super::certificates::Files;
use super::client::{connect, grpc, settings, wal};
use crate::support::{Daemon, append};

#[tokio::test(flavor = "multi_thread")]
async fn stop_answers_accepted_appends_and_sends_close_notify() {
    let files = Files::new();
    let data = tempfile::tempdir().unwrap();
    let arguments = files.arguments();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let daemon = Daemon::start_in(data.path(), &arguments);
    let mut idle = connect(&grpc(&daemon), files.client(&["h2"], None))
        .await
        .unwrap();
    settings(&mut idle).await.unwrap();
    let mut writers = Vec::new();
    for writer in 0..4 {
        let mut wal = wal(&grpc(&daemon), files.client(&["h2"], None)).await;
        let log = format!("log-{writer}");
        wal.append(append(&log, "first")).await.unwrap();
        writers.push(tokio::spawn(async move {
            let mut acked = 1_u64;
            let refused = loop {
                match wal.append(append(&log, "more")).await {
                    Ok(_) => acked += 1,
                    Err(status) => break status,
                }
            };
            (log, acked, refused)
        }));
    }
    daemon.signal(Signal::TERM);
    // Ends with an error unless the server sends close_notify.
    let mut rest = Vec::new();
    let end = tokio::time::timeout(Duration::from_secs(30), idle.read_to_end(&mut rest));
    end.await.unwrap().unwrap();
    let mut acked = Vec::new();
    for writer in writers {
        acked.push(writer.await.unwrap());
    }
    assert_eq!(daemon.ended().await.code(), Some(0));
    let daemon = Daemon::start_in(data.path(), &arguments);
    let mut wal = wal(&grpc(&daemon), files.client(&["h2"], None)).await;
    for (log, acked, refused) in acked {
        let request = v1::GetTailRequest {
            log: log.clone(),
            ..v1::GetTailRequest::default()
        };
        let tail = wal.get_tail(request).await.unwrap().into_inner();
        let kept = tail.tail_lsn.unwrap() - tail.first_lsn.unwrap();
        assert_eq!(kept, acked, "{log}: {refused}");
    }
}
