//! The token of a client, and the headers of its calls.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tonic::codegen::http::HeaderValue;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Status};

use crate::error::{Error, ErrorKind};
use crate::sent::{GatedChannel, SendGate};
use crate::small_file::read_small;

/// Maximum size of a token file, bytes.
const MAX_FILE_BYTES: u64 = 16 << 10;

/// Minimum time between two reads of a token file.
const READ_PAUSE: Duration = Duration::from_secs(1);

pub(crate) const AUTHORIZATION: &str = "authorization";

/// A text that no debug output shows.
#[derive(Clone)]
pub(crate) struct HiddenToken(Arc<str>);

impl fmt::Debug for HiddenToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("...")
    }
}

/// Source of the token, as the caller gave it.
#[derive(Debug, Clone)]
pub(crate) enum TokenOption {
    Fixed(HiddenToken),
    File(PathBuf),
}

impl TokenOption {
    pub(crate) fn fixed(token: &str) -> Self {
        Self::Fixed(HiddenToken(token.into()))
    }
}

/// The token of a client. That of a file is read again at most once a second.
#[derive(Debug)]
pub(crate) struct TokenSource {
    path: Option<PathBuf>,
    current: Mutex<CurrentToken>,
}

/// The header `authorization` with a token, which no debug output shows.
pub(crate) type TokenHeader = MetadataValue<Ascii>;

#[derive(Debug)]
struct CurrentToken {
    header: TokenHeader,
    read_at: Instant,
}

impl CurrentToken {
    /// `place` names the token in errors.
    fn new(text: &str, place: &str) -> Result<Self, String> {
        let token = text.trim();
        if token.is_empty() {
            return Err(format!("{place} is empty, and must have a token"));
        }
        let printable = token.bytes().all(|byte| byte.is_ascii_graphic());
        let header = MetadataValue::try_from(format!("Bearer {token}"));
        let (true, Ok(mut header)) = (printable, header) else {
            return Err(format!(
                "{place} has characters that a token cannot have, such as white space inside"
            ));
        };
        header.set_sensitive(true);
        Ok(Self {
            header,
            read_at: Instant::now(),
        })
    }
}

fn read(path: &Path) -> Result<CurrentToken, String> {
    let bytes = read_small(path, MAX_FILE_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    CurrentToken::new(&text, &path.display().to_string())
}

impl TokenSource {
    /// Checks the token, and reads its file.
    ///
    /// # Errors
    /// If the file or the token cannot be used.
    pub(crate) fn new(option: &TokenOption) -> Result<Self, Error> {
        let (path, current) = match option {
            TokenOption::Fixed(token) => (None, CurrentToken::new(&token.0, "the token")),
            TokenOption::File(path) => (Some(path.clone()), read(path)),
        };
        let current = current.map_err(|detail| Error::new(ErrorKind::Token { detail }))?;
        Ok(Self {
            path,
            current: Mutex::new(current),
        })
    }

    fn lock(&self) -> MutexGuard<'_, CurrentToken> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the file again, which blocks for a moment. A file with a fault may be replaced now: the earlier token
    /// stays in force.
    fn read_again(&self, current: &mut CurrentToken) {
        current.read_at = Instant::now();
        if let Some(Ok(read)) = self.path.as_deref().map(read) {
            *current = read;
        }
    }

    fn current(&self) -> MutexGuard<'_, CurrentToken> {
        let mut current = self.lock();
        if self.path.is_some() && current.read_at.elapsed() >= READ_PAUSE {
            self.read_again(&mut current);
        }
        current
    }

    /// Whether there is another token than the refused one.
    pub(crate) fn changed(&self, refused: &TokenHeader) -> bool {
        let mut current = self.lock();
        if current.header == *refused {
            self.read_again(&mut current);
        }
        current.header != *refused
    }

    /// Whether the token is that of a file.
    pub(crate) fn follows_a_file(&self) -> bool {
        self.path.is_some()
    }

    pub(crate) fn header(&self) -> TokenHeader {
        self.current().header.clone()
    }

    /// The header as another library takes it.
    pub(crate) fn header_value(&self) -> HeaderValue {
        let mut header = HeaderValue::from_bytes(self.header().as_encoded_bytes())
            .unwrap_or(HeaderValue::from_static(""));
        header.set_sensitive(true);
        header
    }
}

type Intercept = dyn Fn(Request<()>) -> Result<Request<()>, Status> + Send + Sync;

/// A caller's own step before each call.
#[derive(Clone)]
pub(crate) struct CallerStep(pub(crate) Arc<Intercept>);

impl fmt::Debug for CallerStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("...")
    }
}

/// Adds headers to each call: the token, and the headers of the caller's own step.
#[derive(Debug, Clone)]
pub(crate) struct CallHeaders {
    pub(crate) token: Option<Arc<TokenSource>>,
    pub(crate) step: Option<CallerStep>,
}

/// The connection of a client, whose calls carry its token.
pub(crate) type CallChannel = InterceptedService<GatedChannel, CallHeaders>;

impl Interceptor for CallHeaders {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.token
            && !request.metadata().contains_key(AUTHORIZATION)
        {
            request.metadata_mut().insert(AUTHORIZATION, token.header());
        }
        let Some(step) = &self.step else {
            return Ok(request);
        };
        let gate = request.extensions().get::<SendGate>().cloned();
        let mut request = (step.0)(request)?;
        // The step may return another request.
        if let Some(gate) = gate {
            request.extensions_mut().insert(gate);
        }
        Ok(request)
    }
}

/// Whether a host is this machine. An address of IPv6 is in brackets.
pub(crate) fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || bare
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_file(path: &Path) -> TokenSource {
        TokenSource::new(&TokenOption::File(path.to_owned())).unwrap()
    }

    #[test]
    fn token_that_cannot_be_sent_is_refused_and_not_shown() {
        for (text, why) in [
            ("", "is empty"),
            (" \n", "is empty"),
            ("k7Qp\n2mXa", "characters"),
            ("k7Qp\u{e9}", "characters"),
            ("k7Qp 2", "characters"),
        ] {
            let error = TokenSource::new(&TokenOption::fixed(text)).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(shown.contains(why) && !shown.contains("k7Qp"), "{shown}");
        }
        let missing = TokenOption::File("/missing/token".into());
        let error = TokenSource::new(&missing).unwrap_err().to_string();
        assert!(error.contains("/missing/token"), "{error}");
    }

    #[test]
    fn debug_output_hides_the_token() {
        let option = TokenOption::fixed("k7Qp2mXa");
        let source = TokenSource::new(&option).unwrap();
        let shown = format!("{option:?} {source:?} {:?}", source.header());
        assert!(!shown.contains("k7Qp"), "{shown}");
    }

    #[test]
    fn file_is_read_again_after_a_second_and_after_a_refusal() {
        let path = std::env::temp_dir().join(format!("wald-token-{}", std::process::id()));
        std::fs::write(&path, " first\n").unwrap();
        let source = of_file(&path);
        let first = source.header();
        assert_eq!(first, "Bearer first");
        std::fs::write(&path, "second").unwrap();
        assert_eq!(source.header(), first);
        assert!(source.changed(&first));
        std::fs::write(&path, "third").unwrap();
        source.lock().read_at -= READ_PAUSE;
        assert_eq!(source.header(), "Bearer third");
        std::fs::write(&path, "").unwrap();
        source.lock().read_at -= READ_PAUSE;
        assert_eq!(source.header(), "Bearer third");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn loopback_is_this_machine_and_no_name_like_it() {
        for host in ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["10.0.0.1", "0.0.0.0", "127.0.0.1.nip.io", "wald", "[::2]"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
