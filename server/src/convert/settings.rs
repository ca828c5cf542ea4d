//! Settings of logs, both ways.

use std::time::Duration;

use tonic::Status;
use wald_proto::v1::{self, Reason};
use wald_storage::{
    Compression, EngineKind, Limits, LogConfig, LogConfigChange, Retention, RetentionBounds,
    RetentionChange, SyncMode,
};

use crate::status::{self, Access};

/// The longest `google.protobuf.Duration`: some 10,000 years.
const MAX_SECONDS: i64 = 315_576_000_000;

/// The settings of a new log.
pub(crate) fn log_config(
    config: Option<v1::LogConfig>,
    limits: &Limits,
) -> Result<LogConfig, Status> {
    let config = config.unwrap_or_default();
    Ok(LogConfig {
        sync_mode: sync_mode(config.sync_mode)?,
        retention: retention(config.retention.as_ref())?,
        compression: compression(config.compression)?,
        max_record_bytes: max_record_bytes(&config, limits)?,
    })
}

/// The changes of an update: the fields that the mask names, or without a mask the fields that
/// are set. A path covers the fields within it.
pub(crate) fn log_config_change(
    request: &v1::UpdateLogRequest,
    limits: &Limits,
) -> Result<LogConfigChange, Status> {
    let config = request.config.unwrap_or_default();
    let paths = request.update_mask.as_ref().map_or(&[][..], |m| &m.paths);
    let mut change = LogConfigChange::default();
    if paths.is_empty() {
        let own = retention(config.retention.as_ref())?;
        change.retention = own.map(|own| RetentionChange::Whole(Some(own)));
        change.sync_mode = sync_mode(config.sync_mode)?.map(Some);
        change.compression = compression(config.compression)?.map(Some);
        change.max_record_bytes = max_record_bytes(&config, limits)?.map(Some);
        return Ok(change);
    }
    let mut bounds = RetentionBounds::default();
    for path in paths {
        match path.as_str() {
            "max_record_bytes" => {
                change.max_record_bytes = Some(max_record_bytes(&config, limits)?);
            }
            "sync_mode" => change.sync_mode = Some(sync_mode(config.sync_mode)?),
            "compression" => change.compression = Some(compression(config.compression)?),
            "retention" => {
                let own = retention(config.retention.as_ref())?;
                change.retention = Some(RetentionChange::Whole(own));
            }
            "retention.max_age"
            | "retention.max_bytes"
            | "retention.max_records"
            | "retention.respect_cursors" => {
                let given = retention(config.retention.as_ref())?.unwrap_or_default();
                match path.as_str() {
                    "retention.max_age" => bounds.max_age = Some(given.max_age),
                    "retention.max_bytes" => bounds.max_bytes = Some(given.max_bytes),
                    "retention.max_records" => bounds.max_records = Some(given.max_records),
                    _ => bounds.respect_cursors = Some(given.respect_cursors),
                }
            }
            unknown => {
                return Err(status::invalid_field(
                    Reason::InvalidUpdateMask,
                    "update_mask",
                    &format!("LogConfig has no field {unknown:?}"),
                    Access::Write,
                ));
            }
        }
    }
    if bounds != RetentionBounds::default() && change.retention.is_none() {
        change.retention = Some(RetentionChange::Bounds(bounds));
    }
    Ok(change)
}

/// A log's own retention; `None` = the server's.
fn retention(own: Option<&v1::Retention>) -> Result<Option<Box<Retention>>, Status> {
    let Some(own) = own else {
        return Ok(None);
    };
    let bound = |number: u64| (number != 0).then_some(number);
    Ok(Some(Box::new(Retention {
        max_age: own.max_age.as_ref().map(max_age).transpose()?.flatten(),
        max_bytes: bound(own.max_bytes),
        max_records: bound(own.max_records),
        respect_cursors: own.respect_cursors,
    })))
}

fn max_age(age: &prost_types::Duration) -> Result<Option<Duration>, Status> {
    let well_formed =
        (0..=MAX_SECONDS).contains(&age.seconds) && (0..1_000_000_000).contains(&age.nanos);
    match Duration::try_from(*age) {
        Ok(age) if well_formed => Ok((!age.is_zero()).then_some(age)),
        _ => Err(status::invalid_field(
            Reason::InvalidLogConfig,
            "config.retention.max_age",
            &format!(
                "{} s and {} ns is no age: it must be 0 to {MAX_SECONDS} s, and 0 to 999,999,999 ns",
                age.seconds, age.nanos
            ),
            Access::Write,
        )),
    }
}

