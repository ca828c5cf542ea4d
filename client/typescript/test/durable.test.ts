import assert from "node:assert/strict";
import { lstat, mkdir, mkdtemp, readFile, readdir, rm, stat, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { beforeEach, afterEach } from "node:test";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import { FollowerStateSchema, ProducerStateSchema, StateKind, type ProducerState } from "../src/gen/wald/v1/state_pb.js";
import { FileState, WaldError, type Batch, type Client, type State } from "../src/index.js";
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

/** A state in memory. */
class Kept implements State {
  bytes: Uint8Array | null | undefined;
  fails = false;
  saves = 0;

  constructor(bytes?: Uint8Array | null) {
    this.bytes = bytes;
  }

  load(): Uint8Array | null | undefined {
    // As a file does.
    return this.bytes && Buffer.from(this.bytes);
  }

  async save(state: Uint8Array): Promise<void> {
    await new Promise((resolve) => setImmediate(resolve));
    if (this.fails) {
      throw new Error("the disk is full");
    }
    this.saves++;
    this.bytes = state;
  }

  get producer(): ProducerState {
    return fromBinary(ProducerStateSchema, this.bytes ?? new Uint8Array());
  }
}

/** The records of the batches of a state, as text. */
const texts = ({ batches }: ProducerState): string[] =>
  batches.flatMap(({ records }) => records.map(({ payload }) => (payload.case === "data" ? Buffer.from(payload.value).toString() : "")));

test("batches in doubt are sent again by the next start, once and in order", async () => {
  let kept = new Kept();
  const gates = [];
  for (let life = 0; life < 10; life++) {
    // The server applies the second new batch of each life, and its ack does not come before the end of the program.
    const { opened, open } = gate();
    gates.push(open);
    const arrived = gate();
    let applied = 0;
    fake.after = () => {
      if (++applied > 1 + (life > 0 ? 3 : 0)) {
        arrived.open();
        return opened;
      }
      return undefined;
    };
    const end = new AbortController();
    const producer = await client.durableProducer("log", { state: kept, signal: end.signal });
    assert.equal(producer.nextSequence, BigInt(5 * life));
    for (let number = 5 * life; number < 5 * life + 5; number++) {
      assert.equal(await producer.appendBatch(`${number}`), BigInt(number));
    }
    await arrived.opened;
    end.abort();
    // The dead program changes nothing any more.
    kept = new Kept(kept.bytes);
  }
  assert.ok(kept.producer.batches.length > 0);
  assert.ok(fake.records.length < 50);
  fake.after = () => {};
  const producer = await client.durableProducer("log", { state: kept });
  await producer.close();
  assert.deepEqual(fake.records, numbers(50));
  const { sequence, batches, id } = kept.producer;
  assert.deepEqual([sequence, batches.length, id], [50n, 0, producer.id]);
  assert.deepEqual(fake.forgotten, []);
  gates.forEach((open) => open());
});

test("state is there before the first batch, and has at most 64 batches", async () => {
  const kept = new Kept();
  let most = 0;
  fake.firstProducerEpoch = 7n;
  fake.before = () => void (most = Math.max(most, kept.producer.batches.length));
  const producer = await client.durableProducer("log", { state: kept });
  const { log, logId, id, epoch, sequence } = kept.producer;
  assert.deepEqual([log, logId, id, epoch, sequence], ["log", 7n, producer.id, 7n, 0n]);
  assert.equal(fake.requests, 0);
  const sequences = await Promise.all(numbers(300).map((record) => producer.appendBatch(record)));
  assert.deepEqual(sequences, numbers(300).map(BigInt));
  await producer.flush();
  assert.deepEqual([kept.producer.sequence, kept.producer.batches.length], [300n, 0]);
  assert.deepEqual(fake.records, numbers(300));
  assert.ok(most <= 64, `${most}`);
  await producer.close();
  assert.deepEqual(fake.forgotten, []);
});

test("append waits while 64 batches are kept", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  let done = 0;
  const appends = numbers(70).map((record) => producer.appendBatch(record).then(() => done++));
  await Promise.all(appends.slice(0, 64));
  await new Promise((resolve) => setTimeout(resolve, 20));
  assert.equal(done, 64);
  assert.deepEqual(texts(kept.producer), numbers(64));
  open();
  await Promise.all(appends);
  await producer.close();
  assert.deepEqual(fake.records, numbers(70));
});

