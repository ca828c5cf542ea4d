//! Repeats of producers, fences, sessions: retries are safe, and old writers are shut out.

use super::*;
use crate::api::engine::Session;
use crate::api::error::{FailedCheck, FenceError};
use crate::api::record::{LogCheck, LogConfig, Producer, SyncMode};
use crate::base::ids::Name;
use crate::disk::Disk;

fn producer(epoch: u64, sequence: u64) -> Producer {
    Producer {
        id: Name::new("p").unwrap(),
        epoch,
        sequence,
    }
}

/// A batch of one record for each log, by producer `p`.
pub(super) fn of(logs: &[&str], data: &[u8], epoch: u64, sequence: u64) -> Batch {
    let parts: Vec<(&str, &[&[u8]])> = Vec::new();
    let mut batch = batch(&parts);
    for log in logs {
        batch.logs.push(LogRecords {
            log: LogName::new(log).unwrap(),
            records: vec![record(data)].into(),
            guard: Guard::default(),
            producer: Some(producer(epoch, sequence)),
        });
    }
    batch
}

/// Whether an answer equals the first one, apart from the mark of a repeat and the durability.
fn is_repeat_of(again: &Appended, first: &Appended) -> bool {
    let mut appends = first.appends.clone();
    appends.iter_mut().for_each(|a| a.deduplicated = true);
    again.appends == appends && again.position == first.position
}

impl Fixture {
    fn answer(&self, batch: Batch) -> Result<Appended, AppendError> {
        self.append_batch(batch)
    }

    fn fence(
        &self,
        log: &str,
        epoch: Option<u64>,
    ) -> Result<crate::api::engine::Fenced, FenceError> {
        let mut awaited = self.core.fence(target(log), epoch);
        self.core.turn();
        awaited_now(&mut awaited).expect("a turn flushes")
    }

    /// Fills segments until there is a checkpoint, and a start reads none of the log's frames.
    fn roll_far(&self) {
        while self.disk.list("checkpoint").unwrap().is_empty() {
            self.core.pool_in_turn().unwrap();
            self.append("filler", &[5; 9000]).unwrap();
        }
    }
}

