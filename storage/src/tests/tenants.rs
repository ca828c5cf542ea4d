//! Quotas of tenants: exact at each limit, after restarts, after everything that frees, and when they change.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::bounds::{by, cursor, names};
use super::*;
use crate::api::error::{AdminError, Bounded, CursorError, FenceError};
use crate::api::quota::{Quota, QuotaCounts, QuotaLimits, QuotaUse};
use crate::api::record::{Compression, CursorCommit, SyncMode};
use crate::api::ticket::block_on;
use crate::base::ids::Name;
use crate::journal::committer::{AdminChange, CursorChange};

fn quota(prefix: &str, limits: QuotaLimits) -> Quota {
    Quota {
        tenant: prefix.trim_end_matches('/').into(),
        prefix: prefix.into(),
        limits,
    }
}

/// Equal limits for the tenants `a` and `b`.
fn both(limits: QuotaLimits) -> Vec<Quota> {
    vec![quota("a/", limits), quota("b/", limits)]
}

fn logs(most: u64) -> QuotaLimits {
    QuotaLimits {
        logs: Some(most),
        ..QuotaLimits::default()
    }
}

fn bytes(most: u64) -> QuotaLimits {
    QuotaLimits {
        stored_bytes: Some(most),
        ..QuotaLimits::default()
    }
}

/// A refusal in words: tenant, kind, use, limit.
type Told = (String, Bounded, u64, u64);

fn told(tenant: &str, what: Bounded, used: u64, limit: u64) -> Told {
    (tenant.to_owned(), what, used, limit)
}

fn refused(error: AppendError) -> Told {
    match error {
        AppendError::Quota {
            what,
            used,
            limit,
            tenant: Some(tenant),
            ..
        } => (tenant.to_string(), what, used, limit),
        other => panic!("{other}"),
    }
}

impl Fixture {
    fn set(&self, quotas: Vec<Quota>) -> Vec<QuotaUse> {
        let used = self.core.set_quotas(quotas).unwrap();
        assert_eq!(used, self.core.logs.recount_quotas());
        used
    }

    /// The use of a tenant, which equals a recount and what GetLog reports.
    fn used(&self, prefix: &str) -> QuotaCounts {
        let found = self.core.logs.quotas();
        assert_eq!(found, self.core.logs.recount_quotas());
        let one = found.iter().find(|one| *one.quota.prefix == *prefix);
        let used = one.unwrap().used;
        let listed = self.core.list_logs(prefix, None, usize::MAX);
        let stored: u64 = listed.iter().map(|info| info.stored_bytes).sum();
        assert_eq!(
            (used.logs, used.stored_bytes),
            (listed.len() as u64, stored)
        );
        used
    }

    fn over(&self, batch: Batch) -> Told {
        let before = self.core.logs.quotas();
        let found = refused(self.append_batch(batch).unwrap_err());
        assert_eq!(self.core.logs.quotas(), before, "a refusal changes nothing");
        found
    }

    fn gone(&self, log: &str) {
        let deletion = self.core.delete_in_turn(target(log));
        self.core.turn();
        block_on(deletion).unwrap();
    }

    fn cursor_to(&self, commit: CursorCommit) -> Result<(), CursorError> {
        let moved = self.core.move_cursor(CursorChange::Commit(commit));
        self.core.turn();
        block_on(moved).map(drop)
    }

    fn admin(&self, change: AdminChange) -> Result<(), AdminError> {
        let done = self.core.inbox.administer(change);
        self.core.turn();
        block_on(done)
    }
}

#[test]
fn every_way_to_a_log_ends_at_the_quota_of_its_tenant() {
    let mut f = Fixture::new();
    f.append_batch(names(&["a/1"])).unwrap();
    let used = f.set(both(logs(2)));
    assert_eq!(used[0].used.logs, 1);
    // Each log fits alone, but not both together: neither is created.
    let over = told("a", Bounded::TenantLogs, 1, 2);
    assert_eq!(f.over(names(&["b/1", "a/2", "a/3"])), over);
    assert_eq!(f.used("b/").logs, 0);
    f.append_batch(names(&["a/2", "b/1", "free"])).unwrap();
    let full = told("a", Bounded::TenantLogs, 2, 2);
    for cleanly in [true, false] {
        assert_eq!(f.over(names(&["a/3"])), full);
        assert_eq!(f.over(by("a/3", "p", 0, 0)), full);
        let fenced = f.core.fence(target("a/3"), None);
        f.core.turn();
        match block_on(fenced) {
            Err(FenceError::Append(error)) => assert_eq!(refused(error), full),
            other => panic!("{other:?}"),
        }
        let name = LogName::new("a/3").unwrap();
        let config = LogConfig::default();
        match f.admin(AdminChange::Create { name, config }) {
            Err(AdminError::Append(error)) => assert_eq!(refused(error), full),
            other => panic!("{other:?}"),
        }
        f = match cleanly {
            true => f.restart_cleanly(),
            false => f.restart(),
        };
        f.set(both(logs(2)));
    }
    // Existing logs go on, other tenants too, and a deletion makes room at once.
    f.append_batch(names(&["a/1", "a/2", "b/2", "free/2"]))
        .unwrap();
    f.gone("a/1");
    f.append_batch(names(&["a/3"])).unwrap();
    assert_eq!(f.over(names(&["a/4"])), full);
}

