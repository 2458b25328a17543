// Puts the parts together: which conversation is shown, what the buttons and keys do.

import { Answers } from "./chat.js";
import { Conversation, Shelf } from "./conversations.js";
import { showContext } from "./context.js";
import { announce, byId, el, icon } from "./dom.js";
import { Tray } from "./images.js";
import { Keeper } from "./keeper.js";
import { List } from "./list.js";
import { Models, stateOf, stateWords } from "./models.js";
import { health, read, ServerError, write } from "./server.js";
import { askKey, openSettings, Settings } from "./settings.js";
import { Thread } from "./thread.js";
import { welcomeParts } from "./welcome.js";
import { showWhy } from "./why.js";

const POLL_MS = 400;
const WATCH_MS = 15000;
const NAME = "specoffload";

const settings = new Settings();
const models = new Models(byId("model-choice"), {
  chosen() {
    say("");
    void watch();
  },
  moved(words) {
    say(words);
    announce(words);
  },
});
const state = { props: null, model: null, loads: true, loading: {}, notice: "", trouble: "", isReady: false, conversations: [], current: null, shelf: null, keeper: null };
const text = byId("composer-text");
const send = byId("send");

// ---- conversations

const answers = new Answers({
  change(conversation, message, growing) {
    if (growing) state.keeper.saveSoon(conversation);
    else void state.keeper.save(conversation);
    if (conversation === state.current) {
      if (growing && thread.view(message)) thread.grow(message);
      else thread.show(conversation, growing ? message : null);
      showComposer();
      showUse();
    }
    if (growing) return;
    showList();
    announce(message.error ?? message.cutOff ?? (message.stopped ? "Stopped" : "The answer is complete"));
    if (message.status === 401) askForKey();
    if (message.error && message.model) models.tried(message.model, { isReasonTold: true }); // its start may have failed
    if (models.areSeveral || message.status === 503 || message.status === 0) void watch();
  },
});

const thread = new Thread({
  language: () => settings.language,
  running: () => answers.running(state.current),
  waitingFor: (message) => waitingWords(message),
  retry: (message) => ask(() => (state.current.leaf = message.parent)),
  edit: (message, content) => ask(() => state.current.add("user", content, message.parent, message.images)),
  show(message) {
    if (answers.running(state.current)) return;
    state.current.show(message);
    void state.keeper.save(state.current);
    thread.show(state.current);
    showUse();
  },
});

const tray = new Tray({ change: () => showComposer(), refused: (words) => announceAt(words) });

const list = new List({
  running: (conversation) => answers.running(conversation),
  open: (conversation) => open(conversation),
  remove: (conversation) => void remove(conversation),
  rename(conversation, title) {
    conversation.rename(title);
    void state.keeper.save(conversation);
  },
  ended: () => showList(),
});

/** Change the conversation by `change`, then have it answered. */
function ask(change) {
  const conversation = state.current;
  if (answers.running(conversation)) return;
  change();
  say("");
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  write("specoffload.current", conversation.id);
  const written = answers.write(conversation, { ...settings.sampling, ...models.fields }, servesDemo() ? "python" : "");
  void state.keeper.save(conversation);
  showWelcome();
  showList();
  thread.end();
  void written;
  if (!state.props) setTimeout(() => void watch(), POLL_MS); // the request loads its model
}

/** What another tab has done to a conversation. */
const otherTabs = {
  changed(found) {
    const known = [state.current, ...state.conversations].find((one) => one.id === found.id);
    if (known) known.absorb(found, { running: answers.running(known) });
    if (!state.conversations.some((one) => one.id === found.id)) state.conversations.push(known ?? found);
    if (known === state.current) showCurrent();
    showList();
  },
  removed(id) {
    const known = state.conversations.find((one) => one.id === id);
    if (!known) return;
    answers.stop(known);
    state.conversations = state.conversations.filter((one) => one !== known);
    if (known === state.current) open(new Conversation({ system: settings.system }));
    showList();
  },
  failed: (error) => say(`This conversation cannot be kept: ${error.message}`),
};

/** Go on with the answers that were being written when the page was left. */
async function resume(conversation) {
  const cutOff = Object.values(conversation.messages).filter((message) => message.stream);
  for (const message of cutOff) await answers.resume(conversation, message);
}

function showCurrent() {
  thread.show(state.current, answers.running(state.current));
  showWelcome();
  showComposer();
  showUse();
}

function showUse() {
  showContext(byId("context"), state.current.path(), state.model, state.props);
}

function open(conversation) {
  state.current = conversation;
  if (!conversation.isEmpty) write("specoffload.current", conversation.id);
  showCurrent();
  thread.end();
  showList();
  closeSidebar();
}

function newChat() {
  write("specoffload.current", "");
  open(new Conversation({ system: settings.system }));
  selectTab("chat");
  text.focus();
}

