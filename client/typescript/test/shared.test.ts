/** The stream that appends share. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer, type AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { afterEach, beforeEach, mock } from "node:test";

import { Code, ConnectError, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { Client, WaldError, type ClientOptions } from "../src/index.js";
import { Fake, gate, Refusal, refusal } from "./fake.js";

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

const batchOf = (record: string) => ({ batches: [{ log: "log", records: [record] }] });

/** Waits for a state of the server. */
async function until(reached: () => boolean): Promise<void> {
  const deadline = performance.now() + 5_000;
  while (!reached()) {
    assert.ok(performance.now() < deadline, "it takes too long");
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
}

/** The failure of a call that has one. */
async function failure(call: Promise<unknown>): Promise<WaldError> {
  const error = await call.then(() => undefined, (thrown: unknown) => thrown);
  assert.ok(error instanceof WaldError, `${String(error)}`);
  return error;
}

test("appends of both kinds share one stream", async () => {
  const acks = await Promise.all(Array.from({ length: 300 }, (_, index) =>
    index % 3 === 0
      ? client.appendBatch(batchOf(`${index}`)).then(({ appends }) => appends[0]?.firstLsn)
      : client.append("log", `${index}`).then(({ lsn }) => lsn),
  ));
  await client.append("log", "last");
  assert.deepEqual(fake.methods, ["AppendSession"]);
  assert.deepEqual(acks.map(String).sort(), Array.from({ length: 300 }, (_, index) => `${index}`).sort());
  // Each caller has the answer to its own request.
  assert.deepEqual(acks.map((lsn) => fake.records[Number(lsn)]), Array.from({ length: 300 }, (_, index) => `${index}`));
});

test("refused append gets the error of a call, and the others their acks", async () => {
  const refuse = (records: string[]): void => {
    if (records[0]?.startsWith("bad") === true) {
      throw refusal(Code.InvalidArgument, "RECORD_TOO_LARGE", "NOT_APPLIED", "NEVER");
    }
    if (records[0]?.startsWith("foreign") === true) {
      throw new ConnectError("no", Code.PermissionDenied);
    }
  };
  fake.before = refuse;
  const unary = fake.client({ shareAppends: false });
  for (const record of ["bad", "foreign"]) {
    const [shared, batch, good, expected] = await Promise.all([
      failure(client.append("log", record)),
      failure(client.appendBatch(batchOf(record))),
      client.append("log", "good"),
      failure(unary.append("log", record)),
    ]);
    const facts = ({ kind, code, reason, outcome, retry, message, facts, server }: WaldError) =>
      ({ kind, code, reason, outcome, retry, message, facts, server });
    assert.deepEqual([facts(shared), facts(batch)], [facts(expected), facts(expected)]);
    assert.equal(fake.records[Number(good.lsn)], "good");
  }
  assert.deepEqual(fake.methods, ["AppendSession", "Append", "Append"]);
  await unary.close();
});

test("refused append is repeated as a call is", async () => {
  let busy = 2;
  fake.before = () => {
    if (busy-- > 0) {
      throw refusal(Code.ResourceExhausted, "BUSY", "NOT_APPLIED", "SAFE");
    }
  };
  assert.equal((await client.append("log", "a")).lsn, 0n);
  assert.deepEqual([fake.methods, fake.calls], [["AppendSession"], 3]);
});

test("answers may come in any order", async () => {
  const gates = new Map(["a", "b", "c"].map((name) => [name, gate()]));
  fake.before = ([record]) => gates.get(record ?? "")?.opened;
  const order: string[] = [];
  const appends = ["a", "b", "c"].map(async (name) => {
    const { lsn } = await client.append("log", name);
    order.push(name);
    return lsn;
  });
  await until(() => fake.requests === 3);
  for (const name of ["c", "a", "b"]) {
    gates.get(name)?.open();
    await until(() => order.includes(name));
  }
  assert.deepEqual([order, await Promise.all(appends)], [["c", "a", "b"], [1n, 2n, 0n]]);
});

test("broken stream leaves plain appends unknown and repeats guarded ones", async () => {
  const { opened, open } = gate();
  let breaks = true;
  fake.before = () => (breaks ? opened : undefined);
  const plain = [client.append("log", "plain"), client.appendBatch(batchOf("plain"))].map(failure);
  const guarded = client.append("log", "guarded", { producer: { id: "p", epoch: 0n, sequence: 0n } });
  await until(() => fake.requests === 3);
  breaks = false;
  fake.drop();
  await guarded;
  for (const error of await Promise.all(plain)) {
    assert.deepEqual([error.kind, error.outcome, error.server], ["CONNECTION_LOST", "UNKNOWN", client.endpoint]);
  }
  assert.deepEqual([fake.records, fake.methods], [["guarded"], ["AppendSession", "AppendSession"]]);
  open();
});

test("server that ends the stream without an answer leaves appends unknown", async () => {
  fake.reading = () => {
    throw new ConnectError("gone", Code.Internal);
  };
  const error = await failure(client.append("log", "a"));
  assert.deepEqual([error.kind, error.code, error.outcome], ["FOREIGN", "INTERNAL", "UNKNOWN"]);
});

for (const [name, status] of [
  ["without ErrorInfo", new ConnectError("no", Code.InvalidArgument)],
  ["with the ErrorInfo of a proxy", new Refusal(Code.InvalidArgument, { reason: "NO", domain: "mesh.example", metadata: { outcome: "NOT_APPLIED" } })],
  ["with an unknown outcome", refusal(Code.InvalidArgument, "NEW_REASON", "UNKNOWN", "NEVER")],
] as const) {
  test(`bad request ${name} leaves the appends of the stream unknown`, async () => {
    const { opened, open } = gate();
    fake.before = () => opened;
    fake.losesAnswers = true;
    fake.reading = ({ append }) => {
      if (append?.log === "bad") {
        throw status;
      }
    };
    const errors = await Promise.all([client.append("log", "a"), client.append("bad", "b")].map(failure));
    assert.deepEqual(errors.map(({ code, outcome }) => [code, outcome]), Array(2).fill(["INVALID_ARGUMENT", "UNKNOWN"]));
    // The first one is applied, and nothing was sent again.
    open();
    await until(() => fake.records.length > 0);
    assert.deepEqual([fake.records, fake.methods], [["a"], ["AppendSession"]]);
  });
}

test("requests behind the end of a leaving server go to the next one", async () => {
  const next = await Fake.start(undefined, fake);
  const both = Client.lazy(`${fake.endpoint},${next.endpoint}`, { retry: { firstPauseMs: 1, maxPauseMs: 5 } });
  let left = false;
  fake.reading = ({ append }) => {
    if (!left && append?.log === "c") {
      left = true;
      throw refusal(Code.Unavailable, "DRAINING", "NOT_APPLIED", "SAFE");
    }
  };
  await Promise.all(["a", "b", "c", "d", "e"].map((name) => both.append(name, name)));
  assert.deepEqual(fake.records.toSorted(), ["a", "b", "c", "d", "e"]);
  assert.deepEqual([fake.methods, next.methods, both.endpoint], [["AppendSession"], ["AppendSession"], `http://${next.endpoint}`]);
  await both.close();
  await next.stop();
});

test("append after its deadline is unknown, and its late answer is ignored", async () => {
  const { opened, open } = gate();
  await client.append("log", "first");
  fake.before = ([record]) => (record === "slow" ? opened : undefined);
  const error = await failure(client.append("log", "slow", { timeoutMs: 20 }));
  assert.deepEqual([error.kind, error.code, error.outcome, error.server], ["TIMEOUT", "DEADLINE_EXCEEDED", "UNKNOWN", client.endpoint]);
  assert.equal(error.message, "no answer within 20 ms");
  open();
  await until(() => fake.records.length === 2);
  assert.equal((await client.append("log", "next")).lsn, 2n);
  assert.deepEqual(fake.methods, ["AppendSession"]);
});

/** Cancels an append that the server has, while time seems to go on by that many milliseconds. */
async function giveUp(time: ReturnType<typeof advance>, ms: number): Promise<void> {
  const came = fake.requests;
  const end = new AbortController();
  const given = failure(client.append("log", "given up", { signal: end.signal }));
  await until(() => fake.requests > came);
  time.by(ms);
  end.abort();
  assert.equal((await given).outcome, "UNKNOWN");
}

/** A clock that a test moves. */
function advance(): { by: (ms: number) => void; restore: () => void } {
  const now = performance.now.bind(performance);
  let ahead = 0;
  const clock = mock.method(performance, "now", () => now() + ahead);
  return { by: (ms) => (ahead += ms), restore: () => clock.mock.restore() };
}

test("stream without any answer takes no more appends", async () => {
  const { opened, open } = gate();
  fake.before = ([record]) => (record === "x" ? undefined : opened);
  const waiting = client.append("log", "waits", { timeoutMs: 60_000 });
  const time = advance();
  await giveUp(time, 5_000);
  time.restore();
  assert.equal((await client.append("log", "x")).lsn, 0n);
  // An append that waits keeps its place on the silent stream.
  open();
  await waiting;
  assert.deepEqual(fake.methods, ["AppendSession", "AppendSession"]);
});

test("stream that answers other appends stays", async () => {
  const { opened, open } = gate();
  fake.before = ([record]) => (record === "x" ? undefined : opened);
  const waiting = client.append("log", "waits", { timeoutMs: 60_000 });
  const time = advance();
  for (let turn = 0; turn < 2; turn++) {
    await giveUp(time, 3_000);
    // Its answer begins the time again.
    await client.append("log", "x");
  }
  time.restore();
  open();
  await waiting;
  assert.deepEqual(fake.methods, ["AppendSession"]);
});

test("append that was not sent by its deadline is not applied", async () => {
  // It takes connections and answers nothing.
  const silent = createServer().listen(0, "127.0.0.1");
  await once(silent, "listening");
  silent.on("connection", (socket) => socket.on("error", () => {}).resume());
  const unsent = Client.lazy(`127.0.0.1:${(silent.address() as AddressInfo).port}`, { connectTimeoutMs: 100 });
  const late = await failure(unsent.append("log", "a", { timeoutMs: 20 }));
  assert.deepEqual([late.kind, late.outcome, late.retry], ["TIMEOUT", "NOT_APPLIED", "SAFE"]);
  const end = new AbortController();
  const given = failure(unsent.append("log", "a", { signal: end.signal }));
  end.abort();
  assert.deepEqual([(await given).kind, (await given).outcome], ["CANCELLED", "NOT_APPLIED"]);
  const never = await failure(unsent.append("log", "a", { timeoutMs: 300 }));
  assert.equal(never.outcome, "NOT_APPLIED");
  silent.close();
  await unsent.close();
});

test("cancelled append leaves the stream to the others", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const end = new AbortController();
  const cancelled = failure(client.append("log", "a", { signal: end.signal }));
  const other = client.append("log", "b");
  await until(() => fake.requests === 2);
  end.abort(new Error("enough"));
  const error = await cancelled;
  assert.deepEqual([error.kind, error.outcome, error.cause], ["CANCELLED", "UNKNOWN", end.signal.reason]);
  open();
  assert.equal((await other).lsn, 1n);
  assert.deepEqual(fake.methods, ["AppendSession"]);
});

