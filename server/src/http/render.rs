//! The text of /metrics. A thread of its own renders it, once for all concurrent scrapes, and
//! for at most a part of a processor's time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
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

/// The last rendering.
struct LastRendering {
    text: Option<(Instant, Bytes)>,
    /// Until when the renderings so far use up their share.
    paid: Instant,
}

impl Renderer {
    pub(super) fn new(node: Arc<Node>) -> Self {
        Self {
            node,
            last: Arc::new(Mutex::new(LastRendering {
                text: None,
                paid: Instant::now(),
            })),
        }
    }

    /// The metrics as of this call or later.
    ///
    /// # Errors
    /// With a sentence if a metric cannot be written, which is a bug.
    pub(super) async fn text(&self) -> Result<Bytes, String> {
        let asked = Instant::now();
        let last = Arc::clone(&self.last).lock_owned().await;
        if let Some((begun, text)) = &last.text
            && *begun >= asked
        {
            return Ok(text.clone());
        }
        // A task of its own: a caller that leaves must not let the next one begin meanwhile.
        let rendering = tokio::spawn(render(Arc::clone(&self.node), last));
        rendering.await.map_err(|error| error.to_string())?
    }
}

async fn render(
    node: Arc<Node>,
    mut last: OwnedMutexGuard<LastRendering>,
) -> Result<Bytes, String> {
    if let Some(at) = last.paid.checked_sub(AHEAD) {
        tokio::time::sleep_until(at).await;
    }
    let begun = Instant::now();
    let rendered = tokio::task::spawn_blocking(move || {
        let engine = node.store.get().map(|store| &store.engine);
        let now = engine.map(|engine| engine.statistics());
        let lags = engine
            .map(|engine| block_on(metrics::lags(&node.cursor_lag_logs, &**engine.unchecked())));
        node.metrics.encode(now.as_ref(), &lags.unwrap_or_default())
    });
    let rendered = rendered.await.map_err(|error| error.to_string())?;
    let text = Bytes::from(rendered.map_err(|error| error.to_string())?);
    let now = Instant::now();
    last.paid = last.paid.max(now) + (now - begun) * (SHARE - 1);
    last.text = Some((begun, text.clone()));
    Ok(text)
}
