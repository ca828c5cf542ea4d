//! Cursors: moved alone or with a batch, and shown only when the move is durable.

use super::*;
use crate::api::error::{CursorError, FailedCheck};
use crate::api::record::{CursorCommit, NamedCursor};
use crate::base::ids::Name;
use crate::base::promise::Awaited;
use crate::disk::Disk;

fn name(cursor: &str) -> Name {
    Name::new(cursor).unwrap()
}

pub(super) fn to(log: &str, cursor: &str, lsn: u64) -> CursorCommit {
    CursorCommit {
        log: LogName::new(log).unwrap(),
        cursor: name(cursor),
        lsn: Lsn::new(lsn),
        expected_lsn: None,
        log_id: None,
    }
}

impl Fixture {
    pub(super) fn commit(&self, commit: CursorCommit) -> Result<NamedCursor, CursorError> {
        let mut future = Box::pin(self.core.commit_cursor(commit));
        let mut context = Context::from_waker(Waker::noop());
        let waits = future.as_mut().poll(&mut context);
        assert!(waits.is_pending());
        self.core.turn();
        match future.as_mut().poll(&mut context) {
            Poll::Ready(answer) => answer,
            Poll::Pending => panic!("a turn flushes"),
        }
    }

    fn forget(&self, log: &str, cursor: &str) -> Result<(), CursorError> {
        let mut future = Box::pin(self.core.delete_cursor(target(log), name(cursor)));
        let mut context = Context::from_waker(Waker::noop());
        assert!(future.as_mut().poll(&mut context).is_pending());
        self.core.turn();
        match future.as_mut().poll(&mut context) {
            Poll::Ready(answer) => answer,
            Poll::Pending => panic!("a turn flushes"),
        }
    }

    /// Names and lsns of the cursors of a log.
    fn cursors(&self, log: &str) -> Vec<(String, u64)> {
        let mut found = Vec::new();
        let mut after = None;
        // The pages hold two cursors.
        loop {
            let page = self
                .core
                .list_cursors(&target(log), after.as_deref(), 2)
                .unwrap();
            let Some(last) = page.last() else {
                return found;
            };
            after = Some(last.name.as_str().to_owned());
            let pairs = page
                .iter()
                .map(|c| (c.name.as_str().to_owned(), c.lsn.get()));
            found.extend(pairs);
        }
    }
}

fn pairs(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
    expected
        .iter()
        .map(|(n, lsn)| ((*n).to_owned(), *lsn))
        .collect()
}

#[test]
fn cursors_stay_where_they_were_moved_to_over_every_kind_of_start() {
    let mut f = Fixture::new();
    for number in 0..9u8 {
        f.append("a", &[number]).unwrap();
    }
    f.commit(to("a", "x", 3)).unwrap();
    f.commit(to("a", "y", 9)).unwrap();
    f.commit(to("a", "x", 5)).unwrap();
    f.commit(to("a", "z", 0)).unwrap();
    f.commit(to("a", "gone", 1)).unwrap();
    f.forget("a", "gone").unwrap();
    // Backwards too: a consumer may want to read again.
    f.commit(to("a", "y", 2)).unwrap();
    let expected = pairs(&[("x", 5), ("y", 2), ("z", 0)]);
    assert_eq!(f.cursors("a"), expected);
    f = f.restart();
    assert_eq!(f.cursors("a"), expected);
    f = f.restart_cleanly();
    assert_eq!(f.cursors("a"), expected);
    while f.disk.list("checkpoint").unwrap().is_empty() {
        f.core.pool_in_turn().unwrap();
        f.append("filler", &[5; 9000]).unwrap();
    }
    f.commit(to("a", "x", 6)).unwrap();
    f = f.restart();
    assert_eq!(f.cursors("a"), pairs(&[("x", 6), ("y", 2), ("z", 0)]));
    assert!(matches!(
        f.core.cursor(&target("a"), &name("gone")),
        Err(CursorError::NotFound { .. })
    ));
    // A deletion removes the cursors of the log.
    let mut deleted = f.core.delete_in_turn(target("a"));
    f.core.turn();
    assert!(
        Future::poll(
            Pin::new(&mut deleted),
            &mut Context::from_waker(Waker::noop())
        )
        .is_ready()
    );
    f.append("a", b"new").unwrap();
    assert_eq!(f.cursors("a"), []);
}

