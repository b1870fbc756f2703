// Latency of each stage: three quantiles, and their positions on one scale.

import { by, el, Keyed, say, set, svg } from "./dom.js";
import { count, rate, seconds } from "./format.js";

const LEAST_S = 1e-4;
const DECADES = 6;
const MORE = { decode: "first byte" };

const rows = new Keyed(by("latency").tBodies[0], make, update);

export function latency({ stages }) {
  rows.show(stages, (one) => one.stage);
}

function make({ stage }) {
  const scale = svg(
    "svg",
    { class: "range", viewBox: "0 0 120 12", preserveAspectRatio: "none", "aria-hidden": "true" },
    ...[20, 40, 60, 80, 100].map((x) => svg("path", { class: "tick", d: `M${x} 0V12` })),
    svg("rect", { y: 3, height: 6, rx: 3 }),
    svg("rect", { class: "middle", y: 1, height: 10, width: 2 }),
  );
  return el(
    "tr",
    { "data-stage": stage },
    el("th", { scope: "row" }, el("i", { class: "swatch" }), stage, el("small", { class: "more" }), el("small", { class: "failed" }), el("small", { class: "more" })),
    ...Array.from({ length: 4 }, () => el("td")),
    el("td", { class: "wide" }, scale),
  );
}

function update(row, { stage, rate: per_s, failed, rejected, p50_s, p95_s, p99_s }) {
  const [name, each, p50, p95, p99, scale] = row.cells;
  const [, more, failures, rejections] = name.children;
  say(more, MORE[stage] ?? "");
  say(failures, failed ? `${count(failed)} failed` : "");
  say(rejections, rejected ? `${count(rejected)} rejected` : "");
  say(each, rate(per_s));
  say(p50, seconds(p50_s));
  say(p95, seconds(p95_s));
  say(p99, seconds(p99_s));
  set(row, "data-idle", p50_s == null ? "" : null);
  const [bar, middle] = scale.firstChild.querySelectorAll("rect");
  if (p50_s == null) {
    set(bar, "width", 0);
    set(middle, "visibility", "hidden");
    return;
  }
  set(bar, "x", at(p50_s));
  set(bar, "width", Math.max(3, at(p99_s) - at(p50_s)));
  set(middle, "x", at(p95_s));
  set(middle, "visibility", "visible");
}

function at(value_s) {
  const decades = Math.log10(Math.max(value_s, LEAST_S) / LEAST_S);
  return Math.min(118, (120 * decades) / DECADES).toFixed(1);
}