async function remove(conversation) {
  answers.stop(conversation);
  state.conversations = state.conversations.filter((one) => one !== conversation);
  await state.keeper.remove(conversation);
  if (conversation === state.current) newChat();
  showList();
  byId("new-chat").focus();
}

function showList() {
  state.conversations.sort((a, b) => b.updated - a.updated);
  list.show(state.conversations, state.current);
}

/** True for the demo pair, which continues Python source and knows no chats. */
function servesDemo() {
  return state.props?.only_continues === true;
}

const modelWords = () => stateWords(state.model, { loads: state.loads, isAwaited: models.isAwaited && !state.loading[state.model?.id] });

function showWelcome() {
  const welcome = byId("welcome");
  welcome.hidden = !state.current.isEmpty || !state.isReady;
  if (welcome.hidden) return;
  const canLoad = !models.isAwaited && ["unloaded", "sleeping", "failed"].includes(stateOf(state.model));
  const load = canLoad ? () => void loadModel() : null;
  const words = modelWords();
  const shown = JSON.stringify([servesDemo(), words]);
  if (welcome.dataset.shown === shown) return; // a button in it keeps the focus
  welcome.dataset.shown = shown;
  welcome.replaceChildren(...welcomeParts(servesDemo(), words, (idea) => ask(() => state.current.add("user", idea)), load));
}

// ---- the composer

function showComposer() {
  const running = answers.running(state.current);
  const shown = running ? "stop" : "up";
  if (send.dataset.shown !== shown) {
    send.dataset.shown = shown;
    send.replaceChildren(icon(shown));
    send.setAttribute("aria-label", running ? "Stop" : "Send");
    send.title = running ? "Stop (Esc)" : "Send (Enter)";
  }
  send.disabled = !running && (!state.isReady || !(text.value.trim() || tray.images.length));
}

