// A card per instance: state, load and latency.

import { by, el, Keyed, say, set, svg } from "./dom.js";
import { bytes, count, endings, host, rate, seconds, share } from "./format.js";
import { groups, STATES, word } from "./fleet.js";

const LEAST_SCALE = 4;
let most = LEAST_SCALE;

const sections = new Keyed(by("instances"), makeGroup, (section, group) => {
  const up = group.instances.filter((one) => one.state === "healthy").length;
  say(section.querySelector("small"), `${up} of ${group.instances.length} healthy`);
  section.cards.show(group.instances, (one) => one.url);
});

export function instances({ instances: all }) {
  most = Math.max(LEAST_SCALE, ...all.map((one) => one.requests));
  sections.show(groups(all), (group) => group.role);
}

function makeGroup({ title }) {
  const list = el("ul", { class: "cards" });
  const section = el("section", {}, el("h3", {}, `${title} `, el("small")), list);
  section.cards = new Keyed(list, make, update);
  return section;
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
  set(glyph.firstChild, "d", STATES[one.state]?.glyph);
  say(state, word(one.state));
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
