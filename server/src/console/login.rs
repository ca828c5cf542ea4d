//! Logs people in: they give their token once, and the browser keeps a cookie that no script can read.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt as _, Limited};
use serde::Deserialize;
use tokio::sync::Semaphore;

use crate::audit::Trail;
use crate::auth::{Authority, CertNames, LoginRefusal, SESSION_LIFE, Sessions};

/// Maximum size of the body of a login, bytes.
const BODY_BYTES: usize = 4 << 10;
/// Maximum time in which the body must arrive.
const BODY_TIME: Duration = Duration::from_secs(5);
/// Maximum number of logins whose bodies are awaited at a time.
pub(super) const MOST_WAITING: usize = 4;

/// State of the logins.
#[derive(Clone)]
pub(crate) struct Logins {
    pub(crate) authority: Authority,
    pub(crate) sessions: Arc<Sessions>,
    /// Logins whose bodies are awaited. Each holds a place of the port.
    pub(crate) waiting: Arc<Semaphore>,
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
    let Ok(_place) = logins.waiting.try_acquire() else {
        let sentence = "too many logins are under way; try again\n";
        return (StatusCode::SERVICE_UNAVAILABLE, sentence).into_response();
    };
    let body = Limited::new(request.into_body(), BODY_BYTES).collect();
    let Ok(Ok(body)) = tokio::time::timeout(BODY_TIME, body).await else {
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
