// The model of the cluster, from the feed's snapshots and deltas, which are described in app/ingress/page/updates.py.

// Size classes as in the policies: a size on a boundary belongs to the smaller class.
export const KINDS = [
  { key: "grain", short: "·", name: "below T", share: "≤ 1⁄8" },
  { key: "tiny", short: "T", name: "T", share: "≤ 1⁄4" },
  { key: "small", short: "S", name: "S", share: "≤ 1⁄3" },
  { key: "medium", short: "M", name: "M", share: "≤ 1⁄2" },
  { key: "large", short: "L", name: "L", share: "> 1⁄2" },
];
const MIGRATIONS = 100;
const POINTS = 400;

// Blocks by their use, prompt tokens, and blocks in host memory; null if the replica does not know its cache.
function cacheOf(row) {
  if (!row) return null;
  const [active, historical, blank, prompted, cached, host] = row;
  return { active, historical, blank, prompted, cached, host };
}

// A node with a budget, in MiB, and the parts of its replicas.
function deviceOf([id, budget, ordered, held, seats]) {
  const parts = seats.map(([replica, model, by, held, ordered, why]) => ({ id: replica, model, by, held, ordered, why, device: id }));
  return { id, budget, ordered, held, seats: parts };
}

// The size class among `capacity` tokens.
export function kindOf(tokens, capacity) {
  for (const [kind, part] of [8, 4, 3, 2].entries()) if (tokens <= Math.floor(capacity / part)) return kind;
  return 4;
}

export class OutOfStep extends Error {}

export class Model {
  constructor() {
    this.head = {};
    this.clear();
  }

  clear() {
    this.devices = [];
    this.replicas = new Map();
    this.requests = new Map();
    this.migrations = new Map();
    this.points = [];
  }

  // Apply an event; returns the new and changed migrations, newest first, and none for a snapshot.
  apply(kind, data) {
    if (kind === "snapshot") this.clear();
    const { as_of, now, mode, policy, wanted_replicas, dry_run, savings, service, scaling, disaggregation, names } = data;
    this.head = { as_of, now, mode, policy, wanted: wanted_replicas, dryRun: dry_run, savings, service, scaling, disaggregation, names };
    if (data.devices) this.devices = data.devices.map(deviceOf);
    this.#replicas(data);
    this.#requests(data);
    this.points = this.points.concat(data.points).slice(-POINTS);
    for (const record of data.migrations) this.migrations.set(record.id, record);
    const newest = [...this.migrations.values()].sort((a, b) => b.started_at - a.started_at).slice(0, MIGRATIONS);
    this.migrations = new Map(newest.map((record) => [record.id, record]));
    return kind === "snapshot" ? [] : data.migrations;
  }

  #replicas(data) {
    for (const id of data.left ?? []) this.replicas.delete(id);
    for (const [id, state, node, capacity, preemptions, role, byHand, model, asleepAt] of data.replicas) {
      const facts = { id, state, node, capacity, preemptions, role, byHand, model, asleepAt };
      this.replicas.set(id, { ...facts, used: 0, requests: [] });
    }
    if (data.used.length !== this.replicas.size) throw new OutOfStep("replicas");
    if (data.replicas.length || data.left?.length) this.#shareNames();
    let at = 0;
    for (const replica of this.replicas.values()) {
      replica.used = data.used[at];
      replica.cache = cacheOf(data.caches[at++]);
    }
  }

  #requests(data) {
    for (const number of data.gone ?? []) this.requests.delete(number);
    for (const [number, id, label, replica, phase, why, hop, born, tokens] of data.requests) {
      this.requests.set(number, { number, id, label, replica, phase, why, hop, born, tokens });
    }
    if (data.grown && data.grown.length !== this.requests.size) throw new OutOfStep("requests");
    for (const replica of this.replicas.values()) replica.requests = [];
    let at = 0;
    for (const request of this.requests.values()) {
      if (data.grown) request.tokens += data.grown[at++];
      const replica = this.replicas.get(request.replica);
      request.kind = kindOf(request.tokens, replica.capacity);
      replica.requests.push(request);
    }
    // Oldest first within a class, so that a stack keeps its order while its requests grow.
    for (const replica of this.replicas.values()) {
      replica.requests.sort((a, b) => b.kind - a.kind || a.born - b.born || a.number - b.number);
    }
  }

  // A replica's id without the prefix that all ids share.
  name(id) {
    return id.slice(this.#shared) || id;
  }
  #shared = 0;

  #shareNames() {
    const ids = [...this.replicas.keys()];
    let shared = ids.length > 1 ? ids[0] : "";
    for (const id of ids) while (!id.startsWith(shared)) shared = shared.slice(0, -1);
    this.#shared = Math.max(0, ...["-", "_", "#", "~"].map((mark) => shared.lastIndexOf(mark) + 1));
  }

  // The item with that text in its label or id, {request} or {replica}; equal ones first, requests before replicas, and
  // requests that have ended, by their moves, last. Null if there is none.
  find(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return null;
    const items = [
      ...[...this.requests.values()].map((r) => ({ names: [r.label, r.id], item: { request: r.id } })),
      ...[...this.replicas.values()].map((r) => ({ names: [r.id], item: { replica: r.id } })),
      ...[...this.migrations.values()].map((m) => ({ names: [m.label, m.request_id], item: { request: m.request_id } })),
    ];
    const has = (matches) => items.find(({ names }) => names.some((name) => matches(name.toLowerCase())))?.item;
    return has((name) => name === wanted) ?? has((name) => name.includes(wanted)) ?? null;
  }

  byId(id) {
    return [...this.requests.values()].filter((r) => r.id === id).sort((a, b) => b.hop - a.hop)[0] ?? null;
  }

  life(id) {
    return [...this.migrations.values()].filter((record) => record.request_id === id);
  }
}

export function predicted(record) {
  return record.path === "kv" ? record.predicted_kv_s : record.predicted_tokens_s;
}

// Time from the order to the first new token at the target, like MigrationRecord.whole_s.
export function took(record) {
  const { outcome, duration_s, pause_s, resume_s } = record;
  if (outcome !== "committed" || duration_s === null || pause_s === null || resume_s === null) return null;
  return duration_s - pause_s + resume_s;
}
