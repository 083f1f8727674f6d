// The current state of the engines: slots as lanes, the queue, the cache, and the main figures.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Canvas } from "./canvas.js";
import { Chart } from "./chart.js";
import { SEQUENCE, keyOf, useLive } from "./live.js";
import { bytes, rate, seconds, share, whole } from "./numbers.js";
import { get } from "./server.js";
import { textOf } from "./own_requests.js";

const CELL = 5; // pixels of a token
const CHARTS_PER_SECOND = 2;
const LANE_HEIGHT = 22;
const PROMPT_SHARE = 0.25; // of a lane's width, at most

function drawLane(lane) {
  return (context, width, height, colour) => {
    context.fillStyle = colour("lane");
    context.fillRect(0, 0, width, height);
    if (!lane) return;
    const [prompt, computed, cached] = [SEQUENCE.prompt, SEQUENCE.computed, SEQUENCE.cached].map((field) => lane.sequence[field]);
    const promptWidth = Math.min(prompt * CELL, width * PROMPT_SHARE);
    const at = (tokens) => (Math.min(tokens, prompt) / prompt) * promptWidth;
    context.fillStyle = colour("prefill");
    context.fillRect(0, 2, at(computed), height - 4);
    context.fillStyle = colour("cached");
    context.fillRect(0, 2, at(Math.min(cached, computed)), height - 4);
    context.strokeStyle = colour("prefill");
    context.strokeRect(0.5, 2.5, promptWidth - 1, height - 5);
    const room = Math.max(1, Math.floor((width - promptWidth - 4) / CELL));
    const drawn = [];
    let left = room;
    for (let i = lane.outputs.length - 1; i >= 0 && left > 0; i--) {
      const [kind, number] = lane.outputs[i];
      const shown = kind === "rejected" ? number : Math.min(number, left);
      drawn.unshift([kind, shown]);
      if (kind !== "rejected") left -= shown;
    }
    let x = promptWidth + 4;
    for (const [kind, number] of drawn) {
      context.fillStyle = colour(kind);
      if (kind === "rejected") {
        context.fillRect(x - 1, 0, 2, height); // rejected draft tokens leave a mark, and no token
        continue;
      }
      for (let i = 0; i < number; i++, x += CELL) context.fillRect(x, 4, CELL - 1, height - 8);
    }
  };
}

function wordsOf(lane) {
  if (!lane) return "idle";
  const s = lane.sequence, outputs = s[SEQUENCE.tokens] - s[SEQUENCE.prompt];
  if (!outputs) return `prefill ${whole(s[SEQUENCE.computed])} of ${whole(s[SEQUENCE.prompt])}`;
  return `decode ${whole(outputs)}`;
}

function LaneRow({ slot, lane, isOpen, onOpen }) {
  const about = lane ? `Slot ${slot}: request ${lane.id}, ${wordsOf(lane)} tokens` : `Slot ${slot}: idle`;
  return html`<li><button type="button" class="lane" disabled=${!lane} aria-expanded=${isOpen ? "true" : "false"} aria-label=${about} onClick=${onOpen}>
    <span class="slot">${slot}</span>
    <span class="words">${wordsOf(lane)}</span>
    <${Canvas} height=${LANE_HEIGHT} draw=${drawLane(lane)} version=${lane ? `${lane.id} ${lane.index} ${lane.version}` : "idle"} />
  </button></li>`;
}

