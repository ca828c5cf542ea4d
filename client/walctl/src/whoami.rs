//! `walctl whoami`: the caller as the server sees it.

use anyhow::Result;
use serde_json::{Value, json};
use wald_client::Client;
use wald_client::proto::grant::Logs;
use wald_client::proto::{CredentialKind, GetCallerResponse, Grant, TenantLimits};
use wald_connection::ConnectionChoice;
use wald_text::units::shown_size;

use crate::exit::ExitKind;
use crate::logs::time;
use crate::output::{Out, Output};
use crate::table::Table;

pub(crate) async fn run(
    client: &Client,
    settings: &ConnectionChoice,
    output: Output,
) -> Result<ExitKind> {
    let caller = client.caller().await?;
    let context = settings.context().map(|context| context.name.as_str());
    let mut out = Out::new(output);
    match output {
        Output::Text | Output::Raw | Output::Delimited => out.line(&text(&caller, context))?,
        Output::Json | Output::Jsonl => out.json(&document(&caller, context))?,
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

/// The caller of a server without `auth_file`.
const NOBODY: &str =
    "nobody in particular: the server has no auth_file, and every caller may do everything";

fn text(caller: &GetCallerResponse, context: Option<&str>) -> String {
    if caller.principal.is_empty() {
        return match context {
            Some(context) => format!("context {context}\n{NOBODY}"),
            None => NOBODY.to_owned(),
        };
    }
    let mut table = Table::new();
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    if let Some(context) = context {
        row("context", context.to_owned());
    }
    row("principal", caller.principal.clone());
    if !caller.tenant.is_empty() {
        row("tenant", caller.tenant.clone());
    }
    row("credential", credential(caller));
    if let Some(expires) = time(caller.expire_time.as_ref()) {
        row("expires", expires);
    }
    for grant in &caller.grants {
        row("may", format!("{} {}", grant.rights.join(", "), on(grant)));
    }
    if caller.grants.is_empty() {
        row("may", "nothing".to_owned());
    }
    for (name, value) in caller.limits.iter().flat_map(limits) {
        let shown = match name.contains("bytes") {
            true => shown_size(value),
            false => value.to_string(),
        };
        row("limit", format!("{name} {shown}"));
    }
    table.text()
}

/// The limits of a tenant that are set, by the names that the server's `auth_file` has for them.
fn limits(limits: &TenantLimits) -> impl Iterator<Item = (&'static str, u64)> + use<> {
    let all = [
        ("append_bytes_per_second", limits.append_bytes_per_second),
        ("appends_per_second", limits.appends_per_second),
        ("read_bytes_per_second", limits.read_bytes_per_second),
        ("reads_per_second", limits.reads_per_second),
        ("logs", limits.logs),
        ("producers", limits.producers),
        ("cursors", limits.cursors),
        ("stored_bytes", limits.stored_bytes),
        ("followers", limits.followers),
        ("connections", limits.connections),
        ("inflight_bytes", limits.inflight_bytes),
    ];
    all.into_iter().filter(|(_, value)| *value > 0)
}

fn credential(caller: &GetCallerResponse) -> String {
    match caller.credential() {
        CredentialKind::Certificate => "client certificate".to_owned(),
        CredentialKind::Token => format!("token {}", caller.token_id),
        CredentialKind::Jwt => format!("JWT {}", caller.token_id),
        CredentialKind::Unspecified => "unknown to this walctl".to_owned(),
    }
}

/// The logs of a grant, in words.
fn on(grant: &Grant) -> String {
    match &grant.logs {
        Some(Logs::Prefix(prefix)) if prefix.is_empty() => "on all logs".to_owned(),
        Some(Logs::Prefix(prefix)) => format!("on logs that begin with {prefix}"),
        Some(Logs::Log(name)) => format!("on the log {name}"),
        None => "on the server".to_owned(),
    }
}

fn document(caller: &GetCallerResponse, context: Option<&str>) -> Value {
    let filled = |text: &String| (!text.is_empty()).then(|| text.clone());
    let kind = match caller.credential() {
        CredentialKind::Certificate => Some("certificate"),
        CredentialKind::Token => Some("token"),
        CredentialKind::Jwt => Some("jwt"),
        CredentialKind::Unspecified => None,
    };
    let grants = caller.grants.iter().map(|grant| {
        let (prefix, log) = match &grant.logs {
            Some(Logs::Prefix(prefix)) => (Some(prefix), None),
            Some(Logs::Log(name)) => (None, Some(name)),
            None => (None, None),
        };
        json!({ "rights": grant.rights, "prefix": prefix, "log": log })
    });
    json!({
        "context": context,
        "principal": filled(&caller.principal),
        "tenant": filled(&caller.tenant),
        "credential": kind,
        "token_id": filled(&caller.token_id),
        "expire_time": time(caller.expire_time.as_ref()),
        "grants": grants.collect::<Vec<_>>(),
        "limits": caller.limits.as_ref().map(|all| {
            let all = limits(all).map(|(name, value)| (name.to_owned(), value.into()));
            all.collect::<serde_json::Map<_, Value>>()
        }),
    })
}
