// The memory of nodes with budgets: a bar of the models' parts, and a table with the reason of each replica's part.

import { Rows, number } from "./tables.js";
import { make, percent, short, whole } from "./words.js";

const COLOURS = ["large", "small", "tiny", "medium", "grain"]; // Of models in the order of their names, again from the sixth on.
const STATES = { asleep: "stopped", starts: "starting", waits: "starting", silent: "draining" };
const IDLE = ["asleep", "starts", "waits", "silent"]; // Origins of sizes of replicas that do not serve.

const sum = (seats) => seats.reduce((total, seat) => total + seat.held, 0);

// "310 MiB, 1 asleep"
function holding(seats) {
  const counts = IDLE.map((by) => [by, seats.filter((seat) => seat.by === by).length]).filter(([, n]) => n);
  return [`${whole(sum(seats))} MiB`, ...counts.map(([by, n]) => `${n} ${by}`)].join(", ");
}

export class Devices {
  #last = null;

  constructor(card, select) {
    this.card = card;
    this.select = select;
    this.legend = card.querySelector(".legend");
    this.bars = card.querySelector(".bars");
    this.rows = new Rows(card.querySelector("table"));
  }

  // Nothing is shown without budgets. The list is a new one whenever it has changed.
  update(devices) {
    if (devices === this.#last) return;
    this.#last = devices;
    this.card.hidden = devices.length === 0;
    const seats = devices.flatMap((device) => device.seats);
    const models = [...new Set(seats.map((seat) => seat.model).filter(Boolean))].sort();
    const colour = (seat) => COLOURS[Math.max(0, models.indexOf(seat.model)) % COLOURS.length];
    const entry = (model) => {
      const own = seats.filter((seat) => seat.model === model);
      return make("li", {}, make("i", { dataset: { colour: colour(own[0]) }, ariaHidden: "true" }), model, make("small", { textContent: holding(own) }));
    };
    this.legend.replaceChildren(...models.map(entry));
    this.bars.replaceChildren(...devices.map((device) => this.#bar(device, colour)));
    this.rows.update(seats, (seat) => [
      { value: short(seat.id, 22), title: seat.id, open: () => this.select({ replica: seat.id }) },
      { value: seat.model ?? "–" },
      { value: short(seat.device), title: seat.device },
      { value: seat.by, kind: STATES[seat.by] ?? "" },
      number(whole(seat.held)),
      number(whole(seat.ordered)),
      { value: seat.why, kind: "reason" },
    ]);
  }

  // The replicas of a model lie side by side.
  #bar({ id, budget, ordered, held, seats }, colour) {
    const sorted = [...seats].sort((a, b) => (a.model ?? "").localeCompare(b.model ?? "") || b.held - a.held);
    const parts = sorted.filter((seat) => seat.held > 0).map((seat) => {
      const title = `${seat.model ? `${seat.model}, ` : ""}${seat.id}: ${whole(seat.held)} MiB, ${seat.by}`;
      const part = make("i", { title, dataset: { colour: colour(seat), by: seat.by } });
      part.style.width = `${(100 * seat.held) / Math.max(budget, held)}%`;
      return part;
    });
    const words = `${whole(held)} of ${whole(budget)} MiB held (${percent(held / budget)}), ${whole(ordered)} ordered`;
    const bar = make("div", { className: "bar", role: "img", ariaLabel: `Node ${id}: ${words}` }, ...parts);
    return make("div", { className: "device" }, make("p", { className: "note" }, make("b", { textContent: short(id), title: id }), words), bar);
  }
}
