// Builds the page into the Python package: `npm ci && npm run build`. With `--check` it builds into
// memory and fails if the committed files are different.
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const target = (name) => here(`../parrot/gateway/page/static/${name}`);

const built = await build({
  entryPoints: { app: here("src/main.jsx") },
  bundle: true,
  minify: true,
  write: false,
  outdir: "static",
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "inline",
});
const files = {};
for (const name of ["index.html", "icon.svg"]) files[name] = await readFile(here(`src/${name}`));
files["preact.license.txt"] = await readFile(here("node_modules/preact/LICENSE"));
for (const file of built.outputFiles) files[file.path.split("/").pop()] = Buffer.from(file.contents);

for (const [name, contents] of Object.entries(files)) {
  if (!process.argv.includes("--check")) {
    await writeFile(target(name), contents);
  } else if (!contents.equals(await readFile(target(name)).catch(() => Buffer.alloc(0)))) {
    console.error(`${name} is not what the sources give: npm run build`);
    process.exit(1);
  }
}