#[test]
fn producers_and_cursors_end_at_the_quota_of_their_tenant() {
    let limits = QuotaLimits {
        producers: Some(2),
        cursors: Some(2),
        ..QuotaLimits::default()
    };
    let mut f = Fixture::new();
    f.set(both(limits));
    f.append_batch(by("a/1", "p", 0, 0)).unwrap();
    f.append_batch(by("a/2", "p", 0, 0)).unwrap();
    f.cursor_to(cursor("a/1", "x")).unwrap();
    f.cursor_to(cursor("a/2", "x")).unwrap();
    let producers = told("a", Bounded::TenantProducers, 2, 2);
    let cursors = told("a", Bounded::TenantCursors, 2, 2);
    for _ in 0..2 {
        assert_eq!(f.over(by("a/1", "q", 0, 0)), producers);
        assert_eq!(f.over(by("a/3", "q", 0, 0)), producers);
        let mut batch = names(&["b/1"]);
        batch.cursors = vec![cursor("a/1", "y")];
        assert_eq!(f.over(batch), cursors);
        match f.cursor_to(cursor("a/1", "y")) {
            Err(CursorError::Append(error)) => assert_eq!(refused(error), cursors),
            other => panic!("{other:?}"),
        }
        f = f.restart();
        f.set(both(limits));
    }
    // Known producers and cursors go on.
    f.append_batch(by("a/1", "p", 0, 1)).unwrap();
    f.cursor_to(cursor("a/1", "x")).unwrap();
    f.append_batch(by("b/1", "q", 0, 0)).unwrap();
    let producer = Name::new("p").unwrap();
    let forgotten = AdminChange::ForgetProducer {
        target: target("a/1"),
        producer,
    };
    f.admin(forgotten).unwrap();
    f.append_batch(by("a/2", "q", 0, 0)).unwrap();
    f.gone("a/2");
    let used = f.used("a/");
    assert_eq!((used.producers, used.cursors), (0, 1));
    f.cursor_to(cursor("a/1", "y")).unwrap();
}

#[test]
fn stored_bytes_never_exceed_the_quota_and_a_trim_frees_them() {
    let mut f = Fixture::new();
    f.set(both(bytes(20_000)));
    let mut appended = 0;
    let full = loop {
        match f.append("a/1", &[7; 1000]) {
            Ok(_) => appended += 1,
            Err(error) => break refused(error),
        }
        assert!(f.used("a/").stored_bytes <= 20_000);
    };
    assert!((17..19).contains(&appended), "{appended}");
    let used = f.used("a/").stored_bytes;
    assert_eq!(full, told("a", Bounded::TenantBytes, used, 20_000));
    for cleanly in [true, false] {
        f = match cleanly {
            true => f.restart_cleanly(),
            false => f.restart(),
        };
        f.set(both(bytes(20_000)));
        assert_eq!(f.used("a/").stored_bytes, used);
        f.append("a/1", &[7; 1000]).unwrap_err();
    }
    // A batch with records of another tenant is refused as a whole.
    let records: &[&[u8]] = &[&[7; 1000]];
    let of_both = batch(&[("b/1", records), ("a/1", records)]);
    assert_eq!(f.over(of_both), full);
    f.append("b/1", &[7; 1000]).unwrap();
    f.trim("a/1", 2);
    let trimmed = f.used("a/").stored_bytes;
    assert!(used - trimmed > 2000, "{used} {trimmed}");
    f.append("a/1", &[7; 1000]).unwrap();
    f.append("a/2", &[7; 1]).unwrap();
    f = f.restart();
    f.set(both(bytes(20_000)));
    f.gone("a/1");
    assert!(f.used("a/").stored_bytes < 200);
}

