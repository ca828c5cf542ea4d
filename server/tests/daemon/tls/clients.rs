//! Certificates of clients.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rcgen::{
    CertificateParams, CrlDistributionPoint, ExtendedKeyUsagePurpose, KeyUsagePurpose,
    date_time_ymd,
};
use rustls::HandshakeKind;
use rustls::version::{TLS12, TLS13};

use super::certificates::{
    Ca, Files, Identity, ca, client_params, crl, crl_at, intermediate, issue,
};
use super::client::{connect, grpc, settings, wal};
use super::{Daemon, start};
use crate::support::append;

const REVOKED: u64 = 7;

/// Whether a client with this certificate is served.
async fn is_served(daemon: &Daemon, config: rustls::ClientConfig) -> bool {
    match connect(&grpc(daemon), config).await {
        Ok(mut stream) => settings(&mut stream).await.is_ok(),
        Err(_) => false,
    }
}

fn with(change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = client_params("billing", 1);
    change(&mut params);
    params
}

/// Each client certificate, and whether it is served.
fn identities(files: &Files) -> Vec<(&'static str, Option<Identity>, bool)> {
    let own = |params: &CertificateParams| Some(issue(params, &files.ca));
    let good = client_params("billing", 1);
    let middle = intermediate("Wald test intermediate", &files.ca);
    let mut by_intermediate = issue(&good, &middle);
    by_intermediate.chain.push_str(&middle.pem());
    let key = rcgen::KeyPair::generate().unwrap();
    let self_signed = Identity {
        chain: good.self_signed(&key).unwrap().pem(),
        key: key.serialize_pem(),
    };
    let stranger = ca("Another CA");
    vec![
        ("none", None, false),
        ("self-signed", Some(self_signed), false),
        ("other CA", Some(issue(&good, &stranger)), false),
        (
            "expired",
            own(&with(|params| params.not_after = date_time_ymd(2021, 1, 1))),
            false,
        ),
        (
            "not yet valid",
            own(&with(|params| {
                params.not_before = date_time_ymd(2044, 1, 1)
            })),
            false,
        ),
        (
            "for servers",
            own(&with(|params| {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            })),
            false,
        ),
        (
            "key usage",
            own(&with(|params| {
                params.key_usages = vec![KeyUsagePurpose::KeyEncipherment];
            })),
            false,
        ),
        ("revoked", own(&client_params("billing", REVOKED)), false),
        (
            "common name only",
            own(&with(|params| params.subject_alt_names.clear())),
            false,
        ),
        ("good", own(&good), true),
        (
            "without usages",
            own(&with(|params| {
                params.key_usages.clear();
                params.extended_key_usages.clear();
            })),
            true,
        ),
        ("good by an intermediate", Some(by_intermediate), true),
    ]
}

#[tokio::test]
async fn only_good_certificates_are_served_where_one_is_required() {
    let files = Files::new();
    files.write("crl.pem", &crl(&files.ca, &[REVOKED]));
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    let daemon = start(&arguments);
    let identities = identities(&files);
    for version in [&TLS12, &TLS13] {
        for (name, identity, served) in &identities {
            let config = files.client_with(version, &["h2"], identity.as_ref());
            let is_served = is_served(&daemon, config).await;
            assert_eq!(is_served, *served, "{name} by {version:?}");
        }
    }
    let refused = 2 * identities.iter().filter(|(_, _, served)| !served).count();
    let metric = "wald_tls_handshakes_total{result=\"client_certificate\"}";
    let counted = daemon.metric(metric);
    assert_eq!(counted, f64::from(u32::try_from(refused).unwrap()));
}

/// A daemon that requires certificates and has these revocation lists.
fn start_with_lists(files: &Files, lists: &str) -> Daemon {
    files.write("crl.pem", lists);
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("tls-client-crl", "crl.pem"));
    start(&arguments)
}

/// Whether the client of this CA with this serial number is served.
async fn serves(daemon: &Daemon, files: &Files, issuer: &Ca, serial: u64) -> bool {
    let identity = issue(&client_params("billing", serial), issuer);
    is_served(daemon, files.client(&["h2"], Some(&identity))).await
}

/// A job that appends the newest list to the file.
#[tokio::test]
async fn certificate_in_the_second_list_of_its_ca_is_revoked() {
    let files = Files::new();
    let lists = crl(&files.ca, &[8]) + &crl(&files.ca, &[REVOKED]);
    let daemon = start_with_lists(&files, &lists);
    for (serial, is_good) in [(REVOKED, false), (8, false), (9, true)] {
        let is_served = serves(&daemon, &files, &files.ca, serial).await;
        assert_eq!(is_served, is_good, "{serial}");
    }
}

/// A CA that was made again with a new key.
#[tokio::test]
async fn two_cas_of_one_name_have_a_list_each_in_any_order() {
    let files = Files::new();
    let (old, new) = (ca("Clients"), ca("Clients"));
    files.write("ca.pem", &(old.pem() + &new.pem()));
    let lists = [crl(&old, &[REVOKED]), crl(&new, &[8])];
    for file in [
        lists.concat(),
        lists[1].clone() + &lists[0],
        lists[0].clone(),
    ] {
        let daemon = start_with_lists(&files, &file);
        for issuer in [&old, &new] {
            assert!(serves(&daemon, &files, issuer, 9).await);
        }
        assert!(!serves(&daemon, &files, &old, REVOKED).await);
    }
}