/// A retention as it was given.
pub(crate) fn proto_retention(retention: &Retention) -> v1::Retention {
    let max_age = retention.max_age.and_then(|age| age.try_into().ok());
    v1::Retention {
        max_age,
        max_bytes: retention.max_bytes.unwrap_or(0),
        max_records: retention.max_records.unwrap_or(0),
        respect_cursors: retention.respect_cursors,
    }
}

/// A log's own sync mode; `None` = the server's.
fn sync_mode(number: i32) -> Result<Option<SyncMode>, Status> {
    match v1::SyncMode::try_from(number) {
        Ok(v1::SyncMode::Unspecified) => Ok(None),
        Ok(v1::SyncMode::Strict) => Ok(Some(SyncMode::Strict)),
        Ok(v1::SyncMode::Batch) => Ok(Some(SyncMode::Batch)),
        Ok(v1::SyncMode::Interval) => Ok(Some(SyncMode::Interval)),
        Ok(v1::SyncMode::Async) => Ok(Some(SyncMode::Async)),
        Ok(v1::SyncMode::Manual) => Ok(Some(SyncMode::Manual)),
        Ok(v1::SyncMode::Replicated) => Ok(Some(SyncMode::Replicated)),
        Err(_) => Err(status::not_supported_value(
            "config.sync_mode",
            number,
            Access::Write,
        )),
    }
}

/// A log's compression; `None` = the server's, which is none. One that this build does
/// not have is not supported.
fn compression(number: i32) -> Result<Option<Compression>, Status> {
    let codec = match v1::Compression::try_from(number) {
        Ok(v1::Compression::Unspecified) => return Ok(None),
        Ok(v1::Compression::None) => Compression::None,
        Ok(v1::Compression::Lz4) => Compression::Lz4,
        Ok(v1::Compression::Zstd) if Compression::Zstd.is_built() => Compression::Zstd,
        Ok(unbuilt @ v1::Compression::Zstd) => {
            let name = unbuilt.as_str_name();
            return Err(status::not_supported_value(
                "config.compression",
                name,
                Access::Write,
            ));
        }
        Err(_) => {
            return Err(status::not_supported_value(
                "config.compression",
                number,
                Access::Write,
            ));
        }
    };
    Ok(Some(codec))
}

fn max_record_bytes(config: &v1::LogConfig, limits: &Limits) -> Result<Option<u32>, Status> {
    if config.max_record_bytes > limits.max_record_bytes {
        return Err(status::invalid_field(
            Reason::InvalidLogConfig,
            "config.max_record_bytes",
            &format!(
                "{} is above the server's limit of {}, which a log can only lower",
                config.max_record_bytes, limits.max_record_bytes
            ),
            Access::Write,
        ));
    }
    Ok((config.max_record_bytes != 0).then_some(config.max_record_bytes))
}

/// A log's settings as they were given.
pub(super) fn proto_log_config(config: &LogConfig) -> v1::LogConfig {
    let sync_mode = config
        .sync_mode
        .map_or(v1::SyncMode::Unspecified, proto_sync_mode);
    let codec = match config.compression {
        None => v1::Compression::Unspecified,
        Some(Compression::None) => v1::Compression::None,
        Some(Compression::Lz4) => v1::Compression::Lz4,
        Some(Compression::Zstd) => v1::Compression::Zstd,
    };
    v1::LogConfig {
        sync_mode: sync_mode.into(),
        compression: codec.into(),
        max_record_bytes: config.max_record_bytes.unwrap_or(0),
        retention: config.retention.as_deref().map(proto_retention),
    }
}

/// Every sync mode that a log can have.
pub(crate) fn sync_modes(has_replica: bool) -> Vec<v1::SyncMode> {
    let local = [
        SyncMode::Strict,
        SyncMode::Batch,
        SyncMode::Interval,
        SyncMode::Async,
        SyncMode::Manual,
    ];
    let replicated = has_replica.then_some(SyncMode::Replicated);
    let all = local.into_iter().chain(replicated);
    all.map(proto_sync_mode).collect()
}

/// The kind of an engine as the contract has it.
pub(crate) fn engine_kind(kind: EngineKind) -> v1::EngineKind {
    match kind {
        EngineKind::Local => v1::EngineKind::Local,
        EngineKind::Object => v1::EngineKind::Object,
    }
}

/// A sync mode as the contract has it.
pub(crate) fn proto_sync_mode(mode: SyncMode) -> v1::SyncMode {
    match mode {
        SyncMode::Strict => v1::SyncMode::Strict,
        SyncMode::Batch => v1::SyncMode::Batch,
        SyncMode::Interval => v1::SyncMode::Interval,
        SyncMode::Async => v1::SyncMode::Async,
        SyncMode::Manual => v1::SyncMode::Manual,
        SyncMode::Replicated => v1::SyncMode::Replicated,
    }
}
