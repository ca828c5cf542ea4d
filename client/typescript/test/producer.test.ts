import assert from "node:assert/strict";
import test, { beforeEach, afterEach } from "node:test";

import { Code } from "@connectrpc/connect";

import type { Client } from "../src/index.js";
import { Fake, gate, refusal } from "./fake.js";

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

const numbers = (count: number): string[] => Array.from({ length: count }, (_, index) => `${index}`);

test("every batch is there once, in order, over lost connections and acks", async () => {
  let applied = 0;
  fake.after = () => {
    applied++;
    if (applied % 37 === 0) {
      fake.drop();
    }
  };
  const producer = await client.producer("log", { id: "p" });
  const sent = [];
  for (const record of numbers(400)) {
    sent.push(await producer.send(record));
  }
  const acks = await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(fake.records, numbers(400));
  assert.deepEqual(acks.map(({ firstLsn }) => firstLsn), numbers(400).map(BigInt));
  assert.ok(acks.some(({ deduplicated }) => deduplicated));
  await producer.close();
});

test("refusals that pass are waited out, in order", async () => {
  let refused = 0;
  fake.before = ([record]) => {
    if (record === "1" && refused++ < 3) {
      throw refusal(Code.Unavailable, "DRAINING", "NOT_APPLIED", "SAFE");
    }
  };
  const producer = await client.producer("log");
  const sent = await Promise.all(numbers(3).map((record) => producer.send(record)));
  await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(fake.records, numbers(3));
  assert.equal(refused, 4);
  await producer.close();
});

test("quota is reported at once", async () => {
  fake.before = () => {
    throw refusal(Code.ResourceExhausted, "QUOTA", "NOT_APPLIED", "SAFE");
  };
  const producer = await client.producer("log");
  await assert.rejects(producer.append("a"), { reason: "QUOTA", outcome: "NOT_APPLIED" });
  assert.equal(fake.requests, 1);
});

test("random id begins at the lowest epoch and is forgotten at the end", async () => {
  fake.firstProducerEpoch = 7n;
  const drawn = await client.producer("log");
  await drawn.append("a");
  await drawn.close();
  await drawn.close();
  const unused = await client.producer("log", { logId: 7n });
  await unused.close();
  const named = await client.producer("log", { id: "p" });
  await named.append("b");
  await named.close();
  assert.deepEqual([drawn.epoch, unused.epoch, named.epoch], [7n, 7n, 0n]);
  assert.deepEqual(fake.forgotten, [drawn.id]);
});

test("producer keeps to the log id that it was given", async () => {
  const producer = await client.producer("log", { id: "p", logId: 9n });
  assert.equal(producer.logId, 9n);
  assert.equal(fake.calls, 0);
});

test("failed journal is asked again with the same sequence", async () => {
  let failures = 0;
  fake.after = () => {
    if (failures++ === 0) {
      throw refusal(Code.Internal, "JOURNAL_FAILED", "UNKNOWN", "SAFE_WITH_CONDITION");
    }
  };
  const producer = await client.producer("log");
  const ack = await producer.append("a");
  assert.deepEqual([ack.firstLsn, ack.deduplicated], [0n, true]);
  assert.deepEqual(fake.sequences, [0n, 0n]);
  await producer.close();
});

test("fatal refusal fails everything after it, and later batches too", async () => {
  fake.before = ([record]) => {
    if (record === "1") {
      throw refusal(Code.FailedPrecondition, "PRODUCER_FENCED", "NOT_APPLIED", "NEVER");
    }
  };
  const producer = await client.producer("log");
  const [first, fenced, after] = await Promise.all(numbers(3).map((record) => producer.send(record)));
  assert.equal((await first?.ack)?.firstLsn, 0n);
  await assert.rejects(fenced?.ack ?? Promise.resolve(), { kind: "SERVER", reason: "PRODUCER_FENCED", outcome: "NOT_APPLIED" });
  await assert.rejects(after?.ack ?? Promise.resolve(), { kind: "EARLIER_FAILED", outcome: "NOT_APPLIED" });
  await assert.rejects(producer.append("3"), { kind: "EARLIER_FAILED", reason: "PRODUCER_FENCED", outcome: "NOT_APPLIED" });
  await assert.rejects(producer.close(), { reason: "PRODUCER_FENCED" });
  assert.deepEqual(fake.records, ["0"]);
});

