// The pane of one episode: its views, one of which is shown.

import { type Block, Blocks } from "./blocks.ts";
import { colourings } from "./colours.ts";
import { type ConversationBlocks, conversationBlocks, jsonDetails } from "./conversation.ts";
import type { Source, Summary } from "./data.ts";
import { counted, h, number, short } from "./dom.ts";
import { driftBlocks, driftSummary } from "./drift.ts";
import { Episode } from "./episode.ts";
import { type Place, VIEWS, type View, fragmentOf } from "./location.ts";
import { MediaLibrary } from "./media.ts";
import { promptBlocks, rawIds, rawText } from "./prompt.ts";
import { TokenView } from "./tokens.ts";
import { treeBlocks } from "./tree.ts";
import { lineOf } from "./visible_text.ts";

const COMPARED_AT_ONCE = 8;

/** Shows one place at a time. `navigate` changes the address, which shows another place. */
export class EpisodePane {
  readonly element: HTMLElement;
  private readonly library: MediaLibrary;
  private readonly head = h("div", { class: "episodehead" });
  private readonly tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the episode" });
  private readonly tools = h("div", { class: "tools" });
  private readonly scroller = h("div", { class: "scroller", id: "view", tabindex: 0, role: "tabpanel" });
  private readonly tip = h("div", { class: "tip", id: "token", role: "status", hidden: true });
  private open: Blocks[] = [];
  private episode: Episode | null = null;
  private place: Place = { episode: null, view: "conversation", leaf: null, token: null };
  private colour = "owner";
  private promptTurn = -1;
  private tokenView: { view: TokenView; blocks: Blocks } | null = null;
  private conversation: { parts: ConversationBlocks; blocks: Blocks } | null = null;
  private loading = 0;

  constructor(
    private readonly source: Source,
    private readonly all: () => Summary[],
    private readonly navigate: (place: Place) => void,
  ) {
    this.library = new MediaLibrary(source);
    for (const view of VIEWS) this.tabs.append(this.tab(view));
    this.element = h("main", { class: "episode" }, this.head, this.tabs, this.tools, this.scroller, this.tip);
    this.scroller.addEventListener("pointermove", (event) => this.onPointer(event));
    this.scroller.addEventListener("pointerleave", () => this.showSelected());
    this.scroller.addEventListener("click", (event) => this.onClick(event));
    this.showNothing();
  }

  /** Show a place. The episode is read when it is another one. */
  async show(place: Place): Promise<void> {
    const previous = this.place;
    this.place = place;
    const turn = ++this.loading;
    if (place.episode === null) {
      this.episode = null;
      this.showNothing();
      return;
    }
    if (this.episode?.header.number !== place.episode) {
      try {
        const episode = new Episode(await this.source.episode(place.episode));
        if (turn !== this.loading) return;
        this.episode = episode;
        this.promptTurn = -1;
      } catch (error) {
        if (turn === this.loading) this.showError(error);
        return;
      }
    } else if (place.view === "tokens" && previous.view === "tokens" && previous.leaf === place.leaf && this.tokenView) {
      this.selectToken(place.token);
      return;
    }
    this.draw();
  }

  /** Whether the episode of a place is shown. A place without an episode always is. */
  isShown(place: Place): boolean {
    return place.episode === (this.episode?.header.number ?? null);
  }

  // Keys.

  nextColour(by: number): void {
    if (!this.episode) return;
    const names = colourings(this.episode).map(({ name }) => name);
    this.colour = names[(names.indexOf(this.colour) + by + names.length) % names.length];
    if (this.place.view === "tokens") this.draw();
    else this.go({ view: "tokens" });
  }

  nextBranch(by: number): void {
    if (!this.episode) return;
    const leaves = this.episode.leaves();
    const next = leaves[(leaves.indexOf(this.leaf()) + by + leaves.length) % leaves.length];
    this.go({ leaf: next, token: null });
  }

