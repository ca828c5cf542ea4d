//! Packing: from records to requests, each as large as the server takes.

use std::collections::HashMap;
use std::fmt;

use anyhow::{Context, Result, bail};
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use wald_client::proto::ServerLimits;

use crate::input::InputRecord;

/// Upper bound on tags and lengths in a request: of a log, of a record with its time and
/// checksum, of a header.
const OVERHEAD_BYTES: u64 = 16;

/// Limits of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestLimits {
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    pub(crate) record_bytes: u64,
}

impl RequestLimits {
    /// The limits in force; the contract's defaults for limits that the server does not report.
    pub(crate) fn of(limits: &ServerLimits) -> Self {
        let or = |value, default| if value == 0 { default } else { value };
        Self {
            records: or(limits.max_request_records.into(), 1_000),
            bytes: or(limits.max_request_bytes, 4 << 20),
            record_bytes: or(limits.max_record_bytes, 1 << 20),
        }
    }
}

/// Which log a record goes to.
#[derive(Debug, Clone)]
pub(crate) enum Route {
    /// All to this one.
    Log(String),
    /// Each to the one that its field names.
    Field { field: String, prefix: String },
    /// Each to the one that it names itself.
    Own { prefix: String },
}

impl Route {
    fn log_of(&self, entry: &InputRecord) -> Result<String> {
        match self {
            Self::Log(log) => Ok(log.clone()),
            Self::Field { field, prefix } => {
                let value = serde_json::Deserializer::from_slice(&entry.data)
                    .deserialize_map(FieldOf(field))
                    .context("no log for it")?;
                Ok(format!("{prefix}{value}"))
            }
            Self::Own { prefix } => {
                let log = entry.log.as_deref();
                let log = log.context("it names no log; name one: walctl append LOG")?;
                Ok(format!("{prefix}{log}"))
            }
        }
    }
}

/// Finds one field of a JSON object without building the rest.
struct FieldOf<'a>(&'a str);

