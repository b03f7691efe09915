// Text as a reader can see it: no character of a text is invisible, and none changes the order of others.

const NAMES: { [code: number]: string } = {
  0x00ad: "SHY",
  0x061c: "ALM",
  0x200b: "ZWSP",
  0x200c: "ZWNJ",
  0x200d: "ZWJ",
  0x200e: "LRM",
  0x200f: "RLM",
  0x2028: "LS",
  0x2029: "PS",
  0x202a: "LRE",
  0x202b: "RLE",
  0x202c: "PDF",
  0x202d: "LRO",
  0x202e: "RLO",
  0x2060: "WJ",
  0x2066: "LRI",
  0x2067: "RLI",
  0x2068: "FSI",
  0x2069: "PDI",
  0xfeff: "BOM",
};

// Emoji that are joined, or that ask for colours, are left as they are. Everything else that has no picture of its own
// (controls, formats, ignorable, unassigned, private) is written out, each run of one character at once.
const JOINER_OF_EMOJI = String.raw`(?<=\p{Extended_Pictographic}[\u{1F3FB}-\u{1F3FF}]?\uFE0F?)\u200D(?=\p{Extended_Pictographic})`;
const EMOJI_STYLE = String.raw`(?<=[\p{Extended_Pictographic}\p{Emoji}])\uFE0F`;
const UNSEEN = String.raw`(?![\n\t])[\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]`;
const PIECES = new RegExp(`(${JOINER_OF_EMOJI}|${EMOJI_STYLE})|(${UNSEEN})\\2*`, "gu");

const MAX_CHUNK = 4000;

export interface TextOptions {
  /** Line feeds and tabs get a symbol, too. */
  symbols?: boolean;
}

/** Append `text` to `parent`. Invisible characters and those that reorder others become labels. */
export function appendText(parent: Node, text: string, options: TextOptions = {}): void {
  let from = 0;
  const appendPlain = (end: number): void => {
    if (end > from) parent.appendChild(document.createTextNode(plain(text.slice(from, end), options)));
  };
  PIECES.lastIndex = 0;
  for (const match of text.matchAll(PIECES)) {
    if (match[2] === undefined) continue;
    appendPlain(match.index);
    parent.appendChild(label(match[2], match[0].length / match[2].length));
    from = match.index + match[0].length;
  }
  appendPlain(text.length);
}

function plain(text: string, { symbols }: TextOptions): string {
  return symbols ? text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") : text;
}

function label(character: string, count: number): HTMLElement {
  const code = character.codePointAt(0)!;
  const point = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  const element = document.createElement("span");
  element.className = "ctl";
  element.title = point;
  const name = code < 0x20 ? String.fromCodePoint(0x2400 + code) : code === 0x7f ? "␡" : (NAMES[code] ?? point);
  element.textContent = count > 1 ? `${name}×${count}` : name;
  return element;
}

/** `text` on one line, for a title or a cell of a table, without invisible characters. */
export function lineOf(text: string, longest = 200): string {
  const fragment = document.createDocumentFragment();
  appendText(fragment, text.slice(0, longest).replaceAll("\n", "⏎").replaceAll("\t", " "));
  return fragment.textContent + (text.length > longest ? "…" : "");
}

/** Pieces of at most `MAX_CHUNK` characters, cut after a line feed where there is one, never inside a character. */
export function textChunks(text: string): string[] {
  const chunks: string[] = [];
  let from = 0;
  while (from < text.length) {
    let end = Math.min(from + MAX_CHUNK, text.length);
    if (end < text.length) {
      const line = text.lastIndexOf("\n", end - 1);
      if (line > from + MAX_CHUNK / 4) end = line + 1;
      else if (isHighSurrogate(text.charCodeAt(end - 1))) end++;
    }
    chunks.push(text.slice(from, end));
    from = end;
  }
  return chunks;
}

function isHighSurrogate(unit: number): boolean {
  return unit >= 0xd800 && unit <= 0xdbff;
}
