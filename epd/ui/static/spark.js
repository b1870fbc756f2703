// A line graph of the last minute.

import { set, svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;

export function spark() {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    area,
    line,
  );
}

// `values`: oldest first; nulls are bridged. `least`: lower bound of the scale's maximum.
export function draw(element, values, least) {
  const top = Math.max(least, ...values.filter((value) => value != null));
  const step = WIDTH / Math.max(1, values.length - 1);
  const points = values
    .map((value, index) => [index * step, value])
    .filter(([, value]) => value != null)
    .map(([x, value]) => `${x.toFixed(1)} ${(HEIGHT - 1 - (value / top) * (HEIGHT - 3)).toFixed(1)}`);
  const [area, line] = element.children;
  const first = points[0]?.split(" ")[0];
  const last = points.at(-1)?.split(" ")[0];
  set(line, "d", points.length ? `M${points.join("L")}` : "");
  set(area, "d", points.length ? `M${points.join("L")}L${last} ${HEIGHT}L${first} ${HEIGHT}Z` : "");
}
