// Latency of each stage.

import { by, el, Keyed, say, set } from "./dom.js";
import { count, rate, seconds } from "./format.js";

const rows = new Keyed(by("latency").tBodies[0], make, update);

export function latency({ stages }) {
  rows.show(stages, (one) => one.stage);
}

function make({ stage }) {
  const more = stage === "decode" ? "first byte" : "";
  return el(
    "tr",
    { "data-stage": stage },
    el("th", { scope: "row" }, el("i", { class: "swatch" }), stage, el("small", { class: "more" }, more), el("small", { class: "failed" }), el("small", { class: "more" })),
    ...Array.from({ length: 4 }, () => el("td")),
  );
}

function update(row, { rate: per_s, failed, rejected, p50_s, p95_s, p99_s }) {
  const [name, each, p50, p95, p99] = row.cells;
  const [, , failures, rejections] = name.children;
  say(failures, failed ? `${count(failed)} failed` : "");
  say(rejections, rejected ? `${count(rejected)} rejected` : "");
  say(each, rate(per_s));
  say(p50, seconds(p50_s));
  say(p95, seconds(p95_s));
  say(p99, seconds(p99_s));
  set(row, "data-idle", p50_s == null ? "" : null);
}
