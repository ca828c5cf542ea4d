// How the server is, at a glance.

import { Chart } from "./chart.js";
import { h, say } from "./dom.js";
import { byteRate, bytes, count, instant, rate, seconds, span } from "./format.js";

const LEVELS = ["replicated", "durable", "written", "accepted"];
const PROMISE = new Map([
  ["replicated", "acks after the bucket has the record: the loss of the machine takes nothing"],
  ["strict", "acks after a flush: a power cut takes nothing"],
  ["batch", "batches are flushed, single appends within the sync interval"],
  ["interval", "acks after a write, flushed within the sync interval"],
  ["async", "acks after a write, flushed when the kernel likes"],
  ["manual", "acks from memory, written on Sync"],
]);

/** The protection of the gRPC port, in words. */
function protection({ tls, client_certificates: certificates, principals }) {
  const parts = [tls ? "TLS" : "plaintext"];
  if (certificates !== "off") parts.push(`client certificates ${certificates === "require" ? "required" : "optional"}`);
  parts.push(principals ? "each principal has its rights alone" : certificates === "require" ? "every client with a certificate may do everything" : "everyone who reaches the port may do everything");
  return parts.join(", ");
}

const REPLICA_STATES = new Map([
  ["serving", ["serving", ""]],
  ["bucket_down", ["the bucket gives no answer, and REPLICATED is refused", "bad"]],
  ["fenced", ["another node owns the store, and this one ends", "bad"]],
]);

/** The durability that most recent acks had: the subject of the latency chart. */
function usualLevel(points) {
  const total = (level) => points.reduce((sum, point) => sum + (point[`${level}_acks`] ?? 0), 0);
  return LEVELS.reduce((best, level) => (total(level) > total(best) ? level : best), "durable");
}

function tile(label, hint) {
  const value = h("dd", {}, "–");
  const note = h("dd", { class: "quiet" });
  return { value, note, root: h("div", { class: "tile", title: hint }, h("dt", {}, label), value, note) };
}

function facts(rows) {
  return h("dl", { class: "facts" }, rows.map(([name, value, kind]) => [h("dt", {}, name), h("dd", { class: kind }, value)]));
}

export class Overview {
  title = "Overview";

  constructor(world) {
    this.world = world;
    this.level = "durable";
    this.tiles = {
      appends: tile("Appends", "Records appended and acked"),
      ack: tile("Append p99", "Time in the server until the ack, of the last seconds"),
      flush: tile("Flush p99", "Time of one flush of the journal, of the last seconds"),
      lag: tile("Not yet durable", "Written and not flushed: a power cut would take these bytes now"),
      replica: tile("Not in the bucket", "Durable and not in the replica: the loss of the machine would take these bytes now"),
      reads: tile("Reads", "Records given to readers"),
      logs: tile("Logs", "Logs in the store"),
      followers: tile("Followers", "Scans that wait for new records"),
      disk: tile("Disk free", "Free space of the file system under the data directory"),
    };
    const of = (name) => (point) => point[name];
    this.charts = [
      new Chart({ title: "Appends", hint: "Records acked per second", format: rate, series: [{ name: "records", of: of("append_records"), area: true }] }),
      new Chart({ title: "Append latency", hint: "From decoded request to answer, of the last 5 s; from the buckets of /metrics", format: seconds, scale: "log", series: [{ name: "p50", of: (point) => point[`${this.level}_p50`] }, { name: "p99", of: (point) => point[`${this.level}_p99`] }] }),
      new Chart({ title: "Flush latency", hint: "One flush of the journal, of the last 5 s; from the buckets of /metrics", format: seconds, scale: "log", series: [{ name: "p50", of: of("flush_p50") }, { name: "p99", of: of("flush_p99") }] }),
      new Chart({ title: "Throughput", hint: "Bytes of data and headers appended, of stored bodies read", format: byteRate, binary: true, series: [{ name: "append", of: of("append_bytes"), area: true }, { name: "read", of: of("read_bytes") }] }),
      new Chart({ title: "Group commit", hint: "Flushes of the journal per second, and acked records for each", format: (value) => (value == null ? "–" : rate(value).slice(0, -2)), series: [{ name: "flushes/s", of: of("flushes") }, { name: "per flush", of: of("records_per_flush") }] }),
      new Chart({ title: "Not yet durable", hint: "Bytes written and not flushed", format: bytes, binary: true, series: [{ name: "bytes", of: of("lag_bytes"), area: true }] }),
    ];
    this.warnings = h("ul", { class: "warnings", "aria-label": "Warnings" });
    this.levels = h("tbody");
    this.disk = h("div");
    this.server = h("div");
    this.start = h("div");
    this.replica = h("div");
    this.replicaPanel = h("section", { class: "panel", hidden: true }, h("h2", {}, "Replica"), this.replica);
    this.root = h("div", { class: "overview" },
      h("h1", { class: "only-read" }, "Overview"),
      h("dl", { class: "tiles" }, Object.values(this.tiles).map((one) => one.root)),
      this.warnings,
      h("div", { class: "charts" }, this.charts.map((chart) => chart.root)),
      h("div", { class: "panels" },
        h("section", { class: "panel" }, h("h2", {}, "Acks by durability"),
          h("table", { class: "plain-table" }, h("thead", {}, h("tr", {}, ["Reached", "Acks", "p50", "p99"].map((name, index) => h("th", { scope: "col", class: index ? "number" : null }, name)))), this.levels)),
        h("section", { class: "panel" }, h("h2", {}, "Disk"), this.disk),
        h("section", { class: "panel" }, h("h2", {}, "Durability"), this.start),
        this.replicaPanel,
        h("section", { class: "panel" }, h("h2", {}, "This server"), this.server)));
  }

