// Logs by name, in pages, with their current rates.

import { Refused, ask } from "./api.js";
import { STEPS, h, say } from "./dom.js";
import { byteRate, bytes, count, day, instant, rate } from "./format.js";

const REFRESH = 500;
const PAGE = 100;
// Rates are of so much time: short enough to be now, long enough to be calm.
const WINDOW = 4000;

/** Rates of logs, from where they stood when they were last asked for. */
export class Rates {
  #seen = new Map();

  /** Notes where a log stands; gives back its rates, null until there are two looks at it. */
  of(log) {
    const now = performance.now();
    const looks = this.#seen.get(log.log_id) ?? [];
    this.#seen.set(log.log_id, looks);
    looks.push([now, log.tail_lsn, log.stored_bytes]);
    while (looks.length > 2 && now - looks[1][0] > WINDOW) looks.shift();
    const [[since, tail, stored]] = looks;
    const time = (now - since) / 1000;
    if (time < 0.2) return { records: null, bytes: null };
    // A crash or a trim can take some back: that is no rate.
    return { records: Math.max(0, log.tail_lsn - tail) / time, bytes: Math.max(0, log.stored_bytes - stored) / time };
  }

  /** Forgets logs that are not looked at any more. */
  keep(logs) {
    const ids = new Set(logs.map((log) => log.log_id));
    for (const id of this.#seen.keys()) if (!ids.has(id)) this.#seen.delete(id);
  }
}

const link = (name) => `#/log?${new URLSearchParams({ name })}`;

export class LogsView {
  title = "Logs";

  constructor(world, parameters) {
    this.world = world;
    this.rates = new Rates();
    this.lines = new Map();
    this.trail = [];
    this.search = h("input", { type: "search", placeholder: "Search by prefix", "aria-label": "Search logs by prefix", autocomplete: "off", spellcheck: "false", oninput: () => this.type() });
    this.note = h("p", { class: "quiet", role: "status" });
    this.rows = h("tbody");
    this.before = h("button", { type: "button", onclick: () => this.go(this.trail.pop() ?? "") }, "← Previous");
    this.next = h("button", { type: "button", onclick: () => { this.trail.push(this.after); this.go(this.nextAfter); } }, "Next →");
    const head = [["Name"], ["Records/s", "number"], ["Bytes/s", "number wide"], ["Records", "number"], ["First", "number wide"], ["Tail", "number wide"], ["Stored", "number"], ["Sync", "wide"], ["Created", "wide"]];
    this.scroll = h("div", { class: "scroll" }, h("table", { class: "rows logs" }, h("thead", {}, h("tr", {}, head.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), this.rows));
    this.root = h("div", { class: "page" },
      h("div", { class: "bar-top" }, h("h1", {}, "Logs"), h("div", { class: "search" }, this.search, h("kbd", { title: "Press / to search" }, "/")), this.note, h("span", { class: "spacer" }), this.before, this.next),
      this.scroll);
    this.accept(parameters);
  }

  accept(parameters) {
    this.prefix = parameters.get("prefix") ?? "";
    this.after = parameters.get("after") ?? "";
    if (this.search.value !== this.prefix) this.search.value = this.prefix;
    if (this.timer) this.load();
    return true;
  }

  opened() {
    this.timer = setInterval(() => !document.hidden && this.world.connected && this.load(), REFRESH);
    this.load();
  }

  close() {
    clearInterval(this.timer);
    this.closed = true;
  }

  reconnected() {
    this.load();
  }

  type() {
    this.trail = [];
    const prefix = this.search.value;
    // Typing replaces the address: the way back leads out of the search, not through it.
    history.replaceState(null, "", prefix ? `#/logs?${new URLSearchParams({ prefix })}` : "#/logs");
    this.prefix = prefix;
    this.after = "";
    this.load();
  }

  go(after) {
    this.after = after;
    const query = new URLSearchParams({ ...(this.prefix && { prefix: this.prefix }), ...(after && { after }) });
    history.replaceState(null, "", `#/logs?${query}`);
    this.scroll.scrollTop = 0;
    this.load();
  }

  async load() {
    const asked = `${this.prefix}\n${this.after}`;
    // One answer at a time, except for a different request.
    if (this.asking === asked) return;
    this.asking = asked;
    try {
      const page = await ask("logs", { prefix: this.prefix, after: this.after, limit: PAGE });
      if (!this.closed && asked === `${this.prefix}\n${this.after}`) this.show(page);
    } catch (error) {
      if (error instanceof Refused) say(this.note, error.message);
    } finally {
      if (this.asking === asked) this.asking = null;
    }
  }

  show(page) {
    this.nextAfter = page.next_after;
    this.before.disabled = this.after === "";
    this.next.disabled = page.next_after === null;
    const range = page.logs.length ? `${this.trail.length * PAGE + 1}–${this.trail.length * PAGE + page.logs.length}` : "none";
    const more = page.next_after === null ? "" : " and more";
    say(this.note, this.prefix || this.after ? `${range}${more} · ${count(page.total)} logs in all` : `${range} of ${count(page.total)}`);
    this.rates.keep(page.logs);
    const lines = new Map(page.logs.map((log) => [log.log_id, this.lines.get(log.log_id) ?? this.line(log)]));
    const order = [...lines.values()].map((line) => line.root);
    const same = order.length === this.rows.children.length && order.every((row, index) => row === this.rows.children[index]);
    if (!same) this.rows.replaceChildren(...order);
    this.lines = lines;
    for (const log of page.logs) this.fill(lines.get(log.log_id), log);
    if (page.logs.length === 0) this.rows.replaceChildren(h("tr", {}, h("td", { colspan: 9, class: "empty" }, this.prefix ? `No log's name begins with “${this.prefix}”.` : "No logs yet. The first append makes one.")));
  }

  line(log) {
    const cell = (kind) => h("td", { class: kind });
    const cells = ["number", "number wide", "number", "number wide", "number wide", "number", "wide", "wide"].map(cell);
    const root = h("tr", { onclick: (event) => { if (!event.target.closest("a")) location.hash = link(log.name); } },
      h("th", { scope: "row" }, h("a", { href: link(log.name), title: log.name }, log.name)), cells);
    return { root, cells };
  }

  fill({ root, cells }, log) {
    const now = this.rates.of(log);
    const texts = [rate(now.records), byteRate(now.bytes), count(log.tail_lsn - log.first_lsn), count(log.first_lsn), count(log.tail_lsn), bytes(log.stored_bytes), log.sync_mode ?? this.world.server?.settings.sync_mode ?? "", day(log.create_time_us)];
    texts.forEach((text, index) => say(cells[index], text));
    cells[7].title = instant(log.create_time_us);
    root.classList.toggle("active", (now.records ?? 0) > 0);
  }

  key(event) {
    const links = [...this.rows.querySelectorAll("a")];
    const step = STEPS.get(event.key);
    if (!step || links.length === 0) return;
    const at = links.indexOf(document.activeElement);
    links[Math.min(links.length - 1, Math.max(0, at + step))].focus();
    event.preventDefault();
  }
}
