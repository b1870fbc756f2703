// Requests the state once a second while the page is visible, and shows it.

import { by, say, set } from "./dom.js";
import { clock, plural } from "./format.js";
import { instances } from "./instances.js";
import { latency } from "./latency.js";
import { notices } from "./notices.js";
import { stores } from "./stores.js";
import { summary } from "./summary.js";
import { waterfall } from "./waterfall.js";

const EVERY_MS = 1000;
const MOST_MS = 8000;
const TIMEOUT_MS = 10000;
const KEY = "epd-admin-key";
const VIEWS = [summary, instances, stores, latency, notices, waterfall];

let paused = false;
let misses = 0;
let timer;
let seen_s;

async function ask() {
  const key = sessionStorage.getItem(KEY);
  return fetch("ui/state", {
    headers: key ? { "X-API-Key": key } : {},
    signal: AbortSignal.timeout(TIMEOUT_MS),
    credentials: "omit",
  });
}

async function look() {
  clearTimeout(timer);
  if (paused || document.hidden || by("key-dialog").open) return;
  try {
    const state = await asked();
    if (state) show(state);
  } finally {
    timer = setTimeout(look, Math.min(MOST_MS, EVERY_MS * 2 ** misses));
  }
}

// The error message of the proxy's response, or its status.
async function asked() {
  try {
    const answer = await ask();
    if (answer.ok) return await answer.json();
    await refused(answer);
  } catch (error) {
    if (!(error instanceof TypeError || error instanceof DOMException || error instanceof SyntaxError)) throw error;
    missed();
  }
}

function show(state) {
  misses = 0;
  seen_s = state.now;
  by("refused").hidden = true;
  link("live", "live");
  const bad = state.instances.filter((one) => one.state !== "healthy").length;
  document.title = bad ? `${plural(bad, "instance")} not healthy – EPD proxy` : "EPD proxy";
  say(by("about"), `${state.version} · ${state.topology || "no instances"}`);
  for (const view of VIEWS) view(state);
  set(document.body, "data-ready", "");
}

function missed() {
  misses += 1;
  link("lost", seen_s ? `no answer since ${clock(seen_s)}` : "no answer");
}

async function refused(answer) {
  const said = (await answer.json().catch(() => null))?.error?.message ?? `status ${answer.status}`;
  if (answer.status === 401) {
    const wrong = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    say(by("key-why"), wrong ? "That key does not open this proxy." : "This proxy shows its metrics only with its admin key.");
    link("lost", "needs a key");
    by("key-dialog").showModal();
    return;
  }
  misses += 1;
  link("lost", "refused");
  say(by("refused"), said);
  by("refused").hidden = false;
}

function link(state, words) {
  set(by("link"), "data-state", state);
  say(by("link"), words);
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, by("admin-key").value);
  by("admin-key").value = "";
  by("key-dialog").close();
});
by("key-dialog").addEventListener("close", look);

by("pause").addEventListener("click", () => {
  paused = !paused;
  set(by("pause"), "aria-pressed", paused);
  if (paused) link("paused", seen_s ? `as of ${clock(seen_s)}` : "paused");
  look();
});

document.addEventListener("visibilitychange", look);
look();
