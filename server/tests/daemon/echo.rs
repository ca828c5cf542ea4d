//! The echo service: present only if configured, and its answers are right.

use crate::support::Daemon;
use rustix::process::Signal;
use tonic::Code;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use wald_proto::echo::echo_service_client::EchoServiceClient;
use wald_proto::echo::{EchoRequest, EchoScanRequest, EchoSessionRequest};

const SERVICE: &str = "wald.echo.v1.EchoService";

async fn listed(daemon: &Daemon) -> Vec<String> {
    let mut client = ServerReflectionClient::new(daemon.channel().await);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answers = client.server_reflection_info(tokio_stream::once(request));
    let answer = answers.await.unwrap().into_inner().message().await.unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.unwrap().message_response else {
        panic!("expected a list");
    };
    list.service
        .into_iter()
        .map(|service| service.name)
        .collect()
}

#[tokio::test]
async fn echo_is_neither_served_nor_listed_unless_asked_for() {
    let daemon = Daemon::start(&[]);
    let mut echo = EchoServiceClient::new(daemon.channel().await);
    let refused = echo.echo(EchoRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    assert!(!listed(&daemon).await.iter().any(|name| name == SERVICE));
}

#[tokio::test]
async fn echo_answers_each_kind_of_call_stores_nothing_and_is_not_counted() {
    let daemon = Daemon::start(&["--echo"]);
    assert!(listed(&daemon).await.iter().any(|name| name == SERVICE));
    let mut echo = EchoServiceClient::new(daemon.channel().await);
    let request = EchoRequest {
        records: vec![vec![7; 128].into(), vec![].into()],
        answer_bytes: 1000,
    };
    let answer = echo.echo(request).await.unwrap().into_inner();
    assert_eq!((answer.records, answer.data.len()), (2, 1000));

    let requests = (0..100).map(|number| EchoSessionRequest {
        request_id: number,
        records: vec![vec![7; 128].into(); 3],
    });
    let answers = echo.echo_session(tokio_stream::iter(requests)).await;
    let mut answers = answers.unwrap().into_inner();
    for number in 0..100 {
        let answer = answers.message().await.unwrap().unwrap();
        assert_eq!((answer.request_id, answer.records), (number, 3));
    }
    assert!(answers.message().await.unwrap().is_none());

    let request = EchoScanRequest {
        records: 250,
        record_bytes: 64,
        message_records: 100,
    };
    let mut messages = echo.echo_scan(request).await.unwrap().into_inner();
    let mut sizes = Vec::new();
    while let Some(message) = messages.message().await.unwrap() {
        assert!(message.records.iter().all(|record| record.len() == 64));
        sizes.push(message.records.len());
    }
    assert_eq!(sizes, [100, 100, 50]);

    assert_eq!(daemon.metric("wald_logs"), 0.0);
    assert_eq!(daemon.metric("wald_appended_records_total"), 0.0);
    assert!(!daemon.http("/metrics").1.contains("Echo"));
}

#[tokio::test]
async fn messages_larger_than_the_bound_are_refused() {
    let daemon = Daemon::start(&["--echo"]);
    let mut echo = EchoServiceClient::new(daemon.channel().await);
    let request = EchoRequest {
        records: Vec::new(),
        answer_bytes: (4 << 20) + 1,
    };
    let refused = echo.echo(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let request = EchoScanRequest {
        records: u64::MAX,
        record_bytes: 0,
        message_records: u32::MAX,
    };
    let refused = echo.echo_scan(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn open_echo_session_does_not_keep_a_daemon_that_is_told_to_stop() {
    let daemon = Daemon::start(&["--echo"]);
    let mut echo = EchoServiceClient::new(daemon.channel().await);
    let (open, requests) = tokio::sync::mpsc::channel(1);
    open.send(EchoSessionRequest::default()).await.unwrap();
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut answers = echo.echo_session(requests).await.unwrap().into_inner();
    answers.message().await.unwrap().unwrap();
    daemon.signal(Signal::TERM);
    let ended = answers.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable);
    assert!(daemon.ended().await.success());
}
