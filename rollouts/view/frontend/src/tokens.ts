// The tokens of a branch, coloured; the placeholder of a medium is one picture or player.

import type { Block } from "./blocks.ts";
import { type Colouring, roleClass } from "./colours.ts";
import { turnChips } from "./conversation.ts";
import { counted, h, number, short } from "./dom.ts";
import { type Cell, type Episode, type PathNode, type PlacedMedia, roleOf } from "./episode.ts";
import { type MediaLibrary, mediaFigure } from "./media.ts";
import { appendText, lineOf } from "./visible_text.ts";

const MAX_TOKENS = 240;
const MIN_TOKENS = 120;
const TOKENS_PER_LINE = 16;
const LINE_HEIGHT = 24;

/** A block of tokens `start` to `end` of the branch. */
export interface TokenBlock extends Block {
  start: number;
  end: number;
}

export class TokenView {
  readonly path: PathNode[];
  readonly length: number;
  readonly blocks: TokenBlock[] = [];
  private readonly media: PlacedMedia[];

  constructor(
    readonly episode: Episode,
    leaf: number,
    private readonly library: MediaLibrary,
    private readonly colouring: Colouring,
  ) {
    this.path = episode.path(leaf);
    this.length = this.path.at(-1)?.end ?? 0;
    this.media = episode.media(this.path);
    for (const at of this.path) this.addNode(at);
  }

  /** The block that holds a token. */
  blockOf(token: number): number {
    return this.blocks.findIndex((block) => block.start <= token && token < block.end);
  }

  nodeOf(token: number): PathNode {
    return this.path.find((at) => at.start <= token && token < at.end) ?? this.path[this.path.length - 1];
  }

  private addNode(at: PathNode): void {
    const head = { className: "nodehead", estimate: 34, start: at.start, end: at.start };
    this.blocks.push({ ...head, fill: (parent) => this.fillHead(parent, at) });
    let position = at.start;
    for (const medium of this.media.filter(({ node }) => node === at.node)) {
      this.addTokens(at, position, medium.start);
      this.blocks.push({
        className: "tokenmedia",
        estimate: 130,
        start: medium.start,
        end: medium.end,
        fill: (parent) => {
          const figure = mediaFigure(this.library, medium.reference, medium.reference, medium);
          figure.dataset.token = String(medium.start);
          parent.append(figure);
        },
      });
      position = medium.end;
    }
    this.addTokens(at, position, at.end);
  }

  private addTokens(at: PathNode, from: number, to: number): void {
    for (let start = from; start < to; ) {
      const end = this.breakAfter(at, start, to);
      const [first, last] = [start, end];
      this.blocks.push({
        className: "tokens",
        estimate: Math.ceil((last - first) / TOKENS_PER_LINE) * LINE_HEIGHT,
        start: first,
        end: last,
        fill: (parent) => this.fillTokens(parent, at, first, last),
      });
      start = end;
    }
  }

  /** Where a block that begins with token `start` ends: after a line of text, and not inside a character. */
  private breakAfter(at: PathNode, start: number, to: number): number {
    if (to - start <= MAX_TOKENS) return to;
    const shift = at.start - at.column;
    const cells = this.episode.cells(start + MIN_TOKENS - shift, start + MAX_TOKENS - shift, shift);
    const line = cells.find((cell) => cell.text.endsWith("\n"));
    return (line ?? cells[cells.length - 1]).end;
  }

  private fillHead(parent: HTMLElement, at: PathNode): void {
    const node = this.episode.header.nodes[at.node];
    const turn = this.episode.turnOf.get(at.node);
    const roles = turn ? [roleOf(turn.message, "assistant")] : node.messages.map((message) => roleOf(message, "?"));
    parent.append(
      h("span", { class: `role ${roleClass(roles.at(-1) ?? "")}` }, lineOf(roles.join(" + ") || "prompt", 80)),
      h("span", {}, `node ${at.node}, ${counted(at.end - at.start, "token")} from ${number(at.start)}`),
    );
    if (turn) parent.append(...turnChips(this.episode, turn, at));
  }

