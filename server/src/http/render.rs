//! The text of /metrics. A thread of its own renders and compresses it, once for all concurrent scrapes, and
//! for at most a part of a processor's time.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::Instant;
use wald_storage::block_on;

use crate::metrics;
use crate::rpc::Node;

/// Rendering takes at most one part in this many of a processor's time.
const SHARE: u32 = 4;
/// Time that rendering may be ahead of its share: scrapes now and then never wait.
const AHEAD: Duration = Duration::from_secs(1);

/// Renders the metrics.
pub(super) struct Renderer {
    node: Arc<Node>,
    last: Arc<Mutex<LastRendering>>,
}

/// The metrics at one moment.
#[derive(Clone)]
pub(super) struct Rendering {
    pub(super) text: Bytes,
    /// The text as gzip, less than a third of the bytes (`server/tests/daemon/metrics.rs`). Scrapers ask for it.
    pub(super) gzip: Bytes,
}

/// The last rendering.
struct LastRendering {
    made: Option<(Instant, Rendering)>,
    /// Until when the renderings so far use up their share.
    paid: Instant,
}

impl Renderer {
    pub(super) fn new(node: Arc<Node>) -> Self {
        Self {
            node,
            last: Arc::new(Mutex::new(LastRendering {
                made: None,
                paid: Instant::now(),
            })),
        }
    }

    /// The metrics as of this call or later.
    ///
    /// # Errors
    /// With a sentence if a metric cannot be written, which is a bug.
    pub(super) async fn render(&self) -> Result<Rendering, String> {
        let asked = Instant::now();
        let last = Arc::clone(&self.last).lock_owned().await;
        if let Some((begun, made)) = &last.made
            && *begun >= asked
        {
            return Ok(made.clone());
        }
        // A task of its own: a caller that leaves must not let the next one begin meanwhile.
        let rendering = tokio::spawn(render(Arc::clone(&self.node), last));
        rendering.await.map_err(|error| error.to_string())?
    }
}

async fn render(
    node: Arc<Node>,
    mut last: OwnedMutexGuard<LastRendering>,
) -> Result<Rendering, String> {
    if let Some(at) = last.paid.checked_sub(AHEAD) {
        tokio::time::sleep_until(at).await;
    }
    let begun = Instant::now();
    let rendered = tokio::task::spawn_blocking(move || {
        let engine = node.store.get().map(|store| &store.engine);
        let now = engine.map(|engine| engine.statistics());
        let lags = engine
            .map(|engine| block_on(metrics::lags(&node.cursor_lag_logs, &**engine.unchecked())));
        let text = node
            .metrics
            .encode(now.as_ref(), &lags.unwrap_or_default())
            .map_err(|error| error.to_string())?;
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        let written = gzip.write_all(&text);
        let gzip = written.and_then(|()| gzip.finish());
        Ok::<_, String>(Rendering {
            text: text.into(),
            gzip: gzip.map_err(|error| error.to_string())?.into(),
        })
    });
    let made = rendered.await.map_err(|error| error.to_string())??;
    let now = Instant::now();
    last.paid = last.paid.max(now) + (now - begun) * (SHARE - 1);
    last.made = Some((begun, made.clone()));
    Ok(made)
}
