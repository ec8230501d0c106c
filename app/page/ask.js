// The box to ask the model: its answer streams while its block moves on the stage.

import { KeyStore, Refused, order, post } from "./link.js";
import { make, seconds, text, whole } from "./words.js";

const MAX_TOKENS = 600; // Of a continued text, which otherwise ends after 16. A chat may go on to its end.
const ROUTES = { chat: "../v1/chat/completions", text: "../v1/completions" };

const by = (id) => document.getElementById(id);
const apiKey = new KeyStore("mell-api-key");

export class Ask {
  #route = new Map(); // By model, the route that has worked.
  #label = null;
  #id = null;
  #stream = null; // The AbortController of the answer that streams.
  #began = 0;
  #moves = 0;

  // Callbacks: `asked(request id or null)` for the stage; `denied(refusal)` for an order without a valid admin key.
  constructor(model, { asked, denied }) {
    this.model = model;
    this.on = { asked, denied };
    by("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#stream) this.#stream.abort();
      else this.#ask(by("ask-prompt").value.trim());
    });
    by("ask-move").addEventListener("click", () => this.#move());
  }

  // Show where the request is, after each event of the feed.
  update() {
    this.#listModels();
    if (this.#label === null || this.#stream === null) return;
    const request = [...this.model.requests.values()].filter((r) => r.label === this.#label).sort((a, b) => b.hop - a.hop)[0];
    if (!request) return;
    if (request.id !== this.#id) this.on.asked((this.#id = request.id));
    this.#moves = request.hop;
    this.#note(`on replica ${this.model.name(request.replica)}, ${whole(request.tokens)} tokens${this.#history()}`);
    by("ask-move").disabled = request.why !== null || request.phase === "moving" || this.#others(request).length === 0;
    by("ask-move").title = request.why ?? "";
  }

  #others(request) {
    const { model } = this.model.replicas.get(request.replica);
    return [...this.model.replicas.values()].filter((r) => r.state === "RUNNING" && r.id !== request.replica && r.model === model);
  }

  // The models to choose from, if there are several: by a name in calls, which the id need not be.
  #listModels() {
    const ids = [...new Set([...this.model.replicas.values()].map((r) => r.model).filter(Boolean))];
    const models = ids.map((id) => this.model.head.names?.[id] ?? id).sort();
    const choice = by("ask-model");
    choice.hidden = models.length === 0;
    if (models.join() === [...choice.options].map((o) => o.value).join()) return;
    const chosen = choice.value;
    choice.replaceChildren(...models.map((value) => make("option", { value, textContent: value })));
    if (models.includes(chosen)) choice.value = chosen;
  }

  #history() {
    const moves = this.model.life(this.#id).filter((m) => m.outcome === "committed" && m.pause_s !== null);
    if (!moves.length) return "";
    return `; moved ${moves.length === 1 ? "once" : `${moves.length} times`}, paused ${moves.map((m) => seconds(m.pause_s)).join(" + ")}`;
  }

  async #ask(prompt) {
    if (!prompt) return;
    if (!by("ask-key").hidden) apiKey.set(by("ask-key-value").value || null);
    this.#label = `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    this.#stream = new AbortController();
    this.#id = null;
    this.#began = performance.now();
    by("ask-answer").hidden = false;
    by("ask-answer").setAttribute("aria-busy", "true");
    by("ask-answer").replaceChildren();
    text(by("ask-send"), "Stop");
    this.#note("waiting for the first token");
    let end;
    try {
      await this.#read(prompt);
      end = "complete";
    } catch (error) {
      end = this.#stream.signal.aborted ? "stopped" : error.message;
      if (error instanceof Refused && error.status === 401) this.#needKey();
    }
    const took = seconds((performance.now() - this.#began) / 1000);
    this.#note(`${end}, ${took}${this.#id ? this.#history() : ""}`);
    by("ask-answer").setAttribute("aria-busy", "false");
    by("ask-move").disabled = true;
    text(by("ask-send"), "Ask");
    this.#stream = null;
    this.on.asked(null);
  }

  // A model without a chat template takes the prompt as a text to continue.
  async #read(prompt) {
    const name = by("ask-model").value;
    const model = name ? { model: name } : {};
    let route = this.#route.get(name) ?? "chat";
    const bodies = {
      chat: { ...model, stream: true, messages: [{ role: "user", content: prompt }] },
      text: { ...model, stream: true, prompt, max_tokens: MAX_TOKENS },
    };
    const headers = { "X-Request-Id": this.#label, ...(apiKey.get() ? { Authorization: `Bearer ${apiKey.get()}` } : {}) };
    const send = () => post(ROUTES[route], bodies[route], headers, this.#stream.signal);
    let response;
    try {
      response = await send();
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 400 || !/chat template/i.test(error.message) || route === "text") throw error;
      route = "text";
      this.#route.set(name, route);
      response = await send();
    }
    by("ask-key").hidden = true;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the connection ended within the answer");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (this.#show(event.replace(/^data: /, ""))) return;
    }
  }

  // Append an event's text; true at the end of the answer.
  #show(data) {
    if (data === "[DONE]") return true;
    const { choices, error } = JSON.parse(data);
    if (error) throw new Error(error.message);
    const { delta, text: continued } = choices[0] ?? {};
    const said = continued ?? `${delta?.reasoning ?? ""}${delta?.content ?? ""}`;
    const box = by("ask-answer");
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    if (said) box.append(said);
    if (atEnd) box.scrollTop = box.scrollHeight;
    return false;
  }

  async #move() {
    if (this.#id === null) return;
    by("ask-move").disabled = true;
    by("ask-answer").append(make("mark", { textContent: "↷", title: "The order to move was given here." }));
    try {
      await order("migrations", { request_id: this.#id });
    } catch (error) {
      this.#note(error instanceof Refused ? error.message : "The ingress is unreachable.");
      if (error instanceof Refused && error.status === 401) this.on.denied(error);
    }
  }

  #needKey() {
    by("ask-key").hidden = false;
    by("ask-key-value").focus();
  }

  #note(words) {
    text(by("ask-note"), words);
  }
}
