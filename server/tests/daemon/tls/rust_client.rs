//! The Rust client over TLS: its calls, certificates on both sides, and one failure for each reason.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use wald_client::{
    Client, ClientBuilder, Error, ErrorKind, Outcome, RetryPolicy, ScanEvent, TlsFailure,
    TlsOptions,
};

use super::certificates::{Files, Identity, ca, client_params, issue, server_until};
use super::client::grpc;
use super::start;
use crate::support::Daemon;

/// The endpoint by the name in the certificate.
fn endpoint(scheme: &str, daemon: &Daemon) -> String {
    let address = grpc(daemon);
    format!(
        "{scheme}://localhost:{}",
        address.rsplit_once(':').unwrap().1
    )
}

fn trusting(files: &Files) -> TlsOptions {
    TlsOptions::new().ca_file(files.path("ca.pem"))
}

fn builder(daemon: &Daemon, options: TlsOptions) -> ClientBuilder {
    Client::builder(endpoint("https", daemon)).tls(options)
}

/// The failure of one attempt.
async fn failure(builder: ClientBuilder) -> (TlsFailure, String) {
    let builder = builder.retry(RetryPolicy {
        max_attempts: 1,
        ..RetryPolicy::default()
    });
    let client = builder.connect_lazy().unwrap();
    let error = client.append("log", "x").await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotApplied, "{error:?}");
    kind_of(&error)
}

fn kind_of(error: &Error) -> (TlsFailure, String) {
    match error.kind() {
        ErrorKind::Tls { failure, .. } => (*failure, error.to_string()),
        other => panic!("{other:?}"),
    }
}

fn write_identity(files: &Files, identity: &Identity) -> TlsOptions {
    files.write("client.pem", &identity.chain);
    files.write("client.key", &identity.key);
    trusting(files).identity_files(files.path("client.pem"), files.path("client.key"))
}

#[tokio::test]
async fn every_kind_of_call_works_over_tls() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let client = builder(&daemon, trusting(&files)).connect().await.unwrap();
    client.append("log", "a").await.unwrap();
    let producer = client.producer("log").open().await.unwrap();
    producer.append("b").await.unwrap().await.unwrap();
    producer.close().await.unwrap();
    assert_eq!(client.read("log").await.unwrap().records.len(), 2);
    for mut events in [client.scan("log").open(), client.follow("log").open()] {
        let mut records = Vec::new();
        while records.len() < 2 {
            if let ScanEvent::Batch(batch) = events.next().await.unwrap().unwrap() {
                records.extend(batch.records.into_iter().map(|record| record.data));
            }
        }
        assert_eq!(records, ["a", "b"]);
    }
}

#[tokio::test]
async fn ca_may_be_given_as_pem_and_the_name_as_a_setting() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let options = TlsOptions::new()
        .ca_pem(files.ca.pem())
        .server_name("localhost");
    let by_address = Client::builder(format!("https://{}", grpc(&daemon)));
    let client = by_address.tls(options).connect().await.unwrap();
    client.append("log", "x").await.unwrap();
}

#[tokio::test]
async fn required_client_certificate_is_sent_or_its_lack_reported() {
    let files = Files::new();
    let daemon = start(&files.arguments_with_clients("require"));
    let (kind, text) = failure(builder(&daemon, trusting(&files))).await;
    assert_eq!(kind, TlsFailure::ClientCertificateRequired);
    assert!(text.contains("requires a client certificate"), "{text}");

    let good = issue(&client_params("billing", 1), &files.ca);
    let client = builder(&daemon, write_identity(&files, &good));
    let client = client.connect().await.unwrap();
    client.append("log", "x").await.unwrap();

    let stranger = issue(&client_params("billing", 1), &ca("Another CA"));
    let (kind, text) = failure(builder(&daemon, write_identity(&files, &stranger))).await;
    assert_eq!(kind, TlsFailure::ClientCertificateRefused, "{text}");
}

#[tokio::test]
async fn certificate_of_an_unknown_ca_is_refused() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let options = TlsOptions::new().ca_pem(ca("Another CA").pem());
    let (kind, text) = failure(builder(&daemon, options)).await;
    assert_eq!(kind, TlsFailure::UnknownCa);
    assert!(text.contains("not from a trusted CA"), "{text}");
}

#[tokio::test]
async fn certificate_of_a_ca_is_refused_with_the_way_out() {
    let files = Files::new();
    let identity = Identity {
        chain: files.ca.pem(),
        key: files.ca.key().serialize_pem(),
    };
    files.write_server(&identity);
    let daemon = start(&files.arguments());
    let (kind, text) = failure(builder(&daemon, trusting(&files))).await;
    assert_eq!(kind, TlsFailure::Certificate);
    assert!(text.contains("that a CA has issued"), "{text}");
}

