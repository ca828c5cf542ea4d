//! Appends of one client in a closed loop, or the same of Redis's usual client, as one line of JSON.
//!
//! ```text
//! appends wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]
//! ```
//!
//! Each append has 128 B and is durable: Redis must have `appendonly yes` and `appendfsync always`. Every language has
//! such a program, in `client/*/bench`; `.ci/run bench/languages` runs them beside each other. This one takes the settings of
//! TLS and tokens from the environment, for `.ci/run bench/tls`.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use redis::aio::MultiplexedConnection;
use wald_client::{Client, ClientBuilder, Durability};

const PAYLOAD: [u8; 128] = [b'x'; 128];
const WARM_UP: Duration = Duration::from_secs(1);

/// A client of one of the servers.
#[derive(Clone)]
enum BenchClient {
    Wald(Client),
    Redis(MultiplexedConnection),
}

impl BenchClient {
    async fn append(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Wald(client) => {
                let append = client.append("bench", PAYLOAD.to_vec());
                append.durability(Durability::Durable).await?;
            }
            Self::Redis(connection) => {
                let mut append = redis::cmd("XADD");
                append.arg("bench").arg("*").arg("d").arg(&PAYLOAD);
                append.query_async::<String>(connection).await?;
            }
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (server, endpoint, in_flight, seconds, shared) = match arguments.as_slice() {
        [server, endpoint, in_flight, seconds] => (*server, *endpoint, *in_flight, *seconds, true),
        [server, endpoint, in_flight, seconds, "--unary"] => {
            (*server, *endpoint, *in_flight, *seconds, false)
        }
        _ => bail!("usage: appends wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]"),
    };
    let in_flight: usize = in_flight.parse().context("IN_FLIGHT is a number")?;
    let seconds: f64 = seconds.parse().context("SECONDS is a number")?;
    let peer = match server {
        "wald" => {
            let client = ClientBuilder::from_env()?
                .endpoint(endpoint)
                .share_appends(shared);
            BenchClient::Wald(client.connect().await?)
        }
        "redis" => {
            let client = redis::Client::open(format!("redis://{endpoint}"))?;
            BenchClient::Redis(client.get_multiplexed_async_connection().await?)
        }
        other => bail!("{other:?} is neither wald nor redis"),
    };
    let counts = Arc::new(AtomicBool::new(false));
    let ends = Arc::new(AtomicBool::new(false));
    let loops: Vec<_> = (0..in_flight)
        .map(|_| {
            let (mut peer, counts, ends) = (peer.clone(), Arc::clone(&counts), Arc::clone(&ends));
            tokio::spawn(async move {
                let mut times = Vec::new();
                while !ends.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    peer.append().await?;
                    if counts.load(Ordering::Relaxed) {
                        times.push(begun.elapsed());
                    }
                }
                anyhow::Ok(times)
            })
        })
        .collect();
    tokio::time::sleep(WARM_UP).await;
    let begun = Instant::now();
    counts.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    counts.store(false, Ordering::Relaxed);
    let measured = begun.elapsed();
    ends.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    for one in loops {
        times.extend(one.await??);
    }
    times.sort_unstable();
    let at = |share: f64| {
        let place = (times.len() as f64 * share) as usize;
        times.get(place.min(times.len().saturating_sub(1)))
    };
    let micros = |share| at(share).map_or(0, Duration::as_micros);
    println!(
        r#"{{"client": "rust", "server": "{server}", "in_flight": {in_flight}, "acks": {}, "seconds": {:.3}, "p50_us": {}, "p99_us": {}}}"#,
        times.len(),
        measured.as_secs_f64(),
        micros(0.5),
        micros(0.99),
    );
    Ok(ExitCode::SUCCESS)
}