#[test]
fn a_wrong_move_is_refused_and_moves_nothing() {
    let config = StorageConfig {
        max_cursors_per_log: 2,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    f.append("a", b"0").unwrap();
    assert!(matches!(
        f.commit(to("none", "x", 0)),
        Err(CursorError::Target(TargetError::NotFound { .. }))
    ));
    assert!(matches!(
        f.commit(to("a", "x", 2)),
        Err(CursorError::Append(AppendError::CursorBeyondTail { tail, .. })) if tail.get() == 1
    ));
    let expecting = |cursor, lsn, expected| CursorCommit {
        expected_lsn: Some(Lsn::new(expected)),
        ..to("a", cursor, lsn)
    };
    f.commit(expecting("x", 1, 0)).unwrap();
    let Err(CursorError::Append(AppendError::ConditionsFailed(failed))) =
        f.commit(expecting("x", 1, 0))
    else {
        panic!("refused");
    };
    let check = FailedCheck::CursorMismatch {
        cursor: name("x"),
        expected: Lsn::ZERO,
        actual: Lsn::new(1),
    };
    assert_eq!(failed[0].check, check);
    f.commit(to("a", "y", 0)).unwrap();
    assert!(matches!(
        f.commit(to("a", "z", 0)),
        Err(CursorError::Append(AppendError::Quota { limit: 2, .. }))
    ));
    f.commit(to("a", "y", 1)).unwrap();
    f.forget("a", "y").unwrap();
    f.commit(to("a", "z", 0)).unwrap();
    assert!(matches!(
        f.forget("a", "y"),
        Err(CursorError::NotFound { .. })
    ));
    let id = f.core.logs.by_name("a").unwrap().id;
    let of_another = CursorCommit {
        log_id: Some(crate::base::ids::LogId::new(id.get() + 1)),
        ..to("a", "x", 0)
    };
    let Err(CursorError::Append(AppendError::ConditionsFailed(failed))) = f.commit(of_another)
    else {
        panic!("refused");
    };
    assert!(matches!(failed[0].check, FailedCheck::LogReplaced { .. }));
    assert_eq!(f.cursors("a"), pairs(&[("x", 1), ("z", 0)]));
}

#[test]
fn a_cursor_in_a_batch_moves_with_its_records_or_not_at_all() {
    let f = Fixture::new();
    f.append("in", b"0").unwrap();
    f.append("in", b"1").unwrap();
    let with = |data: &[u8], cursors: Vec<CursorCommit>| Batch {
        cursors,
        ..batch(&[("out", &[data])])
    };
    f.append_batch(with(b"a", vec![to("in", "x", 1), to("out", "own", 0)]))
        .unwrap_err();
    f.append("out", b"first").unwrap();
    f.append_batch(with(b"a", vec![to("in", "x", 1), to("out", "own", 1)]))
        .unwrap();
    assert_eq!(f.cursors("in"), pairs(&[("x", 1)]));
    assert_eq!(f.cursors("out"), pairs(&[("own", 1)]));
    // A failed condition of the records keeps the cursor. A failed condition of the cursor appends no records.
    let mut wrong = with(b"b", vec![to("in", "x", 2)]);
    wrong.logs[0].guard.expected_lsn = Some(Lsn::new(77));
    let mut both = wrong.clone();
    both.cursors[0].expected_lsn = Some(Lsn::new(9));
    f.append_batch(wrong).unwrap_err();
    let Err(AppendError::ConditionsFailed(failed)) = f.append_batch(both) else {
        panic!("refused");
    };
    assert_eq!(failed.len(), 2, "all that failed are told");
    f.append_batch(with(b"b", vec![to("in", "x", 3)]))
        .unwrap_err();
    assert_eq!(
        (f.cursors("in"), f.contents("out").len()),
        (pairs(&[("x", 1)]), 2)
    );
    // A batch that names a cursor twice is refused. A batch of only a cursor is accepted.
    let twice = with(b"b", vec![to("in", "x", 2), to("in", "x", 2)]);
    assert!(matches!(
        f.append_batch(twice),
        Err(AppendError::Invalid(_))
    ));
    let alone = Batch {
        cursors: vec![to("in", "x", 2)],
        ..Batch::default()
    };
    let answer = f.append_batch(alone).unwrap();
    assert!(answer.appends.is_empty() && answer.position.is_some());
    let f = f.restart();
    assert_eq!(f.cursors("in"), pairs(&[("x", 2)]));
    assert_eq!(f.contents("out").len(), 2);
}

#[test]
fn a_move_that_a_power_cut_could_take_back_is_not_shown() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    f.commit(to("a", "x", 0)).unwrap();
    let mut moves: Vec<Awaited<_>> =
        vec![
            f.core
                .move_cursor(crate::journal::committer::CursorChange::Commit(to(
                    "a", "x", 1,
                ))),
        ];
    f.core.write_in_turn();
    let mut context = Context::from_waker(Waker::noop());
    assert!(Future::poll(Pin::new(&mut moves[0]), &mut context).is_pending());
    assert_eq!(f.cursors("a"), pairs(&[("x", 0)]));
    f.core.turn();
    assert!(Future::poll(Pin::new(&mut moves[0]), &mut context).is_ready());
    assert_eq!(f.cursors("a"), pairs(&[("x", 1)]));
}

#[test]
fn a_batch_makes_no_more_cursors_than_a_log_may_have() {
    let config = StorageConfig {
        max_cursors_per_log: 2,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    f.append("a", b"0").unwrap();
    f.append("b", b"0").unwrap();
    f.commit(to("a", "x", 0)).unwrap();
    let of = |cursors: &[(&str, &str)]| Batch {
        cursors: cursors.iter().map(|(log, name)| to(log, name, 1)).collect(),
        ..Batch::default()
    };
    assert!(matches!(
        f.append_batch(of(&[("a", "y"), ("b", "y"), ("a", "z")])),
        Err(AppendError::Quota { limit: 2, .. })
    ));
    assert_eq!(f.cursors("a"), pairs(&[("x", 0)]));
    f.append_batch(of(&[("a", "y"), ("b", "y"), ("b", "z"), ("a", "x")]))
        .unwrap();
    assert_eq!(f.cursors("a"), pairs(&[("x", 1), ("y", 1)]));
    assert_eq!(f.cursors("b"), pairs(&[("y", 1), ("z", 1)]));
}
