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