  update() {
    const { server, state, points } = this.world;
    const now = points.at(-1) ?? {};
    this.level = usualLevel(points);
    const set = (name, value, note, kind = "") => {
      say(this.tiles[name].value, value);
      say(this.tiles[name].note, note);
      this.tiles[name].root.className = `tile ${kind}`;
    };
    set("appends", rate(now.append_records), byteRate(now.append_bytes), now.rejected > 0 ? "warn" : "");
    if (now.rejected > 0) say(this.tiles.appends.note, `${rate(now.rejected)} turned away`);
    set("ack", seconds(now[`${this.level}_p99`]), `${this.level} · p50 ${seconds(now[`${this.level}_p50`])}`);
    set("flush", seconds(now.flush_p99), `${rate(now.flushes)} · p50 ${seconds(now.flush_p50)}`, now.flush_p99 > 0.1 ? "warn" : "");
    const lag = now.lag_bytes ?? 0;
    set("lag", bytes(lag + state.buffered_bytes), lag > 0 ? `oldest ${seconds(now.lag_seconds)}` : "all flushed");
    this.showReplica(state.replica, server.store?.replica, set);
    set("reads", rate(now.read_records), byteRate(now.read_bytes));
    set("logs", count(state.logs), server.settings.auto_create ? "made by first append" : "made by CreateLog");
    set("followers", count(state.followers), "waiting scans");
    const used = state.journal_bytes + state.sorted_bytes + state.pool_bytes + state.quarantine_bytes;
    set("disk", bytes(state.free_bytes), `${bytes(used)} in use`, state.free_bytes !== null && state.free_bytes < 4 * server.settings.segment_bytes ? "bad" : "");
    for (const chart of this.charts) chart.show(points);
    say(this.charts[1].title, `Append latency, ${this.level}`);
    const levels = state.replica ? LEVELS : LEVELS.slice(1);
    this.levels.replaceChildren(...levels.map((level) => h("tr", {}, h("th", { scope: "row" }, level), [rate(now[`${level}_acks`]), seconds(now[`${level}_p50`]), seconds(now[`${level}_p99`])].map((text) => h("td", { class: "number" }, text)))));
    this.showDisk(state, used);
    this.showWarnings(server);
    this.showServer(server, now);
  }

  showReplica(replica, place, set) {
    this.tiles.replica.root.hidden = this.replicaPanel.hidden = !replica;
    if (!replica) return;
    const [words, kind] = REPLICA_STATES.get(replica.state) ?? [replica.state, "warn"];
    const isLate = replica.lag_bytes > 0.8 * replica.max_lag_bytes || replica.lag_seconds > 30;
    set("replica", bytes(replica.lag_bytes), replica.lag_bytes > 0 ? `${count(replica.lag_records)} records, oldest ${seconds(replica.lag_seconds)}` : "all replicated", kind || (isLate ? "warn" : ""));
    this.replica.replaceChildren(facts([
      ["State", words, kind],
      ...(place ? [["Bucket", place.bucket_url], ["Node", place.node_id]] : []),
      ["Term", count(replica.term)],
      ["Replicated below", count(replica.replicated_position)],
      ["Lag", `${bytes(replica.lag_bytes)} of at most ${bytes(replica.max_lag_bytes)}`, isLate ? "warn" : ""],
      ["Writes", replica.put_p50 === null ? "none yet" : `p50 ${seconds(replica.put_p50)}, p99 ${seconds(replica.put_p99)}`],
    ]));
  }

