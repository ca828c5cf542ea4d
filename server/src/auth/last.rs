//! The caller of the last call of a connection. Most connections have one caller, so the next call costs a comparison
//! instead of a digest, or of a signature. The last JWT whose caller was refused is remembered, too: a stranger that sends
//! it again and again must not keep the event loop busy with its signature.

use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::HeaderValue;

use super::{Identity, RefusedCredential, SentToken, Unknown};

/// The caller of the last call that had one. A proxy may send the calls of many callers over one connection: each change
/// of the caller costs a full check.
#[derive(Default)]
pub(crate) struct LastCaller {
    known: Option<KnownCaller>,
    checked: Option<CheckedToken>,
    has_checked: bool,
}

/// A token without a caller. Its signature was checked by the rules of this generation.
struct CheckedToken {
    /// The value of `authorization`.
    value: Box<[u8]>,
    generation: u64,
    result: Result<SentToken, RefusedCredential>,
}

struct KnownCaller {
    /// The value of `authorization`, at most 8 KiB: a longer one is no token. `None`: there was none, and the certificate counted.
    value: Option<Box<[u8]>>,
    identity: Arc<Identity>,
}

impl LastCaller {
    /// The caller, if the value is that of the last call, and nothing has changed or expired since then.
    pub(super) fn find(&self, value: Option<&HeaderValue>) -> Option<Arc<Identity>> {
        let known = self.known.as_ref()?;
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
        self.checked = None;
        self.known = Some(KnownCaller {
            value: value.map(|value| value.as_bytes().into()),
            identity: Arc::clone(identity),
        });
    }

    /// The token in a value of `authorization`, which `read` reads and checks. The signature of a JWT is checked once,
    /// as long as the rules of this generation are in force.
    pub(super) fn token(
        &mut self,
        value: &HeaderValue,
        generation: u64,
        read: impl FnOnce() -> Result<SentToken, RefusedCredential>,
    ) -> Result<SentToken, RefusedCredential> {
        if let Some(checked) = &self.checked
            && checked.generation == generation
            && verify_slices_are_equal(&checked.value, value.as_bytes()).is_ok()
        {
            return checked.result.clone();
        }
        let result = read();
        let has_signature = match &result {
            Ok(token) => matches!(token, SentToken::Jwt(_)),
            // Each call for a key that is not known may fetch it.
            Err(refused) => refused.unknown == Unknown::Bad,
        };
        if has_signature {
            self.has_checked = true;
            self.checked = Some(CheckedToken {
                value: value.as_bytes().into(),
                generation,
                result: result.clone(),
            });
        }
        result
    }

    /// Whether the signature of a JWT was checked since the last question.
    pub(crate) fn has_checked(&mut self) -> bool {
        std::mem::take(&mut self.has_checked)
    }
}
