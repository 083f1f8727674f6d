// The last hour, in pieces of ten seconds.
import { html, useEffect, useMemo, useState } from "./html.js";
import { Chart } from "./chart.js";
import { rate, seconds, whole } from "./numbers.js";
import { get } from "./server.js";

const SECONDS_BETWEEN = 5000;

const PERCENTILES = [["p50", "decode"], ["p90", "prefill"], ["p99", "rejected"]];

export function Load() {
  const [history, setHistory] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    const ask = () => get("live/history").then((found) => { setHistory(found); setError(""); }, (failure) => setError(failure.message));
    ask();
    const timer = setInterval(ask, SECONDS_BETWEEN);
    return () => clearInterval(timer);
  }, []);
  const charts = useMemo(() => history && drawn(history), [history]);
  if (!history) return html`<p class="faint">${error || "asking …"}</p>`;
  const { whole: all } = history;
  const sum = (name) => history[name].reduce((total, each) => total + each, 0);
  return html`${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="columns">
      <section class="card full"><h3>The last hour</h3><div class="scroll"><table>
        <thead><tr><th></th><th>p50</th><th>p90</th><th>p99</th></tr></thead>
        <tbody><tr><th>to the first token</th>${all.to_first_token.map((each, i) => html`<td key=${i}>${seconds(each)}</td>`)}</tr>
          <tr><th>between two tokens</th>${all.between_tokens.map((each, i) => html`<td key=${i}>${seconds(each)}</td>`)}</tr></tbody></table></div>
        <p>${whole(sum("num_started"))} requests came, ${whole(sum("num_ended"))} were answered, ${whole(sum("num_aborted"))} given up by their clients,${" "}
          ${whole(sum("num_refused"))} refused, ${whole(sum("num_failed"))} failed; ${whole(sum("num_prompt_tokens"))} tokens of prompts, ${whole(sum("num_output_tokens"))} generated.</p>
      </section>
      ${charts.map(({ title, data, lines, value }) => html`<section class="card half" key=${title}><h3>${title}</h3>
        <${Chart} data=${data} lines=${lines} value=${value} label=${`${title} in the last hour`} /></section>`)}
    </div>`;
}

function drawn(history) {
  // Pieces in which nothing happened are missing: they become zeros, or gaps.
  const ages = history.age.map((age) => Math.round(age / history.seconds));
  const most = Math.max(...ages);
  const isOver = (column) => (most > 0 ? column.slice(0, -1) : column); // the newest piece has not ended
  const spread = (values, missing) => {
    const column = new Array(most + 1).fill(missing);
    ages.forEach((age, i) => (column[most - age] = values[i]));
    return isOver(column);
  };
  const x = isOver(Array.from({ length: most + 1 }, (_, i) => (i - most) * history.seconds));
  const perSecond = (name) => spread(history[name].map((each) => each / history.seconds), 0);
  const percentile = (name) => PERCENTILES.map((_, i) => spread(history[name].map((each) => each[i]), null));
  const lines = PERCENTILES.map(([label, colour]) => ({ label, colour }));
  return [
    { title: "Tokens a second", value: rate, data: [x, perSecond("num_output_tokens")], lines: [{ label: "generated", colour: "decode" }] },
    { title: "Requests", value: whole, data: [x, spread(history.num_started, 0), spread(history.most_running, 0)], lines: [{ label: "came", colour: "prefill" }, { label: "there at once", colour: "decode" }] },
    { title: "To the first token", value: seconds, data: [x, ...percentile("to_first_token")], lines },
    { title: "Between two tokens", value: seconds, data: [x, ...percentile("between_tokens")], lines },
  ];
}
