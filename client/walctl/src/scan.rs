//! `walctl read`, `scan` and `tail`.

use anyhow::Result;
use wald_client::{Batch, Client, Gap, GapReason, Reason, Scan, ScanEvent, Selector, Visibility};

use crate::args::{ReadArgs, ScanArgs, TailArgs};
use crate::exit::{ExitKind, Usage};
use crate::output::{Out, Output, is_unread, say};
use crate::parse::{Moment, ScanBegin};

pub(crate) async fn read(client: &Client, args: ReadArgs, output: Output) -> Result<ExitKind> {
    let mut read = client.read(args.log.clone()).max_records(args.max);
    if let Some(lsn) = args.from {
        read = read.from_lsn(lsn);
    }
    if let Some(Moment(timestamp_us)) = args.time {
        read = read.from_timestamp_us(timestamp_us);
    }
    if let Some(count) = args.last {
        read = read.last(count);
    }
    if let Some(wait) = args.wait {
        read = read.wait(wait);
    }
    if let Some(visibility) = args.visibility {
        read = read.visibility(visibility.into());
    }
    if args.any_node {
        read = read.any_node();
    }
    let mut out = Out::of_records(output, args.unescaped)?;
    // To the contract 0 is the default; to the caller it is none at all.
    if args.max == 0 {
        return Ok(ExitKind::Ok);
    }
    let page = read.await?;
    let (next, tail) = (page.next_lsn, page.tail_lsn);
    let batch = Batch {
        log: args.log,
        log_id: 0,
        records: page.records,
    };
    out.batch(&batch, false)?;
    out.end()?;
    if batch.records.is_empty() {
        say(&format!("nothing there; the next lsn will be {tail}"));
        return Ok(ExitKind::NotFound);
    }
    if next < tail {
        let is_full = batch.records.len() as u64 >= u64::from(args.max);
        let more = match is_full {
            true => "--max allows more at a time",
            // The server ends a page before it passes its bound in bytes.
            false => {
                "this page is as large as an answer gets (1 MiB), and `walctl scan` reads all pages"
            }
        };
        say(&format!(
            "there are more, up to lsn {}: --from {next} continues; {more}",
            tail.get().saturating_sub(1),
        ));
    }
    Ok(ExitKind::Ok)
}

pub(crate) async fn scan(client: &Client, args: ScanArgs, output: Output) -> Result<ExitKind> {
    let one_log = args.log.is_some();
    if !one_log && (args.until.is_some() || matches!(args.from, Some(ScanBegin::Lsn(_)))) {
        return Err(Usage(
            "an lsn means something in one log only; name the log, or begin at a time: \
                          --from 10m"
                .into(),
        )
        .into());
    }
    if let (Some(ScanBegin::Lsn(from)), Some(until)) = (args.from, args.until)
        && from >= until
    {
        return Err(Usage(format!(
            "--from {from} --until {until} is no record: --until is the lsn after the last one, so it \
             must exceed --from"
        ))
        .into());
    }
    let out = Out::of_records(output, args.unescaped)?;
    if let (Some(log), true) = (&args.log, args.follow) {
        announce_wait(client, log, args.any_node).await?;
    }
    let selector = selector(args.log, args.prefix);
    let mut scan = if args.follow {
        client.follow(selector)
    } else {
        client.scan(selector)
    };
    scan = match args.from {
        Some(ScanBegin::Lsn(lsn)) => scan.from_lsn(lsn),
        Some(ScanBegin::Time(Moment(timestamp_us))) => scan.from_timestamp_us(timestamp_us),
        None => scan,
    };
    if let Some(lsn) = args.until {
        scan = scan.until_lsn(lsn);
    }
    match args.limit {
        // To the contract 0 is no bound; to the caller it is none at all.
        Some(0) => return Ok(ExitKind::Ok),
        Some(count) => scan = scan.max_records(count),
        None => {}
    }
    let visibility = args
        .visibility
        .map_or(Visibility::Unspecified, Visibility::from);
    if args.any_node {
        scan = scan.any_node();
    }
    print(scan.visibility(visibility), out, !one_log).await
}

pub(crate) async fn tail(client: &Client, args: TailArgs, output: Output) -> Result<ExitKind> {
    let visibility = args
        .visibility
        .map_or(Visibility::Unspecified, Visibility::from);
    let out = Out::of_records(output, args.unescaped)?;
    if let Some(log) = &args.log {
        announce_wait(client, log, args.any_node).await?;
    }
    let one_log = args.log.is_some();
    // Of several logs a scan begins at no number of records before its tail.
    let last = args.last.unwrap_or(if one_log { 10 } else { 0 });
    let selector = selector(args.log, args.prefix);
    let mut scan = client.follow(selector).last(last).visibility(visibility);
    if args.any_node {
        scan = scan.any_node();
    }
    match args.limit {
        Some(0) => return Ok(ExitKind::Ok),
        Some(count) => scan = scan.max_records(count),
        None => {}
    }
    print(scan, out, !one_log).await
}

