// The list of episodes: a table of which only the rows near the viewport are in the document.

import type { Source, Summary } from "./data.ts";
import { h, number, short } from "./dom.ts";
import { type SortKey, parseFilter, sorted } from "./filter.ts";
import { fragmentOf } from "./location.ts";
import { lineOf } from "./visible_text.ts";

const ROW_HEIGHT = 32;
const MARGIN_ROWS = 20;

interface Heading {
  key: SortKey;
  label: string;
  className: string;
  descending: boolean;
  cell(episode: Summary): string | HTMLElement;
}

const HEADINGS: Heading[] = [
  { key: "number", label: "#", className: "num number", descending: false, cell: (episode) => String(episode.number) },
  { key: "id", label: "episode", className: "id", descending: false, cell: episodeLink },
  { key: "group", label: "group", className: "group wide", descending: false, cell: (episode) => lineOf(episode.group, 40) },
  { key: "reward", label: "environment reward", className: "num reward", descending: true, cell: (episode) => short(episode.reward) },
  { key: "turns", label: "turns", className: "num wide", descending: true, cell: (episode) => number(episode.turns) },
  { key: "tokens", label: "tokens", className: "num length", descending: true, cell: (episode) => number(episode.tokens) },
  { key: "mismatch", label: "mismatch", className: "num mismatch wide", descending: true, cell: (episode) => (episode.mismatch === null ? "–" : episode.mismatch.toExponential(1)) },
  { key: "version", label: "weights", className: "num version wide", descending: true, cell: versions },
  { key: "status", label: "status", className: "status", descending: false, cell: (episode) => h("span", { class: `chip status-${episode.status}` }, episode.status) },
];

function episodeLink(episode: Summary): HTMLElement {
  const href = fragmentOf({ episode: episode.number, view: "conversation", leaf: null, token: null });
  return h("a", { href, tabindex: -1, title: lineOf(episode.error || episode.id, 300) }, lineOf(episode.id || "(no id)", 80));
}

function versions(episode: Summary): string {
  if (!episode.versions.length) return "–";
  const [first, last] = [episode.versions[0], episode.versions[episode.versions.length - 1]];
  return lineOf(first === last ? first : `${first}…${last}`, 20);
}

export class EpisodeList {
  readonly element: HTMLElement;
  shown: Summary[] = [];
  private key: SortKey = "number";
  private descending = false;
  private selected: number | null = null;
  /** The texts that messages must have, as JSON; the episodes that have them, of the first `searched` ones. */
  private wanted = "[]";
  private readonly found = new Set<number>();
  private searched = 0;
  private isSearching = false;
  private searchError = "";
  private run = 0;
  private readonly filter: HTMLInputElement;
  private readonly count: HTMLElement;
  private readonly scroller: HTMLElement;
  private readonly body: HTMLElement;
  private readonly above: HTMLElement;
  private readonly below: HTMLElement;
  private readonly headings = new Map<SortKey, HTMLElement>();

  constructor(
    private episodes: Summary[],
    private readonly source: Source,
    private readonly open: (number: number) => void,
  ) {
    this.filter = h("input", {
      type: "search",
      id: "filter",
      placeholder: "filter: words, reward>0.5, text:door",
      "aria-label": "Filter episodes",
      "aria-describedby": "count",
      spellcheck: "false",
      oninput: () => this.update(true),
    });
    this.count = h("div", { id: "count", role: "status" });
    this.above = h("tbody", { "aria-hidden": "true" }, h("tr", {}));
    this.body = h("tbody", {});
    this.below = h("tbody", { "aria-hidden": "true" }, h("tr", {}));
    const row = h("tr", {});
    for (const heading of HEADINGS) row.append(this.heading(heading));
    const table = h("table", { "aria-label": "Episodes" }, h("thead", {}, row), this.above, this.body, this.below);
    this.scroller = h("div", { class: "rows", tabindex: 0, role: "region", "aria-label": "List of episodes", onscroll: () => this.draw() }, table);
    this.element = h("aside", { class: "list", "aria-label": "Episodes" }, h("div", { class: "filter" }, this.filter, this.count), this.scroller);
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    this.update(false);
  }

  private heading({ key, label, className, descending }: Heading): HTMLElement {
    const sort = (): void => {
      this.descending = this.key === key ? !this.descending : descending;
      this.key = key;
      this.update(true);
    };
    const cell = h("th", { class: className, scope: "col" }, h("button", { type: "button", onclick: sort }, label));
    this.headings.set(key, cell);
    return cell;
  }

  add(episodes: Summary[]): void {
    this.episodes = [...this.episodes, ...episodes];
    this.update(false);
  }

  get all(): Summary[] {
    return this.episodes;
  }

  focusFilter(): void {
    this.filter.focus();
    this.filter.select();
  }

  setFilter(query: string): void {
    this.filter.value = query;
    this.update(true);
  }

