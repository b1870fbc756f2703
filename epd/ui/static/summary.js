// Savings of the cache, and current metrics.

import { by, el, say, set } from "./dom.js";
import { bytes, count, plural, rate, seconds, share } from "./format.js";
import { draw, spark } from "./spark.js";

const SMOOTH_S = 5;
const HISTORY = 60;
const seen = [];
const tiles = new Map();

export function summary(state) {
  saved(state.totals);
  by("quarantine").hidden = !state.totals.quarantined;
  say(by("quarantine"), `In quarantine: ${plural(state.totals.quarantined, "tenant")}. Its requests ended instances and are served one at a time.`);
  const { totals, seconds: history, requests } = state;
  const now = history.slice(-SMOOTH_S);
  const sum = (name, of = history) => of.reduce((all, one) => all + one[name], 0);
  const ended = requests.filter((one) => !one.error).map((one) => one.seconds).sort((a, b) => a - b);
  const rank = (part) => ended[Math.max(0, Math.ceil(part * ended.length) - 1)];

  tile("Requests per second", rate(sum("requests", now) / SMOOTH_S), `${count(totals.requests)} in all`,
    smooth(history, (of) => sum("requests", of) / of.length));
  tile("Hit rate, last minute", share(sum("hit"), sum("hit") + sum("encoded")),
    `${plural(sum("hit") + sum("encoded"), "item")} in it`,
    smooth(history, (of) => {
      const items = sum("hit", of) + sum("encoded", of);
      return items ? sum("hit", of) / items : null;
    }));
  tile("Under way", count(totals.in_flight), `${count(totals.queued)} queued`, kept(totals.in_flight));
  tile("Whole request, p50", seconds(rank(0.5)), `p95 ${seconds(rank(0.95))}, of the last ${ended.length}`,
    requests.map((one) => (one.error ? null : one.seconds)).reverse(), null, 0.01);
  tile("Rejected, last minute", count(sum("rejected")), rejections(totals), history.map((one) => one.rejected));
  tile("Failed, last minute", count(sum("failed")), `5xx: ${count(totals.failed)} in all`,
    history.map((one) => one.failed), sum("failed") ? "bad" : null);
  seen.splice(0, seen.length - HISTORY);
}

function saved({ items, media, saved: savings, conversations }) {
  const all = items.hit + items.encoded + items.local;
  const line = el("p", {});
  if (all || !conversations.turns) line.append(...encodesSaved(savings), " Hit rate ", el("b", {}, share(items.hit, all)), ". ");
  if (all && media.metadata + media.raw) line.append(...uploads(media));
  if (conversations.turns) line.append(...turnsContinued(conversations));
  const shown = by("saved");
  if (shown.textContent !== line.textContent) shown.replaceChildren(...line.childNodes);
}

function encodesSaved({ encodes, bytes: media, encode_seconds }) {
  const parts = ["Saved ", el("b", {}, plural(encodes, "encode"))];
  if (media) parts.push(", ", el("b", {}, bytes(media)), " of media not sent");
  // Unknown without an encode of this process to compare with.
  if (encode_seconds) parts.push(", about ", el("b", {}, seconds(encode_seconds)), " of encoding");
  return [...parts, "."];
}

// Models without placeholder metadata have all their media uploaded to prefill and decode too.
function uploads({ metadata, raw }) {
  return [el("b", {}, share(metadata, metadata + raw)), " of media sent as metadata, ", el("b", {}, count(raw)), " raw. "];
}

function turnsContinued({ kept, turns, hit }) {
  const ready = kept ? `; ${plural(kept, "conversation")} kept` : "";
  return ["Of ", el("b", {}, plural(turns, "turn")), ", ", el("b", {}, share(hit, turns)), ` reused decode's KV blocks${ready}.`];
}

// Refused: rejected by admission control with 429 or 503.
function rejections({ rejected, refused, left }) {
  return `4xx: ${count(rejected)} in all; ${count(refused)} refused, ${plural(left, "client")} disconnected`;
}

// Current values have no history on the server; this page keeps what it has seen.
function kept(in_flight) {
  seen.push(in_flight);
  return Array.from({ length: HISTORY }, (_, index) => seen.at(index - HISTORY) ?? null);
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
