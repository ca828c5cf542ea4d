//! Reports on sorted runs for operators.

use super::*;
use crate::api::error::{DumpError, VerifyError};
use crate::tools::dump::{DumpFilter, Dumped};
use crate::tools::verify::Offline;

#[test]
fn runs_and_segments_are_listed_in_the_order_of_the_journal_page_by_page() {
    let (disk, clock, _) = sorting::sorted_store();
    let (core, report) = open(&disk, &sorting::config(), &clock).unwrap();
    let all = core.describe_segments(None, 1000);
    let runs: Vec<_> = all.iter().filter(|info| info.sorted.is_some()).collect();
    assert!(runs.len() > 1 && runs.len() < all.len());
    assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].base));
    assert_eq!(all[0].sorted.unwrap().0, 1, "all from the first segment on");
    for pair in runs.windows(2) {
        assert!(pair[0].sorted.unwrap().1 < pair[1].sorted.unwrap().0);
    }
    let (mut paged, mut after) = (Vec::new(), None);
    loop {
        let page = core.describe_segments(after, 2);
        let Some(last) = page.last() else { break };
        after = Some(last.end);
        paged.extend(page);
    }
    assert_eq!(paged, all);
    let told = runs[0].contents.unwrap();
    assert!(told.records > 0 && told.logs > 0);
    let live = told.live_bytes.unwrap();
    assert!(live > 0 && live < runs[0].bytes);
    let fixture = Fixture {
        disk,
        clock,
        config: sorting::config(),
        core,
        report,
    };
    for log in ["a", "b/1", "b/2", "c", "idle"] {
        let tail = fixture.read_from(log, ReadStart::First).unwrap().tail_lsn;
        fixture.trim_to(log, tail.get());
    }
    let now = fixture.core.describe_segments(None, 1)[0].contents.unwrap();
    assert_eq!(now.live_bytes, Some(0), "what was trimmed does not live");
}

#[test]
fn a_run_is_verified_by_its_number_and_named_for_a_sorted_segment() {
    let (disk, clock, _) = sorting::sorted_store();
    let (core, _) = open(&disk, &sorting::config(), &clock).unwrap();
    let run = core.journal.runs()[0].id().get();
    let (runs, segments) = core.verifier.files_of(run).ok().unwrap();
    assert_eq!((runs.len(), segments.len()), (1, 0));
    let path = runs[0].segment.path();
    let found = |core: &Core| {
        let mut findings = Vec::new();
        let only = core.verifier.files_of(run).ok();
        let tell = &mut |progress: &mut crate::api::pace::VerifyProgress| {
            findings.append(&mut progress.findings);
        };
        let control = crate::api::pace::Control::new(0);
        assert!(core.verifier.verify(only, &control, tell).is_ok());
        findings
    };
    assert_eq!(found(&core), []);
    let mut bytes = disk.contents(&path).unwrap();
    bytes[9000] ^= 1;
    disk.replace(&path, bytes);
    let findings = found(&core);
    assert!(findings.iter().any(|f| f.lsns.is_some()), "{findings:?}");
    let refused = core.verifier.files_of(1).err();
    assert!(
        matches!(refused, Some(VerifyError::SegmentSorted { segment: 1, run: told }) if told == run)
    );
    let refused = core.verifier.files_of(9999).err();
    assert!(matches!(refused, Some(VerifyError::SegmentNotFound { .. })));
}

#[test]
fn a_dump_of_one_run_holds_only_that_and_of_a_missing_run_is_an_error() {
    let (disk, _, _) = sorting::sorted_store();
    let offline = Offline::open(Arc::new(disk)).unwrap();
    let dumped = |segment: u64| {
        let mut told = Vec::new();
        let filter = DumpFilter {
            segment: Some(segment),
            ..DumpFilter::default()
        };
        offline.dump_frames(&filter, &mut |piece| {
            if let Dumped::Segment(segment) = piece {
                told.push(segment);
            }
            Ok(())
        })?;
        offline.dump_indexes(&filter, &mut |_| Ok(()))?;
        Ok(told)
    };
    let mut all = Vec::new();
    offline
        .dump_frames(&DumpFilter::default(), &mut |piece| {
            if let Dumped::Segment(segment) = piece {
                all.push(segment);
            }
            Ok(())
        })
        .unwrap();
    let run = all[0].sorted.unwrap();
    assert!(run.first == 1 && run.last > 1 && run.base < run.end);
    assert_eq!(dumped(all[0].id).unwrap(), &all[..1]);
    let last = all.last().unwrap();
    assert_eq!(last.sorted, None);
    assert_eq!(dumped(last.id).unwrap(), std::slice::from_ref(last));
    let refused = |segment| match dumped(segment) {
        Err(DumpError::NotFound(what)) => what,
        other => panic!("{other:?}"),
    };
    assert!(refused(1).contains(&format!("in the sorted run {:016x}", all[0].id)));
    assert_eq!(
        refused(9999),
        "there is no segment 000000000000270f with frames"
    );
}
