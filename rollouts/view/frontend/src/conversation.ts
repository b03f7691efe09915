// The messages of a branch, as blocks: texts, media, reasoning, tool calls, and how each turn ended.

import type { Block } from "./blocks.ts";
import { roleClass } from "./colours.ts";
import type { Json, MediaReference, MediumName, Message, ToolCallAttempt, Turn } from "./data.ts";
import { counted, h, number, short } from "./dom.ts";
import { type Episode, type PathNode, roleOf } from "./episode.ts";
import { type MediaLibrary, mediaFigure } from "./media.ts";
import { appendText, lineOf, textChunks } from "./visible_text.ts";

/** What opens a token in the token view. */
export type OpenToken = (token: number) => void;

/** Each is a part of the types of parts with such a medium: `image_url`, `input_audio`. */
const MODALITIES = ["image", "video", "audio"];
const LINE_HEIGHT = 21;
const CHARACTERS_PER_LINE = 90;

/** Blocks, the token that each one's node begins with, and which blocks begin a message. */
export interface ConversationBlocks {
  blocks: Block[];
  firstToken: number[];
  heads: number[];
}

export function conversationBlocks(episode: Episode, leaf: number, library: MediaLibrary, openToken: OpenToken): ConversationBlocks {
  const writer = new Writer(episode, library, openToken);
  for (const at of episode.path(leaf)) writer.node(at);
  return writer.result;
}

class Writer {
  readonly result: ConversationBlocks = { blocks: [], firstToken: [], heads: [] };
  private role = "";
  private start = 0;

  constructor(
    private readonly episode: Episode,
    private readonly library: MediaLibrary,
    private readonly openToken: OpenToken,
  ) {}

  node(at: PathNode): void {
    this.start = at.start;
    const node = this.episode.header.nodes[at.node];
    const turn = this.episode.turnOf.get(at.node);
    const media = node.media.map((reference) => ({ reference, used: false }));
    const texts = node.messages.length ? node.messages : turn ? [] : [null];
    for (const message of texts) {
      if (message === null) this.missingMessages(at);
      else this.message(message, at, media);
    }
    for (const { reference } of media.filter(({ used }) => !used)) this.figure(reference, reference, at);
    if (turn) this.turn(turn, at);
  }

  private missingMessages(at: PathNode): void {
    this.role = "other";
    this.head(at, "prompt", null);
    if (this.episode.hasTexts) this.text(this.decoded(at), "text");
    else this.push("note", 30, (parent) => parent.append(`${counted(at.end - at.start, "token")}; the messages of this prompt were not recorded`));
  }

  private decoded(at: PathNode): string {
    return this.episode
      .cells(at.column, at.column + at.end - at.start, 0)
      .map((cell) => cell.text)
      .join("");
  }

  private message(message: Message, at: PathNode, media: { reference: MediaReference; used: boolean }[]): void {
    this.role = roleOf(message, "other");
    this.head(at, this.role, null, message);
    this.content(message, (name) => {
      const found = media.find(({ reference, used }) => !used && reference.digest === name.digest && reference.modality === name.modality);
      if (found) found.used = true;
      this.figure(name, found?.reference ?? null, at);
    });
    this.recordedCalls(message, null);
  }

  private turn(turn: Turn, at: PathNode): void {
    this.role = roleOf(turn.message, "assistant");
    this.head(at, this.role, turn);
    this.content(turn.message, (name) => this.figure(name, null, at));
    this.recordedCalls(turn.message, turn);
    const info = Object.keys(turn.info);
    if (info.length) this.push("info", 28, (parent) => parent.append(jsonDetails(`info: ${info.join(", ")}`, turn.info)));
  }

  private head(at: PathNode, role: string, turn: Turn | null, message?: Message): void {
    this.result.heads.push(this.result.blocks.length);
    this.push("head", 34, (parent) => {
      const name = [message?.name, message?.tool_call_id].filter((value) => typeof value === "string").join(" ");
      parent.append(h("span", { class: "role" }, lineOf(role, 40)));
      if (turn?.agent) parent.append(h("span", { class: "chip" }, `agent ${lineOf(turn.agent, 60)}`));
      if (name) parent.append(h("span", { class: "chip" }, lineOf(name, 80)));
      if (at.end > at.start) parent.append(
        h("button", { type: "button", class: "link", title: "Open in the token view", onclick: () => this.openToken(at.start) }, `tokens ${number(at.start)}–${number(Math.max(at.end - 1, at.start))}`),
      );
      if (turn) parent.append(...turnChips(this.episode, turn, at));
    });
  }

