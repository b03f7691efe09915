// Images, videos and sounds at their place, from pictures and sounds that the page carries or its server sends.

import { bytesOfBase64, type MediaReference, type Medium, type MediumName, type Sound, type Source } from "./data.ts";
import { counted, h, number, short } from "./dom.ts";
import { lineOf } from "./visible_text.ts";

/** A medium with the addresses of its pictures, or of its sound. */
interface Loaded {
  medium: Medium;
  urls: string[];
}

/** Media by name, decoded once. */
export class MediaLibrary {
  private readonly media = new Map<string, Promise<Loaded>>();

  constructor(private readonly source: Source) {}

  get(name: MediumName): Promise<Loaded> {
    const key = `${name.modality}-${name.digest}`;
    let found = this.media.get(key);
    if (!found) {
      found = this.load(name);
      this.media.set(key, found);
    }
    return found;
  }

  private async load(name: MediumName): Promise<Loaded> {
    const medium = await this.source.medium(name);
    const urls = medium.frames.map((frame) => urlOf(frame.data, frame.type === "image/png" ? "image/png" : "image/webp"));
    if (medium.sound) urls.push(urlOf(medium.sound.wave, "audio/wav"));
    return { medium, urls };
  }
}

function urlOf(base64: string, type: string): string {
  return URL.createObjectURL(new Blob([bytesOfBase64(base64)], { type }));
}

/** A picture, the frames of a video, or a player, with a caption. Without a `reference` it is known by its name only. */
export function mediaFigure(
  library: MediaLibrary,
  name: MediumName,
  reference: MediaReference | null,
  tokens: { start: number; end: number } | null,
): HTMLElement {
  const pictures = h("div", { class: "pictures" });
  const size = h("div", {});
  const figure = h("figure", { class: "medium" }, pictures, h("figcaption", {}, size, ...captionLines(name.digest, reference, tokens)));
  library.get(name).then(
    ({ medium, urls }) => {
      size.textContent = describe(medium);
      if (medium.error) pictures.append(h("div", { class: "broken" }, lineOf(`${medium.modality}: ${medium.error}`, 400)));
      if (medium.sound) pictures.append(player(urls[0], medium.sound));
      else urls.forEach((url, index) => pictures.append(picture(url, medium, index)));
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

const SVG = "http://www.w3.org/2000/svg";
const WAVE_HEIGHT = 48;

/** The waveform of a sound with the part of it that has been played, and the controls of the browser. */
function player(url: string, sound: Sound): HTMLElement {
  const { seconds, played, peaks } = sound;
  const label = `sound of ${duration(seconds)}`;
  const audio = h("audio", { controls: true, preload: "metadata", src: url, "aria-label": label });
  const heard = waveform(peaks, "heard");
  const wave = h(
    "div",
    {
      class: "wave",
      title: "Click to play from here.",
      onclick: (event: MouseEvent) => {
        const bounds = wave.getBoundingClientRect();
        const time = ((event.clientX - bounds.left) / bounds.width) * seconds;
        if (time >= played) return;
        audio.currentTime = time;
        void audio.play();
      },
    },
    waveform(peaks, "whole"),
    heard,
  );
  audio.addEventListener("timeupdate", () => {
    heard.style.clipPath = `inset(0 ${100 - (100 * audio.currentTime) / seconds}% 0 0)`;
  });
  const cut = played < seconds && h("div", { class: "warn" }, `the first ${duration(played)} can be played`);
  return h("div", { class: "sound" }, wave, audio, cut);
}

function waveform(peaks: number[], className: string): SVGSVGElement {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${peaks.length} ${WAVE_HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", className);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  const bars = peaks.map((peak, x) => {
    const height = Math.max(peak * WAVE_HEIGHT, 1);
    return `M${x} ${(WAVE_HEIGHT - height) / 2}h.7v${height}h-.7z`;
  });
  path.setAttribute("d", bars.join(""));
  svg.append(path);
  return svg;
}

function duration(seconds: number): string {
  if (seconds < 60) return `${short(seconds, 3)} s`;
  const whole = Math.round(seconds);
  return `${number(Math.floor(whole / 60))}:${String(whole % 60).padStart(2, "0")} min`;
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
  const { sound } = medium;
  if (sound) {
    parts.push(duration(sound.seconds), `${number(sound.rate)} Hz`, sound.channels === 1 ? "mono" : `${number(sound.channels)} channels`);
    parts.push(sound.format, sound.peak ? `peak ${short(sound.peak, 2)}` : "silence");
  }
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
  if (processed?.pixels === "equal") lines.push(h("div", { class: "good" }, `${reference?.modality === "audio" ? "features" : "pixels"} computed again: equal`));
  lines.push(h("div", { class: "digest", title: `sha256 of the source: ${digest}` }, `source ${lineOf(digest, 16)}`));
  if (reference) lines.push(h("div", { class: "digest", title: `mm_hash: ${lineOf(reference.hash, 300)}` }, `mm_hash ${lineOf(shortHash(reference.hash), 40)}`));
  return lines;
}

function shortHash(hash: string): string {
  const [digest, fingerprint] = [hash.slice(0, 12), hash.includes("-") ? hash.slice(hash.indexOf("-")) : ""];
  return hash.length > 40 ? `${digest}…${fingerprint.slice(0, 24)}` : hash;
}