  nextView(by: number): void {
    if (this.episode) this.go({ view: VIEWS[(VIEWS.indexOf(this.place.view) + by + VIEWS.length) % VIEWS.length], token: null });
  }

  setView(view: View): void {
    if (this.episode) this.go({ view, token: null });
  }

  /** Scroll to the next message, or in the token view to the next node. */
  nextMessage(by: number): void {
    const view = this.tokenView ?? this.conversation;
    if (!view) return;
    const heads = "view" in view ? view.view.blocks.flatMap((block, index) => (block.className === "nodehead" ? [index] : [])) : view.parts.heads;
    const top = this.scroller.getBoundingClientRect().top;
    const tops = heads.map((index) => view.blocks.element.children[index].getBoundingClientRect().top - top);
    const found = by > 0 ? tops.findIndex((each) => each > 8) : tops.findLastIndex((each) => each < -8);
    if (found >= 0) view.blocks.show(heads[found]).scrollIntoView({ block: "start" });
  }

  nextToken(by: number): boolean {
    if (!this.tokenView || this.place.token === null) return false;
    const last = this.tokenView.view.length - 1;
    this.go({ token: Math.max(0, Math.min(last, this.place.token + by)) });
    return true;
  }

  // Drawing.

  private leaf(): number {
    const wanted = this.place.leaf;
    if (wanted !== null && wanted < this.episode!.header.nodes.length) return this.episode!.leafBelow(wanted);
    return this.episode!.mainLeaf();
  }

  private go(change: Partial<Place>): void {
    this.navigate({ ...this.place, ...change });
  }

  private clear(): void {
    for (const blocks of this.open) blocks.close();
    this.open = [];
    this.tokenView = null;
    this.conversation = null;
    this.tip.hidden = true;
    this.scroller.replaceChildren();
    this.scroller.scrollTop = 0;
    this.tools.replaceChildren();
  }

  private showNothing(): void {
    this.clear();
    this.tabs.hidden = true;
    this.head.replaceChildren(h("h2", {}, "No episode is open"));
    this.scroller.append(h("p", { class: "note" }, "Choose an episode in the list, or press j. The key ? lists all keys."));
  }

  private showError(error: unknown): void {
    this.clear();
    this.episode = null;
    this.head.replaceChildren(h("h2", {}, `Episode ${this.place.episode} cannot be shown`));
    this.scroller.append(h("p", { class: "bad" }, lineOf(String(error), 1000)));
  }

  private draw(): void {
    const episode = this.episode!;
    this.clear();
    this.tabs.hidden = false;
    this.drawHead(episode);
    for (const tab of this.tabs.children) {
      const isShown = (tab as HTMLElement).dataset.view === this.place.view;
      tab.setAttribute("aria-selected", String(isShown));
      tab.setAttribute("tabindex", isShown ? "0" : "-1");
    }
    this.scroller.setAttribute("aria-label", this.place.view);
    const messagesOnly = episode.header.nodes.length && !episode.header.nodes.some((node) => node.tokens);
    const needsTokens = !["details", "compare", ...(messagesOnly ? ["conversation"] : [])].includes(this.place.view);
    if (needsTokens && (messagesOnly || !episode.header.nodes.length)) {
      const reason = messagesOnly ? " A chat endpoint answered it with messages." : "";
      this.scroller.append(h("p", { class: "note" }, `This episode has no tokens.${reason}`));
      return;
    }
    if (this.place.view !== "details" && this.place.view !== "compare") this.tools.append(this.branchChoice(episode));
    const views: { [view in View]: () => void } = {
      conversation: () => this.drawConversation(episode),
      tokens: () => this.drawTokens(episode),
      prompt: () => this.drawPrompt(episode),
      tree: () => this.drawTree(episode),
      drift: () => this.drawDrift(episode),
      compare: () => this.drawCompare(episode),
      details: () => this.drawDetails(episode),
    };
    views[this.place.view]();
  }

  private tab(view: View): HTMLElement {
    return h("button", { type: "button", role: "tab", "data-view": view, "aria-controls": "view", onclick: () => this.setView(view) }, view);
  }

