// Use of the encoder store: a bar of its quota, or one for the memory of each host.

import { by, el, Keyed, say, set } from "./dom.js";
import { bytes, count, plural, rate } from "./format.js";

const KINDS = {
  shm: "memory of the host",
  "shm+tcp": "memories of hosts",
  "shm+tls": "memories of hosts, TLS",
  file: "shared disk",
  redis: "Redis",
  rediss: "Redis, TLS",
  "redis+cluster": "Redis Cluster",
  "rediss+cluster": "Redis Cluster, TLS",
};

const rows = new Keyed(by("stores"), make, update);

export function stores({ store, stores: all, stages, totals }) {
  const asked = stages.find((one) => one.stage === "store").rate;
  const facts = [KINDS[store] ?? store, `${rate(asked)} lookups/s`, `${count(totals.items.hit)} hits in all`];
  say(by("store"), store ? facts.join(" · ") : "none, see --ec-store");
  rows.show(all.map((one) => ({ ...one, label: one.name === store ? "" : one.name })), (one) => one.name);
}

function make({ label }) {
  return el("li", {}, el("code", { title: label }, label), el("div", { class: "load" }, el("i")), el("b"), el("span"));
}

function update(row, one) {
  const [, bar, size, facts] = row.children;
  const used = one.known && one.bytes != null && one.max_bytes ? Math.min(1, one.bytes / one.max_bytes) : null;
  const percent = used == null ? null : Math.round(100 * used);
  bar.firstChild.style.width = `${100 * (used ?? 0)}%`;
  set(bar, "role", used == null ? "img" : "meter"); // a meter needs a value
  set(bar, "aria-label", `Use of the store ${one.label}${used == null ? ": unknown" : ""}`);
  set(bar, "aria-valuenow", percent);
  set(bar, "aria-valuemax", used == null ? null : 100);
  set(row, "data-unknown", used == null ? "" : null);
  say(size, sizeOf(one));
  say(facts, factsOf(one).join(" · "));
}

function sizeOf({ known, bytes: used, max_bytes }) {
  if (!known || used == null) return "unknown";
  return max_bytes == null ? `${bytes(used)}, no quota` : `${bytes(used)} of ${bytes(max_bytes)}`;
}

function factsOf({ known, bypassed, entries, evictions, refused }) {
  return [
    ...(known ? [] : ["no figures from the store"]),
    ...(bypassed ? ["requests bypass it"] : []),
    ...(known ? [entries == null ? "entries unknown" : plural(entries, "entry", "entries")] : []),
    ...(known ? [evictions == null ? "evictions unknown" : plural(evictions, "eviction")] : []),
    ...(refused ? [`${plural(refused, "write")} refused, no room`] : []),
  ];
}
