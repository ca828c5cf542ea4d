//! The page: plain files, part of the binary, with nothing to build.

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

macro_rules! file {
    ($name:literal, $kind:literal) => {
        (
            $name,
            concat!($kind, "; charset=utf-8"),
            include_str!(concat!("../../console/", $name)),
        )
    };
}

/// Name, type and text of each.
const FILES: [(&str, &str, &str); 13] = [
    file!("index.html", "text/html"),
    file!("style.css", "text/css"),
    file!("icon.svg", "image/svg+xml"),
    file!("app.js", "text/javascript"),
    file!("api.js", "text/javascript"),
    file!("chart.js", "text/javascript"),
    file!("dom.js", "text/javascript"),
    file!("format.js", "text/javascript"),
    file!("overview.js", "text/javascript"),
    file!("segments.js", "text/javascript"),
    file!("logs.js", "text/javascript"),
    file!("log.js", "text/javascript"),
    file!("record.js", "text/javascript"),
];

/// The page itself.
pub(super) async fn page() -> Response {
    answer("index.html")
}

/// Returns a file that the page requests.
pub(super) async fn file(Path(name): Path<String>) -> Response {
    answer(&name)
}

fn answer(name: &str) -> Response {
    match FILES.iter().find(|(known, ..)| *known == name) {
        // Requested again each time: another version of the daemon has another page.
        Some((_, kind, text)) => (
            [
                (header::CONTENT_TYPE, *kind),
                (header::CACHE_CONTROL, "no-cache"),
            ],
            *text,
        )
            .into_response(),
        None => (StatusCode::NOT_FOUND, "no such file\n").into_response(),
    }
}
