// Formatting of numbers and names, and helpers for elements.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const whole = (value) => WHOLE.format(value);
export const percent = (share) => (share === null || !Number.isFinite(share) ? "–" : `${(share * 100).toFixed(0)} %`);

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
export const compact = (value) => COMPACT.format(value).replace("K", "k");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.995) return `${(value * 1000).toFixed(0)} ms`;
  return value < 99.5 ? `${value.toPrecision(value < 9.95 ? 2 : 3)} s` : `${whole(value)} s`;
}

export function age(value) {
  const s = Math.max(0, Math.round(value));
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

// Serve's ids are long and differ at their ends.
export const short = (id, length = 10) => (id.length <= length ? id : `…${id.slice(1 - length)}`);

const sinceWhen = (state, asleepAt) => (state === "ASLEEP" && asleepAt ? ` since ${clock(asleepAt)}` : "");

// Without disaggregation every replica prefills and decodes. In brackets: the role that an operator has set. At the end,
// the model, if there are several.
export const stateAndRole = ({ state, asleepAt, role, byHand, model }) =>
  state.toLowerCase() + sinceWhen(state, asleepAt) + (role === "both" ? "" : `, ${role}`) + (byHand ? ` [${byHand}]` : "") + (model ? `, ${model}` : "");

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  const { dataset, ...rest } = options;
  Object.assign(element, rest);
  Object.assign(element.dataset, dataset ?? {});
  element.append(...children);
  return element;
}
