//! Limits of a tenant, as `[tenant.NAME] limits = { … }` of `auth_file` spells them.

use std::collections::BTreeMap;

use wald_text::units;

/// Maximum of every size and rate of bytes, in bytes: 1 PiB.
const MOST_BYTES: u64 = 1 << 50;
/// Maximum of every other limit.
const MOST_NUMBER: u64 = 1_000_000_000;

/// The unit of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LimitUnit {
    Bytes,
    Number,
}

/// Makes [`TenantLimits`] from one row a limit: its key, its unit, and its meaning.
macro_rules! limits {
    ($( $(#[$meaning:meta])* $key:ident: $unit:ident, )+) => {
        /// Limits of one tenant. `None`: no limit of its own.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub(crate) struct TenantLimits {
            $( $(#[$meaning])* pub(crate) $key: Option<u64>, )+
        }

        impl TenantLimits {
            const KEYS: &[&str] = &[$(stringify!($key)),+];

            /// The place and the unit of a limit. `None`: the key is unknown.
            fn place(&mut self, key: &str) -> Option<(&mut Option<u64>, LimitUnit)> {
                match key {
                    $( stringify!($key) => Some((&mut self.$key, LimitUnit::$unit)), )+
                    _ => None,
                }
            }
        }
    };
}

limits! {
    /// Bytes of records that the tenant may append in one second, payload and headers.
    append_bytes_per_second: Bytes,
    /// Records that the tenant may append in one second.
    appends_per_second: Number,
    /// Bytes of records that the tenant may read in one second, payload and headers.
    read_bytes_per_second: Bytes,
    /// Records that the tenant may read in one second.
    reads_per_second: Number,
    /// Logs under the tenant's prefix.
    logs: Number,
    /// Producers that the logs of the tenant remember, together.
    producers: Number,
    /// Cursors of the logs of the tenant, together.
    cursors: Number,
    /// Bytes of the records that the logs of the tenant keep.
    stored_bytes: Bytes,
    /// Scans of the tenant that follow.
    followers: Number,
    /// Connections with calls of the tenant.
    connections: Number,
    /// Bytes of appends that the tenant may have under way.
    inflight_bytes: Bytes,
}

impl TenantLimits {
    /// Reads and checks the limits of a tenant.
    ///
    /// # Errors
    /// A sentence with the key.
    pub(super) fn parse(table: &BTreeMap<String, toml::Value>) -> Result<Self, String> {
        let mut limits = Self::default();
        for (key, value) in table {
            let Some((place, unit)) = limits.place(key) else {
                return Err(format!(
                    "limits: {key:?} is no limit; the limits are {}",
                    Self::KEYS.join(", ")
                ));
            };
            let number = unit
                .parse(value)
                .map_err(|why| format!("limits: {key}: {why}"))?;
            *place = Some(number);
        }
        Ok(limits)
    }
}

impl LimitUnit {
    fn parse(self, value: &toml::Value) -> Result<u64, String> {
        let expected = match self {
            Self::Bytes => "expected a size such as \"64KiB\" or \"1GiB\", or a number of bytes",
            Self::Number => "expected a number such as 5000, without quotes",
        };
        let number = match (self, value) {
            (_, toml::Value::Integer(number)) => u64::try_from(*number).unwrap_or(0),
            (Self::Bytes, toml::Value::String(text)) => units::size(text)?,
            _ => return Err(expected.to_owned()),
        };
        let (most, shown) = match self {
            Self::Bytes => (MOST_BYTES, units::shown_size(MOST_BYTES)),
            Self::Number => (MOST_NUMBER, MOST_NUMBER.to_string()),
        };
        match number {
            0 => Err("it must be at least 1; leave the key out for no limit".to_owned()),
            _ if number > most => Err(format!(
                "it must be at most {shown}; leave the key out for no limit"
            )),
            _ => Ok(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TenantLimits, String> {
        TenantLimits::parse(&toml::from_str(text).unwrap())
    }

    #[test]
    fn sizes_have_units_and_numbers_have_none() {
        let limits = parse(
            "append_bytes_per_second = '20MiB'\nstored_bytes = 4096\nlogs = 10_000\nreads_per_second = 1",
        );
        let expected = TenantLimits {
            append_bytes_per_second: Some(20 << 20),
            stored_bytes: Some(4096),
            logs: Some(10_000),
            reads_per_second: Some(1),
            ..TenantLimits::default()
        };
        assert_eq!(limits, Ok(expected));
        assert_eq!(parse(""), Ok(TenantLimits::default()));
    }

    #[test]
    fn every_key_is_read_into_its_own_limit() {
        for key in TenantLimits::KEYS {
            let mut limits = parse(&format!("{key} = 7")).unwrap();
            for other in TenantLimits::KEYS {
                let value = *limits.place(other).unwrap().0;
                assert_eq!(value, (key == other).then_some(7), "{key}: {other}");
            }
        }
    }

    #[test]
    fn fault_names_its_key_and_the_remedy() {
        for (text, why) in [
            (
                "append_per_second = 1",
                "limits: \"append_per_second\" is no limit; the limits are append_bytes_per_second,",
            ),
            ("logs = 0", "limits: logs: it must be at least 1; leave"),
            ("logs = -1", "limits: logs: it must be at least 1; leave"),
            (
                "logs = '10'",
                "limits: logs: expected a number such as 5000",
            ),
            ("logs = 1.5", "limits: logs: expected a number"),
            (
                "logs = 1_000_000_001",
                "limits: logs: it must be at most 1000000000; leave",
            ),
            (
                "stored_bytes = '2000TiB'",
                "limits: stored_bytes: it must be at most 1024TiB; leave",
            ),
            ("stored_bytes = '2 gib'", "limits: stored_bytes: "),
            (
                "inflight_bytes = '0'",
                "limits: inflight_bytes: it must be at least 1; leave",
            ),
            (
                "inflight_bytes = true",
                "limits: inflight_bytes: expected a size",
            ),
        ] {
            let said = parse(text).unwrap_err();
            assert!(said.starts_with(why), "{text}: {said}");
        }
    }
}
