// Colour theme: light, dark, or the system's.

import { say, set } from "./dom.js";

const THEMES = ["auto", "light", "dark"];
const KEPT = "epd-theme";

export function themes(button) {
  const apply = (theme) => {
    set(document.documentElement, "data-theme", theme === "auto" ? null : theme);
    say(button, `Theme: ${theme}`);
    localStorage.setItem(KEPT, theme);
    return theme;
  };
  let theme = THEMES.includes(localStorage.getItem(KEPT)) ? localStorage.getItem(KEPT) : "auto";
  apply(theme);
  button.addEventListener("click", () => {
    theme = apply(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  });
}
