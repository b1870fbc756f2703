// Errors and changes of instances, as they happen.

import { by, el, Keyed } from "./dom.js";
import { clock, condition, role } from "./format.js";

const list = new Keyed(by("notices"), make);

export function notices({ notices: shown }) {
  list.show(shown, (one) => [one.kind, one.at_s, one.what, one.message].join(" "));
  by("no-notices").hidden = shown.length > 0;
}

function make({ kind, at_s, what, message, more, cause, outcome }) {
  const [state, title, text] =
    kind === "instance"
      ? [message, `${role(more)} is ${condition(message)}`, cause ? `: ${cause}` : ""]
      : [outcome, message, ` ${more}`];
  return el(
    "li",
    { "data-state": state },
    el("time", { datetime: new Date(at_s * 1000).toISOString() }, clock(at_s)),
    el("span", {}, el("b", {}, title), text, el("code", {}, what)),
  );
}