  private content(message: Message, figure: (name: MediumName) => void): void {
    const reasoning = message.reasoning_content;
    if (typeof reasoning === "string" && reasoning) {
      this.push("label", 24, (parent) => parent.append("reasoning"));
      this.text(reasoning, "text reasoning");
    }
    const content = message.content;
    if (typeof content === "string") {
      this.text(content, "text");
      return;
    }
    if (content === null || content === undefined) return;
    for (const part of Array.isArray(content) ? content : [content]) this.part(part, figure);
  }

  private part(part: Json, figure: (name: MediumName) => void): void {
    const name = mediumName(part);
    if (name !== null) figure(name);
    else if (typeof part === "string") this.text(part, "text");
    else if (isMapping(part) && typeof part.text === "string") this.text(part.text, "text");
    else this.text(JSON.stringify(part, null, 1), "text json");
  }

  private recordedCalls(message: Message, turn: Turn | null): void {
    const attempts = turn?.calls;
    if (attempts?.length) {
      for (const attempt of attempts) this.call(attempt);
      return;
    }
    for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : []) {
      const called = isMapping(call) && isMapping(call.function) ? call.function : null;
      const name = typeof called?.name === "string" ? called.name : null;
      this.call({ name, arguments: called?.arguments ?? call, status: "recorded", raw: "", span: null });
    }
  }

  private call(attempt: ToolCallAttempt): void {
    const text = typeof attempt.arguments === "string" ? attempt.arguments : JSON.stringify(attempt.arguments, null, 1);
    this.push("callhead", 28, (parent) => {
      const status = isCall(attempt) ? "good" : attempt.status === "recorded" ? "" : "bad";
      parent.append(
        h("span", { class: "label" }, "tool call"),
        h("code", {}, attempt.name === null ? "(no name)" : lineOf(attempt.name, 120)),
        h("span", { class: `chip ${status}` }, lineOf(attempt.status.replaceAll("_", " "), 200)),
      );
    });
    this.text(attempt.arguments === null ? attempt.raw : text, "text json");
  }

  private figure(name: MediumName, reference: MediaReference | null, at: PathNode): void {
    const start = reference ? at.start + reference.offset : 0;
    const tokens = reference?.length ? { start, end: start + reference.length } : null;
    this.push("figure", 150, (parent) => parent.append(mediaFigure(this.library, name, reference, tokens)));
  }

  private text(text: string, className: string): void {
    for (const chunk of textChunks(text)) {
      const lines = chunk.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / CHARACTERS_PER_LINE), 0);
      this.push(className, lines * LINE_HEIGHT, (parent) => appendText(parent, chunk));
    }
  }

  private push(className: string, estimate: number, fill: (parent: HTMLElement) => void): void {
    this.result.blocks.push({ className: `message ${roleClass(this.role)} ${className}`, estimate, fill });
    this.result.firstToken.push(this.start);
  }
}

function isCall(attempt: ToolCallAttempt): boolean {
  return attempt.status === "ok" || attempt.status === "noncanonical";
}

export function turnChips(episode: Episode, turn: Turn, at: PathNode): HTMLElement[] {
  const versions = [...new Set(episode.header.nodes[at.node].spans.map(([version]) => version))];
  const chips = [chip(turn.finish, turn.finish === "stop" ? "" : "warn"), chip(`reward ${short(turn.reward)}`, "reward")];
  if (versions.length) chips.push(chip(`weights ${versions.join(", ")}`, ""));
  if (turn.seconds) chips.push(chip(`${short(turn.seconds, 3)} s`, ""));
  const failed = turn.calls?.filter((call) => !isCall(call)).length ?? 0;
  if (failed) chips.push(chip(`${counted(failed, "invalid tool call")}`, "bad"));
  return chips;
}

export function chip(text: string, className: string): HTMLElement {
  return h("span", { class: `chip ${className}` }, lineOf(text, 120));
}

export function jsonDetails(title: string, value: Json): HTMLElement {
  const body = h("pre", { class: "json" });
  const details = h(
    "details",
    {
      ontoggle: () => {
        if (details.open && !body.firstChild) appendText(body, JSON.stringify(value, null, 2));
      },
    },
    h("summary", {}, lineOf(title, 160)),
    body,
  );
  return details;
}

/** The name of the source that a part of a message holds, under whichever key. */
function mediumName(part: Json): MediumName | null {
  if (!isMapping(part)) return null;
  for (const [key, value] of [["image", part] as const, ...Object.entries(part)]) {
    if (isMapping(value) && typeof value.$source === "string") {
      return { modality: MODALITIES.find((modality) => `${part.type ?? key}`.includes(modality)) ?? "image", digest: value.$source };
    }
  }
  return null;
}

function isMapping(value: Json | undefined): value is { [key: string]: Json } {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
