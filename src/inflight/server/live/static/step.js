// One step as `inflight show` draws it: the packed row, and which of its tokens attend to which keys.
import { html, useState } from "./html.js";
import { Canvas } from "./canvas.js";
import { SPAN, keyOf, useLive } from "./live.js";
import { rate, whole } from "./numbers.js";

const SEQUENCE_COLOURS = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"];

// A to Z, then AA, AB, …
const letters = (number) => (number >= 26 ? letters(Math.floor(number / 26) - 1) : "") + String.fromCharCode(65 + (number % 26));

// Letters and colours stay with a sequence from step to step.
const MOST_KNOWN = 10_000;
const numbers = new Map();
let nextNumber = 0;
function numberOf(span) {
  const key = keyOf(span[SPAN.id], span[SPAN.index]);
  if (!numbers.has(key)) numbers.set(key, nextNumber++);
  if (numbers.size > MOST_KNOWN) numbers.delete(numbers.keys().next().value);
  return numbers.get(key);
}

function viewsOf(step) {
  return step.spans.map((span) => {
    const number = numberOf(span);
    const [start, length, kind, proposed, accepted] = [SPAN.start, SPAN.length, SPAN.kind, SPAN.proposed, SPAN.accepted].map((field) => span[field]);
    return { span, number, letter: letters(number), colour: SEQUENCE_COLOURS[number % SEQUENCE_COLOURS.length], start, length, kind, proposed, accepted, keys: start + length };
  });
}

// The widths of columns (or rows): in proportion, but none too small to be seen.
function placed(lengths, size) {
  const least = 2, all = lengths.reduce((sum, each) => sum + each, 0);
  const free = Math.max(0, size - least * lengths.length);
  let x = 0;
  return lengths.map((each) => {
    const at = x, width = least + (free * each) / Math.max(1, all);
    x += width;
    return [at, width];
  });
}

function drawRow(views) {
  return (context, width, height, colour) => {
    placed(views.map((each) => each.length), width).forEach(([x, w], i) => {
      const view = views[i];
      context.fillStyle = colour(view.colour);
      context.fillRect(x, 0, Math.max(1, w - 1), height);
      if (view.proposed) {
        context.fillStyle = colour("rejected");
        context.fillRect(x + (w * (view.length - view.proposed)) / view.length, 0, (w * view.proposed) / view.length - 1, 4);
      }
      context.fillStyle = "#fff";
      context.font = "bold 12px system-ui";
      if (w > 14) context.fillText(view.letter, x + 4, height / 2 + 4);
    });
  };
}

// The first key that a query sees: as in `CacheGroup.first_visible`.
const firstVisible = (query, { window, chunk }) =>
  Math.max(0, window ? query - window + 1 : 0, chunk ? Math.floor(query / chunk) * chunk : 0);

const wordsOf = ({ window, chunk }) =>
  [window && `a window of ${window}`, chunk && `chunks of ${chunk}`].filter((each) => each).join(", ") || "the whole past";

function drawMask(views, group) {
  return (context, width, height, colour) => {
    context.fillStyle = colour("lane");
    context.fillRect(0, 0, width, height);
    const columns = placed(views.map((each) => each.keys), width), rows = placed(views.map((each) => each.length), height);
    views.forEach((view, i) => {
      const [x, w] = columns[i], [y, h] = rows[i];
      const keyAt = (key) => x + (w * key) / view.keys;
      const before = keyAt(view.start);
      context.fillStyle = colour(view.colour);
      const lines = Math.min(view.length, Math.max(1, Math.ceil(h)));
      for (let line = 0; line < lines; line++) {
        const query = view.start + Math.floor(((line + 0.5) * view.length) / lines);
        const first = firstVisible(query, group);
        const top = y + (h * line) / lines, thick = Math.max(0.5, h / lines);
        context.globalAlpha = 0.45;
        if (first < view.start) context.fillRect(keyAt(first), top, before - keyAt(first), thick);
        context.globalAlpha = 1;
        const from = Math.max(before, keyAt(first));
        context.fillRect(from, top, Math.max(1, keyAt(query + 1) - from), thick);
      }
    });
  };
}

