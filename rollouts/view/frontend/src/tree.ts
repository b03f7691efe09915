// The token tree of an episode: a line for each node, indented only after a fork.

import { roleClass } from "./colours.ts";
import { turnChips } from "./conversation.ts";
import type { Json, Message } from "./data.ts";
import { counted, h } from "./dom.ts";
import { type Episode, roleOf } from "./episode.ts";
import { lineOf } from "./visible_text.ts";

/** The tree as nested lists. `open` is called with a node. */
export function treeList(episode: Episode, onPath: Set<number>, open: (node: number) => void): HTMLElement {
  const root = h("ul", { class: "tree" });
  const waiting: [number[], HTMLElement][] = [[episode.children.get(-1) ?? [], root]];
  while (waiting.length) {
    const [nodes, list] = waiting.pop()!;
    for (const first of nodes) {
      let [node, parent] = [first, list];
      if (nodes.length > 1) {
        parent = h("ul", {});
        list.append(h("li", { class: "fork" }, parent));
      }
      for (;;) {
        parent.append(h("li", {}, nodeLine(episode, node, onPath, open)));
        const children = episode.children.get(node) ?? [];
        if (children.length !== 1) {
          waiting.push([children, parent]);
          break;
        }
        node = children[0];
      }
    }
  }
  return root;
}

function nodeLine(episode: Episode, node: number, onPath: Set<number>, open: (node: number) => void): HTMLElement {
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
