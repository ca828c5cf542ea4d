import assert from "node:assert/strict";
import test, { beforeEach, afterEach } from "node:test";

import { create } from "@bufbuild/protobuf";

import { RecordBatchSchema } from "../src/gen/wald/v1/record_pb.js";
import { dateOf, microsecondsOf, type Client } from "../src/index.js";
import { protoRecord, protoStart, storedBatch } from "../src/messages.js";
import { Fake } from "./fake.js";

let fake: Fake;
let client: Client;

beforeEach(async () => {
  fake = await Fake.start();
  client = fake.client();
});

afterEach(async () => {
  await client.close();
  await fake.stop();
});

const TIME = new Date("2024-11-29T12:00:00.123Z");
const EXACT = 1_732_881_600_123_457n;
const MILLISECONDS = 1_732_881_600_123_000n;

const parsed = (value: unknown) => JSON.parse(JSON.stringify(value)) as { [name: string]: unknown };

test("a time loses the microseconds, and nothing else", () => {
  assert.equal(microsecondsOf(TIME), MILLISECONDS);
  assert.deepEqual(dateOf(EXACT), TIME);
  assert.deepEqual(dateOf(0n), new Date(0));
  // Rounded down before 1970, too.
  assert.deepEqual([-1n, -999n, -1000n, -1001n].map((us) => dateOf(us).getTime()), [-1, -1, -1, -2]);
  assert.throws(() => microsecondsOf(new Date("never")), { kind: "USAGE" });
});

test("a record to append takes a Date", () => {
  assert.equal(protoRecord({ data: "a", time: TIME }).timestampUs, MILLISECONDS);
  assert.equal(protoRecord({ data: "a", timestampUs: EXACT }).timestampUs, EXACT);
  assert.equal(protoRecord({ data: "a" }).timestampUs, 0n);
  assert.throws(() => protoRecord({ data: "a", time: TIME, timestampUs: EXACT }), { kind: "USAGE" });
  assert.throws(() => protoRecord({ data: "a", time: new Date(0) }), { kind: "USAGE", message: /server's clock/ });
});

test("a read begins at a Date", () => {
  assert.deepEqual(protoStart({ time: TIME }), { case: "timestampUs", value: MILLISECONDS });
  assert.deepEqual(protoStart({ time: new Date(0) }), { case: "timestampUs", value: 0n });
  assert.throws(() => protoStart({ time: TIME, timestampUs: EXACT }), { kind: "USAGE" });
  assert.throws(() => protoStart({ time: TIME, lsn: 1n }), { kind: "USAGE" });
  assert.throws(() => client.follow("log", { time: TIME, cursor: new Uint8Array([1]) }), { kind: "USAGE" });
});

test("acks of all kinds become JSON, with 64-bit numbers as strings", async () => {
  const ack = await client.append("log", "a");
  assert.equal(parsed(ack)["lsn"], ack.lsn.toString());
  assert.deepEqual(parsed({ answer: ack })["answer"], parsed(ack));
  // The method is not one of the members.
  assert.ok(!Object.keys(ack).includes("toJSON"));
  const batch = parsed(await client.appendBatch({ batches: [{ log: "log", records: ["a"] }] }));
  assert.equal((batch["appends"] as { firstLsn: unknown }[])[0]?.firstLsn, "1");
  const session = client.session();
  const { ack: sent } = await session.send({ batches: [{ log: "log", records: ["a"] }] });
  assert.equal(typeof (parsed(await sent)["appends"] as { firstLsn: unknown }[])[0]?.firstLsn, "string");
  await session.close();
  const producer = await client.producer("log");
  assert.equal(parsed(await producer.append("a"))["sequence"], "0");
  await producer.close();
});

test("records become JSON, with bytes as base64", () => {
  const batch = storedBatch(
    create(RecordBatchSchema, {
      log: "log",
      logId: 1n << 62n,
      firstLsn: 5n,
      timestampUs: EXACT,
      records: [
        { payload: { case: "data", value: new Uint8Array([0, 255]) }, headers: [{ key: "k", value: new Uint8Array([1]) }], crc32c: 9 },
      ],
    }),
  );
  const record = { lsn: "5", timestampUs: EXACT.toString(), data: "AP8=", headers: [{ key: "k", value: "AQ==" }], crc32c: 9 };
  assert.deepEqual(parsed(batch), { log: "log", logId: (1n << 62n).toString(), records: [record] });
  assert.deepEqual(parsed(batch.records[0]), record);
  assert.deepEqual(batch.records[0]?.time(), TIME);
});