fn awaited_now<T>(awaited: &mut crate::base::promise::Awaited<T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match Future::poll(Pin::new(awaited), &mut context) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

#[test]
fn a_repeat_gets_the_original_answer_after_kills_rolls_trims_and_starts() {
    let mut f = Fixture::new();
    f.append("a", b"someone else's").unwrap();
    let mut firsts = Vec::new();
    for sequence in 0..3 {
        let data = [u8::try_from(sequence).unwrap()];
        firsts.push(f.answer(of(&["a"], &data, 7, sequence)).unwrap());
        f.clock.advance(1_000_000);
    }
    let both = f.answer(of(&["a", "new"], b"both", 7, 3)).unwrap_err();
    // Sequences count per log, and this log has no batch yet.
    assert!(
        matches!(
            both,
            AppendError::ProducerGap {
                expected: 0,
                given: 3,
                ..
            }
        ),
        "{both}"
    );
    let mut both = of(&["a", "new"], b"both", 7, 3);
    both.logs[1].producer = Some(producer(7, 0));
    let of_both = f.answer(both.clone()).unwrap();
    assert!(of_both.appends.iter().all(|append| !append.deduplicated));

    let check = |f: &Fixture| {
        let tail = f.read("a", 4).unwrap().tail_lsn;
        for (sequence, first) in (0..).zip(&firsts) {
            let data = [u8::try_from(sequence).unwrap()];
            let again = f.answer(of(&["a"], &data, 7, sequence)).unwrap();
            assert!(is_repeat_of(&again, first), "{again:?} {first:?}");
        }
        let again = f.answer(both.clone()).unwrap();
        assert!(is_repeat_of(&again, &of_both), "{again:?} {of_both:?}");
        assert_eq!(f.read("a", 4).unwrap().tail_lsn, tail);
    };
    check(&f);
    f = f.restart();
    check(&f);
    f = f.restart_cleanly();
    check(&f);
    let mut trim = f.core.trim_in_turn(target("a"), Lsn::new(4));
    f.core.turn();
    awaited_now(&mut trim).unwrap().unwrap();
    check(&f);
    f = f.restart();
    check(&f);
    f.roll_far();
    check(&f);
    f = f.restart();
    check(&f);
    f = f.restart_cleanly();
    check(&f);
    assert_eq!(
        f.answer(of(&["a"], b"next", 7, 4)).unwrap().appends[0]
            .first_lsn
            .get(),
        5
    );
}

#[test]
fn a_repeat_in_flight_waits_with_the_original_and_shares_its_failure() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    // In one group.
    let mut tickets = [0, 0].map(|sequence| f.submit(of(&["a"], b"x", 0, sequence)));
    f.core.turn();
    let [first, again] = tickets.each_mut().map(|t| settled(t).unwrap().unwrap());
    assert!(is_repeat_of(&again, &first));
    // The batch is written and not flushed: a request for less is answered, one for more waits.
    let mut weak = f.core.enqueue(of(&["a"], b"y", 0, 1), Durability::Written);
    f.core.turn();
    assert_eq!(
        settled(&mut weak).unwrap().unwrap().durability,
        Durability::Written
    );
    let mut weak = f.core.enqueue(of(&["a"], b"y", 0, 1), Durability::Written);
    f.core.turn();
    let again = settled(&mut weak).unwrap().unwrap();
    assert_eq!(
        (again.durability, again.appends[0].deduplicated),
        (Durability::Written, true)
    );
    assert!(f.core.journal.durable() < f.core.journal.written());
    let again = f.answer(of(&["a"], b"y", 0, 1)).unwrap();
    assert_eq!(again.durability, Durability::Durable);
    assert_eq!(f.core.journal.durable(), f.core.journal.written());
    // The original's flush fails.
    f.disk.fail_sync(1);
    let mut tickets = [2, 2].map(|sequence| f.submit(of(&["a"], b"z", 0, sequence)));
    f.core.turn();
    for ticket in &mut tickets {
        let answer = settled(ticket).unwrap();
        assert!(matches!(answer, Err(AppendError::Unknown(_))), "{answer:?}");
    }
}

