// The layout of the stage in CSS pixels, without drawing. Replicas are columns in one or more bands; requests are stacked
// on the floor of their column by size, and requests that wait for KV blocks lie below it.

const PITCH = { least: 11, most: 300 };
const GAP_SHARE = 0.22;
const PAD = { side: 6, axis: 46, top: 40, floor: 34 };
const SMALL_FLOOR = 15;
const SMALL_TOP = 26;
const NAMED = 34; // Minimum width of a column with a name.
const LEAST_SHOWN = 500;

// The least of 1, 2 and 5 times a power of ten that is not below `value`.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

// The tokens that a column is as high as: the greatest capacity, or a round number if the requests would be slivers
// beside it. `shown` is the present number, which stays while the stacks fill a good part of it.
export function scaleOf(model, shown) {
  const replicas = [...model.replicas.values()];
  const greatest = Math.max(1, ...replicas.map((r) => r.capacity));
  const highest = Math.max(0, ...replicas.map((r) => heldTokens(r)));
  if (shown < greatest && highest * 1.1 <= shown && highest * 5 >= shown) return shown;
  const round = roundUp(Math.max(LEAST_SHOWN, highest * 1.5));
  return round * 1.5 >= greatest ? greatest : round;
}

function heldTokens(replica) {
  return replica.requests.reduce((sum, r) => sum + (r.phase === "waiting" ? 0 : r.tokens), 0);
}

export function columns(model, width, height, shown) {
  const replicas = [...model.replicas.values()];
  const inner = width - 2 * PAD.side - PAD.axis;
  const perBand = Math.max(1, Math.min(replicas.length, Math.floor(inner / PITCH.least)));
  const bands = Math.max(1, Math.ceil(replicas.length / perBand));
  const across = Math.max(1, Math.ceil(replicas.length / bands));
  const pitch = Math.min(PITCH.most, inner / across);
  const gap = Math.max(2, Math.min(14, pitch * GAP_SHARE));
  const named = pitch - gap >= NAMED;
  const floor = named ? PAD.floor : SMALL_FLOOR;
  const tall = height / bands;
  const found = new Map();
  const left = PAD.side + PAD.axis + Math.max(0, (inner - pitch * across) / 2);
  replicas.forEach((replica, at) => {
    const band = Math.floor(at / across);
    const bottom = Math.round((band + 1) * tall - floor);
    const room = Math.max(10, tall - floor - (named ? PAD.top : Math.min(SMALL_TOP, tall / 5)));
    const full = Math.min(replica.capacity || shown, shown);
    found.set(replica.id, {
      replica,
      at,
      band,
      named,
      x: left + (at % across) * pitch + gap / 2,
      w: pitch - gap,
      bottom,
      h: (room * full) / shown,
      pixels: room / shown,
      open: replica.capacity > shown, // The column goes on above what is shown.
      floor,
    });
  });
  return found;
}

// The marks of the vertical axis, per band: [tokens, y], from the floor up.
export function marks(columns, shown) {
  const bands = new Map([...columns.values()].map((column) => [column.band, column]));
  const step = roundUp(shown / (Math.max(...[...bands.values()].map((c) => c.pixels * shown), 0) > 150 ? 5 : 2));
  return [...bands.values()].flatMap(({ bottom, pixels }) => {
    const levels = Array.from({ length: Math.floor(shown / step + 1e-9) + 1 }, (_, at) => at * step);
    return levels.map((tokens) => ({ tokens, y: bottom - tokens * pixels }));
  });
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
