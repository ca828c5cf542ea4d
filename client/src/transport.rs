//! The settings with which a client reaches each of its servers.

use std::sync::Arc;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::connect::{LastTlsProblem, ServerConnector};
use crate::endpoint;
use crate::error::{Error, ErrorKind, not_connected};
use crate::nodes::ClientNode;
use crate::tls::TlsSettings;
use crate::token::{CallHeaders, is_loopback};

/// Largest flow-control window of HTTP/2, bytes (RFC 9113, section 6.9.1).
const MOST_WINDOW: u32 = (1 << 31) - 1;

/// Settings that all servers of a client share. Files are read once for all.
pub(crate) struct NodeTransport {
    /// None = plaintext.
    pub(crate) tls: Option<Arc<TlsSettings>>,
    pub(crate) headers: CallHeaders,
    pub(crate) allow_insecure_token: bool,
    pub(crate) connect_timeout: Duration,
    pub(crate) keepalive_interval: Duration,
    pub(crate) keepalive_timeout: Duration,
    pub(crate) shares_appends: bool,
}

/// The way to one server, without a connection.
pub(crate) struct ServerTransport {
    /// The endpoint with scheme and port.
    pub(crate) text: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) connector: ServerConnector,
    last_failure: Arc<LastTlsProblem>,
}

impl NodeTransport {
    /// The endpoint of a server that is named without a scheme.
    pub(crate) fn endpoint_of(&self, address: &str) -> Option<String> {
        let scheme = match self.tls {
            Some(_) => "https",
            None => "http",
        };
        let complete = endpoint::complete(&format!("{scheme}://{address}"));
        complete.ok().map(|complete| complete.text)
    }

    /// A server whose connection is made with the first call.
    ///
    /// # Errors
    /// If these settings do not fit the server: its certificate cannot have its name, or the token
    /// would cross plaintext.
    pub(crate) fn lazy(&self, endpoint: &str) -> Result<ClientNode, Error> {
        let server = self.server(endpoint)?;
        let connector = server.connector.clone();
        let channel = server.endpoint.connect_with_connector_lazy(connector);
        Ok(self.node(server, channel))
    }

    /// A server whose connection is made now.
    ///
    /// # Errors
    /// As [`lazy`](Self::lazy), and if there is no connection.
    pub(crate) async fn connect(&self, endpoint: &str) -> Result<ClientNode, Error> {
        let server = self.server(endpoint)?;
        let connector = server.connector.clone();
        let connecting = server.endpoint.connect_with_connector(connector);
        let channel = connecting
            .await
            .map_err(|error| Error::new(not_connected(&error, &server.text)))?;
        Ok(self.node(server, channel))
    }

    fn node(&self, server: ServerTransport, channel: Channel) -> ClientNode {
        let headers = self.headers.clone();
        let shares_appends = self.shares_appends && headers.step.is_none();
        ClientNode::new(
            server.text,
            channel,
            headers,
            server.last_failure,
            shares_appends,
        )
    }

    /// The way to a server.
    ///
    /// # Errors
    /// As [`lazy`](Self::lazy).
    pub(crate) fn server(&self, endpoint: &str) -> Result<ServerTransport, Error> {
        let complete = endpoint::complete(endpoint).map_err(Error::new)?;
        let text = complete.text;
        let tls = match &self.tls {
            None => None,
            Some(settings) => {
                let name = settings.name(&complete.host);
                let name = name.map_err(|problem| Error::of_tls(problem, &text))?;
                Some((Arc::clone(settings), name))
            }
        };
        if self.headers.token.is_some()
            && tls.is_none()
            && !self.allow_insecure_token
            && !is_loopback(&complete.host)
        {
            let detail = format!(
                "a token must not cross plaintext to {text}: use https://, or allow_insecure_token"
            );
            return Err(Error::new(ErrorKind::Token { detail }));
        }
        let last_failure = Arc::new(LastTlsProblem::default());
        let connector = ServerConnector::new(tls, self.connect_timeout, Arc::clone(&last_failure));
        let invalid = || {
            Error::new(ErrorKind::InvalidEndpoint {
                endpoint: text.clone(),
                why: "",
            })
        };
        let endpoint = Endpoint::from_shared(text.clone()).map_err(|_| invalid())?;
        // tonic refuses https without its own TLS if another crate turns that on. The connector
        // ignores the scheme; calls carry the scheme of the origin.
        let origin = endpoint.uri().clone();
        let plain = format!(
            "http://{}",
            origin
                .authority()
                .map_or("", |authority| authority.as_str())
        );
        let endpoint = Endpoint::from_shared(plain).map_err(|_| invalid())?;
        let endpoint = endpoint
            .origin(origin)
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_timeout)
            .keep_alive_while_idle(true)
            // A scan's messages are up to 1 MiB: a few must be underway for full speed.
            .initial_stream_window_size(4 << 20)
            // h2 gives the connection's window back only when the program reads. Streams that nobody reads must not stop the
            // acks of the others, so their windows together never fill it: 511 streams fit, and the server takes 256.
            .initial_connection_window_size(MOST_WINDOW)
            .user_agent(concat!("wald-client/", env!("CARGO_PKG_VERSION")))
            .map_err(|_| invalid())?;
        Ok(ServerTransport {
            text,
            endpoint,
            connector,
            last_failure,
        })
    }
}