#[test]
fn a_wrong_batch_of_a_producer_is_refused_with_the_expected_one() {
    let config = StorageConfig {
        producer_window: 10,
        max_producers_per_log: 2,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    let unknown = f.answer(of(&["a"], b"x", 0, 1)).unwrap_err();
    assert!(matches!(
        unknown,
        AppendError::ProducerGap { expected: 0, .. }
    ));
    assert!(f.read("a", 0).is_err(), "a refusal makes no log");
    for sequence in 0..20 {
        f.answer(of(&["a"], b"x", 1, sequence)).unwrap();
    }
    let refused = |batch| f.answer(batch).unwrap_err();
    assert!(matches!(
        refused(of(&["a"], b"y", 1, 19)),
        AppendError::ProducerConflict { sequence: 19, .. }
    ));
    assert!(matches!(
        refused(of(&["a"], b"x", 1, 21)),
        AppendError::ProducerGap { expected: 20, .. }
    ));
    assert!(matches!(
        refused(of(&["a"], b"x", 0, 20)),
        AppendError::ProducerFenced { current: 1, .. }
    ));
    assert!(matches!(
        refused(of(&["a"], b"x", 2, 20)),
        AppendError::ProducerGap { expected: 0, .. }
    ));
    assert!(matches!(
        refused(of(&["a"], b"x", 1, 9)),
        AppendError::ProducerExpired { oldest: 10, .. }
    ));
    assert!(f.answer(of(&["a"], b"x", 1, 10)).unwrap().appends[0].deduplicated);
    // One batch has a repeat and a new part.
    let mut mixed = of(&["a", "b"], b"x", 1, 19);
    mixed.logs[1].producer = Some(producer(1, 0));
    assert!(matches!(
        refused(mixed),
        AppendError::ProducerConflict { .. }
    ));
    // One part has no producer, so its repeat could not be recognised.
    let mut half = of(&["a", "b"], b"x", 1, 20);
    half.logs[1].producer = None;
    assert!(matches!(
        refused(half),
        AppendError::Invalid(crate::api::error::InvalidBatch::ProducerMissing { .. })
    ));
    // A log forgets no producer to stay within the limit.
    let named = |name: &str| {
        let mut batch = of(&["a"], b"x", 0, 0);
        batch.logs[0].producer.as_mut().unwrap().id = Name::new(name).unwrap();
        batch
    };
    f.answer(named("second")).unwrap();
    assert!(matches!(
        refused(named("third")),
        AppendError::Quota {
            used: 2,
            limit: 2,
            ..
        }
    ));
    assert!(f.answer(named("second")).unwrap().appends[0].deduplicated);
    // A newer epoch takes over, and begins with sequence 0.
    assert!(!f.answer(of(&["a"], b"x", 2, 0)).unwrap().appends[0].deduplicated);
    assert!(matches!(
        refused(of(&["a"], b"x", 1, 19)),
        AppendError::ProducerFenced { current: 2, .. }
    ));
    // A repeat is recognised before any condition is checked.
    let mut again = of(&["a"], b"x", 2, 0);
    again.logs[0].guard.expected_lsn = Some(Lsn::new(999));
    again.logs[0].guard.must_not_exist = true;
    assert!(f.answer(again).unwrap().appends[0].deduplicated);
}

#[test]
fn deleting_a_log_takes_nothing_from_clients_that_knew_it() {
    let f = Fixture::new();
    let first = f.answer(of(&["a"], b"x", 0, 0)).unwrap();
    let id = first.appends[0].log_id;
    let mut deleted = f.core.delete_in_turn(target("a"));
    f.core.turn();
    awaited_now(&mut deleted).unwrap().unwrap();
    let with_id = |sequence| {
        let mut batch = of(&["a"], b"x", 0, sequence);
        batch.logs[0].guard.log_id = Some(id);
        batch
    };
    let replaced = |error: AppendError| match error {
        AppendError::ConditionsFailed(failed) => {
            matches!(failed[0].check, FailedCheck::LogReplaced { .. })
        }
        _ => false,
    };
    assert!(replaced(f.answer(with_id(0)).unwrap_err()), "a repeat");
    assert!(replaced(f.answer(with_id(1)).unwrap_err()));
    assert!(f.read("a", 0).is_err(), "nothing came into being");
    f.append("a", b"another").unwrap();
    assert!(replaced(f.answer(with_id(0)).unwrap_err()), "a repeat");
    assert!(replaced(f.answer(with_id(1)).unwrap_err()));
    let old = LogTarget {
        log_id: Some(id),
        ..target("a")
    };
    let mut fence = f.core.fence(old, None);
    f.core.turn();
    assert!(matches!(
        awaited_now(&mut fence).unwrap(),
        Err(FenceError::Target(TargetError::Replaced { .. }))
    ));
    assert_eq!(f.contents("a"), [b"another"]);
}

#[test]
fn after_a_fence_no_append_of_an_older_writer_succeeds() {
    let mut f = Fixture::new();
    f.append("a", b"0").unwrap();
    let by = |epoch: Option<u64>| {
        let mut batch = batch(&[("a", &[b"x"])]);
        batch.logs[0].guard.writer_epoch = epoch;
        batch
    };
    f.answer(by(Some(0))).unwrap();
    // In one turn: appends of epoch 0 around a fence.
    let mut before = f.submit(by(None));
    let mut fence = f.core.fence(target("a"), None);
    let mut after = [None, Some(0), Some(1), Some(2)].map(|epoch| f.submit(by(epoch)));
    f.core.turn();
    assert_eq!(
        settled(&mut before).unwrap().unwrap().appends[0]
            .first_lsn
            .get(),
        2
    );
    let fenced = awaited_now(&mut fence).unwrap().unwrap();
    assert_eq!((fenced.tail_lsn.get(), fenced.writer_epoch), (3, 1));
    let after = after.each_mut().map(|ticket| settled(ticket).unwrap());
    for (given, answer) in [None, Some(0), Some(1), Some(2)].into_iter().zip(after) {
        match answer {
            Ok(appended) => {
                assert_eq!((given, appended.appends[0].first_lsn.get()), (Some(1), 3));
            }
            Err(AppendError::ConditionsFailed(failed)) => {
                let check = FailedCheck::Fenced { given, current: 1 };
                assert_eq!(failed[0].check, check);
            }
            Err(error) => panic!("{error}"),
        }
    }
    // An explicit epoch must exceed the current one.
    assert!(matches!(
        f.fence("a", Some(1)),
        Err(FenceError::Fenced { current: 1, .. })
    ));
    assert_eq!(f.fence("a", Some(9)).unwrap().writer_epoch, 9);
    // A fence creates a missing log.
    let made = f.fence("new", None).unwrap();
    assert_eq!((made.tail_lsn.get(), made.writer_epoch), (0, 1));
    f = f.restart();
    assert!(f.answer(by(Some(1))).is_err());
    f.answer(by(Some(9))).unwrap();
    f.roll_far();
    f = f.restart();
    assert!(f.append("new", b"x").is_err());
    assert!(f.answer(by(None)).is_err());
    assert_eq!(f.fence("a", None).unwrap().writer_epoch, 10);
    // A condition on a log that is not written may omit the epoch.
    let check = |epoch| LogCheck {
        log: LogName::new("a").unwrap(),
        guard: Guard {
            must_exist: true,
            writer_epoch: epoch,
            ..Guard::default()
        },
    };
    let with = |epoch| Batch {
        checks: vec![check(epoch)],
        ..batch(&[("b", &[b"x"])])
    };
    f.answer(with(None)).unwrap();
    f.answer(with(Some(10))).unwrap();
    assert!(f.answer(with(Some(9))).is_err());
}

#[test]
fn a_fence_that_a_power_cut_could_take_back_is_not_shown() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let epoch = |f: &Fixture| {
        let log = f.core.logs.by_name("a").unwrap();
        let durable = f.core.journal.durable();
        log.info(f.core.tail(&log, Visibility::Durable), durable, durable)
            .writer_epoch
    };
    let mut fence = f.core.fence(target("a"), None);
    let mut refused = f.submit(batch(&[("a", &[b"x"])]));
    f.core.write_in_turn();
    assert!(awaited_now(&mut fence).is_none());
    assert!(settled(&mut refused).is_none(), "it tells of the fence");
    assert_eq!(epoch(&f), 0);
    f.core.turn();
    assert!(awaited_now(&mut fence).unwrap().is_ok());
    assert!(settled(&mut refused).unwrap().is_err());
    assert_eq!(epoch(&f), 1);
}

