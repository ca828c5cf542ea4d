//! Quotas of a tenant: QUOTA beyond each limit, the same after a restart, and room after a trim or a reload.

use tonic::{Code, Status};
use wald_proto::v1;
use wald_proto::v1::cursor_service_client::CursorServiceClient;

use super::principals::{AuthFile, Bearer, WithToken, logs, wal};
use crate::support::{Daemon, Told, append, part, private_directory, until_as};

const SHOP: &str = r#"
[tenant.shop]
prefix = "shop/"
limits = { logs = 2, producers = 1, cursors = 1, stored_bytes = "16KiB" }

[tenant.other]
prefix = "other/"
limits = { logs = 5 }

[principal.shop]
tenant = "shop"
allow = [
    { do = ["append", "create", "read", "cursor", "trim", "fence", "configure", "delete", "list"], logs = "shop/" },
]

[principal.root]
allow = [
    { do = ["append", "create", "read", "cursor", "list"], logs = "" },
    { do = ["metrics"] },
]
"#;

/// Checks that a request was refused by a limit of the tenant `shop`. Returns the use.
fn full(status: &Status, setting: &str, limit: &str) -> u64 {
    let told = Told::of(status);
    assert_eq!(
        (told.code, &*told.reason),
        (Code::ResourceExhausted, "QUOTA")
    );
    let facts = ["outcome", "retry", "tenant", "setting", "limit"].map(|fact| told.fact(fact));
    assert_eq!(facts, ["NOT_APPLIED", "SAFE", "shop", setting, limit]);
    told.fact("used").parse().unwrap()
}

async fn cursors(daemon: &Daemon, token: &str) -> CursorServiceClient<WithToken> {
    CursorServiceClient::with_interceptor(daemon.channel().await, Bearer::new(token))
}

fn by(log: &str, id: &str) -> v1::AppendBatchRequest {
    let producer = v1::Producer {
        id: id.to_owned(),
        ..v1::Producer::default()
    };
    let condition = v1::AppendCondition {
        producer: Some(producer),
        ..v1::AppendCondition::default()
    };
    let batch = v1::LogBatch {
        condition: Some(condition),
        ..part(log, &["x"])
    };
    v1::AppendBatchRequest {
        batches: vec![batch],
        ..v1::AppendBatchRequest::default()
    }
}

fn commit(cursor: &str) -> v1::CommitCursorRequest {
    let commit = v1::CursorCommit {
        log: "shop/a".to_owned(),
        cursor: cursor.to_owned(),
        lsn: 1,
        ..v1::CursorCommit::default()
    };
    v1::CommitCursorRequest {
        commit: Some(commit),
    }
}

async fn stored(daemon: &Daemon, token: &str) -> u64 {
    let request = v1::ListLogsRequest {
        prefix: "shop/".to_owned(),
        ..v1::ListLogsRequest::default()
    };
    let answer = logs(daemon, token).await.list_logs(request).await;
    let answer = answer.unwrap().into_inner();
    answer.logs.iter().map(|log| log.stored_bytes).sum()
}

#[tokio::test]
async fn every_limit_of_a_tenant_holds_also_after_a_restart() {
    let file = AuthFile::new(SHOP);
    let (shop, root) = (file.token("shop"), file.token("root"));
    let directory = private_directory();
    let start = || Daemon::start_in(directory.path(), &[&file.argument()]);
    let mut daemon = start();
    let mut client = wal(&daemon, &shop).await;
    client.append(append("shop/a", "x")).await.unwrap();
    client.append_batch(by("shop/b", "p")).await.unwrap();
    let mut moving = cursors(&daemon, &shop).await;
    moving.commit_cursor(commit("c")).await.unwrap();
    for _ in 0..2 {
        let mut client = wal(&daemon, &shop).await;
        let refused = client.append(append("shop/c", "x")).await.unwrap_err();
        assert_eq!(full(&refused, "logs", "2"), 2);
        // A batch with a log of another tenant is refused as a whole.
        let both = v1::AppendBatchRequest {
            batches: vec![part("other/a", &["x"]), part("shop/c", &["x"])],
            ..v1::AppendBatchRequest::default()
        };
        let refused = wal(&daemon, &root).await.append_batch(both).await;
        full(&refused.unwrap_err(), "logs", "2");
        let refused = client.append_batch(by("shop/a", "q")).await.unwrap_err();
        assert_eq!(full(&refused, "producers", "1"), 1);
        let mut moving = cursors(&daemon, &shop).await;
        let refused = moving.commit_cursor(commit("d")).await.unwrap_err();
        assert_eq!(full(&refused, "cursors", "1"), 1);
        let large = "x".repeat(3000);
        let mut refused = None;
        while refused.is_none() {
            refused = client.append(append("shop/a", &large)).await.err();
        }
        let used = full(&refused.unwrap(), "stored_bytes", "16384");
        assert!((13_000..=16_384).contains(&used), "{used}");
        assert_eq!(stored(&daemon, &shop).await, used);
        let metric = |name: &str| daemon.metric_as(name, &root);
        let used = u32::try_from(used).unwrap();
        for (name, value) in [
            ("logs", 2),
            ("producers", 1),
            ("cursors", 1),
            ("stored_bytes", used),
        ] {
            let shown = metric(&format!("wald_tenant_{name}{{tenant=\"shop\"}}"));
            assert_eq!(shown, f64::from(value), "{name}");
        }
        assert_eq!(metric("wald_tenant_logs{tenant=\"other\"}"), 0.0);
        daemon.signal(rustix::process::Signal::KILL);
        daemon.ended().await;
        daemon = start();
    }
    // A trim makes room at once.
    let mut client = wal(&daemon, &shop).await;
    let before = stored(&daemon, &shop).await;
    let trim = v1::TrimRequest {
        log: "shop/a".to_owned(),
        before_lsn: 3,
        ..v1::TrimRequest::default()
    };
    client.trim(trim).await.unwrap();
    let after = stored(&daemon, &shop).await;
    assert!(before - after > 6000, "{before} {after}");
    let large = "x".repeat(3000);
    client.append(append("shop/a", &large)).await.unwrap();
}

#[tokio::test]
async fn a_changed_limit_holds_without_a_restart() {
    let file = AuthFile::new(SHOP);
    let (shop, root) = (file.token("shop"), file.token("root"));
    let daemon = file.start(&[]);
    let mut client = wal(&daemon, &shop).await;
    for log in ["shop/a", "shop/b"] {
        client.append(append(log, "x")).await.unwrap();
    }
    let refused = client.append(append("shop/c", "x")).await.unwrap_err();
    full(&refused, "logs", "2");
    let limit = "wald_tenant_limit{limit=\"logs\",tenant=\"shop\"}";
    file.put_in_force(&daemon, &file.text().replace("logs = 2", "logs = 3"));
    until_as(&daemon, limit, &root, |limit| limit == 3.0).await;
    client.append(append("shop/c", "x")).await.unwrap();
    file.write(&file.text().replace("logs = 3", "logs = 1"));
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for_log("a tenant exceeds a limit");
    let refused = client.append(append("shop/d", "x")).await.unwrap_err();
    assert_eq!(full(&refused, "logs", "1"), 3);
    for log in ["shop/a", "shop/b", "shop/c"] {
        client.append(append(log, "x")).await.unwrap();
    }
}