  private drawHead({ header }: Episode): void {
    const tokens = header.nodes.reduce((sum, node) => sum + node.tokens, 0);
    const cut = header.turns.filter((turn) => turn.finish === "length").length;
    const turns = counted(header.turns.length, "turn") + (cut ? ` (${number(cut)} cut at max_tokens)` : "");
    const facts = [`environment reward ${short(header.reward)}`, turns, counted(tokens, "token")];
    if (header.group) facts.unshift(`episode ${lineOf(header.id || "(no id)", 80)}`);
    const [whole, task] = [lineOf(titleOf(header), 400), lineOf(titleOf(header), 80)];
    this.head.replaceChildren(
      h("a", { class: "back", href: "#" }, "‹ list"),
      h("h2", { title: whole }, task),
      h("span", { class: "facts" }, facts.join(" · ")),
    );
    if (header.error) this.head.append(h("p", { class: "bad error" }, lineOf(header.error, 500)));
    if (header.truncated) this.head.append(h("p", { class: "warn error" }, `truncated ${lineOf(header.truncationReason, 200)}`));
  }

  private branchChoice(episode: Episode): HTMLElement {
    const leaves = episode.leaves();
    if (leaves.length === 1) return h("span", { class: "hint" }, "1 branch");
    const select = h("select", { id: "branch", onchange: () => this.go({ leaf: Number(select.value), token: null }) });
    leaves.forEach((leaf, index) => {
      const tokens = episode.path(leaf).at(-1)!.end;
      select.append(h("option", { value: leaf, selected: leaf === this.leaf() }, `branch ${index + 1} of ${leaves.length}: node ${leaf}, ${counted(tokens, "token")}`));
    });
    return h("label", {}, h("span", { class: "hint" }, "branch "), select);
  }

  private showBlocks(blocks: Block[], scroller = this.scroller): Blocks {
    const shown = new Blocks(scroller, blocks);
    this.open.push(shown);
    scroller.append(shown.element);
    shown.fillVisible();
    return shown;
  }

  private drawConversation(episode: Episode): void {
    const parts = conversationBlocks(episode, this.leaf(), this.library, (token) => this.go({ view: "tokens", leaf: this.leaf(), token }));
    this.conversation = { parts, blocks: this.showBlocks(parts.blocks) };
    const { token } = this.place;
    if (token === null) return;
    const found = parts.heads.findLast((index) => parts.firstToken[index] <= token);
    if (found !== undefined) this.conversation.blocks.show(found).scrollIntoView({ block: "start" });
  }

  private drawTokens(episode: Episode): void {
    const all = colourings(episode);
    const colouring = all.find(({ name }) => name === this.colour) ?? all[0];
    const select = h("select", {
      id: "colour",
      onchange: () => {
        this.colour = select.value;
        this.draw();
      },
    });
    for (const { name, label } of all) select.append(h("option", { value: name, selected: name === colouring.name }, lineOf(label, 40)));
    const legend = h("span", { class: "legend" });
    for (const { className, text } of colouring.legend()) legend.append(h("span", { class: `t ${className}` }, text));
    this.tools.append(h("label", {}, h("span", { class: "hint" }, "colour "), select), legend);
    if (!episode.hasTexts) this.tools.append(h("span", { class: "hint" }, "ids only: --model DIR adds the texts"));
    const view = new TokenView(episode, this.leaf(), this.library, colouring);
    this.tokenView = { view, blocks: this.showBlocks(view.blocks) };
    this.selectToken(this.place.token);
  }