#[test]
fn a_trim_into_sealed_segments_frees_their_frames() {
    let mut f = Fixture::new();
    f.set(both(QuotaLimits::default()));
    // Bytes of all frames up to the record.
    let mut ends = vec![0];
    for number in 0..120_usize {
        f.append("a/1", &vec![7; 500 + 40 * number]).unwrap();
        f.append("b/1", &[1; 100]).unwrap();
        ends.push(f.used("a/").stored_bytes);
    }
    let log = f.core.logs.by_name("a/1").unwrap();
    assert!(!log.state.read().chain.roots().is_empty(), "sealed");
    for before in [1, 2, 30, 71, 115, 120] {
        f.trim("a/1", before as u64);
        let kept = ends[120] - ends[before];
        assert_eq!(f.used("a/").stored_bytes, kept, "{before}");
        f = f.restart();
        f.set(both(QuotaLimits::default()));
        assert_eq!(f.used("a/").stored_bytes, kept, "{before}, after a start");
    }
}

#[test]
fn a_limit_below_the_use_refuses_only_what_is_new() {
    let f = Fixture::new();
    f.append_batch(names(&["a/1", "a/2", "a/3"])).unwrap();
    let one = QuotaLimits {
        logs: Some(1),
        stored_bytes: Some(10),
        ..QuotaLimits::default()
    };
    assert_eq!(f.set(both(logs(1)))[0].used.logs, 3);
    f.append_batch(names(&["a/1", "a/2", "a/3"])).unwrap();
    assert_eq!(
        f.over(names(&["a/4"])),
        told("a", Bounded::TenantLogs, 3, 1)
    );
    let used = f.set(both(one))[0].used.stored_bytes;
    assert_eq!(
        f.over(names(&["a/1"])),
        told("a", Bounded::TenantBytes, used, 10)
    );
    assert_eq!(f.contents("a/1").len(), 2);
    f.trim("a/1", 2);
    f.set(both(logs(4)));
    f.append_batch(names(&["a/1", "a/4"])).unwrap();
    // Without its quota the tenant has no limit, and with it again the same use.
    f.set(vec![quota("b/", logs(1))]);
    f.append_batch(names(&["a/5", "a/6"])).unwrap();
    assert_eq!(f.set(both(logs(1)))[0].used.logs, 6);
}

#[test]
fn records_in_memory_only_count_as_their_frame() {
    let f = Fixture::new();
    f.set(both(bytes(2000)));
    f.append("a/1", b"x").unwrap();
    f.configure(
        "a/1",
        LogConfig {
            sync_mode: Some(SyncMode::Manual),
            ..LogConfig::default()
        },
    );
    let add = |size| {
        let mut ticket = f
            .core
            .enqueue(batch(&[("a/1", &[&vec![3; size]])]), Durability::Accepted);
        f.core.turn();
        settled(&mut ticket).unwrap()
    };
    let first = f.used("a/").stored_bytes;
    add(700).unwrap();
    add(700).unwrap();
    let held = f.used("a/").stored_bytes;
    assert!(held - first > 1400);
    assert_eq!(refused(add(700).unwrap_err()).1, Bounded::TenantBytes);
    let synced = f.core.sync_in_turn(Durability::Durable);
    f.core.turn();
    block_on(synced).unwrap();
    assert!(
        f.core
            .logs
            .by_name("a/1")
            .unwrap()
            .state
            .read()
            .buffered
            .is_none()
    );
    let written = f.used("a/").stored_bytes;
    // The frame may begin a group, which costs the directory of the group before.
    assert!(written >= held && written - held < 200, "{held} {written}");
}

/// A random log of the tenants `a`, `b`, or of none.
fn any(random: &mut StdRng) -> &'static str {
    const LOGS: [&str; 7] = ["a/1", "a/2", "a/manual", "b/1", "b/packed", "c/1", "a"];
    LOGS[random.random_range(0..LOGS.len())]
}

fn limits(random: &mut StdRng) -> QuotaLimits {
    let mut most = |most: u64| {
        let limited = random.random_range(0..3) > 0;
        limited.then(|| random.random_range(1..most))
    };
    QuotaLimits {
        logs: most(4),
        producers: most(8),
        cursors: most(8),
        stored_bytes: most(60_000),
    }
}

fn exceeds(used: &QuotaUse) -> bool {
    let (now, most) = (used.used, used.quota.limits);
    let over = |now: u64, most: Option<u64>| most.is_some_and(|most| now > most);
    over(now.logs, most.logs)
        || over(now.producers, most.producers)
        || over(now.cursors, most.cursors)
}