#[test]
fn settings_that_a_power_cut_could_take_back_are_not_shown() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let shown = || {
        let log = f.core.logs.by_name("a").unwrap();
        let durable = f.core.journal.durable();
        let info = log.info(f.core.tail(&log, Visibility::Durable), durable, durable);
        (info.config.max_record_bytes, info.update_time)
    };
    let created = shown();
    f.clock.advance(1000);
    let limit = |bytes| LogConfig {
        max_record_bytes: Some(bytes),
        ..LogConfig::default()
    };
    let name = LogName::new("a").unwrap();
    let mut changes = [7, 8].map(|bytes| f.core.configure_in_turn(name.clone(), limit(bytes)));
    f.core.write_in_turn();
    assert!(
        changes
            .iter_mut()
            .all(|change| awaited_now(change).is_none())
    );
    assert_eq!(shown(), created);
    f.core.turn();
    for change in &mut changes {
        awaited_now(change).unwrap().unwrap();
    }
    assert_eq!(shown().0, Some(8));
    assert!(shown().1 > created.1);
}

#[test]
fn a_session_ends_at_its_first_refusal_and_earlier_requests_are_applied() {
    let f = Fixture::new();
    let session = Session::new();
    let submit = |data: &[u8], expected: Option<u64>| {
        let mut batch = batch(&[("a", &[data])]);
        batch.logs[0].guard.expected_lsn = expected.map(Lsn::new);
        f.core.enqueue_of(&session, batch, Durability::Durable)
    };
    let mut tickets: Vec<Ticket> = (0..6)
        .map(|number| submit(&[number], (number == 3).then_some(77)))
        .collect();
    // The end of a session does not affect other requests.
    let mut other = f.submit(batch(&[("b", &[b"x"])]));
    f.core.turn();
    let answers: Vec<_> = tickets.iter_mut().map(|t| settled(t).unwrap()).collect();
    assert!(answers[..3].iter().all(Result::is_ok));
    assert!(matches!(answers[3], Err(AppendError::ConditionsFailed(_))));
    for answer in &answers[4..] {
        assert!(matches!(answer, Err(AppendError::SessionEnded)));
    }
    assert!(settled(&mut other).unwrap().is_ok());
    let mut late = submit(b"late", None);
    f.core.turn();
    assert!(matches!(
        settled(&mut late),
        Some(Err(AppendError::SessionEnded))
    ));
    assert_eq!(f.contents("a").len(), 3);

    // One request is refused before it queues, and earlier ones are still applied.
    let session = Session::new();
    let submit = |data: &[u8]| {
        let batch = batch(&[("a", &[data])]);
        f.core.enqueue_of(&session, batch, Durability::Durable)
    };
    let mut good = submit(b"good");
    let mut bad = submit(&vec![0; 2 << 20]);
    let mut after = submit(b"after");
    f.core.turn();
    assert!(settled(&mut good).unwrap().is_ok());
    assert!(matches!(
        settled(&mut bad),
        Some(Err(AppendError::Invalid(_)))
    ));
    assert!(matches!(
        settled(&mut after),
        Some(Err(AppendError::SessionEnded))
    ));
}