for (const [what, end] of [
  ["a bad message", () => refusal(Code.InvalidArgument, "MALFORMED_REQUEST", "NOT_APPLIED", "NEVER")],
  ["a server without the call", () => new ConnectError("unknown", Code.Unimplemented)],
  ["an older server", () => refusal(Code.FailedPrecondition, "LOG_EXISTS", "NOT_APPLIED", "NEVER").status({ request_id: "1" })],
] as const) {
  test(`each append is a call of its own after ${what}`, async () => {
    fake.before = ([record]) => {
      if (record === "bad") {
        throw refusal(Code.InvalidArgument, "RECORD_TOO_LARGE", "NOT_APPLIED", "NEVER");
      }
    };
    fake.reading = ({ append, batch }) => {
      if (append === undefined || batch !== undefined) {
        throw end();
      }
    };
    const [a, bad, b] = await Promise.allSettled([
      client.append("log", "a"),
      client.appendBatch(batchOf("bad")),
      client.append("log", "b"),
    ]);
    assert.deepEqual([a.status, bad.status, b.status], ["fulfilled", "rejected", "fulfilled"]);
    assert.equal(bad.status === "rejected" && bad.reason.reason, "RECORD_TOO_LARGE");
    assert.deepEqual(fake.records, ["a", "b"]);
    assert.deepEqual(fake.methods.toSorted(), ["Append", "AppendBatch", "AppendSession"]);
    // For a minute, and no longer.
    await client.append("log", "c");
    assert.equal(fake.methods.at(-1), "Append");
    const now = performance.now();
    const clock = mock.method(performance, "now", () => now + 61_000);
    await client.append("log", "d");
    clock.mock.restore();
    assert.equal(fake.methods.at(-1), "AppendSession");
  });
}

