/** A test with a server of its own. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Client } from "../src/index.js";
import { EphemeralServer } from "../src/testing.js";

let server: EphemeralServer;
before(async () => {
  server = await EphemeralServer.start();
});
after(() => server.stop());

test("orders are kept", async () => {
  const client = await Client.connect(server.endpoint);
  await client.append("orders", "tea");

  const page = await client.read("orders", { tailOffset: 1 });
  assert.deepEqual(page.records.map((record) => record.text()), ["tea"]);
  await client.close();
});
