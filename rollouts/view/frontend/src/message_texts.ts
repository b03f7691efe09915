// The texts of an episode's messages, in which the list searches (rollouts/view/message_texts.py does it on the server).

import type { Header, Json } from "./data.ts";

const NO_TEXT = new Set(["role", "type", "$source"]);

/** All texts of the messages in lower case. */
export function messageTexts(header: Header): string {
  const texts: string[] = [];
  for (const node of header.nodes) for (const message of node.messages) addTexts(message, texts);
  for (const turn of header.turns) addTexts(turn.message, texts);
  return texts.join("\n").toLowerCase();
}

function addTexts(value: Json, texts: string[]): void {
  if (typeof value === "string") texts.push(value);
  else if (Array.isArray(value)) for (const member of value) addTexts(member, texts);
  else if (value !== null && typeof value === "object") {
    for (const [name, member] of Object.entries(value)) if (!NO_TEXT.has(name)) addTexts(member, texts);
  }
}
