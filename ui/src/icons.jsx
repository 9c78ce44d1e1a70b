// Icons and glyphs of states. Their shapes are symbols in index.html.
import { WORDS } from "./format.js";

export const Icon = ({ name }) => (
  <svg class="i" aria-hidden="true">
    <use href={`#i-${name}`} />
  </svg>
);

export const Bird = () => (
  <svg aria-hidden="true">
    <use href="#i-bird" />
  </svg>
);

/** A state's own shape. Inside another drawing it has a size of its own. */
export function Glyph({ state, ...place }) {
  if (state !== "running") {
    return (
      <svg class={`glyph g-${state}`} viewBox="0 0 16 16" aria-hidden="true" {...place}>
        <use href={`#i-${state}`} />
      </svg>
    );
  }
  return (
    <svg class="glyph g-running" viewBox="0 0 16 16" aria-hidden="true" {...place}>
      <circle
        cx="8"
        cy="8"
        r="6.2"
        fill="none"
        stroke="currentColor"
        stroke-opacity="0.3"
        stroke-width="1.8"
      />
      <path
        class="arc"
        d="M8 1.8a6.2 6.2 0 0 1 6.2 6.2"
        fill="none"
        stroke="currentColor"
        stroke-width="2"
        stroke-linecap="round"
      />
      <circle cx="8" cy="8" r="2.2" fill="currentColor" />
    </svg>
  );
}

/** A glyph and a word on the state's tint. */
export const Pill = ({ state, word = WORDS[state] }) => (
  <span class={`st pill ${state}`}>
    <Glyph state={state} />
    {word}
  </span>
);

/** A glyph with its word for those who do not see it. */
export const Mark = ({ state, word = WORDS[state] }) => (
  <>
    <Glyph state={state} />
    <span class="sr">{word}</span>
  </>
);
