//! Certificates of a test, in a directory that goes away with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    CrlDistributionPoint, CrlIssuingDistributionPoint, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::os::unix::fs::PermissionsExt as _;
use tempfile::TempDir;

/// A certificate authority.
pub(crate) type Ca = CertifiedIssuer<'static, KeyPair>;

/// A chain, its own certificate first, with its key; both in PEM.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) chain: String,
    pub(crate) key: String,
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2045, 1, 1);
    params
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// A root of its own.
pub(crate) fn ca(name: &str) -> Ca {
    Ca::self_signed(ca_params(name), KeyPair::generate().unwrap()).unwrap()
}

/// A root whose time is over.
pub(crate) fn expired_ca(name: &str) -> Ca {
    let mut params = ca_params(name);
    params.not_after = date_time_ymd(2021, 1, 1);
    Ca::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A CA below another one.
pub(crate) fn intermediate(name: &str, issuer: &Ca) -> Ca {
    Ca::signed_by(ca_params(name), KeyPair::generate().unwrap(), issuer).unwrap()
}

/// The parameters of a good client certificate.
pub(crate) fn client_params(name: &str, serial: u64) -> CertificateParams {
    let mut params = named(name);
    params.subject_alt_names = CertificateParams::new(vec![format!("{name}.test")])
        .unwrap()
        .subject_alt_names;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.serial_number = Some(SerialNumber::from(serial));
    params
}

/// Issues a certificate.
pub(crate) fn issue(params: &CertificateParams, issuer: &Issuer<'_, KeyPair>) -> Identity {
    let key = KeyPair::generate().unwrap();
    Identity {
        chain: params.signed_by(&key, issuer).unwrap().pem(),
        key: key.serialize_pem(),
    }
}

/// A certificate of the server, for localhost, that expires at the start of that year.
pub(crate) fn server_until(issuer: &Ca, year: i32) -> Identity {
    let mut params = named("wald");
    params.not_after = date_time_ymd(year, 1, 1);
    params.subject_alt_names = CertificateParams::new(vec!["localhost".to_owned()])
        .unwrap()
        .subject_alt_names;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    issue(&params, issuer)
}

/// A list that revokes certificates with these serial numbers.
pub(crate) fn crl(issuer: &Ca, revoked: &[u64]) -> String {
    crl_until(issuer, revoked, 2045)
}

/// A list that should have been replaced at the begin of this year.
pub(crate) fn crl_until(issuer: &Ca, revoked: &[u64], year: i32) -> String {
    crl_params(revoked, year)
        .signed_by(issuer)
        .unwrap()
        .pem()
        .unwrap()
}

/// A list for the certificates that name this URI.
pub(crate) fn crl_at(issuer: &Ca, revoked: &[u64], uri: &str) -> String {
    CertificateRevocationListParams {
        issuing_distribution_point: Some(CrlIssuingDistributionPoint {
            distribution_point: CrlDistributionPoint {
                uris: vec![uri.to_owned()],
            },
            scope: None,
        }),
        ..crl_params(revoked, 2045)
    }
    .signed_by(issuer)
    .unwrap()
    .pem()
    .unwrap()
}

fn crl_params(revoked: &[u64], year: i32) -> CertificateRevocationListParams {
    CertificateRevocationListParams {
        this_update: date_time_ymd(2020, 1, 1),
        next_update: date_time_ymd(year, 1, 1),
        crl_number: SerialNumber::from(revoked.len() as u64 + 1),
        issuing_distribution_point: None,
        revoked_certs: revoked
            .iter()
            .map(|serial| RevokedCertParams {
                serial_number: SerialNumber::from(*serial),
                revocation_time: date_time_ymd(2020, 1, 1),
                reason_code: None,
                invalidity_date: None,
            })
            .collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    }
}

/// The files of a daemon.
pub(crate) struct Files {
    directory: TempDir,
    pub(crate) ca: Ca,
}

impl Files {
    /// A CA, and a certificate of the server from it.
    pub(crate) fn new() -> Self {
        let files = Self {
            directory: tempfile::tempdir().unwrap(),
            ca: ca("Wald test CA"),
        };
        files.write_server(&server_until(&files.ca, 2045));
        files.write("ca.pem", &files.ca.pem());
        files
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Replaces a file as a whole. Only the owner can read it.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let new = self.path("new");
        std::fs::write(&new, text).unwrap();
        set_mode(&new, 0o600);
        std::fs::rename(&new, self.path(name)).unwrap();
    }

    pub(crate) fn write_server(&self, identity: &Identity) {
        self.write("server.pem", &identity.chain);
        self.write("server.key", &identity.key);
    }

    /// Arguments of a daemon with TLS on the gRPC port.
    pub(crate) fn arguments(&self) -> Vec<String> {
        vec![
            self.argument("tls-cert", "server.pem"),
            self.argument("tls-key", "server.key"),
        ]
    }

    /// The arguments of a daemon that also verifies clients.
    pub(crate) fn arguments_with_clients(&self, client_auth: &str) -> Vec<String> {
        let mut arguments = self.arguments();
        arguments.push(self.argument("tls-client-ca", "ca.pem"));
        arguments.push(format!("--tls-client-auth={client_auth}"));
        arguments
    }

    pub(crate) fn argument(&self, setting: &str, name: &str) -> String {
        format!("--{setting}={}", self.path(name).display())
    }

    /// Settings of a client that trusts the CA and offers the protocols by ALPN.
    pub(crate) fn client(&self, alpn: &[&str], identity: Option<&Identity>) -> ClientConfig {
        self.client_with(&rustls::version::TLS13, alpn, identity)
    }

    pub(crate) fn client_with(
        &self,
        version: &'static rustls::SupportedProtocolVersion,
        alpn: &[&str],
        identity: Option<&Identity>,
    ) -> ClientConfig {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.ca.der().clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => builder
                .with_client_auth_cert(
                    CertificateDer::pem_slice_iter(identity.chain.as_bytes())
                        .collect::<Result<_, _>>()
                        .unwrap(),
                    PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap(),
                )
                .unwrap(),
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }
}

pub(crate) fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}
