/** Clients of several servers that share a store. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type AddressInfo, type Socket } from "node:net";
import test, { after, afterEach, beforeEach } from "node:test";

import { Code } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import type { ScanRequest } from "../src/gen/wald/v1/wal_pb.js";
import { Client, type ClientOptions } from "../src/index.js";
import { Authority } from "./authority.js";
import { Fake, gate, moved, refusal } from "./fake.js";

const authority = new Authority("good");
const other = new Authority("other");
after(() => {
  authority.remove();
  other.remove();
});

/** A pause that no call outlives: a call that succeeds made none. */
const NEVER = { retry: { firstPauseMs: 60_000, maxPauseMs: 60_000 } };
const SHORT = { retry: { firstPauseMs: 1, maxPauseMs: 5 } };

/** Two servers of one store. Each test says which owns it. */
let a: Fake;
let b: Fake;
let client: Client | undefined;

beforeEach(async () => {
  a = await Fake.start();
  b = await Fake.start(undefined, a);
});

afterEach(async () => {
  await client?.close();
  client = undefined;
  await Promise.all([a.stop(), b.stop()]);
});

const listed = (servers: Fake[], options: ClientOptions): Client =>
  (client = Client.lazy(servers.map(({ endpoint }) => endpoint).join(","), options));

/** From now on the server does not own the store. */
function leaves(server: Fake, owner: string): void {
  server.authorize = () => {
    throw moved(owner);
  };
}

/** From now on the server owns the store. */
function owns(server: Fake): void {
  server.authorize = () => {};
}

/** A server that existed once. */
async function gone(): Promise<Fake> {
  const server = await Fake.start();
  const { port } = server;
  await server.stop();
  return { endpoint: `127.0.0.1:${port}` } as Fake;
}

/** Waits for a state that no answer reports, at most as long as the test may take. */
async function until(reached: () => boolean): Promise<void> {
  while (!reached()) {
    await new Promise((resolve) => setImmediate(resolve));
  }
}

test("owner that a server names is asked at once, and first from then on", async () => {
  leaves(a, b.endpoint);
  const client = listed([a], NEVER);
  assert.equal(client.endpoint, `http://${a.endpoint}`);
  await client.append("log", "x");
  assert.deepEqual([a.calls, b.calls, client.endpoint], [1, 1, `http://${b.endpoint}`]);
  await client.append("log", "y");
  await client.stubs.wal.getTail({ log: "log" });
  assert.deepEqual([a.calls, b.calls, a.records], [1, 3, ["x", "y"]]);
});

test("call of the stubs is not repeated, and the next one goes to the owner", async () => {
  leaves(a, b.endpoint);
  const client = listed([a], NEVER);
  await assert.rejects(client.stubs.wal.getTail({ log: "log" }), { code: Code.Unavailable });
  await client.stubs.wal.getTail({ log: "log" });
  assert.deepEqual([a.calls, b.calls], [1, 1]);
});

test("owner that answers through another server is called itself", async () => {
  const at = (server: Fake): string => `http://${server.endpoint}`;
  for (const servers of [[a], [a, b]]) {
    a.speaksFor = b.endpoint;
    const client = listed(servers, NEVER);
    await client.append("log", "x");
    await until(() => client.endpoint === at(b));
    const before = [a.calls, b.calls + 1];
    await client.append("log", "x");
    assert.deepEqual([a.calls, b.calls], before);
    // The store moves, and is back at once.
    a.speaksFor = undefined;
    leaves(b, a.endpoint);
    await client.append("log", "x");
    assert.equal(client.endpoint, at(a));
    owns(b);
    a.speaksFor = b.endpoint;
    // A call of its own: an owner that only forwards from now on ends its streams.
    await client.tail("log");
    await until(() => client.endpoint === at(b));
    await client.append("log", "x");
    await client.close();
  }
});

