//! Names that requests may use for this machine.
//!
//! A page of a stranger's can have its own name resolved to 127.0.0.1 and then read the answers
//! of this port as its own origin (DNS rebinding). Its requests carry that name, so an unknown
//! name is refused. A plain address is safe, because nobody can resolve it to another machine.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Uri, header};

/// The answer to a request under another name.
pub(crate) const UNKNOWN: &str = "this name is not known as one of this machine; use an address, or add the name to the \
     setting console_hosts\n";

/// Names of this machine, in addition to localhost and plain addresses.
#[derive(Debug)]
pub(crate) struct Hosts(Vec<String>);

impl Hosts {
    /// Takes the setting `console_hosts`: names separated by commas. A name that begins with a
    /// dot stands for every name that ends with it.
    pub(crate) fn new(names: &str) -> Self {
        let names = names.split(',').map(str::trim);
        Self(
            names
                .filter(|name| !name.trim_matches('.').is_empty())
                .map(str::to_ascii_lowercase)
                .collect(),
        )
    }

    /// Whether this is an address, localhost, or a name of the setting.
    pub(crate) fn knows(&self, authority: &Authority) -> bool {
        let host = host(authority);
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        bare.parse::<IpAddr>().is_ok()
            || host == "localhost"
            || host.ends_with(".localhost")
            || self.0.iter().any(|name| {
                *name == host || (name.starts_with('.') && host.ends_with(name.as_str()))
            })
    }

    /// Whether [`Self::knows`] it, or it is one word, such as the name of a service in a compose
    /// file or a namespace. The public DNS has no such names, so no stranger can own one.
    pub(crate) fn knows_or_is_one_word(&self, authority: &Authority) -> bool {
        let host = host(authority);
        self.knows(authority) || !(host.is_empty() || host.contains(['.', ':']))
    }
}

/// The host in lower case, without the dot that may end a full name.
fn host(authority: &Authority) -> String {
    let host = authority.host().to_ascii_lowercase();
    host.strip_suffix('.').map_or(host.clone(), str::to_owned)
}

/// The authority that a request names: in its target if that is a whole URI, else in its one
/// Host header.
pub(crate) fn asked(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    if let Some(authority) = uri.authority() {
        return Some(authority.clone());
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(host), None) => Authority::try_from(host.as_bytes()).ok(),
        _ => None,
    }
}

/// Whether no page of another origin makes the request, as far as the browser reports it.
pub(crate) fn is_same_origin(uri: &Uri, headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    let origin = headers.get(header::ORIGIN).map(|origin| {
        let origin = origin.to_str().unwrap_or_default();
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.is_some_and(|authority| {
            asked(uri, headers).is_some_and(|host| host.as_str().eq_ignore_ascii_case(authority))
        })
    });
    matches!(site, None | Some(b"same-origin" | b"none")) && origin != Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_this_machine_by_address_or_by_a_known_name() {
        let hosts = Hosts::new("wald.example, Other.example, .wald.svc.cluster.local, ., ");
        for known in [
            "localhost:6926",
            "LOCALHOST",
            "wald.localhost:1",
            "127.0.0.1:6926",
            "[::1]:6926",
            "10.1.2.3",
            "wald.example:6926",
            "wald.example.",
            "other.example",
            "wald-0.wald.svc.cluster.local:6926",
        ] {
            assert!(hosts.knows(&known.parse().unwrap()), "{known}");
            assert!(hosts.knows_or_is_one_word(&known.parse().unwrap()));
        }
        for unknown in [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:6926",
            "wald.svc.cluster.local.evil.example",
        ] {
            assert!(!hosts.knows(&unknown.parse().unwrap()), "{unknown}");
            assert!(!hosts.knows_or_is_one_word(&unknown.parse().unwrap()));
        }
        for word in ["xlocalhost", "wald:6926", "wald-headless"] {
            assert!(!hosts.knows(&word.parse().unwrap()), "{word}");
            assert!(hosts.knows_or_is_one_word(&word.parse().unwrap()), "{word}");
        }
    }

    #[test]
    fn target_that_is_a_whole_uri_wins_over_the_header() {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, "localhost".parse().unwrap());
        let of = |uri: &str, headers: &HeaderMap| {
            asked(&uri.parse().unwrap(), headers).map(|found| found.to_string())
        };
        assert_eq!(of("/metrics", &headers).as_deref(), Some("localhost"));
        let whole = "http://evil.example/metrics";
        assert_eq!(of(whole, &headers).as_deref(), Some("evil.example"));
        headers.append(header::HOST, "localhost".parse().unwrap());
        assert_eq!(of("/metrics", &headers), None);
    }

    #[test]
    fn other_pages_are_told_by_origin_and_by_fetch_metadata() {
        let asks = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            headers.insert("host", HeaderValue::from_static("127.0.0.1:6926"));
            for (name, value) in pairs {
                headers.insert(*name, HeaderValue::from_static(value));
            }
            is_same_origin(&Uri::from_static("/console/api/logs"), &headers)
        };
        assert!(asks(&[]));
        assert!(asks(&[("origin", "http://127.0.0.1:6926")]));
        assert!(asks(&[("sec-fetch-site", "same-origin")]));
        assert!(asks(&[("sec-fetch-site", "none")]));
        assert!(!asks(&[("origin", "http://127.0.0.1:8000")]));
        assert!(!asks(&[("origin", "null")]));
        assert!(!asks(&[("sec-fetch-site", "same-site")]));
        assert!(!asks(&[("sec-fetch-site", "cross-site")]));
    }
}
