//! Connections of a stand-by to the owner: TLS in both directions, and the rights of callers beside the rights of the nodes.

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose};
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use wald_proto::v1::log_service_client::LogServiceClient;
use wald_proto::v1::ops_service_client::OpsServiceClient;

use super::certificates::{Ca, Files, Identity, ca, client_params, issue};
use super::client::{channel, grpc};
use super::forward::{assert_moved, named};
use super::stand_by::owner;
use super::*;

/// The principal of the nodes has rights that a forwarded call must never get.
const RULES: &str = r#"
[principal.nodes]
cert = ["dns:node.test"]
proxy = true
allow = [{ do = ["append", "create", "read", "trim"], logs = "" }]

[principal.writer]
cert = ["dns:writer.test"]
allow = [{ do = ["append", "create", "read"], logs = "own/" }]

[principal.reader]
allow = [{ do = ["read", "list"], logs = "" }]
"#;

/// The names in the certificate of a node.
const NODE_NAMES: [&str; 3] = ["127.0.0.1", "localhost", "node.test"];

/// A certificate of a node for both ends of a connection.
fn node_certificate(names: &[&str], issuer: &Ca) -> Identity {
    let mut params = client_params("node", 7);
    let names = names
        .iter()
        .map(|&name| name.to_owned())
        .collect::<Vec<_>>();
    params.subject_alt_names = CertificateParams::new(names).unwrap().subject_alt_names;
    params
        .extended_key_usages
        .push(ExtendedKeyUsagePurpose::ServerAuth);
    issue(&params, issuer)
}

/// The bucket and the files of nodes with TLS.
struct Setup {
    store: Store,
    files: Files,
}

/// A node, and its directory.
type TlsNode = (Daemon, tempfile::TempDir);

impl Setup {
    fn new() -> Self {
        let files = Files::new();
        files.write_server(&node_certificate(&NODE_NAMES, &files.ca));
        files.write("auth.toml", RULES);
        Self {
            store: Store::start(),
            files,
        }
    }

    fn node(&self, name: &str, more: &[String]) -> TlsNode {
        let directory = private_directory();
        let own = ["--stand-by", "--lease-ttl", "2s"];
        let more = more.iter().map(String::as_str);
        let arguments: Vec<&str> = own.into_iter().chain(more).collect();
        let daemon = start(&self.store, directory.path(), name, &arguments);
        (daemon, directory)
    }

    /// Arguments for TLS in both directions.
    fn tls(&self, client_auth: &str) -> Vec<String> {
        let mut arguments = self.files.arguments_with_clients(client_auth);
        arguments.push(self.files.argument("peer-ca", "ca.pem"));
        arguments
    }

    /// Arguments for TLS and rights.
    fn rights(&self) -> Vec<String> {
        let mut arguments = self.tls("optional");
        arguments.push(self.files.argument("auth-file", "auth.toml"));
        arguments.push("--metrics-open".to_owned());
        arguments
    }

    fn token(&self, principal: &str) -> String {
        let made = ends(
            wald()
                .args(["token", "create", "--principal", principal])
                .arg(self.files.argument("auth-file", "auth.toml")),
        );
        assert!(made.status.success(), "{made:?}");
        String::from_utf8(made.stdout).unwrap().trim().to_owned()
    }

    /// A connection over TLS, with a certificate if there is one.
    async fn channel(&self, node: &Daemon, identity: Option<&Identity>) -> Channel {
        let config = self.files.client(&["h2"], identity);
        channel(&grpc(node), config).await.unwrap()
    }
}