/// One log, or all with a prefix, or all.
fn selector(log: Option<String>, prefix: Option<String>) -> Selector {
    match (log, prefix) {
        (Some(log), _) => Selector::Log(log),
        (None, Some(prefix)) => Selector::Prefix(prefix),
        (None, None) => Selector::All,
    }
}

/// Says that a log is waited for, if there is none: a slip of the finger would wait for ever.
async fn announce_wait(client: &Client, log: &str, any_node: bool) -> Result<()> {
    let found = match any_node {
        // Only the owner answers GetTail. An empty page of a copy says as much.
        true => {
            let page = client.read(log).last(0).max_records(1).any_node();
            page.await.map(drop)
        }
        false => {
            let tail = client.get_tail(log, Visibility::Unspecified, None);
            tail.await.map(drop)
        }
    };
    match found {
        Err(error) if error.reason() == Some(Reason::LogNotFound) => {
            say(&format!(
                "there is no log {log} yet; waiting for its first record (`walctl logs` lists logs)"
            ));
            Ok(())
        }
        Err(error) => Err(error.into()),
        Ok(()) => Ok(()),
    }
}

async fn print(scan: Scan, out: Out, name_log: bool) -> Result<ExitKind> {
    let mut exit = ExitKind::Ok;
    match print_until(scan, out, name_log, &mut exit).await {
        // A loss that was found before nobody read on stays one.
        Err(error) if is_unread(&error) => Ok(exit),
        printed => printed.map(|()| exit),
    }
}

/// Prints until the end, and notes a loss in `exit`.
async fn print_until(scan: Scan, mut out: Out, name_log: bool, exit: &mut ExitKind) -> Result<()> {
    let mut events = scan.open();
    // A repeated complaint helps nobody.
    let mut complaint = String::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(ScanEvent::Batch(batch)) => {
                complaint.clear();
                out.batch(&batch, name_log)?;
            }
            Ok(ScanEvent::Gap(gap)) => {
                say(&sentence(&gap));
                if matches!(gap.reason, GapReason::Quarantined | GapReason::Lost) {
                    *exit = ExitKind::DataLoss;
                }
            }
            // Flushed, so that no reader waits for the next message.
            Ok(ScanEvent::Progress(_)) => {
                complaint.clear();
                out.flush()?;
            }
            Ok(ScanEvent::Interrupted(error)) => {
                let said = format!("{error}; going on");
                if said != complaint {
                    say(&said);
                    complaint = said;
                }
            }
            Err(error) => {
                // Records before the error are good. If nobody reads them, the error is still one.
                return match out.flush().map_err(anyhow::Error::from) {
                    Err(other) if !is_unread(&other) => Err(other),
                    _ => Err(error.into()),
                };
            }
        }
    }
    Ok(out.end()?)
}

/// Describes missing records and the reason.
fn sentence(gap: &Gap) -> String {
    let why = match gap.reason {
        GapReason::Trimmed => "trimmed",
        GapReason::Expired => "expired by retention",
        GapReason::Quarantined => {
            "damaged on the server's disk, or given up by `wald repair`; a backup may have them"
        }
        GapReason::Lost => "lost in a crash before they were durable",
        GapReason::Deleted => "gone with the log, which was deleted",
        GapReason::Unspecified => "missing",
    };
    let from = gap
        .from_lsn
        .map_or_else(|| "?".to_owned(), |lsn| lsn.to_string());
    match gap.to_lsn {
        Some(to) => format!(
            "records {from} to {} of {} are {why}",
            to.get().saturating_sub(1),
            gap.log
        ),
        None => format!("records from {from} on of {} are {why}", gap.log),
    }
}

#[cfg(test)]
mod tests {
    use wald_client::Lsn;

    use super::*;

    #[test]
    fn gap_is_named_with_its_first_and_last_lsn() {
        let mut gap = Gap {
            log: "orders".into(),
            from_lsn: Some(Lsn::new(3)),
            to_lsn: Some(Lsn::new(7)),
            reason: GapReason::Trimmed,
        };
        assert_eq!(sentence(&gap), "records 3 to 6 of orders are trimmed");
        gap.to_lsn = None;
        assert_eq!(sentence(&gap), "records from 3 on of orders are trimmed");
    }
}
