use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use super::layers::{Origin, misspelt, nearest};
use super::{
    BucketGap, Config, HEADINGS, Layers, LogPattern, LogPatterns, SETTINGS, SettingValue, Size,
    heading, reference,
};

fn file(text: &str) -> Layers {
    Layers {
        file: Some((PathBuf::from("wald.toml"), text.to_owned())),
        ..Layers::default()
    }
}

fn resolved(layers: &Layers) -> Config {
    layers.resolve().unwrap().config
}

fn problems(layers: &Layers) -> Vec<String> {
    layers.resolve().unwrap_err().0
}

#[test]
fn defaults_are_a_usable_configuration() {
    let effective = Layers::default().resolve().unwrap();
    assert_eq!(effective.config.segment_bytes, Size(16 << 20));
    assert_eq!(
        effective.config.storage(),
        wald_storage::StorageConfig::default()
    );
    assert!(
        effective
            .entries
            .iter()
            .all(|entry| entry.origin == Origin::Default)
    );
}

#[test]
fn defaults_are_written_as_they_are_shown() {
    let effective = Layers::default().resolve().unwrap();
    for (setting, entry) in SETTINGS.iter().zip(&effective.entries) {
        assert_eq!(setting.default, entry.value, "{}", setting.name);
    }
}

#[test]
fn flag_wins_over_environment_over_file_over_default() {
    let mut layers = file("segment_bytes = \"1MiB\"\npool_segments = 3\ndrain_delay = \"1s\"");
    layers.env = HashMap::from([
        ("segment_bytes", "2MiB".to_owned()),
        ("pool_segments", "4".to_owned()),
    ]);
    layers.flags = HashMap::from([("segment_bytes", "4MiB".to_owned())]);
    let effective = layers.resolve().unwrap();
    assert_eq!(effective.config.segment_bytes, Size(4 << 20));
    assert_eq!(effective.config.pool_segments, 4);
    assert_eq!(effective.config.drain_delay, Duration::from_secs(1));
    let origin = |name: &str| {
        let entry = effective.entries.iter().find(|entry| entry.name == name);
        entry.unwrap().origin.clone()
    };
    assert_eq!(origin("segment_bytes"), Origin::Flag);
    assert_eq!(origin("pool_segments"), Origin::Env);
    assert_eq!(origin("drain_delay"), Origin::File("wald.toml".into()));
    assert_eq!(origin("listen"), Origin::Default);
}

#[test]
fn shown_configuration_is_a_file_that_gives_the_same() {
    let layers = Layers {
        flags: HashMap::from([
            ("segment_bytes", "128KiB".to_owned()),
            ("auto_create", "false".to_owned()),
            ("data_dir", "a \"quoted\" place".to_owned()),
        ]),
        ..Layers::default()
    };
    let effective = layers.resolve().unwrap();
    let shown = effective.show();
    assert!(shown.contains("# flag --segment-bytes"), "{shown}");
    assert_eq!(resolved(&file(&shown)), effective.config);
}

#[test]
fn reference_documents_every_setting_and_sets_nothing() {
    let text = reference();
    for setting in SETTINGS.iter() {
        assert!(setting.doc.trim().len() > 20, "{}", setting.name);
        assert!(text.contains(&format!("\n# {} = ", setting.name)));
    }
    assert_eq!(resolved(&file(&text)), resolved(&Layers::default()));
}

#[test]
fn each_heading_begins_with_a_setting_in_the_order_of_the_table() {
    let begun = SETTINGS.iter().filter_map(|setting| heading(setting.name));
    assert!(begun.eq(HEADINGS.iter().map(|(_, text)| *text)));
    assert!(heading(SETTINGS[0].name).is_some());
}

#[test]
fn settings_in_the_docs_are_those_of_this_version() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/wald.toml");
    assert!(
        std::fs::read_to_string(path).unwrap() == reference(),
        "run: cargo run --bin wald -- config reference > deploy/wald.toml"
    );
}

#[test]
fn setting_in_a_table_that_is_no_part_of_its_name_is_found() {
    assert_eq!(nearest("server_listen"), Some("listen"));
    assert_eq!(nearest("wald_storage_data_dir"), Some("data_dir"));
    assert_eq!(nearest("otlp_endpiont"), Some("otlp_endpoint"));
}

