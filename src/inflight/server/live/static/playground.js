// Chats and completions, several side by side, which shows batching.
import { html, useRef, useState } from "./html.js";
import { ServerError, address, forModel, stream } from "./server.js";
import { addText, remember } from "./own_requests.js";
import { rate, seconds } from "./numbers.js";

const NUMBERS = [
  ["max_tokens", "max tokens", "no limit but the context's"],
  ["temperature", "temperature", "the model's"],
  ["top_p", "top-p", "the model's"],
  ["top_k", "top-k", "the model's"],
  ["min_p", "min-p", "0"],
  ["seed", "seed", "differs"],
  ["n", "n", "1"],
  ["presence_penalty", "presence penalty", "0"],
  ["frequency_penalty", "frequency penalty", "0"],
  ["repetition_penalty", "repetition penalty", "1"],
  ["min_tokens", "min tokens", "0"],
  ["truncate_prompt_tokens", "last tokens of the prompt", "all"],
  ["priority", "priority", "0"],
];

const FORMS = {
  none: "any text",
  json: "JSON schema",
  json_object: "any JSON object",
  regex: "regular expression",
  choice: "one of these lines",
  grammar: "grammar (Lark or GBNF)",
};

const EXAMPLES = {
  json: '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}',
  regex: "[A-Z][a-z]{2,8} is [0-9]{1,2} years old\\.",
  choice: "yes\nno\nperhaps",
  grammar: 'start: "The " /[a-z]{3,6}/ " " ("sleeps" | "runs") "."',
};

const TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]';

const QUESTION = "Tell me a story about a fox.";
const STARTS = ["Once upon a time", "In a quiet village", "One cold morning, a fox", "Long ago there was a dragon"];

// The body of a request for these settings, without its prompt. Throws an error that names the field that is not JSON.
function bodyOf(settings, mode) {
  const body = {};
  for (const [name] of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  const stops = settings.stop.split("\n").filter((line) => line);
  if (stops.length) body.stop = stops;
  const bad = settings.bad_words.split("\n").filter((line) => line);
  if (bad.length) body.bad_words = bad;
  const ids = settings.stop_token_ids.split(/[\s,]+/).filter((each) => each);
  if (ids.length) body.stop_token_ids = ids.map(Number);
  if (settings.logit_bias.trim()) body.logit_bias = parsed(settings.logit_bias, "the logit bias");
  if (settings.cache_salt) body.cache_salt = settings.cache_salt;
  if (settings.ignore_eos) body.ignore_eos = true;
  if (settings.logprobs) Object.assign(body, mode === "chat" ? { logprobs: true, top_logprobs: 4 } : { logprobs: 4 });
  if (!settings.speculation) body.speculation = false;
  if (settings.form === "json_object") body.structured_outputs = { json_object: true };
  else if (settings.form === "json") body.structured_outputs = { json: parsed(settings.pattern, "the JSON schema") };
  else if (settings.form === "choice") body.structured_outputs = { choice: settings.pattern.split("\n").filter((line) => line) };
  else if (settings.form !== "none") body.structured_outputs = { [settings.form]: settings.pattern };
  if (mode === "chat" && settings.tools.trim()) {
    body.tools = parsed(settings.tools, "the list of tools");
    if (settings.tool_choice !== "auto") body.tool_choice = settings.tool_choice;
  }
  return body;
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

const asPath = (mode) => (mode === "chat" ? "v1/chat/completions" : "v1/completions");

function asCurl(mode, body) {
  const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  return `curl -N ${address(asPath(mode))} -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}

const OPENAI_NAMES = ["model", "messages", "prompt", "stream", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "tools", "tool_choice"];

const python = (value) => JSON.stringify(value, null, 1).replace(/("(?:[^"\\]|\\.)*")|\b(true|false|null)\b/g, (_, text, word) => text ?? { true: "True", false: "False", null: "None" }[word]);

function asPython(mode, body, model) {
  const own = {}, extra = {};
  for (const [name, value] of Object.entries(body)) (OPENAI_NAMES.includes(name) ? own : extra)[name] = value;
  const args = Object.entries({ model, ...own }).map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(extra).length) args.push(`    extra_body=${python(extra)},`);
  const chat = mode === "chat";
  return [
    "from openai import OpenAI  # pip install openai",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address("v1"))}, api_key="none")`,
    `answer = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...args,
    ")",
    "for chunk in answer:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${chat ? "delta.content" : "text"} or "", end="", flush=True)`,
    "",
  ].join("\n");
}

// A streamed answer: tokens with their log-probabilities, or plain text; tool calls; the times of its start and end.
const newAnswer = () => ({ pieces: [], calls: [], start: performance.now(), first: null, end: null, tokens: 0, reason: null, error: null });

function takeChunk(answers, chunk, mode) {
  for (const choice of chunk.choices ?? []) {
    const answer = (answers[choice.index] ??= newAnswer());
    const text = mode === "chat" ? choice.delta?.content ?? "" : choice.text ?? "";
    const scored = mode === "chat" ? choice.logprobs?.content : fromCompletion(choice.logprobs);
    if (scored?.length) for (const each of scored) answer.pieces.push({ text: each.token, logprob: each.logprob, others: each.top_logprobs ?? [], isSpecial: !text });
    else if (text) answer.pieces.push({ text });
    for (const call of choice.delta?.tool_calls ?? []) {
      const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "" });
      known.id ||= call.id ?? "";
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (text || choice.delta?.tool_calls) answer.first ??= performance.now();
    if (choice.finish_reason) Object.assign(answer, { reason: choice.finish_reason, end: performance.now() });
    addText(chunk.id, choice.index, text);
  }
  if (chunk.usage) for (const answer of Object.values(answers)) answer.usage = chunk.usage;
}

