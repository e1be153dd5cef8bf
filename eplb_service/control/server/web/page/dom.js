// Helpers for elements and number formats. Text from the service is never interpreted as HTML.
export const at = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svgElement(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(target, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) target.setAttribute(key, value);
  target.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return target;
}

const shown = new Map();
// Rebuilds a section only if its data has changed, so that open details, selections and tips are kept.
export function rebuild(id, key, make) {
  const text = JSON.stringify(key);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  at(id).replaceChildren(...make());
}

export const ratio = (value) => (value ? value.toFixed(3) : "–");
export const count = (value) => Math.round(value).toLocaleString("en");

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value.toLocaleString("en", { maximumSignificantDigits: 3 })} ${units[unit]}`;
}

export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function clock(seconds, long = false) {
  const day = { month: "short", day: "numeric" };
  const time = { hour: "2-digit", minute: "2-digit", second: long ? "2-digit" : undefined, hour12: false };
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return date.toLocaleString("en-GB", today ? time : { ...day, ...time });
}

export function tip(event, text) {
  const box = at("tip");
  box.hidden = text === null;
  if (text === null) return;
  box.textContent = text;
  const right = event.clientX + 18 + box.offsetWidth > innerWidth;
  box.style.left = `${Math.max(4, right ? event.clientX - 14 - box.offsetWidth : event.clientX + 14)}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8))}px`;
}
