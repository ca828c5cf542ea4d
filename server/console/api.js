// Asking the daemon: single answers, and one stream of events that outlives its restarts.

/** The daemon refused a request, or cannot be reached. `status` is 0 if it gave no answer. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** One answer of /console/api/. */
export async function ask(path, query = {}, signal) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const url = `api/${path}?${new URLSearchParams(given)}`;
  const answer = await fetch(url, { signal, cache: "no-store" });
  const text = await answer.text();
  let said;
  try {
    said = JSON.parse(text);
  } catch {
    throw new Refused(text.trim() || `status ${answer.status}`, answer.status);
  }
  if (!answer.ok) throw new Refused(said.message, answer.status);
  return said;
}

/** Exchanges a token for the cookie of a session. */
export async function logIn(token) {
  const headers = { "content-type": "application/json" };
  const answer = await fetch("api/session", { method: "POST", headers, body: JSON.stringify({ token }) });
  if (!answer.ok) throw new Refused((await answer.text()).trim(), answer.status);
}

/** Ends the session. */
export async function logOut() {
  await fetch("api/session", { method: "DELETE" });
}

// Reconnecting is quick at first, since a restart takes a moment, and never rare.
const FIRST_PAUSE = 250;
const LONGEST_PAUSE = 2000;
// Samples come each second: this much silence means that nobody is there.
const SILENCE = 5000;

/** The stream of live events. Closed while the page is hidden: it takes a place at the daemon. */
export class Live extends EventTarget {
  #source = null;
  #timer = 0;
  #watchdog = 0;
  #pause = FIRST_PAUSE;
  #query = () => ({});
  #generation = 0;
  #heard = false;

  constructor() {
    super();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    // A page that is left must not keep its stream for the way back.
    addEventListener("pagehide", () => this.#close());
    addEventListener("pageshow", () => this.#source ?? this.#open());
  }

  /** Begins again with the values of `query`, which is called again whenever the stream breaks.
   * */
  follow(query) {
    this.#query = query;
    this.#open();
  }

  #close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#watchdog);
    this.#source?.close();
    this.#source = null;
    this.#generation += 1;
  }

  #open() {
    this.#close();
    if (document.hidden) return;
    const given = Object.entries(this.#query()).filter(([, value]) => value != null);
    const source = new EventSource(`api/live?${new URLSearchParams(given)}`);
    const generation = this.#generation;
    this.#source = source;
    this.#heard = false;
    for (const name of ["hello", "sample", "server", "records", "ended"]) {
      source.addEventListener(name, (message) => {
        if (generation !== this.#generation) return;
        this.#pause = FIRST_PAUSE;
        this.#heard = true;
        this.#watch();
        this.#tell(name, JSON.parse(message.data));
      });
    }
    source.onerror = () => {
      if (generation === this.#generation) this.#broken();
    };
    this.#watch();
  }

  #watch() {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => this.#broken(), SILENCE);
  }

  async #broken() {
    const heard = this.#heard;
    this.#close();
    const generation = this.#generation;
    // A stream that is refused looks like one that cannot be reached: another question tells.
    const [refused, error] = heard ? [false, null] : await ask("server", {}, AbortSignal.timeout(2000)).then(() => [true, null], (error) => [false, error]);
    if (generation !== this.#generation) return;
    if (error?.status === 401 || error?.status === 403) return this.#tell("unknown", { status: error.status, why: error.message });
    this.#tell("broken", { refused });
    this.#timer = setTimeout(() => this.#open(), this.#pause);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE);
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