function fit() {
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight, 0.4 * innerHeight)}px`;
}

text.addEventListener("input", () => {
  fit();
  showComposer();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answers.running(state.current)) byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !text.value) {
    const last = state.current.path().findLast((m) => m.role === "user");
    if (last && !answers.running(state.current)) {
      event.preventDefault();
      thread.view(last).edit();
    }
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answers.running(state.current)) return answers.stop(state.current);
  const content = text.value;
  if (!(content.trim() || tray.images.length) || !state.isReady) return;
  text.value = "";
  fit();
  const images = tray.take();
  ask(() => state.current.add("user", content, state.current.leaf, images));
});

// ---- tabs, the list, dialogs, keys

function selectTab(name, { focus = false } = {}) {
  for (const one of ["chat", "why"]) {
    const tab = byId(`tab-${one}`);
    const isChosen = one === name;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    byId(`panel-${one}`).hidden = !isChosen;
    if (isChosen && focus) tab.focus();
  }
  if (name === "why") void refreshWhy();
}

async function refreshWhy() {
  if (state.isReady) await readServer().catch(trouble);
  if (!state.props) return byId("why").replaceChildren(el("p", {}, state.model ? modelWords() : "The server has not loaded its model yet."));
  const last = state.current.path().findLast((m) => m.meter?.timings);
  showWhy(byId("why"), state.props, state.model, last?.meter);
}

function closeSidebar() {
  document.body.classList.remove("listing");
  byId("scrim").hidden = true;
  byId("open-sidebar").setAttribute("aria-expanded", "false");
}

function openSidebar() {
  document.body.classList.add("listing");
  byId("scrim").hidden = false;
  byId("open-sidebar").setAttribute("aria-expanded", "true");
  byId("new-chat").focus();
}

const THEMES = { "": "as the system", light: "light", dark: "dark" };

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const label = `Colours: ${THEMES[theme]}`;
  byId("theme").setAttribute("aria-label", label);
  byId("theme").title = label;
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(read("specoffload.theme") ?? "") + 1) % names.length];
  write("specoffload.theme", theme);
  showTheme(theme);
  announce(`Colours: ${THEMES[theme]}`);
}

function download() {
  const blob = new Blob([JSON.stringify(state.conversations, null, 1)], { type: "application/json" });
  const link = el("a", { href: URL.createObjectURL(blob), download: "conversations.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

function showSettings() {
  openSettings(byId("settings"), settings, {
    conversation: state.current,
    defaults: state.props?.default_generation_settings?.params ?? {},
    download,
    async clear() {
      const removed = state.conversations;
      state.conversations = [];
      removed.forEach((one) => answers.stop(one));
      await Promise.all(removed.map((one) => state.keeper.remove(one)));
      newChat();
    },
    save(system) {
      state.current.system = system;
      void state.keeper.save(state.current);
      thread.show(state.current, answers.running(state.current));
      void watch();
    },
  });
}

byId("new-chat").addEventListener("click", newChat);
byId("open-sidebar").addEventListener("click", openSidebar);
for (const id of ["close-sidebar", "scrim"]) byId(id).addEventListener("click", closeSidebar);
byId("open-settings").addEventListener("click", showSettings);
byId("theme").addEventListener("click", nextTheme);
byId("tab-chat").addEventListener("click", () => selectTab("chat"));
byId("tab-why").addEventListener("click", () => selectTab("why"));
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  selectTab(byId("tab-chat").tabIndex === 0 ? "why" : "chat", { focus: true });
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (document.body.classList.contains("listing")) closeSidebar();
    else answers.stop(state.current);
  } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    newChat();
  } else if (event.key === "/" && !/^(?:input|textarea)$/i.test(document.activeElement.tagName)) {
    event.preventDefault();
    text.focus();
  }
});
// A page that comes back from the browser's memory has lost its connections.
addEventListener("pageshow", (event) => event.persisted && location.reload());

// ---- the server

/** Show what the server does, or else what went wrong with it, or else the page's own notice. */
function banner(words, fraction) {
  const root = byId("banner");
  const shown = words || state.trouble || state.notice;
  root.hidden = !shown;
  if (!shown) return;
  const bar = fraction === undefined ? null : el("progress", { max: "1", value: String(fraction), "aria-label": shown });
  root.replaceChildren(el("span", {}, shown), ...(bar ? [bar] : []));
}

/** Show a notice until the next one, or "". */
function say(words) {
  state.notice = words;
  banner("");
}

/** Show a notice for some seconds. */
function announceAt(words) {
  say(words);
  announce(words);
  setTimeout(() => state.notice === words && say(""), 6000);
}

async function readServer() {
  Object.assign(state, await models.read(), { trouble: "" });
  const inputs = state.model.architecture?.input_modalities ?? [];
  tray.show(state.props?.modalities?.vision ?? inputs.includes("image"));
  byId("model-name").textContent = state.model.id;
  byId("model-name").hidden = models.areSeveral; // the list shows it
  document.title = `${state.model.id} · ${NAME}`;
}

async function loadModel() {
  try {
    await models.load();
  } catch (error) {
    return trouble(error);
  }
  await watch();
}

function askForKey() {
  askKey(byId("key-dialog"), () => void watch());
}

function trouble(error) {
  if (error instanceof ServerError && error.status === 401) askForKey();
  else {
    state.trouble = error.message;
    banner("");
  }
}

/** Words on the loading of a model of several, and its progress if it is known. */
function modelLoading(name) {
  const told = state.loading[name];
  if (!told) return [""];
  return told.step ? [`Loading ${name}, ${told.step}: ${Math.floor(100 * told.value)} %`, told.value] : [`Loading ${name} …`];
}

function waitingWords(message) {
  if (!message.model || message.model !== state.model?.id) return "reading the prompt";
  if (state.loading[message.model]) return "loading the model";
  return state.props ? "reading the prompt" : "waiting for the model";
}

function loadingWords(found) {
  if (found.progress === undefined) return [found.message === "Loading model" ? "Loading the model …" : found.message];
  return [`Loading the model, ${found.step}: ${Math.floor(100 * found.progress)} %`, found.progress];
}

let watching = null;
let n_watches = 0;

/** Look at the server until it is ready, then now and then. */
async function watch() {
  clearTimeout(watching);
  n_watches += 1;
  const mine = n_watches;
  let found;
  try {
    found = await health();
  } catch {
    found = { ready: false, status: 0, message: "The server does not answer." };
  }
  if (mine !== n_watches) return; // a later look is under way
  const needsMore = !state.isReady || !state.props || models.areSeveral;
  state.isReady = found.ready;
  state.loading = found.loading ?? {};
  if (found.ready && needsMore) await readServer().catch(trouble);
  if (mine !== n_watches) return;
  banner(...(found.ready ? modelLoading(state.model?.id) : loadingWords(found)));
  showWelcome();
  showComposer();
  showUse();
  const growing = answers.running(state.current);
  if (growing) thread.grow(growing);
  const isAwaited = models.isAwaited || (growing && !state.props);
  const isSettled = found.ready && !found.loading && !isAwaited;
  watching = setTimeout(watch, isSettled ? WATCH_MS : POLL_MS);
}

async function start() {
  byId("no-scripts").remove();
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
  showTheme(read("specoffload.theme") ?? "");
  state.shelf = await Shelf.open();
  state.keeper = new Keeper(state.shelf, otherTabs);
  await state.keeper.recover();
  state.conversations = await state.shelf.all();
  for (const conversation of state.conversations) void resume(conversation);
  const last = state.conversations.find((one) => one.id === read("specoffload.current"));
  open(last ?? new Conversation({ system: settings.system }));
  byId("kept").hidden = state.shelf.isLasting;
  if (matchMedia("(hover: hover)").matches) text.focus();
  await watch();
}

void start();
