//! Files that change while the daemon serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinHandle;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::certificates::{
    Files, Identity, ca, client_params, crl, crl_until, issue, server_until,
};
use super::client::{channel, connect, grpc, http, settings, wal};
use super::start;
use crate::support::{Daemon, append, until};

const IN_FORCE: &str = "the changed files of TLS are in force";
const UNUSABLE: &str = "a file of TLS cannot be used";
const EXPIRES: &str = "wald_tls_certificate_not_after_timestamp_seconds{kind=\"server\"}";
const LIST_EXPIRES: &str = "wald_tls_certificate_not_after_timestamp_seconds{kind=\"client_crl\"}";
const FAILURES: &str = "wald_reload_failures_total{kind=\"tls\"}";

/// Time after which a connection that must end fails the test.
const PATIENCE: Duration = Duration::from_secs(20);

/// Seconds from 1970 to the start of a year in this century.
fn year(year: i32) -> f64 {
    let leap_days = (year - 1969) / 4;
    f64::from((year - 1970) * 365 + leap_days) * 86_400.0
}

/// Appends on one connection after the other until it is stopped. Returns the number of appends.
fn load(daemon: &Daemon, files: &Files, stop: &Arc<AtomicBool>) -> JoinHandle<usize> {
    let (address, stop) = (grpc(daemon), Arc::clone(stop));
    let config = files.client(&["h2"], None);
    tokio::spawn(async move {
        let mut acked = 0;
        while !stop.load(Ordering::Relaxed) {
            let mut wal = wal(&address, config.clone()).await;
            for _ in 0..3 {
                wal.append(append("a", "under load")).await.unwrap();
                acked += 1;
            }
        }
        acked
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn swaps_under_load_fail_no_call_and_bad_files_are_never_served() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    assert_eq!(daemon.metric(EXPIRES), year(2045));
    let stop = Arc::new(AtomicBool::new(false));
    let loads: Vec<_> = (0..2).map(|_| load(&daemon, &files, &stop)).collect();
    let mut failures = 0.0;
    for round in 0..20 {
        let until_year = 2030 + round;
        let mut identity = server_until(&files.ca, until_year);
        let in_force = daemon.metric(EXPIRES);
        match round % 4 {
            1 => identity.key = server_until(&files.ca, until_year).key,
            2 => identity = server_until(&files.ca, 2021),
            3 => identity.chain.clear(),
            _ => {}
        }
        files.write_server(&identity);
        daemon.signal(Signal::HUP);
        if round % 4 == 0 {
            until(&daemon, EXPIRES, |expires| expires == year(until_year)).await;
        } else {
            failures += 1.0;
            until(&daemon, FAILURES, |counted| counted == failures).await;
            assert_eq!(daemon.metric(EXPIRES), in_force, "round {round}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    for load in loads {
        assert!(load.await.unwrap() > 0);
    }
    let line = daemon.wait_for_log(UNUSABLE);
    assert!(
        line.contains("ERROR") && line.contains("server.key"),
        "{line}"
    );
}

#[tokio::test]
async fn directory_that_is_swapped_behind_a_link_is_found() {
    let files = Files::new();
    let link = |to: &str| {
        let new = files.path("..new");
        std::os::unix::fs::symlink(to, &new).unwrap();
        std::fs::rename(new, files.path("..data")).unwrap();
    };
    for (directory, year) in [("..1", 2040), ("..2", 2041)] {
        std::fs::create_dir(files.path(directory)).unwrap();
        files.write_server(&server_until(&files.ca, year));
        for name in ["server.pem", "server.key"] {
            let to = files.path(&format!("{directory}/{name}"));
            std::fs::rename(files.path(name), to).unwrap();
        }
    }
    link("..1");
    for name in ["server.pem", "server.key"] {
        std::os::unix::fs::symlink(format!("..data/{name}"), files.path(name)).unwrap();
    }
    let daemon = start(&files.arguments());
    assert_eq!(daemon.metric(EXPIRES), year(2040));
    link("..2");
    // Without a signal.
    let line = daemon.wait_for_log(IN_FORCE);
    assert!(line.contains("INFO"), "{line}");
    assert_eq!(daemon.metric(EXPIRES), year(2041));
    let success = daemon.metric("wald_reload_last_success_timestamp_seconds{kind=\"tls\"}");
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!((now.as_secs_f64() - success).abs() < 15.0);
}

/// A certificate that is good for a few seconds: its only revocation is its expiry.
#[tokio::test]
async fn connection_ends_when_its_certificate_expires() {
    let files = Files::new();
    let mut arguments = files.arguments_with_clients("optional");
    arguments.push("--http-tls".to_owned());
    let daemon = start(&arguments);
    let mut params = client_params("billing", 1);
    let expires = std::time::SystemTime::now() + Duration::from_secs(6);
    params.not_after = expires.into();
    let identity = issue(&params, &files.ca);
    let short = watcher_as(&daemon, &files, &identity).await;
    let mut other = watcher(&daemon, &files, "shipping", 2).await;
    let config = files.client(&["http/1.1"], Some(&identity));
    let mut probe = connect(&http(&daemon), config).await.unwrap();
    let request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    probe.write_all(request).await.unwrap();
    let ended = tokio::time::timeout(PATIENCE, short.ended).await;
    ended.unwrap().unwrap();
    // The last second counts whole, and not_after has no parts of a second.
    assert!(std::time::SystemTime::now() > expires - Duration::from_secs(1));
    let mut rest = Vec::new();
    let closed = tokio::time::timeout(PATIENCE, probe.read_to_end(&mut rest)).await;
    closed.unwrap().unwrap();
    assert!(!other.ended.is_finished());
    let check = other.client.check(HealthCheckRequest::default());
    check.await.unwrap();
    daemon.wait_for_log("the certificate of a client is no longer accepted");
}

/// A call that lasts until its connection ends.
struct Watcher {
    client: HealthClient<tonic::transport::Channel>,
    ended: JoinHandle<Instant>,
}

async fn watcher(daemon: &Daemon, files: &Files, name: &str, serial: u64) -> Watcher {
    let identity = issue(&client_params(name, serial), &files.ca);
    watcher_as(daemon, files, &identity).await
}

async fn watcher_as(daemon: &Daemon, files: &Files, identity: &Identity) -> Watcher {
    let channel = channel(&grpc(daemon), files.client(&["h2"], Some(identity))).await;
    let mut client = HealthClient::new(channel.unwrap());
    let watch = client.watch(HealthCheckRequest::default()).await.unwrap();
    let mut watch = watch.into_inner();
    assert!(watch.message().await.unwrap().is_some());
    let ended = tokio::spawn(async move {
        while let Ok(Some(_)) = watch.message().await {}
        Instant::now()
    });
    Watcher { client, ended }
}

#[tokio::test]
async fn revoked_connection_ends_within_a_second_and_others_continue() {
    const REVOKED: u64 = 7;
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[]));
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    let daemon = start(&arguments);
    let revoked = watcher(&daemon, &files, "billing", REVOKED).await;
    let mut other = watcher(&daemon, &files, "shipping", 8).await;
    files.write("crl.pem", &crl(&files.ca, &[REVOKED]));
    let began = Instant::now();
    daemon.signal(Signal::HUP);
    let ended = tokio::time::timeout(PATIENCE, revoked.ended).await;
    let ended = ended.unwrap().unwrap();
    assert!(
        ended - began < Duration::from_secs(1),
        "{:?}",
        ended - began
    );
    assert!(!other.ended.is_finished());
    let check = other.client.check(HealthCheckRequest::default());
    check.await.unwrap();
    daemon.wait_for_log("the certificate of a client is no longer accepted");
}

/// A certificate of the server and its key, which do not belong together.
#[tokio::test]
async fn revocation_comes_into_force_next_to_a_broken_certificate_of_the_server() {
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[]));
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    let daemon = start(&arguments);
    let revoked = watcher(&daemon, &files, "billing", 7).await;
    files.write("server.key", &server_until(&files.ca, 2045).key);
    files.write("crl.pem", &crl(&files.ca, &[7]));
    daemon.signal(Signal::HUP);
    let ended = tokio::time::timeout(PATIENCE, revoked.ended).await;
    ended.unwrap().unwrap();
    daemon.wait_for_log(IN_FORCE);
    until(&daemon, FAILURES, |failures| failures > 0.0).await;
    // The earlier certificate still serves.
    watcher(&daemon, &files, "shipping", 8).await;
    assert_eq!(daemon.metric(EXPIRES), year(2045));
}

