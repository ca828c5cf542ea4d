//! The HTTP side port: /livez, /readyz, /metrics. Its own port, so that probes and
//! scrapes work whatever the gRPC side is configured to demand.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::rpc::Node;

/// The routes.
pub(crate) fn router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/livez", get(|| async { "live\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(node)
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
