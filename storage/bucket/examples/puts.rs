//! Times bare PUTs, one after the other, through the client that the daemon uses: `.ci/bench/replica.py` compares
//! REPLICATED appends with them. Credentials come from the environment.
//!
//! ```text
//! puts s3://BUCKET/PREFIX ENDPOINT NUMBER BYTES
//! ```
//!
//! Each PUT creates an object, as a row of the tail does. Prints the median in microseconds.

use std::env::args;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use wald_bucket::{Bucket, BucketSettings, BucketUrl, Put, Tally, WriteCondition};

const USAGE: &str = "usage: puts s3://BUCKET/PREFIX ENDPOINT NUMBER BYTES";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = args().skip(1).collect();
    let [url, endpoint, number, bytes] = arguments.as_slice() else {
        return Err(USAGE.into());
    };
    let (number, bytes): (usize, usize) = (number.parse()?, bytes.parse()?);
    let url: BucketUrl = url.parse()?;
    let settings = BucketSettings {
        endpoint: Some(endpoint.clone()),
        insecure: true,
        ..BucketSettings::default()
    };
    let bucket = Bucket::open(&url, &settings, Arc::new(Tally::default()))?;
    let object = Bytes::from(vec![b'x'; bytes]);
    let mut times = Vec::new();
    for name in 0..number {
        let began = Instant::now();
        let path = format!("puts/{name}");
        let put = bucket
            .put_if(&path, object.clone(), WriteCondition::Absent)
            .await?;
        times.push(began.elapsed().as_micros());
        if put == Put::Lost {
            return Err(format!("{path} exists already; use another prefix").into());
        }
    }
    times.sort_unstable();
    let median = times.get(number / 2).ok_or(USAGE)?;
    println!("{median}");
    Ok(())
}
