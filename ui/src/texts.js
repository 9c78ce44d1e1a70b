// The texts of variables: one that is followed while it grows, and inputs that are read once.
import { useEffect, useRef, useState } from "preact/hooks";
import { readOnce } from "./api.js";

const MAX_AT_ONCE = 2; // Reads at the same time: a browser has six connections to a server.

/** The text in the rows of a variable's feed. */
export const textOf = (rows) =>
  [...rows]
    .filter(([key]) => key.startsWith("text:"))
    .sort(([a], [b]) => a.slice(5) - b.slice(5))
    .map(([, piece]) => piece.text)
    .join("");

/**
 * The texts of several variables of a run, by id. They are read again when they have changed.
 * `wanted`: pairs of an id and the variable's row.
 */
export function useTexts(run, wanted) {
  const [texts, setTexts] = useState(() => new Map());
  const known = useRef(new Map());
  const versions = wanted
    .filter(([, row]) => row?.chars > 0)
    .map(([id, row]) => [id, `${row.state} ${row.state === "ready" ? row.chars : ""}`]);
  const key = versions.map((pair) => pair.join(" ")).join();
  useEffect(() => {
    let isOver = false;
    const open = versions.filter(([id, version]) => known.current.get(id) !== version);
    const next = async () => {
      while (open.length && !isOver) {
        const [id, version] = open.shift();
        const rows = await readOnce(`sessions/${run}/vars/${id}`).catch(() => null);
        if (isOver) return;
        if (rows) {
          known.current.set(id, version);
          const isHidden = rows.get("var").chars > 0 && !rows.has("text:0");
          setTexts((old) =>
            new Map(old).set(id, {
              text: textOf(rows),
              isHidden,
              isLeftOut: rows.get("var").is_left_out,
            }),
          );
        }
      }
    };
    for (let i = 0; i < MAX_AT_ONCE; i++) next();
    return () => {
      isOver = true;
    };
  }, [run, key]);
  return texts;
}
