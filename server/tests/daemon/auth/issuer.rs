//! Keys of an issuer behind an https URL: a server of the test answers, and fails in every way.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::process::Signal;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tonic::Code;

use super::jwt::{AuditFile, accepts, claims, company, reason, until_accepted};
use super::principals::{AuthFile, wal};
use super::signer::{Signer, key_set, with};
use crate::support::{Told, append};

/// The server of an issuer.
struct IssuerServer {
    address: SocketAddr,
    /// The CA of its certificate, in PEM.
    ca: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// The whole answer, from its first line on. Empty: the connection is closed.
    answer: Mutex<Vec<u8>>,
    requests: Mutex<Vec<String>>,
    fetches: AtomicUsize,
}

/// An answer with a body.
fn answer(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
}

impl IssuerServer {
    fn start(keys: &[&Signer]) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = own.signed_by(&key, &ca).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            ca: ca.pem(),
            state: Arc::new(State::default()),
        };
        server.publish(keys);
        let (state, config) = (Arc::clone(&server.state), Arc::new(config));
        std::thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                state.fetches.fetch_add(1, Ordering::SeqCst);
                // A client that does not like the answer closes.
                let _ = state.serve(socket, &config);
            }
        });
        server
    }

    fn say(&self, answer: Vec<u8>) {
        *self.state.answer.lock() = answer;
    }

    fn publish(&self, keys: &[&Signer]) {
        self.say(answer("200 OK", &key_set(keys)));
    }

    fn fetches(&self) -> usize {
        self.state.fetches.load(Ordering::SeqCst)
    }

    /// An `auth_file` that names the server.
    fn file(&self, more: &str) -> AuthFile {
        let file = AuthFile::new("");
        let ca = file.write_beside("ca.pem", &self.ca);
        file.write(&company(&format!(
            "jwks_url = \"https://localhost:{}/openid/v1/jwks\"\njwks_ca = \"{}\"\n{more}",
            self.address.port(),
            ca.display()
        )));
        file
    }
}

impl State {
    fn serve(&self, socket: TcpStream, config: &Arc<ServerConfig>) -> std::io::Result<()> {
        let answer = self.answer.lock().clone();
        if answer.is_empty() {
            return Ok(());
        }
        let connection = ServerConnection::new(Arc::clone(config)).unwrap();
        let mut stream = StreamOwned::new(connection, socket);
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            request.push(byte[0]);
        }
        let request = String::from_utf8_lossy(&request).into_owned();
        self.requests.lock().push(request);
        stream.write_all(&answer)?;
        stream.conn.send_close_notify();
        stream.flush()
    }
}

#[tokio::test]
async fn keys_are_there_when_the_daemon_serves_and_follow_the_issuer() {
    let (old, next) = (Signer::new("old", "RS256"), Signer::new("next", "ES256"));
    let server = IssuerServer::start(&[&old]);
    let file = server.file("");
    let bearer = file.write_beside("api-token", "the.api.token\n");
    let line = format!("jwks_token_file = \"{}\"", bearer.display());
    let file_text = file.text();
    file.write(&format!("{file_text}{line}\n"));
    let daemon = file.start(&[]);
    // The first call after the start is accepted.
    accepts(&daemon, &old.token(&claims())).await;
    let head = server.state.requests.lock()[0].to_ascii_lowercase();
    assert!(
        head.starts_with("get /openid/v1/jwks http/1.1\r\n"),
        "{head}"
    );
    assert!(
        head.contains("authorization: bearer the.api.token\r\n"),
        "{head}"
    );
    assert_eq!(
        reason(&daemon, &next.token(&claims())).await,
        "BAD_CREDENTIAL"
    );
    server.publish(&[&old, &next]);
    daemon.signal(Signal::HUP);
    until_accepted(&daemon, &next.token(&claims())).await;
    accepts(&daemon, &old.token(&claims())).await;
    let last = Signer::new("last", "RS256");
    server.publish(&[&next, &last]);
    daemon.signal(Signal::HUP);
    until_accepted(&daemon, &last.token(&claims())).await;
    assert_eq!(
        reason(&daemon, &old.token(&claims())).await,
        "BAD_CREDENTIAL"
    );
}

#[tokio::test]
async fn issuer_that_fails_in_any_way_keeps_its_known_keys() {
    let signer = Signer::new("key", "RS256");
    let server = IssuerServer::start(&[&signer]);
    let file = server.file("");
    let root = file.token("root");
    let audit = AuditFile::new(&file);
    let daemon = file.start(&[&audit.argument()]);
    let token = signer.token(&claims());
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    plain.set_nonblocking(true).unwrap();
    let other = Signer::new("other", "RS256");
    let redirect = format!(
        "HTTP/1.1 302 Found\r\nLocation: http://{}/\r\nContent-Length: 0\r\n\r\n",
        plain.local_addr().unwrap()
    );
    let large = key_set(&[&other]).replace(
        "\"keys\"",
        &format!("\"x\":\"{}\",\"keys\"", "x".repeat(10 << 20)),
    );
    let cases = [
        ("away", Vec::new(), "TLS: "),
        (
            "500",
            answer("500 Internal Server Error", &key_set(&[&other])),
            "the server answered 500",
        ),
        ("empty", answer("200 OK", ""), "it is no key set"),
        (
            "no keys",
            answer("200 OK", "{\"keys\":[]}"),
            "the key set is empty",
        ),
        ("10 MB", answer("200 OK", &large), "length limit exceeded"),
        (
            "redirect to http",
            redirect.into_bytes(),
            "the server answered 302",
        ),
        ("no HTTP", b"SSH-2.0-OpenSSH_9\r\n".to_vec(), "invalid HTTP"),
    ];
    for (number, (case, said, why)) in (1..).zip(cases) {
        server.say(said);
        audit.reloads_with(&daemon, why).await;
        accepts(&daemon, &token).await;
        assert_eq!(
            reason(&daemon, &other.token(&claims())).await,
            "BAD_CREDENTIAL"
        );
        let failures = daemon.metric_as("wald_reload_failures_total{kind=\"jwks_url\"}", &root);
        assert!(failures >= f64::from(number), "{case}: {failures}");
    }
    assert!(plain.accept().is_err(), "the redirect was followed");
    server.publish(&[&other]);
    daemon.signal(Signal::HUP);
    until_accepted(&daemon, &other.token(&claims())).await;
}

