// Creates and changes elements. Text from outside is inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const by = (id) => document.getElementById(id);

// Changes only what differs, so that screen readers and selections are not disturbed.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// As `say`, for text of which every second part is a figure.
export function sayFigures(element, parts) {
  if (element.textContent !== parts.join("")) {
    element.replaceChildren(...parts.map((part, index) => (index % 2 ? el("b", {}, part) : part)));
  }
}

export function set(element, name, value) {
  if (value == null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Keeps one element per item, in order. `make` creates an element, `update` changes it.
export class Keyed {
  constructor(parent, make, update = () => {}) {
    Object.assign(this, { parent, make, update, known: new Map() });
  }

  show(things, keyOf) {
    const keys = new Set(things.map(keyOf));
    for (const [key, element] of this.known) {
      if (!keys.has(key)) {
        element.remove();
        this.known.delete(key);
      }
    }
    let before = this.parent.firstChild;
    for (const thing of things) {
      const key = keyOf(thing);
      let element = this.known.get(key);
      if (!element) this.known.set(key, (element = this.make(thing)));
      if (element === before) before = before.nextSibling;
      else this.parent.insertBefore(element, before);
      this.update(element, thing);
    }
  }
}
