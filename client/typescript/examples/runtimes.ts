/** Every kind of call, once: deploy/release:runtimes runs it by Node, Bun and Deno. The log must be empty. */
import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";

import { Client, WaldError } from "../src/index.js";

const client = await Client.fromEnv();
const ack = await client.append("orders", "first");
assert.deepEqual([ack.lsn, ack.durability], [0n, "DURABLE"]);
await assert.rejects(client.append("orders", "late", { expectedLsn: 0n }), (error) => error instanceof WaldError && error.reason === "POSITION_MISMATCH");

const producer = await client.producer("orders");
const sent = [];
for (let number = 0; number < 1_000; number++) {
  sent.push(await producer.send(`order ${number}`));
}
assert.equal((await Promise.all(sent.map(({ ack }) => ack))).at(-1)?.firstLsn, 1_000n);
await producer.close();

const session = client.session();
for (let number = 0; number < 20; number++) {
  await session.send({ batches: [{ log: "large", records: [new Uint8Array(1_000_000)] }] });
}
await session.close();

let bytes = 0;
for await (const { batches } of client.scan("large")) {
  bytes += batches.flatMap(({ records }) => records).reduce((sum, { data }) => sum + data.length, 0);
}
assert.equal(bytes, 20_000_000);

let followed = 0;
for await (const { batches, caughtUp } of client.follow("orders")) {
  const before = followed;
  followed += batches.reduce((sum, { records }) => sum + records.length, 0);
  if (caughtUp && followed === 1_001) {
    await client.append("orders", "while it follows");
  }
  if (followed === 1_002) {
    assert(before >= 1_001);
    break;
  }
}

const directory = await mkdtemp(`${tmpdir()}/wald-`);
const durable = await client.durableProducer("durable", { state: `${directory}/state` });
await durable.appendBatch("kept");
await durable.close();
await rm(directory, { recursive: true });
await client.close();
console.log("all calls are made");
