//! The HTTP port with an `auth_file`.

use crate::principals::{AuthFile, COMPANY, wal};
use crate::support::append;

#[test]
fn probes_are_open_and_metrics_need_their_right() {
    let file = AuthFile::new(COMPANY);
    let (operator, reader) = (file.token("ops"), file.token("reader"));
    let daemon = file.start(&[]);
    for probe in ["/livez", "/readyz"] {
        assert_eq!(daemon.http(probe).0, 200, "{probe}");
    }
    assert_eq!(daemon.http("/metrics").0, 401);
    assert_eq!(daemon.http_as("/metrics", "nonsense").0, 401);
    assert_eq!(daemon.http_as("/metrics", &reader).0, 403);
    let (status, text) = daemon.http_as("/metrics", &operator);
    assert!(status == 200 && text.contains("wald_authz_denied_total{op=\"metrics\"} 1"));
}

#[test]
fn metrics_open_serves_metrics_to_everyone_and_nothing_else() {
    let file = AuthFile::new(COMPANY);
    let daemon = file.start(&["--metrics-open"]);
    assert_eq!(daemon.http("/metrics").0, 200);
    assert_eq!(daemon.http("/console/api/logs").0, 401);
}

#[tokio::test]
async fn console_shows_each_caller_its_own_logs() {
    let file = AuthFile::new(&format!(
        "{COMPANY}\n[principal.viewer]\nallow = [{{ do = [\"console\"] }}, \
         {{ do = [\"read\", \"list\"], logs = \"payments/\" }}]\n"
    ));
    let (root, viewer, operator) = (file.token("root"), file.token("viewer"), file.token("ops"));
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    for log in ["payments/a", "orders/a"] {
        own.append(append(log, "secret")).await.unwrap();
    }
    // The port answers hosts that it knows.
    let as_viewer = |path: &str| daemon.http_as(path, &viewer);
    assert_eq!(daemon.http_as("/console/api/logs", &operator).0, 403);
    let (status, text) = as_viewer("/console/api/logs");
    assert!(
        status == 200 && text.contains("payments/a") && !text.contains("orders/a"),
        "{text}"
    );
    assert_eq!(as_viewer("/console/api/records?log=payments/a").0, 200);
    for path in [
        "/console/api/records?log=orders/a",
        "/console/api/records?log=orders/absent",
        "/console/api/record?log=orders/a&lsn=0",
        "/console/api/log?log=orders/a",
        "/console/api/producers?log=orders/a",
        "/console/api/segments",
    ] {
        let (status, text) = as_viewer(path);
        assert!(
            status == 403 && !text.contains("secret"),
            "{path}: {status} {text}"
        );
    }
    let (status, text) = as_viewer("/console/api/server");
    assert!(
        status == 200 && text.contains("\"data_dir\":null") && text.contains("\"durability\":null"),
        "{text}"
    );
    assert!(
        daemon
            .http_as("/console/api/server", &root)
            .1
            .contains("fdatasync")
    );
}
