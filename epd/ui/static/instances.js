// The fleet: a column for each role with a card for each instance, and the store.

import { by, el, Keyed, say, set, svg } from "./dom.js";
import { bytes, condition, count, endings, host, plural, rate, role, seconds, share } from "./format.js";

const STORES = { shm: "memory of the host", file: "shared disk", redis: "Redis", rediss: "Redis, TLS" };
const GLYPHS = {
  healthy: "M0-5a5 5 0 1 0 0 10a5 5 0 1 0 0-10z",
  trial: "M0-6L6 0L0 6L-6 0z",
  ejected: "M0-6L6 5H-6z",
  down: "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z",
};
const LEAST_SCALE = 4;
let most = LEAST_SCALE;

const columns = new Keyed(by("instances"), makeColumn, (column, { all }) => {
  const up = all.filter((one) => one.state === "healthy").length;
  const per_s = all.reduce((sum, one) => sum + one.rate, 0);
  say(column.querySelector("small"), `${up} of ${all.length} healthy · ${rate(per_s)}/s`);
  column.cards.show(all, (one) => one.url);
});

export function instances({ instances: all, stages, store, totals, workers }) {
  most = Math.max(LEAST_SCALE, ...all.map((one) => one.requests));
  const names = [...new Set(all.map((one) => one.role))];
  columns.show(names.map((name) => ({ name, all: all.filter((one) => one.role === name) })), (column) => column.name);
  say(by("proxy"), `${plural(workers, "process", "processes")} · ${count(totals.in_flight)} under way · ${count(totals.queued)} waiting`);
  const asked = stages.find((one) => one.stage === "store").rate;
  say(by("store"), store ? `Encoder store: ${STORES[store] ?? store} · asked ${rate(asked)}/s` : "No encoder store is asked.");
}

function makeColumn({ name }) {
  const list = el("ul", { class: "cards" });
  const column = el("section", {}, el("h3", {}, `${role(name)} `, el("small")), list);
  column.cards = new Keyed(list, make, update);
  return column;
}

function make(one) {
  return el(
    "li",
    {},
    svg("svg", { class: "glyph", viewBox: "-7 -7 14 14", "aria-hidden": "true" }, svg("path")),
    el("b", {}, one.name),
    el("span", { class: "state" }),
    el("code", { title: one.url }, host(one.url)),
    el("div", { class: "load", role: "meter", "aria-valuemin": 0, "aria-label": `Requests under way at ${one.name}` }, el("i")),
    el("span", { class: "busy" }),
    el("span", { class: "figures" }),
    el("span", { class: "cause" }),
  );
}

function update(card, one) {
  const [glyph, , state, , load, busy, figures, cause] = card.children;
  set(card, "data-state", one.state);
  set(glyph.firstChild, "d", GLYPHS[one.state]);
  say(state, condition(one.state));
  say(cause, one.cause);
  set(load, "aria-valuemax", most);
  set(load, "aria-valuenow", one.requests);
  load.firstChild.style.width = `${(100 * one.requests) / most}%`;
  say(busy, `${count(one.requests)} under way`);
  const ends = endings(one).map((words) => ` · ${words}`).join("");
  const events = one.precise ? " by events" : "";
  const prefix = one.prompt_tokens ? ` · prefix ${share(one.prefix_tokens, one.prompt_tokens)}${events}` : "";
  const kv = one.kv_bytes_per_s ? ` · KV ${bytes(one.kv_bytes_per_s)}/s` : "";
  say(figures, `${rate(one.rate)}/s · p50 ${seconds(one.p50_s)} · p95 ${seconds(one.p95_s)}${prefix}${kv}${ends}`);
}