test("large requests are calls of their own", async () => {
  await client.append("log", "x".repeat(65_000));
  assert.deepEqual(fake.methods, ["AppendSession"]);
  await client.append("log", "x".repeat(66_000));
  await client.appendBatch(batchOf("x".repeat(66_000)));
  assert.deepEqual(fake.methods, ["AppendSession", "Append", "AppendBatch"]);
});

test("interceptors, a transport and the option make each append a call", async () => {
  const seen: string[] = [];
  const interceptor: Interceptor = (next) => (request) => {
    seen.push(request.method.name);
    return next(request);
  };
  const transport = createGrpcTransport({ baseUrl: `http://${fake.endpoint}`, interceptors: [interceptor] });
  const all: ClientOptions[] = [{ shareAppends: false }, { interceptors: [interceptor] }, { transport }];
  for (const options of all) {
    const own = fake.client(options);
    await own.append("log", "a");
    await own.appendBatch(batchOf("b"));
    await own.close();
  }
  assert.deepEqual([fake.methods, seen], [Array(3).fill(["Append", "AppendBatch"]).flat(), ["Append", "AppendBatch", "Append", "AppendBatch"]]);
});

test("stream has the headers and the token of the client", async () => {
  const own = fake.client({ headers: { "X-Tenant": "a" }, token: "k7Qp2mXa" });
  const seen: (string | null)[] = [];
  fake.authorize = (authorization) => seen.push(authorization);
  await own.append("log", "a");
  assert.deepEqual(seen, ["Bearer k7Qp2mXa"]);
  assert.deepEqual([fake.headers[0]?.["x-tenant"], fake.headers[0]?.["te"]], ["a", "trailers"]);
  await own.close();
});

