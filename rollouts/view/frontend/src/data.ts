// The data of the page as rollouts/view/episode_data.py writes them, and the two places that they come from.

import { messageTexts } from "./message_texts.ts";

/** A line of the list of episodes. */
export interface Summary {
  number: number;
  id: string;
  group: string;
  /** The environment reward; null if the sum over the turns is not finite. */
  reward: number | null;
  turns: number;
  /** Turns that were cut, at max_tokens or at the end of the context. */
  cut: number;
  branches: number;
  tokens: number;
  sampled: number;
  media: number;
  mismatch: number | null;
  versions: string[];
  status: "error" | "truncated" | "done" | "open";
  error: string;
  seconds: number;
  agents: string[];
}

export interface Index {
  title: string;
  episodes: Summary[];
  problems: string[];
  live: boolean;
}

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type Message = { [key: string]: Json };

/** What processing an item again gave. */
export interface Processed {
  grid: number[] | null;
  pixels: "equal" | "different" | "unknown";
  reason: string;
}

/** An image, a video or a sound of a node; `offset` counts tokens from the first one of the node. */
export interface MediaReference {
  modality: string;
  hash: string;
  digest: string;
  offset: number;
  length: number;
  features: number;
  processed: Processed | null;
}

export interface TreeNode {
  parent: number;
  tokens: number;
  messages: Message[];
  media: MediaReference[];
  /** Version, and the half-open range of the node's sampled tokens. */
  spans: [string, number, number][];
  extras: string[];
}

export interface ToolCallAttempt {
  name: string | null;
  arguments: Json;
  status: string;
  raw: string;
  span: [number, number] | null;
}

export interface Turn {
  node: number;
  finish: string;
  message: Message;
  reward: number;
  info: { [key: string]: Json };
  seconds: number;
  agent: string;
  /** Parsed again with the model's renderer; null without one. */
  calls: ToolCallAttempt[] | null;
}

/** Tokens `start` to `end` of a branch stand where a full render has `ids`. */
export interface Difference {
  start: number;
  end: number;
  renderedStart: number;
  ids: number[];
  /** Too long to be compared token by token: some of the tokens may be equal. */
  coarse: boolean;
}

export interface Drift {
  leaf: number;
  error: string;
  rendered: number;
  extraEnd: number;
  differences: Difference[];
}

export interface Header {
  number: number;
  id: string;
  group: string;
  seed: string;
  reward: number | null;
  done: boolean;
  truncated: boolean;
  truncationReason: string;
  error: string;
  startedAt: number;
  seconds: number;
  forks: number;
  metrics: { [key: string]: Json };
  provenance: { [key: string]: Json } | null;
  nodes: TreeNode[];
  turns: Turn[];
  drift: Drift[] | null;
  /** How many of the likeliest tokens each node has in the place of a token; absent where no node has any. */
  likeliest?: { [of: string]: number[] };
  columns: { [name: string]: { type: string; offset: number; length: number } };
}

export type Column = Int32Array | Uint32Array | Uint8Array | Float32Array;

export interface Payload {
  header: Header;
  columns: Map<string, Column>;
}

export interface Medium {
  digest: string;
  modality: string;
  bytes?: number;
  error?: string;
  /** Of an image or a video. */
  width?: number;
  height?: number;
  total?: number;
  fps?: number | null;
  frames: { data: string; type: string; frame: number }[];
  sound?: Sound;
}

/** `wave` is base64 of a WAV file with the first `played` of `seconds`, `peaks` are magnitudes of 0 to 1 of `peak`. */
export interface Sound {
  seconds: number;
  rate: number;
  channels: number;
  format: string;
  peak: number;
  peaks: number[];
  played: number;
  wave: string;
}

/** What a medium is found by: a file may be used as a video and as a sound. */
export interface MediumName {
  modality: string;
  digest: string;
}

/** Where episodes and media come from: blocks of this document, or the server that sent it. */
export interface Source {
  episode(number: number): Promise<Payload>;
  medium(name: MediumName): Promise<Medium>;
  /** The episodes from number `from` on whose messages have all `texts`, as far as a fraction of a second allows. */
  search(texts: string[], from: number): Promise<SearchPart>;
}

/** `found` are numbers of episodes before `next`, the first episode that was not read. */
export interface SearchPart {
  found: number[];
  next: number;
}

/** After so many milliseconds a search in this document lets the page draw and read keys. */
const SEARCH_MILLISECONDS = 30;

const COLUMN_TYPES: { [name: string]: new (data: ArrayBuffer, offset: number, length: number) => Column } = {
  int32: Int32Array,
  uint32: Uint32Array,
  uint8: Uint8Array,
  float32: Float32Array,
};

async function parsePayload(compressed: Blob): Promise<Payload> {
  const stream = compressed.stream().pipeThrough(new DecompressionStream("gzip"));
  const data = await new Response(stream).arrayBuffer();
  const length = new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as Header;
  const columns = new Map<string, Column>();
  for (const [name, place] of Object.entries(header.columns)) {
    columns.set(name, new COLUMN_TYPES[place.type](data, 4 + length + place.offset, place.length));
  }
  return { header, columns };
}

export function bytesOfBase64(text: string): Uint8Array<ArrayBuffer> {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** The text of a block of this document, which may not have been parsed yet. */
async function block(id: string): Promise<string> {
  for (;;) {
    const element = document.getElementById(id);
    const isParsed = document.readyState !== "loading";
    if (element && (isParsed || element.nextElementSibling)) return element.textContent;
    if (isParsed) throw new Error(`this page has no ${id}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

class DocumentSource implements Source {
  private readonly texts: string[] = [];

  constructor(private readonly episodes: number) {}

  async search(texts: string[], from: number): Promise<SearchPart> {
    if (from > 0) await new Promise((resolve) => setTimeout(resolve));
    const wanted = texts.map((text) => text.toLowerCase());
    const found: number[] = [];
    const end = performance.now() + SEARCH_MILLISECONDS;
    let next = from;
    for (; next < this.episodes && (next === from || performance.now() < end); next++) {
      this.texts[next] ??= messageTexts((await this.episode(next)).header);
      if (wanted.every((text) => this.texts[next].includes(text))) found.push(next);
    }
    return { found, next };
  }

  async episode(number: number): Promise<Payload> {
    return parsePayload(new Blob([bytesOfBase64(await block(`episode-${number}`))]));
  }

  async medium({ modality, digest }: MediumName): Promise<Medium> {
    return JSON.parse(await block(`${modality}-${digest}`)) as Medium;
  }
}

class ServerSource implements Source {
  async search(texts: string[], from: number): Promise<SearchPart> {
    const query = new URLSearchParams([["from", String(from)], ...texts.map((text) => ["text", text])]);
    return (await (await request(`search?${query}`)).json()) as SearchPart;
  }

  async episode(number: number): Promise<Payload> {
    return parsePayload(await (await request(`episodes/${number}`)).blob());
  }

  async medium({ modality, digest }: MediumName): Promise<Medium> {
    return (await (await request(`media/${modality}-${digest}`)).json()) as Medium;
  }
}

async function request(path: string): Promise<Response> {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
  return response;
}

/** The episodes that the served file has from number `from` on, and its problems. */
export async function newEpisodes(from: number): Promise<{ episodes: Summary[]; problems: string[] }> {
  return (await (await request(`index?from=${from}`)).json()) as { episodes: Summary[]; problems: string[] };
}

export function readIndex(): Index {
  return JSON.parse(document.getElementById("index")!.textContent) as Index;
}

export function sourceOf(index: Index): Source {
  return index.live ? new ServerSource() : new DocumentSource(index.episodes.length);
}
