// The program that the playground shows: an example, or a call that another screen hands over.

const PLACE = "parrot playground draft";

export const SETTINGS = { model: "", temperature: 0.2, maxTokens: 64, seed: "7", chat: true };

/** Each example is tried with the included model in tests/page. */
export const EXAMPLES = {
  "animals of a place": {
    calls: [
      {
        name: "animals",
        system: "",
        prompt: "What animals live in {{place}}? Answer in one sentence.",
      },
      {
        name: "fact",
        system: "",
        prompt: "What is the main fact in this text? Answer in one sentence.\n\n{{animals}}",
      },
    ],
    values: { place: "the rain forest" },
  },
  "one question": {
    calls: [{ name: "answer", system: "", prompt: "What is the capital of France?" }],
    values: {},
  },
  "map and reduce": {
    calls: [
      {
        name: "first",
        system: "",
        prompt: "What is the main fact in this text? Answer in one sentence.\n\n{{text_1}}",
      },
      {
        name: "second",
        system: "",
        prompt: "What is the main fact in this text? Answer in one sentence.\n\n{{text_2}}",
      },
      {
        name: "paragraph",
        system: "",
        prompt: "Write one paragraph about these facts:\n\n{{first}} {{second}}",
      },
    ],
    values: {
      text_1: "Bees visit about two million flowers to make one pound of honey.",
      text_2:
        "Parrots are birds that can imitate sounds. A parrot in a harbour can whistle like the ferry.",
    },
  },
  "one of several answers": {
    calls: [
      {
        name: "topic",
        system: "",
        prompt: "What is this text about?\n\n{{text}}",
        sampling: { choices: ["animals", "sport", "money"] },
      },
    ],
    values: { text: "Bees visit about two million flowers to make one pound of honey." },
  },
};

/** Hand a program over to the playground. */
export function putDraft(draft) {
  sessionStorage.setItem(PLACE, JSON.stringify(draft));
  location.hash = "/playground";
}

/** The program that was handed over; it stays for a reload. */
export function readDraft() {
  try {
    return JSON.parse(sessionStorage.getItem(PLACE));
  } catch {
    return null;
  }
}

export function keepDraft(draft) {
  try {
    sessionStorage.setItem(PLACE, JSON.stringify(draft));
  } catch {
    // The draft is lost with the page.
  }
}

const asName = (text, fallback) => text.replaceAll(/\W/g, "_").replace(/^(?=\d)/, "_") || fallback;

/**
 * A call of a run as a program with one call, which has the texts of its inputs as values. `seen`: its
 * prompt with roles, if that is known.
 */
export function draftOfCall({ call, row, source, rows, texts, seen }) {
  const output = asName(row.name, "output");
  const names = new Map();
  const values = {};
  const nameFor = (key, wanted, text) => {
    if (!names.has(key)) {
      const taken = new Set([...names.values(), output]);
      let name = asName(wanted, "input");
      for (let number = 2; taken.has(name); number++) name = `${asName(wanted, "input")}_${number}`;
      names.set(key, name);
      values[name] = text;
    }
    return `{{${names.get(key)}}}`;
  };
  const roles = new Set(seen?.prompt.map((piece) => piece.role));
  const isChat = seen === null || (!roles.has("markup") && roles.has("user"));
  const system = isChat
    ? seen?.prompt
        .filter((piece) => piece.role === "system")
        .map((piece) => piece.text)
        .join("")
    : "";
  const pieces =
    system && source.prompt[0]?.text === system ? source.prompt.slice(1) : source.prompt;
  const parts = pieces.map((piece, i) => {
    if (piece.text === undefined)
      return nameFor(
        piece.var,
        piece.name ?? rows.get(`var:${piece.var}`)?.name ?? "input",
        texts.get(piece.var)?.text ?? "",
      );
    return piece.text.includes("{{") ? nameFor(i, "text", piece.text) : piece.text;
  });
  const { max_gen_length, temperature, seed, ...sampling } = source.sampling ?? {};
  return {
    title: `${call.func_name || call.output}, from a run`,
    calls: [
      {
        name: output,
        system: system ?? "",
        prompt: parts.join(""),
        ...(Object.keys(sampling).length && { sampling }),
      },
    ],
    values,
    settings: {
      model: call.model ?? "",
      temperature: temperature ?? SETTINGS.temperature,
      maxTokens: max_gen_length ?? 512,
      seed: seed == null ? "" : String(seed),
      chat: isChat,
    },
  };
}
