//! The end of a process whose record among the nodes is another's.

use wald_bucket::Membership;

use crate::serve::Exit;

/// The end, if another process has joined with the name of this one. It does not begin again: the two would end each
/// other for ever. `None` if there is no such process, or the bucket gives no answer.
pub(super) async fn doubled(membership: &Membership, node: &str, place: &str) -> Option<Exit> {
    let other = membership.replaced_by().await.ok()??;
    let text = format!(
        "{place}: another process has joined the nodes of the store with the node_id {node:?} ({}), so this one has ended; \
         two nodes with one node_id end each other: give each a node_id and a data directory of its own, or stop the other \
         process before you start this one again",
        other.endpoint
    );
    Some(Exit::new(Exit::CONFIG, text))
}

/// The end of a stand-by that has lost its record.
pub(super) async fn lost(membership: &Membership, node: &str, place: &str) -> Exit {
    let other = doubled(membership, node, place).await;
    other.unwrap_or_else(|| {
        let text = format!(
            "{place}: the other nodes have seen no sign of life of this one for too long; it joins them again"
        );
        Exit::new(Exit::UNAVAILABLE, text).or_again(true)
    })
}