#[test]
fn requests_are_joined_only_if_the_result_is_the_same() {
    let f = Fixture::new();
    let of = |log: &str, change: &dyn Fn(&mut Batch)| {
        let mut next = batch(&[(log, &[b"x"])]);
        change(&mut next);
        next
    };
    let expected =
        |lsn| move |batch: &mut Batch| batch.logs[0].guard.expected_lsn = Some(Lsn::new(lsn));
    let epoch = |batch: &mut Batch| batch.logs[0].guard.writer_epoch = Some(1);
    let missing = |batch: &mut Batch| batch.logs[0].guard.must_not_exist = true;
    let by_producer = |batch: &mut Batch| {
        batch.logs[0].producer = Some(Producer {
            id: Name::new("p").unwrap(),
            epoch: 0,
            sequence: 0,
        });
    };
    let too_large = |batch: &mut Batch| {
        let data = vec![0; 2 << 20].into();
        let record = Record {
            data,
            ..Record::default()
        };
        batch.logs[0].records = vec![record].into();
    };
    let wrong_sum = |batch: &mut Batch| {
        let record = Record {
            crc32c: Some(1),
            ..Record::default()
        };
        batch.logs[0].records = vec![record].into();
    };
    let plain = |_: &mut Batch| {};
    let join = |first: Batch, next: Batch| {
        let (mut joined, records) = (first, next.logs[0].records.clone());
        match f.core.join(&mut joined, next) {
            Ok(()) => Some(joined),
            Err(back) => {
                assert_eq!(back.logs[0].records, records);
                assert_eq!(joined.requests(), 1);
                None
            }
        }
    };
    assert!(join(of("a", &plain), of("a", &plain)).is_some());
    assert!(join(of("a", &epoch), of("a", &epoch)).is_some());
    assert!(join(of("a", &expected(7)), of("a", &expected(8))).is_some());
    for (first, next) in [
        (of("a", &plain), of("b", &plain)),
        (of("a", &plain), of("a", &epoch)),
        (of("a", &epoch), of("a", &plain)),
        (of("a", &plain), of("a", &expected(1))),
        (of("a", &expected(7)), of("a", &expected(7))),
        (of("a", &expected(7)), of("a", &plain)),
        (of("a", &missing), of("a", &missing)),
        (of("a", &plain), of("a", &by_producer)),
        (of("a", &by_producer), of("a", &plain)),
        (of("a", &plain), of("a", &too_large)),
        (of("a", &plain), of("a", &wrong_sum)),
        (of("a", &plain), of("a", &|batch| batch.single = true)),
        (of("a", &plain), batch(&[("a", &[b"x"]), ("b", &[b"x"])])),
        (of("a", &plain), batch(&[("a", &[])])),
        (batch(&[("a", &[])]), of("a", &plain)),
        (of("a", &too_large), of("a", &plain)),
        (of("a", &expected(u64::MAX)), of("a", &expected(0))),
        (of("a", &expected(u64::MAX)), of("b", &plain)),
    ] {
        assert!(
            join(first.clone(), next.clone()).is_none(),
            "{first:?} {next:?}"
        );
    }
    // At most 64 requests are joined, and only as many bytes as are worth a copy.
    let most = |data: &[u8]| {
        let mut joined = batch(&[("a", &[data])]);
        while f.core.join(&mut joined, batch(&[("a", &[data])])).is_ok() {}
        joined.requests()
    };
    assert_eq!(most(b"x"), 64);
    let bytes = f.config.limits().max_batch_bytes.min(32 << 10);
    assert_eq!(most(&[0; 5_000]), bytes / 5_008);
    // This log has its own limit.
    let config = LogConfig {
        max_record_bytes: Some(1),
        ..LogConfig::default()
    };
    let created = f
        .core
        .create_in_turn(LogName::new("small").unwrap(), config);
    f.core.turn();
    crate::api::ticket::block_on(created).unwrap();
    assert!(join(of("small", &plain), of("small", &plain)).is_some());
    assert!(join(of("small", &plain), batch(&[("small", &[b"xy"])])).is_none());
    assert!(join(batch(&[("small", &[b"xy"])]), of("small", &plain)).is_none());
}