test("state has the bytes of ProducerState", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept, id: "p", epoch: 3n });
  const buffer = Buffer.from("b");
  await producer.appendBatch(["a", { data: buffer, headers: [["order", "17"]], timestampUs: 5n, crc32c: 9 }]);
  // The caller may use its buffer again.
  buffer.fill("x");
  const { log, logId, id, epoch, sequence, batches } = kept.producer;
  assert.deepEqual([log, logId, id, epoch, sequence, batches.length], ["log", 7n, "p", 3n, 0n, 1]);
  assert.deepEqual([batches[0]?.log, batches[0]?.condition], ["", undefined]);
  assert.deepEqual(texts(kept.producer), ["a", "b"]);
  const { headers, timestampUs, crc32c } = batches[0]?.records[1] ?? {};
  assert.deepEqual([headers?.[0]?.key, Buffer.from(headers?.[0]?.value ?? []).toString()], ["order", "17"]);
  assert.deepEqual([timestampUs, crc32c], [5n, 9]);
  open();
  await producer.close();
  assert.deepEqual(fake.records, ["a", "b"]);
});

test("state of another log, or without sense, is refused", async () => {
  const kept = new Kept();
  await (await client.durableProducer("log", { state: kept })).close();
  const { calls } = fake;
  await assert.rejects(client.durableProducer("other", { state: kept }), { kind: "STATE", message: /the log "log", not of "other"/ });
  for (const bytes of [Buffer.from("nonsense"), new Uint8Array()]) {
    await assert.rejects(client.durableProducer("log", { state: new Kept(bytes) }), { kind: "STATE" });
  }
  await assert.rejects(client.durableProducer("log", { state: tmpdir() }), { kind: "STATE", message: /EISDIR/ });
  assert.equal(fake.calls, calls);
});

test("state of another kind, or cut off, is refused", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const ofProducer = new Kept();
  const producer = await client.durableProducer("log", { state: ofProducer });
  await producer.appendBatch("a");
  assert.equal(ofProducer.producer.kind, StateKind.PRODUCER);
  const ofFollower = new Kept();
  const follower = await client.durableFollower("log", { state: ofFollower });
  await follower.keep("effects");
  await follower.close();
  assert.equal(fromBinary(FollowerStateSchema, ofFollower.bytes ?? new Uint8Array()).kind, StateKind.FOLLOWER);
  const cutOff = ({ bytes }: Kept): Uint8Array[] =>
    Array.from({ length: bytes?.length ?? 0 }, (_, length) => (bytes ?? new Uint8Array()).subarray(0, length));
  // Without other fields, the messages differ by their kind alone.
  const other = (kind: number): Uint8Array => toBinary(FollowerStateSchema, create(FollowerStateSchema, { kind: kind as StateKind }));
  const { calls } = fake;
  for (const bytes of [...cutOff(ofProducer), ofFollower.bytes, other(StateKind.FOLLOWER), other(9)]) {
    const refused = { kind: "STATE", message: /it is not the state of a producer/ };
    await assert.rejects(client.durableProducer("log", { state: new Kept(bytes) }), refused);
  }
  for (const bytes of [...cutOff(ofFollower), ofProducer.bytes, other(StateKind.PRODUCER), other(9)]) {
    const refused = { kind: "STATE", message: /it is not the state of a follower/ };
    await assert.rejects(client.durableFollower("log", { state: new Kept(bytes) }), refused);
  }
  assert.equal(fake.calls, calls);
  open();
  await producer.close();
});

test("null is no state", async () => {
  const [ofProducer, ofFollower] = [new Kept(), new Kept()];
  ofProducer.bytes = ofFollower.bytes = null;
  const producer = await client.durableProducer("log", { state: ofProducer });
  assert.equal(ofProducer.producer.id, producer.id);
  await producer.close();
  const follower = await client.durableFollower("log", { state: ofFollower });
  assert.equal(follower.effects, undefined);
  await follower.close();
});