  private selectToken(token: number | null): void {
    const { view, blocks } = this.tokenView!;
    for (const element of this.scroller.querySelectorAll(".chosen")) element.classList.remove("chosen");
    if (token === null || token >= view.length) {
      this.tip.hidden = true;
      return;
    }
    const block = blocks.show(view.blockOf(token));
    const elements = [...block.querySelectorAll<HTMLElement>("[data-token]")];
    const element = elements.findLast((each) => Number(each.dataset.token) <= token) ?? block;
    element.classList.add("chosen");
    const bounds = element.getBoundingClientRect();
    const visible = this.scroller.getBoundingClientRect();
    if (bounds.top < visible.top || bounds.bottom > visible.bottom) element.scrollIntoView({ block: "center" });
    this.describe(element);
  }

  private describe(element: HTMLElement): void {
    if (!this.tokenView) return;
    const start = Number(element.dataset.token);
    const end = Number(element.dataset.end ?? start + 1);
    this.tip.replaceChildren(this.tokenView.view.describe(start, end));
    this.tip.hidden = false;
  }

  private tokenElement(event: Event): HTMLElement | null {
    return this.tokenView ? (event.target as HTMLElement).closest<HTMLElement>(".t[data-token]") : null;
  }

  private onPointer(event: PointerEvent): void {
    const element = this.tokenElement(event);
    if (element && event.pointerType !== "touch") this.describe(element);
  }

  private onClick(event: Event): void {
    const element = this.tokenElement(event);
    if (element) this.go({ leaf: this.leaf(), token: Number(element.dataset.token) });
  }

  private showSelected(): void {
    if (!this.tokenView) return;
    const chosen = this.scroller.querySelector<HTMLElement>(".chosen");
    if (chosen) this.describe(chosen);
    else this.tip.hidden = true;
  }

  private drawPrompt(episode: Episode): void {
    const path = episode.path(this.leaf());
    const ends = path.filter(({ node }) => episode.turnOf.has(node));
    const whole = path.at(-1)!.end;
    const end = this.promptTurn >= 0 && this.promptTurn < ends.length ? ends[this.promptTurn].start : whole;
    const select = h("select", {
      id: "until",
      onchange: () => {
        this.promptTurn = Number(select.value);
        this.draw();
      },
    });
    select.append(h("option", { value: -1 }, `whole branch, ${counted(whole, "token")}`));
    ends.forEach((at, index) => select.append(h("option", { value: index, selected: index === this.promptTurn }, `prompt of turn ${index + 1}, ${counted(at.start, "token")}`)));
    this.tools.append(h("label", {}, h("span", { class: "hint" }, "show "), select));
    this.tools.append(copyButton("copy ids", () => JSON.stringify(rawIds(episode, path, end))));
    if (episode.hasTexts) this.tools.append(copyButton("copy text", () => rawText(episode, path, end)));
    else this.tools.append(h("span", { class: "hint" }, "ids only: --model DIR adds the texts"));
    this.showBlocks(promptBlocks(episode, path, end));
  }

  private drawTree(episode: Episode): void {
    const onPath = new Set(episode.path(this.leaf()).map(({ node }) => node));
    const open = (node: number): void => {
      const leaf = onPath.has(node) ? this.leaf() : episode.leafBelow(node);
      this.go({ view: "tokens", leaf, token: episode.path(leaf).find((at) => at.node === node)!.start });
    };
    this.showBlocks(treeBlocks(episode, onPath, open));
  }

  private drawDrift(episode: Episode): void {
    const path = episode.path(this.leaf());
    const drift = episode.driftOf(this.leaf());
    this.scroller.append(h("p", { class: "note" }, driftSummary(drift, path.at(-1)!.end)));
    if (drift) this.showBlocks(driftBlocks(episode, path, drift, (token) => this.go({ view: "tokens", leaf: this.leaf(), token })));
  }