#[test]
fn requests_that_were_joined_are_refused_as_the_first_and_applied_as_all() {
    let f = Fixture::new();
    let session = Session::new();
    let of = |expected: u64, count: u64| {
        let request = |lsn| {
            let mut request = batch(&[("a", &[&[7]])]);
            request.logs[0].guard.expected_lsn = Some(Lsn::new(lsn));
            request
        };
        let mut joined = request(expected);
        for lsn in expected + 1..expected + count {
            f.core.join(&mut joined, request(lsn)).unwrap();
        }
        f.core.enqueue_of(&session, joined, Durability::Durable)
    };
    let (mut good, mut wrong, mut after) = (of(0, 5), of(6, 3), of(5, 1));
    f.core.turn();
    let appended = settled(&mut good).unwrap().unwrap();
    let append = &appended.appends[0];
    assert_eq!(
        (append.first_lsn, append.next_lsn),
        (Lsn::ZERO, Lsn::new(5))
    );
    assert!(matches!(
        settled(&mut wrong),
        Some(Err(AppendError::ConditionsFailed(failed))) if failed.len() == 1
    ));
    assert!(matches!(
        settled(&mut after),
        Some(Err(AppendError::SessionEnded))
    ));
    assert_eq!(f.restart().contents("a").len(), 5);
}

