//! `walctl read`, `scan` and `tail`.

use anyhow::Result;
use wald_client::{Client, Gap, GapReason, Scan, ScanEvent, Selector, Visibility};

use crate::args::{ReadArgs, ScanArgs, TailArgs};
use crate::exit::{Exit, Usage};
use crate::output::{Out, Output};
use crate::parse::{Moment, Place};

pub(crate) async fn read(client: &Client, args: ReadArgs, output: Output) -> Result<Exit> {
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
    let page = read.await?;
    let mut out = Out::new(output);
    for record in &page.records {
        out.record(&args.log, record, false)?;
    }
    out.flush()?;
    if page.records.is_empty() {
        eprintln!(
            "walctl: nothing there; the next lsn will be {}",
            page.tail_lsn
        );
        return Ok(Exit::NotFound);
    }
    if page.next_lsn < page.tail_lsn {
        eprintln!(
            "walctl: there are more, up to lsn {}: --from {} goes on, --max allows more at a time",
            page.tail_lsn.get().saturating_sub(1),
            page.next_lsn
        );
    }
    Ok(Exit::Ok)
}

pub(crate) async fn scan(client: &Client, args: ScanArgs, output: Output) -> Result<Exit> {
    let one_log = args.log.is_some();
    if !one_log && (args.until.is_some() || matches!(args.from, Some(Place::Lsn(_)))) {
        return Err(Usage("an lsn means something in one log only".into()).into());
    }
    let selector = match (args.log, args.prefix) {
        (Some(log), _) => Selector::Log(log),
        (None, Some(prefix)) => Selector::Prefix(prefix),
        (None, None) => Selector::All,
    };
    let mut scan = if args.follow {
        client.follow(selector)
    } else {
        client.scan(selector)
    };
    scan = match args.from {
        Some(Place::Lsn(lsn)) => scan.from_lsn(lsn),
        Some(Place::Time(Moment(timestamp_us))) => scan.from_timestamp_us(timestamp_us),
        None => scan,
    };
    if let Some(lsn) = args.until {
        scan = scan.until_lsn(lsn);
    }
    match args.limit {
        // To the contract 0 is no bound; to the caller it is none at all.
        Some(0) => return Ok(Exit::Ok),
        Some(count) => scan = scan.max_records(count),
        None => {}
    }
    let visibility = args
        .visibility
        .map_or(Visibility::Unspecified, Visibility::from);
    print(scan.visibility(visibility), output, !one_log).await
}

pub(crate) async fn tail(client: &Client, args: TailArgs, output: Output) -> Result<Exit> {
    let visibility = args
        .visibility
        .map_or(Visibility::Unspecified, Visibility::from);
    let scan = client
        .follow(args.log)
        .last(args.last)
        .visibility(visibility);
    print(scan, output, false).await
}

async fn print(scan: Scan, output: Output, name_log: bool) -> Result<Exit> {
    let mut out = Out::new(output);
    let mut exit = Exit::Ok;
    let mut events = scan.open();
    // The same complaint again and again helps nobody.
    let mut complaint = String::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(ScanEvent::Batch(batch)) => {
                complaint.clear();
                for record in &batch.records {
                    out.record(&batch.log, record, name_log)?;
                }
            }
            Ok(ScanEvent::Gap(gap)) => {
                eprintln!("walctl: {}", sentence(&gap));
                if matches!(gap.reason, GapReason::Quarantined | GapReason::Lost) {
                    exit = Exit::DataLoss;
                }
            }
            // Whoever reads shall not wait for the next message.
            Ok(ScanEvent::Progress(_)) => {
                complaint.clear();
                out.flush()?;
            }
            Ok(ScanEvent::Interrupted(error)) => {
                let said = format!("walctl: {error}; going on");
                if said != complaint {
                    eprintln!("{said}");
                    complaint = said;
                }
            }
            Err(error) => {
                // What came before the error is good.
                out.flush()?;
                return Err(error.into());
            }
        }
    }
    out.flush()?;
    Ok(exit)
}

/// What is missing, and why.
fn sentence(gap: &Gap) -> String {
    let why = match gap.reason {
        GapReason::Trimmed => "trimmed",
        GapReason::Expired => "expired by retention",
        GapReason::Quarantined => "damaged on the server's disk; restore them from a backup",
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
