//! A caller and its rights, and the protection of the server, as messages.

use wald_proto::v1::{self, grant::Logs};

use super::proto_timestamp;
use crate::audit::ShownCredential;
use crate::auth::{Identity, LogRight, Scope, TenantLimits};
use crate::config::{ClientAuth, Config};

/// The answer of GetCaller. `None`: there is no `auth_file`.
pub(crate) fn caller(identity: Option<&Identity>) -> v1::GetCallerResponse {
    let Some(identity) = identity else {
        return v1::GetCallerResponse::default();
    };
    let principal = identity.principal();
    let tenant = principal.tenant.as_deref();
    let credential = identity.credential();
    let kind = match credential {
        ShownCredential::None | ShownCredential::Unverified => v1::CredentialKind::Unspecified,
        ShownCredential::Certificate => v1::CredentialKind::Certificate,
        ShownCredential::Token(_) => v1::CredentialKind::Token,
        ShownCredential::Jwt(_) => v1::CredentialKind::Jwt,
    };
    let of_logs = principal.grants.iter().map(|grant| {
        let rights = LogRight::ALL.into_iter();
        let rights = rights.filter(|right| grant.rights.contains(*right));
        v1::Grant {
            rights: rights.map(|right| right.name().to_owned()).collect(),
            logs: Some(match &grant.scope {
                Scope::Exact(name) => Logs::Log(name.to_string()),
                Scope::Prefix(prefix) => Logs::Prefix(prefix.to_string()),
            }),
        }
    });
    let of_server = v1::Grant {
        rights: (principal.server_rights.iter())
            .map(|right| right.name().to_owned())
            .collect(),
        logs: None,
    };
    let of_server = Some(of_server).filter(|grant| !grant.rights.is_empty());
    v1::GetCallerResponse {
        principal: principal.name.clone(),
        tenant: tenant.map_or_else(String::new, |tenant| tenant.name.clone()),
        credential: kind.into(),
        token_id: credential.id().unwrap_or_default().to_owned(),
        expire_time: identity.expires().map(proto_timestamp),
        grants: of_logs.chain(of_server).collect(),
        limits: tenant.map(|tenant| limits(&tenant.limits)),
    }
}

/// 0 in the message: no limit.
fn limits(limits: &TenantLimits) -> v1::TenantLimits {
    let number = Option::unwrap_or_default;
    v1::TenantLimits {
        append_bytes_per_second: number(limits.append_bytes_per_second),
        appends_per_second: number(limits.appends_per_second),
        read_bytes_per_second: number(limits.read_bytes_per_second),
        reads_per_second: number(limits.reads_per_second),
        logs: number(limits.logs),
        producers: number(limits.producers),
        cursors: number(limits.cursors),
        stored_bytes: number(limits.stored_bytes),
        followers: number(limits.followers),
        connections: number(limits.connections),
        inflight_bytes: number(limits.inflight_bytes),
    }
}

/// The protection that the settings give.
pub(crate) fn protection(config: &Config) -> v1::Protection {
    let certificates = match config.tls_client_auth {
        ClientAuth::Off => v1::ClientCertificates::Off,
        ClientAuth::Optional => v1::ClientCertificates::Optional,
        ClientAuth::Require => v1::ClientCertificates::Required,
    };
    v1::Protection {
        has_tls: config.has_tls(),
        client_certificates: certificates.into(),
        has_principals: config.has_auth(),
        has_http_tls: config.http_tls,
    }
}
