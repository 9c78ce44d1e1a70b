// Builds the page into the Python package: `npm ci && npm run build`. With `--check` it builds into
// memory and fails if the committed files are different, or larger than a page may be.
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { minify } from "terser";

const MAX_BYTES = 60_000; // All files together, compressed with gzip.

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
  jsx: "transform",
  jsxFactory: "h",
  jsxFragment: "Fragment",
  inject: [here("src/jsx.js")],
  legalComments: "inline",
});
const files = {};
for (const name of ["index.html", "icon.svg"]) files[name] = await readFile(here(`src/${name}`));
files["preact.license.txt"] = await readFile(here("node_modules/preact/LICENSE"));
for (const file of built.outputFiles)
  files[file.path.split("/").pop()] = Buffer.from(file.contents);
// Terser makes the script of esbuild smaller by another 4 %.
const smaller = await minify(files["app.js"].toString(), { module: true, compress: { passes: 3 } });
files["app.js"] = Buffer.from(smaller.code);

const fail = (message) => {
  console.error(message);
  process.exit(1);
};

const size = Object.values(files).reduce((sum, contents) => sum + gzipSync(contents, { level: 9 }).length, 0);
if (size > MAX_BYTES) fail(`the page has ${size} bytes with gzip; the limit is ${MAX_BYTES}`);
const isCheck = process.argv.includes("--check");
for (const [name, contents] of Object.entries(files)) {
  if (!isCheck) {
    await writeFile(target(name), contents);
  } else if (!contents.equals(await readFile(target(name)).catch(() => Buffer.alloc(0)))) {
    fail(`${name} is not what the sources give: npm run build`);
  }
}
console.log(`${size} bytes with gzip`);
