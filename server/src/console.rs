//! The web console: shows the contents and the state of the store in a browser. It changes
//! nothing.
//!
//! ```text
//! /console/            the page: files of `server/console/`, part of the binary
//! /console/api/session a login: a token for a cookie (console/login.rs)
//! /console/api/…       what it asks: JSON, from the engine's seam as the RPCs are
//! /console/api/live    what changes: server-sent events, one stream for each open page
//! ```
//!
//! It runs on the HTTP port's thread, apart from the event loops of gRPC. The cost of a page is
//! bounded: streams and concurrent reads by number, answers by bytes. A socket pulls its
//! stream, so that a browser that reads nothing costs nothing.

mod assets;
mod guard;
mod history;
mod live;
mod login;
mod records;
mod server;
mod views;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use serde::Serialize;
use tokio::sync::Semaphore;
use tonic::{Code, Status};

use crate::answers::{AnswerShare, Held};
use crate::auth::Authority;
use crate::config::Config;
use crate::http::Hosts;
use crate::rpc::Node;
use history::History;
use login::Logins;
use server::SettingsView;

/// Pages that may be open and visible at a time, whatever the number of connections; a hidden
/// one gives its place back.
const MAX_STREAMS: usize = 32;
/// Requests for records that are worked on at a time; more wait.
const MAX_READS: usize = 4;

/// State that the console's requests share.
struct Console {
    node: Arc<Node>,
    settings: SettingsView,
    history: Arc<History>,
    /// Bytes of answers with records that browsers have not taken.
    answers: AnswerShare,
    streams: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    /// Lists of producers, one at a time: each may flush.
    producers: Semaphore,
}

/// The routes, with a sampler behind them that runs as long as the process. `streams` bounds
/// the event streams further.
pub(crate) fn router(
    node: Arc<Node>,
    config: &Config,
    hosts: Arc<Hosts>,
    (authority, answers): (Authority, AnswerShare),
    streams: usize,
    (grpc, http): (SocketAddr, Option<SocketAddr>),
) -> Router {
    let history = Arc::new(History::new());
    tokio::spawn(history::sample(Arc::clone(&node), Arc::clone(&history)));
    let console = Arc::new(Console {
        node,
        settings: SettingsView::new(config, grpc, http),
        history,
        answers,
        streams: Arc::new(Semaphore::new(streams.min(MAX_STREAMS))),
        reads: Arc::new(Semaphore::new(MAX_READS)),
        producers: Semaphore::new(1),
    });
    let logins = Logins {
        authority,
        sessions: Arc::default(),
        waiting: Arc::default(),
        has_tls: config.http_tls,
        port: http.map_or(0, |address| address.port()),
    };
    let api = Router::new()
        .route("/console/api/server", get(server::server))
        .route("/console/api/live", get(live::live))
        .route("/console/api/logs", get(views::logs))
        .route("/console/api/log", get(views::log))
        .route("/console/api/producers", get(views::producers))
        .route("/console/api/segments", get(views::segments))
        .route("/console/api/records", get(records::page))
        .route("/console/api/record", get(records::one))
        .route_layer(from_fn_with_state(logins.clone(), guard::known_caller))
        .with_state(console);
    let session = post(login::log_in).delete(login::log_out);
    let api = Router::new()
        .route("/console/api/session", session)
        .with_state(logins)
        .merge(api)
        .route_layer(from_fn_with_state(Arc::clone(&hosts), guard::same_origin));
    Router::new()
        .route("/", get(home))
        .route("/console", get(home))
        .route("/console/", get(assets::page))
        .route("/console/{file}", get(assets::file))
        .merge(api)
        .route_layer(from_fn_with_state(hosts, guard::known_host))
}

async fn home() -> Redirect {
    Redirect::temporary("/console/")
}

/// An answer in JSON.
struct Json<T>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}

/// A text that counts until its last byte was handed to the socket.
struct CountedText {
    text: Vec<u8>,
    _held: Held,
}

impl AsRef<[u8]> for CountedText {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Console {
    /// An answer in JSON that counts in the memory of answers: it may have megabytes.
    ///
    /// # Errors
    /// BUSY if there is no room for a second.
    async fn counted(&self, value: &impl Serialize) -> Result<Response, Status> {
        let text = serde_json::to_vec(value).map_err(|why| Status::internal(why.to_string()))?;
        let held = self.answers.hold_soon(text.len() as u64).await?;
        let text = Bytes::from_owner(CountedText { text, _held: held });
        Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
    }
}

/// The reason for a missing answer: the gRPC status that `status.rs` chooses.
struct ConsoleError(Status);

impl From<Status> for ConsoleError {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

/// An error in JSON.
#[derive(Serialize)]
struct ErrorView<'a> {
    /// The code that gRPC would answer, such as `NotFound`.
    code: String,
    message: &'a str,
}

impl ConsoleError {
    fn told(&self) -> ErrorView<'_> {
        ErrorView {
            code: format!("{:?}", self.0.code()),
            message: self.0.message(),
        }
    }
}

impl IntoResponse for ConsoleError {
    fn into_response(self) -> Response {
        let code = match self.0.code() {
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::InvalidArgument | Code::OutOfRange | Code::FailedPrecondition => {
                StatusCode::BAD_REQUEST
            }
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::ResourceExhausted | Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (code, Json(self.told())).into_response()
    }
}