#[test]
fn typo_in_a_file_names_the_nearest_key() {
    let found = problems(&file("segmnt_bytes = \"1MiB\"\nlistn = \":0\""));
    assert_eq!(found.len(), 2);
    assert!(found.iter().any(|p| p.contains("\"segment_bytes\"")));
    assert!(found.iter().any(|p| p.contains("\"listen\"")));
    assert_eq!(nearest("zzzz"), None);
}

#[test]
fn every_bad_value_is_named_with_its_origin() {
    let found = problems(&file("segment_bytes = \"64MX\"\ndrain_delay = \"5\""));
    assert_eq!(found.len(), 2);
    assert!(found[0].contains("segment_bytes") && found[0].contains("file wald.toml"));
    assert!(found[1].contains("drain_delay") && found[1].contains("5ms"));
}

#[test]
fn every_sync_mode_reaches_the_engine_and_weak_ones_describe_the_loss() {
    use wald_storage::SyncMode::{Async, Batch, Interval, Manual, Strict};
    for (name, mode, words) in [
        ("strict", Strict, &[][..]),
        ("batch", Batch, &["power cut", "7ms"][..]),
        ("interval", Interval, &["power cut", "7ms"]),
        ("async", Async, &["power cut", "kernel"]),
        ("manual", Manual, &["crash of the process", "Sync", "3MiB"]),
    ] {
        let text = format!(
            "sync_mode = \"{name}\"\nsync_interval = \"7ms\"\nbuffer_bytes = \"3MiB\"\n\
             sync_bytes = \"5MiB\""
        );
        let config = resolved(&file(&text));
        let storage = config.storage();
        assert_eq!(storage.sync_mode, mode);
        assert_eq!(storage.sync_interval, Duration::from_millis(7));
        assert_eq!(
            (storage.buffer_bytes, storage.sync_bytes),
            (3 << 20, 5 << 20)
        );
        let warning = config.can_be_lost();
        assert_eq!(warning.is_none(), words.is_empty(), "{name}");
        for word in words {
            assert!(
                warning.as_ref().unwrap().contains(word),
                "{name}: {warning:?}"
            );
        }
    }
    let refused = &problems(&file("sync_mode = \"sometimes\""))[0];
    assert!(refused.contains("strict, batch"));
    let refused = &problems(&file("sync_mode = \"replicated\""))[0];
    assert!(
        refused.contains("sync_mode") && refused.contains("bucket_url"),
        "{refused}"
    );
    assert!(problems(&file("sync_interval = \"0s\""))[0].contains("sync_interval"));
}

#[test]
fn table_in_a_file_is_the_beginning_of_its_keys() {
    let layers = file("[otlp]\nservice_name = \"here\"\nsample_percent = 5");
    let config = resolved(&layers);
    assert_eq!(config.otlp_service_name, "here");
    assert_eq!(config.otlp_sample_percent, 5);
    let found = problems(&file("[otlp]\nsample_percnt = 5"));
    assert!(found[0].contains("\"otlp_sample_percent\""), "{found:?}");
    let found = problems(&file("otlp_timeout = \"1s\"\n[otlp]\ntimeout = \"2s\""));
    assert!(found[0].contains("twice"), "{found:?}");
    assert!(problems(&file("[otlp]\nsample_percent = 101"))[0].contains("at most 100"));
}

#[cfg(not(feature = "object"))]
#[test]
fn replica_needs_a_build_with_object_stores() {
    let found = problems(&file("bucket_url = \"s3://wald/orders\""));
    assert!(found[0].contains("--features object"), "{found:?}");
}

#[test]
fn engine_of_a_command_without_an_archive_drops_nothing() {
    let config = resolved(&file(
        "archive_dir = \"/archive\"\nretention_max_records = 4",
    ));
    assert!(config.storage().sorter_enabled);
    let alone = config.storage_without_replica();
    assert_eq!(
        (alone.sorter_enabled, alone.retention_interval),
        (false, Duration::MAX)
    );
    alone.check().unwrap();
}

#[cfg(feature = "object")]
#[test]
fn replica_reaches_the_engine_of_a_daemon_and_no_other() {
    use wald_storage::{ReplicaBounds, SyncMode};
    let config = resolved(&file(
        "bucket_url = \"s3://wald/orders\"\nsync_mode = \"replicated\"\nreplica_max_lag = \"2MiB\"",
    ));
    let bounds = ReplicaBounds { max_lag: 2 << 20 };
    let storage = config.storage();
    assert_eq!(
        (storage.replica, storage.sync_mode),
        (Some(bounds), SyncMode::Replicated)
    );
    assert_eq!(config.can_be_lost(), None);
    let alone = config.storage_without_replica();
    assert_eq!(
        (alone.replica, alone.sync_mode),
        (None, SyncMode::Strict),
        "a command ships nothing, so nothing is released to it"
    );
    alone.check().unwrap();
    let found = problems(&file("bucket_url = \"https://wald/orders\""));
    assert!(found[0].contains("s3://BUCKET/PREFIX"), "{found:?}");
}

