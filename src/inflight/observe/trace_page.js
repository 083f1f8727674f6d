// The timeline of `inflight trace --html`; `trace` is its data (see trace_page.py). The wheel zooms, dragging moves, a
// double click shows everything. Time goes across, slots go down; blocks and queue are below.
const canvas = document.getElementById("timeline"), told = document.getElementById("told");
const context = canvas.getContext("2d");
const LEFT = 44, PANEL = 70, GAP = 18;
const lane = Math.max(5, Math.min(18, 640 / trace.slots)), bottom = lane * trace.slots;
const height = bottom + 2 * (PANEL + GAP) + 24, last = trace.ends[trace.ends.length - 1];
let from = 0, to = last;

const width = () => canvas.clientWidth - LEFT;
const x = time => LEFT + (time - from) / (to - from) * width();
const time = pixel => from + (pixel - LEFT) / width() * (to - from);

function stepAt(moment) {  // the last step that has begun by then
  let low = 0, high = trace.starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (trace.starts[middle] <= moment) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function panel(top, series, most, label) {  // series: [values, colour], each drawn over the ones before
  for (const [values, colour] of series) {
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(LEFT, top + PANEL);
    for (let step = Math.max(0, stepAt(from)); step < values.length && trace.starts[step] <= to; step++) {
      const y = top + PANEL * (1 - values[step] / Math.max(1, most));
      const next = step + 1 < values.length ? trace.starts[step + 1] : last;
      context.lineTo(Math.max(LEFT, x(trace.starts[step])), y);
      context.lineTo(Math.min(LEFT + width(), x(next)), y);
    }
    context.lineTo(Math.min(LEFT + width(), x(last)), top + PANEL);
    context.fill();
  }
  context.fillStyle = "#57606a";
  context.fillText(label, LEFT, top - 4);
  context.fillText(most, 4, top + 9);
}

function draw() {
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.clientWidth, height);
  for (const [slot, kind, first, until, request] of trace.stretches) {
    const begin = Math.max(LEFT, x(trace.starts[first])), end = Math.min(LEFT + width(), x(trace.ends[until]));
    if (end < LEFT || begin > LEFT + width()) continue;
    context.fillStyle = trace.colours[kind];
    context.fillRect(begin, slot * lane, Math.max(end - begin, 0.7), lane - 1);
    const label = trace.requests[request];
    if (lane > 11 && end - begin > 7 * label.length + 6) {
      context.fillStyle = "#ffffff";
      context.fillText(label, begin + 3, slot * lane + lane - 5);
    }
  }
  context.fillStyle = trace.colours[4];
  for (const [step, slot] of trace.preemptions) {
    const at = x(trace.starts[step]);
    if (at >= LEFT && at <= LEFT + width()) context.fillRect(at - 1, slot * lane, 2, lane - 1);
  }
  context.fillStyle = "#57606a";
  for (let slot = 0; slot < trace.slots; slot += Math.ceil(11 / lane)) context.fillText(slot, 20, slot * lane + 10);
  panel(bottom + GAP, [[trace.held, "#a9c7e8"], [trace.used, "#3572b0"]], trace.blocks,
        "blocks: used (dark), cached (light)");
  panel(bottom + 2 * GAP + PANEL, [[trace.waiting, "#8c8c8c"]], trace.mostWaiting, "sequences waiting");
  for (let tick = 0; tick <= 8; tick++) {
    const moment = from + (to - from) * tick / 8;
    context.fillText((moment / 1e6).toFixed(to - from < 1e5 ? 4 : 2) + " s", x(moment) - (tick === 8 ? 40 : 0), height - 6);
  }
}

function tell(event) {
  const box = canvas.getBoundingClientRect(), moment = time(event.clientX - box.left);
  const slot = Math.floor((event.clientY - box.top) / lane), step = stepAt(moment);
  if (step < 0 || moment > last) { told.textContent = " "; return; }
  const found = trace.stretches.find(s => s[0] === slot && s[2] <= step && step <= s[3]);
  const doing = found ? `slot ${slot}: request ${trace.requests[found[4]]}, ${trace.kinds[found[1]]}, steps ` +
    `${found[2]} to ${found[3]}, ${found[6]} tokens from ${found[5]}; ` : "";
  told.textContent = doing + `step ${step}: ${trace.tokens[step]} tokens in ` +
    `${((trace.ends[step] - trace.starts[step]) / 1e3).toFixed(2)} ms, ${trace.used[step]} blocks used, ` +
    `${trace.held[step] - trace.used[step]} cached, ${trace.waiting[step]} waiting`;
}

canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const middle = time(event.clientX - canvas.getBoundingClientRect().left), factor = Math.exp(event.deltaY / 500);
  from = Math.max(0, middle - (middle - from) * factor);
  to = Math.min(last, Math.max(middle + (to - middle) * factor, from + 10));
  draw();
}, { passive: false });
canvas.addEventListener("mousemove", event => {
  if (event.buttons & 1) {
    const moved = event.movementX / width() * (to - from), by = Math.max(-from, Math.min(last - to, -moved));
    from += by;
    to += by;
    draw();
  }
  tell(event);
});
canvas.addEventListener("dblclick", () => { from = 0; to = last; draw(); });
window.addEventListener("resize", draw);
draw();