const fromCompletion = (scores) =>
  scores?.tokens?.map((token, i) => ({
    token,
    logprob: scores.token_logprobs[i],
    top_logprobs: Object.entries(scores.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function Piece({ piece }) {
  if (piece.logprob === undefined) return html`<span>${piece.text}</span>`;
  const level = Math.min(4, Math.floor(-piece.logprob));
  const others = piece.others.map((each) => `${JSON.stringify(each.token)} ${percent(each.logprob)}`).join("\n");
  return html`<span class="scored p${level} ${piece.isSpecial ? "faint" : ""}" tabindex="0" title=${`${JSON.stringify(piece.text)} ${percent(piece.logprob)}\n\n${others}`}>${piece.text}</span>`;
}

function ToolCall({ call, onResult }) {
  const [result, setResult] = useState("");
  return html`<div class="call"><code>${call.name}(${call.arguments})</code>
    ${onResult && html`<form onSubmit=${(event) => { event.preventDefault(); onResult(result); }}>
      <label>its result <input value=${result} onInput=${(event) => setResult(event.target.value)} /></label><button type="submit">answer</button></form>`}</div>`;
}

function Answer({ answer, onResult }) {
  const count = answer.usage?.completion_tokens;
  const took = answer.end && (answer.end - answer.start) / 1000;
  return html`<div class="answer">
    <p class="text" aria-live="off">${answer.pieces.map((piece, i) => html`<${Piece} key=${i} piece=${piece} />`)}${answer.end || answer.error ? "" : html`<span class="caret" />`}</p>
    ${answer.calls.map((call, i) => html`<${ToolCall} key=${i} call=${call} onResult=${onResult && ((result) => onResult(answer, call, result))} />`)}
    ${answer.error && html`<p class="error" role="alert">${answer.error}</p>`}
    <p class="faint">${answer.first ? `first token after ${seconds((answer.first - answer.start) / 1000)}` : "waiting"}${took ? `, ended (${answer.reason}) after ${seconds(took)}` : ""}${count ? `, ${rate(count / took)} tokens/s` : ""}</p>
  </div>`;
}

// A message's content is a text, or a list of images and then a text.
const textIn = (content) => (typeof content === "string" ? content : content.at(-1).text);

function Content({ content }) {
  const images = typeof content === "string" ? [] : content.slice(0, -1);
  return html`${images.length > 0 && html`<p class="images">${images.map((part, i) => html`<img key=${i} src=${part.image_url.url} alt=${`image ${i + 1}`} />`)}</p>`}
    <p class="text">${textIn(content)}</p>`;
}

let nextNumber = 0;

// A file with its data URL, and a number by which its thumbnail is known.
const readImage = (file) =>
  new Promise((resolve, reject) => {
    if (!file.type.startsWith("image/")) return reject(new Error(`${file.name} is not an image`));
    const reader = new FileReader();
    reader.onload = () => resolve({ number: nextNumber++, name: file.name, url: reader.result });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });

const newColumn = (text = "") => ({ number: nextNumber++, text, images: [], messages: [], answers: {}, controller: null });

const EMPTY = { ...Object.fromEntries(NUMBERS.map(([name]) => [name, ""])), stop: "", bad_words: "", stop_token_ids: "", logit_bias: "", cache_salt: "", ignore_eos: false, logprobs: false, speculation: true, form: "none", pattern: "", tools: "", tool_choice: "auto", system: "" };

// The page's content survives a change of tabs.
const kept = { mode: null, settings: { ...EMPTY, max_tokens: "120" }, columns: [newColumn(STARTS[0])], isUntouched: true };

export function Playground({ about }) {
  const [picked, setPicked] = useState(kept.mode);
  const mode = picked ?? (about?.can_chat ? "chat" : "completion");
  const [settings, setSettings] = useState(kept.settings);
  const [, redraw] = useState(0);
  const [shown, setShown] = useState(null); // a request as curl or Python
  const [error, setError] = useState("");
  const columns = useRef(kept.columns);
  const frame = useRef(0);
  Object.assign(kept, { mode: kept.mode, settings, columns: columns.current });
  const set = (name, value) => setSettings((before) => ({ ...before, [name]: value }));
  const changed = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => redraw((number) => number + 1));
  };
  const choose = (chosen) => {
    kept.mode = chosen;
    const [first] = columns.current;
    if (chosen === "chat" && first.text === STARTS[0]) first.text = QUESTION;
    if (chosen === "completion" && first.text === QUESTION) first.text = STARTS[0];
    for (const column of columns.current) Object.assign(column, { messages: [], answers: {} });
    setPicked(chosen);
  };

  const requestOf = (column, messages) => {
    const body = forModel(bodyOf(settings, mode));
    if (mode === "completion") return { ...body, prompt: column.text };
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    return { ...body, messages: [...system, ...messages] };
  };

  const readsImages = mode === "chat" && about?.info.input_modalities.includes("image");
  const messageOf = ({ text, images }) => {
    const parts = readsImages ? images.map(({ url }) => ({ type: "image_url", image_url: { url } })) : [];
    return { role: "user", content: parts.length ? [...parts, { type: "text", text }] : text };
  };
  const attach = async (column, files) => {
    try {
      const read = await Promise.all([...files].map(readImage));
      column.images = [...column.images, ...read];
      setError("");
    } catch (wrong) {
      setError(wrong.message);
    }
    changed();
  };
  const take = (column) => (event) => {
    const { files, types } = event.dataTransfer ?? event.clipboardData;
    if (!files.length || types.includes("text/plain")) return; // the box takes texts
    event.preventDefault();
    attach(column, files);
  };
  const detach = (column, image) => {
    column.images = column.images.filter((each) => each !== image);
    changed();
  };

  const run = async (column, messages) => {
    let request;
    try {
      request = requestOf(column, messages);
    } catch (wrong) {
      return setError(wrong.message);
    }
    setError("");
    column.controller?.abort();
    const controller = (column.controller = new AbortController());
    const answers = (column.answers = { 0: newAnswer() });
    column.messages = messages;
    changed();
    try {
      await stream(asPath(mode), {
        body: { ...request, stream: true, stream_options: { include_usage: true } },
        signal: controller.signal,
        onEvent: (data) => {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new ServerError(500, chunk.error.message);
          if (!column.id || column.id !== chunk.id) remember((column.id = chunk.id), mode === "chat" ? textIn(messages.at(-1).content) : column.text);
          takeChunk(answers, chunk, mode);
          changed();
        },
      });
    } catch (failure) {
      if (!controller.signal.aborted) answers[0].error = failure.message;
    }
    for (const answer of Object.values(answers)) answer.end ??= performance.now();
    column.controller = null;
    if (mode === "chat" && !answers[0].error) {
      const { pieces, calls } = answers[0];
      const content = pieces.filter((piece) => !piece.isSpecial).map((piece) => piece.text).join("");
      const said = { role: "assistant", content };
      if (calls.length) said.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      column.said = said;
    }
    changed();
  };

  const send = (column) => {
    if (mode === "completion") return run(column, []);
    const before = column.said && Object.keys(column.answers).length ? [...column.messages, column.said] : column.messages;
    column.said = null;
    const message = messageOf(column);
    Object.assign(column, { text: "", images: [] });
    return run(column, [...before, message]);
  };
  const sendAll = () => columns.current.filter((column) => column.text || column.images.length || mode === "completion").forEach((column) => send(column));
  const answerCall = (column) => (answer, call, result) => {
    const before = [...column.messages, column.said];
    column.said = null;
    run(column, [...before, { role: "tool", tool_call_id: call.id, content: result }]);
  };
  const forget = (column) => {
    column.controller?.abort();
    Object.assign(column, { messages: [], answers: {}, said: null });
    changed();
  };
  const add = () => {
    const number = columns.current.length;
    columns.current = [...columns.current, newColumn(mode === "completion" ? STARTS[number % STARTS.length] : columns.current[0].text)];
    changed();
  };
  const remove = (column) => {
    column.controller?.abort();
    columns.current = columns.current.filter((each) => each !== column);
    changed();
  };
  const write = (how) => {
    const column = columns.current[0];
    try {
      const messages = [...column.messages, ...(column.said ? [column.said] : []), ...(column.text || column.images.length ? [messageOf(column)] : [])];
      const body = { ...requestOf(column, messages), stream: true };
      setShown(how === "curl" ? asCurl(mode, body) : asPython(mode, body, about.model));
      setError("");
    } catch (wrong) {
      setError(wrong.message);
    }
  };
  const runs = columns.current.some((column) => column.controller);

  // Its fields do not change afterwards.
  if (!about) return html`<p class="faint">asking the server what its model can do …</p>`;
  if (kept.isUntouched && mode === "chat") columns.current[0].text = QUESTION;
  kept.isUntouched = false;
  return html`<div class="playground">
    <form class="card settings" onSubmit=${(event) => { event.preventDefault(); sendAll(); }}>
      <fieldset><legend>Kind</legend>
        ${["chat", "completion"].map((each) => html`<label key=${each}><input type="radio" name="mode" value=${each} checked=${mode === each} disabled=${each === "chat" && !about.can_chat} onChange=${() => choose(each)} /> ${each}</label>`)}
      </fieldset>
      ${mode === "chat" && html`<label class="field">system message<textarea rows="2" value=${settings.system} onInput=${(e) => set("system", e.target.value)} /></label>`}
      <details open><summary>Sampling</summary><div class="numbers">
        ${NUMBERS.map(([name, label, unset]) => html`<label key=${name} class="field">${label}<input type="number" step="any" name=${name} placeholder=${unset} value=${settings[name]} onInput=${(e) => set(name, e.target.value)} /></label>`)}
        <label class="field full">stop strings, one a line<textarea rows="1" name="stop" value=${settings.stop} onInput=${(e) => set("stop", e.target.value)} /></label>
        <label class="field full">words that never come, one a line<textarea rows="1" name="bad_words" value=${settings.bad_words} onInput=${(e) => set("bad_words", e.target.value)} /></label>
        ${[["stop_token_ids", "stop token ids", "2, 5"], ["logit_bias", "logit bias", '{"42": -5}'], ["cache_salt", "cache salt", "none"]].map(
          ([name, label, example]) => html`<label key=${name} class="field">${label}<input name=${name} placeholder=${example} value=${settings[name]} onInput=${(e) => set(name, e.target.value)} /></label>`)}
        <label><input type="checkbox" name="ignore_eos" checked=${settings.ignore_eos} onChange=${(e) => set("ignore_eos", e.target.checked)} /> go on past the end</label>
        <label><input type="checkbox" name="logprobs" checked=${settings.logprobs} onChange=${(e) => set("logprobs", e.target.checked)} /> log-probabilities</label>
        <label><input type="checkbox" name="speculation" checked=${settings.speculation} onChange=${(e) => set("speculation", e.target.checked)} /> speculation</label>
      </div></details>
      <details><summary>Form of the output</summary>
        <label class="field">it must be<select name="form" value=${settings.form} onChange=${(e) => { set("form", e.target.value); set("pattern", EXAMPLES[e.target.value] ?? ""); }}>
          ${Object.entries(FORMS).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}</select></label>
        ${settings.form in EXAMPLES && html`<label class="field">${FORMS[settings.form]}<textarea rows="5" name="pattern" spellcheck="false" value=${settings.pattern} onInput=${(e) => set("pattern", e.target.value)} /></label>`}
      </details>
      ${mode === "chat" && html`<details><summary>Tools</summary>
        <label class="field">as in OpenAI's API<textarea rows="5" name="tools" spellcheck="false" placeholder=${TOOLS_EXAMPLE} value=${settings.tools} onInput=${(e) => set("tools", e.target.value)} /></label>
        <button type="button" onClick=${() => set("tools", TOOLS_EXAMPLE)}>an example</button>
        <label class="field">they are called<select name="tool_choice" value=${settings.tool_choice} onChange=${(e) => set("tool_choice", e.target.value)}><option value="auto">if the model wants</option><option value="required">always</option><option value="none">never</option></select></label>
      </details>`}
      <p class="controls"><button type="submit" class="main">${columns.current.length > 1 ? `Send all ${columns.current.length}` : "Send"}</button>
        ${runs && html`<button type="button" onClick=${() => columns.current.forEach((column) => column.controller?.abort())}>Stop</button>`}
        <button type="button" onClick=${add}>Add a prompt beside</button></p>
      <p class="controls"><button type="button" onClick=${() => write("curl")}>as curl</button><button type="button" onClick=${() => write("python")}>as Python</button></p>
      ${error && html`<p class="error" role="alert">${error}</p>`}
    </form>
    <div class="beside">
      ${shown && html`<section class="card full"><h3>The first request <button type="button" onClick=${() => navigator.clipboard?.writeText(shown)}>copy</button> <button type="button" onClick=${() => setShown(null)}>close</button></h3><pre class="code">${shown}</pre></section>`}
      ${columns.current.map((column, place) => html`<section class="card column" key=${column.number} aria-label=${`Prompt ${place + 1}`}
          ...${readsImages && { onPaste: take(column), onDrop: take(column), onDragOver: (e) => e.dataTransfer.types.includes("Files") && e.preventDefault() }}>
        ${column.messages.map((message, i) => html`<div key=${i} class="message ${message.role}"><span class="faint">${message.role}</span>
          <${Content} content=${message.content} />${message.tool_calls?.map((call, j) => html`<code key=${j}>${call.function.name}(${call.function.arguments})</code>`)}</div>`)}
        ${Object.entries(column.answers).map(([index, answer]) => html`<${Answer} key=${index} answer=${answer} onResult=${column.said?.tool_calls && !column.controller ? answerCall(column) : null} />`)}
        <label class="field"><span class="hidden">${mode === "chat" ? "Your message" : "The prompt"}</span>
          <textarea rows="3" class="prompt" placeholder=${mode === "chat" ? "Say something" : "A text to go on with"} value=${column.text}
            onInput=${(e) => { column.text = e.target.value; changed(); }} onKeyDown=${(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && send(column)} /></label>
        ${readsImages && column.images.length > 0 && html`<p class="images">${column.images.map((image) => html`<span key=${image.number}><img src=${image.url} alt=${image.name} /><button type="button" aria-label=${`Remove ${image.name}`} onClick=${() => detach(column, image)}>×</button></span>`)}</p>`}
        <p class="controls"><button type="button" onClick=${() => send(column)}>Send this</button>
          ${readsImages && html`<button type="button" onClick=${(e) => e.target.nextElementSibling.click()}>Attach images</button>
            <input type="file" accept="image/*" multiple hidden aria-label="Images" onChange=${(e) => { attach(column, e.target.files); e.target.value = ""; }} />`}
          ${(column.messages.length > 0 || Object.keys(column.answers).length > 0) && html`<button type="button" onClick=${() => forget(column)}>Clear</button>`}
          ${columns.current.length > 1 && html`<button type="button" onClick=${() => remove(column)}>Remove</button>`}</p>
      </section>`)}
    </div>
  </div>`;
}
