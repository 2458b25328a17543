// Markdown to elements, safely: marked parses, highlight.js colours, DOMPurify lets only harmless
// elements through, KaTeX sets formulas. HTML in a text is shown as the text it is; images become links, since loading
// one would tell its server about the conversation.

import { el, copy, icon } from "./dom.js";
import { formulas, isReady as hasKatex, load as loadKatex, setFormulas } from "./math.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const CLEAN = {
  ALLOWED_TAGS: [
    ..."a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start"], // which DOMPurify would take for addresses
  RETURN_DOM_FRAGMENT: true,
};

const escape = (text) =>
  text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

let highlighter = null; // loaded when the first block of code is there
let loading = null;

const marked = new Marked({
  gfm: true,
  extensions: formulas(escape),
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const language = (lang ?? "").match(/^[\w+#.-]*/)[0].toLowerCase();
      return `<pre><code class="language-${escape(language)}">${coloured(text, language)}</code></pre>`;
    },
  },
});

function coloured(text, language) {
  if (!highlighter?.getLanguage(language)) return escape(text);
  return highlighter.highlight(text, { language, ignoreIllegals: true }).value;
}

/** A text that may grow: only its blocks that have changed are made anew. */
export class Markdown {
  #raws = [];
  #shown = ""; // the text for which a library is being loaded

  constructor(root) {
    this.root = root;
  }

  /** Show `text`. Throws nothing: what cannot be parsed is shown as it is. */
  show(text, { growing = false } = {}) {
    let tokens;
    try {
      tokens = marked.lexer(text).filter((token) => token.type !== "space");
    } catch {
      this.root.textContent = text;
      this.#raws = [];
      return;
    }
    if (!highlighter && tokens.some((token) => token.type === "code")) void this.#colour(text, growing);
    if (!hasKatex() && hasFormula(tokens)) void this.#load(loadKatex(), text, growing);
    tokens.forEach((token, at) => {
      // A link's definition may come later and change what is before it.
      const raw = `${token.raw}\n${Object.keys(tokens.links ?? {}).length}\n${highlighter !== null}${hasKatex()}`;
      if (this.#raws[at] === raw) return;
      this.#raws[at] = raw;
      this.#put(at, token, tokens.links);
    });
    this.#raws.length = tokens.length;
    while (this.root.childElementCount > tokens.length) this.root.lastElementChild.remove();
  }

  #put(at, token, links) {
    const html = marked.parser(Object.assign([token], { links }));
    const block = el("div", { class: "block" }, DOMPurify.sanitize(html, CLEAN));
    for (const link of block.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    setFormulas(block);
    for (const pre of block.querySelectorAll("pre")) frame(pre);
    for (const table of block.querySelectorAll("table")) {
      const scroller = el("div", { class: "table-scroller", tabindex: "0", role: "region", "aria-label": "Table" });
      table.replaceWith(scroller);
      scroller.append(table);
    }
    const old = this.root.children[at];
    if (old) old.replaceWith(block);
    else this.root.append(block);
  }

  async #colour(text, growing) {
    loading ??= import("./vendor/highlight.js").then((library) => (highlighter = library.default));
    await this.#load(loading, text, growing);
  }

  /** Show the text once more when a library is there. */
  async #load(library, text, growing) {
    this.#shown = text;
    await library;
    if (!growing && this.#shown === text) this.show(text); // a growing text is shown again anyway
  }
}

/** True if a formula is in the tokens, or in those that they consist of. */
function hasFormula(tokens) {
  let found = false;
  marked.walkTokens(tokens, ({ type }) => (found ||= type === "tex" || type === "texBlock"));
  return found;
}

/** A head with the language and a button above a block of code. */
function frame(pre) {
  const code = pre.querySelector("code");
  const language = code?.className.match(/language-(\S+)/)?.[1] ?? "";
  const button = el("button", { type: "button", class: "quiet-button small" }, icon("copy"), "Copy");
  button.addEventListener("click", () => copy(code.textContent, button));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), button);
  const box = el("div", { class: "code" }, head);
  pre.replaceWith(box);
  pre.tabIndex = 0; // so that long lines can be scrolled by keys
  box.append(pre);
}
