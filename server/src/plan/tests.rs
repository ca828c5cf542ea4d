use super::*;
use crate::config::Layers;

fn config(settings: &[(&'static str, &str)]) -> Config {
    let flags = settings
        .iter()
        .map(|(name, value)| (*name, (*value).to_owned()));
    let layers = Layers {
        flags: flags.chain([("worker_threads", "2".to_owned())]).collect(),
        ..Layers::default()
    };
    layers.resolve().unwrap().config
}

fn host(descriptors: u64, memory_mib: u64) -> Host {
    Host {
        descriptors,
        inherited: 3,
        memory: memory_mib << 20,
        by_cgroup: true,
    }
}

/// [`super::fit_descriptors`] for the store of that configuration.
fn fit_descriptors(config: &mut Config, host: &Host) -> Result<Option<String>, Exit> {
    let storage = config.storage();
    super::fit_descriptors(config, &storage, host)
}

fn bounds(config: &Config) -> (usize, usize, usize) {
    (
        config.max_connections,
        config.http_max_connections,
        config.max_open_segments,
    )
}

/// Descriptors that a configuration takes at most.
fn need(config: &Config) -> u64 {
    let fixed =
        3 + PORTS + PER_RUNTIME * (RUNTIMES + config.workers() as u64) + RESERVE_DESCRIPTORS;
    let (connections, http, segments) = bounds(config);
    let store = config.storage().descriptors(false);
    fixed + store + (connections + http + segments) as u64
}

#[test]
fn nothing_is_lowered_where_everything_fits() {
    let mut config = config(&[]);
    let before = config.clone();
    make(&mut config, &host(65_536, 4096)).unwrap();
    assert_eq!(config, before);
    let all = need(&config);
    assert_eq!(
        fit_descriptors(&mut config, &host(all, 4096)).unwrap(),
        None
    );
    let one_less = fit_descriptors(&mut config, &host(all - 1, 4096)).unwrap();
    let text = one_less.unwrap();
    assert!(
        text.contains("max_connections is 9999, not 10000"),
        "{text}"
    );
    assert!(text.contains(&format!("at least {all}")), "{text}");
}

#[test]
fn connection_takes_more_memory_inside_tls() {
    let tls = [("tls_cert", "c.pem"), ("tls_key", "k.pem")];
    let more = TLS_BYTES;
    let (grpc, http) = connection_bytes(&config(&[]));
    assert_eq!(connection_bytes(&config(&tls)), (grpc + more, http));
    let both = config(&[tls[0], tls[1], ("http_tls", "true")]);
    assert_eq!(connection_bytes(&both), (grpc + more, http + more));
}

#[test]
fn connections_are_lowered_first_then_http_then_segments() {
    for (limit, lowered) in [(1024, 1), (480, 2), (256, 3)] {
        let mut config = config(&[]);
        let text = fit_descriptors(&mut config, &host(limit, 4096))
            .unwrap()
            .unwrap();
        assert!(need(&config) <= limit, "{limit}: {config:?}");
        assert_eq!(text.matches(", not ").count(), lowered, "{text}");
        let (connections, http, segments) = bounds(&config);
        assert!(connections >= 32 && http >= 8 && segments >= 16, "{text}");
        assert!(http == 256 || connections == 32);
        assert!(segments == 256 || http == 8);
    }
}

#[test]
fn start_is_refused_where_not_even_the_least_fits() {
    let mut least = config(&[]);
    least.max_connections = 32;
    least.http_max_connections = 8;
    least.max_open_segments = 16;
    let need = need(&least);
    fit_descriptors(&mut config(&[]), &host(need, 4096)).unwrap();
    let refused = fit_descriptors(&mut config(&[]), &host(need - 1, 4096)).unwrap_err();
    assert_eq!(refused.code, Exit::CONFIG);
    assert!(
        refused.message.contains(&format!("at least {need}")),
        "{}",
        refused.message
    );
}

#[test]
fn event_loops_are_lowered_only_if_nobody_set_their_number() {
    let mut many = config(&[]);
    many.worker_threads = 64;
    assert!(fit_descriptors(&mut many, &host(256, 4096)).is_err());
    many.worker_threads = 0;
    let loops = many.workers();
    fit_descriptors(&mut many, &host(256, 4096)).unwrap();
    assert!(many.workers() <= loops && need(&many) <= 256);
}

#[test]
fn connections_without_a_bound_get_one() {
    let mut config = config(&[("max_connections", "0")]);
    let text = fit_descriptors(&mut config, &host(1 << 20, 4096))
        .unwrap()
        .unwrap();
    assert!(text.contains(", not unbounded"), "{text}");
    assert!(need(&config) <= 1 << 20 && config.max_connections > 1_000_000);
}

#[test]
fn smaller_configured_values_than_the_least_stay() {
    let mut config = config(&[("max_connections", "5"), ("max_open_segments", "3")]);
    fit_descriptors(&mut config, &host(200, 4096)).unwrap();
    assert_eq!((config.max_connections, config.max_open_segments), (5, 3));
}

#[test]
fn memory_lowers_calls_then_connections_and_then_refuses() {
    let mut config = config(&[]);
    let text = fit_memory(&mut config, &host(65_536, 512))
        .unwrap()
        .unwrap();
    assert!(text.contains("512 MiB (the cgroup's limit)"), "{text}");
    assert_eq!(
        config.max_calls,
        4096 + 2 * config.max_connections,
        "{text}"
    );
    assert!(
        config.max_connections < 4000 && config.max_connections > 1000,
        "{text}"
    );
    // A limit of the host leads to a warning; a limit that an operator has set is enforced.
    let text = fit_memory(&mut config, &host(65_536, 96)).unwrap().unwrap();
    assert!(text.contains("max_inflight_bytes"), "{text}");
    assert_eq!(
        (
            config.max_calls,
            config.max_connections,
            config.http_max_connections
        ),
        (4096 + 64, 32, 8)
    );
    let mut config = super::tests::config(&[("memory_limit", "96MiB")]);
    let refused = fit_memory(&mut config, &host(65_536, 4096)).unwrap_err();
    assert_eq!(refused.code, Exit::CONFIG);
    // The setting goes before the host.
    let mut config = super::tests::config(&[("memory_limit", "512MiB")]);
    let text = fit_memory(&mut config, &host(65_536, 4096))
        .unwrap()
        .unwrap();
    assert!(text.contains("(configured)"), "{text}");
}

#[test]
fn large_groups_of_a_replica_take_more_memory() {
    let bytes = |batch| {
        let sizes = [("segment_bytes", "256MiB"), ("max_batch_bytes", batch)];
        replica_bytes(&config(&sizes)) >> 20
    };
    let buffer = config(&[]).buffer_bytes.0 >> 20;
    assert_eq!(bytes("4MiB"), 232 + 2 * (4 + buffer).max(8));
    assert_eq!(bytes("48MiB"), 232 + 2 * (48 + buffer));
    // The part and the object are one size where segments are small.
    assert_eq!(replica_bytes(&config(&[])) >> 20, 248);
}
