// Formats numbers for people, as epd/ui/formats.py does.

const LANGUAGE = "en-GB";
const NONE = "–";
const whole = new Intl.NumberFormat(LANGUAGE, { maximumFractionDigits: 0 });

export const count = (number) => whole.format(number);

export function seconds(value) {
  if (value == null) return NONE;
  return value < 0.9995 ? `${figures(value * 1000)} ms` : `${figures(value)} s`;
}

export const rate = (value) => (value > 0 ? figures(value) : "0");

export const share = (part, all) => (all ? `${whole.format((100 * part) / all)} %` : NONE);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? figures(value) : whole.format(value)} ${units[unit]}`;
}

export const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString(LANGUAGE);

export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

// Upper end of a scale in seconds: a round number, at most half as long again as the longest bar.
export function scale(longest_s) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(1e-3, longest_s)));
  return unit * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => longest_s <= step * unit * 1.0001);
}

// The end of a scale as text: a round number needs no zeros.
export const scaleEnd = (end_s) => seconds(end_s).replace(/\.0+ /, " ");

export const host = (url) => url.replace(/^https?:\/\//, "");

export const role = (name) => name[0].toUpperCase() + name.slice(1).replace("_", " and ");

export const condition = (state) => (state === "trial" ? "on trial" : state);

function figures(value) {
  return value >= 100 ? whole.format(value) : value.toFixed(value >= 1 ? 1 : 2);
}