#[test]
fn settings_of_the_replica_have_bounds() {
    for (text, words) in [
        ("replica_max_lag = \"2GiB\"", None),
        ("replica_max_lag = \"1023KiB\"", Some("1MiB")),
        ("replica_interval = \"0s\"", Some("more than 0")),
        ("replica_keep = \"0s\"", Some("more than 0")),
        ("bucket_gap = \"soon\"", Some("or auto")),
        ("node_id = \"a b\"", Some("printable")),
        ("advertise = \"wald-0\"", Some("HOST:PORT")),
        ("advertise = \":6925\"", Some("HOST:PORT")),
        ("advertise = \"wald-0:69250\"", Some("HOST:PORT")),
    ] {
        let found = layers_problem(text);
        match words {
            // Only a replica has this upper bound.
            None => assert_eq!(found, None),
            Some(words) => assert!(found.as_ref().unwrap().contains(words), "{found:?}"),
        }
    }
    let gap = |text: &str| resolved(&file(text)).bucket_gap;
    assert_eq!(gap("bucket_gap = \"auto\""), BucketGap::Auto);
    let default = BucketGap::Fixed(Duration::from_millis(50));
    assert_eq!(gap("advertise = \"[::1]:6925\""), default);
}

/// The first problem of a file.
fn layers_problem(text: &str) -> Option<String> {
    let resolved = file(text).resolve();
    resolved.err().map(|problem| problem.0[0].clone())
}

#[cfg(not(feature = "otlp"))]
#[test]
fn traces_need_a_build_that_can_send_them() {
    let found = problems(&file("otlp_endpoint = \"http://127.0.0.1:4317\""));
    assert!(found[0].contains("--features otlp"), "{found:?}");
}

#[cfg(feature = "otlp")]
#[test]
fn collector_has_to_be_named_by_an_http_url() {
    let found = problems(&file("otlp_endpoint = \"127.0.0.1:4317\""));
    assert!(found[0].contains("http://HOST:PORT"), "{found:?}");
    resolved(&file("otlp_endpoint = \"http://127.0.0.1:4317\""));
}

/// The text that turns TLS on.
const TLS: &str = "tls_cert = \"c.pem\"\ntls_key = \"k.pem\"";

#[test]
fn address_off_loopback_needs_tls_or_a_word() {
    let mut layers = file("listen = \"0.0.0.0:6925\"");
    let found = problems(&layers);
    assert!(found[0].contains("--insecure-listen"), "{found:?}");
    assert!(found[0].contains("set tls_cert"), "{found:?}");
    layers.flags = HashMap::from([("insecure_listen", "true".to_owned())]);
    let plaintext = resolved(&layers);
    assert!(plaintext.insecure_listen);
    assert!(plaintext.exposed().unwrap().contains("plaintext"));
    let text = format!("listen = \"0.0.0.0:6925\"\n{TLS}");
    let found = problems(&file(&text));
    assert!(found[0].contains("set auth_file"), "{found:?}");
    let without = resolved(&file(&format!("{text}\ninsecure_listen = true")));
    assert!(without.exposed().unwrap().contains("need no certificate"));
    let known = resolved(&file(&format!("{text}\nauth_file = \"auth.toml\"")));
    assert_eq!(known.exposed(), None);
    assert!(!known.reflection);
    let text = format!("{text}\ntls_client_auth = \"require\"\ntls_client_ca = \"ca.pem\"");
    assert_eq!(resolved(&file(&text)).exposed(), None);
    assert_eq!(resolved(&Layers::default()).exposed(), None);
}

