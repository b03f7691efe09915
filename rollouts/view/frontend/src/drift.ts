// Where the tokens of a branch differ from a full render of its messages.

import type { Block } from "./blocks.ts";
import type { Difference, Drift } from "./data.ts";
import { counted, h, number } from "./dom.ts";
import type { Cell, Episode, PathNode } from "./episode.ts";
import { appendCell } from "./tokens.ts";
import { lineOf } from "./visible_text.ts";

const CONTEXT = 24;
const MAX_SHOWN = 2000;

/** What the comparison found, in a sentence. */
export function driftSummary(drift: Drift | null, length: number): string {
  if (drift === null) return "Not compared: a full render needs the model. Write this page with --model DIR, and --tools FILE if the episodes had tools.";
  if (drift.error) return `The messages of this branch cannot be rendered: ${lineOf(drift.error, 600)}`;
  const end = drift.extraEnd ? ` The template prints ${counted(drift.extraEnd, "more token")} after the last turn.` : "";
  if (!drift.differences.length) return `A full render of the messages gives exactly these ${number(length)} tokens.${end}`;
  const places = counted(drift.differences.length, "place");
  return `A full render of the messages has ${counted(drift.rendered, "token")} and differs from the ${number(length)} tokens of the branch in ${places}.${end}`;
}

export function driftBlocks(episode: Episode, path: PathNode[], drift: Drift, openToken: (token: number) => void): Block[] {
  const length = path.at(-1)?.end ?? 0;
  return drift.differences.map((difference) => ({
    className: "hunk",
    estimate: 120,
    fill: (parent) => fillHunk(parent, episode, path, length, difference, openToken),
  }));
}

function fillHunk(
  parent: HTMLElement,
  episode: Episode,
  path: PathNode[],
  length: number,
  difference: Difference,
  openToken: (token: number) => void,
): void {
  const { start, end, ids } = difference;
  const before = branchCells(episode, path, Math.max(0, start - CONTEXT), start);
  const after = branchCells(episode, path, end, Math.min(length, end + CONTEXT));
  const sampled = branchCells(episode, path, start, Math.min(end, start + MAX_SHOWN));
  const rendered = episode.cellsOfIds(ids.slice(0, MAX_SHOWN));
  parent.append(
    h("button", { type: "button", class: "link", onclick: () => openToken(start) }, `token ${number(start)}`),
    difference.coarse ? h("p", { class: "warn" }, "This part is too long to be compared token by token: some of its tokens may be equal.") : "",
    side(episode, `this branch: ${counted(end - start, "token")}`, "removed", before, sampled, after, end - start),
    side(episode, `full render: ${counted(ids.length, "token")}`, "inserted", before, rendered, after, ids.length),
  );
}

function side(episode: Episode, title: string, className: string, before: Cell[], changed: Cell[], after: Cell[], count: number): HTMLElement {
  const text = h("div", { class: "hunktext" });
  const append = (cells: Cell[], kind: string): void => {
    for (const cell of cells) {
      const element = h("span", { class: `t ${kind}${cell.added ? " added" : ""}` });
      appendCell(element, cell, episode.hasTexts);
      text.append(element);
    }
  };
  append(before, "context");
  append(changed, className);
  if (count > MAX_SHOWN) text.append(h("span", { class: "warn" }, ` ${counted(count - MAX_SHOWN, "more token")} not shown `));
  append(after, "context");
  return h("section", { class: "side" }, h("h4", {}, title), text);
}

function branchCells(episode: Episode, path: PathNode[], start: number, end: number): Cell[] {
  return path.flatMap((at) => {
    const [first, last] = [Math.max(start, at.start), Math.min(end, at.end)];
    const shift = at.start - at.column;
    return first < last ? episode.cells(first - shift, last - shift, shift) : [];
  });
}
