// Images and videos at their place, from pictures that the page carries or its server sends.

import { bytesOfBase64, type MediaReference, type Medium, type Source } from "./data.ts";
import { counted, h, number } from "./dom.ts";
import { lineOf } from "./visible_text.ts";

/** Pictures by digest, decoded once. */
export class MediaLibrary {
  private readonly media = new Map<string, Promise<{ medium: Medium; urls: string[] }>>();

  constructor(private readonly source: Source) {}

  get(digest: string): Promise<{ medium: Medium; urls: string[] }> {
    let found = this.media.get(digest);
    if (!found) {
      found = this.load(digest);
      this.media.set(digest, found);
    }
    return found;
  }

  private async load(digest: string): Promise<{ medium: Medium; urls: string[] }> {
    const medium = await this.source.medium(digest);
    const urls = medium.frames.map((frame) =>
      URL.createObjectURL(new Blob([bytesOfBase64(frame.data)], { type: frame.type === "image/png" ? "image/png" : "image/webp" })),
    );
    return { medium, urls };
  }
}

/** A picture, or the frames of a video, with a caption. Without a `reference` it is known by its digest only. */
export function mediaFigure(
  library: MediaLibrary,
  digest: string,
  reference: MediaReference | null,
  tokens: { start: number; end: number } | null,
): HTMLElement {
  const pictures = h("div", { class: "pictures" });
  const size = h("div", {});
  const figure = h("figure", { class: "medium" }, pictures, h("figcaption", {}, size, ...captionLines(digest, reference, tokens)));
  library.get(digest).then(
    ({ medium, urls }) => {
      size.textContent = describe(medium);
      if (medium.error) pictures.append(h("div", { class: "broken" }, lineOf(`${medium.modality}: ${medium.error}`, 400)));
      urls.forEach((url, index) => pictures.append(picture(url, medium, index)));
    },
    (error: unknown) => {
      pictures.append(h("div", { class: "broken" }, lineOf(String(error), 400)));
    },
  );
  return figure;
}

function picture(url: string, medium: Medium, index: number): HTMLElement {
  const frame = medium.total === undefined ? "" : `frame ${medium.frames[index].frame} of ${medium.total}`;
  const label = `${medium.modality} ${medium.width}×${medium.height} ${frame}`.trim();
  const image = h("img", { src: url, alt: label, decoding: "async", class: isSmall(medium) ? "pixelated" : "" });
  const button = h(
    "button",
    { class: "picture", type: "button", title: `${label}. Click to enlarge.`, onclick: () => button.classList.toggle("large") },
    image,
    frame && h("span", { class: "frame" }, timeOf(medium, index) || frame),
  );
  return button;
}

function isSmall(medium: Medium): boolean {
  return Math.max(medium.width ?? 0, medium.height ?? 0) <= 64;
}

function timeOf(medium: Medium, index: number): string {
  return medium.fps ? `${(medium.frames[index].frame / medium.fps).toFixed(1)} s` : "";
}

function describe(medium: Medium): string {
  const parts = [medium.modality];
  if (medium.width) parts.push(`${medium.width}×${medium.height}`);
  if (medium.total !== undefined) parts.push(counted(medium.total, "frame"));
  if (medium.bytes !== undefined) parts.push(`${number(medium.bytes)} bytes`);
  return parts.join(" · ");
}

function captionLines(digest: string, reference: MediaReference | null, tokens: { start: number; end: number } | null): HTMLElement[] {
  const lines: HTMLElement[] = [];
  if (tokens) lines.push(h("div", {}, `tokens ${tokens.start}–${tokens.end - 1} (${number(tokens.end - tokens.start)})`));
  const processed = reference?.processed;
  if (processed?.grid) lines.push(h("div", {}, `grid ${processed.grid.join("×")}`));
  if (processed?.pixels === "different") lines.push(h("div", { class: "bad" }, lineOf(processed.reason, 300)));
  if (processed?.pixels === "unknown") lines.push(h("div", { class: "warn" }, lineOf(processed.reason, 300)));
  if (processed?.pixels === "equal") lines.push(h("div", { class: "good" }, "pixels processed again: equal"));
  lines.push(h("div", { class: "digest", title: `sha256 of the source: ${digest}` }, `source ${lineOf(digest, 16)}`));
  if (reference) lines.push(h("div", { class: "digest", title: `mm_hash: ${lineOf(reference.hash, 300)}` }, `mm_hash ${lineOf(shortHash(reference.hash), 40)}`));
  return lines;
}

function shortHash(hash: string): string {
  const [digest, fingerprint] = [hash.slice(0, 12), hash.includes("-") ? hash.slice(hash.indexOf("-")) : ""];
  return hash.length > 40 ? `${digest}…${fingerprint.slice(0, 24)}` : hash;
}