  showDisk(state, used) {
    const whole = used + (state.free_bytes ?? 0);
    const parts = [["journal", state.journal_bytes], ["sorted", state.sorted_bytes], ["ready segments", state.pool_bytes], ["quarantine", state.quarantine_bytes], ["free", state.free_bytes ?? 0]];
    const bar = h("div", { class: "bar", role: "img", "aria-label": parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") });
    parts.forEach(([, size], index) => {
      const part = h("span", { class: `d${index}` });
      // A sliver is shown of everything that is there.
      part.style.flexGrow = String(size > 0 ? Math.max(size / whole, 0.006) : 0);
      bar.append(part);
    });
    const row = ([name, size], index) => h("li", {}, h("i", { class: `d${index}` }), name, h("b", {}, bytes(size)));
    this.disk.replaceChildren(bar, h("ul", { class: "keys" }, parts.map(row)),
      facts([["Segments", h("span", {}, h("a", { href: "#/segments" }, count(state.journal_segments)), ` of the journal, ${count(state.ready_segments)} ready`)], ["Open for reading", count(state.open_segments)], ["In flight", bytes(state.inflight_bytes)]]));
  }

  showWarnings(server) {
    const damage = server.store?.recovery.damage ?? [];
    const ranges = server.store?.recovery.damaged_ranges ?? 0;
    const said = [
      ...damage.map((gap) => ["bad", `Records ${gap.from_lsn ?? "?"} to ${gap.to_lsn == null ? "?" : gap.to_lsn - 1} of ${gap.log ?? "an unknown log"} are damaged; found at start.`]),
      ...(ranges > damage.length ? [["bad", `${count(ranges - damage.length)} more damaged ranges.`]] : []),
      ...(server.store?.recovery.findings ?? []).map((text) => ["warn", text]),
      ...server.warnings.map((text) => ["warn", text]),
    ];
    const key = JSON.stringify(said);
    if (key === this.said) return;
    this.said = key;
    this.warnings.replaceChildren(...said.map(([kind, text]) => h("li", { class: kind }, text)));
    this.warnings.hidden = said.length === 0;
  }

  showServer(server, now) {
    const { settings, store } = server;
    const uptime = ((now.time_ms ?? server.now_us / 1000) - server.start_time_us / 1000) / 1000;
    const changing = span(uptime);
    const key = JSON.stringify([server.version, store, settings]);
    if (key === this.shown) {
      say(this.uptime, changing);
      return;
    }
    this.shown = key;
    this.uptime = h("span", {}, changing);
    this.server.replaceChildren(facts([
      ["Version", server.version], ["Up", this.uptime], ["Since", instant(server.start_time_us).slice(0, 19)], ...(settings.data_dir ? [["Data", settings.data_dir]] : []), ["gRPC", settings.grpc], ["HTTP", settings.http], ["Protection", protection(settings.protection)],
      ...(store ? [["Store", h("code", {}, store.store_id)], ["Recovery epoch", count(store.recovery_epoch)]] : []),
    ]));
    const mode = ["Sync mode", h("span", {}, h("b", {}, settings.sync_mode), ` – ${PROMISE.get(settings.sync_mode)}`)];
    this.start.replaceChildren(facts(store ? [
      mode,
      ["Sync interval", settings.sync_interval],
      ...(store.durability ? [
        ["Flush", `${store.durability.sync_primitive} on ${store.durability.file_system}`, store.durability.volatile ? "warn" : ""],
        ["Newest flushes", `p50 ${seconds(store.durability.flush_p50)}, p99 ${seconds(store.durability.flush_p99)}`],
      ] : []),
      ["Last start", `${store.recovery.result}, ${seconds(store.recovery.seconds)}: ${count(store.recovery.records)} records of ${count(store.recovery.logs)} logs`, store.recovery.damaged_ranges ? "bad" : ""],
      ["Torn tail", store.recovery.torn_bytes ? `${bytes(store.recovery.torn_bytes)} cut off, not proven to have been flushed` : "none"],
      ["Damage", store.recovery.damaged_ranges ? `${count(store.recovery.damaged_ranges)} ranges` : "none", store.recovery.damaged_ranges ? "bad" : ""],
    ] : [mode]));
  }
}
