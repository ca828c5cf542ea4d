//! The variables of OpenTelemetry, which platforms set for every program. Wald's own settings go before them.
//!
//! Their source is the [specification](https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).
//! A value that Wald cannot use stops nothing, because the user may not have set it for Wald; a warning names it.
//! The library of the exporter reads `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_COMPRESSION` and `OTEL_RESOURCE_ATTRIBUTES` itself.

use std::collections::HashMap;

/// A value, and the variable that has it.
pub(crate) type OtelValue = (&'static str, String);

/// Settings that the variables give, and warnings about those that Wald cannot use.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct OtelSettings {
    /// By setting.
    pub(crate) values: HashMap<&'static str, OtelValue>,
    pub(crate) warnings: Vec<String>,
}

/// Variables for traces alone go before those for all signals.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];
const PROTOCOLS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
];
const TIMEOUTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
];
const NAMES: [&str; 2] = ["OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"];

/// Reads the variables. `get` gives the value of one.
pub(crate) fn read(get: impl Fn(&str) -> Option<String>) -> OtelSettings {
    // An empty value counts as none.
    let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
    let first = |names: [&'static str; 2]| {
        let mut names = names.into_iter();
        names.find_map(|name| Some((name, get(name)?.trim().to_owned())))
    };
    let mut found = OtelSettings::default();
    let Some(endpoint) = first(ENDPOINTS) else {
        return found;
    };
    // Values of enums and booleans have any case.
    let word = |name: &str| get(name).map(|value| value.trim().to_lowercase());
    let exporters = word("OTEL_TRACES_EXPORTER");
    let is_off = word("OTEL_SDK_DISABLED").as_deref() == Some("true");
    if is_off || exporters.is_some_and(|names| !names.split(',').any(|name| name == "otlp")) {
        return found;
    }
    // Without its value: an endpoint may have a password in it.
    let mut ignored = |(name, _): &OtelValue, why: &str| {
        found.warnings.push(format!("{name} is ignored: {why}"));
    };
    if !cfg!(feature = "otlp") {
        ignored(&endpoint, "this wald cannot send traces (feature otlp)");
        return found;
    }
    if !is_usable(&endpoint.1) {
        ignored(
            &endpoint,
            "expected http://HOST:PORT without user and password, spans are sent in plaintext",
        );
        return found;
    }
    if let Some(protocol) =
        first(PROTOCOLS).filter(|(_, value)| !value.eq_ignore_ascii_case("grpc"))
    {
        ignored(
            &protocol,
            "Wald sends traces by grpc alone, and sends none now",
        );
        return found;
    }
    let mut values = HashMap::from([("otlp_endpoint", endpoint)]);
    if let Some((name, value)) = first(NAMES) {
        let service = match name {
            "OTEL_SERVICE_NAME" => Some(value),
            _ => attribute(&value, "service.name"),
        };
        values.extend(service.map(|service| ("otlp_service_name", (name, service))));
    }
    if let Some(timeout) = first(TIMEOUTS) {
        match timeout.1.parse::<u32>() {
            Ok(millis) => {
                values.insert("otlp_timeout", (timeout.0, format!("{millis}ms")));
            }
            Err(_) => ignored(&timeout, "expected a number of milliseconds"),
        }
    }
    if let Some(sampler) = word("OTEL_TRACES_SAMPLER") {
        let argument = get("OTEL_TRACES_SAMPLER_ARG").unwrap_or_else(|| "1".to_owned());
        match percent(&sampler, &argument) {
            Some(percent) => {
                let value = ("OTEL_TRACES_SAMPLER", percent.to_string());
                values.insert("otlp_sample_percent", value);
            }
            None => ignored(
                &("OTEL_TRACES_SAMPLER", format!("{sampler} {argument}")),
                "expected always_on, always_off or traceidratio with a share from 0 to 1, each also with parentbased_ in front",
            ),
        }
    }
    found.values = values;
    found
}

