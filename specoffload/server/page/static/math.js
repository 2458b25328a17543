// Formulas in Markdown: TeX in $ … $, $$ … $$, \( … \) and \[ … \], set by KaTeX. Prices such as
// $5 and $10 stay text: a closing $ follows no blank and precedes no digit.

import { el } from "./dom.js";

const TEX = String.raw`((?:(?!\n[ \t]*\n)[\s\S])+?)`; // has no empty line, as in TeX
const BLOCK = new RegExp(String.raw`^ {0,3}(?:\$\$${TEX}\$\$|\\\[${TEX}\\\])[ \t]*(?:\n+|$)`);
const BLOCK_START = /\n {0,3}(?=\$\$|\\\[)/;
const DISPLAY = new RegExp(String.raw`^(?:\$\$${TEX}\$\$|\\\[${TEX}\\\])`);
const BETWEEN = new RegExp(String.raw`^\\\(${TEX}\\\)`);
const DOLLARS = /^\$(?![\s$])((?:\\[^\n]|[^\\$`\n])*?(?:\\[^\n]|[^\\$`\n\s]))\$(?![\d$])/;
const START = /\\[([]|(?<![\w$\\])\$(?!\s)/;
const LIMITS = { strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };

let katex = null; // loaded when the first formula is there
let loading = null;

const token = (type, raw, tex, isDisplay) => ({ type, raw, tex: tex.trim(), isDisplay });

function inline(src) {
  const display = src.match(DISPLAY);
  if (display) return token("tex", display[0], display[1] ?? display[2], true);
  const found = src.match(BETWEEN) ?? src.match(DOLLARS);
  return found ? token("tex", found[0], found[1], false) : undefined;
}

function block(src) {
  const found = src.match(BLOCK);
  return found ? token("texBlock", found[0], found[1] ?? found[2], true) : undefined;
}

/** Extensions of marked. Their HTML has the TeX as text, which `setFormulas` sets later. */
export function formulas(escape) {
  const renderer = ({ tex, isDisplay }) => `<span class="${isDisplay ? "tex display" : "tex"}">${escape(tex)}</span>`;
  return [
    {
      name: "texBlock",
      level: "block",
      start(src) {
        const found = src.match(BLOCK_START);
        return found ? found.index + 1 : undefined;
      },
      tokenizer: block,
      renderer: (found) => `<p>${renderer(found)}</p>`,
    },
    { name: "tex", level: "inline", start: (src) => src.match(START)?.index, tokenizer: inline, renderer },
  ];
}

export const isReady = () => katex !== null;

/** Load KaTeX, its style and, when they are needed, its fonts: from this server. */
export function load() {
  loading ??= import("./vendor/katex.js").then(() => {
    document.head.append(el("link", { rel: "stylesheet", href: new URL("vendor/katex.css", import.meta.url) }));
    katex = globalThis.katex;
  });
  return loading;
}

/** Set the formulas below `root`. What is no TeX, or not whole yet, is shown as it was written. */
export function setFormulas(root) {
  for (const node of root.querySelectorAll("span.tex")) {
    const tex = node.textContent;
    try {
      katex?.render(tex, node, { ...LIMITS, displayMode: node.classList.contains("display") });
    } catch (error) {
      node.replaceChildren(el("code", { title: error.message }, tex));
    }
  }
}