test("loaded batches are saved again before they are sent", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const first = new Kept();
  const end = new AbortController();
  const producer = await client.durableProducer("log", { state: first, signal: end.signal });
  await producer.appendBatch("a");
  end.abort();
  open();
  const kept = new Kept(first.bytes);
  kept.fails = true;
  const { requests } = fake;
  await assert.rejects(client.durableProducer("log", { state: kept }), { kind: "STATE", message: /the disk is full/ });
  assert.equal(fake.requests, requests);
  kept.fails = false;
  const next = await client.durableProducer("log", { state: kept });
  assert.equal(kept.saves, 1);
  assert.deepEqual(texts(kept.producer), ["a"]);
  await next.close();
  assert.deepEqual([kept.saves, fake.records], [2, ["a"]]);
  // There is nothing in doubt.
  await client.durableProducer("log", { state: kept });
  assert.equal(kept.saves, 2);
});

test("batch whose save fails is not sent, and ends the producer", async () => {
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await producer.appendBatch("0");
  await producer.flush();
  kept.fails = true;
  await assert.rejects(producer.appendBatch("1"), { kind: "STATE", outcome: "UNKNOWN", message: /the disk is full/ });
  kept.fails = false;
  await assert.rejects(producer.appendBatch("2"), { kind: "EARLIER_FAILED", outcome: "NOT_APPLIED", message: /the disk is full/ });
  await assert.rejects(producer.flush(), { kind: "STATE" });
  await assert.rejects(producer.close(), { kind: "STATE" });
  assert.equal(fake.requests, 1);
  const next = await client.durableProducer("log", { state: kept });
  assert.equal(next.nextSequence, 1n);
  await next.appendBatch("1");
  await next.close();
  assert.deepEqual(fake.records, ["0", "1"]);
});

test("close does not wait for acks after a failure of the state", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await producer.appendBatch("0");
  kept.fails = true;
  await assert.rejects(producer.appendBatch("1"), { kind: "STATE" });
  kept.fails = false;
  const late = setTimeout(open, 3_000);
  const begin = performance.now();
  await assert.rejects(producer.close(), { kind: "STATE", message: /the disk is full/ });
  assert.ok(performance.now() - begin < 2_000);
  await assert.rejects(producer.close(), { kind: "STATE" });
  clearTimeout(late);
  open();
  // The state has the batch that was underway.
  const next = await client.durableProducer("log", { state: kept });
  assert.equal(next.nextSequence, 1n);
  await next.close();
  assert.deepEqual(fake.records, ["0"]);
});

test("state that cannot be saved refuses the start", async () => {
  const kept = new Kept();
  kept.fails = true;
  await assert.rejects(client.durableProducer("log", { state: kept }), { kind: "STATE" });
  assert.equal(fake.requests, 0);
});

test("permanent refusal ends the producer, and its batch stays", async () => {
  fake.before = () => {
    throw refusal(Code.InvalidArgument, "RECORD_TOO_LARGE", "NOT_APPLIED", "NEVER");
  };
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await producer.appendBatch("0");
  await assert.rejects(producer.flush(), { reason: "RECORD_TOO_LARGE" });
  await assert.rejects(producer.appendBatch("1"), { kind: "EARLIER_FAILED", reason: "RECORD_TOO_LARGE" });
  await assert.rejects(producer.close(), { reason: "RECORD_TOO_LARGE" });
  assert.deepEqual(texts(kept.producer), ["0"]);
});

test("record that fits no field is refused, and the producer goes on", async () => {
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await assert.rejects(producer.appendBatch({ data: "a", crc32c: -1 }), { kind: "USAGE" });
  assert.equal(await producer.appendBatch("b"), 0n);
  await producer.close();
  assert.deepEqual(fake.records, ["b"]);
});

test("batch without records is refused before it is kept", async () => {
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await assert.rejects(producer.appendBatch([]), { kind: "USAGE", outcome: "NOT_APPLIED" });
  assert.deepEqual([kept.saves, producer.nextSequence], [1, 0n]);
  assert.equal(await producer.appendBatch("a"), 0n);
  await producer.close();
  assert.deepEqual(fake.records, ["a"]);
});

test("closed producer saves no more", async () => {
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await producer.close();
  const { saves } = kept;
  await producer.close();
  await producer.flush();
  await client.close();
  await assert.rejects(producer.appendBatch("a"), { kind: "USAGE" });
  assert.equal(kept.saves, saves);
});