  private fillTokens(parent: HTMLElement, at: PathNode, start: number, end: number): void {
    const shift = at.start - at.column;
    for (const cell of this.episode.cells(start - shift, end - shift, shift)) {
      const element = document.createElement("span");
      element.className = `t ${this.colouring.classOf(this.path, at, cell.start - shift)}${cell.added ? " added" : ""}`;
      element.dataset.token = String(cell.start);
      if (cell.end > cell.start + 1) element.dataset.end = String(cell.end);
      appendCell(element, cell, this.episode.hasTexts);
      parent.append(element);
    }
  }

  /** What is known about the tokens of a cell, one line each. */
  describe(start: number, end: number): HTMLElement {
    const at = this.nodeOf(start);
    const column = start - at.start + at.column;
    const { episode } = this;
    const rows: [string, string][] = [];
    const ids = Array.from({ length: Math.min(end - start, 8) }, (_, offset) => episode.id(column + offset));
    rows.push([ids.length > 1 ? "ids" : "id", ids.join(" ")]);
    if (episode.hasTexts) {
      const text = episode.cells(column, column + end - start, 0).map((cell) => cell.text).join("");
      rows.push(["text", lineOf(JSON.stringify(text), 120)]);
    }
    rows.push(["position", `${number(start)} of the branch, ${number(start - at.start)} of node ${at.node}`]);
    rows.push(["owner", lineOf(episode.role(this.path, at, column), 40)]);
    const content = episode.isContent(column);
    rows.push(["mask", `${episode.isSampled(column) ? "sampled" : "not sampled"}${content === null ? "" : content ? ", content" : ", scaffold"}`]);
    if (episode.isSampled(column)) {
      const logprob = episode.logprob(column);
      rows.push(["weights", lineOf(episode.version(at.node, column) || "not known", 60)]);
      rows.push(["log-prob", `${short(logprob, 6)} (p = ${short(Math.exp(logprob), 4)})`]);
      if (!Number.isNaN(episode.mismatch(column))) rows.push(["mismatch", short(episode.mismatch(column), 3)]);
    }
    for (const name of episode.extras) {
      const value = episode.extra(name, column);
      if (!Number.isNaN(value)) rows.push([lineOf(name, 30), short(value, 6)]);
    }
    const list = h("dl", {});
    for (const [name, value] of rows) list.append(h("dt", {}, name), h("dd", {}, value));
    const tables = Object.keys(episode.header.likeliest ?? {}).map((of) => this.likeliest(of, at.node, column));
    return h("div", {}, list, ...tables);
  }

  private likeliest(of: string, node: number, column: number): HTMLElement | null {
    const candidates = this.episode.likeliest(of, node, column);
    if (!candidates.length) return null;
    const { hasTexts } = this.episode;
    const rows = candidates.map(({ id, text, logprob, isOwn }) =>
      h(
        "tr",
        {},
        h("td", {}, isOwn ? "●" : ""),
        hasTexts && h("td", {}, lineOf(JSON.stringify(text), 60)),
        ...[String(id), short(logprob, 4), short(Math.exp(logprob), 3)].map((value) => h("td", { class: "num" }, value)),
      ),
    );
    const names = ["id", "log-prob", "p"].map((name) => h("th", { class: "num" }, name));
    const caption = h("caption", {}, `likeliest tokens of the ${of} (● this token)`);
    return h("table", { class: "likeliest" }, caption, h("tr", {}, h("td", { colspan: hasTexts ? 2 : 1 }), ...names), ...rows);
  }
}

export function appendCell(element: HTMLElement, cell: Cell, hasTexts: boolean): void {
  if (!hasTexts) {
    element.append(cell.text);
    element.classList.add("idonly");
  } else if (cell.text === "") {
    element.append("∅");
  } else {
    appendText(element, cell.text, { symbols: true });
  }
}
