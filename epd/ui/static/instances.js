// The fleet: a column for each role with a card for each instance.

import { by, el, Keyed, say, sayFigures, set, svg } from "./dom.js";
import { bytes, condition, count, host, plural, rate, role, seconds, share } from "./format.js";

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

export function instances({ instances: all, workers }) {
  most = Math.max(LEAST_SCALE, ...all.map((one) => one.requests));
  const names = [...new Set(all.map((one) => one.role))];
  // A version that all have is shown once.
  const versions = [...new Set(all.map((one) => one.version).filter(Boolean))];
  const common = versions.length === 1 ? [`vLLM ${versions[0]}`] : [];
  const shown = common.length ? all.map((one) => ({ ...one, version: null })) : all;
  columns.show(names.map((name) => ({ name, all: shown.filter((one) => one.role === name) })), (column) => column.name);
  const processes = workers > 1 ? [plural(workers, "proxy process", "proxy processes")] : [];
  say(by("fleet"), [...common, ...processes].join(" · "));
  by("no-instances").hidden = all.length > 0;
}

function makeColumn({ name }) {
  const list = el("ul", { class: "cards" });
  const column = el("section", {}, el("h3", {}, `${role(name)} `, el("small")), list);
  column.cards = new Keyed(list, make, update);
  return column;
}

function make(one) {
  const load = el("div", { class: "load", role: "meter", "aria-valuemin": 0, "aria-label": `Requests in flight at ${one.name}` }, el("i"));
  return el(
    "li",
    {},
    el(
      "div",
      {},
      svg("svg", { class: "glyph", viewBox: "-7 -7 14 14", "aria-hidden": "true" }, svg("path")),
      el("b", {}, one.name),
      el("span", { class: "state" }),
      el("span", { class: "version" }),
      el("code", { title: one.url }, host(one.url)),
    ),
    el("div", {}, load, el("span", { class: "busy" })),
    el("div", { class: "facts" }),
    el("div", { class: "cause" }),
  );
}

function update(card, one) {
  const [head, work, facts, cause] = card.children;
  const [glyph, , state, version] = head.children;
  const [load, busy] = work.children;
  set(card, "data-state", one.state);
  set(glyph.firstChild, "d", GLYPHS[one.state]);
  say(state, condition(one.state));
  say(version, one.version ? `vLLM ${one.version}` : "");
  say(cause, one.cause);
  set(load, "aria-valuemax", most);
  set(load, "aria-valuenow", one.requests);
  load.firstChild.style.width = `${(100 * one.requests) / most}%`;
  const queued = one.waiting == null ? "" : ` · ${count(one.waiting)} queued`;
  say(busy, `${count(one.requests)} in flight${queued}`);
  card.facts ??= new Keyed(facts, () => el("span"), sayFigures);
  card.facts.show(factsOf(one), ([name]) => name);
}

// The queue, the use of KV blocks and the prefix hits are those that the engine reports. Without
// its report, the prefix hits are those that the proxy expected.
function factsOf(one) {
  const expected = one.prefix_hits == null && one.prompt_tokens;
  return [
    ["p50 ", one.p50_s, seconds],
    ["p95 ", one.p95_s, seconds],
    ["rate ", one.rate || null, (value) => `${rate(value)}/s`],
    ["KV use ", one.kv_usage, (value) => share(value, 1)],
    ["prefix hits ", one.prefix_hits, (value) => share(value, 1)],
    [`prefix hits expected${one.precise ? " by events" : ""} `, expected ? one.prefix_tokens : null, (value) => share(value, one.prompt_tokens)],
    ["KV transfers ", one.kv_bytes_per_s, (value) => `${bytes(value)}/s`],
    ["failed ", one.failed || null, count],
    ["rejected ", one.rejected || null, count],
  ].filter(([, value]) => value != null).map(([name, value, show]) => [name, show(value)]);
}