/// A job that stores the error page of a web server in place of the list.
#[tokio::test]
async fn certificate_of_the_server_is_renewed_next_to_a_broken_revocation_list() {
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[7]));
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    let daemon = start(&arguments);
    files.write("crl.pem", "<html>not found</html>");
    daemon.signal(Signal::HUP);
    daemon.wait_for_log(UNUSABLE);
    files.write_server(&server_until(&files.ca, 2040));
    daemon.signal(Signal::HUP);
    until(&daemon, EXPIRES, |expires| expires == year(2040)).await;
    watcher(&daemon, &files, "shipping", 8).await;
    let identity = issue(&client_params("billing", 7), &files.ca);
    let config = files.client(&["h2"], Some(&identity));
    if let Ok(mut stream) = connect(&grpc(&daemon), config).await {
        settings(&mut stream).await.unwrap_err();
    }
}

/// The job that fetches lists has died: its last list still counts, and operators can see its age.
#[tokio::test]
async fn revocation_list_that_is_out_of_date_counts_and_is_reported() {
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[7]));
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    let daemon = start(&arguments);
    assert_eq!(daemon.metric(LIST_EXPIRES), year(2045));
    files.write("crl.pem", &crl_until(&files.ca, &[7], 2021));
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for_log("is out of date since 2021-01-01");
    assert!(
        line.contains("WARN") && line.contains("tls_client_crl"),
        "{line}"
    );
    until(&daemon, LIST_EXPIRES, |at| at == year(2021)).await;
    watcher(&daemon, &files, "shipping", 8).await;
    let identity = issue(&client_params("billing", 7), &files.ca);
    let config = files.client(&["h2"], Some(&identity));
    if let Ok(mut stream) = connect(&grpc(&daemon), config).await {
        settings(&mut stream).await.unwrap_err();
    }
}

