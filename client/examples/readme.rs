//! The other examples of README.md, word for word, with the code that they omit around them;
//! against the daemon at WALD_ENDPOINT. Prints a line for each.
//!
//! `.ci/run docs/examples` runs it, and sees to it that README.md says nothing else. docs/ quotes it, too.

use std::cell::Cell;
use std::time::Duration;

use prost::Message as _;
use tokio::sync::Notify;
use wald_client::proto::FollowerState;
use wald_client::{
    Client, Cursor, CursorCommit, Error, ErrorKind, FileState, Gap, Lsn, Reason, ScanEvent,
    StoredRecord, TlsOptions, Visibility,
};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let endpoint = std::env::var("WALD_ENDPOINT").expect("WALD_ENDPOINT says where the daemon is");
    let client = Client::connect(endpoint).await?;
    // Every example has a log of its own to begin with.
    for name in ["orders", "audit", "invoices"] {
        let _ = client.delete_log(name, None).await;
    }

    produce(&client, &["one", "two", "three"]).await?;
    println!("ok producer");
    produce_after_a_restart(&client).await?;
    println!("ok producer in a way of one's own");
    append_pipelined(&client).await?;
    println!("ok appender");
    follow(&client).await?;
    println!("ok follower");
    move_a_cursor(&client).await?;
    println!("ok cursor");
    produce_over_restarts(&client).await?;
    println!("ok producer over restarts");
    follow_over_restarts(&client).await?;
    println!("ok follower over restarts");
    understand_errors(&client).await;
    println!("ok errors");
    // There is no such file, and no such server.
    let error = connect_by_tls().await.expect_err("an error");
    assert!(matches!(error.kind(), ErrorKind::Tls { .. }), "{error}");
    println!("ok tls");
    Ok(())
}

async fn connect_by_tls() -> Result<Client, Error> {
    let tls = TlsOptions::new()
        .ca_file("ca.pem") // default: the CAs of the system
        .identity_files("client.pem", "client.key") // if the server requires a certificate
        .server_name("wald.internal"); // default: the host of the endpoint
    let client = Client::builder("https://10.0.0.7:6925")
        .tls(tls)
        .token_file("token") // if the server requires a token
        .connect()
        .await?;
    Ok(client)
}

async fn understand_errors(client: &Client) {
    match client.append("orders", "again").expected_lsn(0).await {
        Ok(ack) => println!("at {}", ack.lsn),
        Err(error) if error.reason() == Some(Reason::PositionMismatch) => {
            println!("the tail is {:?}", error.fact_number("actual_lsn"));
        }
        // With Outcome::Unknown the record is perhaps in the log.
        Err(error) => println!("{error}: {:?}, {:?}", error.outcome(), error.retry()),
    }
}

async fn tail(client: &Client) -> Result<Lsn, Error> {
    Ok(client
        .get_tail("orders", Visibility::Unspecified, None)
        .await?
        .tail_lsn)
}