impl<'de> Visitor<'de> for FieldOf<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a JSON object with the field `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<String, A::Error> {
        let mut found = None;
        while let Some(key) = object.next_key::<String>()? {
            if key == self.0 {
                found = Some(object.next_value::<serde_json::Value>()?);
            } else {
                object.next_value::<IgnoredAny>()?;
            }
        }
        match found {
            Some(serde_json::Value::String(text)) => Ok(text),
            Some(value @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_))) => {
                Ok(value.to_string())
            }
            Some(_) => Err(A::Error::custom(format!(
                "its field `{}` is no name",
                self.0
            ))),
            None => Err(A::Error::custom(format!("it has no field `{}`", self.0))),
        }
    }
}

/// The contents of one request.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Pack {
    /// Records by log, in order.
    pub(crate) logs: Vec<(String, Vec<InputRecord>)>,
    /// Records in it.
    pub(crate) records: u64,
    /// Bytes of payload and headers in it.
    pub(crate) bytes: u64,
}

/// Fills one pack after the other.
pub(crate) struct Packer {
    limits: RequestLimits,
    route: Route,
    pack: Pack,
    /// Place of each log in the pack.
    places: HashMap<String, usize>,
    /// Bytes of the request so far.
    size: u64,
    /// Records seen, for messages.
    seen: u64,
}

impl Packer {
    pub(crate) fn new(limits: RequestLimits, route: Route) -> Self {
        Self {
            limits,
            route,
            pack: Pack::default(),
            places: HashMap::new(),
            size: 0,
            seen: 0,
        }
    }

    /// Maximum size of a record, bytes.
    pub(crate) fn most_record_bytes(&self) -> u64 {
        self.limits.record_bytes
    }

    /// Adds a record. Returns the pack before it if that is full.
    pub(crate) fn push(&mut self, entry: InputRecord) -> Result<Option<Pack>> {
        self.seen += 1;
        let bytes = entry.bytes();
        if bytes > self.limits.record_bytes {
            bail!(
                "record {} has {bytes} bytes, and the server takes at most {}; split it, or raise \
                 max_record_bytes of the server",
                self.seen,
                self.limits.record_bytes
            );
        }
        let log = self
            .route
            .log_of(&entry)
            .with_context(|| format!("record {}", self.seen))?;
        // Counted as if the log were new in the pack: it is in the next one, if this one is
        // full.
        let overheads = 3 + entry.headers.len() as u64;
        let size = bytes + log.len() as u64 + overheads * OVERHEAD_BYTES;
        let full = self.pack.records + 1 > self.limits.records
            || (self.pack.records > 0 && self.size + size > self.limits.bytes);
        let done = if full { self.finish() } else { None };
        self.size += size;
        self.pack.records += 1;
        self.pack.bytes += bytes;
        let place = *self.places.entry(log).or_insert_with_key(|log| {
            self.pack.logs.push((log.clone(), Vec::new()));
            self.pack.logs.len() - 1
        });
        self.pack.logs[place].1.push(entry);
        Ok(done)
    }

    /// The remaining records, if there are any.
    pub(crate) fn finish(&mut self) -> Option<Pack> {
        self.places.clear();
        self.size = 0;
        let pack = std::mem::take(&mut self.pack);
        (pack.records > 0).then_some(pack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RequestLimits = RequestLimits {
        records: 3,
        bytes: 1_000,
        record_bytes: 500,
    };

    fn packs(route: Route, records: &[&str]) -> Result<Vec<Pack>> {
        let mut packer = Packer::new(LIMITS, route);
        let mut packs = Vec::new();
        for record in records {
            packs.extend(packer.push(InputRecord::plain(record.to_string()))?);
        }
        packs.extend(packer.finish());
        Ok(packs)
    }

    fn by_field() -> Route {
        Route::Field {
            field: "origin".into(),
            prefix: "airport/".into(),
        }
    }

    #[test]
    fn pack_ends_at_the_most_records() {
        let packs = packs(Route::Log("log".into()), &["a"; 7]).unwrap();
        assert_eq!(
            packs.iter().map(|pack| pack.records).collect::<Vec<_>>(),
            [3, 3, 1]
        );
    }

    #[test]
    fn pack_ends_at_the_most_bytes() {
        let large = "x".repeat(440);
        let packs = packs(Route::Log("log".into()), &[&large, &large, &large]).unwrap();
        assert_eq!(
            packs.iter().map(|pack| pack.records).collect::<Vec<_>>(),
            [2, 1]
        );
    }

    #[test]
    fn nothing_makes_no_pack() {
        assert!(packs(Route::Log("log".into()), &[]).unwrap().is_empty());
    }

    #[test]
    fn record_above_the_limit_is_named() {
        let large = "x".repeat(501);
        let error = packs(Route::Log("log".into()), &["a", &large]).unwrap_err();
        assert!(
            error.to_string().contains("record 2 has 501 bytes"),
            "{error}"
        );
    }

    #[test]
    fn field_names_the_log_and_order_is_kept_in_each() {
        let records = [
            r#"{"n":1,"origin":"SEA"}"#,
            r#"{"n":2,"origin":"BOS"}"#,
            r#"{"n":3,"origin":"SEA"}"#,
        ];
        let packs = packs(by_field(), &records).unwrap();
        let logs = &packs[0].logs;
        assert_eq!(
            (logs[0].0.as_str(), logs[1].0.as_str()),
            ("airport/SEA", "airport/BOS")
        );
        let sea: Vec<_> = logs[0].1.iter().map(|entry| &entry.data[..]).collect();
        assert_eq!(sea, [records[0].as_bytes(), records[2].as_bytes()]);
    }

    #[test]
    fn record_without_the_field_is_named() {
        for bad in [r#"{"n":1}"#, r#"{"origin":null}"#, "[1]", "text"] {
            let error = packs(by_field(), &[bad]).unwrap_err();
            assert!(
                format!("{error:#}").starts_with("record 1: no log for it"),
                "{error:#}"
            );
        }
    }
}