test("a stream through another server stays; the next goes to the owner", async () => {
  a.speaksFor = b.endpoint;
  const client = listed([a], SHORT);
  const first = client.session();
  await (await first.send({ batches: [{ log: "log", records: ["0"] }] })).ack;
  await until(() => client.endpoint === `http://${b.endpoint}`);
  await (await first.send({ batches: [{ log: "log", records: ["1"] }] })).ack;
  await first.close();
  const second = client.session();
  await (await second.send({ batches: [{ log: "log", records: ["2"] }] })).ack;
  await second.close();
  assert.deepEqual([a.requests, b.requests], [2, 1]);
  await client.close();
  const scanning = listed([a], SHORT);
  a.scan = b.scan = async function* () {
    yield { cursor: Buffer.from("1"), caughtUp: true };
  };
  for await (const _ of scanning.scan("log"));
  await until(() => scanning.endpoint === `http://${b.endpoint}`);
});

test("owner out of reach keeps the client where it is answered", async () => {
  // It takes connections and answers nothing, as a filter of packets in between.
  const connections: Socket[] = [];
  const silent = createServer((socket) => connections.push(socket.resume())).listen(0, "127.0.0.1");
  await once(silent, "listening");
  const { port } = silent.address() as AddressInfo;
  const dead = await gone();
  // The last but two is b by an address that must not get the token in plaintext.
  for (const owner of [`127.0.0.1:${port}`, dead.endpoint, `0.0.0.0:${b.port}`, "a/b", ""]) {
    a.speaksFor = owner;
    const client = listed([a], { ...NEVER, token: "k7Qp2mXa", timeoutMs: 2_000 });
    for (let number = 0; number < 20; number++) {
      await client.append("log", "x");
      await new Promise((resolve) => setTimeout(resolve, 2));
    }
    assert.equal(client.endpoint, `http://${a.endpoint}`);
    // The attempt ends with the client.
    const began = performance.now();
    await client.close();
    await until(() => connections.every(({ closed }) => closed));
    assert.ok(performance.now() - began < 2_000);
  }
  // All of these answers lead to one attempt.
  assert.equal(connections.length, 1);
  silent.close();
});

test("servers that name each other get two attempts for each pause", async () => {
  leaves(a, b.endpoint);
  leaves(b, a.endpoint);
  for (const servers of [[a], [a, b]]) {
    const [before, began] = [a.calls + b.calls, performance.now()];
    const client = listed(servers, { retry: { maxAttempts: 5, firstPauseMs: 40, maxPauseMs: 40 } });
    await assert.rejects(client.append("log", "x"), { reason: "MOVED", outcome: "NOT_APPLIED", server: `http://${a.endpoint}` });
    // At a, b, pause, a, b, pause, a. A pause takes at least half of its time.
    assert.equal(a.calls + b.calls - before, 5);
    assert.ok(performance.now() - began >= 38);
    await client.close();
  }
  const [first, second] = [a.calls, b.calls];
  await assert.rejects(listed([a], NEVER).append("log", "x"), { reason: "MOVED", server: `http://${b.endpoint}` });
  assert.deepEqual([a.calls - first, b.calls - second], [1, 1]);
});

test("servers of the list are tried in a ring", async () => {
  const client = listed([await gone(), a, b], SHORT);
  await client.append("log", "0");
  await client.append("log", "1");
  assert.deepEqual([a.calls, b.calls, client.endpoint], [2, 0, `http://${a.endpoint}`]);
  for (const leave of [() => refusal(Code.Unavailable, "DRAINING"), () => refusal(Code.Unavailable, "STARTING"), () => moved("")]) {
    // From a to b, and from b past the first one, which is gone, to a.
    for (const [from, to] of [[a, b], [b, a]] as const) {
      owns(to);
      from.authorize = () => {
        throw leave();
      };
      await client.append("log", "x");
      assert.equal(client.endpoint, `http://${to.endpoint}`);
    }
  }
  assert.equal(a.records.length, 8);
});

test("next server of the list is asked after a pause", async () => {
  const dead = await gone();
  for (const [first, error] of [[a, { reason: "MOVED" }], [dead, { kind: "NOT_SENT" }]] as const) {
    leaves(a, "");
    const client = listed([first, first, b, b], NEVER);
    await assert.rejects(client.append("log", "x"), error);
    assert.deepEqual([client.endpoint, b.records], [`http://${b.endpoint}`, []]);
    leaves(b, "");
    await assert.rejects(client.append("log", "x"), { reason: "MOVED" });
    assert.equal(client.endpoint, `http://${first.endpoint}`);
    owns(b);
    await client.close();
  }
});

