//! The five minutes of README.md: appends under conditions, reads back, follows.

use wald_client::{Client, Condition, DEFAULT_ENDPOINT, Durability, ScanEvent};

#[tokio::main]
async fn main() -> Result<(), wald_client::Error> {
    let endpoint = std::env::var("WALD_ENDPOINT").unwrap_or_else(|_| DEFAULT_ENDPOINT.into());
    let client = Client::connect(endpoint).await?;

    let ack = client
        .append("orders", "first")
        .durability(Durability::Durable)
        .await?;
    client
        .append("orders", "second")
        .expected_lsn(ack.lsn.next())
        .await?;

    client
        .append_batch()
        .log_if("orders", Condition::new().must_exist(), ["third", "fourth"])
        .log("audit", ["two orders"])
        .await?;

    let page = client.read("orders").last(10).await?;
    println!(
        "{} records, the tail is {}",
        page.records.len(),
        page.tail_lsn
    );

    let mut orders = client.follow("orders").open();
    while let Some(event) = orders.next().await {
        match event? {
            ScanEvent::Batch(batch) => {
                for record in batch.records {
                    println!("{} {:?}", record.lsn, record.data);
                }
            }
            ScanEvent::Gap(gap) => println!("missing: {gap:?}"),
            // Keep progress.cursor to resume here. This follower has enough when it is caught up.
            ScanEvent::Progress(progress) if progress.caught_up => break,
            ScanEvent::Progress(_) => {}
            ScanEvent::Interrupted(error) => eprintln!("{error}; it resumes by itself"),
        }
    }
    Ok(())
}
