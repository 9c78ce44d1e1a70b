// One value with its name: it can be copied and saved, and keeps its place while it grows.
import { useLayoutEffect, useRef } from "preact/hooks";
import { count } from "./format.js";
import { CopyButton, save } from "./parts.jsx";

const NEAR_END = 24; // Pixels from the end at which the view follows a growing text.

export function Value({
  name,
  note,
  text,
  chars,
  isGrowing,
  isHidden,
  isLeftOut,
  isMain,
  nothing = "nothing yet",
  onOpen,
}) {
  const isCut = chars > text.length && text.length > 0 && !isGrowing;
  return (
    <div class="val">
      <div class="top">
        {onOpen ? (
          <button class="as-link mono" type="button" onClick={onOpen}>
            {name}
          </button>
        ) : (
          <span class="mono">{name}</span>
        )}
        <span class="faint">{note}</span>
        {text && (
          <span class="end">
            {isCut && (
              <button
                class="btn ghost small"
                type="button"
                onClick={() => save(text, `${name}.txt`, "text/plain")}
              >
                Save
              </button>
            )}
            <CopyButton text={text} what={name} />
          </span>
        )}
      </div>
      {isLeftOut ? (
        <p class="hint">{count(chars)} characters that were not kept: the run has too much text.</p>
      ) : isHidden ? (
        <p class="hint">{count(chars)} characters that only their tenant may read.</p>
      ) : (
        <Text
          name={name}
          text={text}
          isGrowing={isGrowing}
          isMain={isMain}
          nothing={chars ? "" : nothing}
        />
      )}
      {isCut && (
        <p class="hint">
          The first {count(text.length)} of {count(chars)} characters.
        </p>
      )}
    </div>
  );
}

function Text({ name, text, isGrowing, isMain, nothing }) {
  const box = useRef(null);
  const wasAtEnd = useRef(true);
  useLayoutEffect(() => {
    if (isGrowing && wasAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text, isGrowing]);
  const follow = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    wasAtEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  };
  return (
    <pre
      class={isMain ? "value" : undefined}
      ref={box}
      tabindex="0"
      role="region"
      aria-label={`Value of ${name}`}
      aria-busy={isGrowing ? "true" : undefined}
      onScroll={follow}
    >
      {text}
      {isGrowing && text && <span class="caret" />}
      {!text && nothing && <span class="dim">{nothing}</span>}
    </pre>
  );
}