const labelOf = (view) => `${view.kind === "prefill" ? "PREFILL" : view.kind}(${view.length - view.proposed}${view.proposed ? `+${view.accepted}/${view.proposed}` : ""})`;

export function Step({ about }) {
  const { engines } = useLive();
  const [held, setHeld] = useState(null); // a step; null: the last one
  const [number, setNumber] = useState(0);
  const engine = engines.get(number) ?? [...engines.values()][0];
  if (!engine || (!engine.steps.length && !held)) return html`<p class="card">No step has run since this page was opened. <a href="#playground">Send a request.</a></p>`;
  const { steps } = engine;
  const step = held ?? steps.at(-1);
  const views = viewsOf(step);
  const queries = views.reduce((sum, each) => sum + each.length, 0), keys = views.reduce((sum, each) => sum + each.keys, 0);
  const groups = about?.info.cache_groups ?? [{}];
  const place = steps.findIndex((each) => each.step === step.step);
  const go = (by) => {
    const next = steps[Math.max(0, Math.min(steps.length - 1, (place < 0 ? steps.length : place) + by))];
    setHeld(next);
  };
  return html`<div class="columns"><section class="card full">
    <h3>Step ${whole(step.step)} <span class="faint">${rate(step.duration * 1000)} ms; one row of ${whole(queries)} tokens from ${views.length} sequences; ${whole(step.num_waiting)} wait</span></h3>
    <p class="controls">
      ${engines.size > 1 && html`<label>replica <select value=${engine.number} onChange=${(e) => { setNumber(Number(e.target.value)); setHeld(null); }}>${[...engines.keys()].map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>`}
      <button type="button" onClick=${() => go(-1)}>before</button>
      <button type="button" onClick=${() => go(1)}>after</button>
      <label class="slider">of the last ${steps.length} that were sent
        <input type="range" min="0" max=${steps.length - 1} value=${place < 0 ? 0 : place} onInput=${(e) => setHeld(steps[Number(e.target.value)])} /></label>
      <button type="button" aria-pressed=${held ? "false" : "true"} onClick=${() => setHeld(null)}>follow the last</button>
      <button type="button" onClick=${() => setHeld(steps.findLast((each) => new Set(each.spans.map((s) => s[SPAN.kind] === "decode")).size === 2) ?? held)}>last that mixes prefill and decodes</button>
    </p>
    <h4>The row <span class="faint">each part is one sequence's; draft tokens have a mark</span></h4>
    <${Canvas} height=${34} draw=${drawRow(views)} label=${`The packed row: ${views.map((each) => `${each.letter} ${labelOf(each)}`).join(", ")}`} />
    ${groups.map((group) => html`<div key=${wordsOf(group)}>
      <h4>Who attends to what <span class="faint">${wordsOf(group)}; ${whole(queries)} queries (down) over ${whole(keys)} keys (across); pale: keys that were in the cache</span></h4>
      <${Canvas} height=${Math.max(120, Math.min(420, 14 * views.length + queries * 2))} draw=${drawMask(views, group)} label="The mask: every sequence sees its own past, and nothing of the others" />
    </div>`)}
    <div class="scroll"><table><thead><tr><th></th><th>request</th><th>slot</th><th>this step</th><th>cached before</th><th>tokens now</th></tr></thead>
      <tbody>${views.map((view) => html`<tr key=${view.letter}><td><i class="swatch ${view.colour}"></i> ${view.letter}</td><td><code>${view.span[SPAN.id]}</code></td>
        <td>${view.span[SPAN.slot]}</td><td>${labelOf(view)}</td><td>${whole(view.start)}</td><td>${whole(view.keys)}</td></tr>`)}</tbody></table></div>
    ${step.preempted.length > 0 && html`<p>Preempted to make room: ${step.preempted.map((each) => each[1]).join(", ")}</p>`}
    <p class="faint">At most 60 steps a second are sent; the pictures of every step, with texts and masks of all layers, are <code>inflight show</code>'s.</p>
  </section></div>`;
}
