// The endpoints, from the server's own description of itself.
import { html, useEffect, useState } from "./html.js";
import { address, get } from "./server.js";

const METHODS = ["get", "post", "delete"];

export function Endpoints() {
  const [api, setApi] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    get("openapi.json").then(setApi, (failure) => setError(failure.message));
  }, []);
  if (!api) return html`<p class="faint">${error || "asking …"}</p>`;
  const found = Object.entries(api.paths)
    .filter(([path]) => !path.startsWith("/live"))
    .flatMap(([path, operations]) => METHODS.filter((method) => operations[method]).map((method) => [method, path, operations[method]]));
  return html`<div class="columns"><section class="card full">
    <h3>Endpoints <a class="faint" href=${address("openapi.json")}>openapi.json</a></h3>
    <p>OpenAI's clients work with <code>${address("v1")}</code> as base URL, Anthropic's with <code>${address("").replace(/\/$/, "")}</code>.</p>
    ${found.map(([method, path, operation]) => html`<details key=${method + path}><summary><b class="method">${method.toUpperCase()}</b> <code>${path}</code> <span class="faint">${(operation.description ?? operation.summary ?? "").split("\n")[0]}</span></summary>
      <p class="text">${operation.description ?? ""}</p><${Fields} api=${api} operation=${operation} /></details>`)}
  </section></div>`;
}

function Fields({ api, operation }) {
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const resolved = schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema;
  const fields = [...(operation.parameters ?? []).map((each) => [each.name, each.schema]), ...Object.entries(resolved?.properties ?? {})];
  if (!fields.length) return null;
  return html`<table><tbody>${fields.map(([name, field]) => html`<tr key=${name}><th><code>${name}</code>${resolved?.required?.includes(name) ? " *" : ""}</th><td>${typeOf(field)}</td></tr>`)}</tbody></table>`;
}

function typeOf(field) {
  if (field.$ref) return field.$ref.split("/").at(-1);
  const options = field.anyOf ?? field.oneOf;
  if (options) return [...new Set(options.filter((each) => each.type !== "null").map(typeOf))].join(" or ");
  if (field.enum) return field.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (field.const !== undefined) return JSON.stringify(field.const);
  return field.type === "array" ? `list of ${typeOf(field.items ?? {})}` : field.type ?? "anything";
}
