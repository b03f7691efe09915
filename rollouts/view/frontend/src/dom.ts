// Building elements. Texts are always set as text nodes; nothing here parses markup.

type Child = Node | string | null | undefined | false;
type Attributes = { [name: string]: string | number | boolean | ((event: any) => void) | undefined };

/** An element. An attribute `onclick` and the like is a listener; true is an empty attribute, false is none. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

export function number(value: number): string {
  return value.toLocaleString("en-US");
}

export function counted(count: number, noun: string, plural = `${noun}s`): string {
  return `${number(count)} ${count === 1 ? noun : plural}`;
}

/** A number with `digits` significant digits, without trailing zeros; null is a number that JSON does not have. */
export function short(value: number | null, digits = 4): string {
  if (value === null) return "not finite";
  return Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : String(value);
}
