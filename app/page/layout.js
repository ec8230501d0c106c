// The layout of the stage in CSS pixels, without drawing. Replicas are columns in one or more bands; requests are stacked
// on the floor of their column by size, and requests that wait for KV blocks lie below it.

const PITCH = { least: 11, most: 76 };
const GAP_SHARE = 0.22;
const PAD = { side: 6, top: 40, floor: 34 };
const SMALL_FLOOR = 15;
const SMALL_TOP = 26;
const NAMED = 34; // Minimum width of a column with a name.

export function columns(model, width, height) {
  const replicas = [...model.replicas.values()];
  const inner = width - 2 * PAD.side;
  const perBand = Math.max(1, Math.min(replicas.length, Math.floor(inner / PITCH.least)));
  const bands = Math.max(1, Math.ceil(replicas.length / perBand));
  const across = Math.max(1, Math.ceil(replicas.length / bands));
  const pitch = Math.min(PITCH.most, inner / across);
  const gap = Math.max(2, Math.min(14, pitch * GAP_SHARE));
  const named = pitch - gap >= NAMED;
  const floor = named ? PAD.floor : SMALL_FLOOR;
  const tall = height / bands;
  const greatest = Math.max(1, ...replicas.map((r) => r.capacity));
  const found = new Map();
  const left = PAD.side + Math.max(0, (inner - pitch * across) / 2);
  replicas.forEach((replica, at) => {
    const band = Math.floor(at / across);
    const bottom = Math.round((band + 1) * tall - floor);
    const room = Math.max(10, tall - floor - (named ? PAD.top : Math.min(SMALL_TOP, tall / 5)));
    const full = replica.capacity || greatest;
    found.set(replica.id, {
      replica,
      at,
      band,
      named,
      x: left + (at % across) * pitch + gap / 2,
      w: pitch - gap,
      bottom,
      h: (room * full) / greatest,
      pixels: room / greatest,
      floor,
    });
  });
  return found;
}

// [request, {x, y, w, h, waits}] of each request. With shared prefixes the tokens of all requests may exceed the capacity;
// the stack is then scaled to the column.
export function blocks(column) {
  const { replica, x, w, bottom } = column;
  const held = replica.requests.filter((r) => r.phase !== "waiting");
  const waiting = replica.requests.filter((r) => r.phase === "waiting");
  const sum = held.reduce((total, r) => total + r.tokens, 0);
  const scale = Math.min(column.pixels, column.h / Math.max(1, sum));
  const places = [];
  let y = bottom;
  for (const request of held) {
    const h = request.tokens * scale;
    y -= h;
    places.push([request, { x, y, w, h, waits: false }]);
  }
  const size = Math.min(6, w / Math.max(1, waiting.length));
  waiting.forEach((request, at) => {
    places.push([request, { x: x + at * size, y: bottom + 5, w: Math.max(1, size - 1), h: 5, waits: true }]);
  });
  return places;
}
