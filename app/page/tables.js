// The tables of migrations and of replicas.

import { predicted, took } from "./model.js";
import { clock, make, percent, seconds, short, stateAndRole, text, whole } from "./words.js";

// The colours of states.
const STATES = { RUNNING: "good", STARTING: "starting", DRAINING: "draining", ASLEEP: "stopped", WAKING: "starting", STOPPED: "stopped" };
const OUTCOMES = { committed: "moved", aborted: "stayed", refused: "refused" };

// Rows are kept by id, and unchanged cells are not touched, so that focus and selection persist.
export class Rows {
  #rows = new Map();

  constructor(table) {
    this.body = table.tBodies[0];
  }

  update(items, cells) {
    const wanted = new Set(items.map((item) => item.id));
    for (const [id, row] of this.#rows) {
      if (wanted.has(id)) continue;
      row.remove();
      this.#rows.delete(id);
    }
    items.forEach((item, at) => {
      const row = this.#rows.get(item.id) ?? make("tr");
      this.#rows.set(item.id, row);
      cells(item).forEach((cell, index) => this.#cell(row, index, cell));
      if (this.body.rows[at] !== row) this.body.insertBefore(row, this.body.rows[at] ?? null);
    });
  }

  #cell(row, index, { value, title, number, open, kind }) {
    const cell = row.cells[index] ?? row.appendChild(make("td", { className: number ? "n" : "" }));
    if (open && !cell.firstChild) cell.append(make("button", { type: "button", className: "link" }));
    if (open) cell.firstChild.onclick = open;
    text(open ? cell.firstChild : cell, value);
    if (title && cell.title !== title) cell.title = title;
    if (kind !== undefined && cell.dataset.kind !== kind) cell.dataset.kind = kind;
  }
}

export const number = (value) => ({ value, number: true });

export class Moves {
  constructor(table, note, select) {
    this.rows = new Rows(table);
    this.note = note;
    this.select = select;
  }

  update(migrations) {
    const all = [...migrations.values()];
    this.rows.update(all, (m) => [
      { value: clock(m.started_at) },
      { value: short(m.label, 16), title: m.label, open: () => this.select({ request: m.request_id }) },
      { value: short(m.source), title: m.source },
      { value: short(m.target), title: m.target },
      { value: m.path === "kv" ? "KV" : "tokens" },
      { value: m.outcome === null ? m.state.toLowerCase() : OUTCOMES[m.outcome], title: m.error ?? "", kind: m.outcome ?? "running" },
      number(m.tokens === null ? "–" : whole(m.tokens)),
      number(seconds(predicted(m))),
      number(seconds(took(m))),
      number(seconds(m.pause_s)),
      { value: m.error ? `${m.reason}: ${m.error}` : m.reason, kind: "reason" },
    ]);
    const moved = all.filter((m) => m.outcome === "committed").length;
    text(this.note, all.length ? `newest ${all.length}: ${moved} moved` : "none yet");
  }
}

export class Listing {
  constructor(details, table, select) {
    this.details = details;
    this.rows = new Rows(table);
    this.select = select;
    this.last = [];
    details.addEventListener("toggle", () => this.update(this.last));
  }

  update(replicas) {
    this.last = [...replicas.values()];
    if (!this.details.open) return;
    this.rows.update(this.last, (r) => [
      { value: r.id, open: () => this.select({ replica: r.id }) },
      { value: stateAndRole(r), kind: STATES[r.state] },
      { value: short(r.node), title: r.node },
      number(whole(r.requests.length)),
      number(whole(r.used)),
      number(whole(r.capacity)),
      number(percent(r.used / r.capacity)),
      number(r.cache ? whole(r.cache.historical) : "–"),
      number(percent(r.cache && r.cache.cached / r.cache.prompted)),
      number(whole(r.preemptions)),
    ]);
  }
}
