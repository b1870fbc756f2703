// Savings of the cache, and current metrics.

import { by, el, say, set } from "./dom.js";
import { count, plural, rate, seconds, share } from "./format.js";
import { draw, spark } from "./spark.js";

const SMOOTH_S = 5;
const tiles = new Map();

export function summary({ summary: sentences, totals, per_s, minute, answered, seconds: history, requests }) {
  const shown = by("saved");
  if (shown.textContent !== sentences.map((parts) => parts.join("")).join(" ")) {
    shown.replaceChildren(...sentences.flatMap(([first, ...rest], index) => [index ? ` ${first}` : first, ...figured(rest)]));
  }
  tile("Requests per second", rate(per_s), `${count(totals.requests)} in all`,
    smooth(history, (of) => sum("requests", of) / of.length));
  const items = minute.hit + minute.encoded;
  tile("Hit rate, last minute", share(minute.hit, items), `${plural(items, "item")} in it`,
    smooth(history, (of) => {
      const all = sum("hit", of) + sum("encoded", of);
      return all ? sum("hit", of) / all : null;
    }));
  tile("Under way", count(totals.in_flight), `${count(totals.queued)} queued`, []);
  tile("Whole request, p50", seconds(answered.p50_s), `p95 ${seconds(answered.p95_s)}, of the last ${answered.count}`,
    requests.map((one) => (one.error ? null : one.seconds)).reverse(), null, 0.01);
  tile("Rejected, last minute", count(minute.rejected), rejections(totals), history.map((one) => one.rejected));
  tile("Failed, last minute", count(minute.failed), `5xx: ${count(totals.failed)} in all`,
    history.map((one) => one.failed), minute.failed ? "bad" : null);
}

// Of the parts of a sentence, every second one is a figure.
const figured = (parts) => parts.map((part, index) => (index % 2 ? part : el("b", {}, part)));

const sum = (name, of) => of.reduce((all, one) => all + one[name], 0);

// Refused: rejected by admission control with 429 or 503.
function rejections({ rejected, refused, left }) {
  return `4xx: ${count(rejected)} in all; ${count(refused)} refused, ${plural(left, "client")} disconnected`;
}

// Rates over a few seconds: whole seconds with few requests would look like a comb.
function smooth(history, of) {
  return history.map((_, index) => of(history.slice(Math.max(0, index - SMOOTH_S + 1), index + 1)));
}

function tile(title, figure, more, history, tone = null, least = 1) {
  let shown = tiles.get(title);
  if (!shown) {
    shown = { figure: el("b"), more: el("small"), line: spark() };
    shown.whole = el("li", {}, el("span", {}, title), shown.figure, shown.more, shown.line);
    by("tiles").append(shown.whole);
    tiles.set(title, shown);
  }
  say(shown.figure, figure);
  say(shown.more, more);
  set(shown.whole, "data-tone", tone);
  draw(shown.line, history, least);
}