#[tokio::test]
async fn list_for_a_distribution_point_counts_for_its_whole_ca() {
    let files = Files::new();
    let lists = crl_at(&files.ca, &[REVOKED], "http://pki.test/a.crl");
    let daemon = start_with_lists(&files, &lists);
    let mut params = client_params("billing", REVOKED);
    params.crl_distribution_points = vec![CrlDistributionPoint {
        uris: vec!["http://pki.test/b.crl".to_owned()],
    }];
    let identity = issue(&params, &files.ca);
    assert!(!is_served(&daemon, files.client(&["h2"], Some(&identity))).await);
    assert!(serves(&daemon, &files, &files.ca, 8).await);
}

#[tokio::test]
async fn list_of_an_intermediate_revokes_its_certificates() {
    let files = Files::new();
    let middle = intermediate("Wald test intermediate", &files.ca);
    let daemon = start_with_lists(&files, &crl(&middle, &[REVOKED]));
    for (serial, is_good) in [(REVOKED, false), (8, true)] {
        let mut identity = issue(&client_params("billing", serial), &middle);
        identity.chain.push_str(&middle.pem());
        let is_served = is_served(&daemon, files.client(&["h2"], Some(&identity))).await;
        assert_eq!(is_served, is_good, "{serial}");
    }
}

#[tokio::test]
async fn refused_certificates_are_in_the_audit_log_at_a_bounded_rate() {
    const ATTEMPTS: usize = 30;
    let files = Files::new();
    let mut arguments = files.arguments_with_clients("require");
    arguments.push(files.argument("audit-log", "audit.log"));
    let daemon = start(&arguments);
    let foreign = issue(&client_params("billing", 1), &ca("another CA"));
    for number in 0..ATTEMPTS {
        let identity = (number > 0).then_some(&foreign);
        assert!(!is_served(&daemon, files.client(&["h2"], identity)).await);
    }
    let lines = || -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(files.path("audit.log")).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let lines = whole
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        lines.collect()
    };
    let of = |event: &str| {
        let lines = lines().into_iter();
        lines
            .filter(|line| line["event"] == event)
            .collect::<Vec<_>>()
    };
    // Each attempt has a line of its own or is counted.
    let counted = || {
        of("refusals")
            .iter()
            .filter_map(|line| line["count"].as_u64())
            .sum::<u64>()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while of("handshake").len() + usize::try_from(counted()).unwrap() < ATTEMPTS {
        assert!(std::time::Instant::now() < deadline, "{:?}", lines());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let refused = of("handshake");
    let one = |credential: &str| {
        let line = refused.iter().find(|line| line["credential"] == credential);
        line.unwrap_or_else(|| panic!("{refused:?}")).clone()
    };
    assert_eq!(one("none")["outcome"], "unauthenticated");
    let line = one("certificate");
    assert!(
        line["reason"].as_str().unwrap().contains("UnknownIssuer"),
        "{line}"
    );
    assert!(
        line["peer"].as_str().unwrap().starts_with("127.0.0.1:"),
        "{line}"
    );
}

#[tokio::test]
async fn optional_certificate_may_be_absent_but_not_wrong() {
    let files = Files::new();
    let daemon = start(&files.arguments_with_clients("optional"));
    for (name, identity, served) in identities(&files) {
        // This daemon has no revocation list.
        let served = served || name == "none" || name == "revoked";
        let config = files.client(&["h2"], identity.as_ref());
        assert_eq!(is_served(&daemon, config).await, served, "{name}");
    }
}

#[tokio::test]
async fn certificate_of_a_resumed_session_is_verified_again() {
    let files = Files::new();
    let daemon = start(&files.arguments_with_clients("require"));
    let mut params = client_params("billing", 1);
    let expires = SystemTime::now() + Duration::from_secs(4);
    params.not_after = expires.into();
    let identity = issue(&params, &files.ca);
    let address = grpc(&daemon);
    for version in [&TLS12, &TLS13] {
        let config = Arc::new(files.client_with(version, &["h2"], Some(&identity)));
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut resumed = 0;
        // Sessions resume until the certificate expires. Then this client has the next ticket of a good session.
        loop {
            assert!(
                Instant::now() < deadline,
                "an expired certificate is served"
            );
            let Ok(mut stream) = connect(&address, Arc::clone(&config)).await else {
                break;
            };
            let kind = stream.get_ref().1.handshake_kind();
            if settings(&mut stream).await.is_err() {
                break;
            }
            resumed += usize::from(kind == Some(HandshakeKind::Resumed));
        }
        if version.version == rustls::ProtocolVersion::TLSv1_2 {
            assert!(resumed > 0, "no session was resumed");
            assert!(SystemTime::now() >= expires);
        }
    }
    let metric = "wald_tls_handshakes_total{result=\"client_certificate\"}";
    assert!(daemon.metric(metric) >= 2.0);
}

#[tokio::test]
async fn client_with_a_certificate_appends() {
    let files = Files::new();
    let daemon = start(&files.arguments_with_clients("require"));
    let identity = issue(&client_params("billing", 1), &files.ca);
    let mut wal = wal(&grpc(&daemon), files.client(&["h2"], Some(&identity))).await;
    wal.append(append("a", "by billing")).await.unwrap();
}
