// The fleet: clients, proxy, a column per role, the store, and the flows between them.

import { by, say, set, svg } from "./dom.js";
import { count, host, plural, rate } from "./format.js";
import { groups, STATES, word } from "./fleet.js";
import { places } from "./places.js";

const STORES = { shm: "memory of the host", file: "shared disk", redis: "Redis", rediss: "Redis, TLS" };
const LEAST = 280;
const frame = by("topology");
let drawn = { as: null };
let last;

new ResizeObserver(() => last && topology(last)).observe(frame);

export function topology(state) {
  last = state;
  const roles = groups(state.instances);
  const width = Math.max(LEAST, Math.floor(frame.clientWidth));
  const as = JSON.stringify([width, state.store, roles.map((group) => group.instances.map((one) => one.url))]);
  if (as !== drawn.as) drawn = { as, ...picture(places(width, roles, state.store != null), roles, state) };
  update(drawn, roles, state);
}

function picture(at, roles, state) {
  const parts = { nodes: new Map(), flows: new Map(), title: svg("title"), proxy: [] };
  const image = svg(
    "svg",
    { role: "img", width: at.width, height: at.height, viewBox: `0 0 ${at.width} ${at.height}` },
    parts.title,
    arrow(),
  );
  const flow = (name) => {
    const { d, x, y, anchor = "start", silent = false } = at.flows[name];
    const path = svg("path", { class: "flow", d, "marker-end": "url(#arrow)" });
    const label = svg("text", { class: "rate", x, y, "text-anchor": anchor });
    parts.flows.set(name, { path, label });
    image.append(path, ...(silent ? [] : [label]));
  };
  Object.keys(at.flows).forEach(flow);
  image.append(box(at.clients, "node"), text(at.clients, "Clients"));
  image.append(box(at.proxy, "node proxy"));
  parts.proxy = at.proxyLines.map((y, line) => svg("text", { class: line ? "small" : "name", x: at.proxy.x + at.proxy.width / 2, y, "text-anchor": "middle" }));
  image.append(...parts.proxy);
  if (at.store) {
    image.append(box(at.store, "node store"), text(at.store, `Encoder store: ${STORES[state.store] ?? state.store}`));
  }
  for (const group of roles) {
    const column = at.columns[group.role];
    image.append(box(column.box, `group ${group.role}`));
    image.append(svg("text", { class: "name", x: column.box.x + 12, y: column.box.y + 21 }, column.title));
    for (const [index, one] of group.instances.entries()) {
      const node = chip(one, column.chips[index], column.compact);
      parts.nodes.set(one.role + one.url, node);
      image.append(node.whole);
    }
  }
  frame.replaceChildren(image);
  return parts;
}

function arrow() {
  return svg(
    "defs",
    {},
    svg(
      "marker",
      { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" },
      svg("path", { d: "M0 0L8 4L0 8z", class: "head" }),
    ),
  );
}

const box = ({ x, y, width, height }, name) => svg("rect", { class: name, x, y, width, height, rx: 8 });

const text = ({ x, y, width, height }, words) =>
  svg("text", { class: "name", x: x + width / 2, y: y + height / 2 + 5, "text-anchor": "middle" }, words);

function chip(one, { x, y, width, height }, compact) {
  const node = { title: svg("title"), glyph: svg("path"), load: svg("text", { class: "load", x: x + width - 7, y: y + height / 2 + 4, "text-anchor": "end" }) };
  const room = Math.floor((width - 70) / 6.6);
  const address = compact || room < 5 ? "" : shortened(host(one.url), room);
  node.whole = svg(
    "g",
    { class: "chip" },
    node.title,
    svg("rect", { x, y, width, height, rx: 6 }),
    svg("g", { transform: `translate(${x + 12} ${y + height / 2})` }, node.glyph),
    svg("text", { x: x + 22, y: y + height / 2 + 4 }, one.name, svg("tspan", { class: "small", dx: 6 }, address)),
    node.load,
  );
  return node;
}

// The end of an address distinguishes instances.
const shortened = (words, room) => (words.length > room ? `…${words.slice(1 - room)}` : words);

function update(parts, roles, state) {
  for (const one of roles.flatMap((group) => group.instances)) {
    const node = parts.nodes.get(one.role + one.url);
    set(node.whole, "data-state", one.state);
    set(node.glyph, "d", STATES[one.state]?.glyph);
    say(node.title, `${one.name} ${one.url}: ${word(one.state)}${one.cause ? ` (${one.cause})` : ""}, ${count(one.requests)} under way`);
    say(node.load, one.requests ? count(one.requests) : "");
  }
  const now = state.seconds.slice(-5).reduce((all, one) => all + one.requests, 0) / 5;
  const of = (stage) => state.stages.find((one) => one.stage === stage).rate;
  const rates = { clients: now, encode: of("encode"), prefill: of("prefill"), decode: of("decode"), prefill_decode: of("decode"), lookup: of("store"), write: parts.flows.has("encode") ? of("encode") : of("store"), read: Math.max(of("store"), of("encode")) ? of(parts.flows.has("prefill") ? "prefill" : "decode") : 0, kv: of("prefill") };
  const words = { lookup: "asks", write: "writes", read: "reads", kv: "KV" };
  for (const [name, { path, label }] of parts.flows) {
    set(path, "data-pace", pace(rates[name]));
    say(label, words[name] ? (name === "lookup" ? `asks ${rate(rates[name])}/s` : words[name]) : `${rate(rates[name])}/s`);
  }
  const { in_flight, queued } = state.totals;
  const lines = ["Proxy", `${count(in_flight)} under way`, `${count(queued)} waiting`, plural(state.workers, "process", "processes")];
  parts.proxy.forEach((line, index) => say(line, lines[index]));
  say(parts.title, told(roles, state));
}

const pace = (per_s) => (per_s <= 0 ? "none" : per_s < 2 ? "slow" : per_s < 20 ? "steady" : "fast");

function told(roles, state) {
  const parts = roles.map(({ title, instances }) => {
    const bad = instances.filter((one) => one.state !== "healthy");
    const which = bad.map((one) => `${one.name} ${word(one.state)}`).join(", ");
    return `${title}: ${plural(instances.length, "instance")}${which ? `, of which ${which}` : ", all healthy"}`;
  });
  return `Clients, the proxy, ${parts.join("; ")}; ${state.store ? `encoder store on ${STORES[state.store] ?? state.store}` : "no encoder store asked"}`;
}
