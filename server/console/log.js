// One log: its records in pages, its newest as they come, one record in full.

import { Refused, ask } from "./api.js";
import { STEPS, h, isTyping, say } from "./dom.js";
import { byteRate, bytes, clock, count, day, instant, rate, span } from "./format.js";
import { Rates } from "./logs.js";
import { Detail, FORMS, preview } from "./record.js";

const PAGE = 100;
/** Rows kept while records come in live. */
const LIVE_ROWS = 500;
const REFRESH = 1000;
/** The server flushes before it names producers, so the page asks for them less often. */
const REFRESH_PRODUCERS = 10_000;

const REASONS = new Map([
  ["TRIMMED", "trimmed: forgotten on purpose"],
  ["EXPIRED", "expired: forgotten by the log's retention"],
  ["QUARANTINED", "damaged on disk, not served"],
  ["LOST", "lost: a crash took them back; they had never been durable"],
  ["DELETED", "deleted with their log"],
  ["PASSED", "came too fast to be shown; they are in the log"],
]);

/** A time as it is typed, UTC if it does not say, in microseconds; null if it is none. */
export function parseTime(text) {
  const match = /^(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d)?)(\.\d+)?)?\s*(Z|[+-]\d\d:\d\d)?$/.exec(text.trim());
  if (!match) return null;
  const [, date, time = "00:00", fraction = "", zone = "Z"] = match;
  const millis = Date.parse(`${date}T${time.length === 5 ? `${time}:00` : time}${zone}`);
  return Number.isNaN(millis) ? null : millis * 1000 + Math.round(Number(`0${fraction}`) * 1e6);
}

/** Describes a log's retention in words. */
export function retention({ own, max_age_seconds, max_bytes, max_records, respect_cursors }) {
  const bounds = [max_age_seconds === null ? "" : span(max_age_seconds), max_bytes === null ? "" : bytes(max_bytes), max_records === null ? "" : `${count(max_records)} records`].filter(Boolean);
  const text = bounds.length ? `at most ${bounds.join(", ")}${respect_cursors ? ", waits for cursors" : ""}` : "keeps everything";
  return own ? text : `${text} (server's)`;
}

/** Cursors with their lag, the one that is furthest behind first. */
export function cursors({ cursors, more_cursors }) {
  const shown = [...cursors].sort((a, b) => b.lag - a.lag).map(({ name, lag }) => `${name}: ${lag ? `${count(lag)} behind` : "at the tail"}`);
  return shown.length ? `${shown.join(", ")}${more_cursors ? ", …" : ""}` : "none";
}

/** Rows of the table of producers: id, epoch, last sequence number, last use, expiry. Times are in UTC. */
export function producerRows({ producers }) {
  const time = (micros) => instant(micros).slice(0, 19);
  return producers.map(({ id, epoch, last_sequence, last_append_us, expires_us }) => [id, epoch, last_sequence ?? "–", time(last_append_us), expires_us === null ? "never" : time(expires_us)]);
}

const gapOf = (item) => ("gap" in item ? item.gap : null);

export class LogView {
  constructor(world, parameters) {
    this.world = world;
    this.log = parameters.get("name") ?? "";
    this.title = this.log;
    this.form = FORMS.includes(localStorage.getItem("wald.form")) ? localStorage.getItem("wald.form") : "text";
    this.items = [];
    this.live = false;
    this.missed = 0;
    this.selected = null;
    this.rates = new Rates();
    this.build();
    const start = parameters.get("lsn");
    this.begin = start === null ? null : { lsn: Number(start) };
  }