  /** Mark an episode and bring its row into view. */
  select(selected: number | null): void {
    this.selected = selected;
    const row = this.shown.findIndex((episode) => episode.number === selected);
    if (row >= 0) {
      const [top, height] = [row * ROW_HEIGHT, this.scroller.clientHeight - 2 * ROW_HEIGHT];
      if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
      else if (top > this.scroller.scrollTop + height) this.scroller.scrollTop = top - height;
    }
    this.draw();
  }

  /** The number of the episode `by` rows below the selected one. */
  neighbour(by: number): number | null {
    const row = this.shown.findIndex((episode) => episode.number === this.selected);
    const next = row < 0 ? (by > 0 ? 0 : this.shown.length - 1) : row + by;
    return this.shown[Math.max(0, Math.min(this.shown.length - 1, next))]?.number ?? null;
  }

  private update(toTop: boolean): void {
    const parsed = parseFilter(this.filter.value);
    this.filter.setAttribute("aria-invalid", String("problem" in parsed));
    if ("problem" in parsed) {
      this.count.textContent = lineOf(parsed.problem);
      return;
    }
    this.searchFor(parsed.texts);
    const found = (episode: Summary): boolean => !parsed.texts.length || this.found.has(episode.number);
    this.shown = sorted(this.episodes.filter((episode) => parsed.test(episode) && found(episode)), this.key, this.descending);
    const rewards = this.shown.flatMap(({ reward }) => (reward === null ? [] : [reward]));
    const without = rewards.length < this.shown.length ? ` without ${number(this.shown.length - rewards.length)} that are not finite` : "";
    const reward = rewards.length ? `, mean environment reward ${short(meanOf(rewards))}${without}` : "";
    const cut = this.shown.reduce((sum, episode) => sum + episode.cut, 0);
    const turns = this.shown.reduce((sum, episode) => sum + episode.turns, 0);
    const cutTurns = cut ? `, ${number(cut)} of ${number(turns)} turns cut at max_tokens` : "";
    this.count.textContent = `${number(this.shown.length)} of ${number(this.episodes.length)} episodes${reward}${cutTurns}${this.searchState()}`;
    for (const [key, cell] of this.headings) {
      if (key === this.key) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    if (toTop) this.scroller.scrollTop = 0;
    this.draw();
  }

  /** Search in the episodes that were not searched for these texts. */
  private searchFor(texts: string[]): void {
    const wanted = JSON.stringify(texts);
    if (wanted !== this.wanted) {
      this.wanted = wanted;
      this.found.clear();
      this.searched = 0;
      this.run++;
      this.isSearching = false;
    }
    if (texts.length && !this.isSearching && this.searched < this.episodes.length) void this.search(texts, this.run);
  }

  private async search(texts: string[], run: number): Promise<void> {
    this.isSearching = true;
    this.searchError = "";
    while (this.searched < this.episodes.length && !this.searchError) {
      try {
        const part = await this.source.search(texts, this.searched);
        if (run !== this.run) return; // another search has begun
        for (const episode of part.found) this.found.add(episode);
        this.searched = part.next;
      } catch (error) {
        if (run !== this.run) return;
        this.searchError = String(error);
      }
      this.isSearching = this.searched < this.episodes.length;
      this.update(false);
    }
    this.isSearching = false;
  }

  private searchState(): string {
    if (this.wanted === "[]") return "";
    if (this.searchError) return `; the search ended: ${lineOf(this.searchError, 200)}`;
    return this.searched < this.episodes.length ? `; searched ${number(this.searched)} of ${number(this.episodes.length)}` : "";
  }

  private draw(): void {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - MARGIN_ROWS);
    const count = Math.ceil((this.scroller.clientHeight || 600) / ROW_HEIGHT) + 2 * MARGIN_ROWS;
    const rows = this.shown.slice(first, first + count);
    setHeight(this.above, first * ROW_HEIGHT);
    setHeight(this.below, (this.shown.length - first - rows.length) * ROW_HEIGHT);
    this.body.replaceChildren(...rows.map((episode) => this.row(episode)));
  }

  private row(episode: Summary): HTMLElement {
    const isSelected = episode.number === this.selected;
    const row = h("tr", { class: isSelected ? "selected" : "", "aria-current": isSelected ? "true" : undefined, onclick: () => this.open(episode.number) });
    for (const { className, cell } of HEADINGS) row.append(h("td", { class: className }, cell(episode)));
    return row;
  }
}

/** The mean; each number is divided before the sum, because a sum of large numbers overflows. */
function meanOf(values: number[]): number {
  const isLarge = values.some((value) => Math.abs(value) > 1e290);
  return isLarge ? values.reduce((sum, value) => sum + value / values.length, 0) : values.reduce((sum, value) => sum + value, 0) / values.length;
}

function setHeight(body: HTMLElement, height: number): void {
  body.style.display = height > 0 ? "" : "none";
  (body.firstElementChild as HTMLElement).style.height = `${height}px`;
}
