//! LogService, OpsService, reflection, health, the HTTP port.

use crate::support::{Daemon, Told, append};
use prost::Message;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use wald_proto::v1;

#[tokio::test]
async fn producers_are_listed_in_pages_and_forgotten() {
    let daemon = Daemon::start(&["--max-producers-per-log", "5"]);
    let (mut logs, mut wal) = (daemon.logs().await, daemon.wal().await);
    let by = |id: &str, epoch: u64| v1::AppendRequest {
        condition: Some(v1::AppendCondition {
            producer: Some(v1::Producer {
                id: id.to_owned(),
                epoch,
                sequence: 0,
            }),
            ..v1::AppendCondition::default()
        }),
        ..append("a", "x")
    };
    for id in ["e", "b", "d", "a", "c"] {
        wal.append(by(id, 2)).await.unwrap();
    }
    assert_eq!(daemon.metric("wald_log_producers_max"), 5.0);
    assert_eq!(daemon.metric("wald_log_producers_limit"), 5.0);
    let told = Told::of(&wal.append(by("f", 0)).await.unwrap_err());
    assert_eq!(told.reason, "QUOTA");
    let mut list = v1::ListProducersRequest {
        log: "a".to_owned(),
        page_size: 2,
        ..v1::ListProducersRequest::default()
    };
    let mut found = Vec::new();
    loop {
        let page = logs
            .list_producers(list.clone())
            .await
            .unwrap()
            .into_inner();
        found.extend(page.producers);
        list.page_token = page.next_page_token;
        if list.page_token.is_empty() {
            break;
        }
    }
    let ids: Vec<_> = found.iter().map(|producer| producer.id.as_str()).collect();
    assert_eq!(ids, ["a", "b", "c", "d", "e"]);
    assert!(
        found
            .iter()
            .all(|p| (p.epoch, p.next_sequence) == (Some(2), Some(1)))
    );
    assert!(found.iter().all(|p| p.last_append_time.is_some()));
    let forget = |id: &str| v1::ForgetProducerRequest {
        log: "a".to_owned(),
        producer_id: id.to_owned(),
        log_id: None,
    };
    logs.forget_producer(forget("b")).await.unwrap();
    let cases = [
        ("b", Code::NotFound, "PRODUCER_NOT_FOUND"),
        ("", Code::InvalidArgument, "INVALID_PRODUCER"),
    ];
    for (id, code, reason) in cases {
        let told = Told::of(&logs.forget_producer(forget(id)).await.unwrap_err());
        assert_eq!((told.code, told.reason.as_str()), (code, reason));
    }
    list.page_token = "wrong".to_owned();
    let told = Told::of(&logs.list_producers(list).await.unwrap_err());
    assert_eq!(told.reason, "INVALID_PAGE_TOKEN");
    wal.append(by("f", 0)).await.unwrap();
    let told = Told::of(&wal.append(by("b", 2)).await.unwrap_err());
    assert_eq!(told.reason, "PRODUCER_EXPIRED");
}

