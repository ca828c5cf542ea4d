//! `walctl cluster`: the nodes of a store in a bucket.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use wald_client::Client;
use wald_client::proto::{ReplicaNode, ReplicaRole, ReplicaStatus};
use wald_connection::ConnectionChoice;

use crate::args::ClusterCommand;
use crate::exit::ExitKind;
use crate::output::{Out, Output};
use crate::table::Table;

/// Maximum time to reach an owner that another node names.
const OWNER_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) async fn run(
    client: &Client,
    command: ClusterCommand,
    settings: &ConnectionChoice,
    output: Output,
) -> Result<ExitKind> {
    match command {
        ClusterCommand::Status => status(client, output).await,
        ClusterCommand::HandOver => hand_over(client, settings, output).await,
    }
}

/// The nodes as JSON; null without a replica.
pub(crate) async fn nodes(client: &Client) -> Result<Value> {
    let replica = client.server_info().await?.replica;
    Ok(replica.as_ref().map_or(Value::Null, document))
}

/// The replica as the current server sees it.
async fn replica(client: &Client) -> Result<ReplicaStatus> {
    match client.server_info().await?.replica {
        Some(replica) => Ok(replica),
        None => bail!(
            "{} shows no replica: it has no bucket_url, or the caller lacks the right `ops`",
            client.endpoint()
        ),
    }
}

async fn status(client: &Client, output: Output) -> Result<ExitKind> {
    let replica = replica(client).await?;
    let mut out = Out::new(output);
    match output {
        Output::Text | Output::Raw | Output::Delimited => out.line(&text(&replica))?,
        Output::Json | Output::Jsonl => out.json(&document(&replica))?,
    }
    out.flush()?;
    Ok(match replica.owner_node_id.is_empty() {
        true => ExitKind::Unavailable,
        false => ExitKind::Ok,
    })
}

/// Ends the owner as SIGTERM does. It hands the store to the first stand-by. Any node names the owner.
async fn hand_over(
    client: &Client,
    settings: &ConnectionChoice,
    output: Output,
) -> Result<ExitKind> {
    let named = replica(client).await?;
    let (owner, replica) = match named.role() {
        ReplicaRole::Owner => (client.clone(), named),
        _ => at_owner(client, &named.owner_endpoint, settings).await?,
    };
    let Some(successor) = replica.stand_bys.first() else {
        bail!(
            "no stand-by has a current copy of the store, so nothing is handed over; `walctl cluster status` shows the nodes"
        );
    };
    owner.drain(Some(Duration::ZERO)).await?;
    let from = &replica.node_id;
    let mut out = Out::new(output);
    match output {
        Output::Text | Output::Raw | Output::Delimited => out.line(&format!(
            "{from} ends and hands the store to {successor}; its service manager starts it again, as a stand-by"
        ))?,
        Output::Json | Output::Jsonl => out.json(&json!({"from": from, "to": successor}))?,
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

/// A client of the owner that another node names, and the replica as the owner sees it.
async fn at_owner(
    client: &Client,
    owner: &str,
    settings: &ConnectionChoice,
) -> Result<(Client, ReplicaStatus)> {
    let through = client.endpoint();
    if owner.is_empty() {
        bail!("{through} knows no owner of the store now; try again");
    }
    let scheme = through.split_once("://").map_or("http", |parts| parts.0);
    let builder = settings.builder()?.endpoint(format!("{scheme}://{owner}"));
    let at_owner = builder.timeout(OWNER_TIMEOUT).connect_lazy()?;
    let seen = replica(&at_owner)
        .await
        .with_context(|| format!("the owner that {through} names, {owner}"))?;
    if seen.role() != ReplicaRole::Owner {
        bail!("{owner} does not own the store any more; try again");
    }
    Ok((at_owner, seen))
}

fn role(node: &ReplicaNode) -> String {
    let name = node
        .role()
        .as_str_name()
        .trim_start_matches("REPLICA_ROLE_");
    name.to_lowercase().replace('_', "-")
}

fn silence(node: &ReplicaNode) -> Duration {
    let silence = node.silence.and_then(|silence| silence.try_into().ok());
    silence.unwrap_or_default()
}

fn text(replica: &ReplicaStatus) -> String {
    let owner = match &*replica.owner_node_id {
        "" => "no node owns the store now".to_owned(),
        owner => format!(
            "owned by {owner} ({}) in term {}",
            replica.owner_endpoint, replica.owner_term
        ),
    };
    let head = format!("{}, {owner}", replica.bucket_url);
    if replica.nodes.is_empty() {
        return format!("{head}\nthe node works alone: its setting stand_by is off");
    }
    let mut table = Table::with_header(["NODE", "ROLE", "ENDPOINT", "TAKES OVER", "LAST SIGN"]);
    for node in &replica.nodes {
        let place = replica
            .stand_bys
            .iter()
            .position(|name| *name == node.node_id);
        table.row([
            node.node_id.clone(),
            role(node),
            node.endpoint.clone(),
            place.map_or("-".to_owned(), |place| (place + 1).to_string()),
            format!("{:.1?} ago", silence(node)),
        ]);
    }
    format!("{head}\n{}", table.text())
}

fn document(replica: &ReplicaStatus) -> Value {
    let nodes = replica.nodes.iter().map(|node| {
        json!({
            "node_id": node.node_id,
            "endpoint": node.endpoint,
            "role": role(node),
            "silence_seconds": silence(node).as_secs_f64(),
        })
    });
    json!({
        "bucket_url": replica.bucket_url,
        "node_id": replica.node_id,
        "owner": (!replica.owner_node_id.is_empty()).then(|| json!({
            "node_id": replica.owner_node_id,
            "endpoint": replica.owner_endpoint,
        })),
        "term": replica.owner_term,
        "stand_bys": replica.stand_bys,
        "nodes": nodes.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_shown_with_their_roles_and_the_order_of_a_hand_over() {
        let node = |name: &str, role: ReplicaRole, seconds| ReplicaNode {
            node_id: name.to_owned(),
            endpoint: format!("{name}:6925"),
            role: role.into(),
            silence: Some(prost_types::Duration { seconds, nanos: 0 }),
        };
        let mut replica = ReplicaStatus {
            bucket_url: "s3://wald/s".to_owned(),
            node_id: "b".to_owned(),
            owner_node_id: "a".to_owned(),
            owner_endpoint: "a:6925".to_owned(),
            owner_term: 7,
            stand_bys: vec!["b".to_owned()],
            nodes: vec![
                node("a", ReplicaRole::Owner, 1),
                node("b", ReplicaRole::StandBy, 2),
                node("c", ReplicaRole::Dead, 90),
            ],
            ..ReplicaStatus::default()
        };
        let shown = text(&replica);
        let words: Vec<Vec<&str>> = shown
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            shown.lines().next(),
            Some("s3://wald/s, owned by a (a:6925) in term 7")
        );
        assert_eq!(words[3], ["b", "stand-by", "b:6925", "1", "2.0s", "ago"]);
        assert_eq!(words[4], ["c", "dead", "c:6925", "-", "90.0s", "ago"]);
        let json = document(&replica);
        assert_eq!(json["owner"]["node_id"], "a");
        assert_eq!(json["nodes"][2]["role"], "dead");
        replica.owner_node_id.clear();
        assert!(text(&replica).contains("no node owns the store now"));
        assert!(document(&replica)["owner"].is_null());
        replica.nodes.clear();
        assert!(text(&replica).contains("stand_by is off"));
    }
}