#[tokio::test]
async fn start_without_the_issuer_serves_others_and_its_clients_wait() {
    let signer = Signer::new("key", "RS256");
    let server = IssuerServer::start(&[&signer]);
    let file = server.file("");
    let root = file.token("root");
    // Another CA than that of the server: a stranger answers in its place.
    let stranger = IssuerServer::start(&[]);
    file.write_beside("ca.pem", &stranger.ca);
    let daemon = file.start(&[]);
    wal(&daemon, &root)
        .await
        .append(append("a", "x"))
        .await
        .unwrap();
    // Its clients wait.
    let refused = wal(&daemon, &signer.token(&claims()))
        .await
        .append(append("a", "x"))
        .await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let told = Told::of(&refused);
    assert_eq!(
        (told.reason.as_str(), told.fact("retry")),
        ("STARTING", "SAFE")
    );
    // The file is read again for each fetch.
    file.write_beside("ca.pem", &server.ca);
    daemon.signal(Signal::HUP);
    until_accepted(&daemon, &signer.token(&claims())).await;
}

#[tokio::test]
async fn revocation_comes_into_force_while_an_issuer_has_no_keys_yet() {
    let server = IssuerServer::start(&[]);
    let file = server.file("");
    let bearer = file.write_beside("api-token", "the.api.token\n");
    let line = format!("jwks_token_file = \"{}\"\n", bearer.display());
    file.write(&(file.text() + &line));
    let root = file.token("root");
    server.say(Vec::new());
    let daemon = file.start(&[]);
    let mut client = wal(&daemon, &root).await;
    client.append(append("a", "x")).await.unwrap();
    // A volume of secrets loses the file.
    std::fs::remove_file(bearer).unwrap();
    assert!(file.command(&["revoke", &root[6..14]]).status.success());
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("the changed auth_file is in force");
    let refused = client.append(append("a", "x")).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
}

#[tokio::test]
async fn keys_of_a_source_end_with_it() {
    let signer = Signer::new("key", "RS256");
    let server = IssuerServer::start(&[&signer]);
    let file = server.file("");
    let daemon = file.start(&[]);
    let token = signer.token(&claims());
    let mut client = wal(&daemon, &token).await;
    client
        .append(append("payments/billing/a", "x"))
        .await
        .unwrap();
    // Nobody answers there.
    let port = format!("localhost:{}/", server.address.port());
    let changed = file.text().replace(&port, "localhost:1/");
    file.put_in_force(&daemon, &changed);
    assert_eq!(reason(&daemon, &token).await, "STARTING");
    // The connection that remembers its caller, too.
    let refused = client.append(append("payments/billing/a", "x")).await;
    assert_eq!(Told::of(&refused.unwrap_err()).reason, "STARTING");
    let other = Signer::new("key", "RS256");
    let path = file.write_beside("jwks.json", &key_set(&[&other]));
    file.write(&company(&format!("jwks_file = \"{}\"", path.display())));
    daemon.signal(Signal::HUP);
    until_accepted(&daemon, &other.token(&claims())).await;
    assert_eq!(reason(&daemon, &token).await, "BAD_CREDENTIAL");
}

#[tokio::test]
async fn ten_thousand_unknown_kids_cause_at_most_one_fetch_a_minute() {
    let signer = Signer::new("key", "ES256");
    let server = IssuerServer::start(&[&signer]);
    let file = server.file("");
    let begin = Instant::now();
    let daemon = file.start(&[]);
    let good = signer.token(&claims());
    let mut calls = tokio::task::JoinSet::new();
    for worker in 0..20 {
        let channel = daemon.channel().await;
        let unknown = |number: usize| {
            let header = with(
                &signer.header(),
                &serde_json::json!({ "kid": format!("{worker}-{number}") }),
            );
            signer.sign(&header, &claims())
        };
        let tokens: Vec<String> = (0..500).map(unknown).collect();
        let good = good.clone();
        calls.spawn(async move {
            let path = wald_proto::Method::Append.path();
            let message = || super::raw::request(wald_proto::Method::Append, "payments/billing/a");
            for token in tokens {
                let value = format!("Bearer {token}");
                let refused = super::raw::call(&channel, path, Some(&value), message()).await;
                assert_eq!(Told::of(&refused.unwrap_err()).reason, "BAD_CREDENTIAL");
            }
            let value = format!("Bearer {good}");
            super::raw::call(&channel, path, Some(&value), message())
                .await
                .unwrap();
        });
    }
    while let Some(worker) = calls.join_next().await {
        worker.unwrap();
    }
    let minutes = usize::try_from(begin.elapsed().as_secs() / 60).unwrap();
    assert!(
        server.fetches() <= 1 + minutes,
        "{} fetches",
        server.fetches()
    );
}