#[tokio::test]
async fn log_is_made_shown_changed_and_deleted() {
    let daemon = Daemon::start(&[]);
    let mut logs = daemon.logs().await;
    let create = v1::CreateLogRequest {
        log: "a".to_owned(),
        config: Some(v1::LogConfig {
            max_record_bytes: 4,
            ..v1::LogConfig::default()
        }),
    };
    let made = logs.create_log(create.clone()).await.unwrap().into_inner();
    let made = made.log.unwrap();
    assert_eq!((made.first_lsn, made.tail_lsn), (Some(0), Some(0)));
    assert_eq!(made.config.unwrap().max_record_bytes, 4);
    let told = Told::of(&logs.create_log(create).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::AlreadyExists, "LOG_EXISTS")
    );
    let mut wal = daemon.wal().await;
    let told = Told::of(&wal.append(append("a", "large")).await.unwrap_err());
    assert_eq!(told.reason, "RECORD_TOO_LARGE");
    let update = v1::UpdateLogRequest {
        log: "a".to_owned(),
        config: None,
        update_mask: Some(prost_types::FieldMask {
            paths: vec!["max_record_bytes".to_owned()],
        }),
    };
    logs.update_log(update).await.unwrap();
    wal.append(append("a", "large")).await.unwrap();
    let get = v1::GetLogRequest {
        log: "a".to_owned(),
    };
    let shown = logs.get_log(get.clone()).await.unwrap().into_inner();
    let shown = shown.log.unwrap();
    assert_eq!(shown.tail_lsn, Some(1));
    assert_eq!(shown.config.unwrap().max_record_bytes, 0);
    let delete = v1::DeleteLogRequest {
        shred: false,
        log: "a".to_owned(),
        log_id: Some(shown.log_id),
    };
    logs.delete_log(delete.clone()).await.unwrap();
    let told = Told::of(&logs.get_log(get).await.unwrap_err());
    assert_eq!(told.reason, "LOG_NOT_FOUND");
    let again = wal.append(append("a", "new")).await.unwrap().into_inner();
    assert_eq!(again.lsn, Some(0));
    assert_ne!(again.log_id, shown.log_id);
    let told = Told::of(&logs.delete_log(delete).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::FailedPrecondition, "LOG_REPLACED")
    );
}

#[tokio::test]
async fn logs_are_listed_in_pages_by_prefix() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    for name in ["b", "x/1", "x/2", "x/3", "a"] {
        wal.append(append(name, "")).await.unwrap();
    }
    let mut logs = daemon.logs().await;
    let mut token = String::new();
    let mut pages: Vec<Vec<String>> = Vec::new();
    loop {
        let page = logs
            .list_logs(v1::ListLogsRequest {
                page_size: 2,
                page_token: token,
                prefix: "x/".to_owned(),
            })
            .await
            .unwrap()
            .into_inner();
        pages.push(page.logs.into_iter().map(|log| log.name).collect());
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, [vec!["x/1", "x/2"], vec!["x/3"]]);
    let refused = logs
        .list_logs(v1::ListLogsRequest {
            page_token: "?".to_owned(),
            ..v1::ListLogsRequest::default()
        })
        .await
        .unwrap_err();
    assert_eq!(Told::of(&refused).reason, "INVALID_PAGE_TOKEN");
}

#[tokio::test]
async fn server_tells_its_limits_and_what_a_flush_really_is() {
    let daemon = Daemon::start(&["--max-batch-records", "7"]);
    let mut ops = daemon.ops().await;
    let info = ops
        .get_server_info(v1::GetServerInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(info.limits.unwrap().max_request_records, 7);
    assert_eq!(info.default_sync_mode(), v1::SyncMode::Strict);
    assert_eq!(info.store_id.len(), 36);
    let truth = info.durability.unwrap();
    assert!(!truth.file_system.is_empty() && !truth.sync_primitive.is_empty());
    let segments = ops
        .list_segments(v1::ListSegmentsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .segments;
    assert_eq!(segments.last().unwrap().state(), v1::SegmentState::Active);
}

#[tokio::test]
async fn drain_ends_the_process_as_sigterm_does() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    let mut ops = daemon.ops().await;
    let seconds = |seconds| v1::DrainRequest {
        delay: Some(prost_types::Duration { seconds, nanos: 0 }),
    };
    let told = Told::of(&ops.drain(seconds(-1)).await.unwrap_err());
    assert_eq!(told.fact("field"), "delay");
    let first = ops.drain(seconds(1)).await.unwrap().into_inner();
    assert!(!first.already_draining);
    // It still accepts calls, and is not ready any more.
    daemon.wait_for_log("stopping: not ready any more");
    assert_eq!(daemon.http("/readyz").0, 503);
    wal.append(append("a", "1")).await.unwrap();
    let again = ops.drain(seconds(0)).await.unwrap().into_inner();
    assert!(again.already_draining);
    drop((wal, ops));
    daemon.wait_for_log("stopped: everything accepted is on the device");
    assert!(daemon.ended().await.success());
}

async fn reflect(daemon: &Daemon, request: MessageRequest) -> MessageResponse {
    let mut client = ServerReflectionClient::new(daemon.channel().await);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(request),
    };
    let mut answers = client
        .server_reflection_info(tokio_stream::once(request))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.message().await.unwrap().unwrap();
    answer.message_response.unwrap()
}