// The details of a request, updated every second while it runs.
function RequestPanel({ id, index, lane, shows, onClose }) {
  const [about, setAbout] = useState(null);
  const panel = useRef(null);
  useEffect(() => {
    let isGone = false;
    const ask = () => get(`live/requests/${encodeURIComponent(id)}`).then(
      (found) => !isGone && setAbout(found),
      () => !isGone && setAbout((known) => known && { ...known, hasEnded: true }),
    );
    ask();
    const timer = setInterval(ask, 1000);
    panel.current?.focus();
    return () => { isGone = true; clearInterval(timer); };
  }, [id]);
  const own = textOf(id) ?? textOf(id.replace(/-\d+$/, ""));
  const prompt = about?.prompt ?? own?.prompt, text = about?.texts?.[index] ?? own?.texts[index];
  const facts = about && [
    ["prompt", `${whole(about.num_prompt_tokens)} tokens`],
    ["output", `${whole(about.num_output_tokens)}${about.max_tokens ? ` of ${whole(about.max_tokens)}` : ""} tokens`],
    ["first token after", seconds(about.seconds_to_first_token)],
    ["running for", about.hasEnded ? "ended" : seconds(about.seconds)],
    ["temperature", about.temperature],
    ["top-p, top-k, min-p", `${about.top_p}, ${about.top_k}, ${about.min_p}`],
    ["sequences", about.n],
    ["priority", about.priority],
    ["structured", about.is_structured ? "yes" : "no"],
  ];
  const s = lane?.sequence;
  return html`<section class="card request" tabindex="-1" ref=${panel} aria-label="Request ${id}" onKeyDown=${(e) => e.key === "Escape" && onClose()}>
    <h3>${id}${index ? `, sequence ${index}` : ""} <button type="button" onClick=${onClose}>close</button></h3>
    ${facts ? html`<dl>${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
      ${s && html`<div><dt>found in the cache</dt><dd>${whole(s[SEQUENCE.cached])}</dd></div>
        <div><dt>draft tokens accepted</dt><dd>${whole(s[SEQUENCE.accepted])} of ${whole(s[SEQUENCE.proposed])}</dd></div>
        <div><dt>blocks</dt><dd>${whole(s[SEQUENCE.blocks])}</dd></div>
        <div><dt>preemptions</dt><dd>${whole(s[SEQUENCE.preemptions])}</dd></div>`}
    </dl>` : html`<p class="faint">It has ended, or is not this server's (a batch job's, say).</p>`}
    ${prompt || text
      ? html`<pre class="text"><b>${typeof prompt === "string" ? prompt : JSON.stringify(prompt)}</b>${text}</pre>`
      : html`<p class="faint">${shows ? "" : "Its text is not shown: it is not this page's request, and the server does not log texts (--log-text)."}</p>`}
  </section>`;
}

function drawBlocks(blocks) {
  return (context, width, height, colour) => {
    if (!blocks) return;
    let size = 9;
    while (size > 3 && Math.ceil(blocks.length / Math.floor(width / size)) * size > height) size--;
    const columns = Math.floor(width / size), cells = columns * Math.floor(height / size);
    const each = Math.max(1, Math.ceil(blocks.length / cells));
    const colourOf = { 0: colour("lane"), 1: colour("cached"), 2: colour("decode") };
    for (let i = 0, cell = 0; i < blocks.length; i += each, cell++) {
      let most = 0;
      for (let j = i; j < Math.min(i + each, blocks.length); j++) most = Math.max(most, blocks[j]);
      context.fillStyle = colourOf[most] ?? colour("shared");
      context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
    }
  };
}

function Tile({ label, value, more }) {
  return html`<div class="tile"><span class="label">${label}</span><span class="value">${value}</span><span class="more">${more}</span></div>`;
}