  private drawCompare({ header }: Episode): void {
    const group = this.all().filter((each) => header.group !== "" && each.group === header.group);
    if (group.length < 2) {
      this.scroller.append(h("p", { class: "note" }, "No other episode is in the group of this one."));
      return;
    }
    this.tools.append(h("span", { class: "hint" }, `${counted(group.length, "episode")} of group ${lineOf(header.group, 60)}`));
    const columns = h("div", { class: "columns" });
    this.scroller.append(columns);
    const own = group.findIndex(({ number }) => number === header.number);
    const ordered = [group[own], ...group.slice(0, own), ...group.slice(own + 1)];
    const add = (count: number): void => {
      for (const each of ordered.splice(0, count)) columns.append(this.column(each));
      if (!ordered.length) return;
      const more = h("button", { type: "button", class: "link more", onclick: () => (more.remove(), add(COMPARED_AT_ONCE)) }, `show ${counted(Math.min(ordered.length, COMPARED_AT_ONCE), "more episode")}`);
      columns.append(more);
    };
    add(COMPARED_AT_ONCE);
  }

  private column(summary: Summary): HTMLElement {
    const href = fragmentOf({ episode: summary.number, view: "conversation", leaf: null, token: null });
    const body = h("div", { class: "columnbody", tabindex: 0, role: "region", "aria-label": `Episode ${lineOf(summary.id, 80)}` });
    const head = h(
      "div",
      { class: "columnhead" },
      h("a", { href }, lineOf(summary.id || "(no id)", 60)),
      h("span", { class: "chip reward" }, `environment reward ${short(summary.reward)}`),
      h("span", { class: `chip status-${summary.status}` }, summary.status),
      h("span", { class: "hint" }, `${counted(summary.turns, "turn")}${summary.cut ? ` (${number(summary.cut)} cut)` : ""}, ${counted(summary.tokens, "token")}`),
    );
    this.source.episode(summary.number).then(
      (payload) => {
        const episode = new Episode(payload);
        const leaf = episode.mainLeaf();
        if (!payload.header.nodes.length) body.append(h("p", { class: "note" }, "This episode has no tokens."));
        else if (body.isConnected) {
          const openToken = (token: number): void => this.navigate({ episode: summary.number, view: "tokens", leaf, token });
          this.showBlocks(conversationBlocks(episode, leaf, this.library, openToken).blocks, body);
        }
      },
      (error: unknown) => body.append(h("p", { class: "bad" }, lineOf(String(error), 400))),
    );
    return h("section", { class: "column" }, head, body);
  }

  private drawDetails({ header }: Episode): void {
    const facts: [string, string][] = [
      ["episode", lineOf(header.id, 400)],
      ["group", lineOf(header.group || "–", 400)],
      ["seed", header.seed],
      ["environment reward", header.reward === null ? short(null) : String(header.reward)],
      ["ended", header.error ? "error" : header.truncated ? `truncated ${lineOf(header.truncationReason, 200)}` : header.done ? "done" : "not ended"],
      ["started", header.startedAt ? new Date(header.startedAt * 1000).toISOString() : "–"],
      ["duration", header.seconds ? `${short(header.seconds)} s` : "–"],
      ["nodes, forks", `${number(header.nodes.length)}, ${number(header.forks)}`],
    ];
    if (header.error) facts.push(["error", lineOf(header.error, 4000)]);
    const list = h("dl", { class: "facts" });
    for (const [name, value] of facts) list.append(h("dt", {}, name), h("dd", {}, value));
    this.scroller.append(list, jsonDetails("metrics", header.metrics), jsonDetails("provenance", header.provenance));
    header.turns.forEach((turn, index) => this.scroller.append(jsonDetails(`turn ${index + 1}: message and info`, { message: turn.message, info: turn.info })));
    for (const details of this.scroller.querySelectorAll("details")) details.open = details.textContent !== null && header.turns.length < 20;
  }
}

/** The task of an episode, which names its group; the id of an episode without a group. */
export function titleOf({ group, id }: { group: string; id: string }): string {
  return group || id || "(no id)";
}

function copyButton(label: string, text: () => string): HTMLElement {
  const button = h("button", {
    type: "button",
    class: "small",
    onclick: () => {
      navigator.clipboard.writeText(text()).then(
        () => (button.textContent = "copied"),
        () => (button.textContent = "the browser refused"),
      );
    },
  });
  button.textContent = label;
  return button;
}
