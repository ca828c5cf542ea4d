//! walctl over TLS: options, variables, and failures with the next step.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use crate::command::{Fixture, Ran, write_with_mode};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// A server in memory behind TLS, and the files of its clients.
struct Secured {
    fixture: Fixture,
    files: TempDir,
    acceptor: TlsAcceptor,
}

/// A port with TLS in front of an endpoint.
async fn in_front_of(endpoint: &str, acceptor: TlsAcceptor) -> u16 {
    let behind = endpoint.replace("http://", "");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (acceptor, behind) = (acceptor.clone(), behind.clone());
            tokio::spawn(async move {
                let mut near = match acceptor.accept(socket).into_fallible().await {
                    Ok(near) => near,
                    Err((_, mut socket)) => {
                        // A close at once would discard the alert, as walctl has sent more.
                        let _ = tokio::io::copy(&mut socket, &mut tokio::io::sink()).await;
                        return;
                    }
                };
                let mut far = TcpStream::connect(behind).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    port
}

fn ca() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl Secured {
    async fn new(client_certificates: bool) -> Self {
        let mut fixture = Fixture::new().await;
        let files = tempfile::tempdir().unwrap();
        let (own, other) = (ca(), ca());
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &own).unwrap();
        for (name, text) in [
            ("ca.pem", own.pem()),
            ("other.pem", other.pem()),
            ("cert.pem", certificate.pem()),
            ("key.pem", key.serialize_pem()),
        ] {
            write_with_mode(&files.path().join(name), &text, 0o600);
        }
        let mut roots = RootCertStore::empty();
        roots.add(own.der().clone()).unwrap();
        let provider = Arc::new(aws_lc_rs::default_provider());
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match client_certificates {
            true => builder.with_client_cert_verifier(clients.build().unwrap()),
            false => builder.with_no_client_auth(),
        };
        let mut config = builder
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];

        let acceptor = TlsAcceptor::from(Arc::new(config));
        let port = in_front_of(&fixture.endpoint, acceptor.clone()).await;
        fixture.endpoint = format!("https://localhost:{port}");
        Self {
            fixture,
            files,
            acceptor,
        }
    }

    /// Runs walctl. FILES/ in the arguments is the directory of the files.
    async fn walctl(&self, arguments: &str) -> Ran {
        let files = format!("{}/", self.files.path().display());
        let arguments = arguments.replace("FILES/", &files);
        self.fixture.walctl(&arguments, "").await
    }
}

#[tokio::test]
async fn records_are_written_and_read_over_tls() {
    let secured = Secured::new(true).await;
    let tls = "--tls-ca FILES/ca.pem --tls-cert FILES/cert.pem --tls-key FILES/key.pem";
    let ran = secured.walctl(&format!("append log --text x {tls}")).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = secured.walctl(&format!("read log -o raw {tls}")).await;
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (0, "x\n"),
        "{}",
        ran.stderr
    );
}

#[tokio::test]
async fn key_that_every_user_can_use_is_refused() {
    let secured = Secured::new(true).await;
    let key = secured.files.path().join("key.pem");
    std::fs::set_permissions(&key, Permissions::from_mode(0o644)).unwrap();
    let tls = "--tls-ca FILES/ca.pem --tls-cert FILES/cert.pem --tls-key FILES/key.pem";
    let ran = secured.walctl(&format!("append log --text x {tls}")).await;
    let words = format!("mode 0644); run: chmod o-rwx {}", key.display());
    assert!(
        ran.code == 2 && ran.stderr.contains(&words) && ran.stderr.contains("--tls-key"),
        "{} {}",
        ran.code,
        ran.stderr
    );
}

#[tokio::test]
async fn variables_give_what_the_options_give() {
    let secured = Secured::new(true).await;
    let path = |name| secured.files.path().join(name);
    let ran = secured
        .fixture
        .command("append log --text x")
        .env(
            "WALD_ENDPOINT",
            secured.fixture.endpoint.replace("localhost", "127.0.0.1"),
        )
        .env("WALD_TLS_CA", path("ca.pem"))
        .env("WALD_TLS_CERT", path("cert.pem"))
        .env("WALD_TLS_KEY", path("key.pem"))
        .env("WALD_TLS_SERVER_NAME", "localhost")
        .output()
        .await
        .unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(0), "{stderr}");
}

#[tokio::test]
async fn each_failure_of_tls_names_the_next_step() {
    let secured = Secured::new(true).await;
    let mut wrong = Vec::new();
    for (arguments, code, words) in [
        ("--tls-ca FILES/other.pem", 4, "--tls-ca or WALD_TLS_CA"),
        ("", 4, "--tls-ca or WALD_TLS_CA"),
        (
            "--tls-ca FILES/ca.pem --tls-server-name wald.test",
            4,
            "is for localhost, not for wald.test; --tls-server-name",
        ),
        ("--tls-ca FILES/ca.pem", 4, "--tls-cert and --tls-key"),
        ("--tls-ca FILES/none.pem", 2, "none.pem"),
        ("--tls-cert FILES/cert.pem", 2, "--tls-key <FILE>"),
        ("--tls-key FILES/key.pem", 2, "--tls-cert <FILE>"),
        (
            "--tls-ca FILES/ca.pem --endpoint localhost:1",
            2,
            "--endpoint https://HOST:PORT",
        ),
    ] {
        let ran = secured.walctl(&format!("health {arguments}")).await;
        if ran.code != code || !ran.stderr.contains(words) || ran.stderr.lines().count() > 8 {
            wrong.push(format!("{arguments}: {} {}", ran.code, ran.stderr));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn plaintext_to_a_tls_port_is_told_apart_from_a_foreign_server() {
    let mut secured = Secured::new(false).await;
    secured.fixture.endpoint = secured.fixture.endpoint.replace("https", "http");
    let ran = secured.walctl("append log --text x --timeout 500ms").await;
    assert_eq!(ran.code, 4);
    assert!(ran.stderr.contains("begin with https://"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("may or may not"), "{}", ran.stderr);
}

#[tokio::test]
async fn wrong_ca_is_reported_after_a_second_while_walctl_tries_again() {
    let secured = Secured::new(false).await;
    let ran = secured
        .walctl("logs --tls-ca FILES/other.pem --timeout 1500ms")
        .await;
    assert_eq!(ran.code, 4);
    let said = "not from a trusted CA; trying again until --timeout";
    assert!(ran.stderr.contains(said), "{}", ran.stderr);
}

#[tokio::test]
async fn certificate_of_an_owner_must_name_its_host() {
    let secured = Secured::new(true).await;
    let (owner, behind) = secured.fixture.memory.start_beside().await;
    let port = in_front_of(&behind, secured.acceptor.clone()).await;
    let tls = "--tls-ca FILES/ca.pem --tls-cert FILES/cert.pem --tls-key FILES/key.pem";
    let moves_to = |host: &str| {
        *secured.fixture.memory.owner.lock().unwrap() = Some(format!("{host}:{port}"));
    };
    moves_to("localhost");
    let ran = secured.walctl(&format!("append log --text x {tls}")).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    moves_to("127.0.0.1");
    let append = format!("append log --text y {tls} --timeout 1500ms");
    let ran = secured.walctl(&append).await;
    let words = "is for localhost, not for 127.0.0.1";
    assert!(
        ran.code == 4 && ran.stderr.contains(words),
        "{} {}",
        ran.code,
        ran.stderr
    );
    let ran = secured
        .walctl(&format!("{append} --tls-server-name localhost"))
        .await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(owner.payloads("log"), ["x", "y"]);
}