async fn produce(client: &Client, orders: &[&'static str]) -> Result<(), Error> {
    let orders = orders.iter().copied();
    let producer = client.producer("orders").open().await?;
    let mut acks = Vec::new();
    for order in orders {
        acks.push(producer.append(order).await?); // waits only while the window is full
    }
    for ack in acks {
        println!("at {}", ack.await?.lsn);
    }
    producer.close().await?;
    assert_eq!(tail(client).await?, Lsn::new(3));
    Ok(())
}

async fn produce_after_a_restart(client: &Client) -> Result<(), Error> {
    let (id, epoch) = ("importer", 1);
    let before = client.producer("orders").id(id, epoch).open().await?;
    let log_id = before.log_id();
    before.append_batch(["four"]).await?.await?;
    before.append_batch(["five"]).await?.await?;
    before.close().await?;

    // The ack of the second batch, of sequence 1, was not stored.
    let first_stored = 1;
    let producer = client
        .producer("orders")
        .id(id, epoch)
        .log_id(log_id)
        .first_sequence(first_stored)
        .open()
        .await?;
    assert!(producer.append_batch(["five"]).await?.await?.deduplicated);
    producer.close().await?;
    assert_eq!(tail(client).await?, Lsn::new(5));
    Ok(())
}

/// The directory of states, empty at first.
fn states() -> std::path::PathBuf {
    std::env::temp_dir().join(format!("wald-readme-{}", std::process::id()))
}

async fn produce_over_restarts(client: &Client) -> Result<(), Error> {
    client.delete_log("orders", None).await?;
    let directory = states();
    std::fs::create_dir(&directory).expect("a directory");
    // As often as the program starts.
    for _ in 0..2 {
        let state = FileState::new(directory.join("orders.state"));
        let mut orders = client.producer("orders").open_durable(state).await?;
        for number in orders.next_sequence()..100 {
            orders.append_batch([format!("order {number}")]).await?;
        }
        orders.close().await?;
    }
    assert_eq!(tail(client).await?, Lsn::new(100));
    Ok(())
}

async fn follow_over_restarts(client: &Client) -> Result<(), Error> {
    let directory = states();
    let counting = async {
        let state = FileState::new(directory.join("count.state"));
        let mut orders = client.follow("orders").open_durable(state).await?;
        let mut count: u64 = orders.effects().map_or(0, |text| {
            let text = String::from_utf8_lossy(text);
            text.parse().expect("a number was kept")
        });
        while let Some(batches) = orders.next().await? {
            count += batches
                .iter()
                .map(|batch| batch.records.len() as u64)
                .sum::<u64>();
            orders.keep(count.to_string()).await?;
        }
        Ok::<_, Error>(())
    };
    // It follows without end.
    let is_kept = || {
        let state = std::fs::read(directory.join("count.state")).unwrap_or_default();
        FollowerState::decode(&state[..]).is_ok_and(|state| state.effects == "100")
    };
    let kept = async {
        while !is_kept() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        ended = counting => ended?,
        () = kept => {}
    }
    std::fs::remove_dir_all(&directory).expect("the directory");
    Ok(())
}

async fn append_pipelined(client: &Client) -> Result<(), Error> {
    let appender = client
        .appender()
        .linger(Duration::from_millis(2))
        .window_bytes(16 << 20)
        .open();
    let one = appender.append("orders", "first").await?;
    let batch = client
        .append_batch()
        .log("orders", ["second"])
        .log("audit", ["two orders"]);
    let both = appender.append_batch(batch).await?;
    println!("{} {:?}", one.await?.lsn, both.await?.appends);
    appender.close().await?; // sends the gathered records, waits for all acks
    assert_eq!(tail(client).await?, Lsn::new(7));
    Ok(())
}

async fn follow(client: &Client) -> Result<(), Error> {
    let mut scan = client.scan("orders").open();
    while let Some(event) = scan.next().await {
        event?;
    }
    let stored_cursor = scan.cursor().expect("the scan delivered something").clone();
    client.append("orders", "eighth").await?;
    client.append("orders", "ninth").await?;

    let (kept, enough) = (Cell::new(0), Notify::new());
    let gather = |records: Vec<StoredRecord>| {
        assert_eq!(
            records[0].lsn,
            Lsn::new(7 + kept.get()),
            "neither repeated nor skipped"
        );
        kept.set(kept.get() + records.len() as u64);
    };
    let miss = |gap: Gap| panic!("nothing is missing, but {gap:?}");
    let commit = |cursor: Option<Cursor>| {
        if cursor.is_some() && kept.get() == 2 {
            enough.notify_one();
        }
    };
    let following = async {
        let mut orders = client.follow("orders").after(stored_cursor).open();
        while let Some(event) = orders.next().await {
            match event? {
                ScanEvent::Batch(batch) => gather(batch.records), // in memory, until the cursor comes that covers them
                ScanEvent::Gap(gap) => miss(gap), // exactly what is missing, before what comes after it
                ScanEvent::Progress(progress) => commit(progress.cursor), // in one step with all that was gathered
                ScanEvent::Interrupted(error) => eprintln!("{error}"), // it reconnects and goes on by itself
            }
        }
        Ok::<(), Error>(())
    };
    tokio::select! {
        ended = following => panic!("a follower does not end by itself: {ended:?}"),
        () = enough.notified() => Ok(()),
    }
}

async fn move_a_cursor(client: &Client) -> Result<(), Error> {
    client
        .commit_cursor(CursorCommit::new("orders", "billing", 1))
        .await?;
    let (invoices, next_lsn) = (["an invoice"], 2);
    let cursor = client.get_cursor("orders", "billing", None).await?;
    client
        .append_batch()
        .log("invoices", invoices)
        .cursor(CursorCommit::new("orders", "billing", next_lsn).expected_lsn(cursor.lsn))
        .await?;
    assert_eq!(
        client.get_cursor("orders", "billing", None).await?.lsn,
        Lsn::new(2)
    );
    Ok(())
}
