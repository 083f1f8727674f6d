// Simulates the recorded minutes with other options of the scheduler.
import { html, useState } from "./html.js";
import { rate, seconds, share, whole } from "./numbers.js";
import { post } from "./server.js";

const FIELDS = [
  ["max_num_seqs", "slots"],
  ["max_num_batched_tokens", "tokens in a step"],
  ["max_prefill_tokens_per_step", "prefill beside decodes"],
  ["num_blocks", "blocks of the cache"],
];

const ROWS = [
  ["generated tokens/s", (r) => rate(r.seconds ? r.num_output_tokens / r.seconds : 0)],
  ["to the first token, p50", (r) => seconds(r.time_to_first_token.p50)],
  ["to the first token, p95", (r) => seconds(r.time_to_first_token.p95)],
  ["for each further token, p50", (r) => seconds(r.time_per_output_token.p50)],
  ["for each further token, p95", (r) => seconds(r.time_per_output_token.p95)],
  ["latency, p50", (r) => seconds(r.latency.p50)],
  ["latency, p95", (r) => seconds(r.latency.p95)],
  ["steps", (r) => whole(r.num_steps)],
  ["slots occupied", (r) => share(r.occupancy, 1)],
  ["prompt tokens found cached", (r) => share(r.num_cached_tokens, r.num_prompt_tokens)],
  ["preemptions", (r) => whole(r.num_preemptions)],
  ["most blocks used", (r) => `${whole(r.peak_blocks_used)} of ${whole(r.num_blocks)}`],
];

export function Simulate({ about }) {
  const [settings, setSettings] = useState({ engine: "0", policy: "", enable_prefix_caching: "" });
  const [reports, setReports] = useState(null);
  const [error, setError] = useState("");
  const [isRunning, setRunning] = useState(false);
  const set = (name, value) => setSettings((before) => ({ ...before, [name]: value }));
  const run = async (event) => {
    event.preventDefault();
    const body = { engine: Number(settings.engine) };
    for (const [name] of FIELDS) if (settings[name]) body[name] = Number(settings[name]);
    if (settings.policy) body.policy = settings.policy;
    if (settings.enable_prefix_caching) body.enable_prefix_caching = settings.enable_prefix_caching === "yes";
    setRunning(true);
    setError("");
    try {
      setReports(await post("live/simulate", body));
    } catch (failure) {
      setError(failure.message);
    }
    setRunning(false);
  };
  const config = about?.config ?? {};
  const now = { ...config, num_blocks: about?.info.num_blocks };
  return html`<div class="columns">
    <form class="card" onSubmit=${run}>
      <h3>Other settings</h3>
      ${about?.num_engines > 1 && html`<label class="field">replica<select name="engine" value=${settings.engine} onChange=${(e) => set("engine", e.target.value)}>
        ${Array.from({ length: about.num_engines }, (_, i) => html`<option key=${i} value=${i}>${i}</option>`)}</select></label>`}
      ${FIELDS.map(([name, label]) => html`<label class="field" key=${name}>${label}<input type="number" min="1" name=${name} placeholder=${now[name] ?? "as it is"} value=${settings[name] ?? ""} onInput=${(e) => set(name, e.target.value)} /></label>`)}
      <label class="field">served first<select name="policy" value=${settings.policy} onChange=${(e) => set("policy", e.target.value)}>
        <option value="">as it is (${config.policy})</option><option value="fcfs">who came first</option><option value="priority">who has the lowest priority number</option></select></label>
      <label class="field">shared prefixes<select name="enable_prefix_caching" value=${settings.enable_prefix_caching} onChange=${(e) => set("enable_prefix_caching", e.target.value)}>
        <option value="">as it is</option><option value="yes">are computed once</option><option value="no">are computed each time</option></select></label>
      <button type="submit" class="main" disabled=${isRunning}>${isRunning ? "simulating …" : "Simulate"}</button>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <p class="faint">${about?.records_always ? "The newest file of --record is replayed." : "Steps are recorded while this page is open, prompts only as hashes; --record keeps them always."}${" "}
        Both columns are simulated: the real scheduler on a virtual clock, with what steps cost here.</p>
    </form>
    <section class="card wide" aria-live="polite"><h3>The recorded minutes</h3>
      ${reports ? html`<p>${whole(reports.as_set.num_sequences)} sequences in ${seconds(reports.as_set.seconds)}.</p>
        <div class="scroll"><table><thead><tr><th></th><th>as set now</th><th>with these settings</th></tr></thead>
        <tbody>${ROWS.map(([label, read]) => html`<tr key=${label}><th>${label}</th><td>${read(reports.as_set)}</td><td>${read(reports.changed)}</td></tr>`)}</tbody></table></div>
        ${reports.changed.num_extrapolated_steps > 0 && html`<p class="faint">${whole(reports.changed.num_extrapolated_steps)} of its steps are larger than any that was recorded: what they cost is extrapolated.</p>`}`
      : html`<p class="faint">Let some requests run, then simulate.</p>`}
    </section>
  </div>`;
}
