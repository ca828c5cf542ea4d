//! Endpoints: `HOST`, `HOST:PORT`, `http://HOST:PORT` and `https://HOST:PORT`, or several with commas.

use tonic::transport::Uri;

use crate::error::{Error, ErrorKind};

/// Where a server listens unless configured otherwise.
pub const DEFAULT_ENDPOINT: &str = "http://127.0.0.1:6925";

/// Port of an endpoint that names none.
const DEFAULT_PORT: u16 = 6925;

/// An endpoint with scheme and port.
pub(crate) struct CompleteEndpoint {
    /// The whole, such as `https://wald:6925`.
    pub(crate) text: String,
    /// The host; an address of IPv6 is in brackets.
    pub(crate) host: String,
    /// Whether the connection is inside TLS.
    pub(crate) tls: bool,
}

/// Reads an endpoint. Without a scheme it is `http`, without a port it has the default one.
///
/// # Errors
/// [`ErrorKind::InvalidEndpoint`] if there is no host, a port outside of 1 to 65535, a path, or a
/// user name, which a server would never see.
pub(crate) fn complete(endpoint: &str) -> Result<CompleteEndpoint, ErrorKind> {
    let invalid = |why| ErrorKind::InvalidEndpoint {
        endpoint: without_user(endpoint),
        why,
    };
    let full = match endpoint.contains("://") {
        true => endpoint.to_owned(),
        false => format!("http://{endpoint}"),
    };
    let uri: Uri = full.parse().map_err(|_| invalid(""))?;
    let authority = uri.authority().ok_or_else(|| invalid(""))?;
    if authority.as_str().contains('@') {
        return Err(invalid(": leave the user name out, no server asks for one"));
    }
    let (scheme, tls) = match uri.scheme_str() {
        Some("http") => ("http", false),
        Some("https") => ("https", true),
        _ => return Err(invalid("")),
    };
    let host = authority.host();
    if host.is_empty() {
        return Err(invalid(""));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(invalid(": leave the path out"));
    }
    let port = match authority.as_str().get(host.len()..).unwrap_or_default() {
        "" => Some(DEFAULT_PORT),
        port => port.strip_prefix(':').and_then(|port| port.parse().ok()),
    };
    match port {
        Some(port @ 1..) => Ok(CompleteEndpoint {
            text: format!("{scheme}://{host}:{port}"),
            host: host.to_owned(),
            tls,
        }),
        _ => Err(invalid(": its port is not a number from 1 to 65535")),
    }
}

/// The servers that an endpoint names, each with scheme and port, as a [`Client`](crate::Client)
/// uses them. There is at least one.
///
/// # Errors
/// [`ErrorKind::InvalidEndpoint`], which names the part that is wrong.
pub fn complete_endpoints(endpoint: &str) -> Result<Vec<String>, Error> {
    let invalid = |part: &str, why| {
        Error::new(ErrorKind::InvalidEndpoint {
            endpoint: without_user(part),
            why,
        })
    };
    let mut tls = None;
    endpoint
        .split(',')
        .map(|part| {
            if part.is_empty() && !endpoint.is_empty() {
                return Err(invalid(endpoint, ": one part of the list is empty"));
            }
            let complete = complete(part).map_err(Error::new)?;
            if *tls.get_or_insert(complete.tls) != complete.tls {
                let why = ": it needs the scheme of the first server of the list";
                return Err(invalid(part, why));
            }
            Ok(complete.text)
        })
        .collect()
}

/// The endpoint as a message may show it: without a password.
fn without_user(endpoint: &str) -> String {
    let Some((user, host)) = endpoint.rsplit_once('@') else {
        return endpoint.to_owned();
    };
    match user.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://...@{host}"),
        None => format!("...@{host}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_without_a_port_has_the_default_one() {
        for (given, expected) in [
            ("localhost", "http://localhost:6925"),
            ("http://wald/", "http://wald:6925"),
            ("[::1]", "http://[::1]:6925"),
            ("[::1]:80", "http://[::1]:80"),
            ("http://127.0.0.1:80", "http://127.0.0.1:80"),
            ("https://wald", "https://wald:6925"),
        ] {
            let complete = complete(given).unwrap();
            assert_eq!(complete.text, expected);
            assert_eq!(complete.tls, given.starts_with("https"));
        }
    }

    #[test]
    fn endpoint_that_would_connect_elsewhere_is_refused() {
        for (given, why) in [
            ("127.0.0.1:179250", "1 to 65535"),
            ("127.0.0.1:0", "1 to 65535"),
            ("localhost:", "1 to 65535"),
            ("localhost:6925/logs", "path"),
            ("http://", "is not an endpoint"),
            ("ftp://localhost", "is not an endpoint"),
        ] {
            let error = complete(given).err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn each_part_of_a_list_is_completed_like_one_endpoint() {
        let all = complete_endpoints("https://a,https://[::1]:80").unwrap();
        assert_eq!(all, ["https://a:6925", "https://[::1]:80"]);
        assert_eq!(
            complete_endpoints("a:7,b").unwrap(),
            ["http://a:7", "http://b:6925"]
        );
    }

    #[test]
    fn list_with_a_wrong_part_is_refused_and_the_part_named() {
        for (given, part, why) in [
            ("a,b:0,c", "`b:0`", "1 to 65535"),
            ("a, b", "` b`", "is not an endpoint"),
            ("a,,b", "`a,,b`", "one part of the list is empty"),
            ("a,", "`a,`", "one part of the list is empty"),
            ("https://a,b", "`b`", "scheme of the first"),
            ("a,https://b", "`https://b`", "scheme of the first"),
            ("a,me:secret@b", "`...@b`", "user name"),
            ("me:secret@a,,", "`...@a`", "user name"),
            ("a,,me:secret@b", "`...@b`", "is empty"),
        ] {
            let error = complete_endpoints(given).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(why), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn password_in_an_endpoint_is_refused_and_not_shown() {
        for given in [
            "http://me:secret@host:6925",
            "me:secret@host",
            "https://me:secret@host",
        ] {
            let error = complete(given).err().unwrap().to_string();
            assert!(
                error.contains("user name") && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
