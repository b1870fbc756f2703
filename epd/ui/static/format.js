// Formats numbers for people.

const LANGUAGE = "en-GB";
const NONE = "–";
const whole = new Intl.NumberFormat(LANGUAGE, { maximumFractionDigits: 0 });

export const count = (number) => whole.format(number);

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.9995) return `${figures(value * 1000)} ms`;
  if (value < 600) return `${figures(value)} s`;
  if (value < 36000) return `${whole.format(value / 60)} min`;
  return `${whole.format(value / 3600)} h`;
}

export const rate = (value) => (value > 0 ? figures(value) : "0");

export const share = (part, all) => (all ? `${figures((100 * part) / all)} %` : NONE);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${figures(value)} ${units[unit]}`;
}

export const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString(LANGUAGE);

export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

// Endings of upstream requests: those that failed, and those that were invalid.
export const endings = ({ failed, rejected }) =>
  [[failed, "failed"], [rejected, "rejected"]].filter(([number]) => number).map(([number, word]) => `${count(number)} ${word}`);

export const host = (url) => url.replace(/^https?:\/\//, "");

function figures(value) {
  if (value >= 100) return whole.format(value);
  return value.toFixed(value >= 10 || value === 0 ? (Number.isInteger(value) ? 0 : 1) : value >= 1 ? 1 : 2);
}