test("owner that is not in the list is left for the first of the list", async () => {
  leaves(a, b.endpoint);
  const client = listed([a, await gone()], SHORT);
  await client.append("log", "0");
  owns(a);
  await b.stop();
  assert.equal((await client.tail("log")).tailLsn, 1n);
  assert.equal(client.endpoint, `http://${a.endpoint}`);
});

test("a reason that says nothing about the owner keeps the server", async () => {
  let failures = 0;
  a.before = () => {
    if (failures++ === 0) {
      throw refusal(Code.ResourceExhausted, "BUSY", "NOT_APPLIED", "SAFE");
    }
  };
  await listed([a, b], SHORT).append("log", "x");
  assert.deepEqual([a.calls, b.calls], [2, 0]);
});

test("a server without its bucket is left for the next one", async () => {
  a.before = () => {
    throw refusal(Code.Unavailable, "BUCKET_DOWN", "NOT_APPLIED", "SAFE");
  };
  await listed([a, b], SHORT).append("log", "x");
  assert.deepEqual([a.calls, b.calls], [1, 1]);
});

test("connecting finds the first server that can be reached", async () => {
  const dead = [await gone(), await gone()].map(({ endpoint }) => endpoint);
  client = await Client.connect([...dead, a.endpoint].join(","), NEVER);
  assert.equal(client.endpoint, `http://${a.endpoint}`);
  await client.append("log", "x");
  await assert.rejects(Client.connect(dead.join(",")), { kind: "NOT_SENT", server: `http://${dead[1]}` });
  const before = process.env["WALD_ENDPOINT"];
  process.env["WALD_ENDPOINT"] = `${dead[0]},${b.endpoint}`;
  try {
    const found = await Client.fromEnv();
    assert.equal(found.endpoint, `http://${b.endpoint}`);
    await found.close();
  } finally {
    process.env["WALD_ENDPOINT"] = before ?? "";
  }
});

test("server that takes no connection is left, also if no call waits for it", { timeout: 10_000 }, async () => {
  const sockets: Socket[] = [];
  const silent = createServer((socket) => sockets.push(socket)).listen(0, "127.0.0.1");
  await once(silent, "listening");
  const endpoint = `127.0.0.1:${(silent.address() as AddressInfo).port}`;
  client = Client.lazy(`${endpoint},${a.endpoint}`, { connectTimeoutMs: 200 });
  await assert.rejects(client.append("log", "x", { timeoutMs: 20 }), { kind: "TIMEOUT", server: `http://${endpoint}` });
  await until(() => client?.endpoint === `http://${a.endpoint}`);
  await client.append("log", "y");
  sockets.forEach((socket) => socket.destroy());
  silent.close();
});

test("late failure of an earlier server does not move the client", async () => {
  const { opened, open } = gate();
  const arrived = gate();
  a.before = async () => {
    arrived.open();
    await opened;
    throw moved("127.0.0.1:9");
  };
  const client = listed([a], NEVER);
  const late = client.append("log", "late");
  await arrived.opened;
  leaves(a, b.endpoint);
  await client.append("log", "first");
  open();
  await late;
  assert.deepEqual([client.endpoint, a.records, a.calls], [`http://${b.endpoint}`, ["first", "late"], 2]);
});

test("producer goes on at each owner: every batch once, in order", { timeout: 30_000 }, async () => {
  let owner = a;
  for (const server of [a, b]) {
    server.authorize = () => {
      if (server !== owner) {
        throw moved(owner.endpoint);
      }
    };
  }
  a.before = () => a.authorize(null);
  const numbers = Array.from({ length: 400 }, (_, index) => `${index}`);
  a.after = () => {
    if (a.records.length === 150) {
      // Applied, and the ack is lost.
      owner = b;
      a.drop();
    }
  };
  b.before = () => {
    if (b.records.length === 250) {
      owner = a;
    }
    b.authorize(null);
  };
  const producer = await listed([a], SHORT).producer("log", { id: "p" });
  const sent = [];
  for (const record of numbers) {
    sent.push(await producer.send(record));
  }
  const acks = await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(a.records, numbers);
  assert.deepEqual(acks.map(({ firstLsn }) => firstLsn), numbers.map(BigInt));
  assert.ok(acks.some(({ deduplicated }) => deduplicated));
  assert.deepEqual([a.sequences.at(-1), b.sequences.includes(150n)], [399n, true]);
  await producer.close();
});