#[tokio::test]
async fn reflection_lists_the_services_and_carries_comments() {
    let daemon = Daemon::start(&[]);
    let MessageResponse::ListServicesResponse(list) =
        reflect(&daemon, MessageRequest::ListServices(String::new())).await
    else {
        panic!("expected a list");
    };
    let names: Vec<&str> = list.service.iter().map(|s| s.name.as_str()).collect();
    for name in [
        "wald.v1.WalService",
        "wald.v1.LogService",
        "wald.v1.CursorService",
        "wald.v1.OpsService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
    ] {
        assert!(names.contains(&name), "{name} is missing in {names:?}");
    }
    let symbol = MessageRequest::FileContainingSymbol("wald.v1.WalService".to_owned());
    let MessageResponse::FileDescriptorResponse(file) = reflect(&daemon, symbol).await else {
        panic!("expected a file");
    };
    let file = prost_types::FileDescriptorProto::decode(&*file.file_descriptor_proto[0]).unwrap();
    let comments = file.source_code_info.unwrap().location;
    assert!(
        comments
            .iter()
            .any(|c| c.leading_comments().contains("Appends one record"))
    );
    let details = MessageRequest::FileContainingSymbol("google.rpc.ErrorInfo".to_owned());
    assert!(matches!(
        reflect(&daemon, details).await,
        MessageResponse::FileDescriptorResponse(_)
    ));
}

#[tokio::test]
async fn health_and_http_say_ready_once_it_serves() {
    let daemon = Daemon::start(&[]);
    let mut health = HealthClient::new(daemon.channel().await);
    for service in ["", "wald.v1.WalService", "liveness"] {
        let answer = health
            .check(HealthCheckRequest {
                service: service.to_owned(),
            })
            .await
            .unwrap()
            .into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
    }
    assert_eq!(daemon.http("/livez"), (200, "live\n".to_owned()));
    assert_eq!(daemon.http("/readyz"), (200, "ready\n".to_owned()));
    assert_eq!(daemon.http("/nothing").0, 404);
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "12345")).await.unwrap();
    wal.read(v1::ReadRequest {
        log: "a".to_owned(),
        ..v1::ReadRequest::default()
    })
    .await
    .unwrap();
    wal.read(v1::ReadRequest::default()).await.unwrap_err();
    let call = |method: &str, code: &str| {
        daemon.metric(&format!(
            "grpc_server_handled_total{{grpc_code=\"{code}\",grpc_method=\"{method}\",\
             grpc_service=\"wald.v1.WalService\",grpc_type=\"unary\"}}"
        ))
    };
    assert_eq!(call("Append", "OK"), 1.0);
    assert_eq!(call("Read", "OK"), 1.0);
    assert_eq!(call("Read", "InvalidArgument"), 1.0);
    assert_eq!(daemon.metric("wald_logs"), 1.0);
    assert_eq!(daemon.metric("wald_appended_bytes_total"), 5.0);
    assert_eq!(daemon.metric("wald_read_records_total"), 1.0);
    let epoch = daemon.start["recovery_epoch"].as_f64().unwrap();
    assert_eq!(daemon.metric("wald_recovery_epoch"), epoch);
    for phase in ["queue", "encode", "write", "flush", "reply"] {
        let name = format!("wald_append_phase_seconds_count{{phase=\"{phase}\"}}");
        assert!(daemon.metric(&name) >= 1.0, "{phase}");
    }
    assert!(daemon.metric("wald_flush_duration_seconds_count") >= 1.0);
    assert!(daemon.metric(r#"wald_append_duration_seconds_count{durability="durable"}"#) >= 1.0);
}

#[tokio::test]
async fn compressed_log_takes_less_and_gives_back_the_same_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut logs = daemon.logs().await;
    let mut wal = daemon.wal().await;
    let payload = "the same again ".repeat(1000);
    let mut sizes = Vec::new();
    for (name, compression) in [
        ("plain", v1::Compression::None),
        ("lz4", v1::Compression::Lz4),
    ] {
        let create = v1::CreateLogRequest {
            log: name.to_owned(),
            config: Some(v1::LogConfig {
                compression: compression.into(),
                ..v1::LogConfig::default()
            }),
        };
        logs.create_log(create).await.unwrap();
        wal.append(append(name, &payload)).await.unwrap();
        let get = v1::GetLogRequest {
            log: name.to_owned(),
        };
        let log = logs.get_log(get).await.unwrap().into_inner().log.unwrap();
        assert_eq!(log.config.unwrap().compression(), compression);
        sizes.push(log.stored_bytes);
    }
    assert!(sizes[1] * 10 < sizes[0], "{sizes:?}");
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &[]);
    let read = v1::ReadRequest {
        log: "lz4".to_owned(),
        ..v1::ReadRequest::default()
    };
    let page = daemon.wal().await.read(read).await.unwrap().into_inner();
    assert_eq!(
        crate::support::payload(&page.batch.unwrap().records[0]),
        payload
    );
}

