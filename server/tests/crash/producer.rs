//! A producer: numbers its batches, and after a crash sends batches again whose outcome is
//! unknown, or which are lost. No batch is there twice.

use rand::RngExt;
use rand::rngs::StdRng;
use wald_proto::v1;

use super::ledger::{Ledger, Part};

/// Number of newest batches that are repeated; the daemon remembers 1,024.
const REMEMBERED: usize = 500;

pub(crate) struct Producer {
    pub(crate) log: String,
    id: String,
    /// Attempt and records of each batch, by sequence.
    batches: Vec<(usize, Vec<Part>)>,
    /// The sequence to send next.
    next: usize,
}

impl Producer {
    pub(crate) fn new(log: String) -> Self {
        Self {
            id: format!("producer of {log}"),
            log,
            batches: Vec::new(),
            next: 0,
        }
    }

    /// After a crash: goes on with the first batch that is not there. All before it are,
    /// and none after it is.
    pub(crate) fn begins(&mut self, ledger: &Ledger) {
        let applied = |(number, _): &(usize, Vec<Part>)| ledger.is_applied(*number);
        self.next = self.batches.iter().take_while(|b| applied(b)).count();
        let later = self.batches[self.next..].iter().position(applied);
        assert_eq!(later, None, "{} has a hole at {}", self.id, self.next);
    }

    /// The batch to send now, noted as an attempt: the next one, or one that was acked.
    pub(crate) fn send(
        &mut self,
        ledger: &mut Ledger,
        random: &mut StdRng,
    ) -> (usize, Vec<Part>, v1::Producer) {
        let mut sequence = self.next;
        if random.random_bool(0.2) && self.next > 0 {
            let old = random.random_range(self.next.saturating_sub(REMEMBERED)..self.next);
            if ledger.is_there(self.batches[old].0) {
                sequence = old;
            }
        }
        if sequence == self.batches.len() {
            let records = random.random_range(1..=3);
            let sizes = (0..records).map(|_| random.random_range(0..200)).collect();
            let attempt = ledger.attempt(&[(self.log.clone(), sizes)]);
            self.batches.push(attempt);
        }
        let (number, parts) = self.batches[sequence].clone();
        ledger.again(number, &parts);
        let producer = v1::Producer {
            id: self.id.clone(),
            epoch: 1,
            sequence: u64::try_from(sequence).unwrap(),
        };
        (number, parts, producer)
    }

    /// The batch was acked.
    pub(crate) fn acked(&mut self, producer: &v1::Producer) {
        let sequence = usize::try_from(producer.sequence).unwrap();
        self.next = self.next.max(sequence + 1);
    }
}
