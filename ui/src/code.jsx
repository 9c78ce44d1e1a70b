// The program of the playground as code, with its words in colour.
import { useState } from "preact/hooks";
import { CopyButton, Segments } from "./parts.jsx";
import { asCurl, asOpenAI, asPFunc } from "./program.js";

const FORMS = { PFunc: asPFunc, OpenAI: asOpenAI, curl: asCurl };
const TOKENS = /("""[^]*?"""|"(?:[^"\\\n]|\\.)*"|#.*$|\b(?:from|import|def|return|print)\b)/m;
const WORD = /^(from|import|def|return|print)$/;

const classOf = (part) =>
  part.startsWith('"') ? "s" : part.startsWith("#") ? "c" : WORD.test(part) ? "k" : undefined;

export function Code({ program, values, models }) {
  const [form, setForm] = useState("PFunc");
  const code = FORMS[form](program, values, location.origin, models);
  return (
    <section class="card box code" aria-label="Code">
      <header>
        <h2>Code</h2>
        <Segments
          label="Form"
          options={Object.keys(FORMS).map((id) => ({ id, name: id }))}
          chosen={form}
          onChoose={setForm}
        />
        <span class="end">
          <CopyButton text={code} what="the code">
            Copy
          </CopyButton>
        </span>
      </header>
      <pre role="region" tabindex="0" aria-label={`Code for ${form}`}>
        {code.split(TOKENS).map((part, i) => (
          <span key={i} class={classOf(part)}>
            {part}
          </span>
        ))}
      </pre>
    </section>
  );
}