/// Whether the exporter can use the endpoint.
fn is_usable(endpoint: &str) -> bool {
    let Ok(uri) = endpoint.parse::<http::Uri>() else {
        return false;
    };
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    uri.scheme() == Some(&http::uri::Scheme::HTTP)
        && !authority.is_empty()
        && !authority.contains('@')
}

/// An attribute in a list `key=value,key=value`.
fn attribute(list: &str, wanted: &str) -> Option<String> {
    let mut pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs.find_map(|(key, value)| (key.trim() == wanted).then(|| value.trim().to_owned()))
}

/// The share of calls in percent. Wald's samplers are all `parentbased_`. A share above 0 is at least 1 percent.
fn percent(sampler: &str, argument: &str) -> Option<u32> {
    let kind = sampler.strip_prefix("parentbased_").unwrap_or(sampler);
    match kind {
        "always_on" => Some(100),
        "always_off" => Some(0),
        "traceidratio" => {
            let share: f64 = argument.parse().ok()?;
            (0.0..=1.0).contains(&share).then_some(())?;
            (0..=100).find(|percent| f64::from(*percent) >= share * 100.0 - 1e-9)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> OtelSettings {
        read(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn without_an_endpoint_nothing_changes() {
        for more in [
            ("OTEL_SERVICE_NAME", "shop"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", " "),
        ] {
            assert_eq!(of(&[more]), OtelSettings::default());
        }
    }

    #[cfg(not(feature = "otlp"))]
    #[test]
    fn wald_without_traces_starts_and_warns() {
        let found = of(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")]);
        assert!(found.values.is_empty());
        assert!(found.warnings[0].contains("feature otlp"), "{found:?}");
    }

    #[cfg(feature = "otlp")]
    #[test]
    fn variables_become_settings() {
        let found = of(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4317"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_TRACES_EXPORTER", "otlp"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "2500"),
            ("OTEL_RESOURCE_ATTRIBUTES", "a=b, service.name=shop"),
            ("OTEL_TRACES_SAMPLER", "ParentBased_TraceIdRatio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ]);
        assert_eq!(found.warnings, Vec::<String>::new());
        let value = |setting: &str| found.values[setting].1.as_str();
        assert_eq!(value("otlp_endpoint"), "http://traces:4317");
        assert_eq!(value("otlp_service_name"), "shop");
        assert_eq!(value("otlp_timeout"), "2500ms");
        assert_eq!(value("otlp_sample_percent"), "25");
    }

    #[cfg(feature = "otlp")]
    #[test]
    fn value_that_cannot_be_used_is_ignored_with_a_warning() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");
        for (more, sends) in [
            (("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"), false),
            (
                ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c:4317"),
                false,
            ),
            (("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://"), false),
            (
                ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a b:1"),
                false,
            ),
            (("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1"), false),
            (
                ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://u:secret@c:1"),
                false,
            ),
            (("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"), true),
            (("OTEL_TRACES_SAMPLER", "jaeger_remote"), true),
        ] {
            let found = of(&[endpoint, more]);
            assert_eq!(
                found.values.contains_key("otlp_endpoint"),
                sends,
                "{more:?}"
            );
            assert_eq!(found.warnings.len(), 1, "{more:?}");
            assert!(found.warnings[0].contains(more.0), "{found:?}");
            assert!(!found.warnings[0].contains("secret"), "{found:?}");
        }
        for off in [
            ("OTEL_SDK_DISABLED", "TRUE"),
            ("OTEL_TRACES_EXPORTER", "none"),
            ("OTEL_TRACES_EXPORTER", "console"),
        ] {
            assert_eq!(of(&[endpoint, off]), OtelSettings::default());
        }
    }

    #[test]
    fn share_is_rounded_up_to_whole_percent() {
        for (argument, wanted) in [("0", 0), ("0.001", 1), ("0.07", 7), ("0.5", 50), ("1", 100)] {
            assert_eq!(
                percent("traceidratio", argument),
                Some(wanted),
                "{argument}"
            );
        }
        assert_eq!(percent("parentbased_always_off", "1"), Some(0));
        for argument in ["-0.1", "1.1", "x", "nan"] {
            assert_eq!(percent("traceidratio", argument), None, "{argument}");
        }
    }
}
