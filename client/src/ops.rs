//! State of logs, barriers, administration, health: the calls without a builder.

use std::sync::Arc;
use std::time::Duration;

use prost_types::FieldMask;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use wald_proto::v1;
use wald_proto::v1::{SyncTarget, Visibility};

use crate::client::Client;
use crate::error::Error;
use crate::lsn::Lsn;
use crate::nodes::ClientNode;
use crate::retry::Repeat;
use crate::shared::looked_after;

/// State of a log.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail {
    /// The first lsn kept.
    pub first_lsn: Lsn,
    /// The next lsn, at the requested visibility.
    pub tail_lsn: Lsn,
    /// Every lsn below it is flushed to the device.
    pub durable_lsn: Option<Lsn>,
    /// Every lsn below it is in the bucket of a replica. None without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// The writer epoch; 0 until the first fence.
    pub writer_epoch: u64,
    /// Rises with every unclean start of the server.
    pub recovery_epoch: u64,
    /// The log's number, unique for ever.
    pub log_id: u64,
}

/// Older writers are shut out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced {
    /// The tail that no older writer can pass.
    pub tail_lsn: Lsn,
    /// The writer epoch now: appends must name it.
    pub writer_epoch: u64,
    /// The log's number, unique for ever.
    pub log_id: u64,
}

/// A page of logs.
#[derive(Debug, Clone, PartialEq)]
pub struct LogPage {
    /// The logs, by name.
    pub logs: Vec<v1::Log>,
    /// Asks for the next page. None: this was the last.
    pub next_page_token: Option<String>,
}

/// A page of the journal's segments.
#[derive(Debug, Clone, PartialEq)]
pub struct SegmentPage {
    /// The segments, oldest position first.
    pub segments: Vec<v1::Segment>,
    /// Asks for the next page. None: this was the last.
    pub next_page_token: Option<String>,
}

/// A backup that is being received. Dropping it ends it.
#[derive(Debug)]
pub struct BackupStream {
    client: Client,
    node: Arc<ClientNode>,
    parts: tonic::Streaming<v1::BackupResponse>,
}

impl BackupStream {
    /// The next part: the manifest first, then content in its order; None at the end.
    ///
    /// # Errors
    /// The server's errors, and a lost connection.
    pub async fn next(&mut self) -> Result<Option<v1::backup_response::Part>, Error> {
        let silence = self.client.silence_timeout();
        match self.parts.message().await {
            Ok(None) => Ok(None),
            Ok(Some(response)) => match response.part {
                Some(part) => Ok(Some(part)),
                None => Err(Error::contract("BackupResponse.part")),
            },
            Err(status) => {
                let error = self.node.error(&status, silence);
                self.client.leave(&self.node, &error);
                Err(error)
            }
        }
    }
}

/// Whether a service can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It can.
    Serving,
    /// It cannot now: the server starts, drains, or its journal has failed.
    NotServing,
    /// The server does not say.
    Unknown,
}

/// Makes a unary call with a stub of the client.
macro_rules! call {
    ($client:expr, $stub:ident . $method:ident, $repeat:expr, $request:expr) => {
        call!(
            $client,
            $stub.$method,
            $repeat,
            $request,
            $client.default_timeout()
        )
    };
    ($client:expr, $stub:ident . $method:ident, $repeat:expr, $request:expr, $timeout:expr) => {{
        let send = |node: &std::sync::Arc<crate::nodes::ClientNode>,
                    attempt: crate::client::CallAttempt<_>| {
            let mut stub = node.$stub();
            async move { stub.$method(attempt.into_request()).await }
        };
        $client.call($request, $repeat, $timeout, send).await
    }};
}

pub(crate) use call;