#[test]
fn http_port_without_certificates_is_closed_where_they_are_required() {
    let text = format!("{TLS}\ntls_client_ca = \"ca.pem\"\ntls_client_auth = \"require\"");
    let parts = |config: &Config| [config.has_console(), config.has_http_api()];
    assert_eq!(parts(&resolved(&file(&text))), [false, false]);
    let known = resolved(&file(&format!("{text}\nauth_file = \"auth.toml\"")));
    assert_eq!(parts(&known), [true, true]);
    let optional = resolved(&file(&text.replace("require", "optional")));
    assert_eq!(parts(&optional), [true, true]);
    for (part, is_on) in [("console", [true, false]), ("http_api", [false, true])] {
        let asked = format!("{text}\n{part} = \"on\"");
        let found = problems(&file(&asked));
        assert!(found[0].contains(&format!("{part} is")), "{found:?}");
        assert!(found[0].contains("requires no certificate"), "{found:?}");
        let permitted = resolved(&file(&format!("{asked}\ninsecure_listen = true")));
        assert_eq!(parts(&permitted), is_on);
    }
}

#[test]
fn settings_of_tls_are_complete_or_refused() {
    let suites = "tls_cipher_suites = \"TLS_AES_256_GCM_SHA384\"";
    let old = "tls_cipher_suites = \"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\"";
    let with = |more: &str| format!("{TLS}\n{more}");
    for (text, setting, words) in [
        ("tls_cert = \"c.pem\"".to_owned(), "tls_key is", "both"),
        ("tls_key = \"k.pem\"".to_owned(), "tls_cert is", "both"),
        (
            "http_tls = true".to_owned(),
            "http_tls is",
            "needs tls_cert",
        ),
        (suites.to_owned(), "tls_cipher_suites is", "needs tls_cert"),
        (
            with("tls_client_auth = \"require\""),
            "tls_client_auth is",
            "tls_client_ca",
        ),
        (
            with("tls_client_auth = \"maybe\""),
            "tls_client_auth is",
            "off, optional, require",
        ),
        (
            with("tls_client_ca = \"ca.pem\""),
            "tls_client_ca is",
            "no effect",
        ),
        (
            with("tls_client_crl = \"crl.pem\""),
            "tls_client_crl is",
            "no effect",
        ),
        (
            with("tls_min_version = \"1.1\""),
            "tls_min_version is",
            "1.2, 1.3",
        ),
        (
            with("tls_cipher_suites = \"TLS_RSA_WITH_AES_128_CBC_SHA\""),
            "tls_cipher_suites is",
            "not one of TLS_AES_256_GCM_SHA384",
        ),
        (
            with(&format!("tls_min_version = \"1.3\"\n{old}")),
            "tls_cipher_suites is",
            "none is of TLS 1.3",
        ),
    ] {
        let found = problems(&file(&text));
        assert!(
            found.len() == 1 && found[0].starts_with(setting) && found[0].contains(words),
            "{text}: {found:?}"
        );
    }
    let config = resolved(&file(&with(&format!("http_tls = true\n{suites}"))));
    assert!(config.has_tls() && config.http_tls);
    resolved(&file(&with(old)));
}

#[test]
fn variable_close_to_a_settings_is_named_and_what_others_set_is_not() {
    let found = |name: &str| misspelt(std::iter::once(name.to_owned()));
    for (typed, meant) in [
        ("WALD_SYNC_MOD", "WALD_SYNC_MODE"),
        ("WALD_LISTNE", "WALD_LISTEN"),
        ("WALD_DATADIR", "WALD_DATA_DIR"),
    ] {
        let warnings = found(typed);
        assert!(warnings[0].contains(typed), "{warnings:?}");
        assert!(warnings[0].ends_with(&format!("{meant}?")), "{warnings:?}");
    }
    for other in [
        "WALD_PORT",
        "WALD_PORT_6925_TCP",
        "WALD_PORT_6925_TCP_ADDR",
        "WALD_PORT_6925_TCP_PROTO",
        "WALD_SERVICE_HOST",
        "WALD_SERVICE_PORT",
        "WALD_SERVICE_PORT_GRPC",
        "WALD_SYNC_MODE",
        "WALD_CONFIG",
        "WALD_ENDPOINT",
        "LISTEN",
    ] {
        assert!(found(other).is_empty(), "{other}");
    }
}

#[test]
fn lines_of_slatedb_are_left_out_unless_it_is_named() {
    let shown = |text: &str| super::log_filter(text).unwrap().to_string();
    assert!(shown("info").contains("slatedb=warn"));
    assert!(shown("info,wald=debug").contains("slatedb=warn"));
    for text in ["error", "off", "info,slatedb=debug"] {
        assert!(!shown(text).contains("slatedb=warn"), "{text}");
    }
}

