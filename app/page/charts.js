// Small charts over the last five minutes. A point is described in app/ingress/page/charts.py.

import { roundUp } from "./layout.js";
import { make, percent, seconds, text, whole } from "./words.js";

const SPAN_S = 300;
const EDGE = { left: 42, right: 4, top: 7, bottom: 16 }; // The room of the axes' numbers, in CSS pixels.
const BREAK_S = 5; // No line is drawn across a longer gap without open pages.
const AT = { gpus: 1, bound: 2, worst: 3, used: 4, ttft50: 5, ttft99: 6, itl50: 7, itl99: 8, pause50: 9, pause99: 10 };
const count = (value) => (value === null ? "–" : whole(value));

const CHARTS = [
  {
    title: "GPUs",
    hint: "Lower bound: the minimum number of GPUs for the current KV caches. Worst fit: the number of GPUs if each request goes to the emptiest replica and stays there.",
    format: count,
    least: 2,
    lines: [
      { at: AT.worst, name: "worst fit", colour: "muted", dash: [4, 3] },
      { at: AT.bound, name: "bound", colour: "small", dash: [1.5, 3] },
      { at: AT.gpus, name: "in use", colour: "large", width: 2, stepped: true },
    ],
  },
  { title: "KV in use", format: percent, top: 1, lines: [{ at: AT.used, name: "of capacity", colour: "medium", width: 2, filled: true }] },
  { title: "First token", format: seconds, lines: tail(AT.ttft50, AT.ttft99) },
  { title: "Between tokens", format: seconds, lines: tail(AT.itl50, AT.itl99) },
  { title: "Pause of a move", format: seconds, lines: tail(AT.pause50, AT.pause99) },
];

function tail(median, high) {
  return [
    { at: high, name: "p99", colour: "tiny", width: 1.5 },
    { at: median, name: "p50", colour: "large", width: 2 },
  ];
}

export class Charts {
  #parts;

  constructor(section) {
    this.#parts = CHARTS.map((chart) => {
      const canvas = make("canvas", { role: "img" });
      const keys = [...chart.lines].reverse().map((line) => {
        const value = make("b");
        const swatch = make("i", { dataset: { line: line.dash ? "dashed" : "solid", colour: line.colour }, ariaHidden: "true" });
        return { line, value, element: make("li", {}, value, make("span", {}, swatch, line.name)) };
      });
      section.append(make("figure", { className: "card chart" }, make("figcaption", { textContent: chart.title, title: chart.hint ?? "" }), make("ul", {}, ...keys.map((k) => k.element)), canvas));
      return { chart, canvas, keys };
    });
    this.points = [];
    new ResizeObserver(() => this.update(this.points)).observe(section);
  }

  update(points) {
    this.points = points;
    const style = getComputedStyle(document.documentElement);
    for (const part of this.#parts) {
      const last = points.at(-1);
      for (const { line, value } of part.keys) text(value, part.chart.format(last ? last[line.at] : null));
      const values = part.keys.map(({ line, value }) => `${line.name} ${value.textContent}`).join(", ");
      part.canvas.setAttribute("aria-label", `${part.chart.title}: ${values}`);
      draw(part.canvas, part.chart, points, (name) => style.getPropertyValue(`--${name}`).trim());
    }
  }
}

function draw(canvas, chart, points, colour) {
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== width * ratio || canvas.height !== height * ratio) [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  const values = chart.lines.flatMap((line) => points.map((p) => p[line.at])).filter((v) => v !== null);
  const top = chart.top ?? roundUp(Math.max(chart.least ?? 1e-3, ...values));
  const end = points.at(-1)?.[0] ?? 0;
  const floor = height - EDGE.bottom;
  const x = (time) => width - EDGE.right - ((end - time) / SPAN_S) * (width - EDGE.left - EDGE.right);
  const y = (value) => floor - (value / top) * (floor - EDGE.top);
  c.strokeStyle = colour("track");
  c.fillStyle = colour("muted");
  c.font = `400 10px ${colour("sans") || "sans-serif"}`;
  c.lineWidth = 1;
  c.textAlign = "right";
  for (const value of [0, top / 2, top]) {
    const level = Math.round(y(value)) - 0.5;
    c.beginPath();
    c.moveTo(EDGE.left, level);
    c.lineTo(width, level);
    c.stroke();
    if (values.length || chart.top) c.fillText(value ? chart.format(value) : "0", EDGE.left - 5, level + 4);
  }
  c.fillText("now", width - EDGE.right, height - 3);
  c.textAlign = "left";
  c.fillText(`−${SPAN_S / 60} min`, EDGE.left, height - 3);
  for (const line of chart.lines) drawLine(c, line, points, { x, y, colour: colour(line.colour), floor });
}

function drawLine(c, line, points, { x, y, colour, floor }) {
  c.strokeStyle = c.fillStyle = colour;
  c.lineWidth = line.width ?? 1.5;
  c.lineJoin = "round";
  c.setLineDash(line.dash ?? []);
  for (const run of runs(points, line.at)) {
    c.beginPath();
    run.forEach(([time, value], at) => {
      if (at === 0) c.moveTo(x(time), y(value));
      else {
        if (line.stepped) c.lineTo(x(time), y(run[at - 1][1]));
        c.lineTo(x(time), y(value));
      }
    });
    if (run.length === 1) c.arc(x(run[0][0]), y(run[0][1]), 1, 0, 7);
    c.stroke();
    if (!line.filled) continue;
    c.lineTo(x(run.at(-1)[0]), floor);
    c.lineTo(x(run[0][0]), floor);
    c.globalAlpha = 0.14;
    c.fill();
    c.globalAlpha = 1;
  }
  c.setLineDash([]);
}

function runs(points, at) {
  const found = [];
  let run = [];
  for (const point of points) {
    const [time, value] = [point[0], point[at]];
    if (run.length && (value === null || time - run.at(-1)[0] > BREAK_S)) {
      found.push(run);
      run = [];
    }
    if (value !== null) run.push([time, value]);
  }
  return run.length ? [...found, run] : found;
}
