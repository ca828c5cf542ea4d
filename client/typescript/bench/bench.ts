/** Measures appends in a closed loop: `node dist/bench.js wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]`. README.md explains it. */
import { Redis } from "ioredis";
import { Client } from "wald-client";

const WARM_UP_MS = 1_000;

/** A server, as a program uses it. */
interface Target {
  append(): Promise<unknown>;
  close(): Promise<unknown>;
}

const record = new Uint8Array(128).fill(120);

async function wald(endpoint: string, shareAppends: boolean): Promise<Target> {
  const client = await Client.connect(endpoint, { shareAppends });
  return {
    append: () => client.append("bench", record, { durability: "DURABLE" }),
    close: () => client.close(),
  };
}

async function redis(endpoint: string): Promise<Target> {
  const [host = "127.0.0.1", port = "6379"] = endpoint.split(":");
  const client = new Redis(Number(port), host, { lazyConnect: true });
  await client.connect();
  const data = Buffer.from(record);
  return { append: () => client.xadd("log", "*", "d", data), close: () => client.quit() };
}

const [server, endpoint, inFlight, seconds, option] = process.argv.slice(2);
if ((server !== "wald" && server !== "redis") || endpoint === undefined || !(Number(inFlight) > 0) || !(Number(seconds) > 0)) {
  console.error("usage: bench.js wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]");
  process.exit(2);
}
const target = await (server === "wald" ? wald(endpoint, option !== "--unary") : redis(endpoint));
const began = performance.now() + WARM_UP_MS;
const end = began + Number(seconds) * 1_000;
const latencies: number[] = [];
const loop = async (): Promise<void> => {
  for (let before = performance.now(); before < end; ) {
    await target.append();
    const now = performance.now();
    if (before >= began && now < end) {
      latencies.push((now - before) * 1_000);
    }
    before = now;
  }
};
await Promise.all(Array.from({ length: Number(inFlight) }, loop));
await target.close();
latencies.sort((a, b) => a - b);
const quantile = (part: number): number => Math.round(latencies[Math.floor(latencies.length * part)] ?? 0);
console.log(
  JSON.stringify({
    client: "typescript",
    server,
    in_flight: Number(inFlight),
    acks: latencies.length,
    seconds: Number(seconds),
    p50_us: quantile(0.5),
    p99_us: quantile(0.99),
  }),
);
