// The raw text of a branch, or of the prompt of one of its turns, as the engine saw it.

import type { Block } from "./blocks.ts";
import { number } from "./dom.ts";
import type { Episode, PathNode } from "./episode.ts";
import { appendText } from "./visible_text.ts";

const TOKENS_PER_BLOCK = 600;
const LINE_HEIGHT = 21;

/** Blocks of the first `end` tokens of a path. */
export function promptBlocks(episode: Episode, path: PathNode[], end: number): Block[] {
  const blocks: Block[] = [];
  const media = episode.media(path);
  for (const at of path) {
    let position = at.start;
    const stops = media.filter(({ node, start }) => node === at.node && start < end);
    for (const medium of [...stops, null]) {
      const until = Math.min(medium ? medium.start : at.end, end);
      for (; position < until; position = Math.min(position + TOKENS_PER_BLOCK, until)) {
        blocks.push(textBlock(episode, at, position, Math.min(position + TOKENS_PER_BLOCK, until)));
      }
      if (medium) {
        const count = medium.end - medium.start;
        const text = `${firstText(episode, at, medium.start)} × ${number(count)}`;
        blocks.push({ className: "raw rawmedia", estimate: LINE_HEIGHT, fill: (parent) => appendText(parent, text) });
        position = medium.end;
      }
    }
  }
  return blocks;
}

function textBlock(episode: Episode, at: PathNode, start: number, end: number): Block {
  const shift = at.start - at.column;
  return {
    className: "raw",
    estimate: Math.ceil((end - start) / 16) * LINE_HEIGHT,
    fill: (parent) => {
      let run = "";
      const flush = (): void => {
        appendText(parent, run);
        run = "";
      };
      for (const cell of episode.cells(start - shift, end - shift, shift)) {
        if (!cell.added) {
          run += episode.hasTexts ? cell.text : `${cell.text} `;
          continue;
        }
        flush();
        const control = document.createElement("span");
        control.className = "control";
        appendText(control, cell.text);
        parent.append(control);
      }
      flush();
    },
  };
}

function firstText(episode: Episode, at: PathNode, start: number): string {
  const column = start - at.start + at.column;
  return episode.cells(column, column + 1, 0)[0]?.text ?? "";
}

export function rawText(episode: Episode, path: PathNode[], end: number): string {
  return path
    .map((at) => {
      const last = Math.min(at.end, end) - at.start;
      return last > 0 ? episode.cells(at.column, at.column + last, 0).map((cell) => cell.text).join("") : "";
    })
    .join("");
}

export function rawIds(episode: Episode, path: PathNode[], end: number): number[] {
  const ids: number[] = [];
  for (const at of path) {
    for (let position = at.start; position < Math.min(at.end, end); position++) ids.push(episode.id(position - at.start + at.column));
  }
  return ids;
}
