//! Checks the origin of requests: only pages that the daemon itself served, under a name that
//! is really its own. `http/hosts.rs` checks names.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::login::Logins;
use crate::audit::Trail;
use crate::auth::{CertNames, CookieSession, ServerRight};
use crate::http::{Hosts, UNKNOWN, asked, is_same_origin};
use crate::methods;

/// Nothing from elsewhere, nothing inline, nobody's frame; and no text becomes markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";

/// Refuses names that are not known; tells the browser to trust nothing else.
pub(super) async fn known_host(
    State(hosts): State<Arc<Hosts>>,
    request: Request,
    next: Next,
) -> Response {
    let known =
        asked(request.uri(), request.headers()).is_some_and(|authority| hosts.knows(&authority));
    let mut response = if known {
        next.run(request).await
    } else {
        refused(UNKNOWN)
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Refuses callers without the right `console`, and puts the caller beside the request.
pub(super) async fn known_caller(
    State(logins): State<Logins>,
    mut request: Request,
    next: Next,
) -> Response {
    let names = request.extensions().get::<Arc<CertNames>>();
    let cookie = logins.cookie();
    let session = (&*logins.sessions, cookie.as_str());
    let rpc = methods::of_http(ServerRight::Console);
    let trail = Trail::of(request.extensions().get(), request.headers());
    let caller = (logins.authority).identify_person(request.headers(), names, session, rpc, trail);
    match caller {
        Ok(caller) => {
            let session = CookieSession::of(&logins.sessions, request.headers(), &cookie);
            if let Some(session) = session {
                request.extensions_mut().insert(session);
            }
            let recorded = caller.trail().call().cloned();
            request.extensions_mut().insert(caller);
            let answer = next.run(request).await;
            if let Some(recorded) = recorded {
                recorded.answered(answer.status());
            }
            answer
        }
        Err(status) => crate::http::refused(&status),
    }
}

/// Refuses requests that another page makes, as far as the browser reports it.
pub(super) async fn same_origin(request: Request, next: Next) -> Response {
    if !is_same_origin(request.uri(), request.headers()) {
        return refused("only the console's own page may ask for this\n");
    }
    let mut response = next.run(request).await;
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn refused(why: &'static str) -> Response {
    (StatusCode::FORBIDDEN, why).into_response()
}
