/** A test with a server of its own. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Client } from "../src/index.js";
import { EphemeralServer } from "../src/testing.js";

test("orders are kept", async (t) => {
  const server = await EphemeralServer.start();
  t.after(() => server.stop());
  const client = await Client.connect(server.endpoint);

  await client.append("orders", "tea");

  const page = await client.read("orders");
  assert.deepEqual(page.records.map((record) => record.text()), ["tea"]);
  await client.close();
});
