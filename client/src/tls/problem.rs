//! Reasons why there is no TLS connection, each as one sentence.

use std::io;

use rustls::pki_types::{ServerName, UnixTime};
use rustls::{AlertDescription, CertificateError};

/// Reason why there is no TLS connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TlsFailure {
    /// A file or another setting of the client cannot be used.
    Settings,
    /// The server's certificate is from a CA that the client does not trust.
    UnknownCa,
    /// The server's certificate is for other names.
    WrongName,
    /// The server's certificate is expired, or not valid yet.
    Expired,
    /// The server's certificate is refused for another reason.
    Certificate,
    /// The endpoint begins with `https://`, and the server does not speak TLS.
    ServerWithoutTls,
    /// The endpoint begins with `http://`, and the server speaks TLS.
    ServerWithTls,
    /// The server requires a certificate of the client, which sent none.
    ClientCertificateRequired,
    /// The server refused the certificate of the client.
    ClientCertificateRefused,
    /// The handshake failed for another reason.
    Handshake,
}

/// A failure and its sentence.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{detail}")]
pub(crate) struct TlsProblem {
    pub(crate) failure: TlsFailure,
    pub(crate) detail: String,
}

impl TlsProblem {
    pub(crate) fn new(failure: TlsFailure, detail: impl Into<String>) -> Self {
        Self {
            failure,
            detail: detail.into(),
        }
    }

    /// The server answered a connection in plaintext with a record of TLS.
    pub(crate) fn server_with_tls() -> Self {
        Self::new(
            TlsFailure::ServerWithTls,
            "the server speaks TLS; the endpoint must begin with https://",
        )
    }

    /// Reads the failure of a handshake with the server of this name.
    pub(crate) fn of_handshake(error: &io::Error, name: &ServerName<'_>) -> Self {
        let Some(error) = rustls_error(error) else {
            return match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Self::new(
                    TlsFailure::Handshake,
                    "the server closed the connection during the handshake; if it does not speak TLS, the endpoint \
                     must begin with http://",
                ),
                _ => Self::new(
                    TlsFailure::Handshake,
                    format!("the handshake failed: {error}"),
                ),
            };
        };
        match error {
            rustls::Error::InvalidCertificate(error) => Self::of_certificate(error, name),
            rustls::Error::InvalidMessage(_) => Self::new(
                TlsFailure::ServerWithoutTls,
                "the server does not speak TLS; without TLS the endpoint must begin with http://",
            ),
            rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)
            | rustls::Error::NoApplicationProtocol => Self::no_http2(),
            error => Self::of_alert(error).unwrap_or_else(|| {
                Self::new(
                    TlsFailure::Handshake,
                    format!("the handshake failed: {error}"),
                )
            }),
        }
    }

    /// The server did not agree on HTTP/2.
    pub(crate) fn no_http2() -> Self {
        Self::new(
            TlsFailure::Handshake,
            "the server does not offer HTTP/2 on this port (ALPN h2), which gRPC needs",
        )
    }

    /// Reads the answer of a server that verified the client after the handshake, as TLS 1.3 does. `None`: the error
    /// is not about the client's certificate.
    pub(crate) fn after_handshake(error: &io::Error) -> Option<Self> {
        Self::of_alert(rustls_error(error)?)
    }

    fn of_alert(error: &rustls::Error) -> Option<Self> {
        use AlertDescription as Alert;
        let rustls::Error::AlertReceived(alert) = error else {
            return None;
        };
        let why = match alert {
            Alert::CertificateRequired => {
                return Some(Self::new(
                    TlsFailure::ClientCertificateRequired,
                    "the server requires a client certificate, and none was sent",
                ));
            }
            Alert::CertificateExpired => "it is expired or not valid yet",
            Alert::CertificateRevoked => "it is revoked",
            Alert::UnknownCA => "the server does not trust its CA",
            Alert::UnsupportedCertificate => "it is not for clients",
            Alert::BadCertificate | Alert::CertificateUnknown | Alert::AccessDenied => {
                "the server's log has the reason"
            }
            _ => return None,
        };
        Some(Self::new(
            TlsFailure::ClientCertificateRefused,
            format!("the server refused the client certificate: {why}"),
        ))
    }

    fn of_certificate(error: &CertificateError, name: &ServerName<'_>) -> Self {
        let (failure, detail) = match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => (
                TlsFailure::UnknownCa,
                "the server's certificate is not from a trusted CA".to_owned(),
            ),
            CertificateError::NotValidForNameContext { presented, .. } => (
                TlsFailure::WrongName,
                format!(
                    "the server's certificate is for {}, not for {}",
                    listed(presented),
                    name.to_str()
                ),
            ),
            CertificateError::NotValidForName => (
                TlsFailure::WrongName,
                format!("the server's certificate is not for {}", name.to_str()),
            ),
            CertificateError::ExpiredContext { not_after, .. } => (
                TlsFailure::Expired,
                format!("the server's certificate expired on {}", day(*not_after)),
            ),
            CertificateError::NotValidYetContext { not_before, .. } => (
                TlsFailure::Expired,
                format!(
                    "the server's certificate is not valid before {}",
                    day(*not_before)
                ),
            ),
            CertificateError::Expired | CertificateError::NotValidYet => (
                TlsFailure::Expired,
                "the server's certificate is expired or not valid yet".to_owned(),
            ),
            // webpki has no other sign of it.
            CertificateError::Other(error) if error.to_string() == "CaUsedAsEndEntity" => (
                TlsFailure::Certificate,
                "the server's certificate is that of a CA, as `openssl req -x509` makes it; the server needs one that \
                 a CA has issued, with CA:FALSE"
                    .to_owned(),
            ),
            error => (
                TlsFailure::Certificate,
                format!("the server's certificate is refused: {error}"),
            ),
        };
        Self::new(failure, detail)
    }
}

fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// The names of a certificate. rustls gives each with its kind, such as `DnsName("localhost")`.
fn listed(presented: &[String]) -> String {
    let bare = |name: &String| {
        let inner = name
            .split_once('(')
            .map_or(name.as_str(), |(_, inner)| inner);
        inner
            .trim_end_matches(')')
            .trim_matches('"')
            .escape_debug()
            .to_string()
    };
    match presented {
        [] => "no name at all".to_owned(),
        names => names.iter().map(bare).collect::<Vec<_>>().join(", "),
    }
}

/// The day of a time in UTC, such as 2026-01-31.
fn day(time: UnixTime) -> String {
    // Days since 0000-03-01, so that a leap day ends its year (Howard Hinnant, "chrono-compatible low-level date
    // algorithms", civil_from_days).
    let days = time.as_secs() / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn day_of_a_time_is_that_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_609_459_199, "2020-12-31"),
            (1_609_459_200, "2021-01-01"),
        ] {
            let time = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
            assert_eq!(day(time), expected);
        }
    }

    #[test]
    fn names_of_a_certificate_are_listed_without_their_kinds() {
        let names = [
            "DnsName(\"a.test\")".to_owned(),
            "IpAddress(127.0.0.1)".to_owned(),
        ];
        assert_eq!(listed(&names), "a.test, 127.0.0.1");
        assert_eq!(listed(&[]), "no name at all");
    }
}