test("session of an owner that leaves ends; the next one is at the new owner", async () => {
  const one = (record: string) => ({ batches: [{ log: "log", records: [record] }] });
  const client = listed([a, b], NEVER);
  a.before = ([record]) => {
    if (record === "1") {
      throw moved(b.endpoint);
    }
  };
  const session = client.session();
  const [first, second] = await Promise.all([one("0"), one("1")].map((batch) => session.send(batch)));
  await first?.ack;
  const error = { reason: "MOVED", outcome: "NOT_APPLIED", retry: "SAFE", server: `http://${a.endpoint}` };
  await assert.rejects(second?.ack ?? Promise.resolve(), error);
  await assert.rejects(session.close(), { reason: "MOVED" });
  const next = client.session();
  await (await next.send(one("1"))).ack;
  await next.close();
  assert.deepEqual([a.records, b.requests], [["0", "1"], 1]);
});

test("follower goes on at the new owner by its cursor", { timeout: 30_000 }, async () => {
  const message = (lsn: number) => ({
    batches: [{ log: "log", firstLsn: BigInt(lsn), records: [{ payload: { case: "data" as const, value: new Uint8Array() } }] }],
    cursor: Uint8Array.of(lsn + 1),
  });
  const begin = ({ start }: ScanRequest): number => (start.case === "cursor" ? (start.value[0] ?? 0) : 0);
  const begins: [string, number][] = [];
  for (const [server, owner] of [[a, b], [b, a]] as const) {
    server.scan = async function* (request) {
      begins.push([server === a ? "a" : "b", begin(request)]);
      yield message(begin(request));
      yield message(begin(request) + 1);
      throw moved(owner.endpoint);
    };
  }
  const seen: bigint[] = [];
  // Each message between two ends makes up for a pause.
  for await (const { batches } of listed([a], NEVER).follow("log")) {
    seen.push(...batches.flatMap(({ records }) => records.map(({ lsn }) => lsn)));
    if (seen.length === 6) {
      break;
    }
  }
  assert.deepEqual(seen, [0n, 1n, 2n, 3n, 4n, 5n]);
  assert.deepEqual(begins, [["a", 0], ["b", 2], ["a", 4]]);
});

test("transport of the caller is not left", async () => {
  let refusals = 0;
  a.authorize = () => {
    if (refusals++ < 2) {
      throw moved(b.endpoint);
    }
  };
  const transport = createGrpcTransport({ baseUrl: `http://${a.endpoint}` });
  client = Client.lazy(`${a.endpoint},${b.endpoint}`, { ...SHORT, transport });
  await client.append("log", "x");
  assert.deepEqual([a.calls, b.calls, client.endpoint], [3, 0, undefined]);
  // Not at once, but after a pause, which does not fit into the deadline here.
  refusals = 0;
  const hasty = Client.lazy(a.endpoint, { ...NEVER, transport });
  await assert.rejects(hasty.append("log", "x"), { reason: "MOVED", server: undefined });
  assert.equal(a.calls, 4);
  await hasty.close();
});

test("only the last owner outside of the list keeps its connection", { timeout: 10_000 }, async () => {
  const c = await Fake.start(undefined, a);
  leaves(a, b.endpoint);
  const client = listed([a], NEVER);
  await client.append("log", "0");
  assert.deepEqual([a.connections, b.connections], [1, 1]);
  // A call underway ends in peace.
  const { opened, open } = gate();
  const arrived = gate();
  b.before = async () => {
    arrived.open();
    await opened;
  };
  const underway = client.append("log", "1");
  await arrived.opened;
  leaves(b, c.endpoint);
  await client.append("log", "2");
  assert.deepEqual([b.connections, client.endpoint], [1, `http://${c.endpoint}`]);
  open();
  assert.equal((await underway).lsn, 2n);
  await until(() => b.connections === 0);
  assert.deepEqual([a.connections, c.connections, a.records], [1, 1, ["0", "2", "1"]]);
  await client.close();
  await c.stop();
});

