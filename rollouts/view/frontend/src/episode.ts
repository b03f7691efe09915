// One episode with its token tree: branches, and what is known about each token.

import type { Column, Drift, Header, MediaReference, Payload, Turn } from "./data.ts";

const SAMPLED = 1;
const CONTENT = 2;
const CONTENT_KNOWN = 4;
const ADDED = 1;
const UNKNOWN_OWNER = -2;
/** More tokens than the bytes of one character; a byte-level token holds at least one byte. */
const MAX_TOKENS_PER_CHARACTER = 4;

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const lossyUtf8 = new TextDecoder("utf-8", { ignoreBOM: true });

/** A node on a branch. `start` is its first token on the branch, `column` its first token in the columns. */
export interface PathNode {
  node: number;
  start: number;
  end: number;
  column: number;
}

/** Tokens `start` to `end` of a branch that are shown as one text: several if only together they make a character. */
export interface Cell {
  start: number;
  end: number;
  text: string;
  added: boolean;
}

/** A token that could stand in a place; `isOwn`: it does. `text` is empty where texts are not known. */
export interface Candidate {
  id: number;
  text: string;
  logprob: number;
  isOwn: boolean;
}

/** An image, a video or a sound on a branch; `start` and `end` are tokens of the branch. */
export interface PlacedMedia {
  start: number;
  end: number;
  node: number;
  reference: MediaReference;
}

export class Episode {
  readonly header: Header;
  readonly hasTexts: boolean;
  /** The names of all columns with one number per token. */
  readonly extras: string[];
  readonly turnOf = new Map<number, Turn>();
  readonly children = new Map<number, number[]>();
  private readonly nodeColumn: number[] = [];
  private readonly sampledBefore: Uint32Array;
  private readonly ids: Int32Array;
  private readonly index: Uint32Array;
  private readonly flags: Uint8Array;
  private readonly logprobs: Float32Array;
  private readonly owners: Int32Array | undefined;
  private readonly extraColumns = new Map<string, Float32Array>();
  private readonly columns: Map<string, Column>;
  private readonly textKinds: Uint8Array | undefined;
  private readonly textEnds: Uint32Array | undefined;
  private readonly textBytes: Uint8Array | undefined;

  constructor({ header, columns }: Payload) {
    this.header = header;
    this.columns = columns;
    this.ids = columns.get("uniqueIds") as Int32Array;
    this.index = columns.get("index") as Uint32Array;
    this.flags = columns.get("flags") as Uint8Array;
    this.logprobs = columns.get("logprobs") as Float32Array;
    this.owners = columns.get("owners") as Int32Array | undefined;
    this.textKinds = columns.get("textKinds") as Uint8Array | undefined;
    this.textEnds = columns.get("textEnds") as Uint32Array | undefined;
    this.textBytes = columns.get("textBytes") as Uint8Array | undefined;
    this.hasTexts = this.textBytes !== undefined;
    for (const [name, column] of columns) {
      if (name.startsWith("extra:")) this.extraColumns.set(name.slice(6), column as Float32Array);
    }
    this.extras = [...this.extraColumns.keys()];
    for (const turn of header.turns) this.turnOf.set(turn.node, turn);
    let column = 0;
    header.nodes.forEach((node, index) => {
      this.nodeColumn.push(column);
      column += node.tokens;
      const siblings = this.children.get(node.parent);
      if (siblings) siblings.push(index);
      else this.children.set(node.parent, [index]);
    });
    this.sampledBefore = new Uint32Array(this.flags.length + 1);
    for (let i = 0; i < this.flags.length; i++) this.sampledBefore[i + 1] = this.sampledBefore[i] + (this.flags[i] & SAMPLED);
  }

  leaves(): number[] {
    return this.header.nodes.flatMap((_, index) => (this.children.has(index) ? [] : [index]));
  }

  /** The branch of the last turn of the agent that plays the environment; without one, the last branch. */
  mainLeaf(): number {
    const last = this.header.turns.findLast(({ agent }) => agent === "");
    return last ? this.leafBelow(last.node) : this.leaves()[this.leaves().length - 1];
  }

  /** The nodes from the root to `leaf`. */
  path(leaf: number): PathNode[] {
    const nodes: number[] = [];
    for (let node = leaf; node >= 0; node = this.header.nodes[node].parent) nodes.push(node);
    let start = 0;
    return nodes.reverse().map((node) => {
      const end = start + this.header.nodes[node].tokens;
      const placed = { node, start, end, column: this.nodeColumn[node] };
      start = end;
      return placed;
    });
  }

  media(path: PathNode[]): PlacedMedia[] {
    return path.flatMap(({ node, start }) =>
      this.header.nodes[node].media.map((reference) => {
        const first = start + reference.offset;
        return { start: first, end: first + reference.length, node, reference };
      }),
    );
  }

  driftOf(leaf: number): Drift | null {
    return this.header.drift?.find((drift) => drift.leaf === leaf) ?? null;
  }

  /** The first leaf below a node. */
  leafBelow(node: number): number {
    for (;;) {
      const children = this.children.get(node);
      if (!children) return node;
      node = children[0];
    }
  }

  // One token, by its place in the columns.

  id(column: number): number {
    return this.ids[this.index[column]];
  }

  isSampled(column: number): boolean {
    return (this.flags[column] & SAMPLED) !== 0;
  }

  /** Null where it is not known. */
  isContent(column: number): boolean | null {
    return (this.flags[column] & CONTENT_KNOWN) === 0 ? null : (this.flags[column] & CONTENT) !== 0;
  }

  logprob(column: number): number {
    return this.isSampled(column) ? this.logprobs[this.sampledBefore[column]] : NaN;
  }

