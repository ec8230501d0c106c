// The panel of one request or replica, with the operator's orders to it.

import { KINDS, predicted, took } from "./model.js";
import { Refused, order } from "./link.js";
import { age, clock, make, percent, seconds, short, stateAndRole, text, whole } from "./words.js";

const by = (id) => document.getElementById(id);

function cacheFacts(cache) {
  if (!cache) return [];
  const share = percent(cache.cached / cache.prompted);
  return [
    ["KV blocks", `${whole(cache.active)} active, ${whole(cache.historical)} historical, ${whole(cache.blank)} blank`],
    ...(cache.host ? [["In host memory", `${whole(cache.host)} blocks`]] : []),
    ["Prompt tokens", `${whole(cache.prompted)}, ${share} of them from the cache`],
  ];
}

export class Detail {
  #item = null;
  #last = null;
  #back = null;

  // Callbacks: `chosen(request id or null)`; `denied(refusal)` for an order without a valid key.
  constructor(model, { chosen, denied }) {
    this.model = model;
    this.on = { chosen, denied };
    this.panel = by("detail");
    this.form = by("detail-form");
    this.list = by("detail-list");
    by("detail-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#item && !document.querySelector("dialog[open]")) this.close();
    });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#order();
    });
  }

  open(item) {
    if (this.panel.hidden) this.#back = document.activeElement;
    this.#item = item;
    this.#last = null;
    this.panel.hidden = false;
    this.#showMessage("", "");
    this.form.replaceChildren();
    this.list.replaceChildren();
    this.on.chosen(item.request ?? null);
    this.update();
    by("detail-title").focus();
  }

  close() {
    this.#item = null;
    this.panel.hidden = true;
    this.on.chosen(null);
    this.#back?.focus?.();
  }

  update() {
    if (this.#item?.request) this.#updateRequest(this.#item.request);
    else if (this.#item?.replica) this.#updateReplica(this.#item.replica);
  }

  #updateRequest(id) {
    const now = this.model.byId(id);
    const life = this.model.life(id);
    const request = now ?? this.#last;
    this.#last = request;
    text(by("detail-title"), request?.label ?? life[0]?.label ?? id);
    text(by("detail-sub"), now ? id : `${id}: no longer running`);
    if (request) this.#facts(this.#ofRequest(request));
    if (now && !this.form.childElementCount) this.#moveForm();
    if (now) this.#targets(now);
    else this.form.replaceChildren();
    text(by("detail-list-title"), life.length ? "Moves, newest first" : request?.hop ? "Its moves are no longer listed." : "Not moved so far.");
    this.#items(life, (m) => {
      const pause = m.pause_s === null ? "" : `, paused ${seconds(m.pause_s)}`;
      const cost = `predicted ${seconds(predicted(m))}, took ${seconds(took(m))}${pause}`;
      return `${clock(m.started_at)}  ${short(m.source)} → ${short(m.target)} by ${m.path === "kv" ? "KV" : "tokens"}: ${m.outcome ?? m.state}; ${cost}. ${m.reason}${m.error ? `: ${m.error}` : ""}`;
    });
  }

  #ofRequest(request) {
    const capacity = this.model.replicas.get(request.replica)?.capacity ?? 0;
    return [
      ["Replica", request.replica],
      ["KV tokens", `${whole(request.tokens)}, ${percent(request.tokens / capacity)} of a replica (${KINDS[request.kind].name})`],
      ["Phase", request.phase],
      ["Age", age((this.model.head.as_of ?? request.born) - request.born)],
      ["Run", `${request.hop + 1}${request.hop ? `, after ${request.hop} ${request.hop === 1 ? "change" : "changes"} of replica` : ""}`],
      ["Movable", request.why === null ? "yes" : `no: ${request.why}`],
    ];
  }

  #updateReplica(id) {
    const now = this.model.replicas.get(id);
    const replica = now ?? this.#last;
    this.#last = replica;
    text(by("detail-title"), `Replica ${short(id, 22)}`);
    text(by("detail-sub"), now ? id : `${id}: gone`);
    if (!replica) return;
    this.#facts([
      ["State", stateAndRole(replica)],
      ["Node", replica.node || "–"],
      ["KV tokens", `${whole(replica.used)} of ${whole(replica.capacity)}, ${percent(replica.used / replica.capacity)}`],
      ...cacheFacts(replica.cache),
      ["Requests", this.#classes(replica)],
      ["Preemptions", whole(replica.preemptions)],
    ]);
    const drains = now?.state === "RUNNING";
    if (drains && !this.form.childElementCount) this.form.append(make("button", { type: "submit", className: "main", textContent: "Drain…" }));
    if (!drains) this.form.replaceChildren();
    const requests = now ? replica.requests : [];
    text(by("detail-list-title"), requests.length ? "Requests, largest class first" : "No requests");
    this.#items(requests, (r) => `${KINDS[r.kind].name}  ${r.label}  ${whole(r.tokens)}`, (r) => this.open({ request: r.id }));
  }

  #classes(replica) {
    const parts = [...KINDS.keys()].reverse().map((kind) => [KINDS[kind].name, replica.requests.filter((r) => r.kind === kind).length]);
    const counts = parts.filter(([, n]) => n).map(([name, n]) => `${n} ${name}`);
    return counts.length ? `${replica.requests.length}: ${counts.join(", ")}` : "0";
  }

  #facts(pairs) {
    const facts = by("detail-facts");
    if (facts.childElementCount !== pairs.length * 2) facts.replaceChildren(...pairs.flatMap(() => [make("dt"), make("dd")]));
    pairs.forEach(([name, value], at) => {
      text(facts.children[at * 2], name);
      text(facts.children[at * 2 + 1], value);
    });
  }

  #items(items, words, open) {
    while (this.list.childElementCount > items.length) this.list.lastElementChild.remove();
    items.forEach((item, at) => {
      const entry = this.list.children[at] ?? this.list.appendChild(make("li"));
      if (open && !entry.firstChild) entry.append(make("button", { type: "button", className: "link" }));
      if (open) entry.firstChild.onclick = () => open(item);
      text(open ? entry.firstChild : entry, words(item));
    });
  }

  #moveForm() {
    this.form.append(
      make("label", {}, "Move to ", make("select", { name: "target" })),
      make("label", {}, "by ", make("select", { name: "path" }, ...[["auto", "the best path"], ["kv", "KV"], ["tokens", "tokens"]].map(([value, name]) => new Option(name, value)))),
      make("button", { type: "submit", className: "main", textContent: "Move…" }),
    );
  }

  #targets(request) {
    const select = this.form.elements.target;
    const { model } = this.model.replicas.get(request.replica) ?? {};
    const running = [...this.model.replicas.values()].filter((r) => r.state === "RUNNING" && r.id !== request.replica && r.model === model);
    const ids = ["", ...running.map((r) => r.id)];
    if (ids.join() === [...select.options].map((o) => o.value).join()) return;
    const kept = ids.includes(select.value) ? select.value : "";
    select.replaceChildren(...ids.map((id) => new Option(id === "" ? "the policy's choice" : short(id, 28), id)));
    select.value = kept;
  }

  #showMessage(message, kind) {
    const line = by("detail-message");
    line.dataset.kind = kind;
    line.textContent = message;
  }

  async #order() {
    const { request, replica } = this.#item;
    const target = this.form.elements.target?.value || null;
    const path = this.form.elements.path?.value;
    const name = request ? (this.#last?.label ?? request) : replica;
    const sure = request
      ? await confirmed("Move this request?", `“${name}” moves to ${target ?? "the policy's choice"} while it runs. The policy does not move it again for a while.`, "Move")
      : await confirmed("Drain this replica?", `All requests of ${name} move to other replicas while they run; then it stops.`, "Drain");
    if (!sure) return;
    this.#showMessage("ordered…", "");
    try {
      if (request) await order("migrations", { request_id: request, path, ...(target ? { target } : {}) });
      else await order(`replicas/${encodeURIComponent(replica)}/drain`, {});
      this.#showMessage(request ? "The move has begun." : "The replica drains.", "good");
    } catch (error) {
      this.#showMessage(error instanceof Refused ? error.message : "The ingress is unreachable.", "bad");
      if (error instanceof Refused && error.status === 401) this.on.denied(error);
    }
  }
}

export function confirmed(title, words, yes) {
  const dialog = by("sure-dialog");
  by("sure-title").textContent = title;
  by("sure-text").textContent = words;
  by("sure-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