/// One call with metadata.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Append(&'static str),
    Read(&'static str),
    Trim(&'static str),
    List,
    Caller,
}

const ALL: [Asked; 8] = [
    Asked::Append("own/a"),
    Asked::Append("other/a"),
    Asked::Read("own/a"),
    Asked::Read("other/a"),
    Asked::Trim("own/a"),
    Asked::Trim("other/a"),
    Asked::List,
    Asked::Caller,
];

/// The result of a call: the caller as the node sees it, if asked for, or the refusal.
type Outcome = Result<Option<v1::GetCallerResponse>, Status>;

impl Asked {
    async fn of(self, channel: &Channel, metadata: &[(&str, &str)]) -> Outcome {
        fn with<T>(message: T, metadata: &[(&str, &str)]) -> Request<T> {
            let mut request = Request::new(message);
            for (key, value) in metadata {
                let key: AsciiMetadataKey = key.parse().unwrap();
                let value: AsciiMetadataValue = value.parse().unwrap();
                request.metadata_mut().insert(key, value);
            }
            request
        }
        let mut wal = WalServiceClient::new(channel.clone());
        match self {
            Self::Append(log) => {
                let append = with(append(log, "x"), metadata);
                wal.append(append).await.map(|_| None)
            }
            Self::Read(log) => {
                let read = v1::ReadRequest {
                    log: log.to_owned(),
                    ..v1::ReadRequest::default()
                };
                wal.read(with(read, metadata)).await.map(|_| None)
            }
            Self::Trim(log) => {
                let trim = v1::TrimRequest {
                    log: log.to_owned(),
                    ..v1::TrimRequest::default()
                };
                wal.trim(with(trim, metadata)).await.map(|_| None)
            }
            Self::List => {
                let list = with(v1::ListLogsRequest::default(), metadata);
                let mut logs = LogServiceClient::new(channel.clone());
                logs.list_logs(list).await.map(|_| None)
            }
            Self::Caller => {
                let asked = with(v1::GetCallerRequest {}, metadata);
                let mut ops = OpsServiceClient::new(channel.clone());
                let caller = ops.get_caller(asked).await?;
                Ok(Some(caller.into_inner()))
            }
        }
    }
}

/// Code and reason of a refusal; the caller that the node has seen, otherwise.
fn shown(outcome: &Outcome) -> (Code, String) {
    match outcome {
        Ok(caller) => (Code::Ok, format!("{caller:?}")),
        Err(status) => (status.code(), Told::of(status).reason),
    }
}

#[tokio::test]
async fn token_has_the_same_rights_through_a_stand_by_with_tls() {
    let setup = Setup::new();
    let tokens = ["writer", "reader", "nodes"].map(|name| setup.token(name));
    let (one, _one) = setup.node("one", &setup.rights());
    let (two, _two) = setup.node("two", &setup.rights());
    let direct = setup.channel(&one, None).await;
    let through = setup.channel(&two, None).await;
    // The log that only the nodes may make.
    let bearers = tokens.each_ref().map(|token| format!("Bearer {token}"));
    let of_nodes = [("authorization", &*bearers[2])];
    Asked::Append("other/a")
        .of(&direct, &of_nodes)
        .await
        .unwrap();
    let mut allowed = Vec::new();
    for bearer in [&*bearers[0], &bearers[1], "Bearer wald1_wrong", ""] {
        let metadata = [("authorization", bearer)];
        let metadata = if bearer.is_empty() {
            &[][..]
        } else {
            &metadata
        };
        let mut count = 0;
        for asked in ALL {
            let here = shown(&asked.of(&direct, metadata).await);
            let there = shown(&asked.of(&through, metadata).await);
            assert_eq!(here, there, "{asked:?} with {bearer}");
            count += usize::from(here.0 == Code::Ok);
        }
        allowed.push(count);
    }
    // Append and read of one log, the list and the caller; read of both logs, the list and the caller.
    assert_eq!(allowed, [4, 4, 0, 0]);
    let answered = r#"wald_forwarded_total{method="Append",result="answered"}"#;
    assert_eq!(two.metric(answered), 4.0);
}

#[tokio::test]
async fn certificate_of_a_caller_never_gets_the_rights_of_the_node() {
    let setup = Setup::new();
    let token = format!("Bearer {}", setup.token("writer"));
    let (one, _one) = setup.node("one", &setup.rights());
    let (two, _two) = setup.node("two", &setup.rights());
    // This one forwards calls of strangers, because it lacks the rules.
    let (blind, _blind) = setup.node("blind", &setup.tls("optional"));
    let term = owner(&setup.store)["term"].to_string();
    let writer = issue(&client_params("writer", 1), &setup.files.ca);
    let nobody = issue(&client_params("nobody", 2), &setup.files.ca);
    let direct = setup.channel(&one, Some(&writer)).await;
    Asked::Append("own/a").of(&direct, &[]).await.unwrap();
    let refused = Asked::Append("other/a").of(&direct, &[]).await;
    assert_eq!(shown(&refused).1, "NOT_ALLOWED");

    // The owner would see the certificate of the node, so the caller is sent there itself.
    let through = setup.channel(&two, Some(&writer)).await;
    for asked in [
        Asked::Append("own/a"),
        Asked::Append("other/a"),
        Asked::Trim("own/a"),
    ] {
        let refused = asked.of(&through, &[]).await.unwrap_err();
        assert_moved(&refused, &grpc(&one), &term);
    }
    let caller = Asked::Caller.of(&through, &[]).await.unwrap();
    assert_eq!(caller.unwrap().principal, "writer");
    let unknown = setup.channel(&two, Some(&nobody)).await;
    let refused = Asked::Append("own/a").of(&unknown, &[]).await;
    assert_eq!(
        shown(&refused),
        (Code::Unauthenticated, "NO_CREDENTIAL".into())
    );

    for identity in [None, Some(&writer), Some(&nobody)] {
        let through = setup.channel(&blind, identity).await;
        for asked in ALL {
            let refused = asked.of(&through, &[]).await;
            assert_eq!(
                shown(&refused),
                (Code::Unauthenticated, "NO_CREDENTIAL".into()),
                "{asked:?}"
            );
            assert!(refused.unwrap_err().message().contains("stand-by"));
        }
        // A token still counts.
        let metadata = [("authorization", &*token)];
        let caller = Asked::Caller.of(&through, &metadata).await.unwrap();
        assert_eq!(caller.unwrap().principal, "writer");
    }
}

#[tokio::test]
async fn metadata_of_a_forwarded_call_gives_a_caller_nothing() {
    let setup = Setup::new();
    let reader = format!("Bearer {}", setup.token("reader"));
    let (one, _one) = setup.node("one", &setup.rights());
    let (two, _two) = setup.node("two", &setup.rights());
    let term = owner(&setup.store)["term"].to_string();
    let forged = [
        ("wald-forwarded", &*term),
        ("wald-owner", "127.0.0.1:1"),
        ("wald-principal", "nodes"),
        ("wald-caller", "nodes"),
        ("x-forwarded-client-cert", "DNS=node.test"),
    ];
    let of_reader = [&forged[..], &[("authorization", &reader)]].concat();
    let direct = setup.channel(&one, None).await;
    let writer = issue(&client_params("writer", 1), &setup.files.ca);
    let certified = setup.channel(&one, Some(&writer)).await;
    let through = setup.channel(&two, None).await;
    for asked in ALL {
        for (channel, why) in [
            (&direct, "nobody"),
            (&certified, "a caller by certificate"),
            (&through, "through"),
        ] {
            let refused = asked.of(channel, &forged).await;
            let expected = (Code::Unauthenticated, "NO_CREDENTIAL".into());
            assert_eq!(shown(&refused), expected, "{asked:?}, {why}");
        }
        // The token of the reader has its own rights.
        let honest = asked.of(&direct, &[("authorization", &reader)]).await;
        let forged = asked.of(&direct, &of_reader).await;
        assert_eq!(shown(&honest), shown(&forged), "{asked:?}");
    }
    let refused = Asked::Append("own/a").of(&through, &of_reader).await;
    assert_moved(&refused.unwrap_err(), &grpc(&one), &term);
    // The certificate of the writer alone is as good as before.
    Asked::Append("own/a").of(&certified, &[]).await.unwrap();
}

/// A call through a stand-by that the owner does not let in, or that does not trust the owner.
async fn assert_sent_away(channel: Channel, two: &Daemon, one: &Daemon, why: &[&str]) {
    for _ in 0..2 {
        let refused = Asked::Append("a").of(&channel, &[]).await.unwrap_err();
        assert_moved(&refused, &grpc(one), "1");
        assert_eq!(Told::of(&refused).fact("outcome"), "NOT_APPLIED");
        assert!(refused.message().contains("cannot reach it"), "{refused:?}");
        assert_eq!(named(refused.metadata()), "");
    }
    let line = two.wait_for_log("cannot connect to the owner of the store");
    assert!(why.iter().any(|why| line.contains(why)), "{line}");
    let unreachable = r#"wald_forwarded_total{method="Append",result="unreachable"}"#;
    assert_eq!(two.metric(unreachable), 2.0);
}

#[tokio::test]
async fn nodes_that_do_not_trust_each_other_send_the_caller_to_the_owner() {
    let setup = Setup::new();
    let (files, other) = (&setup.files, ca("Another CA"));
    let (one, _one) = setup.node("one", &setup.tls("require"));
    files.write("other.pem", &other.pem());
    let stranger = node_certificate(&NODE_NAMES, &other);
    files.write("stranger.pem", &stranger.chain);
    files.write("stranger.key", &stranger.key);
    let client = issue(&client_params("client", 3), &files.ca);

    // It does not trust the CA of the owner.
    let mut doubts = setup.tls("require");
    doubts.push(files.argument("peer-ca", "other.pem"));
    doubts.remove(4);
    let (two, _two) = setup.node("doubts", &doubts);
    let through = setup.channel(&two, Some(&client)).await;
    assert_sent_away(through, &two, &one, &["UnknownIssuer"]).await;

    // The owner does not trust its CA. With TLS 1.3 the owner says so only after the handshake.
    let strange = [
        files.argument("tls-cert", "stranger.pem"),
        files.argument("tls-key", "stranger.key"),
        files.argument("peer-ca", "ca.pem"),
    ];
    let (two, _two) = setup.node("stranger", &strange);
    let mut trusting = rustls::RootCertStore::empty();
    trusting.add(other.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(trusting)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let through = channel(&grpc(&two), config).await.unwrap();
    assert_sent_away(through, &two, &one, &["UnknownCA", "DecryptError"]).await;

    // It has no TLS.
    let (two, _two) = setup.node("plain", &[]);
    let through = two.channel().await;
    assert_sent_away(through, &two, &one, &["does not answer in plaintext"]).await;
}

#[tokio::test]
async fn owner_without_tls_or_under_another_name_gets_no_call_over_tls() {
    let setup = Setup::new();
    let (one, _one) = setup.node("one", &[]);
    let (two, _two) = setup.node("two", &setup.tls("optional"));
    let through = setup.channel(&two, None).await;
    assert_sent_away(through, &two, &one, &["TLS:"]).await;

    // The certificate of the owner has another host than its address.
    let setup = Setup::new();
    let elsewhere = node_certificate(&["node.test", "localhost"], &setup.files.ca);
    setup.files.write_server(&elsewhere);
    let (one, _one) = setup.node("one", &setup.tls("optional"));
    let (two, _two) = setup.node("two", &setup.tls("optional"));
    let through = setup.channel(&two, None).await;
    assert_sent_away(
        through,
        &two,
        &one,
        &["NotValidForName", "not valid for name"],
    )
    .await;
}