/// `wald delete-logs` on the directory.
fn delete_logs(directory: &std::path::Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut wald = crate::support::wald();
    wald.arg("delete-logs").arg(directory).args(arguments);
    let done = crate::support::output(&mut wald);
    let said = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8(said).unwrap())
}

#[tokio::test]
async fn clock_of_retention_is_shown_and_reset_while_no_daemon_serves_it() {
    let directory = tempfile::tempdir().unwrap();
    let reset = |arguments: &[&str]| {
        let mut wald = crate::support::wald();
        wald.arg("reset-clock")
            .arg(directory.path())
            .args(arguments);
        let done = crate::support::output(&mut wald);
        let said = [done.stdout, done.stderr].concat();
        (done.status.code(), String::from_utf8(said).unwrap())
    };
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    let (code, said) = reset(&["--yes"]);
    assert_eq!(code, Some(4), "{said}");
    daemon.signal(rustix::process::Signal::TERM);
    assert!(daemon.ended().await.success());
    let (code, said) = reset(&[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("0 days and") && said.contains("nothing was changed"),
        "{said}"
    );
    let (code, said) = reset(&["--yes", "--output", "json"]);
    assert_eq!(code, Some(0), "{said}");
    let document: serde_json::Value = serde_json::from_str(said.trim()).unwrap();
    assert_eq!(document["reset"], true, "{said}");
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    let kept = wal.append(append("a", "x")).await.unwrap().into_inner();
    assert_eq!(kept.lsn, Some(1));
}

#[tokio::test]
async fn store_full_of_logs_is_emptied_while_no_daemon_serves_it() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--max-logs", "50"];
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = daemon.wal().await;
    for number in 0..49 {
        let log = format!("stranger/{number}");
        wal.append(append(&log, "x")).await.unwrap();
    }
    wal.append(append("ours", "kept")).await.unwrap();
    let full = wal.append(append("new", "x")).await.unwrap_err();
    assert_eq!(crate::support::Told::of(&full).reason, "QUOTA");
    let (code, said) = delete_logs(directory.path(), &["--prefix", "stranger/", "--yes"]);
    assert_eq!(code, Some(4), "{said}");
    daemon.signal(rustix::process::Signal::TERM);
    assert!(daemon.ended().await.success());

    let (code, said) = delete_logs(directory.path(), &["--prefix", "stranger/"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("49 logs with 49 records would go"), "{said}");
    let (_, said) = delete_logs(directory.path(), &["--prefix", "nobody", "--yes"]);
    assert!(said.contains("nothing was changed"), "{said}");
    let (code, said) = delete_logs(directory.path(), &["--prefix", "stranger/", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("deleted 49 logs with 49 records"), "{said}");

    let daemon = Daemon::start_in(directory.path(), &arguments);
    assert!((daemon.metric("wald_logs") - 1.0).abs() < 0.1);
    let mut wal = daemon.wal().await;
    wal.append(append("new", "x")).await.unwrap();
    let kept = wal.append(append("ours", "x")).await.unwrap().into_inner();
    assert_eq!(kept.lsn, Some(1));
}
