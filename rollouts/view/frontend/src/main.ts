// The page: the list, the pane of the chosen episode, keys, the theme, and the file that is followed.

import { newEpisodes, readIndex, sourceOf } from "./data.ts";
import { counted, h } from "./dom.ts";
import { FILTER_HELP } from "./filter.ts";
import { EpisodeList } from "./list.ts";
import { type Place, VIEWS, fragmentOf, placeOf } from "./location.ts";
import { EpisodePane, titleOf } from "./pane.ts";
import { lineOf } from "./visible_text.ts";

const POLL_MILLISECONDS = 1500;
/** After so many new episodes at once, more are asked for without a pause. */
const MANY = 500;

const KEYS: [string, string][] = [
  ["j, k", "next, previous episode"],
  ["Enter, Esc", "into the episode, back to the list"],
  [VIEWS.map((_, index) => index + 1).join(" "), VIEWS.join(", ")],
  ["n, p", "next, previous message"],
  ["← →", "previous, next token (after one is chosen)"],
  ["c, C", "next, previous colouring of tokens"],
  ["[ ]", "previous, next branch"],
  ["/", "filter the list; text:door searches in messages"],
  ["t", "light, dark"],
  ["?", "these keys"],
];

function start(): void {
  const index = readIndex();
  const navigate = (place: Place): void => {
    const fragment = fragmentOf(place);
    if (location.hash !== fragment) location.hash = fragment;
    else void show();
  };
  const open = (episode: number): void => navigate({ ...placeOf(location.hash), episode, leaf: null, token: null });
  const source = sourceOf(index);
  const list = new EpisodeList(index.episodes, source, open);
  const pane = new EpisodePane(source, () => list.all, navigate);
  const help = helpDialog();
  const problems = h("div", { class: "problems", role: "status" });
  const state = h("span", { class: "hint", role: "status" }, index.live ? "following the file" : "");
  const theme = h("button", { type: "button", class: "small", onclick: toggleTheme }, "light / dark");
  const keys = h("button", { type: "button", class: "small", onclick: () => help.showModal() }, "keys ?");
  document.body.append(
    h("header", { class: "top" }, h("h1", {}, lineOf(index.title, 120)), state, theme, keys),
    problems,
    h("div", { class: "panes" }, list.element, pane.element),
    help,
  );
  showProblems(problems, index.problems);

  const show = async (): Promise<void> => {
    const place = placeOf(location.hash);
    document.body.classList.toggle("open", place.episode !== null);
    list.select(place.episode);
    const opened = list.all.find(({ number }) => number === place.episode);
    document.title = lineOf(opened ? `${titleOf(opened)}, ${index.title}` : index.title, 200);
    await pane.show(place);
  };
  addEventListener("hashchange", () => void show());
  document.addEventListener("keydown", (event) => onKey(event, list, pane, help, open));
  // A narrow page shows either the list or an episode, and begins with the list.
  const opensFirst = index.episodes.length === 1 || (index.episodes.length > 1 && !matchMedia("(max-width: 760px)").matches);
  if (!location.hash && opensFirst) open(0);
  else void show();
  if (index.live) void follow(list, problems, state, () => pane.isShown(placeOf(location.hash)) || void show());
}

function onKey(event: KeyboardEvent, list: EpisodeList, pane: EpisodePane, help: HTMLDialogElement, open: (episode: number) => void): void {
  const target = event.target as HTMLElement;
  const isTyping = target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.key === "Escape") {
    if (isTyping) target.blur();
    else location.hash = "#";
    return;
  }
  if (event.key === "Enter" && target.id === "filter") {
    const first = list.shown[0];
    if (first) open(first.number);
    target.blur();
    return;
  }
  if (isTyping) return;
  const actions: { [key: string]: () => void } = {
    j: () => openNeighbour(1),
    k: () => openNeighbour(-1),
    Enter: () => document.getElementById("view")?.focus(),
    n: () => pane.nextMessage(1),
    p: () => pane.nextMessage(-1),
    c: () => pane.nextColour(1),
    C: () => pane.nextColour(-1),
    "[": () => pane.nextBranch(-1),
    "]": () => pane.nextBranch(1),
    "/": () => list.focusFilter(),
    t: toggleTheme,
    "?": () => help.showModal(),
  };
  VIEWS.forEach((view, index) => (actions[String(index + 1)] = () => pane.setView(view)));
  const openNeighbour = (by: number): void => {
    const episode = list.neighbour(by);
    if (episode !== null) open(episode);
  };
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    const by = event.key === "ArrowRight" ? 1 : -1;
    if (target.getAttribute("role") === "tab") moveTab(pane, by);
    else if (!pane.nextToken(by)) return;
  } else if (event.key === "Enter" && target.matches("button, a, summary")) {
    return; // the element's own action
  } else if (event.key in actions) {
    actions[event.key]();
  } else {
    return;
  }
  event.preventDefault();
}

function moveTab(pane: EpisodePane, by: number): void {
  pane.nextView(by);
  requestAnimationFrame(() => document.querySelector<HTMLElement>('[role="tab"][aria-selected="true"]')?.focus());
}

function toggleTheme(): void {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
}

function helpDialog(): HTMLDialogElement {
  const keys = h("dl", {});
  for (const [key, meaning] of KEYS) keys.append(h("dt", {}, key), h("dd", {}, meaning));
  const dialog = h(
    "dialog",
    { "aria-label": "Keys and filter" },
    h("h2", {}, "Keys"),
    keys,
    h("h2", {}, "Filter"),
    h("p", {}, FILTER_HELP),
    h("button", { type: "button", onclick: () => dialog.close() }, "close"),
  );
  return dialog;
}

function showProblems(parent: HTMLElement, problems: string[]): void {
  parent.replaceChildren(...problems.slice(0, 20).map((problem) => h("p", { class: "warn" }, lineOf(`not shown: ${problem}`, 400))));
  if (problems.length > 20) parent.append(h("p", { class: "warn" }, `${counted(problems.length - 20, "more problem")} of the file`));
}

/** Ask for new episodes for as long as the page is open. `added` is called after some were found. */
async function follow(list: EpisodeList, problems: HTMLElement, state: HTMLElement, added: () => void): Promise<void> {
  for (;;) {
    let count = 0;
    try {
      const found = await newEpisodes(list.all.length);
      count = found.episodes.length;
      if (count) list.add(found.episodes);
      if (count) added();
      showProblems(problems, found.problems);
      state.textContent = "following the file";
    } catch {
      state.textContent = "the server does not answer";
    }
    if (count < MANY) await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
  }
}

start();
