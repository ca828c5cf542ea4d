//! Bare connections, for programs that bring an HTTP/2 of their own.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tonic::codegen::Service;
use tonic::codegen::http::HeaderValue;
use tonic::transport::Uri;

use crate::connect::ServerConnector;
use crate::error::{Error, not_connected};
use crate::token::TokenSource;

/// Makes connections with the settings of a client, but without a client on top: for benchmarks and proxies.
///
/// Each connection reads the files of TLS again. [`ClientBuilder::dialer`](crate::ClientBuilder::dialer) makes one.
#[derive(Clone)]
pub struct Dialer {
    pub(crate) endpoint: String,
    pub(crate) address: Uri,
    pub(crate) connector: ServerConnector,
    pub(crate) token: Option<Arc<TokenSource>>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// The endpoint of the server, with scheme and port.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Connects. With TLS the handshake is complete, and both sides have agreed on HTTP/2.
    ///
    /// # Errors
    /// [`ErrorKind::Tls`](crate::ErrorKind::Tls), [`ErrorKind::Connect`](crate::ErrorKind::Connect).
    pub async fn connect(
        &self,
    ) -> Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static, Error> {
        let mut connector = self.connector.clone();
        let connected = async {
            poll_fn(|cx| connector.poll_ready(cx)).await?;
            connector.call(self.address.clone()).await
        };
        match connected.await {
            Ok(stream) => Ok(stream.into_inner()),
            Err(error) => Err(Error::new(not_connected(&*error, &self.endpoint))),
        }
    }

    /// The header `authorization` with the token, if there is one. The file of a token is read again
    /// at most once a second.
    pub fn authorization(&self) -> Option<HeaderValue> {
        self.token.as_ref().map(|token| token.header_value())
    }
}
