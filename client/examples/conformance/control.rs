//! The control endpoint: faults of the daemon and of its connections.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Has the harness do something; answers when it is done.
pub(crate) async fn request(endpoint: &str, action: &str, arguments: &Value) -> Result<()> {
    let host = endpoint.strip_prefix("http://").unwrap_or(endpoint);
    let mut stream = TcpStream::connect(host).await.context("control")?;
    let body = arguments.to_string();
    let request = format!(
        "POST /{action} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).unwrap_or_default();
    if !status.starts_with('2') {
        bail!("control {action}: {answer}");
    }
    Ok(())
}
