//! Stores damaged at random: sectors zeroed or unreadable, bytes flipped or replaced, files cut, removed, or
//! copied over each other. Every served record must be right, every missing record must be named, and no log
//! id may be given out twice; also after the next start.
//!
//! `WALD_FUZZ` sets the number of seeds, `WALD_SEED` runs one.

use std::collections::BTreeMap;

use super::around_damage::bare;
use super::faults::used_paths;
use super::unreadable::give_up_unread_end;
use super::*;
use crate::disk::Disk;
use crate::engine::repair::{accept_loss, examine};

/// By log, each lsn that is served, with its bytes, or named as lost, without bytes.
type Seen = BTreeMap<String, BTreeMap<u64, Option<Vec<u8>>>>;

fn seen(f: &Fixture, model: &BTreeMap<String, Vec<Vec<u8>>>) -> Seen {
    let mut seen = Seen::new();
    for log in model.keys() {
        let of_log = seen.entry(log.clone()).or_default();
        let mut next = 0u64;
        loop {
            match f.read(log, next) {
                Ok(page) => {
                    for b in &page.batches {
                        let records = (b.first_lsn.get()..).zip(payloads(b));
                        of_log.extend(records.map(|(lsn, data)| (lsn, Some(data))));
                    }
                    if page.next_lsn == page.tail_lsn {
                        break;
                    }
                    next = page.next_lsn.get();
                }
                Err(ReadError::Quarantined { to: Some(to), .. }) => {
                    of_log.extend((next..to.get()).map(|lsn| (lsn, None)));
                    next = to.get();
                }
                Err(_) => break,
            }
        }
    }
    seen
}

/// Checks that no record that was served or named before has changed or gone.
fn assert_same(before: &Seen, now: &Seen, what: &str) {
    for (log, records) in before {
        let now = now.get(log).cloned().unwrap_or_default();
        let name = |seen: Option<&Option<Vec<u8>>>| match seen {
            None => "absent",
            Some(None) => "named",
            Some(Some(_)) => "served",
        };
        let lsns = records.keys().chain(now.keys());
        // Records may be found again: the sorter reads bad bytes a second time.
        let is_found = |lsn: &u64| {
            matches!(now.get(lsn), Some(Some(_))) && !matches!(records.get(lsn), Some(Some(_)))
        };
        let other = lsns.filter(|lsn| !is_found(lsn) && records.get(lsn) != now.get(lsn));
        let other: BTreeMap<u64, _> = other
            .map(|lsn| (*lsn, (name(records.get(lsn)), name(now.get(lsn)))))
            .collect();
        assert!(
            other.is_empty(),
            "{what}: of {log} before and now: {other:?}"
        );
    }
}

