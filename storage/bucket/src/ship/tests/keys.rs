//! The key ring in the bucket: before rows, by one owner, after lost answers and late writes.

use super::*;
use crate::faults::StoreFault;
use crate::ship::keys;
use crate::tail::TailCopy;

/// A ring: its term and its generation as text.
struct Ring {
    generation: watch::Sender<u64>,
    term: Mutex<u64>,
    stored: Mutex<u64>,
}

impl Ring {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            generation: watch::Sender::new(1),
            term: Mutex::new(0),
            stored: Mutex::new(0),
        })
    }

    fn change(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }
}

impl ShippedRing for Ring {
    fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    fn ring(&self) -> (u64, Bytes) {
        let (term, generation) = (*self.term.lock().unwrap(), *self.generation.borrow());
        (generation, format!("{term} {generation}").into())
    }

    fn claim(&self, term: u64, _: Option<&[u8]>) -> Result<(), String> {
        *self.term.lock().unwrap() = term;
        self.change();
        Ok(())
    }

    fn term_of(&self, ring: &[u8]) -> Result<u64, String> {
        let text = std::str::from_utf8(ring).unwrap();
        Ok(text.split_once(' ').unwrap().0.parse().unwrap())
    }

    fn note_stored(&self, generation: u64) {
        *self.stored.lock().unwrap() = generation;
    }

    fn note_refused(&self, why: &ShipError) {
        panic!("{why}");
    }
}

/// The ring in the bucket.
async fn ring_in(bucket: &Bucket) -> String {
    let ring = read_key_ring(bucket).await.unwrap().unwrap();
    String::from_utf8(ring.to_vec()).unwrap()
}

/// Starts the owner of the next term.
async fn start(
    remote: &Remote,
    ring: &Arc<Ring>,
    engine: Arc<LocalEngine>,
) -> (Arc<LocalEngine>, JoinHandle<ShipEnd>, watch::Sender<bool>) {
    let tail = remote.own().await;
    let mut parts = parts(remote, Arc::clone(&engine), None);
    parts.keys = Some(Arc::clone(ring) as _);
    let mut shipper = Shipper::begin(&parts, tail, None).await.unwrap();
    let (stop, stopped) = watch::channel(false);
    let runs = tokio::spawn(async move { shipper.run(stopped).await });
    (engine, runs, stop)
}

/// End of the rows.
async fn end_of_rows(bucket: &Bucket) -> u64 {
    let mut copy = TailCopy::open(bucket).await.unwrap().unwrap();
    let mut end = 0;
    while let Some(row) = copy.next().await.unwrap() {
        end = row.position + row.bytes.len() as u64;
    }
    end
}

#[tokio::test(start_paused = true)]
async fn no_row_leaves_before_the_ring_that_its_keys_are_in() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let ring = Ring::new();
    let (engine, runs, stop) = start(&remote, &ring, open(machine.path(), config(true))).await;
    append(&engine, data(0, 500), Durability::Replicated)
        .await
        .unwrap();
    let before = end_of_rows(&remote.bucket).await;
    *remote.faults.only_in.lock().unwrap() = "keys/ring";
    remote.faults.next_puts([StoreFault::Unavailable; 20]);
    ring.change();
    let engine_of_wait = Arc::clone(&engine);
    let waits =
        tokio::spawn(
            async move { append(&engine_of_wait, data(1, 500), Durability::Replicated).await },
        );
    // DURABLE does not wait for the bucket.
    append(&engine, data(2, 500), Durability::Durable)
        .await
        .unwrap();
    until("some writes of the ring fail", || {
        remote.faults.puts.lock().unwrap().len() < 17
    })
    .await;
    assert_eq!(end_of_rows(&remote.bucket).await, before);
    assert!(!waits.is_finished());
    remote.faults.puts.lock().unwrap().clear();
    let _ = waits.await.unwrap();
    append(&engine, data(3, 500), Durability::Replicated)
        .await
        .unwrap();
    assert!(end_of_rows(&remote.bucket).await > before);
    let (generation, text) = ring.ring();
    assert_eq!(*ring.stored.lock().unwrap(), generation);
    assert_eq!(ring_in(&remote.bucket).await.as_bytes(), &*text);
    stop.send(true).unwrap();
    assert!(matches!(runs.await.unwrap(), ShipEnd::Shipped));
}

#[tokio::test(start_paused = true)]
async fn ring_that_changes_reaches_the_bucket_without_records_and_after_faults() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let ring = Ring::new();
    let (_engine, runs, stop) = start(&remote, &ring, open(machine.path(), config(true))).await;
    *remote.faults.only_in.lock().unwrap() = "keys/ring";
    for fault in [
        StoreFault::Unavailable,
        StoreFault::AnswerLost,
        StoreFault::Conflict,
        StoreFault::Late,
        StoreFault::OutOfSpace,
    ] {
        remote.faults.next_puts([fault, fault]);
        ring.change();
        let generation = *ring.generation.borrow();
        let begun = std::time::Instant::now();
        while *ring.stored.lock().unwrap() < generation {
            assert!(begun.elapsed() < Duration::from_secs(60), "{fault:?}");
            sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(
            ring_in(&remote.bucket).await,
            format!("1 {generation}"),
            "{fault:?}"
        );
    }
    stop.send(true).unwrap();
    runs.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn old_owner_that_wakes_does_not_write_the_ring_of_the_next_one() {
    let inner: Arc<InMemory> = Arc::default();
    let (old, new) = (remote_over(Arc::clone(&inner)), remote_over(inner));
    let ring = Ring::new();
    let owned = keys::ShippedKeys::claim(Arc::clone(&ring) as _, &old.bucket, 1).await;
    let owned = owned.unwrap();
    // The next one takes the ring while the old one writes it: the old one's last change is not lost.
    let takes = |found: &[u8]| {
        let text = std::str::from_utf8(found).unwrap();
        Ok(format!("2 {}", text.split_once(' ').unwrap().1).into())
    };
    ring.change();
    owned.store().await.unwrap();
    let taken = keys::take(&new.bucket, &takes).await.unwrap().unwrap();
    let generation = *ring.generation.borrow();
    assert_eq!(taken, format!("2 {generation}"));
    ring.change();
    for _ in 0..2 {
        let refused = owned.store().await.unwrap_err();
        assert!(
            matches!(&refused, ShipError::Tail(error) if error.kind() == TailErrorKind::Fenced),
            "{refused}"
        );
    }
    assert_eq!(ring_in(&new.bucket).await, format!("2 {generation}"));
}

#[tokio::test(start_paused = true)]
async fn shipper_ends_as_soon_as_a_later_term_has_written_the_ring() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let ring = Ring::new();
    let (_engine, runs, _stop) = start(&remote, &ring, open(machine.path(), config(true))).await;
    let takes = |_: &[u8]| Ok(Bytes::from_static(b"7 7"));
    keys::take(&remote.bucket, &takes).await.unwrap().unwrap();
    ring.change();
    assert!(matches!(runs.await.unwrap(), ShipEnd::Fenced { .. }));
    assert_eq!(ring_in(&remote.bucket).await, "7 7");
}
