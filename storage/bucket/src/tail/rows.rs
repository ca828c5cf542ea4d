//! A read of all parts, in order. A hole is an error.

use slatedb::DbIterator;
use tokio::time::timeout;

use super::error::{TailError, TailErrorKind};
use super::keys::{self, TailPart};
use super::settings::READ_TIMEOUT;

/// The order that parts must have.
#[derive(Debug, Default)]
struct Order {
    /// Segment and end of the part before.
    before: Option<(u64, u64)>,
}

impl Order {
    /// Checks that a part follows the one before: at its end, or in a later segment at or beyond it. Links between
    /// segments are in the groups; the restore checks them.
    fn check(&mut self, part: &TailPart) -> Result<(), String> {
        let TailPart {
            segment, position, ..
        } = *part;
        if let Some((last, end)) = self.before {
            let follows = match segment == last {
                true => position == end,
                false => segment > last && position >= end,
            };
            if !follows {
                return Err(format!(
                    "the rows have a hole: position {position} of segment {segment} comes after the end {end} of \
                     segment {last}"
                ));
            }
        }
        let end = position.checked_add(part.bytes.len() as u64);
        let end = end.ok_or_else(|| format!("a row at position {position} is too long"))?;
        self.before = Some((segment, end));
        Ok(())
    }
}

/// All parts that were stored when the read began.
pub struct TailRows {
    place: String,
    parts: DbIterator,
    order: Order,
}

impl TailRows {
    pub(super) fn new(place: &str, parts: DbIterator) -> Self {
        Self {
            place: place.to_owned(),
            parts,
            order: Order::default(),
        }
    }

    /// The parts behind this segment and end.
    pub(super) fn after(place: &str, parts: DbIterator, before: Option<(u64, u64)>) -> Self {
        Self {
            order: Order { before },
            ..Self::new(place, parts)
        }
    }

    /// The next part; `None` behind the last.
    ///
    /// # Errors
    /// `Damaged` if a row is missing or has another form, `Unreachable` if the bucket gives no answer. No part follows.
    pub async fn next(&mut self) -> Result<Option<TailPart>, TailError> {
        let row = timeout(READ_TIMEOUT, self.parts.next())
            .await
            .map_err(|_| TailError::late(&self.place, "read a row"))?
            .map_err(|error| TailError::of(&self.place, "read a row", &error, None))?;
        let Some(row) = row else {
            return Ok(None);
        };
        let damaged = |what| TailError::new(TailErrorKind::Damaged, &self.place, what);
        let part = keys::read_part(&row.key, row.value).map_err(damaged)?;
        self.order.check(&part).map_err(damaged)?;
        Ok(Some(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(parts: &[(u64, u64, usize)]) -> Result<(), String> {
        let mut order = Order::default();
        parts.iter().try_for_each(|&(segment, position, length)| {
            order.check(&TailPart {
                segment,
                position,
                bytes: vec![0; length].into(),
            })
        })
    }

    #[test]
    fn parts_follow_each_other_within_and_across_segments() {
        check(&[(3, 100, 10), (3, 110, 5), (4, 115, 1), (9, 5_000, 1)]).unwrap();
        for wrong in [
            &[(3, 100, 10), (3, 111, 5)][..],
            &[(3, 100, 10), (3, 109, 5)],
            &[(3, 100, 10), (4, 109, 5)],
            &[(3, 100, 10), (4, 110, 5), (4, 116, 5)],
            &[(3, u64::MAX, 1)],
        ] {
            check(wrong).unwrap_err();
        }
    }
}
