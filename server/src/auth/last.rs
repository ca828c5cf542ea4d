//! The caller of the last call of a connection. Most connections have one caller, so the next call costs a comparison
//! instead of a digest, or of a signature.

use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::HeaderValue;

use super::Identity;

/// The caller of the last call that had one. A proxy may send the calls of many callers over one connection: each change
/// of the caller costs a full check.
#[derive(Default)]
pub(crate) struct LastCaller(Option<KnownCaller>);

struct KnownCaller {
    /// The value of `authorization`, at most 8 KiB: a longer one is no token. `None`: there was none, and the certificate counted.
    value: Option<Box<[u8]>>,
    identity: Arc<Identity>,
}

impl LastCaller {
    /// The caller, if the value is that of the last call, and nothing has changed or expired since then.
    pub(super) fn find(&self, value: Option<&HeaderValue>) -> Option<Arc<Identity>> {
        let known = self.0.as_ref()?;
        let is_same = match (&known.value, value) {
            // The time must not show how many characters a guess has right.
            (Some(known), Some(value)) => verify_slices_are_equal(known, value.as_bytes()).is_ok(),
            (None, None) => true,
            _ => false,
        };
        (is_same && known.identity.is_current()).then(|| Arc::clone(&known.identity))
    }

    /// Remembers a caller.
    pub(super) fn keep(&mut self, value: Option<&HeaderValue>, identity: &Arc<Identity>) {
        self.0 = Some(KnownCaller {
            value: value.map(|value| value.as_bytes().into()),
            identity: Arc::clone(identity),
        });
    }
}