test("close of the client takes acked batches off the state", async () => {
  const kept = new Kept();
  const producer = await client.durableProducer("log", { state: kept });
  await producer.appendBatch("a");
  await client.close();
  assert.deepEqual([kept.producer.sequence, kept.producer.batches.length], [1n, 0]);
});

test("forgotten producer with nothing in doubt goes on in a new epoch", { timeout: 20_000 }, async () => {
  const kept = new Kept();
  let producer = await client.durableProducer("log", { state: kept });
  for (let life = 0; life < 3; life++) {
    // In one run of the program, and over its restarts.
    for (let first = 20 * life; first < 20 * life + 20; first += 10) {
      assert.equal(producer.nextSequence, BigInt(first));
      for (let number = first; number < first + 10; number++) {
        assert.equal(await producer.appendBatch(`${number}`), BigInt(number));
      }
      await producer.flush();
      fake.forgottenBelow++;
    }
    await producer.close();
    producer = await client.durableProducer("log", { state: kept });
  }
  assert.equal(await producer.appendBatch("60"), 60n);
  await producer.close();
  assert.deepEqual(fake.records, numbers(61));
  const { id, epoch, earlierBatches, sequence, batches } = kept.producer;
  assert.deepEqual([id, epoch, earlierBatches, sequence, batches.length], [producer.id, 6n, 60n, 1n, 0]);
  assert.equal(producer.epoch, 6n);
});

for (const { count, acked, underway, windowBytes } of [
  { count: 60, acked: 1, underway: 59, windowBytes: 1_000_000 },
  { count: 200, acked: 0, underway: 64, windowBytes: 1_000_000 },
  { count: 200, acked: 0, underway: 2, windowBytes: 12 },
]) {
  test(`batches behind a refused one follow it into the new epoch: ${underway}`, { timeout: 20_000 }, async () => {
    // The batch in doubt is acked before the refusal.
    const batches = [{ records: [{ payload: { case: "data" as const, value: Buffer.from("0") } }] }];
    const found = create(ProducerStateSchema, { log: "log", logId: fake.logId, id: "p", kind: StateKind.PRODUCER, batches });
    const kept = new Kept(toBinary(ProducerStateSchema, found));
    const early: bigint[] = [];
    const { opened, open } = gate();
    fake.came = (epoch, sequence) => {
      const { producer } = kept;
      const next = producer.sequence + BigInt(producer.batches.length);
      const saved = producer.epoch > epoch || (producer.epoch === epoch && next > sequence);
      if (!saved || producer.batches.length > 64) {
        early.push(sequence);
      }
      return fake.records.length > 0 ? opened : undefined;
    };
    fake.after = () => {
      if (fake.records.length === 1 + acked) {
        fake.forgottenBelow++;
      }
    };
    const producer = await client.durableProducer("log", { state: kept, windowBytes });
    await producer.flush();
    // The refusal comes when many batches are under way.
    const appends = numbers(count).slice(1).map((record) => producer.appendBatch(record));
    await appends[underway - 1];
    open();
    assert.deepEqual(await Promise.all(appends), numbers(count).slice(1).map(BigInt));
    await producer.flush();
    assert.equal(producer.nextSequence, BigInt(count));
    await producer.close();
    assert.deepEqual([fake.records, early], [numbers(count), []]);
    const { id, epoch, earlierBatches, sequence } = kept.producer;
    assert.deepEqual([id, epoch, earlierBatches, sequence], ["p", 1n, BigInt(1 + acked), BigInt(count - 1 - acked)]);
  });
}

test("forgotten producer with a batch in doubt is refused", { timeout: 20_000 }, async () => {
  const refused = { reason: "PRODUCER_EXPIRED" };
  // The batch was sent by an earlier run of the program.
  const first = new Kept();
  const arrived = gate();
  const { opened, open } = gate();
  fake.after = () => {
    arrived.open();
    return opened;
  };
  const end = new AbortController();
  const killed = await client.durableProducer("log", { state: first, signal: end.signal });
  await killed.appendBatch("0");
  await arrived.opened;
  end.abort();
  open();
  fake.forgottenBelow++;
  const kept = new Kept(first.bytes);
  for (let start = 0; start < 2; start++) {
    const producer = await client.durableProducer("log", { state: kept });
    await assert.rejects(producer.flush(), refused);
    await assert.rejects(producer.close(), refused);
    assert.deepEqual([kept.producer.epoch, texts(kept.producer), fake.records], [0n, ["0"], ["0"]]);
  }
  // Or by this run, on a connection that broke.
  fake.forgottenBelow = 0n;
  fake.after = () => {
    fake.after = () => {};
    fake.forgottenBelow++;
    fake.drop();
  };
  const other = new Kept();
  const producer = await client.durableProducer("log", { state: other });
  await producer.appendBatch("1");
  await assert.rejects(producer.flush(), { ...refused, outcome: "UNKNOWN" });
  await assert.rejects(producer.close(), refused);
  assert.deepEqual([other.producer.epoch, texts(other.producer), fake.records], [0n, ["1"], ["0", "1"]]);
});

