// A program of the playground: calls whose prompts name the outputs of other calls.

const PLACEHOLDER = /\{\{([a-zA-Z_][a-zA-Z0-9_]*)\}\}/g;
const NAME = /^[a-zA-Z_][a-zA-Z0-9_]*$/;
const RESERVED = new Set(
  "False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield".split(
    " ",
  ),
);

/** The names in a template, in order and once each. */
const placeholders = (template) => [
  ...new Set([...template.matchAll(PLACEHOLDER)].map(([, name]) => name)),
];

/**
 * What each call takes and makes. A prompt without its output's place has it at the end. A name that
 * no call makes is an input of the program.
 */
export function readProgram(calls, settings) {
  const made = new Set(calls.map((call) => call.name));
  const read = calls.map((call) => {
    const names = placeholders(call.prompt);
    const end = settings.chat ? " " : ""; // A model continues plain text where it ends.
    const template = names.includes(call.name)
      ? call.prompt
      : `${call.prompt}${end}{{${call.name}}}`;
    return { ...call, template, takes: names.filter((name) => name !== call.name) };
  });
  const inputs = [...new Set(read.flatMap((call) => call.takes))].filter((name) => !made.has(name));
  return { calls: inOrder(read), inputs, settings };
}

/** Calls so that each comes after those whose outputs it takes; a circle stays as it is. */
function inOrder(calls) {
  const done = new Set();
  const ordered = [];
  let left = calls;
  while (left.length) {
    const ready = left.filter((call) =>
      call.takes.every((name) => done.has(name) || !calls.some((other) => other.name === name)),
    );
    if (!ready.length) return [...ordered, ...left];
    for (const call of ready) done.add(call.name);
    ordered.push(...ready);
    left = left.filter((call) => !ready.includes(call));
  }
  return ordered;
}

/** What is wrong with a program, or undefined. */
export function problem({ calls, inputs }) {
  const names = calls.map((call) => call.name);
  for (const [i, name] of names.entries()) {
    if (!NAME.test(name) || RESERVED.has(name))
      return `The name “${name}” is not possible: use letters, digits and _, and begin with a letter.`;
    if (names.indexOf(name) !== i) return `Two calls are named ${name}.`;
  }
  const wrong = inputs.find((name) => RESERVED.has(name));
  if (wrong) return `The name “${wrong}” is not possible for an input.`;
  const empty = calls.find((call) => !call.prompt.replace(`{{${call.name}}}`, "").trim());
  if (empty) return `The prompt of ${empty.name} is empty.`;
  const early = new Set();
  for (const call of calls) {
    const late = call.takes.find((name) => names.includes(name) && !early.has(name));
    if (late) return `${call.name} reads ${late}, which needs ${call.name} itself.`;
    early.add(call.name);
  }
  return undefined;
}

/** Sampling of one call: its own, over the settings of all. */
function samplingOf(call, settings) {
  const config = { max_gen_length: settings.maxTokens, temperature: settings.temperature };
  if (settings.seed !== "") config.seed = Number(settings.seed);
  return { ...config, ...call.sampling };
}

/** The request for `POST /v1/semantic_graph`, without its session. */
export function graphRequest({ calls, inputs, settings }, values) {
  return {
    variables: inputs.map((name) => ({ name, content: values[name] ?? "" })),
    calls: calls.map((call) => ({
      template: call.template,
      func_name: call.name,
      ...(settings.chat && { chat: true }),
      ...(settings.chat && call.system && { system: call.system }),
      ...(settings.model && { models: [settings.model] }),
      parameters: [...new Set([...call.takes, call.name])].map((name) =>
        name === call.name
          ? { name, is_output: true, var: name, sampling_config: samplingOf(call, settings) }
          : { name, var: name },
      ),
    })),
  };
}

const text = (value) => JSON.stringify(value ?? "");
const python = (value) =>
  value === null
    ? "None"
    : value === true
      ? "True"
      : value === false
        ? "False"
        : Array.isArray(value)
          ? `[${value.map(python).join(", ")}]`
          : typeof value === "object"
            ? `{${Object.entries(value)
                .map(([k, v]) => `${text(k)}: ${python(v)}`)
                .join(", ")}}`
            : JSON.stringify(value);
const docstring = (template) => template.replaceAll("\\", "\\\\").replaceAll('"""', '\\"\\"\\"');

