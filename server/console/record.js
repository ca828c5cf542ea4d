// A record: as one line of a list, and in full.

import { h } from "./dom.js";
import { asHex, asJson, asText, bytes, count, fromBase64, hexLines, instant } from "./format.js";

/** How data can be shown. */
export const FORMS = ["text", "hex", "json"];
const LINE = 400;
const WHOLE = 262_144;

/** Control characters by their pictures, so that a line stays a line. */
function pictured(text) {
  return text.replace(/[\u0000-\u001f\u007f]/g, (found) => (found === "\u007f" ? "␡" : String.fromCharCode(0x2400 + found.charCodeAt(0))));
}

/** JSON on one line: white space goes, everything else stays as it was written. */
function compact(text) {
  return text.replace(/("(?:[^"\\]|\\.)*")|\s+/g, "$1");
}

/** The data of a record as one line: { text, kind }. */
export function preview(item, form) {
  const data = fromBase64(item.data);
  const more = item.cut ? " …" : "";
  if (item.size === 0) return { text: "empty", kind: "quiet" };
  const text = form === "hex" ? null : asText(data, item.cut);
  if (text === null) return { text: asHex(data, 64) + (data.length > 64 ? " …" : more), kind: form === "hex" ? "hex" : "hex binary" };
  const line = form === "json" ? compact(text) : text;
  const isJson = form === "json" && /^\s*[[{"\d-]|^\s*(true|false|null)\s*$/.test(text);
  return { text: pictured(line.slice(0, LINE)) + (line.length > LINE ? " …" : more), kind: form === "json" && !isJson ? "quiet" : "" };
}

function body(item, form) {
  const data = fromBase64(item.data);
  const text = form === "hex" ? null : asText(data, item.cut);
  if (form === "json") {
    const json = item.cut ? null : asJson(data);
    if (json !== null) return { text: json, note: "" };
    if (text !== null) return { text, note: "no JSON: shown as text" };
  }
  if (text !== null) return { text, note: "" };
  return { text: hexLines(data), note: form === "hex" ? "" : "no UTF-8: shown as hex" };
}

/** A record in full, beside the list. */
export class Detail {
  constructor(close) {
    this.item = null;
    this.close = h("button", { type: "button", class: "plain", "aria-label": "Close the record", title: "Close (Escape)", onclick: close }, "✕");
    this.content = h("div", { class: "detail-body" });
    this.heading = h("h2");
    this.root = h("aside", { class: "detail", "aria-label": "Record", hidden: true }, h("div", { class: "bar-top" }, this.heading, h("span", { class: "spacer" }), this.close), this.content);
  }

  hide() {
    this.item = null;
    this.root.hidden = true;
  }

  setForm(form) {
    if (this.item) this.show(this.item, form);
  }

  show(item, form) {
    this.item = item;
    this.root.hidden = false;
    this.heading.textContent = `lsn ${count(item.lsn)}`;
    const rows = [["Time", instant(item.time_us)], ...(item.arrival_us === item.time_us ? [] : [["Arrived", instant(item.arrival_us)]]), ["Size", `${bytes(item.size)}${item.size >= 1024 ? ` (${count(item.size)} bytes)` : ""}`], ["CRC-32C", item.crc32c ?? "none"]];
    const { text, note } = body(item, form);
    const shown = text.slice(0, WHOLE);
    const notes = [note, item.cut ? `the first ${bytes(fromBase64(item.data).length)} of ${bytes(item.size)}` : "", shown.length < text.length ? `the first ${count(shown.length)} characters` : ""].filter(Boolean);
    this.content.replaceChildren(
      h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      h("h3", {}, `Headers (${item.headers.length})`),
      item.headers.length ? h("table", { class: "plain-table headers" }, h("tbody", {}, item.headers.map((header) => this.header(header)))) : h("p", { class: "quiet" }, "none"),
      h("div", { class: "detail-data" }, h("h3", {}, "Data"), h("span", { class: "quiet" }, notes.join("; ")), h("span", { class: "spacer" }), this.copy(text)),
      h("pre", { tabindex: 0, "aria-label": "Data" }, item.size ? shown : "empty"));
  }

  header({ key, data, size, cut }) {
    const value = fromBase64(data);
    const text = asText(value, cut);
    return h("tr", {}, h("th", { scope: "row" }, pictured(key)), h("td", { class: text === null ? "hex" : "" }, size === 0 ? h("span", { class: "quiet" }, "empty") : text === null ? asHex(value, 256) : pictured(text)));
  }

  copy(text) {
    // Only over TLS or on this machine do browsers allow it.
    if (!navigator.clipboard) return null;
    const button = h("button", { type: "button", onclick: async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } }, "Copy");
    return button;
  }
}