test("new epoch begins also if the program waits for nothing", { timeout: 20_000 }, async () => {
  const kept = new Kept();
  const arrived = gate();
  fake.forgottenBelow = 3n;
  fake.after = arrived.open;
  const producer = await client.durableProducer("log", { state: kept });
  assert.equal(await producer.appendBatch("0"), 0n);
  await arrived.opened;
  // The client still has the producer.
  await client.close();
  const { epoch, earlierBatches, sequence, batches } = kept.producer;
  assert.deepEqual([epoch, earlierBatches, sequence, batches.length], [3n, 0n, 1n, 0]);
  assert.deepEqual(fake.records, ["0"]);
});

const message = (lsn: number, count = 1) => ({
  batches: [
    {
      log: "log",
      firstLsn: BigInt(lsn),
      records: Array.from({ length: count }, (_, index) => ({ payload: { case: "data" as const, value: Buffer.from(`${lsn + index}`) } })),
    },
  ],
  cursor: Uint8Array.of(lsn + count),
});

const recordsOf = (batches: readonly Batch[]): string[] => batches.flatMap(({ records }) => records.map((record) => record.text()));

/** Serves 6 records, 2 in a message, between heartbeats. */
function serveSix(): void {
  fake.scan = async function* ({ start }) {
    for (let lsn = start.case === "cursor" ? (start.value[0] ?? 0) : 0; lsn < 6; lsn += 2) {
      yield { cursor: Uint8Array.of(lsn), caughtUp: true };
      yield message(lsn, 2);
    }
    throw refusal(Code.NotFound, "LOG_NOT_FOUND");
  };
}

test("follower continues behind its effects; records not kept come again", async () => {
  serveSix();
  const kept = new Kept();
  const seen: string[][] = [];
  let effects: string[] = [];
  for (let life = 0; effects.length < 6; life++) {
    // The start counts only without a state.
    const follower = await client.durableFollower("log", { state: kept, lsn: 0n });
    effects = follower.effects === undefined ? [] : Buffer.from(follower.effects).toString().split(" ");
    for await (const batches of follower) {
      seen.push(recordsOf(batches));
      effects.push(...recordsOf(batches));
      if (life % 2 === 1) {
        await follower.keep(effects.join(" "));
      }
      break;
    }
  }
  assert.deepEqual(effects, numbers(6));
  const twice = (pair: string[]): string[][] => [pair, pair];
  assert.deepEqual(seen, [...twice(["0", "1"]), ...twice(["2", "3"]), ["4", "5"]]);
});

test("effects and cursor are kept together, also before the first records", async () => {
  serveSix();
  const kept = new Kept();
  const follower = await client.durableFollower("log", { state: kept });
  assert.deepEqual([follower.effects, follower.cursor], [undefined, undefined]);
  await follower.next();
  assert.equal(follower.cursor?.[0], 2);
  await follower.keep(Uint8Array.of(1, 2));
  const state = fromBinary(FollowerStateSchema, kept.bytes ?? new Uint8Array());
  assert.deepEqual([...state.cursor, ...state.effects], [2, 1, 2]);
  await follower.close();
  const next = await client.durableFollower("log", { state: kept });
  assert.deepEqual([next.effects, next.cursor], [Uint8Array.of(1, 2), Uint8Array.of(2)]);
  await next.keep("other");
  assert.deepEqual([...fromBinary(FollowerStateSchema, kept.bytes ?? new Uint8Array()).cursor], [2]);
  kept.fails = true;
  await assert.rejects(next.keep("more"), { kind: "STATE", message: /the disk is full/ });
  assert.equal(Buffer.from(next.effects ?? []).toString(), "other");
  await next.close();
});