/** The same as a PFunc program. */
export function asPFunc({ calls, inputs, settings }, values, url) {
  const configs = calls.map((call) =>
    Object.entries(samplingOf(call, settings))
      .map(([name, value]) => `${name}=${python(value)}`)
      .join(", "),
  );
  const isShared = new Set(configs).size === 1;
  const functions = calls.map((call, i) => {
    const config = isShared ? "sampling" : `P.SamplingConfig(${configs[i]})`;
    const parameters = [
      ...call.takes.map((name) => `${name}: P.Input`),
      `${call.name}: P.Output(${config})`,
    ];
    const chat = call.system
      ? `P.chat_template.with_system(${text(call.system)})`
      : "P.chat_template";
    const options = [
      ...(call.template.includes("\n") ? ["formatter=P.allowing_newline"] : []),
      ...(settings.chat ? [`conversation_template=${chat}`] : []),
      ...(settings.model ? [`models=[${text(settings.model)}]`] : []),
    ];
    const line = options.join(", ");
    const given = line.length > 60 ? `\n    ${options.join(",\n    ")},\n` : line;
    return `@P.semantic_function(${given})\ndef make_${call.name}(${parameters.join(", ")}):\n    """${docstring(call.template)}"""`;
  });
  const given = inputs.map((name) => `    ${name} = ${text(values[name])}`);
  const made = calls.map(
    (call) =>
      `    ${call.name} = make_${call.name}(${call.takes.map((name) => `${name}=${name}`).join(", ")})`,
  );
  const read = new Set(calls.flatMap((call) => call.takes));
  const last = calls
    .filter((call) => !read.has(call.name))
    .map((call) => `    print(${call.name}.get())`);
  return [
    isShared
      ? `from parrot import P\n\nsampling = P.SamplingConfig(${configs[0]})`
      : "from parrot import P",
    ...functions,
    ["def main():", ...given, ...made, ...last].join("\n"),
    `P.VirtualMachine(${text(url)}).run(main)\n`,
  ].join("\n\n\n");
}

const shell = (url, body) =>
  `curl -s ${url} --json @- <<'JSON'\n${body.replaceAll("\nJSON", "\n JSON")}\nJSON`;

/** The same for a shell. */
export function asCurl(program, values, url) {
  const body = JSON.stringify({ session: {}, ...graphRequest(program, values) }, null, 2);
  const last = program.calls.at(-1).name;
  return [
    shell(`${url}/v1/semantic_graph`, body),
    `# with session_id, session_auth and the id of ${last} from the answer:`,
    `curl -sN '${url}/v1/semantic_var/VAR_ID/stream?session_id=SESSION_ID&session_auth=SESSION_AUTH'\n`,
  ].join("\n");
}

/** One request of an API client, for a shell. `prompt`: its parts with roles, cut at their cached end. */
export function apiCurl(call, prompt, sampling, url) {
  const messages = [];
  for (const { role, text: part } of prompt) {
    if (messages.at(-1)?.role === role) messages.at(-1).content += part ?? "";
    else messages.push({ role, content: part ?? "" });
  }
  const isChat = call.func_name !== "completion";
  const given = isChat
    ? { messages: messages.filter(({ role }) => role !== "markup") }
    : { prompt: messages.map(({ content }) => content).join("") };
  const { max_gen_length: max_tokens, temperature, top_p, seed } = sampling;
  const fields = { model: call.model, ...given, max_tokens, temperature, top_p, seed };
  return shell(`${url}/v1/${isChat ? "chat/" : ""}completions`, JSON.stringify(fields, null, 2));
}

/** A prompt as an f-string if it has placeholders. */
function filled(prompt) {
  const names = placeholders(prompt);
  if (!names.length) return text(prompt);
  return `f${text(prompt.replaceAll(PLACEHOLDER, "\u0001$1\u0002").replaceAll("{", "{{").replaceAll("}", "}}")).replaceAll("\\u0001", "{").replaceAll("\\u0002", "}")}`;
}

/** All calls with OpenAI's client. */
export function asOpenAI({ calls, inputs, settings }, values, url, models) {
  const limits = `temperature=${settings.temperature}, max_tokens=${settings.maxTokens}${settings.seed === "" ? "" : `, seed=${settings.seed}`}`;
  const model = text(settings.model || models[0] || "MODEL");
  const ask = settings.chat
    ? `def ask(*messages):\n    answer = client.chat.completions.create(model=${model}, ${limits}, messages=messages)\n    return answer.choices[0].message.content`
    : `def ask(prompt):\n    answer = client.completions.create(model=${model}, ${limits}, prompt=prompt)\n    return answer.choices[0].text`;
  const made = calls.map((call) => {
    const given = call.template.replace(`{{${call.name}}}`, "");
    const prompt = filled(settings.chat ? given.trimEnd() : given);
    if (!settings.chat) return `${call.name} = ask(${prompt})`;
    const messages = [
      ...(call.system ? [`{"role": "system", "content": ${text(call.system)}}`] : []),
      `{"role": "user", "content": ${prompt}}`,
    ];
    return messages.length > 1
      ? `${call.name} = ask(\n    ${messages.join(",\n    ")},\n)`
      : `${call.name} = ask(${messages[0]})`;
  });
  return [
    `from openai import OpenAI\n\nclient = OpenAI(base_url=${text(`${url}/v1`)}, api_key="any")`,
    ask,
    [
      ...inputs.map((name) => `${name} = ${text(values[name])}`),
      ...made,
      `print(${calls.at(-1).name})\n`,
    ].join("\n"),
  ].join("\n\n\n");
}
