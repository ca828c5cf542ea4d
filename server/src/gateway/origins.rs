//! Pages of other origins, and names of this machine.
//!
//! A browser sends requests of any page to any address, so a page of a stranger could append to a store on the same
//! machine that has no `auth_file`. Browsers name the page's origin with each such request (`origin`, `sec-fetch-site`).
//! Requests of other origins are refused, but for those in `http_api_origins`, which get the answers that CORS needs.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::Next;

use super::answer::refused;
use crate::http::{Hosts, UNKNOWN, asked, is_same_origin};
use crate::status;

/// Seconds for which a browser remembers the answer to its question about a method.
const REMEMBERED_SECONDS: &str = "600";

/// The origins that may call.
pub(super) struct Origins {
    /// Origins in the setting `http_api_origins`.
    pub(super) allowed: Vec<HeaderValue>,
    /// `None`: callers have credentials, and no page of a stranger has one.
    pub(super) hosts: Option<Arc<Hosts>>,
}

impl Origins {
    /// The origin of an allowed page that makes the request; `None` if no other page makes it.
    fn check<'h>(&self, request: &'h Request) -> Result<Option<&'h HeaderValue>, &'static str> {
        let (uri, headers) = (request.uri(), request.headers());
        if let Some(hosts) = &self.hosts {
            let is_unnamed = uri.authority().is_none() && !headers.contains_key(header::HOST);
            let is_known =
                asked(uri, headers).is_some_and(|host| hosts.knows_or_is_one_word(&host));
            if !is_known && !is_unnamed {
                return Err(UNKNOWN.trim_end());
            }
        }
        let origin = headers.get(header::ORIGIN);
        if let Some(origin) = origin.filter(|origin| self.allowed.contains(origin)) {
            return Ok(Some(origin));
        }
        match is_same_origin(uri, headers) {
            true => Ok(None),
            false => Err(
                "a page of another origin asks for this; add its origin to the setting http_api_origins \
                 if it may",
            ),
        }
    }
}

/// Lets requests through that no page of a stranger makes, and answers questions of browsers.
pub(super) async fn guarded(
    State(origins): State<Arc<Origins>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let origin = match origins.check(&request) {
        Ok(origin) => origin.cloned(),
        Err(why) => return refused(StatusCode::FORBIDDEN, &status::foreign_origin(why)),
    };
    let asks = request.method() == Method::OPTIONS;
    let mut response = match asks {
        true => may(),
        false => next.run(request).await,
    };
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let read = HeaderValue::from_static("retry-after");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, read);
    }
    let vary = HeaderValue::from_static("origin");
    response.headers_mut().append(header::VARY, vary);
    response
}

/// The answer to a browser that asks which requests a page may make.
fn may() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let answers = response.headers_mut();
    for (name, value) in [
        (
            header::ACCESS_CONTROL_ALLOW_METHODS,
            "GET, POST, PUT, PATCH, DELETE",
        ),
        (
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            "authorization, content-type, grpc-timeout, last-event-id, traceparent, tracestate",
        ),
        (header::ACCESS_CONTROL_MAX_AGE, REMEMBERED_SECONDS),
    ] {
        answers.insert(name, HeaderValue::from_static(value));
    }
    response
}