#[tokio::test]
async fn certificate_for_another_name_is_refused_with_its_names() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let options = trusting(&files).server_name("wald.example");
    let (kind, text) = failure(builder(&daemon, options)).await;
    assert_eq!(kind, TlsFailure::WrongName);
    assert!(
        text.ends_with("is for localhost, not for wald.example"),
        "{text}"
    );
}

#[tokio::test]
async fn expired_certificate_is_refused_with_its_last_day() {
    let files = Files::new();
    // The daemon refuses to start with such a certificate, so the test accepts by itself.
    let expired = server_until(&files.ca, 2021);
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(expired.chain.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(expired.key.as_bytes()).unwrap(),
        )
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            assert!(acceptor.accept(socket).await.is_err());
        }
    });
    let client = Client::builder(format!("https://localhost:{port}"));
    let (kind, text) = failure(client.tls(trusting(&files))).await;
    assert_eq!(kind, TlsFailure::Expired);
    assert!(text.contains("expired on 2021-01-01"), "{text}");
}

#[tokio::test]
async fn https_to_a_plaintext_port_says_so() {
    let files = Files::new();
    let daemon = start(&[]);
    let (kind, text) = failure(builder(&daemon, trusting(&files))).await;
    assert_eq!(kind, TlsFailure::ServerWithoutTls, "{text}");
    assert!(text.contains("http://"), "{text}");
}

#[tokio::test]
async fn plaintext_to_a_tls_port_says_so() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let (kind, text) = failure(Client::builder(endpoint("http", &daemon))).await;
    assert_eq!(kind, TlsFailure::ServerWithTls);
    assert!(text.contains("https://"), "{text}");
}

#[tokio::test]
async fn wrong_ca_is_tried_once_a_second_until_the_deadline() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let client = builder(&daemon, TlsOptions::new().ca_pem(ca("Another CA").pem()))
        .timeout(Duration::from_millis(2_500))
        .retry(RetryPolicy {
            max_attempts: u32::MAX,
            first_pause: Duration::from_millis(1),
            max_pause: Duration::from_millis(1),
        })
        .connect_lazy()
        .unwrap();
    let begin = Instant::now();
    let calls = (0..8).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.append("log", "x").await })
    });
    for call in calls.collect::<Vec<_>>() {
        let error = call.await.unwrap().unwrap_err();
        assert_eq!(kind_of(&error).0, TlsFailure::UnknownCa);
    }
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    assert!(client.tls_failure().is_some());
    let attempts = daemon.metric("wald_tls_handshakes_total{result=\"failed\"}");
    assert!((1.0..=3.0).contains(&attempts), "{attempts} attempts");
}

#[tokio::test]
async fn next_connection_reads_files_that_have_changed() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    files.write("trusted.pem", &ca("Another CA").pem());
    let options = TlsOptions::new().ca_file(files.path("trusted.pem"));
    let client = builder(&daemon, options).connect_lazy().unwrap();
    let early = client
        .append("log", "x")
        .timeout(Duration::from_millis(500));
    assert_eq!(kind_of(&early.await.unwrap_err()).0, TlsFailure::UnknownCa);
    files.write("trusted.pem", "not a certificate");
    files.write("trusted.pem", &files.ca.pem());
    client.append("log", "x").await.unwrap();
    assert!(client.tls_failure().is_none());
}

#[tokio::test]
async fn faulty_settings_are_reported_before_any_connection() {
    let files = Files::new();
    let other = issue(&client_params("billing", 1), &files.ca);
    let mixed = Identity {
        key: issue(&client_params("billing", 2), &files.ca).key,
        ..other
    };
    files.write("empty.pem", "");
    let secret = mixed.key.lines().nth(1).unwrap().to_owned();
    for (options, word) in [
        (
            TlsOptions::new().ca_file(files.path("none.pem")),
            "none.pem",
        ),
        (
            TlsOptions::new().ca_file(files.path("empty.pem")),
            "no certificate",
        ),
        (trusting(&files).server_name("a b"), "not a server name"),
        (write_identity(&files, &mixed), "is not the key"),
        (
            trusting(&files).identity_files(files.path("ca.pem"), files.path("ca.pem")),
            "no private key",
        ),
    ] {
        let builder = Client::builder("https://localhost:1").tls(options);
        assert!(!format!("{builder:?}").contains(&secret));
        let error = builder.connect_lazy().unwrap_err();
        let (kind, text) = kind_of(&error);
        assert_eq!(kind, TlsFailure::Settings);
        assert!(text.contains(word) && !text.contains(&secret), "{text}");
    }
    let plain = Client::builder("http://localhost:1").tls(trusting(&files));
    let error = plain.connect_lazy().unwrap_err().to_string();
    assert!(error.contains("begin with https://"), "{error}");
}
