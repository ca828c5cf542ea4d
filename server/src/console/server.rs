//! A description of this server: its version, settings, the findings of its start, and the
//! meaning of a flush.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use wald_storage::{Clock, DurabilityTruth, Gap, RecoveryReport, SystemClock};

use super::records::GapView;
use super::{Console, Json, history};
use crate::auth::{Caller, LogRight, ServerRight};
use crate::config::{Config, SettingValue as _};
use crate::convert;
use crate::serve::recovery_result;

/// Maximum number of damaged ranges that are listed. The total number is reported, too.
const MAX_DAMAGE: usize = 100;

/// The configuration as the page shows it.
#[derive(Clone, Serialize)]
pub(super) struct SettingsView {
    /// `None`: for people with the right ops alone.
    data_dir: Option<String>,
    grpc: String,
    http: String,
    sync_mode: String,
    sync_interval: String,
    segment_bytes: u64,
    max_inflight_bytes: u64,
    auto_create: bool,
    protection: ProtectionView,
    #[serde(skip)]
    warnings: Vec<String>,
}

impl SettingsView {
    pub(super) fn new(config: &Config, grpc: SocketAddr, http: Option<SocketAddr>) -> Self {
        let mut warnings: Vec<String> = config.can_be_lost().into_iter().collect();
        if let Some(warning) = config.exposed() {
            warnings.push(format!("gRPC on {grpc}: {warning}"));
        }
        if !config.http_listen.ip().is_loopback() {
            let form = match (config.http_tls, config.has_auth()) {
                (false, _) => Some("in plaintext"),
                (true, false) => Some("without a login"),
                (true, true) => None,
            };
            warnings.extend(form.map(|form| {
                format!("this console is served {form} where other machines can reach it")
            }));
        }
        Self {
            data_dir: Some(config.data_dir.display().to_string()),
            grpc: grpc.to_string(),
            http: http.map(|http| http.to_string()).unwrap_or_default(),
            sync_mode: config.sync_mode.show(),
            sync_interval: config.sync_interval.show(),
            segment_bytes: config.segment_bytes.0,
            max_inflight_bytes: config.max_inflight_bytes.0,
            auto_create: config.auto_create,
            protection: ProtectionView {
                tls: config.has_tls(),
                client_certificates: config.tls_client_auth.show(),
                principals: config.has_auth(),
            },
            warnings,
        }
    }
}

/// The protection of the gRPC port against strangers.
#[derive(Clone, Serialize)]
struct ProtectionView {
    tls: bool,
    /// off, optional or require.
    client_certificates: String,
    principals: bool,
}

/// A description of this server.
#[derive(Serialize)]
pub(super) struct ServerView {
    version: &'static str,
    start_time_us: i64,
    now_us: i64,
    settings: SettingsView,
    /// The principal of the person; `None` without `auth_file`.
    principal: Option<String>,
    state: history::EngineView,
    /// Warnings for people, in sentences.
    warnings: Vec<String>,
    /// Absent while it starts.
    store: Option<StoreView>,
}

/// The store, when it is open.
#[derive(Serialize)]
struct StoreView {
    store_id: String,
    recovery_epoch: u64,
    max_record_bytes: u32,
    recovery: Recovery,
    /// `None`: for people with the right ops alone.
    durability: Option<DurabilityView>,
    /// `None` without a replica, and for people without the right ops.
    replica: Option<ReplicaPlace>,
}

/// The place of the replica, and the name of this node there.
#[derive(Serialize)]
struct ReplicaPlace {
    bucket_url: String,
    node_id: String,
}

/// The findings of the start.
#[derive(Serialize)]
struct Recovery {
    result: &'static str,
    seconds: f64,
    logs: u64,
    records: u64,
    segments: u64,
    torn_bytes: u64,
    damaged_ranges: usize,
    damage: Vec<GapView>,
    findings: Vec<String>,
}

impl Recovery {
    /// The findings that the caller may see.
    fn new(report: &RecoveryReport, caller: &Caller) -> Self {
        let is_operator = caller.may_operate(ServerRight::Ops);
        let is_shown = |gap: &&Gap| match &gap.log {
            Some(log) => caller.may(LogRight::Read, log.as_str()),
            None => is_operator,
        };
        let shown = report.damage.iter().filter(is_shown);
        let findings = match is_operator {
            true => report.findings.clone(),
            false => Vec::new(),
        };
        Self {
            result: recovery_result(report),
            seconds: report.duration.as_secs_f64(),
            logs: report.logs,
            records: report.records,
            segments: report.segments,
            torn_bytes: report.torn_bytes,
            damaged_ranges: report.damage.len(),
            damage: shown.take(MAX_DAMAGE).map(GapView::new).collect(),
            findings,
        }
    }
}

/// The meaning of DURABLE on this machine.
#[derive(Serialize)]
struct DurabilityView {
    file_system: String,
    sync_primitive: &'static str,
    flush_p50: f64,
    flush_p99: f64,
    volatile: bool,
}

impl DurabilityView {
    fn new(truth: DurabilityTruth) -> Self {
        Self {
            file_system: truth.file_system,
            sync_primitive: truth.sync_primitive,
            flush_p50: truth.flush_p50.as_secs_f64(),
            flush_p99: truth.flush_p99.as_secs_f64(),
            volatile: truth.volatile,
        }
    }
}

impl Console {
    pub(super) fn server(&self, caller: &Caller) -> ServerView {
        let is_operator = caller.may_operate(ServerRight::Ops);
        let mut settings = self.settings.clone();
        settings.data_dir = settings.data_dir.filter(|_| is_operator);
        let mut warnings = settings.warnings.clone();
        let store = self.node.store.get().map(|store| {
            let truth = store.engine.durability_truth();
            if is_operator {
                warnings.extend(truth.caveats.iter().cloned());
            }
            let profile = store.engine.profile();
            StoreView {
                store_id: convert::uuid(profile.store_id),
                recovery_epoch: profile.recovery_epoch.get(),
                max_record_bytes: profile.limits.max_record_bytes,
                recovery: Recovery::new(&store.report, caller),
                durability: is_operator.then(|| DurabilityView::new(truth)),
                replica: self.node.replica().filter(|_| is_operator).map(|replica| {
                    let now = replica.now();
                    ReplicaPlace {
                        bucket_url: now.bucket_url,
                        node_id: now.node_id,
                    }
                }),
            }
        });
        ServerView {
            version: env!("CARGO_PKG_VERSION"),
            start_time_us: self.node.start_time.micros(),
            now_us: SystemClock.now().micros(),
            settings,
            principal: (caller.identity()).map(|identity| identity.principal().name.clone()),
            state: history::EngineView::of(&self.node),
            warnings,
            store,
        }
    }
}

/// `GET /console/api/server`
pub(super) async fn server(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    Json(console.server(&caller)).into_response()
}