  extra(name: string, column: number): number {
    return this.extraColumns.get(name)?.[column] ?? NaN;
  }

  /** The smallest and the largest value of an extra in the whole episode; 0 and 0 if it has none. */
  rangeOf(name: string): { low: number; high: number } {
    let low = Infinity;
    let high = -Infinity;
    for (const value of this.extraColumns.get(name) ?? []) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? { low, high } : { low: 0, high: 0 };
  }

  mismatch(column: number): number {
    return Math.abs(this.extra("trainer_logprobs", column) - this.logprob(column));
  }

  /** The likeliest tokens in the place of a token, the likeliest first; then that token if it is none of them. */
  likeliest(of: string, node: number, column: number): Candidate[] {
    const widths = this.header.likeliest![of];
    let start = (column - this.nodeColumn[node]) * widths[node];
    for (let before = 0; before < node; before++) start += this.header.nodes[before].tokens * widths[before];
    const places = this.columns.get(`likeliest:${of}`)!.subarray(start, start + widths[node]);
    const logprobs = this.columns.get(`likeliestLogprobs:${of}`)!;
    const own = this.index[column];
    const candidate = (place: number, logprob: number): Candidate => {
      const text = this.hasTexts ? this.cellOf(() => place, 1).text : "";
      return { id: this.ids[place], text, logprob, isOwn: place === own };
    };
    const found = Array.from(places, (place, rank) => candidate(place, logprobs[start + rank]));
    if (found.length && !found.some(({ isOwn }) => isOwn)) {
      found.push(candidate(own, of === "sampler" ? this.logprob(column) : this.extra("teacher_logprobs", column)));
    }
    return found.filter(({ logprob }) => !Number.isNaN(logprob));
  }

  /** The weights that sampled a token; empty for others, and where it is not known. */
  version(node: number, column: number): string {
    if (!this.isSampled(column)) return "";
    const sampled = this.sampledBefore[column] - this.sampledBefore[this.nodeColumn[node]];
    const span = this.header.nodes[node].spans.find(([, start, end]) => start <= sampled && sampled < end);
    return span ? span[0] : "";
  }

  /** The role of the message that owns a token: of a render of the branch, or else of the only message of its node. */
  role(path: PathNode[], at: PathNode, column: number): string {
    const turn = this.turnOf.get(at.node);
    if (turn && this.isSampled(column)) return roleOf(turn.message, "assistant");
    const owner = this.owners ? this.owners[column] : UNKNOWN_OWNER;
    if (owner >= 0) {
      const messages = this.messageRoles(path);
      return messages[owner] ?? "prompt";
    }
    const own = this.header.nodes[at.node].messages;
    if (own.length !== 1) return owner === -1 ? "scaffold" : "prompt";
    return this.isContent(column) === false ? "scaffold" : roleOf(own[0], "prompt");
  }

  private messageRoles(path: PathNode[]): string[] {
    return path.flatMap(({ node }) => {
      const roles = this.header.nodes[node].messages.map((message) => roleOf(message, "prompt"));
      const turn = this.turnOf.get(node);
      return turn ? [...roles, roleOf(turn.message, "assistant")] : roles;
    });
  }

  // Texts.

  /** The cells of tokens `start` to `end` of a node; both are places in the columns, `shift` makes branch places. */
  cells(start: number, end: number, shift: number): Cell[] {
    const cells: Cell[] = [];
    for (let column = start; column < end; ) {
      const cell = this.cellOf((offset) => this.index[column + offset], end - column);
      cells.push({ start: column + shift, end: column + shift + cell.count, text: cell.text, added: cell.added });
      column += cell.count;
    }
    return cells;
  }

  /** The cells of ids that are in the table of ids, as those of a render are. */
  cellsOfIds(ids: number[]): Cell[] {
    const places = ids.map((id) => this.placeOfId(id));
    const cells: Cell[] = [];
    for (let at = 0; at < places.length; ) {
      const cell = this.cellOf((offset) => places[at + offset], places.length - at);
      cells.push({ start: at, end: at + cell.count, text: cell.text, added: cell.added });
      at += cell.count;
    }
    return cells;
  }

  private cellOf(placeAt: (offset: number) => number, available: number): { count: number; text: string; added: boolean } {
    const first = placeAt(0);
    if (!this.textKinds) return { count: 1, text: String(this.ids[first]), added: false };
    const kind = this.textKinds[first];
    if (kind !== 0) {
      return { count: 1, text: kind === ADDED ? this.decodeLossy([first]) : `[id ${this.ids[first]}]`, added: true };
    }
    const places: number[] = [];
    for (let count = 1; count <= Math.min(MAX_TOKENS_PER_CHARACTER, available); count++) {
      const place = placeAt(count - 1);
      if (this.textKinds[place] !== 0) break;
      places.push(place);
      try {
        return { count, text: utf8.decode(this.bytesOf(places)), added: false };
      } catch {
        continue; // an incomplete character: the next token may complete it
      }
    }
    return { count: 1, text: this.decodeLossy([first]), added: false };
  }

  private bytesOf(places: number[]): Uint8Array {
    const ends = this.textEnds!;
    const parts = places.map((place) => this.textBytes!.subarray(place === 0 ? 0 : ends[place - 1], ends[place]));
    if (parts.length === 1) return parts[0];
    const joined = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) {
      joined.set(part, at);
      at += part.length;
    }
    return joined;
  }

  private decodeLossy(places: number[]): string {
    return lossyUtf8.decode(this.bytesOf(places));
  }

  private placeOfId(id: number): number {
    let low = 0;
    let high = this.ids.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ids[middle] < id) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

export function roleOf(message: { [key: string]: unknown }, otherwise: string): string {
  return typeof message.role === "string" ? message.role : otherwise;
}
