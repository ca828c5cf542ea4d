//! Requests with a part that is not allowed, and names at the edge of a prefix.

use wald_proto::v1;
use wald_proto::v1::scan_request::Selector;

use super::principals::{AuthFile, COMPANY, logs, ops, session, wal};
use crate::support::{Told, append, part};

fn names(answer: &v1::ListLogsResponse) -> Vec<&str> {
    answer.logs.iter().map(|log| log.name.as_str()).collect()
}

#[tokio::test]
async fn one_log_of_others_refuses_the_whole_batch_and_names_the_field() {
    let file = AuthFile::new(COMPANY);
    let (root, writer) = (file.token("root"), file.token("writer"));
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    own.append(append("orders/a", "x")).await.unwrap();
    own.append(append("payments/billing/a", "x")).await.unwrap();
    let mut client = wal(&daemon, &writer).await;
    let mine = || vec![part("payments/billing/a", &["y"])];
    let requests = [
        (
            "batches[1].log",
            "append",
            v1::AppendBatchRequest {
                batches: [mine(), vec![part("orders/a", &["y"])]].concat(),
                ..Default::default()
            },
        ),
        (
            "checks[0].log",
            "read",
            v1::AppendBatchRequest {
                batches: mine(),
                checks: vec![v1::LogCheck {
                    log: "orders/a".to_owned(),
                    must_exist: true,
                    ..Default::default()
                }],
                ..Default::default()
            },
        ),
        (
            "cursors[0].log",
            "cursor",
            v1::AppendBatchRequest {
                batches: mine(),
                cursors: vec![v1::CursorCommit {
                    log: "orders/a".to_owned(),
                    cursor: "c".to_owned(),
                    lsn: 1,
                    ..Default::default()
                }],
                ..Default::default()
            },
        ),
    ];
    for (field, right, request) in requests {
        let refused = client.append_batch(request).await.unwrap_err();
        let told = Told::of(&refused);
        assert_eq!(told.reason, "NOT_ALLOWED", "{field}");
        assert_eq!((told.fact("field"), told.fact("right")), (field, right));
        assert_eq!(told.fact("outcome"), "NOT_APPLIED");
    }
    let tail = v1::GetTailRequest {
        log: "payments/billing/a".to_owned(),
        ..Default::default()
    };
    let tail = own.get_tail(tail).await.unwrap().into_inner();
    assert_eq!(tail.tail_lsn, Some(1));
}

#[tokio::test]
async fn request_of_a_session_without_the_right_ends_it_after_the_earlier_acks() {
    const GOOD: u64 = 499;
    let file = AuthFile::new(COMPANY);
    let writer = file.token("writer");
    let daemon = file.start(&[]);
    let mut session = session(&daemon, &writer).await;
    let sender = session.requests.clone();
    let sending = tokio::spawn(async move {
        for request_id in 1..=GOOD + 5 {
            let log = match request_id {
                500 => "orders/a",
                _ => "payments/billing/a",
            };
            let batch = v1::AppendBatchRequest {
                batches: vec![part(log, &["x"])],
                ..Default::default()
            };
            let request = v1::AppendSessionRequest {
                request_id,
                batch: Some(batch),
                ..v1::AppendSessionRequest::default()
            };
            if sender.send(request).await.is_err() {
                return;
            }
        }
    });
    let (acked, end) = session.rest().await;
    assert_eq!(acked, (1..=GOOD).collect::<Vec<_>>());
    let told = Told::of(&end.unwrap_err());
    assert_eq!(told.reason, "NOT_ALLOWED");
    assert_eq!(told.fact("request_id"), "500");
    assert_eq!(told.fact("field"), "batches[0].log");
    sending.await.unwrap();
}

#[tokio::test]
async fn append_to_a_new_name_needs_create_and_leaves_no_log() {
    let file = AuthFile::new(COMPANY);
    let (root, appender) = (file.token("root"), file.token("appender"));
    let daemon = file.start(&[]);
    let mut client = wal(&daemon, &appender).await;
    let new = "payments/billing/new";
    let refused = client.append(append(new, "x")).await.unwrap_err();
    let told = Told::of(&refused);
    assert_eq!(
        (told.reason.as_str(), told.fact("right")),
        ("NOT_ALLOWED", "create")
    );
    let fence = v1::FenceRequest {
        log: new.to_owned(),
        ..Default::default()
    };
    let told = Told::of(&client.fence(fence.clone()).await.unwrap_err());
    assert_eq!(
        (told.reason.as_str(), told.fact("right")),
        ("NOT_ALLOWED", "create")
    );
    let batch = v1::AppendBatchRequest {
        batches: vec![part(new, &["x"]), part("payments/billing/b", &["x"])],
        ..Default::default()
    };
    let told = Told::of(&client.append_batch(batch).await.unwrap_err());
    assert_eq!(
        (told.reason.as_str(), told.fact("right")),
        ("NOT_ALLOWED", "create")
    );
    let list = v1::ListLogsRequest::default();
    let list = logs(&daemon, &root).await.list_logs(list).await.unwrap();
    assert_eq!(names(list.get_ref()), [""; 0]);
    // Once somebody has created it, the same calls are allowed.
    wal(&daemon, &root)
        .await
        .append(append(new, "x"))
        .await
        .unwrap();
    client.append(append(new, "x")).await.unwrap();
    client.fence(fence).await.unwrap();
}

