// The composition of the page: one link feeds one model, and all parts of the page show the model.

import { Ask } from "./ask.js";
import { Charts } from "./charts.js";
import { Detail } from "./detail.js";
import { Devices } from "./devices.js";
import { sentences } from "./level.js";
import { Link, key } from "./link.js";
import { KINDS, Model } from "./model.js";
import { Stage } from "./stage.js";
import { Listing, Moves } from "./tables.js";
import { age, make, percent, text, whole } from "./words.js";

const OLD_S = 5;
const by = (id) => document.getElementById(id);
const model = new Model();

// --- the theme ---

const themes = { auto: "system", light: "light", dark: "dark" };
let theme = localStorage.getItem("mell-theme") ?? "auto";

function applyTheme() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  text(by("theme"), `Colours: ${themes[theme]}`);
}
applyTheme();

// --- the legend ---

// The size classes or, where a column shows less than the KV capacity, the same shares of the tokens that it shows.
let legendOf = null;
function showLegend(shown, isWhole) {
  if (legendOf === shown) return;
  legendOf = shown;
  const bound = (kind) => whole(Math.floor(shown / [8, 4, 3, 2, 2][kind]));
  const entries = [...KINDS.entries()].reverse().map(([at, kind]) => {
    const size = `${at === 4 ? ">" : "≤"} ${bound(at)}`;
    const words = isWhole ? [kind.name, make("small", { textContent: kind.share })] : [size];
    const title = isWhole ? `${kind.share} of a replica's KV capacity: ${size} tokens` : `${size} tokens`;
    return make("li", { title }, make("i", { dataset: { colour: kind.key }, ariaHidden: "true" }), ...words);
  });
  const cut = isWhole ? [] : [make("li", {}, make("small", { textContent: `tokens; columns are cut at ${whole(shown)}` }))];
  by("legend").replaceChildren(...entries, ...cut);
  by("legend").setAttribute("aria-label", isWhole ? "Size classes, as shares of a replica's KV capacity" : "Sizes of requests");
}

// --- the parts ---

const detail = new Detail(model, {
  chosen: (id) => {
    stage.chosen = id;
    stage.update([]);
  },
  denied: (refusal) => askKey(refusal.message),
});
const select = (item) => detail.open(item);
const stage = new Stage(by("stage"), model, { select, announce: (words) => text(by("announcement"), words), tip, scaled: showLegend });
const ask = new Ask(model, {
  asked: (id) => {
    stage.asked = id;
    stage.update([]);
  },
  denied: (refusal) => askKey(refusal.message),
});
const charts = new Charts(by("charts"));
const moves = new Moves(by("moves"), by("moves-note"), select);
const devices = new Devices(by("devices"), select);
const listing = new Listing(by("listing"), by("replicas"), select);

function tip(place, title, words) {
  const box = by("tip");
  box.hidden = place === null;
  if (place === null) return;
  box.replaceChildren(make("b", { textContent: title }), words);
  const left = Math.max(4, Math.min(place.x + 14, stage.width - box.offsetWidth - 4));
  box.style.transform = `translate(${left}px, ${Math.max(4, place.y - box.offsetHeight - 10)}px)`;
}

function recolour() {
  stage.recolour();
  charts.update(model.points);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
by("theme").addEventListener("click", () => {
  theme = { auto: "light", light: "dark", dark: "auto" }[theme];
  localStorage.setItem("mell-theme", theme);
  applyTheme();
  recolour();
});

by("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = by("query").value.trim();
  const found = model.find(wanted);
  if (found) select(found);
  text(by("found"), found || !wanted ? "" : `No request and no replica has “${wanted}” in its id or label.`);
});
by("query").addEventListener("input", () => text(by("found"), ""));

// --- the state of the link ---

function status(state, words) {
  by("status").dataset.state = state;
  text(by("status-text"), words);
  by("main").classList.toggle("stale", state !== "live" && model.replicas.size > 0);
}

function showFacts() {
  const { as_of, now, mode, policy, wanted, dryRun, savings, service, scaling, disaggregation } = model.head;
  const late = now - as_of;
  if (late > OLD_S) status("old", `no news from the scheduler for ${age(late)}`);
  else status("live", "live");
  const replicas = [...model.replicas.values()];
  const used = replicas.reduce((sum, r) => sum + r.used, 0);
  const capacity = replicas.reduce((sum, r) => sum + r.capacity, 0);
  const starting = replicas.filter((r) => r.state === "STARTING").length;
  const draining = replicas.filter((r) => r.state === "DRAINING").length;
  const waking = replicas.filter((r) => r.state === "WAKING").length;
  const asleep = replicas.filter((r) => r.state === "ASLEEP").length;
  const counts = Object.entries({ opening: starting, draining, waking, asleep });
  const states = counts.map(([state, n]) => (n ? `, ${n} ${state}` : "")).join("");
  const facts = [
    `${whole(replicas.length)} ${replicas.length === 1 ? "replica" : "replicas"}${states}`,
    `${whole(model.requests.size)} ${model.requests.size === 1 ? "request" : "requests"}`,
    `${percent(used / capacity)} KV`,
    [policy, mode].filter(Boolean).join(", "),
    wanted === null || wanted === undefined || wanted === replicas.length - asleep ? "" : `${wanted} wanted`,
    dryRun ? `acting ${dryRun}` : "",
  ].filter(Boolean);
  list(by("facts"), facts);
  text(by("savings"), savings ?? "");
  list(by("level"), sentences(service, scaling, disaggregation));
  by("empty").hidden = replicas.length > 0;
  text(by("empty"), "No replica runs yet.");
}

function list(element, lines) {
  while (element.childElementCount > lines.length) element.lastElementChild.remove();
  lines.forEach((line, at) => text(element.children[at] ?? element.appendChild(make("span")), line));
}

const link = new Link("events", {
  open: () => status("live", "live"),
  event: (kind, data) => {
    const migrations = model.apply(kind, data);
    stage.update(migrations);
    charts.update(model.points);
    moves.update(model.migrations);
    devices.update(model.devices);
    listing.update(model.replicas);
    detail.update();
    ask.update();
    showFacts();
  },
  lost: (message, wait) => status("lost", `${message}; trying again in ${wait < 1 ? "a moment" : `${Math.round(wait)} s`}`),
  denied: (refusal) => {
    status("denied", "not allowed");
    askKey(refusal.message);
  },
});

// --- the key ---

function askKey(why) {
  const dialog = by("key-dialog");
  text(by("key-why"), why);
  by("key-value").value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
}
by("key").addEventListener("click", () => askKey(key.get() ? "A key is in use in this tab." : "The page needs the admin key, if one is configured."));
by("key-dialog").addEventListener("close", () => {
  const { returnValue } = by("key-dialog");
  if (returnValue === "forget") key.set(null);
  else if (returnValue === "use" && by("key-value").value) key.set(by("key-value").value);
  else return;
  by("key-value").value = "";
  link.again();
});
// Enter in the field means "Use", although "Forget" is the first button.
by("key-value").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  by("key-dialog").close("use");
});

window.mell = { model, stage }; // For the browser's console and for tests.
link.run();