/// A job that appends the newest list to the file.
#[test]
fn list_that_is_out_of_date_is_no_fault_beside_a_newer_one() {
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[]));
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    let daemon = start(&arguments);
    let lists = crl_until(&files.ca, &[7], 2021) + &crl_until(&files.ca, &[8], 2040);
    files.write("crl.pem", &lists);
    daemon.signal(Signal::HUP);
    let mut line = String::new();
    while !line.contains(IN_FORCE) {
        line = daemon.log.recv_timeout(PATIENCE).unwrap();
        assert!(!line.contains("out of date"), "{line}");
    }
    assert_eq!(daemon.metric(LIST_EXPIRES), year(2040));
}

#[tokio::test]
async fn connections_of_a_ca_that_is_removed_end() {
    let files = Files::new();
    let daemon = start(&files.arguments_with_clients("require"));
    let removed = watcher(&daemon, &files, "billing", 1).await;
    files.write("ca.pem", &ca("Another CA").pem());
    daemon.signal(Signal::HUP);
    let ended = tokio::time::timeout(PATIENCE, removed.ended).await;
    ended.unwrap().unwrap();
    let identity = issue(&client_params("billing", 2), &files.ca);
    let config = files.client(&["h2"], Some(&identity));
    if let Ok(mut stream) = connect(&grpc(&daemon), config).await {
        settings(&mut stream).await.unwrap_err();
    }
}

#[tokio::test]
async fn revoked_connection_of_the_http_port_ends() {
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[]));
    let mut arguments = files.arguments_with_clients("optional");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    arguments.push("--http-tls".to_owned());
    let daemon = start(&arguments);
    let identity = issue(&client_params("prober", 7), &files.ca);
    let config = files.client(&["http/1.1"], Some(&identity));
    let mut stream = connect(&http(&daemon), config).await.unwrap();
    let request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    files.write("crl.pem", &crl(&files.ca, &[7]));
    daemon.signal(Signal::HUP);
    let mut rest = Vec::new();
    let closed = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
    closed.unwrap().unwrap();
}
