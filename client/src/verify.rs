//! Verifying the store of a running server.

use std::sync::Arc;

use tonic::Streaming;
use wald_proto::v1;

use crate::client::Client;
use crate::error::Error;
use crate::nodes::ClientNode;

/// A verification under way. Dropping it ends it.
#[derive(Debug)]
pub struct VerifyStream {
    client: Client,
    node: Arc<ClientNode>,
    answers: Streaming<v1::VerifyResponse>,
    done: bool,
}

impl Client {
    /// Has the server check everything that it stores, or one segment, while it serves. The
    /// server reads at most `max_bytes_per_second` (0: no bound) and quarantines damage at
    /// once. Nothing is repeated: a verification that is cut off begins from the start.
    ///
    /// # Errors
    /// SEGMENT_NOT_FOUND, BUSY if too many run, and the errors of every call.
    pub async fn verify(
        &self,
        segment_id: Option<u64>,
        max_bytes_per_second: u64,
    ) -> Result<VerifyStream, Error> {
        let request = v1::VerifyRequest {
            segment_id,
            max_bytes_per_second,
        };
        let timeout = self.silence_timeout();
        let opened = self.open(|node| async move {
            let mut ops = node.ops();
            match tokio::time::timeout(timeout, ops.verify(request)).await {
                Ok(opened) => opened.map_err(|status| node.error(&status, timeout)),
                Err(_) => Err(node.timed_out(timeout)),
            }
        });
        let (node, answers) = opened.await?;
        Ok(VerifyStream {
            client: self.clone(),
            node,
            answers,
            done: false,
        })
    }
}

impl VerifyStream {
    /// The next message: progress, and the findings since the last one. `None` after the last
    /// message, when everything was checked.
    ///
    /// # Errors
    /// If it was cut off: by the connection, by the server shutting down.
    pub async fn next(&mut self) -> Result<Option<v1::VerifyResponse>, Error> {
        if self.done {
            return Ok(None);
        }
        let timeout = self.client.silence_timeout();
        match tokio::time::timeout(timeout, self.answers.message()).await {
            Ok(Ok(Some(answer))) => {
                self.done = answer.done;
                Ok(Some(answer))
            }
            Ok(Ok(None)) => Err(Error::contract("VerifyResponse.done")),
            Ok(Err(status)) => {
                let error = self.node.error(&status, timeout);
                self.client.leave(&self.node, &error);
                Err(error)
            }
            Err(_) => Err(self.node.timed_out(timeout)),
        }
    }
}
