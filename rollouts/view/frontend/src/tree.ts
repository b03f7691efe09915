// The token tree of an episode: a line for each node, indented only after a fork.

import type { Block } from "./blocks.ts";
import { roleClass } from "./colours.ts";
import { turnChips } from "./conversation.ts";
import type { Json, Message } from "./data.ts";
import { counted, h } from "./dom.ts";
import { type Episode, roleOf } from "./episode.ts";
import { lineOf } from "./visible_text.ts";

const INDENT = 18;
/** Deeper forks are not indented further, so that each line keeps its width. */
const MAX_INDENTS = 12;
const LINE_HEIGHT = 32;

/** A node, how many forks are above it, and whether it begins a branch of a fork. */
interface TreeLine {
  node: number;
  forks: number;
  begins: boolean;
}

/** A block for each node, in the order of the branches. `open` is called with a node. */
export function treeBlocks(episode: Episode, onPath: Set<number>, open: (node: number) => void): Block[] {
  return treeLines(episode).map(({ node, forks, begins }) => ({
    className: begins ? "fork" : "treeline",
    estimate: LINE_HEIGHT,
    fill: (parent) => {
      parent.style.paddingLeft = `${Math.min(forks, MAX_INDENTS) * INDENT}px`;
      parent.append(nodeLine(episode, node, onPath, open, forks > MAX_INDENTS && begins ? `fork ${forks}` : ""));
    },
  }));
}

function treeLines(episode: Episode): TreeLine[] {
  const lines: TreeLine[] = [];
  const waiting = branchesBelow(episode, -1, 0);
  while (waiting.length) {
    const line = waiting.pop()!;
    lines.push(line);
    waiting.push(...branchesBelow(episode, line.node, line.forks));
  }
  return lines;
}

/** The children of a node, the last one first. */
function branchesBelow(episode: Episode, node: number, forks: number): TreeLine[] {
  const children = episode.children.get(node) ?? [];
  const begins = children.length > 1;
  return children.map((child) => ({ node: child, forks: forks + Number(begins), begins })).reverse();
}

function nodeLine(
  episode: Episode,
  node: number,
  onPath: Set<number>,
  open: (node: number) => void,
  note: string,
): HTMLElement {
  const { tokens, messages, media } = episode.header.nodes[node];
  const turn = episode.turnOf.get(node);
  const all = turn ? [...messages, turn.message] : messages;
  const roles = all.map((message) => roleOf(message, "?"));
  const line = h(
    "button",
    { type: "button", class: `node ${onPath.has(node) ? "onpath" : ""}`, onclick: () => open(node) },
    h("span", { class: "index" }, String(node)),
    h("span", { class: `role ${roleClass(roles.at(-1) ?? "")}` }, lineOf(roles.join(" + ") || "prompt", 60)),
    h("span", { class: "count" }, counted(tokens, "token")),
    media.length > 0 && h("span", { class: "chip" }, counted(media.length, "medium", "media")),
  );
  if (note) line.append(h("span", { class: "chip" }, note));
  if (turn?.agent) line.append(h("span", { class: "chip" }, `agent ${lineOf(turn.agent, 40)}`));
  if (turn) line.append(...turnChips(episode, turn, { node, start: 0, end: tokens, column: 0 }));
  line.append(h("span", { class: "snippet" }, lineOf(all.map(snippet).join(" "), 120)));
  return line;
}

function snippet(message: Message): string {
  const content = message.content;
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map(partSnippet).join(" ") : "";
}

function partSnippet(part: Json): string {
  if (typeof part === "string") return part;
  if (part === null || typeof part !== "object" || Array.isArray(part)) return "";
  return typeof part.text === "string" ? part.text : typeof part.type === "string" ? `[${part.type}]` : "";
}