test("certificate of an owner must have the owner's name", async () => {
  const tls = (names: string) => authority.server(authority.issue(names.replace(":", "-"), { names }));
  const first = await Fake.start(tls("IP:127.0.0.1"));
  const owner = await Fake.start(tls("DNS:localhost"), first);
  const foreign = await Fake.start(other.server(other.issue("server")), first);
  const seen: (string | null)[] = [];
  owner.authorize = (authorization) => seen.push(authorization);
  foreign.authorize = (authorization) => seen.push(authorization);
  const options = { ...NEVER, tlsCa: authority.ca, token: "k7Qp2mXa" };
  const append = async (name: string, more: ClientOptions = {}): Promise<void> => {
    leaves(first, name);
    const client = Client.lazy(first.endpoint, { ...options, ...more });
    await client.append("log", "x").finally(() => client.close());
  };
  await append(`localhost:${owner.port}`);
  assert.deepEqual(seen, ["Bearer k7Qp2mXa"]);
  await assert.rejects(append(`127.0.0.1:${owner.port}`), { tlsFailure: "WRONG_NAME", server: owner.endpoint });
  await assert.rejects(append(`127.0.0.1:${foreign.port}`), { tlsFailure: "UNKNOWN_CA", server: foreign.endpoint });
  await assert.rejects(append(`localhost:${owner.port}`, { serverName: "127.0.0.1" }), { tlsFailure: "WRONG_NAME" });
  assert.deepEqual([seen.length, first.records], [1, ["x"]]);
  await Promise.all([first, owner, foreign].map((server) => server.stop()));
});

test("token does not cross plaintext to an owner on another machine", async () => {
  leaves(a, "10.0.0.1:6925");
  const client = listed([a], { retry: { maxAttempts: 2, firstPauseMs: 1 }, token: "k7Qp2mXa" });
  await assert.rejects(client.append("log", "x"), {
    reason: "MOVED",
    message: /^(?!.*k7Qp).*the owner is not asked: a token must not cross plaintext to 10\.0\.0\.1:6925/,
  });
  assert.deepEqual([a.calls, client.endpoint], [2, `http://${a.endpoint}`]);
});

test("text that names no other server is not followed", async () => {
  for (const owner of [a.endpoint, "localhost", "10.0.0.1:0", "me@10.0.0.1:6925", "x/10.0.0.1:6925", "http://10.0.0.1:6925"]) {
    leaves(a, owner);
    const client = listed([a, b], { retry: { maxAttempts: 1 } });
    await assert.rejects(client.append("log", "x"), { reason: "MOVED" });
    assert.equal(client.endpoint, `http://${b.endpoint}`);
    await client.close();
  }
});

test("lists with a fault name the part", () => {
  const cases: [string, RegExp][] = [
    ["a,ftp://b", /^`ftp:\/\/b` is not an endpoint/],
    ["a,b:0", /^`b:0` is not an endpoint .* port is 0/],
    ["a,,b", /^`a,,b` has an empty part/],
    [",a", /^`,a` has an empty part/],
    ["a,", /^`a,` has an empty part/],
    ["a, b", /^` b` is not an endpoint/],
    ["a,https://b", /^`https:\/\/b` .* must begin with http:\/\//],
    ["https://a,b:7000", /^`b:7000` .* must begin with https:\/\//],
  ];
  for (const [list, message] of cases) {
    assert.throws(() => Client.lazy(list), { kind: "USAGE", outcome: "NOT_APPLIED", message });
  }
  assert.throws(() => Client.lazy("localhost,10.0.0.1", { token: "x" }), { kind: "TOKEN", message: /to 10\.0\.0\.1:6925/ });
});