#[tokio::test]
async fn list_by_a_shorter_prefix_has_the_names_of_the_caller_alone() {
    let file = AuthFile::new(COMPANY);
    let (root, reader) = (file.token("root"), file.token("reader"));
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    let all = [
        "a",
        "orders/a",
        "pay",
        "payments",
        "payments-eu/x",
        "payments/a",
        "payments/b/c",
        "z",
    ];
    for log in all {
        own.append(append(log, "x")).await.unwrap();
    }
    let mut client = logs(&daemon, &reader).await;
    let mut list = async |prefix: &str, page_size, page_token: String| {
        let request = v1::ListLogsRequest {
            prefix: prefix.to_owned(),
            page_size,
            page_token,
        };
        client.list_logs(request).await.unwrap().into_inner()
    };
    for prefix in ["", "p", "pay", "payments", "payments/"] {
        let answer = list(prefix, 0, String::new()).await;
        assert_eq!(names(&answer), ["payments/a", "payments/b/c"], "{prefix:?}");
    }
    for prefix in ["orders", "z", "payments-", "q"] {
        assert_eq!(
            names(&list(prefix, 0, String::new()).await),
            [""; 0],
            "{prefix:?}"
        );
    }
    let first = list("", 1, String::new()).await;
    assert_eq!(names(&first), ["payments/a"]);
    let second = list("", 1, first.next_page_token).await;
    assert_eq!(names(&second), ["payments/b/c"]);
    assert_eq!(second.next_page_token, "");
}

#[tokio::test]
async fn scan_of_a_prefix_needs_a_right_on_all_of_it() {
    let file = AuthFile::new(COMPANY);
    let reader = file.token("reader");
    let daemon = file.start(&[]);
    let mut client = wal(&daemon, &reader).await;
    let mut scan = async |selector: Selector| {
        let request = v1::ScanRequest {
            selector: Some(selector),
            ..Default::default()
        };
        client.scan(request).await.map(|_| ())
    };
    for prefix in ["payments/", "payments/b"] {
        scan(Selector::Prefix(prefix.to_owned())).await.unwrap();
    }
    for prefix in [
        "",
        "pay",
        "payments",
        "payments-eu/",
        "Payments/",
        "orders/",
    ] {
        let told = Told::of(&scan(Selector::Prefix(prefix.to_owned())).await.unwrap_err());
        assert_eq!(told.reason, "NOT_ALLOWED", "{prefix:?}");
    }
    let told = Told::of(&scan(Selector::All(v1::AllLogs {})).await.unwrap_err());
    assert_eq!(told.reason, "NOT_ALLOWED");
    for log in ["payments", "payments-eu/x"] {
        let told = Told::of(&scan(Selector::Log(log.to_owned())).await.unwrap_err());
        assert_eq!(told.reason, "NOT_ALLOWED", "{log}");
    }
}

#[tokio::test]
async fn sync_of_all_logs_needs_append_on_any() {
    let file = AuthFile::new(COMPANY);
    let (writer, reader) = (file.token("writer"), file.token("reader"));
    let daemon = file.start(&[]);
    let sync = v1::SyncRequest::default();
    wal(&daemon, &writer)
        .await
        .sync(sync.clone())
        .await
        .unwrap();
    let refused = wal(&daemon, &reader).await.sync(sync).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "NOT_ALLOWED");
}

#[tokio::test]
async fn server_info_without_ops_hides_the_machine() {
    let file = AuthFile::new(COMPANY);
    let (reader, operator) = (file.token("reader"), file.token("ops"));
    let daemon = file.start(&[]);
    let info = |answer: tonic::Response<v1::GetServerInfoResponse>| answer.into_inner();
    let ask = v1::GetServerInfoRequest {};
    let seen = info(
        ops(&daemon, &reader)
            .await
            .get_server_info(ask)
            .await
            .unwrap(),
    );
    assert!(seen.limits.is_some() && seen.durability.is_none() && seen.damage.is_none());
    let seen = info(
        ops(&daemon, &operator)
            .await
            .get_server_info(ask)
            .await
            .unwrap(),
    );
    assert!(seen.durability.is_some());
}
