// Calls of a run as programs of the playground, so that they can be changed and run again.
import { get, readOnce } from "./api.js";
import { SETTINGS } from "./draft.js";
import { textOf } from "./texts.js";

const MAX_CALLS = 12; // A run with more calls is not offered in the playground.

/** The address of a call's prompt as its model received it. */
export const promptPath = (run, call) =>
  `sessions/${run}/calls/${call.request_id}/prompt?output=${encodeURIComponent(call.output_var_id)}`;

/** Names for the variables of a program, each once, and the values of its inputs. */
function naming() {
  const names = new Map();
  const values = {};
  const add = (key, wanted) => {
    const plain = wanted.replaceAll(/\W/g, "_").replace(/^(?=\d)/, "_") || "text";
    const taken = new Set(names.values());
    let name = plain;
    for (let number = 2; taken.has(name); number++) name = `${plain}_${number}`;
    names.set(key, name);
    return name;
  };
  const place = (key, wanted, text) => {
    if (!names.has(key)) values[add(key, wanted)] = text;
    return `{{${names.get(key)}}}`;
  };
  return { add, place, values, nameOf: (key) => names.get(key) };
}

/**
 * One call of a program. `source`: the call in its variable's feed. `seen`: its prompt with roles, or
 * null. A prompt that continues earlier calls is taken as the model saw it, without the chat template.
 * Returns null if that is not known.
 */
function callOf({ id, source, textFor, seen }, names) {
  const isContinued = source.prompt.some((piece) => piece.text === undefined && !piece.name);
  if (isContinued && seen === null) return null;
  const pieces = isContinued
    ? seen.prompt.map(({ text }) => ({ text: text ?? "" }))
    : source.prompt;
  const roles = new Set(seen?.prompt.map((piece) => piece.role));
  const isChat = !isContinued && (seen === null || (!roles.has("markup") && roles.has("user")));
  const systems = seen?.prompt.filter((piece) => piece.role === "system") ?? [];
  const shown = systems.map((piece) => piece.text).join(""); // with the markup of the template
  const hasSystem = isChat && pieces[0]?.text && shown.includes(pieces[0].text.trim());
  const system = hasSystem ? pieces[0].text : "";
  const own = hasSystem ? pieces.slice(1) : pieces;
  const prompt = own.map((piece, i) => {
    if (piece.text === undefined) return names.place(piece.var, piece.name, textFor(piece.var));
    return piece.text.includes("{{") ? names.place(`${id} ${i}`, "text", piece.text) : piece.text;
  });
  const name = names.nameOf(id);
  return { name, system, prompt: prompt.join(""), isChat, sampling: source.sampling ?? {} };
}

const withoutNulls = (fields) =>
  Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null));

/** The program with these calls. Sampling that all calls share becomes the settings. */
function programOf({ title, origin, calls, values, model }) {
  const texts = new Set(calls.map((call) => JSON.stringify(call.sampling)));
  const isShared = texts.size === 1;
  const { max_gen_length, temperature, seed, ...others } = calls[0].sampling;
  const settings = {
    model: model ?? "",
    temperature: temperature ?? SETTINGS.temperature,
    maxTokens: max_gen_length ?? 512,
    seed: seed == null ? "" : String(seed),
    chat: calls[0].isChat,
  };
  return {
    title,
    origin,
    values,
    settings,
    calls: calls.map(({ name, system, prompt, sampling }) => {
      const own = withoutNulls(isShared ? others : sampling);
      return { name, system, prompt, ...(Object.keys(own).length && { sampling: own }) };
    }),
  };
}

/** A call as a program with the texts of its inputs as values; null if its prompt is not known. */
export function draftOfCall({ call, row, source, texts, seen, origin }) {
  const names = naming();
  names.add(call.output_var_id, row.name);
  const textFor = (variable) => texts.get(variable)?.text ?? "";
  const made = callOf({ id: call.output_var_id, source, textFor, seen }, names);
  const title = `${call.func_name || call.output}, from a run`;
  return (
    made && programOf({ title, origin, calls: [made], values: names.values, model: call.model })
  );
}

/** Whether all calls of a run can be a program of the playground. */
export const canRunAgain = (graph) =>
  graph.calls.size <= MAX_CALLS &&
  [...graph.calls.values()].every((call) => call.kind !== "native" && call.outputs.length === 1);

/** All calls of a run as one program. Rejects if a prompt is not known or does not fit. */
export async function draftOfRun(run, title, graph, rows) {
  const names = naming();
  for (const id of graph.calls.keys()) names.add(id, rows.get(`var:${id}`)?.name ?? id);
  const calls = [];
  for (const [id, call] of graph.calls) {
    const feed = await readOnce(`sessions/${run}/vars/${id}`);
    const source = feed.get("call");
    const seen = await get(promptPath(run, call)).catch(() => null);
    const texts = new Map();
    for (const input of call.inputs.filter((variable) => !graph.calls.has(variable))) {
      texts.set(input, textOf(await readOnce(`sessions/${run}/vars/${input}`)));
    }
    const textFor = (variable) => texts.get(variable) ?? "";
    const made = source?.prompt ? callOf({ id, source, textFor, seen }, names) : null;
    if (made === null) throw new Error(`The prompt of ${call.func_name} is not known.`);
    calls.push(made);
  }
  if (new Set(calls.map((call) => call.isChat)).size > 1) {
    throw new Error("Some calls of this run use the chat template, and others do not.");
  }
  const [first] = graph.calls.values();
  return programOf({
    title: `${title}, again`,
    origin: run,
    calls,
    values: names.values,
    model: first.model,
  });
}
