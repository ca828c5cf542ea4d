//! Principals that a client certificate names, alone and with a token.

use rcgen::{CertificateParams, SanType};
use tonic::metadata::AsciiMetadataValue;
use tonic::{Request, Status};
use wald_proto::v1;
use wald_proto::v1::ops_service_client::OpsServiceClient;

use super::certificates::{Files, Identity, client_params, issue};
use super::client::{channel, grpc};
use crate::support::{Daemon, Told, output, wald};

const RULES: &str = r#"
[principal.writer]
cert = ["spiffe://prod/ns/billing/sa/writer", "dns:Billing.test"]

[principal.batch]
cert = ["spiffe://prod/ns/batch/*"]

[principal.gateway]
cert = ["spiffe://prod/gateway"]
proxy = true

[principal.user]
"#;

struct Setup {
    files: Files,
    daemon: Daemon,
    /// A token for the principal `user`.
    token: String,
}

impl Setup {
    fn new(client_auth: &str) -> Self {
        let files = Files::new();
        files.write("auth.toml", RULES);
        let made = output(
            wald()
                .args(["token", "create", "--principal", "user"])
                .arg(files.argument("auth-file", "auth.toml")),
        );
        let token = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let mut arguments = files.arguments_with_clients(client_auth);
        arguments.push(files.argument("auth-file", "auth.toml"));
        Self {
            daemon: super::start(&arguments),
            files,
            token,
        }
    }

    /// A certificate with these names, none of them by default.
    fn identity(&self, names: &[SanType]) -> Identity {
        let mut params: CertificateParams = client_params("any", 1);
        params.subject_alt_names = names.to_vec();
        issue(&params, &self.files.ca)
    }

    /// The principal that the server sees.
    async fn seen(&self, identity: Option<&Identity>, token: bool) -> Result<String, Status> {
        let config = self.files.client(&["h2"], identity);
        let channel = channel(&grpc(&self.daemon), config).await.unwrap();
        let mut request = Request::new(v1::GetCallerRequest {});
        if token {
            let value: AsciiMetadataValue = format!("Bearer {}", self.token).parse().unwrap();
            request.metadata_mut().insert("authorization", value);
        }
        let answer = OpsServiceClient::new(channel).get_caller(request).await?;
        Ok(answer.into_inner().principal)
    }
}

fn uri(text: &str) -> SanType {
    SanType::URI(text.try_into().unwrap())
}

fn dns(text: &str) -> SanType {
    SanType::DnsName(text.try_into().unwrap())
}

#[tokio::test]
async fn certificate_is_matched_by_its_whole_names_and_by_one_segment() {
    let setup = Setup::new("require");
    for (names, principal) in [
        (vec![uri("spiffe://prod/ns/billing/sa/writer")], "writer"),
        (vec![dns("billing.test")], "writer"),
        (vec![dns("other.test"), dns("BILLING.test")], "writer"),
        (vec![uri("spiffe://prod/ns/batch/night")], "batch"),
        // The URI counts before the DNS name.
        (
            vec![dns("billing.test"), uri("spiffe://prod/ns/batch/night")],
            "writer",
        ),
    ] {
        let identity = setup.identity(&names);
        assert_eq!(
            setup.seen(Some(&identity), false).await.unwrap(),
            principal,
            "{names:?}"
        );
    }
    for names in [
        vec![dns("stranger.test")],
        vec![dns("a.billing.test")],
        vec![uri("spiffe://prod/ns/billing/sa/writer/x")],
        vec![uri("spiffe://prod/ns/billing/sa/writer2")],
        vec![uri("spiffe://prod/ns/batch/")],
        vec![uri("spiffe://prod/ns/batch/a/b")],
        vec![uri("spiffe://prod/ns/batch")],
    ] {
        let identity = setup.identity(&names);
        let refused = setup.seen(Some(&identity), false).await.unwrap_err();
        assert_eq!(Told::of(&refused).reason, "NO_CREDENTIAL", "{names:?}");
    }
}

#[tokio::test]
async fn token_beside_a_certificate_is_of_its_principal_or_passed_on() {
    let setup = Setup::new("optional");
    assert_eq!(setup.seen(None, true).await.unwrap(), "user");
    let writer = setup.identity(&[dns("billing.test")]);
    let refused = setup.seen(Some(&writer), true).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
    let gateway = setup.identity(&[uri("spiffe://prod/gateway")]);
    assert_eq!(setup.seen(Some(&gateway), true).await.unwrap(), "user");
    assert_eq!(setup.seen(Some(&gateway), false).await.unwrap(), "gateway");
    let stranger = setup.identity(&[dns("stranger.test")]);
    let refused = setup.seen(Some(&stranger), true).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
    let refused = setup.seen(None, false).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "NO_CREDENTIAL");
}
