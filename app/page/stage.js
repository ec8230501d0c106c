// The stage: replicas as columns of requests, with animated moves, keyboard navigation and a pointer.

import { KINDS, kindOf } from "./model.js";
import { blocks, columns, marks, scaleOf } from "./layout.js";
import { Painter } from "./paint.js";
import { age, percent, stateAndRole, whole } from "./words.js";

const GROW_MS = 950;
const FLY_MS = 750;
const FADE_MS = 500;
const ARC_MS = 1800;
const FRAMES = 240;

const reduced = matchMedia("(prefers-reduced-motion: reduce)");
const ease = (p) => (p < 0.5 ? 4 * p * p * p : 1 - (-2 * p + 2) ** 3 / 2);

export class Stage {
  #sprites = new Map(); // By request number: position and movement of a block.
  #leaving = []; // Fading blocks and columns.
  #arcs = [];
  #columns = new Map();
  #cursor = { column: 0, request: null };
  #scheduled = false;
  #hovered = null;
  #painter;
  frames = [];
  shown = Infinity; // The tokens that a column is as high as.

  // Callbacks: `select({replica} | {request})` opens an item, `announce(text)` describes the item at the cursor,
  // `scaled(tokens, whole)` tells the number of tokens of a column's height, and whether it is the KV capacity.
  constructor(canvas, model, { select, announce, tip, scaled }) {
    this.canvas = canvas;
    this.model = model;
    this.select = select;
    this.announce = announce;
    this.tip = tip;
    this.scaled = scaled;
    this.chosen = null;
    this.asked = null; // The id of the request that this page has sent.
    this.#painter = new Painter(canvas.getContext("2d"));
    new ResizeObserver(() => this.#resize()).observe(canvas.parentElement);
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.#announce());
    canvas.addEventListener("blur", () => this.#request());
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    this.#resize();
  }

  recolour() {
    this.#painter.recolour();
    this.#request();
  }

  get drawn() {
    return new Map([...this.#sprites].map(([number, sprite]) => [number, { ...sprite.to, replica: sprite.replica, kind: sprite.kind }]));
  }

  // Show the model's current state; `news` are new and changed migrations.
  update(news) {
    const now = performance.now();
    const before = this.#sprites;
    const was = this.#columns;
    this.shown = scaleOf(this.model, this.shown);
    this.scaled(this.shown, ![...this.model.replicas.values()].some((r) => r.capacity > this.shown));
    this.#columns = columns(this.model, this.width, this.height, this.shown);
    this.#fadeColumns(was, now);
    const vanished = new Map();
    for (const [number, sprite] of before) if (!this.model.requests.has(number)) vanished.set(sprite.id, sprite);
    this.#sprites = new Map();
    for (const column of this.#columns.values()) {
      for (const [request, to] of blocks(column)) {
        const old = before.get(request.number) ?? null;
        const origin = old ?? this.#origin(request, vanished, before);
        this.#sprites.set(request.number, this.#sprite(request, to, old, origin, now));
        if (origin) vanished.delete(request.id);
      }
    }
    for (const sprite of vanished.values()) {
      if (!reduced.matches) this.#leaving.push({ ...this.#place(sprite, now), kind: sprite.kind, began: now });
    }
    this.#addArcs(news, now);
    this.canvas.dataset.replicas = this.#columns.size;
    this.canvas.dataset.requests = this.#sprites.size;
    this.#request();
  }

  // The origin of a new block: the request's block that has just disappeared, or its other block in a hand-over.
  #origin(request, vanished, before) {
    if (vanished.has(request.id)) return vanished.get(request.id);
    if (request.hop === 0) return null;
    for (const sprite of before.values()) if (sprite.id === request.id) return sprite;
    return null;
  }

  #sprite(request, to, old, origin, now) {
    const flies = origin !== null && origin !== old;
    const from = origin ? this.#place(origin, now) : { ...to, y: to.y + to.h, h: 0 };
    const kind = kindOf(request.tokens, this.shown);
    const sprite = { id: request.id, kind, replica: request.replica, request, from, to, began: now, flies };
    const underWay = old?.flies && now - old.began < FLY_MS;
    if (underWay) return { ...old, to, request, kind };
    return sprite;
  }

  #fadeColumns(was, now) {
    if (reduced.matches) return;
    for (const [id, column] of was) {
      if (!this.#columns.has(id)) this.#leaving.push({ x: column.x, y: column.bottom - column.h, w: column.w, h: column.h, kind: null, began: now });
    }
  }

  #addArcs(news, now) {
    for (const record of news) {
      const from = this.#columns.get(record.source);
      const to = this.#columns.get(record.target);
      const goes = record.outcome === null || record.outcome === "committed";
      const drawn = this.#arcs.some((arc) => arc.id === record.id);
      if (from && to && goes && !drawn) this.#arcs.push({ id: record.id, from, to, began: now, tokens: record.path === "tokens" });
    }
    this.#arcs = this.#arcs.slice(-60);
  }

  #place(sprite, now) {
    if (reduced.matches) return sprite.to;
    const { from, to } = sprite;
    const share = Math.min(1, (now - sprite.began) / (sprite.flies ? FLY_MS : GROW_MS));
    if (share >= 1) return to;
    const p = sprite.flies ? ease(share) : share;
    const mix = (a, b) => a + (b - a) * p;
    const lift = sprite.flies ? Math.sin(Math.PI * p) * Math.min(60, 16 + Math.abs(to.x - from.x) * 0.12) : 0;
    return { x: mix(from.x, to.x), y: mix(from.y, to.y) - lift, w: mix(from.w, to.w), h: mix(from.h, to.h), waits: to.waits };
  }