test("another token gets a stream of its own", { timeout: 10_000 }, async () => {
  const directory = await mkdtemp(join(tmpdir(), "wald-shared-"));
  const tokenFile = join(directory, "token");
  await writeFile(tokenFile, "first");
  const own = fake.client({ tokenFile });
  const { opened, open } = gate();
  fake.before = ([record]) => (record === "slow" ? opened : undefined);
  const slow = own.append("log", "slow");
  await until(() => fake.requests === 1);
  await writeFile(tokenFile, "second");
  // The file is read again after a second. Time stands still then, so that no stream is idle.
  const now = performance.now() + 2_000;
  const clock = mock.method(performance, "now", () => now);
  const halfClosed = new Promise<void>((resolve) => (fake.onHalfClosed = () => resolve()));
  await own.append("log", "quick");
  assert.deepEqual(fake.headers.map(({ authorization }) => authorization), ["Bearer first", "Bearer second"]);
  await halfClosed;
  open();
  assert.equal((await slow).lsn, 1n);
  clock.mock.restore();
  await own.close();
  await rm(directory, { recursive: true });
});

test("idle stream is half-closed, and the next append opens another one", async () => {
  await client.append("log", "a");
  await new Promise((resolve) => setTimeout(resolve, 600));
  await client.append("log", "b");
  await new Promise((resolve) => setTimeout(resolve, 600));
  // Not idle for a second yet.
  assert.equal(fake.halfClosed, 0);
  await until(() => fake.halfClosed === 1);
  await client.append("log", "c");
  assert.deepEqual(fake.methods, ["AppendSession", "AppendSession"]);
});

test("stream of a server that takes no more calls is half-closed", { timeout: 10_000 }, async () => {
  await client.append("log", "a");
  // Time stands still, so that the stream is not idle.
  const now = performance.now();
  const clock = mock.method(performance, "now", () => now);
  const halfClosed = new Promise<void>((resolve) => (fake.onHalfClosed = () => resolve()));
  fake.goAway();
  await halfClosed;
  clock.mock.restore();
  await client.append("log", "b");
  assert.deepEqual(fake.methods, ["AppendSession", "AppendSession"]);
});

test("closing does not wait for a stream to be idle", { timeout: 10_000 }, async () => {
  await client.append("log", "a");
  const now = performance.now();
  const clock = mock.method(performance, "now", () => now);
  await client.close();
  clock.mock.restore();
});

test("closing waits for appends underway, and for no others", { timeout: 10_000 }, async () => {
  const { opened, open } = gate();
  await client.append("log", "first");
  fake.before = ([record]) => (record === "last" ? undefined : opened);
  await failure(client.append("log", "forgotten", { timeoutMs: 20 }));
  await client.close();
  client = fake.client();
  await client.append("log", "last");
  fake.before = () => opened;
  const underway = client.append("log", "underway");
  await until(() => fake.requests === 4);
  const closed = client.close();
  open();
  assert.ok(Number((await underway).lsn) > 0);
  await closed;
  const error = await failure(client.append("log", "late", { timeoutMs: 50 }));
  assert.deepEqual([error.kind, error.outcome], ["USAGE", "NOT_APPLIED"]);
});

test("program that forgets to close waits for its appends and ends", { timeout: 20_000 }, async () => {
  fake.before = ([record]) => (record === "b" ? new Promise((resolve) => setTimeout(resolve, 300)) : undefined);
  const source = `
    import { Client } from ${JSON.stringify(new URL("../src/index.js", import.meta.url).href)};
    const client = Client.lazy(${JSON.stringify(fake.endpoint)});
    await client.append("log", "a");
    await new Promise(setImmediate);
    await client.append("log", "b");
    console.log(performance.now());
    process.on("exit", () => console.log(performance.now()));
  `;
  const child = spawn(process.execPath, ["--input-type=module", "-e", source], { stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  child.stdout.on("data", (chunk: Buffer) => (text += chunk));
  const [code] = await once(child, "close");
  const [appended, ended] = text.split("\n").map(Number);
  assert.equal(code, 0);
  // It does not wait for the stream to be idle.
  assert.ok((ended ?? 0) - (appended ?? 0) < 900, text);
});