test("gap is an error with the gap, and the next iteration continues", async () => {
  const gap = { log: "log", fromLsn: 1n, toLsn: 3n, reason: 1 };
  fake.scan = async function* () {
    yield message(0);
    yield { ...message(3), gaps: [gap, { ...gap, fromLsn: 2n }] };
    yield message(4);
    throw refusal(Code.NotFound, "LOG_NOT_FOUND");
  };
  const follower = await client.durableFollower("log", { state: new Kept() });
  const seen: unknown[] = [];
  for (let ended = false; !ended; ) {
    try {
      for await (const batches of follower) {
        seen.push([...recordsOf(batches), follower.cursor?.[0]]);
      }
      ended = true;
    } catch (error) {
      assert.ok(error instanceof WaldError);
      seen.push(error.kind === "MISSING" ? [error.gap?.fromLsn, error.gap?.toLsn, follower.cursor?.[0]] : error.reason);
    }
  }
  assert.deepEqual(seen, [["0", 1], [1n, 3n, 1], [2n, 3n, 1], ["3", 4], ["4", 5], "LOG_NOT_FOUND"]);
});

test("file has the last state, and belongs to its owner alone", async () => {
  const directory = await mkdtemp(join(tmpdir(), "wald-state-"));
  try {
    const path = join(directory, "producer.state");
    const state = new FileState(path);
    assert.equal(await state.load(), undefined);
    for (const text of ["first", "second, longer", "3"]) {
      await state.save(Buffer.from(text));
      assert.equal(Buffer.from((await state.load()) ?? []).toString(), text);
    }
    const { mode, ino } = await stat(path);
    assert.equal(mode & 0o777, 0o600);
    // A save replaces the file: the earlier one is whole until the new one is.
    await state.save(Buffer.from("4"));
    assert.notEqual((await stat(path)).ino, ino);
    assert.deepEqual(await readdir(directory), ["producer.state"]);
    assert.equal(Buffer.from((await state.load()) ?? []).toString(), "4");
    // Text stands for a file.
    const producer = await client.durableProducer("log", { state: `${path}.2` });
    await producer.appendBatch("a");
    await producer.close();
    assert.equal(fromBinary(ProducerStateSchema, (await new FileState(`${path}.2`).load()) ?? new Uint8Array()).sequence, 1n);
  } finally {
    await rm(directory, { recursive: true });
  }
});

test("a symbolic link stays, and its target has the state", async () => {
  const directory = await mkdtemp(join(tmpdir(), "wald-state-"));
  try {
    const [target, link] = [join(directory, "target"), join(directory, "link")];
    await symlink("middle", link);
    await symlink(target, join(directory, "middle"));
    // Once without a target, once with one.
    for (const text of ["1", "2"]) {
      await new FileState(link).save(Buffer.from(text));
      assert.ok((await lstat(link)).isSymbolicLink());
      assert.equal((await readFile(target)).toString(), text);
    }
  } finally {
    await rm(directory, { recursive: true });
  }
});

test("saves of a file have names of their own, and leave none when they fail", async () => {
  const directory = await mkdtemp(join(tmpdir(), "wald-state-"));
  try {
    const path = join(directory, "state");
    // Saves at the same time replace the file one after another: each has a file of its own.
    const saves = Array.from({ length: 20 }, (_, index) => Buffer.alloc(100_000, index));
    await Promise.all(saves.map((bytes) => new FileState(path).save(bytes)));
    const last = Buffer.from((await new FileState(path).load()) ?? []);
    assert.ok(saves.some((bytes) => bytes.equals(last)));
    assert.deepEqual(await readdir(directory), ["state"]);
    // A file cannot replace a directory.
    const taken = join(directory, "taken");
    await mkdir(taken);
    await writeFile(join(taken, "file"), "");
    const named = (error: Error): boolean => error.message.startsWith(`${taken}: `);
    await assert.rejects(new FileState(taken).save(Buffer.from("a")), named);
    await assert.rejects(new FileState(taken).load(), named);
    await assert.rejects(client.durableProducer("log", { state: taken }), { kind: "STATE", message: new RegExp(taken) });
    assert.deepEqual((await readdir(directory)).sort(), ["state", "taken"]);
  } finally {
    await rm(directory, { recursive: true });
  }
});
