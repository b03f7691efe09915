// What is shown, as the fragment of the address: #e=12&v=tokens&b=5&t=120 is token 120 of the branch of node 5.

export const VIEWS = ["conversation", "tokens", "prompt", "tree", "drift", "compare", "details"] as const;
export type View = (typeof VIEWS)[number];

export interface Place {
  episode: number | null;
  view: View;
  /** The leaf of the branch; null for the main one. */
  leaf: number | null;
  /** A token of the branch. */
  token: number | null;
}

export function placeOf(fragment: string): Place {
  const parameters = new URLSearchParams(fragment.replace(/^#/, ""));
  const view = parameters.get("v") as View;
  return {
    episode: wholeNumber(parameters.get("e")),
    view: VIEWS.includes(view) ? view : "conversation",
    leaf: wholeNumber(parameters.get("b")),
    token: wholeNumber(parameters.get("t")),
  };
}

export function fragmentOf(place: Place): string {
  if (place.episode === null) return "#";
  const parameters = new URLSearchParams({ e: String(place.episode) });
  if (place.view !== "conversation") parameters.set("v", place.view);
  if (place.leaf !== null) parameters.set("b", String(place.leaf));
  if (place.token !== null) parameters.set("t", String(place.token));
  return `#${parameters}`;
}

function wholeNumber(text: string | null): number | null {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}
