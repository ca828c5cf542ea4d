//! One GET over https: no redirects, no cookies, no proxy.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST, USER_AGENT};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::auth::issuer::KeyUrl;
use crate::auth::jwks::KEY_SET_BYTES;
use crate::reload::{Fault, Secrecy, read_file};
use crate::tls::{roots_of, system_roots};

/// Longest time of a fetch. A start waits for the first one.
const FETCH: Duration = Duration::from_secs(5);
/// Maximum size of a file with a token, bytes.
const TOKEN_BYTES: u64 = 16 << 10;

/// Fetches the keys behind a URL.
///
/// # Errors
/// The reason, which has no text of the server.
pub(super) async fn get(source: &KeyUrl) -> Result<Bytes, String> {
    match timeout(FETCH, get_whole(source)).await {
        Ok(result) => result,
        Err(_) => Err(format!("no answer within {} s", FETCH.as_secs())),
    }
}

/// Checks the files that a fetch needs.
///
/// # Errors
/// With the first file that cannot be used.
pub(in crate::auth) fn check_files(source: &KeyUrl) -> Result<(), Fault> {
    if let Some(path) = &source.ca {
        roots_of("jwks_ca", path)?;
    }
    if let Some(path) = &source.token {
        authorization(path)?;
    }
    Ok(())
}

async fn get_whole(source: &KeyUrl) -> Result<Bytes, String> {
    let shown = |fault: Fault| fault.to_string();
    let roots = match &source.ca {
        Some(path) => roots_of("jwks_ca", path).map_err(shown)?,
        None => system_roots("jwks_ca")?,
    };
    let token = source.token.as_deref().map(authorization);
    let token = token.transpose().map_err(shown)?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let host = source.url.host().unwrap_or_default();
    // An IPv6 address has brackets in a URL alone.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let address = (host, source.url.port_u16().unwrap_or(443));
    let socket = TcpStream::connect(address).await;
    let socket = socket.map_err(|error| format!("cannot connect: {error}"))?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, socket);
    let stream = stream.await.map_err(|error| format!("TLS: {error}"))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    let request = request(source, token)?;
    let answer = async move {
        let answer = sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        if answer.status() != StatusCode::OK {
            return Err(format!("the server answered {}", answer.status()));
        }
        let most = usize::try_from(KEY_SET_BYTES).unwrap_or(usize::MAX);
        let body = Limited::new(answer.into_body(), most).collect().await;
        let body = body.map_err(|error| format!("the answer: {error}"))?;
        Ok(body.to_bytes())
    };
    driven_by(connection, answer).await
}

/// The result of a future that needs its connection to be polled.
async fn driven_by<T>(
    connection: impl Future<Output = hyper::Result<()>>,
    answer: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let mut connection = std::pin::pin!(connection);
    let mut answer = std::pin::pin!(answer);
    tokio::select! {
        biased;
        result = &mut answer => return result,
        // The answer learns of its end, and of the error.
        _ = &mut connection => {}
    }
    answer.await
}

fn request(source: &KeyUrl, token: Option<HeaderValue>) -> Result<Request<Empty<Bytes>>, String> {
    let url = &source.url;
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let host = url.authority().map_or("", |authority| authority.as_str());
    let mut request = Request::get(path)
        .header(HOST, host)
        .header(ACCEPT, "application/json")
        .header(USER_AGENT, concat!("wald/", env!("CARGO_PKG_VERSION")))
        .body(Empty::new())
        .map_err(|error| error.to_string())?;
    if let Some(token) = token {
        request.headers_mut().insert(AUTHORIZATION, token);
    }
    Ok(request)
}

/// The token of a file, as a header.
fn authorization(path: &Path) -> Result<HeaderValue, Fault> {
    let text = read_file("jwks_token_file", path, TOKEN_BYTES, Secrecy::Public)?;
    let mut value = b"Bearer ".to_vec();
    value.extend_from_slice(text.trim_ascii());
    let value = HeaderValue::from_bytes(&value);
    let mut value = value.map_err(|_| Fault::new("jwks_token_file", path, "it holds no token"))?;
    value.set_sensitive(true);
    Ok(value)
}
