// A long page of which only the part near the viewport is in the document.

/** A part of the page. `fill` builds its contents; `estimate` is its height in pixels before it was ever built. */
export interface Block {
  className: string;
  estimate: number;
  fill(parent: HTMLElement): void;
}

/** Blocks one below the other. Those near the viewport of `scroller` are filled, the others are empty boxes. */
export class Blocks {
  readonly element = document.createElement("div");
  private readonly observer: IntersectionObserver;
  private readonly elements: HTMLElement[];
  private readonly indexOf = new Map<Element, number>();
  private readonly filled = new Set<number>();

  constructor(
    private readonly scroller: HTMLElement,
    private readonly blocks: Block[],
  ) {
    this.element.className = "blocks";
    this.observer = new IntersectionObserver((entries) => this.onVisible(entries), {
      root: scroller,
      rootMargin: "1200px 0px",
    });
    this.elements = blocks.map((block, index) => {
      const element = document.createElement("div");
      element.className = `block ${block.className}`;
      element.style.height = `${block.estimate}px`;
      this.indexOf.set(element, index);
      return element;
    });
    this.element.append(...this.elements);
    for (const element of this.elements) this.observer.observe(element);
  }

  /**
   * Fill the blocks in the viewport at once. The observer reports them only with a frame of the browser, and a headless
   * one with virtual time may print the page without another frame.
   */
  fillVisible(): void {
    const bottom = this.scroller.getBoundingClientRect().bottom;
    for (let index = 0; index < this.elements.length && this.elements[index].getBoundingClientRect().top < bottom; index++) this.fill(index);
  }

  /** Stop following the viewport. */
  close(): void {
    this.observer.disconnect();
  }

  /** Fill a block at once and return its element. */
  show(index: number): HTMLElement {
    this.fill(index);
    return this.elements[index];
  }

  private onVisible(entries: IntersectionObserverEntry[]): void {
    for (const entry of entries) {
      const index = this.indexOf.get(entry.target)!;
      if (entry.isIntersecting) this.fill(index);
      else this.empty(index, entry.boundingClientRect.height);
    }
  }

  private fill(index: number): void {
    if (this.filled.has(index)) return;
    this.filled.add(index);
    const element = this.elements[index];
    element.style.height = "";
    this.blocks[index].fill(element);
  }

  private empty(index: number, height: number): void {
    if (!this.filled.delete(index)) return;
    const element = this.elements[index];
    element.style.height = `${height}px`;
    element.replaceChildren();
  }
}