  #resize() {
    const box = this.canvas.parentElement.getBoundingClientRect();
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    this.width = Math.max(60, Math.floor(box.width));
    this.height = Math.max(60, Math.floor(box.height));
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.ratio = ratio;
    this.#sprites = new Map();
    this.#columns = new Map();
    this.update([]);
    for (const sprite of this.#sprites.values()) sprite.from = sprite.to;
  }

  #request() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame((now) => {
      this.#scheduled = false;
      const began = performance.now();
      const moving = this.#draw(now);
      this.frames.push(performance.now() - began);
      if (this.frames.length > FRAMES) this.frames.shift();
      if (moving) this.#request();
    });
  }

  // Returns true while anything moves.
  #draw(now) {
    this.#painter.clear(this.width, this.height, this.ratio);
    this.#painter.axis(marks(this.#columns, this.shown), this.width);
    for (const column of this.#columns.values()) this.#painter.column(column, this.model.name(column.replica.id));
    this.#leaving = this.#leaving.filter((gone) => now - gone.began < FADE_MS);
    for (const gone of this.#leaving) this.#painter.gone(gone, (now - gone.began) / FADE_MS);
    const moving = this.#drawBlocks(now);
    this.#drawArcs(now);
    this.#drawMarks(now);
    return moving || this.#leaving.length > 0 || this.#arcs.length > 0;
  }

  #drawBlocks(now) {
    const groups = KINDS.map(() => []);
    const flying = [];
    const labels = [];
    let moving = false;
    for (const sprite of this.#sprites.values()) {
      const place = this.#place(sprite, now);
      moving ||= place !== sprite.to;
      if (sprite.flies && place !== sprite.to) flying.push([place, sprite.kind]);
      else {
        groups[sprite.kind].push(place);
        if (this.#painter.fits(place)) labels.push([place, sprite]);
      }
    }
    groups.forEach((places, kind) => this.#painter.blocks(places, kind));
    for (const sprite of this.#sprites.values()) if (sprite.request.phase === "moving") this.#painter.stripes(this.#place(sprite, now));
    for (const [place, { kind, request }] of labels) this.#painter.label(place, kind, request);
    for (const [place, kind] of flying) this.#painter.flying(place, kind);
    return moving;
  }

  #drawArcs(now) {
    this.#arcs = this.#arcs.filter((arc) => now - arc.began < ARC_MS);
    for (const arc of this.#arcs) this.#painter.arc(arc, (now - arc.began) / ARC_MS);
  }

  // Outlines of the chosen request, of the request under the pointer, and of the item at the cursor.
  #drawMarks(now) {
    const outline = (place, colour, width) => this.#painter.outline(place, colour, width);
    for (const sprite of this.#sprites.values()) {
      if (sprite.id === this.asked) outline(this.#place(sprite, now), "move", 3);
      if (sprite.id === this.chosen || sprite.request.number === this.#hovered) outline(this.#place(sprite, now), "ink", 2);
    }
    if (document.activeElement !== this.canvas || !this.canvas.matches(":focus-visible")) return;
    const column = this.#at(this.#cursor.column);
    const sprite = this.#sprites.get(this.#cursor.request);
    if (sprite) outline(this.#place(sprite, now), "focus", 3);
    else if (column) outline({ x: column.x - 2, y: column.bottom - column.h - 4, w: column.w + 4, h: column.h + 8 }, "focus", 3);
  }

  #at(index) {
    return [...this.#columns.values()][index];
  }

  // --- keys ---

  #key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) this.#walk(...step);
    else if (event.key === "Home") this.#cursor = { column: 0, request: null };
    else if (event.key === "End") this.#cursor = { column: this.#columns.size - 1, request: null };
    else if (event.key === "Enter" || event.key === " ") this.#open();
    else return;
    event.preventDefault();
    if (event.key !== "Enter" && event.key !== " ") this.#announce();
  }

  #walk(across, up) {
    const last = this.#columns.size - 1;
    if (across) this.#cursor = { column: Math.max(0, Math.min(last, this.#cursor.column + across)), request: null };
    const column = this.#at(this.#cursor.column);
    if (!up || !column) return;
    const requests = column.replica.requests;
    const now = requests.findIndex((r) => r.number === this.#cursor.request);
    const next = Math.min(requests.length - 1, now + up);
    this.#cursor.request = next < 0 ? null : requests[next].number;
  }

  #open() {
    const sprite = this.#sprites.get(this.#cursor.request);
    const column = this.#at(this.#cursor.column);
    if (sprite) this.select({ request: sprite.id });
    else if (column) this.select({ replica: column.replica.id });
  }

  #announce() {
    const column = this.#at(Math.min(this.#cursor.column, this.#columns.size - 1));
    const request = this.model.requests.get(this.#cursor.request);
    if (request) this.announce(`Request ${request.label}: ${this.#describe(request)}`);
    else if (column) this.announce(`Replica ${column.replica.id}: ${this.#summary(column.replica)}`);
    else this.announce("No replicas");
    this.#request();
  }

  #summary(replica) {
    const { used, capacity, requests } = replica;
    const count = `${requests.length} ${requests.length === 1 ? "request" : "requests"}`;
    return `${stateAndRole(replica)}, ${count}, ${percent(used / capacity)} of ${whole(capacity)} tokens`;
  }

  #describe({ kind, tokens, phase, born, why }) {
    const stays = why ? `, immovable: ${why}` : "";
    return `size ${KINDS[kind].name}, ${whole(tokens)} tokens, ${phase}, ${age((this.model.head.as_of ?? born) - born)}${stays}`;
  }

  // --- pointer ---

  #under(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    for (const column of this.#columns.values()) {
      const across = x >= column.x - 2 && x <= column.x + column.w + 2;
      if (!across || y > column.bottom + column.floor || y < column.bottom - column.h - 14) continue;
      const hit = column.replica.requests.find((request) => {
        const place = this.#sprites.get(request.number)?.to;
        return place && y >= place.y && y <= place.y + place.h && (!place.waits || (x >= place.x && x <= place.x + place.w));
      });
      return { column, request: hit ?? null, x, y };
    }
    return null;
  }

  #click(event) {
    const found = this.#under(event);
    if (!found) return;
    this.#cursor = { column: found.column.at, request: found.request?.number ?? null };
    this.select(found.request ? { request: found.request.id } : { replica: found.column.replica.id });
  }

  #point(event) {
    const found = event && event.pointerType !== "touch" ? this.#under(event) : null;
    this.canvas.style.cursor = found ? "pointer" : "default";
    this.#hovered = found?.request?.number ?? null;
    if (!found) this.tip(null);
    else if (found.request) this.tip(found, found.request.label, this.#describe(found.request));
    else this.tip(found, found.column.replica.id, this.#summary(found.column.replica));
    this.#request();
  }
}
