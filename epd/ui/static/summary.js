// Savings of the cache, and current metrics.

import { by, el, Keyed, say, sayFigures, set } from "./dom.js";
import { count, plural, rate, seconds, share } from "./format.js";
import { draw, spark } from "./spark.js";

const SMOOTH_S = 5;
const tiles = new Map();
const inFlight = new Map();
const details = new Keyed(by("details"), () => el("span"), sayFigures);

export function summary(state) {
  const { summary: sentences, totals, per_s, minute, answered, first_token, seconds: history } = state;
  headline(sentences);
  tile("Requests per second", rate(per_s), `${count(totals.requests)} in all`,
    smooth(history, (of) => sum("requests", of) / of.length));
  const items = minute.hit + minute.encoded;
  tile("Hit rate, last minute", share(minute.hit, items), items ? `of ${plural(items, "item")}` : "no items",
    smooth(history, (of) => {
      const all = sum("hit", of) + sum("encoded", of);
      return all ? sum("hit", of) / all : null;
    }));
  inFlight.set(Math.floor(state.now), totals.in_flight);
  for (const at_s of inFlight.keys()) if (at_s < state.now - history.length) inFlight.delete(at_s);
  tile("In flight", count(totals.in_flight), `${count(totals.queued)} queued`,
    history.map((_, index) => inFlight.get(Math.floor(state.now) - history.length + 1 + index) ?? null));
  durations("Time to first token, p50", first_token, "stream");
  durations("Whole request, p50", answered, "answer");
  tile("Failed, last minute", count(minute.failed),
    `${count(minute.rejected)} rejected; since the start ${count(totals.failed)} failed, ${count(totals.rejected)} rejected`,
    history.map((one) => one.failed), minute.failed ? "bad" : null);
}

// The first sentence is the headline, the others are its details.
function headline([first = ["No item has been looked up yet."], ...more]) {
  sayFigures(by("saved"), first);
  details.show(more, (parts) => more.indexOf(parts));
}

const sum = (name, of) => of.reduce((all, one) => all + one[name], 0);

// Rates over a few seconds: whole seconds with few requests would look like a comb.
function smooth(history, of) {
  return history.map((_, index) => of(history.slice(Math.max(0, index - SMOOTH_S + 1), index + 1)));
}

function durations(title, { p50_s, p90_s, count: number, history }, noun) {
  const more = number ? `p90 ${seconds(p90_s)}, ${plural(number, noun)}` : `no ${noun} yet`;
  tile(title, seconds(p50_s), more, history, null, 0.01);
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