#[test]
fn random_damage_never_serves_a_wrong_record_nor_hides_a_missing_one() {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    let mut failures: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let n = std::env::var("WALD_FUZZ")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(150u64);
    let only: Option<u64> = std::env::var("WALD_SEED").ok().and_then(|n| n.parse().ok());
    if only.is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
    for seed in only.map_or(0..n, |seed| seed..seed + 1) {
        let r = std::panic::catch_unwind(|| {
            let mut random = StdRng::seed_from_u64(seed);
            let mut f = Fixture::with(SimDisk::seeded(seed), sorting::config());
            let mut model: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
            let mut ids = BTreeMap::new();
            for _ in 0..random.random_range(1..5u32) {
                for _ in 0..random.random_range(1..12u32) {
                    let mut parts = BTreeMap::new();
                    for _ in 0..random.random_range(1..3u32) {
                        let log = format!("l{}", random.random_range(0..5u32));
                        let size = if random.random_bool(0.1) {
                            9000
                        } else {
                            random.random_range(0..300usize)
                        };
                        let mut data = vec![random.random::<u8>(); size];
                        data.extend_from_slice(&random.random::<u64>().to_le_bytes());
                        parts.insert(log, data);
                    }
                    let slices: Vec<(&str, Vec<&[u8]>)> = parts
                        .iter()
                        .map(|(l, d)| (l.as_str(), vec![d.as_slice()]))
                        .collect();
                    let b: Vec<(&str, &[&[u8]])> =
                        slices.iter().map(|(l, d)| (*l, d.as_slice())).collect();
                    let a = f.append_batch(batch(&b)).unwrap();
                    for ((log, data), append) in parts.into_iter().zip(a.appends) {
                        ids.insert(append.log_id, log.clone());
                        model.entry(log).or_default().push(data);
                    }
                    if random.random_bool(0.2) {
                        f.core.idle();
                    }
                }
                f.core.idle();
                f = if random.random_bool(0.3) {
                    f.restart_cleanly()
                } else {
                    f.restart()
                };
            }
            let Fixture { disk, core, .. } = f;
            drop(core);
            let mut paths = used_paths(&disk);
            if random.random_bool(0.5) {
                // Files of the indexer are damaged as well.
                for directory in ["index", "checkpoint"] {
                    let names = disk.list(directory).unwrap();
                    paths.extend(names.iter().map(|name| format!("{directory}/{name}")));
                }
            }
            for _ in 0..random.random_range(1..4u32) {
                let path = &paths[random.random_range(0..paths.len())];
                let Some(mut bytes) = disk.contents(path) else {
                    continue;
                };
                if bytes.is_empty() {
                    continue;
                }
                let end = bytes.iter().rposition(|b| *b != 0).unwrap_or(0) + 1;
                let at = if random.random_bool(0.5) {
                    random.random_range(0..end)
                } else {
                    random.random_range(8192.min(end - 1)..end)
                };
                match random.random_range(0..7u32) {
                    0 => {
                        let s = at / 512 * 512;
                        let e = (s + 512).min(bytes.len());
                        bytes[s..e].fill(0);
                    }
                    1 => {
                        let e = (at + random.random_range(1..3000usize)).min(bytes.len());
                        random.fill(&mut bytes[at..e]);
                    }
                    2 => bytes[at] ^= 1 << random.random_range(0..8u32),
                    3 => bytes.truncate(at),
                    4 => {
                        let other = disk
                            .contents(&paths[random.random_range(0..paths.len())])
                            .unwrap_or_default();
                        let e = (at + 4096).min(bytes.len()).min(other.len());
                        if at < e {
                            bytes[at..e].copy_from_slice(&other[at..e]);
                        }
                    }
                    5 => {
                        let to = at + random.random_range(1..9000usize);
                        // Real reads fail by the page: a small read before the bad bytes fails, too.
                        disk.set_unreadable(path, at / 4096 * 4096..to.next_multiple_of(4096));
                        continue;
                    }
                    _ => {
                        if random.random_bool(0.3) {
                            disk.remove(path).unwrap();
                            continue;
                        }
                        bytes[at] ^= 0x10;
                    }
                }
                disk.replace(path, bytes);
            }
            if give_up_unread_end(&disk) {
                // Records at the end are lost, and the loss is accepted.
                Fixture::on(disk).append("new", b"AFTER").unwrap();
                return;
            }
            let mut f = Fixture::with(disk, sorting::config());
            for round in 0..2 {
                if f.core.statistics().held_back.is_empty() {
                    // Everything goes on around the damage, and gaps stay named.
                    let before = seen(&f, &model);
                    f.fill_logs(seed, 3);
                    let mut steps = f.sort();
                    assert_same(&before, &seen(&f, &model), "sorted");
                    if steps == 0 {
                        // The sorter met damage below the checkpoint that only a start can attribute.
                        let held_back = f.core.statistics().held_back;
                        assert!(
                            !held_back.is_empty(),
                            "nothing is sorted, and nothing says why"
                        );
                        f = f.restart();
                        // The sorter waits for a segment that older versions refuse.
                        f.fill_logs(seed + 1, 3);
                        steps = f.sort();
                    }
                    let held_back = f.core.statistics().held_back;
                    if held_back.is_empty() {
                        let statistics = f.core.statistics();
                        assert!(
                            steps > 0,
                            "nothing is sorted: {} bytes, {:?}, {:?}",
                            statistics.unsorted_bytes,
                            f.core.indexing.covered(),
                            f.report.findings
                        );
                        assert!(!f.disk.list("checkpoint").unwrap().is_empty());
                        assert_same(&before, &seen(&f, &model), "sorted");
                    }
                    f = match random.random_bool(0.5) {
                        true => f.restart(),
                        false => bare(f),
                    };
                    // A start may be unable to use a file that held back the sorter. It names the records.
                    if held_back.is_empty() {
                        assert_same(&before, &seen(&f, &model), "sorted and started");
                    }
                }
                for (log, records) in &model {
                    let mut next = 0u64;
                    loop {
                        match f.read(log, next) {
                            Ok(page) => {
                                for b in &page.batches {
                                    for (lsn, d) in (b.first_lsn.get()..).zip(payloads(b)) {
                                        if d.starts_with(b"AFTER") {
                                            continue;
                                        }
                                        assert_eq!(
                                            records.get(usize::try_from(lsn).unwrap()),
                                            Some(&d),
                                            "wrong record by read"
                                        );
                                    }
                                }
                                if page.next_lsn == page.tail_lsn {
                                    // All records lie before the last segment, where nothing is torn: the
                                    // tail cannot go back in silence.
                                    let tail = page.tail_lsn.get();
                                    let in_doubt = f.read(log, tail).is_err();
                                    let short = tail < records.len() as u64;
                                    assert!(
                                        in_doubt || !short,
                                        "the end of {log} is missing in silence"
                                    );
                                    break;
                                }
                                assert!(page.next_lsn.get() > next, "no progress");
                                next = page.next_lsn.get();
                            }
                            Err(ReadError::Quarantined { to: Some(to), .. }) => {
                                assert!(to.get() > next);
                                next = to.get()
                            }
                            Err(ReadError::Quarantined { .. }) => break,
                            Err(ReadError::Target(TargetError::NotFound { .. })) => {
                                assert!(!f.report.findings.is_empty(), "{log} is gone in silence");
                                break;
                            }
                            Err(e) => panic!("{e}"),
                        }
                    }
                }
                let mut scan = f.scan(Selector::All, ScanStart::First, false);
                let mut at: BTreeMap<String, u64> = BTreeMap::new();
                let mut unattributed = false;
                while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
                    for g in &chunk.gaps {
                        unattributed |= g.log.is_none();
                        if let (Some(l), Some(to)) = (&g.log, g.to) {
                            let e = at.entry(l.as_str().to_owned()).or_default();
                            *e = (*e).max(to.get());
                        }
                    }
                    for b in chunk.batches {
                        let e = at.entry(b.log.as_str().to_owned()).or_default();
                        if round == 0 {
                            let named = unattributed || *e >= b.first_lsn.get();
                            assert!(
                                named,
                                "scan of all skips without a gap: {} {} to {}, {:?}",
                                b.log, e, b.first_lsn, f.report
                            );
                        }
                        *e = (*e).max(b.next_lsn().get());
                        for (lsn, d) in (b.first_lsn.get()..).zip(payloads(&b)) {
                            if d.starts_with(b"AFTER") {
                                continue;
                            }
                            if let Some(records) = model.get(b.log.as_str()) {
                                assert_eq!(
                                    records.get(usize::try_from(lsn).unwrap()),
                                    Some(&d),
                                    "wrong record by scan of all"
                                );
                            } else if !["a", "b/1", "b/2", "c"].contains(&b.log.as_str()) {
                                panic!("records of another log under {}", b.log)
                            }
                        }
                    }
                }
                drop(scan);
                let name = format!("new{round}");
                match f.append(&name, b"AFTER") {
                    Ok(a) => assert!(
                        ids.insert(a.appends[0].log_id, name).is_none(),
                        "log id reused"
                    ),
                    Err(e) => assert!(matches!(e, AppendError::TailUnproven { .. })),
                }
                for log in model.keys() {
                    let _ = f.append(log, b"AFTER");
                }
                f.core.idle();
                f = f.restart();
            }
            // When the loss is accepted, everything goes on; also after the next start.
            let Fixture {
                disk,
                config,
                clock,
                core,
                ..
            } = f;
            drop(core);
            let store: Arc<dyn Disk> = Arc::new(disk.clone());
            accept_loss(&store, &config, clock, "by a test").unwrap();
            let told = examine(&store, &config).unwrap();
            assert!(told.is_empty(), "accepted, and still told: {told:?}");
            let mut f = Fixture::with(disk, sorting::config());
            for round in 0..2 {
                assert_eq!(
                    f.core.statistics().held_back,
                    Vec::<String>::new(),
                    "accepted"
                );
                assert_eq!(f.report.damage, [], "accepted");
                let before = seen(&f, &model);
                f.fill_logs(seed + 7, 3);
                let steps = f.sort();
                let now = f.core.statistics();
                let (unsorted, stuck) = (now.unsorted_bytes, now.held_back);
                let covered = f.core.indexing.covered();
                assert!(
                    steps > 0,
                    "accepted, and nothing is sorted: {unsorted} bytes, {covered:?}, {stuck:?}"
                );
                assert!(!f.disk.list("checkpoint").unwrap().is_empty());
                f = match random.random_bool(0.5) {
                    true => f.restart(),
                    false => bare(f),
                };
                assert_same(&before, &seen(&f, &model), "accepted and sorted");
                let name = format!("accepted{round}");
                let appended = f.append(&name, b"AFTER").unwrap();
                assert!(
                    ids.insert(appended.appends[0].log_id, name).is_none(),
                    "log id reused"
                );
                for log in model.keys() {
                    f.append(log, b"AFTER").unwrap();
                }
                f = f.restart();
            }
        });
        if let Err(e) = r {
            let m = e
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| e.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_default();
            let key: String = m.lines().next().unwrap_or("").chars().take(400).collect();
            failures.entry(key).or_default().push(seed);
        }
    }
    let _ = std::panic::take_hook();
    assert!(
        failures.is_empty(),
        "by seed (repeat one with WALD_SEED): {failures:?}"
    );
}
