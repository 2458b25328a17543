// Elements without markup in strings: the page's policy lets only DOMPurify make HTML.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  plus: ["M12 5v14M5 12h14"],
  close: ["M6 6l12 12M18 6L6 18"],
  menu: ["M4 7h16M4 12h16M4 17h10"],
  image: ["M4 5h16v14H4z", "M4 16l5-5 4 4 3-3 4 4", "M15 9.5h.01"],
  up: ["M12 19V5M6 11l6-6 6 6"],
  down: ["M12 5v14M6 13l6 6 6-6"],
  stop: ["M7 7h10v10H7z"],
  copy: ["M9 9h10v11H9z", "M15 9V4H5v11h4"],
  done: ["M5 12.5l4.5 4.5L19 7.5"],
  edit: ["M4 20h4L19 9l-4-4L4 16z"],
  retry: ["M19 12a7 7 0 1 1-2.1-5", "M19 4v4h-4"],
  left: ["M14 6l-6 6 6 6"],
  right: ["M10 6l6 6-6 6"],
  bin: ["M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13"],
  sliders: ["M4 8h9M17 8h3M4 16h3M11 16h9", "M15 6v4M9 14v4"],
  theme: ["M12 4a8 8 0 1 0 0 16z", "M12 4a8 8 0 0 1 0 16"],
  tool: ["M14.5 6.5a4 4 0 0 0-5 5L4 17l3 3 5.5-5.5a4 4 0 0 0 5-5L15 12l-3-3z"],
};

/** An element: `props` are attributes, listeners (`onclick`), `class` and `dataset`. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function icon(name) {
  const paths = ICONS[name].map((d) => svg("path", { d }));
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, ...paths);
}

/** A button that is only an icon; `label` is what it is called. */
export function iconButton(name, label, onclick, props = {}) {
  const classes = `icon-button ${props.class ?? ""}`.trim();
  return el("button", { type: "button", "aria-label": label, title: label, onclick, ...props, class: classes }, icon(name));
}

export const byId = (id) => document.getElementById(id);

/** Say something to those who hear the page. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Copy, and show on `button` for a moment that it was done. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Plain HTTP from another machine has no clipboard: the older way still works there.
    const area = el("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.querySelector(".icon");
  const after = icon("done");
  before?.replaceWith(after);
  announce("Copied");
  setTimeout(() => after.replaceWith(before ?? ""), 1200);
}
