// Latency of each stage, as figures and as bars on a common scale.

import { by, el, Keyed, say, set, svg } from "./dom.js";
import { count, rate, scale, scaleEnd, seconds } from "./format.js";

const rows = new Keyed(by("latency").tBodies[0], make, update);
let end_s = 0.001;

export function latency({ stages }) {
  const shown = stages.filter((one) => one.count);
  end_s = scale(Math.max(...shown.map((one) => one.p99_s ?? 0), 0));
  say(by("latency-end"), scaleEnd(end_s));
  rows.show(shown, (one) => one.stage);
  by("latency").hidden = !shown.length;
  by("no-latency").hidden = shown.length > 0;
}

function make({ stage }) {
  const more = stage === "decode" ? "first byte" : "";
  return el(
    "tr",
    { "data-stage": stage },
    el("th", { scope: "row" }, el("i", { class: "swatch" }), stage, el("small", { class: "more" }, more), el("small", { class: "failed" }), el("small", { class: "more" })),
    ...Array.from({ length: 4 }, () => el("td")),
    el("td", { class: "range", "aria-hidden": "true" }, svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none" }, ...["p99", "p95", "p50"].map((name) => svg("rect", { class: name, height: 10 })))),
  );
}

function update(row, { rate: per_s, failed, rejected, p50_s, p95_s, p99_s }) {
  const [name, each, p50, p95, p99, range] = row.cells;
  const [, , failures, rejections] = name.children;
  say(failures, failed ? `${count(failed)} failed` : "");
  say(rejections, rejected ? `${count(rejected)} rejected` : "");
  say(each, rate(per_s));
  say(p50, seconds(p50_s));
  say(p95, seconds(p95_s));
  say(p99, seconds(p99_s));
  [p99_s, p95_s, p50_s].forEach((value_s, index) => set(range.firstChild.children[index], "width", (1000 * (value_s ?? 0)) / end_s));
}
