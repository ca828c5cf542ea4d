// Small charts of the last minutes, drawn as SVG.

import { h, s, say } from "./dom.js";

const HEIGHT = 132;
const LEFT = 62;
const BOTTOM = 18;
const TOP = 6;
/** Maximum span of a chart in milliseconds; older points are dropped. */
export const SPAN = 600_000;
const LEAST_SPAN = 60_000;
// A larger hole between two points is a hole in the line: the daemon was away.
const HOLE = 3500;

/** The least of 1, 2, 5 times a power of ten (or two, for bytes) that is not below. */
function ceiling(value, binary) {
  if (binary) return 2 ** Math.ceil(Math.log2(Math.max(value, 1024)));
  if (value <= 2) return 2;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.9999);
}

function path(points, x, y) {
  let text = "";
  let before = null;
  for (const [time, value] of points) {
    if (value === null) {
      before = null;
      continue;
    }
    text += `${before !== null && time - before < HOLE ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    // A point alone is drawn as a short line, or it would not be seen.
    if (before === null) text += "h.5";
    before = time;
  }
  return text;
}

/**
 * A chart. `series`: [{ name, key or of(point), area }], `format`: writes a value, `scale`:
 * "log" for times, whose interesting differences are factors.
 */
export class Chart {
  constructor({ title, hint, series, format, scale = "linear", binary = false }) {
    Object.assign(this, { series, format, scale, binary, points: [], width: 0, hovered: null });
    this.values = series.map(() => h("b", {}, "–"));
    this.title = h("h3", { title: hint }, title);
    const legend = h("div", { class: "legend" }, series.map((one, index) => h("span", { class: `c${index}` }, h("i"), one.name, " ", this.values[index])));
    this.svg = s("svg", { height: HEIGHT, role: "img", "aria-label": title });
    this.when = h("span", { class: "quiet when" });
    this.root = h("section", { class: "chart", title: "" }, h("div", { class: "chart-head" }, this.title, this.when, legend), this.svg);
    this.root.removeAttribute("title");
    this.name = title;
    this.svg.addEventListener("pointermove", (event) => this.hover(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.root);
  }

  show(points) {
    this.points = points;
    this.draw();
  }

  hover(x) {
    this.hovered = x;
    this.draw();
  }

  range(lists) {
    const values = lists.flat().map(([, value]) => value).filter((value) => value !== null && value > 0);
    const most = Math.max(...values, 0);
    if (this.scale === "log") {
      const low = values.length ? Math.min(...values) : 1e-4;
      const bottom = 10 ** Math.floor(Math.log10(low) + 1e-9);
      const top = Math.max(bottom * 10, 10 ** Math.ceil(Math.log10(most || 1e-3) - 1e-9));
      const ticks = [];
      for (let tick = bottom; tick <= top * 1.001; tick *= 10) ticks.push(tick);
      return { ticks, place: (value) => Math.log10(Math.max(value, bottom) / bottom) / Math.log10(top / bottom) };
    }
    const top = ceiling(most, this.binary);
    return { ticks: [0, top / 2, top], place: (value) => Math.max(0, value) / top };
  }

  draw() {
    if (this.width < 80) return;
    const last = this.points.at(-1);
    const end = last ? last.time_ms : Date.now();
    const lists = this.series.map((one) => this.points.map((point) => [point.time_ms, one.of(point) ?? null]));
    const { ticks, place } = this.range(lists);
    const span = Math.min(SPAN, Math.max(LEAST_SPAN, end - (this.points[0]?.time_ms ?? end)));
    const x = (time) => LEFT + ((time - end + span) / span) * (this.width - LEFT - 6);
    const y = (value) => TOP + (1 - place(value)) * (HEIGHT - TOP - BOTTOM);
    const parts = ticks.flatMap((tick) => [
      s("line", { class: "grid", x1: LEFT, x2: this.width - 6, y1: y(tick), y2: y(tick) }),
      s("text", { x: LEFT - 7, y: y(tick) + 3.5, "text-anchor": "end" }, this.format(tick)),
    ]);
    for (const [share, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
      const ago = (span * share) / 1000;
      const text = share === 0 ? "now" : ago < 120 ? `−${Math.round(ago)} s` : `−${(ago / 60).toFixed(1).replace(".0", "")} min`;
      parts.push(s("text", { x: x(end - span * share), y: HEIGHT - 4, "text-anchor": anchor }, text));
    }
    lists.forEach((list, index) => {
      const line = path(list, x, y);
      if (this.series[index].area) parts.push(this.area(list, x, y, index));
      parts.push(s("path", { class: `line c${index}`, d: line }));
    });
    const chosen = this.chosen(x);
    if (this.hovered !== null && chosen) {
      parts.push(s("line", { class: "cross", x1: x(chosen.time_ms), x2: x(chosen.time_ms), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.setAttribute("width", this.width);
    this.svg.replaceChildren(...parts);
    this.tell(this.hovered === null ? last : chosen);
  }

  area(list, x, y, index) {
    const floor = y(0);
    let text = "";
    let run = [];
    const close = () => {
      if (run.length > 1) text += `M${run[0][0]} ${floor}${run.map(([a, b]) => `L${a} ${b}`).join("")}L${run.at(-1)[0]} ${floor}Z`;
      run = [];
    };
    let before = null;
    for (const [time, value] of list) {
      if (value === null || (before !== null && time - before > HOLE)) close();
      if (value !== null) run.push([x(time).toFixed(1), y(value).toFixed(1)]);
      before = time;
    }
    close();
    return s("path", { class: `area c${index}`, d: text });
  }

  chosen(x) {
    if (this.hovered === null) return null;
    const distance = (point) => Math.abs(x(point.time_ms) - this.hovered);
    return this.points.reduce((best, point) => (!best || distance(point) < distance(best) ? point : best), null);
  }

  tell(point) {
    const said = this.series.map((one, index) => {
      const text = this.format(point ? one.of(point) : null);
      say(this.values[index], text);
      return `${one.name} ${text}`;
    });
    this.svg.setAttribute("aria-label", `${this.name}: ${said.join(", ")}`);
    say(this.when, this.hovered !== null && point ? new Date(point.time_ms).toISOString().slice(11, 19) : "");
  }
}