  build() {
    const button = (text, title, onclick) => h("button", { type: "button", title, onclick }, text);
    this.facts = h("dl", { class: "strip" });
    this.producersTitle = h("summary");
    this.producerList = h("tbody");
    this.producers = h("details", { class: "producers", hidden: true }, this.producersTitle,
      h("div", {}, h("table", { class: "plain-table" }, h("thead", {}, h("tr", {}, [["Producer"], ["Epoch", "number"], ["Last sequence", "number"], ["Last use (UTC)"], ["Expires (UTC)"]].map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), this.producerList)));
    this.forms = h("div", { class: "segmented", role: "group", "aria-label": "Show data as" }, FORMS.map((form) => h("button", { type: "button", "aria-pressed": String(form === this.form), onclick: () => this.setForm(form) }, { text: "Text", hex: "Hex", json: "JSON" }[form])));
    this.oldest = button("⇤ Oldest", "The first records kept (Home)", () => this.load({ lsn: this.info?.first_lsn ?? 0 }));
    this.older = button("← Older", "The page before ([)", () => this.load({ before: this.from }));
    this.newer = button("Newer →", "The page after (])", () => this.load({ lsn: this.nextLsn }));
    this.newest = button("Newest ⇥", "The last records (End)", () => this.load({}));
    this.tail = h("button", { type: "button", class: "live", "aria-pressed": "false", title: "Show records as they are appended (L)", onclick: () => this.setLive(!this.live) }, h("i"), "Live tail");
    this.jump = h("input", { type: "text", placeholder: "Jump to lsn or time", "aria-label": "Jump to an lsn or a time in UTC", title: "An lsn such as 1200, or a time in UTC such as 2026-11-20 14:30", autocomplete: "off", spellcheck: "false" });
    this.note = h("p", { class: "quiet", role: "status" });
    this.rows = h("tbody");
    this.scroll = h("div", { class: "scroll", onscroll: () => this.scrolled() },
      h("table", { class: "rows records" }, h("thead", {}, h("tr", {}, [["lsn", "number"], ["Time (UTC)"], ["Size", "number"], ["Headers", "wide"], ["Data", "data"]].map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), this.rows));
    new ResizeObserver(() => this.live && !this.paused && this.toEnd()).observe(this.scroll);
    this.resume = h("button", { type: "button", class: "resume", hidden: true, onclick: () => this.setLive(true) });
    this.detail = new Detail(() => this.select(null));
    this.root = h("div", { class: "page log" },
      h("div", { class: "bar-top" }, h("a", { href: "#/logs", class: "back", title: "All logs" }, "Logs"), h("span", { class: "quiet" }, "/"), h("h1", { class: "name", title: this.log }, this.log)),
      this.facts, this.producers,
      h("div", { class: "bar-top tools" }, this.forms, h("div", { class: "group" }, this.oldest, this.older, this.newer, this.newest), this.tail,
        h("form", { class: "search", onsubmit: (event) => { event.preventDefault(); this.jumpTo(this.jump.value); } }, this.jump, h("kbd", { title: "Press / to type" }, "/")), this.note),
      h("div", { class: "split" }, h("div", { class: "list" }, this.scroll, this.resume), this.detail.root));
  }

  opened() {
    const every = (time, refresh) => setInterval(() => !document.hidden && this.world.connected && refresh(), time);
    this.timers = [every(REFRESH, () => this.refresh()), every(REFRESH_PRODUCERS, () => this.refreshProducers())];
    this.refresh();
    this.refreshProducers();
    if (this.begin) this.load(this.begin);
    else this.setLive(true);
  }

  close() {
    this.timers?.forEach(clearInterval);
    this.asksProducers?.abort();
    this.closed = true;
  }

  accept(parameters) {
    if (parameters.get("name") !== this.log) return false;
    const lsn = parameters.get("lsn");
    if (lsn !== null) this.load({ lsn: Number(lsn) });
    return true;
  }

  /** The query of the live stream. */
  follows() {
    return this.live && this.nextLsn !== undefined ? { log: this.log, from: this.nextLsn, log_id: this.info?.log_id } : {};
  }

  reconnected(refresh = true) {
    if (refresh) this.refresh();
    if (this.loading || (this.items.length && !this.broken)) return;
    if (this.begin && !this.broken) this.load(this.begin);
    else this.setLive(true);
  }

  async refresh() {
    try {
      this.info = await ask("log", { log: this.log });
    } catch (error) {
      if (error instanceof Refused && this.world.connected) this.say(error.message);
      return;
    }
    const { info } = this;
    const now = this.rates.of(info);
    const rows = [["Records", count(info.tail_lsn - info.first_lsn)], ["First", count(info.first_lsn)], ["Tail", count(info.tail_lsn)], ["Durable below", count(info.durable_lsn)], ["Now", now.records === null ? "–" : `${rate(now.records)} · ${byteRate(now.bytes)}`], ["Stored", bytes(info.stored_bytes)], ["Sync", info.sync_mode ?? `${this.world.server?.settings.sync_mode ?? ""} (server's)`], ["Compression", info.compression ?? "none", "wide"], ["Created", instant(info.create_time_us).slice(0, 19), "wide"], ["Id", info.log_id, "wide"], ["Writer epoch", info.writer_epoch === 0 ? "0 (never fenced)" : count(info.writer_epoch), "wide"], ["Retention", retention(info.retention), "wide"], ["Cursors", cursors(info), "wide"]];
    if (this.facts.children.length !== rows.length) this.facts.replaceChildren(...rows.map(([name, , kind]) => h("div", { class: kind }, h("dt", {}, name), h("dd"))));
    rows.forEach(([, value], index) => say(this.facts.children[index].lastChild, value));
    this.markDurable(info.durable_lsn);
    this.enable();
    // A log that was not there when the page was opened may have come since.
    if (this.nextLsn === undefined) this.reconnected(false);
  }

  async refreshProducers() {
    // A device that hangs keeps an answer for seconds.
    if (this.asksProducers) return;
    this.asksProducers = new AbortController();
    let found;
    try {
      found = await ask("producers", { log: this.log }, this.asksProducers.signal);
    } catch {
      // `refresh` asks for the same log, and says why there is no answer.
      return;
    } finally {
      this.asksProducers = null;
    }
    const rows = producerRows(found);
    this.producers.hidden = rows.length === 0;
    say(this.producersTitle, `Producers: ${found.more_producers ? `the first ${rows.length}, by id` : rows.length}`);
    this.producerList.replaceChildren(...rows.map(([id, epoch, sequence, used, expires]) => h("tr", {}, h("th", { scope: "row", title: id }, id), h("td", { class: "number" }, epoch), h("td", { class: "number" }, sequence), h("td", {}, used), h("td", {}, expires))));
  }

  say(text, kind = "") {
    say(this.note, text);
    this.note.className = `quiet ${kind}`;
  }

  /** Shows a page: `{ lsn }`, `{ before }`, `{ time_us }`, or the newest. */
  async load(where) {
    this.setLive(false, false);
    this.missed = 0;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.loading = true;
    try {
      const page = await ask("records", { log: this.log, limit: PAGE, ...where });
      if (this.closed || turn !== this.turn) return false;
      this.show(page);
      const newest = !("lsn" in where) && !("time_us" in where) && !("before" in where);
      this.scroll.scrollTop = newest || "before" in where ? this.scroll.scrollHeight : 0;
      this.say("");
      return true;
    } catch (error) {
      if (error instanceof Refused) this.say(error.message, "bad");
      return false;
    } finally {
      if (turn === this.turn) this.loading = false;
    }
  }

  show(page) {
    this.items = page.items;
    this.nextLsn = page.next_lsn;
    this.durable = page.durable_lsn;
    this.info = { ...this.info, log_id: page.log_id, first_lsn: page.first_lsn, tail_lsn: page.tail_lsn, durable_lsn: page.durable_lsn };
    this.rows.replaceChildren(...page.items.map((item) => this.row(item)));
    if (page.items.length === 0) this.rows.append(h("tr", { class: "none" }, h("td", { colspan: 5, class: "empty" }, page.tail_lsn === page.first_lsn ? "No records." : "No records here.")));
    this.bounds();
  }

  bounds() {
    const first = this.items.map((item) => gapOf(item)?.from_lsn ?? item.lsn).find((lsn) => lsn !== undefined);
    const record = this.items.find((item) => !gapOf(item));
    const trimmed = ["TRIMMED", "EXPIRED"].includes(gapOf(this.items[0] ?? {})?.reason);
    this.from = trimmed ? (record?.lsn ?? this.nextLsn) : (first ?? this.nextLsn);
    this.enable();
  }

  enable() {
    const atStart = this.from === undefined || this.from <= (this.info?.first_lsn ?? 0);
    this.older.disabled = atStart;
    this.oldest.disabled = atStart && !this.live;
    this.newer.disabled = this.live || this.nextLsn === undefined || this.nextLsn >= (this.info?.tail_lsn ?? 0);
  }

  row(item) {
    const gap = gapOf(item);
    if (gap) {
      const range = gap.to_lsn == null ? `from ${gap.from_lsn ?? "?"} on` : `${count(gap.from_lsn)} – ${count(gap.to_lsn - 1)}`;
      const many = gap.to_lsn == null ? "" : ` · ${count(gap.to_lsn - gap.from_lsn)} records`;
      return h("tr", { class: `gap ${gap.reason.toLowerCase()}` }, h("td", { colspan: 5 }, h("b", {}, gap.reason === "PASSED" ? "passed" : "gap"), ` ${range}${many} – ${REASONS.get(gap.reason) ?? gap.reason}`));
    }
    const { text, kind } = preview(item, this.form);
    const names = item.headers.map((header) => header.key).join(", ");
    const row = h("tr", { id: `lsn-${item.lsn}`, tabindex: item.lsn === this.selected ? 0 : -1, "aria-selected": String(item.lsn === this.selected), onclick: () => this.select(item.lsn) },
      h("th", { scope: "row", class: "number" }, count(item.lsn)),
      h("td", { class: "time", title: instant(item.time_us) }, h("span", { class: "quiet wide" }, `${day(item.time_us)} `), clock(item.time_us)),
      h("td", { class: "number" }, bytes(item.size)), h("td", { class: "wide header-names" }, names), h("td", { class: `data ${kind}` }, text));
    this.markRow(row, item.lsn);
    return row;
  }

  markRow(row, lsn) {
    const pending = lsn >= this.durable;
    row.classList.toggle("pending", pending);
    if (pending) row.title = "Not yet on the device";
    else row.removeAttribute("title");
  }

  /** Marks rows that are on the device by now. */
  markDurable(durable) {
    if (!(durable > (this.durable ?? 0))) return;
    this.durable = durable;
    for (const row of this.rows.querySelectorAll(".pending")) this.markRow(row, Number(row.id.slice(4)));
  }

  /** New records, from the live stream. */
  records(page) {
    if (!this.live) return;
    this.durable = Math.max(this.durable ?? 0, page.durable_lsn);
    this.nextLsn = page.next_lsn;
    this.info = { ...this.info, log_id: page.log_id, tail_lsn: page.tail_lsn, first_lsn: page.first_lsn };
    if (this.paused) {
      this.missed += page.items.filter((item) => !gapOf(item)).length + page.items.map(gapOf).filter((gap) => gap?.reason === "PASSED").reduce((sum, gap) => sum + gap.to_lsn - gap.from_lsn, 0);
      this.resume.hidden = false;
      say(this.resume, `${count(this.missed)} newer ${this.missed === 1 ? "record" : "records"} ↓`);
      return;
    }
    this.rows.querySelector(".none")?.remove();
    this.items = [...this.items, ...page.items].slice(-LIVE_ROWS);
    this.rows.append(...page.items.slice(-LIVE_ROWS).map((item) => this.row(item)));
    while (this.rows.children.length > LIVE_ROWS) this.rows.firstChild.remove();
    this.markDurable(page.durable_lsn);
    this.bounds();
    this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.top = this.scroll.scrollTop;
  }

  /** The stream of this log ended: deleted, replaced, or the journal failed. */
  ended({ message }) {
    this.setLive(false);
    this.broken = true;
    this.say(message, "bad");
  }

  /** Scrolling away from the end pauses; back at the end it goes on. */
  scrolled() {
    if (!this.live) return;
    const atEnd = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < 30;
    // Only who scrolls back wants to look: a window that shrinks moves nothing.
    const back = this.scroll.scrollTop < this.top;
    this.top = this.scroll.scrollTop;
    if (atEnd && this.paused && this.missed > 0) this.setLive(true);
    else if (atEnd !== !this.paused && (atEnd || back)) this.pause(!atEnd);
  }

  pause(paused) {
    this.paused = paused;
    say(this.tail.lastChild, paused ? "Live tail, paused" : "Live tail");
    this.tail.classList.toggle("paused", paused);
  }

  async setLive(live, ask = true) {
    this.live = live;
    this.broken = false;
    this.missed = 0;
    this.resume.hidden = true;
    this.tail.setAttribute("aria-pressed", String(live));
    this.pause(false);
    if (!live) {
      if (ask) this.world.live.follow(() => this.follows());
      return;
    }
    // First the newest page, then the records behind it, with nothing in between.
    const begun = await this.load({});
    if (!begun || this.closed) return;
    this.live = true;
    this.tail.setAttribute("aria-pressed", "true");
    this.enable();
    this.toEnd();
    this.world.live.follow(() => this.follows());
  }

  jumpTo(text) {
    const plain = text.trim().replace(/[,_ ](?=\d{3}\b)/g, "");
    const time = parseTime(text);
    if (/^\d+$/.test(plain)) this.load({ lsn: Number(plain) });
    else if (time !== null) this.load({ time_us: time });
    else this.say("Type an lsn such as 1200, or a time in UTC such as 2026-11-20 14:30:00", "bad");
  }

  setForm(form) {
    this.form = form;
    localStorage.setItem("wald.form", form);
    FORMS.forEach((one, index) => this.forms.children[index].setAttribute("aria-pressed", String(one === form)));
    const top = this.scroll.scrollTop;
    this.rows.replaceChildren(...this.items.map((item) => this.row(item)));
    this.scroll.scrollTop = top;
    this.detail.setForm(form);
  }

  async select(lsn) {
    this.rows.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    this.selected = lsn;
    const row = lsn === null ? null : document.getElementById(`lsn-${lsn}`);
    if (row) {
      row.setAttribute("aria-selected", "true");
      row.tabIndex = 0;
      row.focus({ preventScroll: true });
      row.scrollIntoView({ block: "nearest" });
    }
    this.root.classList.toggle("has-detail", lsn !== null);
    if (lsn === null) {
      this.detail.hide();
      return;
    }
    try {
      const item = await ask("record", { log: this.log, lsn });
      if (this.selected === lsn && !gapOf(item)) this.detail.show(item, this.form);
    } catch (error) {
      if (error instanceof Refused) this.say(error.message, "bad");
    }
  }

  key(event) {
    const step = STEPS.get(event.key);
    const action = new Map([["[", this.older], ["]", this.newer], ["Home", this.oldest], ["End", this.newest], ["l", this.tail], ["L", this.tail]]).get(event.key);
    if (step) {
      const records = this.items.filter((item) => !gapOf(item));
      const at = records.findIndex((item) => item.lsn === this.selected);
      const next = at < 0 ? (step > 0 ? records[0] : records.at(-1)) : records[at + step];
      if (this.live) this.pause(true);
      if (next) this.select(next.lsn);
    } else if (event.key === "Escape") this.select(null);
    else if (action && !isTyping(event)) action.click();
    else return;
    event.preventDefault();
  }
}
