// A program of the playground: templates whose placeholders are joined by their names.

const PLACEHOLDER = /\{\{([a-zA-Z_][a-zA-Z0-9_]*)\}\}/g;

/** The names in a template, in order and once each. */
export const placeholders = (template) => [
  ...new Set([...template.matchAll(PLACEHOLDER)].map(([, name]) => name)),
];

/**
 * What each call takes and makes. The last placeholder of a template is its output, unless an
 * earlier call makes it; any other that no call makes is an input of the program.
 */
export function readProgram(calls) {
  const made = new Set();
  const read = calls.map((call) => {
    const names = placeholders(call.template);
    const output = made.has(names.at(-1)) ? undefined : names.at(-1);
    if (output !== undefined) made.add(output);
    return { ...call, names, output };
  });
  const inputs = [...new Set(read.flatMap((call) => call.names))].filter((name) => !made.has(name));
  return { calls: read, inputs };
}

/** What is wrong with a program, or undefined. */
export function problem({ calls }) {
  const lost = calls.findIndex((call) => call.output === undefined);
  if (lost < 0) return undefined;
  return `Call ${lost + 1} has no output: end its template with a {{name}} of its own.`;
}

/** The request for `POST /v1/semantic_graph`, without its session. */
export function graphRequest({ calls, inputs }, values) {
  return {
    variables: inputs.map((name) => ({ name, content: values[name] ?? "" })),
    calls: calls.map((call) => ({
      template: call.template,
      func_name: `make_${call.output}`,
      parameters: call.names.map((name) =>
        name === call.output
          ? {
              name,
              is_output: true,
              var: name,
              sampling_config: { max_gen_length: call.maxTokens, temperature: call.temperature },
            }
          : { name, var: name },
      ),
    })),
  };
}

const text = (value) => JSON.stringify(value ?? "");
const config = (call) => `max_gen_length=${call.maxTokens}, temperature=${call.temperature}`;

/** The same as a PFunc program. */
export function asPFunc({ calls, inputs }, values, url) {
  const functions = calls.map((call) => {
    const parameters = call.names.map((name) =>
      name === call.output ? `${name}: P.Output(P.SamplingConfig(${config(call)}))` : `${name}: P.Input`,
    );
    const template = call.template.replaceAll("\\", "\\\\").replaceAll('"""', '\\"\\"\\"');
    return `@P.semantic_function(formatter=None)\ndef make_${call.output}(${parameters.join(", ")}):\n    """${template}"""`;
  });
  const given = inputs.map((name) => `    ${name} = ${text(values[name])}`);
  const made = calls.map((call) => {
    const taken = call.names.filter((name) => name !== call.output).map((name) => `${name}=${name}`);
    return `    ${call.output} = make_${call.output}(${taken.join(", ")})`;
  });
  const last = calls.at(-1).output;
  return [
    "from parrot import P",
    ...functions,
    ["def main():", ...given, ...made, `    print(${last}.get())`].join("\n"),
    `P.VirtualMachine(${text(url)}).run(main)\n`,
  ].join("\n\n\n");
}

/** The same for a shell. */
export function asCurl(program, values, url) {
  const body = JSON.stringify({ session: {}, ...graphRequest(program, values) }, null, 2);
  const last = program.calls.at(-1).output;
  return [
    `curl -s ${url}/v1/semantic_graph --json @- <<'JSON'\n${body}\nJSON`,
    `# with session_id, session_auth and the id of ${last} from the answer:`,
    `curl -sN '${url}/v1/semantic_var/VAR_ID/stream?session_id=SESSION_ID&session_auth=SESSION_AUTH'\n`,
  ].join("\n");
}

/** The first call as OpenAI's client asks it: one call knows nothing of the others. */
export function asOpenAI({ calls: [call] }, values, url, model) {
  const before = call.template.split(`{{${call.output}}}`)[0];
  const prompt = before.replaceAll(PLACEHOLDER, (_, name) => values[name] ?? "");
  return `from openai import OpenAI

client = OpenAI(base_url=${text(`${url}/v1`)}, api_key="any")
answer = client.completions.create(
    model=${text(model ?? "MODEL")},
    prompt=${text(prompt)},
    max_tokens=${call.maxTokens},
    temperature=${call.temperature},
)
print(answer.choices[0].text)
`;
}
