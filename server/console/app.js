// The frame around the views: address, connection, theme.

import { Live, logIn, logOut } from "./api.js";
import { h, isTyping, say } from "./dom.js";
import { count } from "./format.js";
import { SPAN } from "./chart.js";
import { LogView } from "./log.js";
import { LogsView } from "./logs.js";
import { Overview } from "./overview.js";
import { SegmentsView } from "./segments.js";

// Maps, not objects: an object also has a member for "constructor" or "__proto__".
const VIEWS = new Map([["", Overview], ["logs", LogsView], ["log", LogView], ["segments", SegmentsView]]);
const THEMES = new Map([["system", "◐"], ["light", "☀"], ["dark", "☾"]]);

const live = new Live();
/** State that all views see: the newest known state of the server. */
const world = { server: null, state: null, points: [], connected: false, live };
let view = null;
let lostAt = null;
let crowded = false;

const element = (id) => document.getElementById(id);

/** `#/log?name=a` → the view's name and its parameters. */
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: VIEWS.has(path) ? path : "", parameters: new URLSearchParams(query ?? "") };
}

function open() {
  const { name, parameters } = address();
  if (view?.name === name && view.accept?.(parameters)) return;
  view?.close?.();
  const View = VIEWS.get(name);
  view = new View(world, parameters);
  view.name = name;
  element("view").replaceChildren(view.root);
  element("view").className = `view-${name || "overview"}`;
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.dataset.view === (name === "log" ? "logs" : name || "overview");
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} – Wald`;
  live.follow(() => view.follows?.() ?? {});
  if (world.server) view.update?.();
  view.opened?.();
}

function keep(columns, points) {
  const named = points.map((point) => Object.fromEntries(columns.map((name, index) => [name, point[index]])));
  world.columns = columns;
  const from = named[0]?.time_ms ?? Infinity;
  // Points from before the daemon's restart stay as long as they are of interest.
  world.points = [...world.points.filter((point) => point.time_ms < from), ...named];
}

function forgetOld() {
  const end = world.points.at(-1)?.time_ms ?? 0;
  const first = world.points.findIndex((point) => point.time_ms >= end - SPAN);
  if (first > 0) world.points.splice(0, first);
}

live.addEventListener("hello", ({ detail }) => {
  if (world.server && world.server.version !== detail.server.version) {
    // Another version of the daemon has another page.
    location.reload();
    return;
  }
  const again = world.server !== null && !world.connected;
  world.connected = true;
  lostAt = null;
  world.server = detail.server;
  world.state = detail.server.state;
  keep(detail.columns, detail.points);
  forgetOld();
  show();
  view.update?.();
  if (again) view.reconnected?.();
});

live.addEventListener("sample", ({ detail }) => {
  world.state = detail.state;
  world.points.push(Object.fromEntries(world.columns.map((name, index) => [name, detail.point[index]])));
  forgetOld();
  show();
  view.update?.();
});

live.addEventListener("server", ({ detail }) => {
  world.server = detail;
  world.state = detail.state;
  show();
  view.update?.();
  view.reconnected?.();
});

live.addEventListener("records", ({ detail }) => view.records?.(detail));
live.addEventListener("ended", ({ detail }) => view.ended?.(detail));

// The daemon has an auth_file: a person gives a token once, and the browser keeps a cookie.
live.addEventListener("unknown", ({ detail }) => {
  world.connected = false;
  view?.close?.();
  view = null;
  const field = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true, "aria-describedby": "login-fault" });
  const fault = h("p", { id: "login-fault", class: "bad", role: "alert" }, detail.status === 403 ? detail.why : "");
  const enter = async (event) => {
    event.preventDefault();
    try {
      await logIn(field.value);
      location.reload();
    } catch (error) {
      say(fault, error.message);
      field.select();
    }
  };
  element("view").replaceChildren(
    h("form", { class: "panel login", onsubmit: enter }, h("h1", {}, "Log in"), h("label", { for: "token" }, "Token of a principal with the right console"), field, h("button", { type: "submit" }, "Log in"), fault),
  );
  element("view").className = "view-login";
  element("notice").hidden = true;
  const pill = element("status");
  pill.className = "pill warn";
  say(pill, "login needed");
  field.focus();
});

element("logout").addEventListener("click", async () => {
  await logOut();
  location.reload();
});

live.addEventListener("broken", ({ detail }) => {
  crowded = detail.refused;
  if (world.connected || lostAt === null) lostAt = new Date();
  world.connected = false;
  show();
});

/** The pill and the notice: whether the page shows the current state. */
function show() {
  const { server, state } = world;
  const pill = element("status");
  const notice = element("notice");
  const [kind, text] = !world.connected
    ? ["bad", server ? "disconnected" : "no connection"]
    : state.journal_failed
      ? ["bad", "journal failed"]
      : state.phase !== "serving"
        ? ["warn", state.phase.split(":")[0]]
        : state.quarantined_records > 0
          ? ["bad", "damaged records"]
          : ["good", "serving"];
  pill.className = `pill ${kind}`;
  say(pill, text);
  document.body.classList.toggle("stale", !world.connected && server !== null);
  const said = !world.connected
    ? crowded
      ? "Too many pages of this console are open; close some. This one is waiting for its turn."
      : `The daemon does not answer since ${(lostAt ?? new Date()).toTimeString().slice(0, 8)}. Trying again; the page shows older data.`
    : state.journal_failed
      ? "The journal failed: appends are refused until the daemon restarts and recovers. Reads go on."
      : state.phase !== "serving"
        ? `The daemon is ${state.phase}.`
        : state.quarantined_records > 0
          ? `${count(state.quarantined_records)} records are damaged and not served. Scans name the ranges; the daemon's log has them too.`
          : "";
  notice.hidden = said === "";
  notice.className = `notice ${kind}`;
  say(notice, said);
  const logout = element("logout");
  logout.hidden = !server?.principal;
  if (server?.principal) logout.title = `Logged in as ${server.principal}`;
  if (server) say(element("identity"), [server.settings.data_dir, server.version].filter(Boolean).join(" · "));
}

function chosenTheme() {
  const stored = localStorage.getItem("wald.theme");
  return THEMES.has(stored) ? stored : "system";
}

function showTheme() {
  const theme = chosenTheme();
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = element("theme");
  say(button, THEMES.get(theme));
  button.setAttribute("aria-label", theme === "system" ? "Theme: as the system" : `Theme: ${theme}`);
  button.title = button.getAttribute("aria-label");
}

element("theme").addEventListener("click", () => {
  const names = [...THEMES.keys()];
  localStorage.setItem("wald.theme", names[(names.indexOf(chosenTheme()) + 1) % names.length]);
  showTheme();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (isTyping(event)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    const field = document.querySelector("main input[type=search], main input[type=text]");
    field?.focus();
    field?.select();
    if (field) event.preventDefault();
    return;
  }
  view?.key?.(event);
});

addEventListener("hashchange", open);
element("view").append(h("p", { class: "quiet loading" }, "Connecting…"));
showTheme();
open();
