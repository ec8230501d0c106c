// The connection to the ingress: the stream of events, reopened after every failure, and orders.
// EventSource cannot send an Authorization header, so `fetch` reads the stream.

const FIRST_S = 0.5;
const MAX_S = 15;
const SILENT_S = 12; // The ingress sends at least a heartbeat every 5 s.

// A key, kept in this tab until it is closed.
export class KeyStore {
  constructor(name) {
    this.name = name;
  }

  get() {
    return sessionStorage.getItem(this.name);
  }

  set(value) {
    if (value) sessionStorage.setItem(this.name, value);
    else sessionStorage.removeItem(this.name);
  }
}

export const key = new KeyStore("mell-admin-key");

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Refused(response.status, body?.error?.message ?? `HTTP ${response.status}`);
}

// The response to a call with a JSON body. Throws `Refused` for an error answer.
export async function post(path, body, headers, signal) {
  const options = { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await fetch(path, options);
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function order(path, body) {
  return (await post(path, body, headers())).json();
}

export class Link {
  #wake = null;
  #attempt = null;

  // Callbacks: `event(kind, data)`, `open()`, `lost(message, retryInSeconds)`, and `denied(refusal)`, after which the link
  // waits for `again`.
  constructor(path, on) {
    this.path = path;
    this.on = on;
  }

  async run() {
    let wait = FIRST_S;
    for (;;) {
      try {
        await this.#read(() => (wait = FIRST_S));
        throw new Error("the stream ended");
      } catch (error) {
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          this.on.denied(error);
          await this.#pause(null);
          wait = FIRST_S;
          continue;
        }
        this.on.lost(error instanceof Refused ? error.message : "connection lost", wait);
        await this.#pause(wait);
        wait = Math.min(MAX_S, wait * 2);
      }
    }
  }

  again() {
    this.#attempt?.abort();
    this.#wake?.();
  }

  async #read(worked) {
    const attempt = (this.#attempt = new AbortController());
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => attempt.abort(), SILENT_S * 1000);
    };
    try {
      alive();
      const response = await fetch(this.path, { headers: headers(), signal: attempt.signal, cache: "no-store" });
      if (!response.ok) throw await refusal(response);
      this.on.open();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.#pass(block, worked);
      }
    } finally {
      clearTimeout(watchdog);
      attempt.abort();
    }
  }

  #pass(block, worked) {
    const match = /^event: (\w+)\ndata: (.*)$/s.exec(block);
    if (!match) return;
    this.on.event(match[1], JSON.parse(match[2]));
    worked();
  }

  // Wait for a number of seconds, or for `again` if null.
  #pause(waiting) {
    return new Promise((resolve) => {
      this.#wake = resolve;
      if (waiting !== null) setTimeout(resolve, waiting * 1000);
    });
  }
}
