//! Verifying the store of a running server.

use tonic::Streaming;
use wald_proto::v1;

use crate::client::Client;
use crate::error::Error;

/// A verification under way. Dropping it ends it.
#[derive(Debug)]
pub struct VerifyStream {
    client: Client,
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
        let mut ops = self.ops();
        match tokio::time::timeout(timeout, ops.verify(request)).await {
            Ok(Ok(answer)) => Ok(VerifyStream {
                client: self.clone(),
                answers: answer.into_inner(),
                done: false,
            }),
            Ok(Err(status)) => Err(self.error(&status, timeout)),
            Err(_) => Err(self.timed_out(timeout)),
        }
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
            Ok(Err(status)) => Err(self.client.error(&status, timeout)),
            Err(_) => Err(self.client.timed_out(timeout)),
        }
    }
}
