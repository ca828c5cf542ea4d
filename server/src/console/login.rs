//! Logs people in: they give their token once, and the browser keeps a cookie that no script can read.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt as _, Limited};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::oneshot;

use crate::audit::{Trail, network};
use crate::auth::{Authority, CertNames, LoginRefusal, SESSION_LIFE, Sessions};

/// Maximum size of the body of a login, bytes.
const BODY_BYTES: usize = 4 << 10;
/// Maximum time in which the body must arrive.
const BODY_TIME: Duration = Duration::from_secs(5);
/// Maximum number of logins whose bodies are awaited at a time. One more ends the one that waits longest.
const MOST_WAITING: usize = 4;

/// Logins whose bodies are awaited, at most one from the network of an address: a body comes with its head, so one that
/// waits is slow, and a stranger must not keep all others out with such.
#[derive(Default)]
pub(crate) struct WaitingLogins(Mutex<Vec<WaitingLogin>>);

struct WaitingLogin {
    network: IpAddr,
    /// Dropped: another login has its place.
    place: oneshot::Sender<Infallible>,
}

impl WaitingLogins {
    /// A place for the login of this address. The value resolves when another login has the place.
    fn enter(&self, address: IpAddr) -> oneshot::Receiver<Infallible> {
        let network = network(address);
        let (place, ended) = oneshot::channel();
        let mut waiting = self.0.lock();
        // Those that have their bodies are over.
        waiting.retain(|login| !login.place.is_closed() && login.network != network);
        if waiting.len() >= MOST_WAITING {
            waiting.remove(0);
        }
        waiting.push(WaitingLogin { network, place });
        ended
    }
}

/// State of the logins.
#[derive(Clone)]
pub(crate) struct Logins {
    pub(crate) authority: Authority,
    pub(crate) sessions: Arc<Sessions>,
    /// Logins whose bodies are awaited. Each holds a place of the port.
    pub(crate) waiting: Arc<WaitingLogins>,
    /// Whether the port speaks TLS: only then browsers accept the name with the prefix `__Host-`.
    pub(crate) has_tls: bool,
    /// Number of the port, 0 if it is not known. Browsers send a cookie to all ports of a host.
    pub(crate) port: u16,
}

impl Logins {
    /// Name of the cookie. In plaintext the daemons of a host have names of their own.
    pub(crate) fn cookie(&self) -> String {
        match self.has_tls {
            true => "__Host-wald".to_owned(),
            false => format!("wald-{}", self.port),
        }
    }

    fn set_cookie(&self, value: &str, seconds: u64) -> HeaderValue {
        let secure = if self.has_tls { "; Secure" } else { "" };
        let text = format!(
            "{}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}",
            self.cookie()
        );
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
    }
}

/// Body of a login.
#[derive(Deserialize)]
struct Login {
    token: String,
}

/// `POST /console/api/session` with `{"token": "…"}`
pub(super) async fn log_in(
    State(logins): State<Logins>,
    Extension(address): Extension<IpAddr>,
    names: Option<Extension<Arc<CertNames>>>,
    request: Request<Body>,
) -> Response {
    let is_json = (request.headers().get(header::CONTENT_TYPE))
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    if !is_json {
        let sentence = "send the token as JSON, with Content-Type: application/json\n";
        return (StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence).into_response();
    }
    let trail = Trail::of(request.extensions().get(), request.headers());
    let ended = logins.waiting.enter(address);
    let body = Limited::new(request.into_body(), BODY_BYTES).collect();
    let body = tokio::select! {
        biased;
        body = tokio::time::timeout(BODY_TIME, body) => body,
        _ = ended => {
            let sentence = "another login came before the body of this one; try again\n";
            return (StatusCode::SERVICE_UNAVAILABLE, sentence).into_response();
        }
    };
    let Ok(Ok(body)) = body else {
        let sentence = "the body is too large, or did not arrive within 5 s\n";
        return (StatusCode::BAD_REQUEST, sentence).into_response();
    };
    let Ok(login) = serde_json::from_slice::<Login>(&body.to_bytes()) else {
        return (StatusCode::BAD_REQUEST, "expected {\"token\": \"...\"}\n").into_response();
    };
    let names = names.map(|Extension(names)| names);
    let opened = (logins.authority).log_in(
        login.token.trim(),
        names,
        (address, trail),
        &logins.sessions,
    );
    match opened {
        Ok(value) => {
            let cookie = logins.set_cookie(&value, SESSION_LIFE.as_secs());
            (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response()
        }
        Err(LoginRefusal::NotNeeded) => {
            let sentence = "this server has no auth_file; nobody logs in\n";
            (StatusCode::NOT_FOUND, sentence).into_response()
        }
        Err(LoginRefusal::Wait) => {
            let sentence = "too many logins failed; wait a minute\n";
            (StatusCode::TOO_MANY_REQUESTS, sentence).into_response()
        }
        Err(LoginRefusal::Refused(status)) => {
            let code = match status.code() {
                tonic::Code::PermissionDenied => StatusCode::FORBIDDEN,
                _ => StatusCode::UNAUTHORIZED,
            };
            (code, format!("{}\n", status.message())).into_response()
        }
    }
}

/// `DELETE /console/api/session`
pub(super) async fn log_out(State(logins): State<Logins>, headers: HeaderMap) -> Response {
    logins.sessions.close(&headers, &logins.cookie());
    let cookie = logins.set_cookie("", 0);
    (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn login_of_another_network_is_not_kept_out() {
        let waiting = WaitingLogins::default();
        let is_over = |ended: &mut oneshot::Receiver<Infallible>| {
            ended.try_recv() == Err(oneshot::error::TryRecvError::Closed)
        };
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut first = waiting.enter(address(1));
        let mut again = waiting.enter(address(1));
        assert!(is_over(&mut first) && !is_over(&mut again));
        let mut others: Vec<_> = (2..=4).map(|last| waiting.enter(address(last))).collect();
        assert!(!is_over(&mut again));
        let mut good = waiting.enter(address(5));
        // The one that waited longest.
        assert!(is_over(&mut again) && !is_over(&mut good));
        assert!(!others.iter_mut().any(is_over));
        drop(others);
        let more: Vec<_> = (6..=8).map(|last| waiting.enter(address(last))).collect();
        assert!(!is_over(&mut good), "places of ended logins are free");
        drop(more);
    }
}