impl Client {
    /// Begins a backup of the store. Content with a digest of `known_digests` is not sent.
    /// At most `max_bytes_per_second` are read; 0 is no bound. It takes as long as it takes:
    /// there is no deadline.
    ///
    /// # Errors
    /// BUSY while four run, and the errors of every call.
    pub async fn backup(
        &self,
        known_digests: Vec<bytes::Bytes>,
        max_bytes_per_second: u64,
    ) -> Result<BackupStream, Error> {
        let request = v1::BackupRequest {
            known_digests,
            max_bytes_per_second,
        };
        let timeout = self.default_timeout();
        let opened = self.open(|node| {
            let request = request.clone();
            async move {
                let mut ops = node.ops();
                let opened = looked_after(ops.backup(request), node.health_service()).await;
                opened.map_err(|status| node.error(&status, timeout))
            }
        });
        let (node, parts) = opened.await?;
        Ok(BackupStream {
            client: self.clone(),
            node,
            parts,
        })
    }

    /// Returns the state of a log. With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn get_tail(
        &self,
        log: impl Into<String>,
        visibility: Visibility,
        log_id: Option<u64>,
    ) -> Result<Tail, Error> {
        let request = v1::GetTailRequest {
            log: log.into(),
            visibility: visibility.into(),
            log_id,
            ..Default::default()
        };
        let answer = call!(self, wal.get_tail, Repeat::Read, request)?;
        Ok(Tail {
            first_lsn: answer
                .first_lsn
                .ok_or(Error::contract("GetTailResponse.first_lsn"))?
                .into(),
            tail_lsn: answer
                .tail_lsn
                .ok_or(Error::contract("GetTailResponse.tail_lsn"))?
                .into(),
            durable_lsn: answer.durable_lsn.map(Lsn::new),
            replicated_lsn: answer.replicated_lsn.map(Lsn::new),
            writer_epoch: answer.writer_epoch(),
            recovery_epoch: answer.recovery_epoch,
            log_id: answer.log_id,
        })
    }

    /// End of the survivors of an older recovery epoch: an append acked in that epoch survived
    /// if and only if its position is below. None if that epoch is the current one, in which
    /// nothing is lost so far. With a `log_id`, only if it is that log.
    ///
    /// An ack without a position was in the server's memory only; it survived if a
    /// [`sync`](Self::sync) answered after it.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn survived_position(
        &self,
        log: impl Into<String>,
        recovery_epoch: u64,
        log_id: Option<u64>,
    ) -> Result<Option<u64>, Error> {
        let request = v1::GetTailRequest {
            log: log.into(),
            recovery_epoch: Some(recovery_epoch),
            log_id,
            ..Default::default()
        };
        let answer = call!(self, wal.get_tail, Repeat::Read, request)?;
        Ok(answer.survived_position)
    }

    /// Forgets the records below `before`, durably; returns the first lsn kept. A repeated trim
    /// changes nothing. With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, BEYOND_TAIL, LOG_REPLACED, and the errors of every call.
    pub async fn trim(
        &self,
        log: impl Into<String>,
        before: Lsn,
        log_id: Option<u64>,
    ) -> Result<Lsn, Error> {
        let request = v1::TrimRequest {
            log: log.into(),
            before_lsn: before.get(),
            log_id,
        };
        // A repeat has no further effect, except on a log that was created later under the
        // name.
        let repeat = match log_id {
            Some(_) => Repeat::Harmless,
            None => Repeat::Harmful,
        };
        let answer = call!(self, wal.trim, repeat, request)?;
        answer
            .first_lsn
            .map(Lsn::new)
            .ok_or(Error::contract("TrimResponse.first_lsn"))
    }

    /// Shuts out older writers, durably: raises the log's writer epoch to `writer_epoch`, or
    /// by one, and returns the tail that no older writer can pass. From then on, appends
    /// must name the epoch ([`Condition::writer_epoch`](crate::Condition::writer_epoch)).
    /// With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// FENCED, if `writer_epoch` does not exceed the current one; LOG_NOT_FOUND, LOG_REPLACED, and
    /// the errors of every call.
    pub async fn fence(
        &self,
        log: impl Into<String>,
        writer_epoch: Option<u64>,
        log_id: Option<u64>,
    ) -> Result<Fenced, Error> {
        let request = v1::FenceRequest {
            log: log.into(),
            writer_epoch,
            log_id,
        };
        let repeat = match (writer_epoch, log_id) {
            // The second time the epoch no longer exceeds the current one.
            (Some(_), _) => Repeat::Guarded,
            // A repeat raises the epoch twice; the caller still holds the newest.
            (None, Some(_)) => Repeat::Harmless,
            // But it could shut out the writer of a log that was created later under the name.
            (None, None) => Repeat::Harmful,
        };
        let answer = call!(self, wal.fence, repeat, request)?;
        Ok(Fenced {
            tail_lsn: answer
                .tail_lsn
                .ok_or(Error::contract("FenceResponse.tail_lsn"))?
                .into(),
            writer_epoch: answer
                .writer_epoch
                .ok_or(Error::contract("FenceResponse.writer_epoch"))?,
            log_id: answer.log_id,
        })
    }

    /// Waits until everything accepted before, of one log or of all, has reached its target.
    /// Returns the position below which everything is flushed to the device.
    ///
    /// # Errors
    /// JOURNAL_FAILED, and the errors of every call.
    pub async fn sync(
        &self,
        target: SyncTarget,
        log: Option<String>,
    ) -> Result<Option<u64>, Error> {
        let request = v1::SyncRequest {
            target: target.into(),
            log: log.unwrap_or_default(),
        };
        let answer = call!(self, wal.sync, Repeat::Harmless, request)?;
        Ok(answer.durable_position)
    }

    /// Makes a log.
    ///
    /// # Errors
    /// LOG_EXISTS, INVALID_LOG_NAME, and the errors of every call.
    pub async fn create_log(
        &self,
        log: impl Into<String>,
        config: v1::LogConfig,
    ) -> Result<v1::Log, Error> {
        let request = v1::CreateLogRequest {
            log: log.into(),
            config: Some(config),
        };
        let answer = call!(self, log_service.create_log, Repeat::Harmful, request)?;
        answer.log.ok_or(Error::contract("CreateLogResponse.log"))
    }

    /// One log: its configuration and where it stands.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, and the errors of every call.
    pub async fn get_log(&self, log: impl Into<String>) -> Result<v1::Log, Error> {
        let request = v1::GetLogRequest { log: log.into() };
        let answer = call!(self, log_service.get_log, Repeat::Read, request)?;
        answer.log.ok_or(Error::contract("GetLogResponse.log"))
    }

    /// A page of the logs whose names start with `prefix`, by name. `page_size` is the maximum
    /// number of logs; 0 is the server's default (100). No token begins at the start.
    ///
    /// # Errors
    /// INVALID_PAGE_TOKEN, and the errors of every call.
    pub async fn list_logs(
        &self,
        prefix: impl Into<String>,
        page_size: u32,
        page_token: Option<String>,
    ) -> Result<LogPage, Error> {
        let request = v1::ListLogsRequest {
            page_size,
            page_token: page_token.unwrap_or_default(),
            prefix: prefix.into(),
        };
        let answer = call!(self, log_service.list_logs, Repeat::Read, request)?;
        Ok(LogPage {
            logs: answer.logs,
            next_page_token: Some(answer.next_page_token).filter(|token| !token.is_empty()),
        })
    }

    /// Changes the configuration of a log: the fields that `paths` name, such as
    /// `sync_mode` or `retention.max_age`.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, INVALID_UPDATE_MASK, and the errors of every call.
    pub async fn update_log<P>(
        &self,
        log: impl Into<String>,
        config: v1::LogConfig,
        paths: P,
    ) -> Result<v1::Log, Error>
    where
        P: IntoIterator,
        P::Item: Into<String>,
    {
        let paths = paths.into_iter().map(Into::into).collect();
        let request = v1::UpdateLogRequest {
            log: log.into(),
            config: Some(config),
            update_mask: Some(FieldMask { paths }),
        };
        let answer = call!(self, log_service.update_log, Repeat::Harmless, request)?;
        answer.log.ok_or(Error::contract("UpdateLogResponse.log"))
    }

    /// Deletes a log with all its records. With a `log_id`, only if it is that one.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn delete_log(
        &self,
        log: impl Into<String>,
        log_id: Option<u64>,
    ) -> Result<(), Error> {
        self.delete(log.into(), log_id, false).await
    }

    /// Deletes a log, and destroys its keys: then its records cannot be read from any backup, archive or copy of the
    /// store. With a `log_id`, only if it is that one.
    ///
    /// # Errors
    /// NO_OWN_KEY, and nothing was deleted; LOG_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn shred_log(
        &self,
        log: impl Into<String>,
        log_id: Option<u64>,
    ) -> Result<(), Error> {
        self.delete(log.into(), log_id, true).await
    }

    async fn delete(&self, log: String, log_id: Option<u64>, shred: bool) -> Result<(), Error> {
        let request = v1::DeleteLogRequest { log, log_id, shred };
        call!(self, log_service.delete_log, Repeat::Harmful, request)?;
        Ok(())
    }

    /// The server's identity, its limits, and the real promises of its flushes.
    ///
    /// # Errors
    /// The errors of every call.
    pub async fn server_info(&self) -> Result<v1::GetServerInfoResponse, Error> {
        call!(
            self,
            ops.get_server_info,
            Repeat::Read,
            v1::GetServerInfoRequest {}
        )
    }

    /// The caller as the server sees it: principal, rights, and the expiry of the credential.
    ///
    /// # Errors
    /// The errors of every call.
    pub async fn caller(&self) -> Result<v1::GetCallerResponse, Error> {
        call!(self, ops.get_caller, Repeat::Read, v1::GetCallerRequest {})
    }

    /// A page of the journal's segments, oldest position first. A `page_size` of 0 is the
    /// server's default (100); no token begins at the start.
    ///
    /// # Errors
    /// INVALID_PAGE_TOKEN, and the errors of every call.
    pub async fn list_segments(
        &self,
        page_size: u32,
        page_token: Option<String>,
    ) -> Result<SegmentPage, Error> {
        let request = v1::ListSegmentsRequest {
            page_size,
            page_token: page_token.unwrap_or_default(),
        };
        let answer = call!(self, ops.list_segments, Repeat::Read, request)?;
        Ok(SegmentPage {
            segments: answer.segments,
            next_page_token: Some(answer.next_page_token).filter(|token| !token.is_empty()),
        })
    }

    /// Ends the current server as SIGTERM does. The server turns not ready, accepts calls for `delay` (None:
    /// its setting `drain_delay`), finishes accepted calls, flushes, and ends. Returns as soon as the
    /// server drains: true if it was draining already.
    ///
    /// # Errors
    /// The errors of every call.
    pub async fn drain(&self, delay: Option<Duration>) -> Result<bool, Error> {
        let request = v1::DrainRequest {
            // A span that is too long for the wire is the longest one.
            delay: delay.map(|delay| {
                delay.try_into().unwrap_or(prost_types::Duration {
                    seconds: i64::MAX,
                    nanos: 0,
                })
            }),
        };
        // A repeat at another server would end that one, too.
        let here = self.pinned();
        let answer = call!(here, ops.drain, Repeat::Harmless, request)?;
        Ok(answer.already_draining)
    }

    /// Whether a service can be used; an empty name asks for the server as a whole.
    ///
    /// # Errors
    /// NOT_FOUND for a service that the server does not have, and the errors of every call.
    pub async fn health(&self, service: impl Into<String>) -> Result<Health, Error> {
        let request = HealthCheckRequest {
            service: service.into(),
        };
        let answer = call!(self, health_service.check, Repeat::Read, request)?;
        Ok(match answer.status() {
            ServingStatus::Serving => Health::Serving,
            ServingStatus::NotServing => Health::NotServing,
            ServingStatus::Unknown | ServingStatus::ServiceUnknown => Health::Unknown,
        })
    }
}