#[test]
fn a_void_group_takes_back_producers_fences_cursors_and_its_sessions() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    f.answer(of(&["a"], b"1", 3, 0)).unwrap();
    f.fence("b", Some(4)).unwrap();
    f.disk.fail_write(1, std::io::ErrorKind::StorageFull, 512);
    let session = Session::new();
    let enqueue = |batch| f.core.enqueue_of(&session, batch, Durability::Durable);
    let mut tickets = vec![
        enqueue(of(&["a"], b"2", 3, 1)),
        enqueue(of(&["a"], b"2", 3, 1)),
        enqueue(of(&["a"], b"new", 4, 0)),
    ];
    let mut fence = f.core.fence(target("b"), None);
    let mut made = f.core.fence(target("c"), None);
    f.core.turn();
    for ticket in &mut tickets {
        let answer = settled(ticket).unwrap();
        assert!(
            matches!(answer, Err(AppendError::DiskFull(_))),
            "{answer:?}"
        );
    }
    assert!(awaited_now(&mut fence).unwrap().is_err());
    assert!(awaited_now(&mut made).unwrap().is_err());
    let mut late = enqueue(batch(&[("a", &[b"late"])]));
    f.core.turn();
    assert!(matches!(
        settled(&mut late),
        Some(Err(AppendError::SessionEnded))
    ));
    let f = f.restart();
    assert!(f.answer(of(&["a"], b"1", 3, 0)).unwrap().appends[0].deduplicated);
    assert!(!f.answer(of(&["a"], b"2", 3, 1)).unwrap().appends[0].deduplicated);
    assert_eq!(f.fence("b", None).unwrap().writer_epoch, 5);
    assert!(f.read("c", 0).is_err());
}

#[test]
fn later_requests_of_a_session_in_memory_do_not_outlive_earlier_ones() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let manual = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let mut created = f.core.create_in_turn(LogName::new("m").unwrap(), manual);
    f.core.turn();
    awaited_now(&mut created).unwrap().unwrap();
    f.disk.fail_write(1, std::io::ErrorKind::StorageFull, 0);
    let session = Session::new();
    let mut tickets = ["a", "m", "m"].map(|log| {
        f.core
            .enqueue_by_mode(Some(&session), batch(&[(log, &[b"1"])]))
    });
    f.core.turn();
    let [first, rest @ ..] = &mut tickets;
    assert!(matches!(
        settled(first),
        Some(Err(AppendError::DiskFull(_)))
    ));
    for after in rest {
        let answer = settled(after).unwrap();
        assert!(
            matches!(
                answer,
                Err(AppendError::DiskFull(_) | AppendError::SessionEnded)
            ),
            "{answer:?}"
        );
    }
    let held = contents(&f.core, "m", Visibility::Accepted).unwrap();
    assert!(held.is_empty(), "nothing behind a refusal is applied");
}

#[test]
fn records_that_a_batch_checks_are_as_safe_as_its_answer() {
    let manual = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let checking = |tail| {
        let mut batch = batch(&[("a", &[b"x"])]);
        batch.checks.push(LogCheck {
            log: LogName::new("m").unwrap(),
            guard: Guard {
                expected_lsn: Some(Lsn::new(tail)),
                ..Guard::default()
            },
        });
        batch
    };
    for (tail, passes) in [(0, false), (1, true)] {
        let f = Fixture::new();
        let name = LogName::new("m").unwrap();
        let mut created = f.core.create_in_turn(name, manual.clone());
        f.core.turn();
        awaited_now(&mut created).unwrap().unwrap();
        let mut accepted = f
            .core
            .enqueue_by_mode(None, batch(&[("m", &[b"in memory"])]));
        f.core.turn();
        settled(&mut accepted).unwrap().unwrap();
        assert_eq!(f.append_batch(checking(tail)).is_ok(), passes);
        assert_eq!(f.restart().contents("m").len(), 1, "told, and kept");
    }
}

#[test]
fn a_refusal_waits_for_all_parts_of_a_batch_that_it_reveals() {
    let f = Fixture::new();
    f.append("b", b"0").unwrap();
    f.answer(of(&["a"], b"1", 0, 0)).unwrap();
    let mut first = f.submit(of(&["b"], b"1", 0, 0));
    f.core.write_in_turn();
    // For `b` this sequence is the next one, which reveals that an unflushed batch was applied.
    let mut both = of(&["a", "b"], b"1", 0, 0);
    both.logs[1].producer = Some(producer(0, 1));
    let mut refused = f.submit(both);
    f.core.write_in_turn();
    assert!(settled(&mut first).is_none() && settled(&mut refused).is_none());
    f.core.turn();
    assert!(matches!(
        settled(&mut refused),
        Some(Err(AppendError::ProducerConflict { .. }))
    ));
}