function Engine({ engine, title, slots, about, opened, onOpen }) {
  const { state, lanes, blocks, samples } = engine, { stats } = state;
  const shared = blocks ? blocks.reduce((sum, each) => sum + (each > 2), 0) : 0;
  const end = samples.at(-1)?.[0] ?? 0;
  const data = useMemo(
    () => [samples.map((each) => each[0] - end), samples.map((each) => each[1]), samples.map((each) => each[2])],
    [Math.floor(end * CHARTS_PER_SECOND)],
  );
  const open = opened && [...lanes.values()].find((each) => keyOf(each.id, each.index) === opened.key);
  return html`<section class="engine" aria-label=${title}>
    ${title && html`<h2>${title}</h2>`}
    <div class="columns">
      <div class="wide stack">
      <section class="card">
        <h3>Slots <span class="faint">${stats.num_running} of ${slots} run; ${rate(state.num_steps ? (state.busy_seconds / state.num_steps) * 1000 : null)} ms a step</span></h3>
        <ol class="lanes" start="0">
          ${Array.from({ length: Math.max(1, Math.min(slots, Math.max(8, Math.max(-1, ...lanes.keys()) + 1))) }, (_, slot) => {
            const lane = lanes.get(slot);
            const key = lane && keyOf(lane.id, lane.index);
            return html`<${LaneRow} key=${slot} slot=${slot} lane=${lane} isOpen=${opened !== null && opened.key === key} onOpen=${() => onOpen(lane)} />`;
          })}
        </ol>
        <p class="legend">${[["cached", "found in the cache"], ["prefill", "prompt"], ["decode", "decoded"], ["accepted", "draft, accepted"], ["rejected", "draft, rejected"]].map(
          ([name, words]) => html`<span key=${name}><i class="swatch ${name}"></i>${words}</span>`)}</p>
        ${opened && opened.engine === engine.number && html`<${RequestPanel} id=${opened.id} index=${opened.index} lane=${open} shows=${about?.shows_texts} onClose=${() => onOpen(null)} />`}
      </section>
      <section class="card">
        <h3>Tokens a second <span class="faint">the last minute</span></h3>
        <${Chart} data=${data} height=${150} label="Generated and prefilled tokens a second in the last minute" value=${rate}
          lines=${[{ label: "generated", colour: "decode" }, { label: "prefilled", colour: "prefill" }]} />
      </section>
      </div>
      <section class="card">
        <h3>Queue <span class="faint">${whole(stats.num_waiting)} wait</span></h3>
        <ol class="queue">${state.waiting.map((each) => html`<li key=${keyOf(each[SEQUENCE.id], each[SEQUENCE.index])}>
          <code>${each[SEQUENCE.id]}</code> <span class="faint">${whole(each[SEQUENCE.tokens])} tokens${each[SEQUENCE.preemptions] ? ", preempted" : ""}</span></li>`)}
        </ol>
        ${stats.num_waiting > state.waiting.length && html`<p class="faint">and ${whole(stats.num_waiting - state.waiting.length)} more</p>`}
        <h3>Cache <span class="faint">${whole(stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free)} blocks</span></h3>
        <${Canvas} height=${110} draw=${drawBlocks(blocks)} version=${engine.blocksVersion} label=${`Cache: ${stats.num_blocks_used} blocks used, ${shared} of them shared, ${stats.num_blocks_cached} cached, ${stats.num_blocks_free} free`} />
        <p class="legend"><span><i class="swatch decode"></i>used ${whole(stats.num_blocks_used - shared)}</span><span><i class="swatch shared"></i>shared ${whole(shared)}</span>
          <span><i class="swatch cached"></i>cached ${whole(stats.num_blocks_cached)}${stats.num_blocks_kept ? `, of them kept for sessions ${whole(stats.num_blocks_kept)}` : ""}</span><span><i class="swatch lane"></i>free ${whole(stats.num_blocks_free)}</span></p>
      </section>
    </div>
  </section>`;
}

export function Now({ about }) {
  const live = useLive();
  const { engines, message, isPaused } = live;
  const [opened, setOpened] = useState(null);
  if (!message) return html`<p class="faint">waiting for the first message …</p>`;
  const shown = [...engines.values()].filter((each) => message.engines[each.number]);
  const sum = (read) => shown.reduce((total, each) => total + read(each), 0);
  const [firsts, betweens] = [message.latencies.to_first_token, message.latencies.between_tokens];
  const proposed = sum((each) => each.state.stats.num_draft_tokens);
  const prompts = sum((each) => each.state.stats.num_prompt_tokens);
  const open = (engine) => (lane) =>
    setOpened((before) => {
      const key = lane && keyOf(lane.id, lane.index);
      return lane && before?.key !== key ? { key, id: lane.id, index: lane.index, engine: engine.number } : null;
    });
  return html`
    <div class="tiles">
      <${Tile} label="tokens/s" value=${rate(sum((each) => each.tokensPerSecond(1)))} more="generated" />
      <${Tile} label="running" value=${whole(sum((each) => each.state.stats.num_running))} more=${`${whole(sum((each) => each.state.stats.num_waiting))} waiting`} />
      <${Tile} label="TTFT" value=${seconds(firsts[0])} more=${`p90 ${seconds(firsts[1])}`} />
      <${Tile} label="ITL" value=${seconds(betweens[0])} more=${`p90 ${seconds(betweens[1])}`} />
      <${Tile} label="prompts found cached" value=${share(sum((each) => each.state.stats.num_cached_tokens), prompts)} more=${`${whole(prompts)} tokens`} />
      <${Tile} label="draft tokens accepted" value=${share(sum((each) => each.state.stats.num_accepted_tokens), proposed)} more=${`${whole(proposed)} proposed`} />
      <${Tile} label="memory" value=${bytes(sum((each) => each.state.resident_bytes) + message.resident_bytes)} more="engine and server" />
      <button type="button" class="pause" aria-pressed=${isPaused ? "true" : "false"} onClick=${() => live.pause(!isPaused)}>${isPaused ? "Go on" : "Pause"}</button>
    </div>
    ${shown.length === 0 && html`<p class="card">No engine is running: it is loading, or it has ended.</p>`}
    ${shown.map((engine) => html`<${Engine} key=${engine.number} engine=${engine} title=${shown.length > 1 ? `Replica ${engine.number}` : ""}
      slots=${about?.config.scheduling.max_num_seqs ?? 8} about=${about} opened=${opened} onOpen=${open(engine)} />`)}`;
}
