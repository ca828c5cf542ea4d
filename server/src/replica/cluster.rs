//! The nodes of the store as this one has seen them last, for operators.

use std::time::Duration;

use parking_lot::Mutex;
use wald_bucket::{NodeState, OwnerRecord, OwnerState, SeenNode};
use wald_proto::v1;

use crate::convert;

/// The owner and the nodes.
#[derive(Default)]
pub(crate) struct Cluster(Mutex<SeenCluster>);

#[derive(Default)]
struct SeenCluster {
    role: v1::ReplicaRole,
    owner: Option<OwnerRecord>,
    nodes: Vec<SeenNode>,
    /// Values of lease_ttl that the operator knows to differ.
    known_ttls: Vec<u64>,
}

impl SeenCluster {
    /// Warns once if nodes that live have different values of lease_ttl. Each is judged by its own, so this is safe.
    fn compare_ttls(&mut self) {
        let alive = self.nodes.iter().filter(|node| node.is_alive());
        let mut ttls: Vec<u64> = alive.map(|node| node.record.ttl_ms).collect();
        ttls.sort_unstable();
        ttls.dedup();
        if ttls.len() > 1 && ttls != self.known_ttls {
            let alive = self.nodes.iter().filter(|node| node.is_alive());
            let shown: Vec<String> = alive
                .map(|node| format!("{} {} ms", node.name, node.record.ttl_ms))
                .collect();
            tracing::warn!(
                nodes = shown.join(", "),
                "the nodes of the store have different values of lease_ttl; the others judge each node by its own; set the same \
                 value on all of them"
            );
        }
        self.known_ttls = ttls;
    }
}

impl Cluster {
    /// Notes the owner and the nodes as they are now. `nodes`: `None` if only the owner was looked at.
    pub(super) fn note(&self, owner: &OwnerRecord, nodes: Option<&[SeenNode]>) {
        let mut seen = self.0.lock();
        seen.owner = Some(owner.clone());
        if let Some(nodes) = nodes {
            seen.nodes = nodes.to_vec();
            seen.compare_ttls();
        }
    }

    /// Notes the role of this node.
    pub(super) fn note_role(&self, role: v1::ReplicaRole) {
        self.0.lock().role = role;
    }

    /// The role of this node, as metrics name it.
    pub(super) fn role(&self) -> &'static str {
        match self.0.lock().role {
            v1::ReplicaRole::Owner => "owner",
            v1::ReplicaRole::StandBy => "stand_by",
            _ => "joining",
        }
    }

    /// Number of the stand-bys that may take the store over.
    pub(super) fn stand_bys(&self) -> usize {
        let seen = self.0.lock();
        seen.owner.as_ref().map_or(0, |owner| owner.stand_bys.len())
    }

    /// Adds the owner and the nodes to the status of a node.
    pub(super) fn show(&self, status: &mut v1::ReplicaStatus) {
        let seen = self.0.lock();
        status.role = seen.role.into();
        if let Some(owner) = &seen.owner {
            status.owner_term = owner.term;
            status.stand_bys.clone_from(&owner.stand_bys);
            if owner.state != OwnerState::Released {
                status.owner_node_id.clone_from(&owner.node);
                status.owner_endpoint.clone_from(&owner.endpoint);
            }
        }
        status.nodes = seen.nodes.iter().map(shown).collect();
    }
}

fn shown(node: &SeenNode) -> v1::ReplicaNode {
    let is_silent = node.unchanged >= Duration::from_millis(node.record.ttl_ms);
    let role = match node.record.state {
        NodeState::Left => v1::ReplicaRole::Left,
        NodeState::Dead => v1::ReplicaRole::Dead,
        _ if is_silent => v1::ReplicaRole::Dead,
        NodeState::Joining => v1::ReplicaRole::Joining,
        NodeState::StandBy => v1::ReplicaRole::StandBy,
        NodeState::Owner => v1::ReplicaRole::Owner,
    };
    v1::ReplicaNode {
        node_id: node.name.clone(),
        endpoint: node.record.endpoint.clone(),
        role: role.into(),
        silence: Some(convert::proto_duration(node.unchanged)),
    }
}
