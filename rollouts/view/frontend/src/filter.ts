// The filter of the list: words, and conditions such as `reward>0.5 status:error version:7`.

import type { Summary } from "./data.ts";

type Test = (episode: Summary) => boolean;

const NUMBERS: { [name: string]: (episode: Summary) => number } = {
  number: (episode) => episode.number,
  reward: (episode) => episode.reward ?? NaN,
  turns: (episode) => episode.turns,
  cut: (episode) => episode.cut,
  branches: (episode) => episode.branches,
  tokens: (episode) => episode.tokens,
  length: (episode) => episode.tokens,
  sampled: (episode) => episode.sampled,
  media: (episode) => episode.media,
  mismatch: (episode) => episode.mismatch ?? NaN,
  seconds: (episode) => episode.seconds,
};

const TEXTS: { [name: string]: (episode: Summary) => string[] } = {
  id: (episode) => [episode.id],
  group: (episode) => [episode.group],
  status: (episode) => [episode.status],
  error: (episode) => [episode.error],
  version: (episode) => episode.versions,
  agent: (episode) => episode.agents,
};

const OPERATORS: { [operator: string]: (value: number, limit: number) => boolean } = {
  ">": (value, limit) => value > limit,
  "<": (value, limit) => value < limit,
  ">=": (value, limit) => value >= limit,
  "<=": (value, limit) => value <= limit,
  "=": (value, limit) => value === limit,
  "!=": (value, limit) => value !== limit,
};

export const FILTER_HELP = `Words match id, group and error. Conditions: ${Object.keys(NUMBERS).join(", ")} with > < >= <= = != and a number; ${Object.keys(TEXTS).join(", ")} with : and a text (status:error, version:7). text:door and text:"a door" search in the texts of the messages.`;

/** A test for lines of the list, and texts that the messages must have. */
export interface Filter {
  test: Test;
  texts: string[];
}

/** The filter, or the part of the query that has no meaning. */
export function parseFilter(query: string): Filter | { problem: string } {
  const tests: Test[] = [];
  const texts: string[] = [];
  for (const word of query.match(/"[^"]*"|[^\s"]+(?:"[^"]*")?/g) ?? []) {
    const number = /^([a-z]+)(>=|<=|!=|=|>|<)(.*)$/i.exec(word);
    const text = /^([a-z]+):(.*)$/i.exec(word);
    if (number && number[1].toLowerCase() in NUMBERS) {
      const limit = Number(number[3]);
      if (number[3] === "" || Number.isNaN(limit)) return { problem: `${word}: "${number[3]}" is not a number` };
      const value = NUMBERS[number[1].toLowerCase()];
      tests.push((episode) => OPERATORS[number[2]](value(episode), limit));
    } else if (text && text[1].toLowerCase() === "text") {
      const wanted = text[2].replaceAll('"', "");
      if (wanted) texts.push(wanted);
    } else if (text && text[1].toLowerCase() in TEXTS) {
      const name = text[1].toLowerCase();
      tests.push(textTest(name, text[2].replaceAll('"', "").toLowerCase()));
    } else if (number) {
      return { problem: `"${number[1]}" is not a number of an episode; use ${Object.keys(NUMBERS).join(", ")}` };
    } else {
      const wanted = word.replaceAll('"', "").toLowerCase();
      tests.push((episode) =>
        [episode.id, episode.group, episode.error].some((value) => value.toLowerCase().includes(wanted)),
      );
    }
  }
  return { test: (episode) => tests.every((test) => test(episode)), texts };
}

/** A version must be equal, because "1" is a part of "10"; of other texts a part is enough. */
function textTest(name: string, wanted: string): Test {
  const values = TEXTS[name];
  if (name === "version" || name === "status") {
    return (episode) => values(episode).some((value) => value.toLowerCase() === wanted);
  }
  return (episode) => values(episode).some((value) => value.toLowerCase().includes(wanted));
}

export type SortKey = "number" | "id" | "group" | "reward" | "turns" | "tokens" | "mismatch" | "status" | "version";

/** The episodes in the order of `key`; those without a value are last in both directions. */
export function sorted(episodes: Summary[], key: SortKey, descending: boolean): Summary[] {
  const sign = descending ? -1 : 1;
  return [...episodes].sort((one, other) => {
    const [a, b] = [sortValue(one, key), sortValue(other, key)];
    if (a === null || b === null) return Number(a === null) - Number(b === null) || one.number - other.number;
    const order =
      typeof a === "number" && typeof b === "number"
        ? a - b
        : String(a).localeCompare(String(b), "en", { numeric: true });
    return sign * order || one.number - other.number;
  });
}

function sortValue(episode: Summary, key: SortKey): number | string | null {
  return key === "version" ? (episode.versions[0] ?? null) : episode[key];
}
