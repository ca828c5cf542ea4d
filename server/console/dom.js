// Building the page: every text goes in as text, so that nothing in a record or a name
// can ever be markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** An element of HTML. */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An element of SVG. */
export function s(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Sets a text if it changed, so that a selection in it survives. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Whether a key press belongs to a field that text is typed into. */
export function isTyping(event) {
  return event.target.closest("input, select, textarea") !== null;
}

/** Keys that move along a list, and by how many lines. */
export const STEPS = new Map([["ArrowDown", 1], ["ArrowUp", -1], ["j", 1], ["k", -1]]);
