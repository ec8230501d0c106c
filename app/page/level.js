// Sentences on the service level and on the openings of replicas, from `service`, `scaling` and `disaggregation` of
// /mell/state.

import { seconds } from "./words.js";

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const milliseconds = (value) => (value === null || value === undefined ? value : value / 1000);

function times(name, reached, predicted, target) {
  return `${name} p99 ${seconds(reached)}, predicted ${seconds(predicted)}, target ${seconds(target)}`;
}

function level({ state, target, reached, predicted = {}, why = [] }) {
  const parts = [`service level ${state}`];
  if (target.ttft_p99_s !== null) parts.push(times("first token", reached.ttft_p99_s, predicted.ttft_p99_s, target.ttft_p99_s));
  if (target.itl_p99_ms !== null) {
    parts.push(times("between tokens", ...[reached, predicted, target].map((each) => milliseconds(each.itl_p99_ms))));
  }
  return [parts.join("; "), ...why];
}

// The reason why replicas are opened. The sentence `savings` has the reason why none is closed.
function openings(scaling) {
  const { up, opened, min_replicas, level_replicas, waiting_requests, free_replicas, reserve_replicas } = scaling;
  const reasons = {
    minimum: `the settings keep at least ${count(min_replicas, "replica")}`,
    prefills: `on fewer than ${level_replicas}, prefills lengthen too many steps`,
    requests: `${count(waiting_requests, "request")} without room`,
    reserve: `${free_replicas.toFixed(1)} replicas free, ${reserve_replicas.toFixed(1)} kept in reserve`,
  };
  return `${opened ? `${count(opened, "replica")} will open` : "no further replica may open"}: ${reasons[up] ?? up}`;
}

function prefills({ prefill_replicas, at_most, reason, apart_share, predicted_s }) {
  const times = Object.entries(predicted_s).map(([number, time]) => `${number}: ${seconds(time)}`);
  const reasons = {
    measuring: "too little is known yet",
    room: "with more of them the others would lack room",
    overload: "no number of them keeps up with the arrivals",
    times: `predicted times of a job are ${times.join(", ")}`,
  };
  const share = `${Math.round(100 * apart_share)}% of the newest prompts there`;
  return `${prefill_replicas} of at most ${count(at_most, "replica")} for prefills, ${share}: ${reasons[reason] ?? reason}`;
}

export function sentences(service, scaling, disaggregation) {
  return [
    ...(service ? level(service) : []),
    ...(scaling && scaling.up !== null ? [openings(scaling)] : []),
    ...(disaggregation ? [prefills(disaggregation)] : []),
  ];
}
