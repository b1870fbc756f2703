// Errors and changes of instances, as they happen.

import { by, el, Keyed } from "./dom.js";
import { clock } from "./format.js";
import { groups, ROLES, word } from "./fleet.js";

let names = new Map();
const list = new Keyed(by("notices"), make);

export function notices({ notices: shown, instances }) {
  names = new Map(groups(instances).flatMap((group) => group.instances).map((one) => [one.role + one.url, one.name]));
  list.show(shown, (one) => [one.kind, one.at_s, one.what, one.said].join(" "));
  by("no-notices").hidden = shown.length > 0;
}

function make(notice) {
  return notice.kind === "instance" ? change(notice) : failure(notice);
}

function change({ at_s, what, said, more, cause }) {
  const name = names.get(more + what) ?? ROLES[more]?.title; // it may be gone
  return el(
    "li",
    { "data-state": said },
    time(at_s),
    el("span", {}, el("b", {}, `${name ? `${name} ` : ""}is ${word(said)}`), cause ? `: ${cause}` : "", el("code", {}, what)),
  );
}

function failure({ at_s, what, said, more, outcome }) {
  return el(
    "li",
    { "data-state": outcome },
    time(at_s),
    el("span", {}, el("b", {}, said), ` ${more}`, el("code", {}, what)),
  );
}

const time = (at_s) => el("time", { datetime: new Date(at_s * 1000).toISOString() }, clock(at_s));
