// What JSX becomes: calls of preact. The build adds these names to each file.
export { Fragment, h } from "preact";