#[test]
fn bounds_of_the_engine_are_checked_too() {
    let found = problems(&file("segment_bytes = \"4KiB\""));
    assert_eq!(
        found,
        ["segment_bytes is \"4KiB\" (file wald.toml): the least is 64KiB"]
    );
    let layers = Layers {
        env: HashMap::from([("pool_segments", "0".to_owned())]),
        ..Layers::default()
    };
    assert_eq!(
        problems(&layers),
        ["pool_segments is \"0\" (environment WALD_POOL_SEGMENTS): it must be more than 0"]
    );
}

#[test]
fn sizes_and_times_are_read_as_they_are_shown() {
    for (text, bytes) in [
        ("0B", 0),
        ("1536B", 1536),
        ("3KiB", 3072),
        ("2GiB", 2 << 30),
    ] {
        assert_eq!(Size::parse(text), Ok(Size(bytes)));
        assert_eq!(Size(bytes).show(), text);
    }
    assert_eq!(Size::parse("4096"), Ok(Size(4096)));
    for bad in ["", "MiB", "-1", "1 gib", "99999999999GiB"] {
        assert!(Size::parse(bad).is_err(), "{bad}");
    }
    for (text, nanos) in [("0s", 0), ("5ms", 5_000_000), ("90s", 90_000_000_000)] {
        assert_eq!(Duration::parse(text), Ok(Duration::from_nanos(nanos)));
        assert_eq!(Duration::from_nanos(nanos).show(), text);
    }
    assert!(Duration::parse("5").is_err());
}

#[test]
fn names_and_prefixes_of_logs_are_told_apart() {
    let read = LogPatterns::parse(" orders, shop/*,, ").unwrap();
    let expected = [
        LogPattern::Name("orders".to_owned()),
        LogPattern::Prefix("shop/".to_owned()),
    ];
    assert_eq!(read.0, expected);
    assert_eq!(LogPatterns::parse(&read.show()), Ok(read));
    assert_eq!(LogPatterns::parse(""), Ok(LogPatterns::default()));
    let wrong = LogPatterns::parse("$reserved").unwrap_err();
    assert!(wrong.contains("$reserved"), "{wrong}");
}

#[test]
fn defaults_of_sizes_follow_small_segments() {
    let config = resolved(&file("segment_bytes = \"128KiB\""));
    assert_eq!(config.max_batch_bytes, Size(56 << 10));
    assert_eq!(config.max_record_bytes, Size(56 << 10));
    let config = resolved(&file("max_batch_bytes = \"512KiB\""));
    assert_eq!(config.max_record_bytes, Size(512 << 10));
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    for (text, setting, words) in [
        (
            "max_record_bytes = \"5MiB\"",
            "max_record_bytes is",
            "max_batch_bytes, which is 4MiB",
        ),
        (
            "max_batch_bytes = \"1MiB\"\nmax_record_bytes = \"2MiB\"",
            "max_record_bytes is",
            "which is 1MiB",
        ),
        (
            "max_batch_bytes = \"8MiB\"",
            "max_batch_bytes is",
            "segment_bytes 16MiB",
        ),
        (
            "segment_bytes = \"64KiB\"\nmax_batch_bytes = \"64KiB\"",
            "max_batch_bytes is",
            "raise segment_bytes",
        ),
        (
            "segment_bytes = \"256MiB\"\nmax_batch_bytes = \"64MiB\"",
            "max_batch_bytes is",
            "the most is 63MiB",
        ),
        (
            "segment_bytes = \"63KiB\"",
            "segment_bytes is",
            "the least is 64KiB",
        ),
        (
            "listen = \"127.0.0.1:7000\"\nhttp_listen = \"0.0.0.0:7000\"",
            "http_listen is",
            "another port than listen",
        ),
        (
            "data_dir = \"/d\"\narchive_dir = \"/d/archive\"",
            "archive_dir is",
            "outside of data_dir",
        ),
        (
            "bucket_endpoint = \"http://objects:7070\"",
            "bucket_endpoint is",
            "--bucket-insecure",
        ),
        (
            "bucket_endpoint = \"objects:7070\"",
            "bucket_endpoint is",
            "https://",
        ),
        ("log_filter = \"warning\"", "log_filter is", "no level"),
        ("log_filter = \"info,wald=infoo\"", "log_filter is", ""),
    ] {
        let found = problems(&file(text));
        assert!(
            found.len() == 1 && found[0].starts_with(setting) && found[0].contains(words),
            "{text}: {found:?}"
        );
    }
}
