//! Backup: steps of the engine as messages, as fast as the caller takes them and wants.
//!
//! The stream is pulled by the transport, so a client that stops reading stops the
//! reading of files; one that goes away ends the backup.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream;
use tokio::sync::watch;
use tonic::Status;
use wald_proto::v1;
use wald_storage::{Backup, BackupPart, ContentDigest};

use super::{Answers, Node};
use crate::auth::{Caller, HeldRight, ServerRight, leased};
use crate::backups::keys::manifest_file;
use crate::convert;
use crate::drain::{Phase, draining};
use crate::status::{self, Access};

pub(super) async fn backup(
    node: &Arc<Node>,
    caller: &Caller,
    request: v1::BackupRequest,
) -> Result<Answers<v1::BackupResponse>, Status> {
    let store = node.store(Access::Read)?;
    let known = request
        .known_digests
        .iter()
        .filter_map(|digest| ContentDigest::from_bytes(digest))
        .collect::<HashSet<_>>();
    let began = Instant::now();
    let backup = store
        .engine
        .backup(&caller.allow_server(ServerRight::Backup)?, known)
        .await
        .map_err(|error| status::backup(&error))?;
    let delivery = BackupDelivery {
        node: Arc::clone(node),
        phase: node.phase.clone(),
        backup,
        pace: SendPace {
            began,
            bytes: 0,
            per_second: request.max_bytes_per_second,
        },
        began,
        sent: 0,
        ended: false,
    };
    let answers = Box::pin(stream::unfold(delivery, BackupDelivery::step));
    let lease = caller.lease(HeldRight::Server(ServerRight::Backup));
    Ok(leased(lease, answers))
}

/// A backup on its way to a client.
struct BackupDelivery {
    node: Arc<Node>,
    phase: watch::Receiver<Phase>,
    backup: Box<dyn Backup>,
    pace: SendPace,
    began: Instant,
    sent: u64,
    ended: bool,
}

/// Rate limit of the backup.
struct SendPace {
    began: Instant,
    bytes: u64,
    /// 0 = as fast as it can.
    per_second: u64,
}

impl SendPace {
    /// Time at which the rate permits further reading.
    fn due(&self) -> Option<Instant> {
        if self.per_second == 0 {
            return None;
        }
        let micros = u128::from(self.bytes) * 1_000_000 / u128::from(self.per_second);
        let micros = u64::try_from(micros).unwrap_or(u64::MAX);
        self.began.checked_add(Duration::from_micros(micros))
    }
}

impl BackupDelivery {
    /// One message and the rest, or the end.
    async fn step(mut self) -> Option<(Result<v1::BackupResponse, Status>, Self)> {
        if self.ended {
            return None;
        }
        let part = loop {
            if let Some(due) = self.pace.due() {
                tokio::select! {
                    () = draining(&mut self.phase) => break Err(status::draining()),
                    () = tokio::time::sleep_until(due.into()) => {}
                }
            }
            if *self.phase.borrow() == Phase::Draining {
                break Err(status::draining());
            }
            match self.backup.next().await {
                Ok(Some(BackupPart::Read(bytes))) => self.pace.bytes += bytes,
                Ok(Some(BackupPart::Manifest(manifest))) => {
                    if !manifest.damage.is_empty() {
                        tracing::error!(
                            places = manifest.damage.len(),
                            "a backup holds damage; verify the store"
                        );
                    }
                    let key = self.node.signing_key.as_ref();
                    break Ok(convert::backup_manifest(manifest_file(&manifest, key)));
                }
                Ok(Some(BackupPart::Chunk { file, offset, data })) => {
                    self.pace.bytes += data.len() as u64;
                    self.sent += data.len() as u64;
                    break Ok(convert::backup_chunk(file, offset, data));
                }
                Ok(None) => {
                    let (took, bytes) = (self.began.elapsed(), self.sent);
                    self.node.metrics.backed_up(took, bytes);
                    tracing::info!(bytes, seconds = took.as_secs_f64(), "a backup was taken");
                    return None;
                }
                Err(error) => break Err(status::backup(&error)),
            }
        };
        self.ended = part.is_err();
        Some((part, self))
    }
}
