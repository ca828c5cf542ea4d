//! A test with a server of its own. In the tests of a program it is a function with `#[tokio::test]`.

use wald_client::Client;
use wald_client::testing::EphemeralServer;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = EphemeralServer::start()?;
    let client = Client::connect(server.endpoint()).await?;

    client.append("orders", "tea").await?;

    let page = client.read("orders").last(1).await?;
    assert_eq!(page.records[0].data, "tea");
    Ok(())
}