test("fatal refusal of a repeat does not claim that nothing was applied", async () => {
  const producer = await client.producer("log");
  fake.before = () => {
    fake.before = () => {
      throw refusal(Code.FailedPrecondition, "LOG_REPLACED", "NOT_APPLIED", "NEVER");
    };
    throw refusal(Code.Internal, "JOURNAL_FAILED", "UNKNOWN", "SAFE_WITH_CONDITION");
  };
  await assert.rejects(producer.append("a"), { reason: "LOG_REPLACED", outcome: "UNKNOWN" });
});

test("producer leaves a silent session for another", { timeout: 20_000 }, async () => {
  const { opened, open } = gate();
  const sessions = (): number => fake.methods.filter((method) => method === "AppendSession").length;
  // The first session applies a batch, and acks nothing.
  fake.after = () => (sessions() === 1 ? opened : undefined);
  const producer = await client.producer("log", { retryTimeoutMs: 2_000 });
  const sent = await Promise.all(numbers(3).map((record) => producer.send(record)));
  const acks = await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(acks.map(({ firstLsn }) => firstLsn), [0n, 1n, 2n]);
  assert.equal(acks[0]?.deduplicated, true);
  assert.equal(sessions(), 2);
  assert.deepEqual(fake.records, numbers(3));
  open();
  await producer.close();
});

test("gives up without acks; batches that were never sent are not applied", async () => {
  const producer = await client.producer("log", { retryTimeoutMs: 60 });
  await fake.stop();
  // Nobody knows of a lost connection before it was tried.
  await assert.rejects(client.tail("log"), { kind: "NOT_SENT" });
  const { ack } = await producer.send("a");
  await assert.rejects(ack, {
    kind: "TIMEOUT",
    code: "DEADLINE_EXCEEDED",
    outcome: "NOT_APPLIED",
    message: /no ack within 60 ms: not sent: connect ECONNREFUSED/,
  });
  await assert.rejects(producer.append("b"), { kind: "EARLIER_FAILED", outcome: "NOT_APPLIED" });
});

test("server that never answers is given up", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const producer = await client.producer("log", { retryTimeoutMs: 500 });
  await assert.rejects(producer.append("a"), { kind: "TIMEOUT", outcome: "UNKNOWN" });
  open();
});

test("close does not wait for a server that never ends the session", async () => {
  const { opened, open } = gate();
  fake.last = () => opened;
  const producer = await client.producer("log");
  await producer.append("a");
  await producer.close();
  assert.deepEqual(fake.records, ["a"]);
  open();
});

test("lingering sends share a batch, each with its own ack", async () => {
  const producer = await client.producer("log", { lingerMs: 5, maxBatchRecords: 4 });
  const sent = await Promise.all(numbers(10).map((record) => producer.send(record)));
  const acks = await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(acks.map(({ firstLsn, nextLsn }) => [firstLsn, nextLsn]), numbers(10).map((n) => [BigInt(n), BigInt(n) + 1n]));
  assert.deepEqual(fake.sequences, [0n, 1n, 2n]);
  assert.deepEqual(fake.records, numbers(10));
  await producer.close();
});

test("batch with a condition goes alone, in its place", async () => {
  const producer = await client.producer("log", { lingerMs: 60_000 });
  const a = await producer.send("a");
  const b = await producer.send("b", { expectedLsn: 1n });
  const c = await producer.send("c");
  await producer.flush();
  assert.deepEqual(
    (await Promise.all([a.ack, b.ack, c.ack])).map(({ sequence }) => sequence),
    [0n, 1n, 2n],
  );
  assert.deepEqual(fake.records, ["a", "b", "c"]);
  await producer.close();
});

test("no more batches are underway than the server remembers", async () => {
  const { opened, open } = gate();
  const arrived = gate();
  fake.before = () => {
    arrived.open();
    return opened;
  };
  const producer = await client.producer("log", { windowBatches: 3 });
  const sent = await Promise.all(numbers(5).map((record) => producer.send(record)));
  await arrived.opened;
  // There and back: every request that could be underway is.
  await client.tail("log");
  assert.equal(fake.requests, 3);
  open();
  await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(fake.records, numbers(5));
  await producer.close();
});

test("send waits while the window is full", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const producer = await client.producer("log", { windowBytes: 3_000 });
  let sent = 0;
  const sends = ["a", "b", "c", "d"].map(async (name) => {
    await producer.send(name.repeat(1_000));
    sent++;
  });
  await Promise.all(sends.slice(0, 2));
  await new Promise((resolve) => setImmediate(resolve));
  assert.equal(sent, 2);
  open();
  await Promise.all(sends);
  await producer.close();
});

