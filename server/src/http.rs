//! The HTTP side port: /livez, /readyz, /metrics; the console adds its own. Its own port, so that probes and
//! scrapes work whatever the gRPC side is configured to demand.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::ListenerExt as _;
use socket2::SockRef;
use tokio::net::TcpListener;

use crate::rpc::Node;

/// How long a peer may leave unread or unacknowledged what was sent to it, before its
/// connection is closed: a browser that went to sleep keeps no place.
const UNREAD: Duration = Duration::from_secs(30);

/// Serves the routes for as long as the process lives.
pub(crate) async fn serve(listener: TcpListener, routes: Router) -> std::io::Result<()> {
    let listener = listener.tap_io(|socket| {
        // What cannot be set is not: it costs some delay, or a connection some time.
        let _ = socket.set_nodelay(true);
        let _ = SockRef::from(&*socket).set_tcp_user_timeout(Some(UNREAD));
    });
    axum::serve(listener, routes).await
}

/// The routes, but for the console's.
pub(crate) fn router(node: Arc<Node>, has_console: bool) -> Router {
    Router::new()
        .route("/livez", get(|| async { "live\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .fallback(move || async move { (StatusCode::NOT_FOUND, nothing_here(has_console)) })
        .with_state(node)
}

fn nothing_here(has_console: bool) -> &'static str {
    if has_console {
        "nothing here; there are /livez, /readyz, /metrics and /console/\n"
    } else {
        "nothing here; there are /livez, /readyz and /metrics (the console is off: see the setting `console`)\n"
    }
}

async fn ready(State(node): State<Arc<Node>>) -> Response {
    let phase = *node.phase.borrow();
    match phase.not_ready() {
        None => "ready\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn metrics(State(node): State<Arc<Node>>) -> Response {
    let now = node.store.get().map(|store| store.engine.statistics());
    match node.metrics.encode(now.as_ref()) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
