// The files of the journal, newest first.

import { Refused, ask } from "./api.js";
import { h, say } from "./dom.js";
import { bytes, count } from "./format.js";

const REFRESH = 2000;

export class SegmentsView {
  title = "Segments";

  constructor() {
    this.trail = [];
    this.note = h("p", { class: "quiet", role: "status" });
    this.rows = h("tbody");
    this.newer = h("button", { type: "button", onclick: () => this.go(this.trail.pop() ?? null) }, "← Newer");
    this.older = h("button", { type: "button", onclick: () => { this.trail.push(this.before); this.go(this.nextBefore); } }, "Older →");
    this.before = null;
    const head = ["Segment", "State", "From position", "To position", "Size", "Filled"];
    this.root = h("div", { class: "page" },
      h("div", { class: "bar-top" }, h("h1", {}, "Segments"), this.note, h("span", { class: "spacer" }), this.newer, this.older),
      h("div", { class: "scroll" }, h("table", { class: "rows" }, h("thead", {}, h("tr", {}, head.map((name, index) => h("th", { scope: "col", class: index > 1 ? "number" : null }, name)))), this.rows)));
  }

  opened() {
    this.timer = setInterval(() => !document.hidden && this.load(), REFRESH);
    this.load();
  }

  close() {
    clearInterval(this.timer);
  }

  reconnected() {
    this.load();
  }

  go(before) {
    this.before = before;
    this.load();
  }

  async load() {
    const before = this.before;
    try {
      const page = await ask("segments", { before, limit: 200 });
      if (before === this.before) this.show(page);
    } catch (error) {
      if (error instanceof Refused) say(this.note, error.message);
    }
  }

  show(page) {
    this.nextBefore = page.next_before;
    this.newer.disabled = this.before === null;
    this.older.disabled = page.next_before === null;
    say(this.note, `${count(page.total)} ${page.total === 1 ? "file" : "files"} of the journal`);
    this.rows.replaceChildren(...page.segments.map((segment) => {
      // A sorted run is as large as its contents, and replaces more.
      const filled = segment.sorted ? segment.file_bytes : segment.end_position - segment.base_position;
      const meter = h("meter", { min: 0, max: segment.file_bytes, value: filled, "aria-label": `filled ${bytes(filled)}` });
      return h("tr", {},
        h("th", { scope: "row" }, h("code", {}, segment.segment_id.toString(16).padStart(16, "0"))),
        h("td", {}, h("span", { class: `tag ${segment.sealed ? "" : "good"}` }, segment.sorted ? "sorted" : segment.sealed ? "sealed" : "active")),
        [count(segment.base_position), count(segment.end_position), bytes(segment.file_bytes)].map((text) => h("td", { class: "number" }, text)),
        h("td", { class: "number" }, meter, h("span", { class: "filled" }, bytes(filled))));
    }));
  }
}