#[test]
fn a_producer_of_a_log_that_appends_do_not_create_is_refused() {
    let config = StorageConfig {
        auto_create: false,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    for sequence in [0, 7] {
        let refused = f.answer(of(&["a"], b"1", 0, sequence)).unwrap_err();
        assert!(
            matches!(refused, AppendError::LogNotFound { .. }),
            "{refused}"
        );
    }
}

#[test]
fn largest_step_of_epochs_and_largest_sequence_are_like_others() {
    const STEP: u64 = 1 << 32;
    let mut f = Fixture::new();
    f.append("a", b"0").unwrap();
    assert_eq!(f.fence("a", Some(STEP)).unwrap().writer_epoch, STEP);
    let fenced = |sequence| {
        let mut batch = of(&["a"], b"1", STEP, sequence);
        batch.logs[0].guard.writer_epoch = Some(STEP);
        batch
    };
    f.answer(fenced(0)).unwrap();
    for clean in [false, true, false] {
        f = match clean {
            true => f.restart_cleanly(),
            false => f.restart(),
        };
        assert!(f.fence("a", Some(u64::MAX)).is_err());
        assert!(f.answer(fenced(0)).unwrap().appends[0].deduplicated);
        assert!(matches!(
            f.answer(fenced(u64::MAX)),
            Err(AppendError::ProducerGap { expected: 1, .. })
        ));
        f.roll_far();
        assert!(f.append("a", b"2").is_err());
    }
}

#[test]
fn damage_lowers_no_epoch_and_admits_repeats_only_behind_lost_records() {
    let mut f = Fixture::new();
    f.append("a", b"0").unwrap();
    let fenced = |sequence: u64, epoch| {
        let data = sequence.to_le_bytes();
        let mut batch = of(&["a"], &data, 0, sequence);
        batch.logs[0].guard.writer_epoch = Some(epoch);
        batch
    };
    let mut epoch = 0;
    for round in 0..3 {
        epoch = f.fence("a", None).unwrap().writer_epoch;
        f.answer(fenced(2 * round, epoch)).unwrap();
        // In one group.
        let mut append = f.submit(fenced(2 * round + 1, epoch));
        let mut fence = f.core.fence(target("b"), None);
        f.core.turn();
        settled(&mut append).unwrap().unwrap();
        awaited_now(&mut fence).unwrap().unwrap();
        f.core.idle();
        if round < 2 {
            f = f.restart();
        }
    }
    let disk = f.disk.clone();
    drop(f);
    for path in faults::used_paths(&disk) {
        let bytes = disk.contents(&path).unwrap();
        let end = bytes.iter().rposition(|byte| *byte != 0).unwrap();
        for at in (0..=end).filter(|at| *at >= 8192) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x40;
            let changed = disk.copy();
            changed.replace(&path, flipped);
            for changed in [damage::without_indexes(&changed), changed] {
                let f = Fixture::on(changed);
                let what = format!("{path}, byte {at}");
                for log in ["a", "b"] {
                    let log = f.core.logs.by_name(log).expect("known");
                    assert_eq!(log.state.read().writer_epoch(), epoch, "{what}");
                }
                for sequence in 0..6 {
                    match f.answer(fenced(sequence, epoch)) {
                        Ok(again) if again.appends[0].deduplicated => {}
                        Ok(again) => {
                            assert_eq!(sequence, 5, "{what}");
                            assert_eq!(again.appends[0].first_lsn.get(), 7, "{what}");
                        }
                        Err(AppendError::ProducerExpired { .. }) => {}
                        Err(error) => panic!("{what}, {sequence}: {error}"),
                    }
                }
            }
        }
    }
}
