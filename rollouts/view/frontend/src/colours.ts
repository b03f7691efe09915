// The meaning of the colours of tokens.

import type { Episode, PathNode } from "./episode.ts";

export const STEPS = 10;

/** A way to colour tokens: the class of a token, and the legend. */
export interface Colouring {
  name: string;
  label: string;
  classOf(path: PathNode[], at: PathNode, column: number): string;
  legend(): { className: string; text: string }[];
}

const ROLES = ["system", "developer", "user", "tool", "assistant"];

export function roleClass(role: string): string {
  return ROLES.includes(role) ? `r-${role}` : "r-other";
}

/** The colourings of which the episode has the numbers. */
export function colourings(episode: Episode): Colouring[] {
  const found = [byOwner(episode), bySampled(episode), byLogprob(episode)];
  if (episode.extras.includes("entropy")) found.push(byEntropy(episode));
  if (episode.extras.includes("trainer_logprobs")) found.push(byMismatch(episode));
  for (const name of episode.extras) {
    if (name !== "entropy" && name !== "trainer_logprobs") found.push(byExtra(episode, name));
  }
  return found;
}

function byOwner(episode: Episode): Colouring {
  return {
    name: "owner",
    label: "owner",
    classOf: (path, at, column) => {
      const role = episode.role(path, at, column);
      const scaffold = role === "scaffold" || episode.isContent(column) === false ? " scaffold" : "";
      return (role === "scaffold" ? "r-other" : roleClass(role)) + (episode.isSampled(column) ? "" : scaffold);
    },
    legend: () => [...ROLES.map((role) => ({ className: roleClass(role), text: role })), { className: "r-other scaffold", text: "scaffold" }],
  };
}

function bySampled(episode: Episode): Colouring {
  return {
    name: "sampled",
    label: "sampled mask",
    classOf: (_, __, column) => (episode.isSampled(column) ? "sampled" : "unsampled"),
    legend: () => [
      { className: "sampled", text: "sampled: trained" },
      { className: "unsampled", text: "not sampled" },
    ],
  };
}

function byLogprob(episode: Episode): Colouring {
  return scale(
    "logprob",
    "log-probability",
    (column) => -episode.logprob(column) / 6,
    ["0 (p = 1)", "-3 (p = 0.05)", "-6 (p = 0.0025) or less"],
  );
}

function byEntropy(episode: Episode): Colouring {
  return scale("entropy", "entropy", (column) => episode.extra("entropy", column) / 4, ["0", "2 nats", "4 nats or more"]);
}

function byMismatch(episode: Episode): Colouring {
  // Logarithmic: rounding in float32 is about 1e-6, a wrong image about 1.
  return scale(
    "mismatch",
    "mismatch",
    (column) => (Math.log10(Math.max(episode.mismatch(column), 1e-6)) + 6) / 6,
    ["1e-6 or less", "1e-3", "1 or more"],
  );
}

function byExtra(episode: Episode, name: string): Colouring {
  const { low, high } = episode.rangeOf(name);
  const width = high - low || 1;
  const middle = low + width / 2;
  return scale(
    `extra:${name}`,
    name,
    (column) => (episode.extra(name, column) - low) / width,
    [low, middle, high].map((value) => String(Number(value.toPrecision(3)))),
  );
}

function scale(name: string, label: string, share: (column: number) => number, marks: string[]): Colouring {
  return {
    name,
    label,
    classOf: (_, __, column) => {
      const value = share(column);
      return Number.isNaN(value) ? "unsampled" : stepClass(value);
    },
    legend: () => marks.map((text, index) => ({ className: stepClass(index / (marks.length - 1)), text })),
  };
}

function stepClass(share: number): string {
  return `s${Math.max(0, Math.min(STEPS - 1, Math.floor(share * STEPS)))}`;
}