/// Random requests, changes of quotas, sorting, kills and clean ends, from one seed.
fn random_tenants(seed: u64) -> u64 {
    let mut random = StdRng::seed_from_u64(seed);
    let config = StorageConfig {
        sorter_enabled: true,
        sorter_step_bytes: 200 << 10,
        buffer_bytes: 5000,
        producer_window: 3,
        ..small_config()
    };
    let mut f = Fixture::with(SimDisk::seeded(seed), config);
    let mut refusals = 0;
    for log in ["a/manual", "b/packed"] {
        let name = LogName::new(log).unwrap();
        let config = match log {
            "a/manual" => LogConfig {
                sync_mode: Some(SyncMode::Manual),
                ..LogConfig::default()
            },
            _ => LogConfig {
                compression: Some(Compression::Lz4),
                ..LogConfig::default()
            },
        };
        f.admin(AdminChange::Create { name, config }).unwrap();
    }
    let mut quotas = vec![quota("a/", limits(&mut random))];
    f.set(quotas.clone());
    for step in 0..400 {
        let log = any(&mut random);
        let size = random.random_range(1..3000);
        let before = f.core.logs.quotas();
        let mut refused = false;
        let mut lowered = false;
        match random.random_range(0..100) {
            0..45 => {
                // Several requests of one group together keep the limits.
                let level = [Durability::Durable, Durability::Accepted][random.random_range(0..2)];
                let tickets: Vec<Ticket> = (0..random.random_range(1..5))
                    .map(|_| {
                        let other = any(&mut random);
                        let data: &[&[u8]] = &[&vec![5; size]];
                        let mut one = batch(&[(log, data)]);
                        if other != log && random.random_range(0..3) == 0 {
                            one = batch(&[(log, data), (other, data)]);
                        }
                        f.core.enqueue(one, level)
                    })
                    .collect();
                f.core.turn();
                for mut ticket in tickets {
                    match settled(&mut ticket).unwrap() {
                        Err(AppendError::Quota { tenant, .. }) => refused |= tenant.is_some(),
                        other => drop(other.unwrap()),
                    }
                }
            }
            45..60 => {
                let id = ["p", "q", "r"][random.random_range(0..3)];
                // Sequences that do not fit are refused, too.
                let result = f.append_batch(by(log, id, 0, random.random_range(0..2)));
                refused |= matches!(result, Err(AppendError::Quota { .. }));
            }
            60..70 => {
                let name = ["x", "y", "z"][random.random_range(0..3)];
                let result = f.cursor_to(cursor(log, name));
                refused |= matches!(result, Err(CursorError::Append(AppendError::Quota { .. })));
            }
            70..80 => {
                if let Some(known) = f.core.logs.by_name(log) {
                    let (first, next) = {
                        let state = known.state.read();
                        (state.coming_first().get(), state.next.get())
                    };
                    f.trim(log, random.random_range(first..next + 1));
                }
            }
            80..83 => {
                if f.core.logs.by_name(log).is_some() {
                    f.gone(log);
                }
            }
            83..88 => drop(f.core.sort_in_turn().unwrap()),
            88..94 => {
                quotas = vec![quota("a/", limits(&mut random))];
                if random.random_range(0..3) > 0 {
                    quotas.push(quota("b/", limits(&mut random)));
                }
                lowered = true;
                f.set(quotas.clone());
            }
            _ => {
                let synced = f.core.sync_in_turn(Durability::Durable);
                f.core.turn();
                block_on(synced).unwrap();
                let before = f.core.logs.quotas();
                f = match random.random_range(0..2) {
                    0 => f.restart(),
                    _ => f.restart_cleanly(),
                };
                f.set(quotas.clone());
                assert_eq!(f.core.logs.quotas(), before, "seed {seed}, step {step}");
            }
        }
        let after = f.core.logs.quotas();
        assert_eq!(
            after,
            f.core.logs.recount_quotas(),
            "seed {seed}, step {step}"
        );
        for (before, after) in before.iter().zip(&after) {
            let (was, is) = (before.used.stored_bytes, after.used.stored_bytes);
            // Writing records of `manual` logs may add the directory of a group.
            let limit = after.quota.limits.stored_bytes.unwrap_or(u64::MAX);
            let most = limit.max(was).saturating_add(500);
            assert!(lowered || is <= most, "seed {seed}, step {step}: {after:?}");
            let new = exceeds(after) && !exceeds(before);
            assert!(lowered || !new, "seed {seed}, step {step}: {after:?}");
        }
        refusals += u64::from(refused);
    }
    refusals
}

#[test]
fn random_histories_keep_quotas_and_their_use_exact() {
    let base: u64 = 0x7E4A;
    let refusals: u64 = (0..12).map(|n| random_tenants(base + n)).sum();
    assert!(refusals > 100, "{refusals}");
}
