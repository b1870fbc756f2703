// The last requests: a row each, with its stages on a common scale. A row opens to exact values.

import { by, el, Keyed, say, set, svg } from "./dom.js";
import { clock, host, plural, scale, scaleEnd, seconds } from "./format.js";

const HEIGHT = 20;
const LANES = 4;
const body = by("requests").tBodies[0];
const rows = new Keyed(body, make, update);
const open = new Set();
let longest_s = 1;
let number = 0;

export function waterfall({ requests }) {
  longest_s = scale(Math.max(...requests.map((one) => one.seconds), 0));
  say(by("scale-end"), scaleEnd(longest_s));
  for (const key of open) if (!requests.some((one) => keyOf(one) === key)) open.delete(key);
  rows.show(requests.flatMap((one) => (open.has(keyOf(one)) ? [one, { of: one }] : [one])), keyOf);
  by("no-requests").hidden = requests.length > 0;
  by("requests").hidden = !requests.length;
  last = requests;
}

let last = [];
const keyOf = (one) => (one.of ? `${keyOf(one.of)} detail` : one.engine_id);

function make(one) {
  return one.of ? detail(one.of) : row(one);
}

function update(element, one) {
  if (one.of) return;
  set(element.querySelector("svg"), "viewBox", `0 0 ${longest_s * 1000} ${HEIGHT}`);
  set(element.querySelector("button"), "aria-expanded", open.has(keyOf(one)));
}

function row(one) {
  const button = el("button", { type: "button", class: "open", title: one.id }, one.id);
  button.addEventListener("click", () => {
    const key = keyOf(one);
    if (!open.delete(key)) open.add(key);
    waterfall({ requests: last });
  });
  return el(
    "tr",
    { role: "row", "data-outcome": one.outcome },
    cell("ended", el("time", { datetime: new Date(one.ended_s * 1000).toISOString() }, clock(one.ended_s))),
    cell("id", button),
    cell("result", result(one)),
    cell("items", items(one.items)),
    cell("total", seconds(one.seconds)),
    cell("stages", bars(one)),
  );
}

const cell = (name, ...children) => el("td", { role: "cell", class: name }, ...children);

function result({ status, error, retries, degraded }) {
  const words = [String(status)];
  if (error) words.push(error);
  if (retries) words.push("retried");
  return [...words, ...degraded].join(", ");
}

const items = (found) =>
  Object.entries(found).filter(([, count]) => count).map(([kind, count]) => `${count} ${kind}`).join(", ");

function bars(one) {
  const spans = lanes([...one.spans, ...rest(one)]);
  const height = HEIGHT / Math.max(1, ...spans.map((span) => span.lane + 1));
  return svg(
    "svg",
    { class: "bars", preserveAspectRatio: "none", role: "img", "aria-label": told(one) },
    ...spans.map((span) =>
      svg("rect", {
        "data-stage": span.stage,
        "data-failed": span.outcome === "failed" ? true : null,
        x: span.after_s * 1000,
        y: span.lane * height,
        width: span.seconds * 1000,
        height: height - (height > 8 ? 2 : 0.5),
      }),
    ),
  );
}

// A stream continues after the head of its response, where decode's span ends.
function rest({ spans, seconds: all_s, error }) {
  const decode = spans.findLast((span) => span.stage === "decode" && !span.error);
  if (!decode || error) return [];
  const after_s = decode.after_s + decode.seconds;
  return [{ stage: "answer", instance: decode.instance, after_s, seconds: Math.max(0, all_s - after_s), error: null }];
}

// Concurrent stages get separate lanes.
function lanes(spans) {
  const free_s = [];
  return spans.toSorted((a, b) => a.after_s - b.after_s).map((span) => {
    let lane = free_s.findIndex((until_s) => until_s <= span.after_s + 1e-4);
    if (lane < 0) lane = Math.min(free_s.length, LANES - 1);
    free_s[lane] = span.after_s + span.seconds;
    return { ...span, lane };
  });
}

function told({ spans }) {
  return spans.map((span) => `${span.stage} ${seconds(span.seconds)}${span.error ? `, ${span.outcome}` : ""}`).join("; ") || "no stage";
}

function detail(one) {
  const table = el(
    "table",
    { id: `detail-${(number += 1)}` },
    el("caption", {}, `${one.path}, ${one.engine_id}`),
    el("thead", {}, el("tr", {}, ...["Stage", "Where", "Begins", "Takes", "Ends in"].map((name) => el("th", { scope: "col" }, name)))),
    el(
      "tbody",
      {},
      ...[...one.spans, ...rest(one)].map((span) =>
        el(
          "tr",
          { "data-stage": span.stage },
          el("th", { scope: "row" }, el("i", { class: "swatch" }), span.stage),
          el("td", {}, host(span.instance)),
          el("td", {}, seconds(span.after_s)),
          el("td", {}, seconds(span.seconds)),
          el("td", {}, span.error ?? "ok"),
        ),
      ),
    ),
  );
  const more = one.more_spans ? [el("p", { class: "quiet" }, `and ${plural(one.more_spans, "more")}`)] : [];
  return el("tr", { role: "row", class: "detail" }, el("td", { role: "cell", colspan: 6 }, table, ...more));
}