test("flush does not wait for batches that are sent after it", { timeout: 10_000 }, async () => {
  const gates = new Map(["a", "b"].map((name) => [name, gate()]));
  fake.before = ([record]) => gates.get(record ?? "")?.opened;
  const producer = await client.producer("log");
  await producer.send("a");
  const flushed = [producer.flush(), producer.flush()];
  const b = await producer.send("b");
  const all = producer.flush().then(() => "all");
  gates.get("a")?.open();
  await Promise.all(flushed);
  assert.deepEqual(fake.records, ["a"]);
  assert.equal(await Promise.race([all, client.tail("log").then(() => "waits")]), "waits");
  gates.get("b")?.open();
  assert.equal(await all, "all");
  assert.equal((await b.ack).firstLsn, 1n);
  await producer.flush();
  await producer.close();
});

for (const [name, settings] of [
  ["sends that wait for room", { windowBytes: 10 }],
  ["records that linger", { lingerMs: 60_000 }],
] as const) {
  test(`flush waits for ${name}`, { timeout: 10_000 }, async () => {
    const producer = await client.producer("log", settings);
    const sends = [producer.send("a"), producer.send("b")];
    await producer.flush();
    assert.deepEqual(fake.records, ["a", "b"]);
    await Promise.all(sends);
    await producer.close();
  });
}

test("record that fits no field is refused by send, and the producer goes on", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const producer = await client.producer("log");
  const before = await producer.send("before");
  for (const [record, options] of [
    [{ data: "a", crc32c: -5 }, {}],
    [{ data: "a", timestampUs: 1n << 63n }, {}],
    ["a", { expectedLsn: -1n }],
    ["a", { writerEpoch: 1n << 64n }],
  ] as const) {
    await assert.rejects(producer.send(record, options), { kind: "USAGE", code: "INVALID_ARGUMENT", outcome: "NOT_APPLIED" });
  }
  const after = await producer.send("after");
  open();
  await producer.close();
  assert.deepEqual((await Promise.all([before.ack, after.ack])).map(({ sequence }) => sequence), [0n, 1n]);
  assert.deepEqual([fake.records, fake.sequences], [["before", "after"], [0n, 1n]]);
});

test("setting that fits no field opens no producer", async () => {
  for (const options of [{ epoch: -1n }, { writerEpoch: -1n }, { logId: -1n }, { firstSequence: -1n }, { windowBatches: 0 }, { windowBatches: 1_025 }]) {
    await assert.rejects(client.producer("log", options), { kind: "USAGE", outcome: "NOT_APPLIED" });
  }
  assert.equal(fake.requests, 0);
});

for (const [name, settings] of [
  ["waits for room", { windowBytes: 10 }],
  ["lingers", { lingerMs: 60_000 }],
] as const) {
  test(`record that ${name} keeps its content while its buffer is used again`, async () => {
    const { opened, open } = gate();
    fake.before = () => opened;
    const producer = await client.producer("log", settings);
    const data = Buffer.from("first");
    await producer.send(data);
    data.write("other");
    const waiting = producer.send(data);
    data.write("wrong");
    open();
    await producer.flush();
    await waiting;
    await producer.close();
    assert.deepEqual(fake.records, ["first", "other"]);
  });
}

test("idle producer whose connection was lost goes on", async () => {
  const producer = await client.producer("log");
  await producer.append("a");
  fake.drop();
  assert.equal((await producer.append("b")).firstLsn, 1n);
  await producer.close();
});

test("stream that the other side ends is followed by another one", { timeout: 10_000 }, async () => {
  fake.endsAfter = 1;
  const producer = await client.producer("log", { retryTimeoutMs: 5_000 });
  const acks: Promise<unknown>[] = [];
  for (const record of numbers(20)) {
    // Some in the turn of the last ack, some once the end has come.
    const { ack } = await producer.send(record);
    acks.push(ack);
    await ack;
    await (Number(record) % 2 === 0 ? client.tail("log") : undefined);
  }
  await Promise.all(acks);
  await producer.close();
  assert.deepEqual(fake.records, numbers(20));
});

test("signal ends it", async () => {
  const { opened, open } = gate();
  const end = new AbortController();
  fake.before = () => {
    end.abort();
    return opened;
  };
  const producer = await client.producer("log", { signal: end.signal });
  const { ack } = await producer.send("a");
  await assert.rejects(ack, { kind: "CANCELLED", outcome: "UNKNOWN" });
  open();
});
