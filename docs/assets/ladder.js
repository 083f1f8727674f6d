// The ladder that one can play with: recorded runs of the same requests through every rung, step by step.
(() => {
  const box = document.getElementById("ladder");
  if (!box || !window.ladderRuns) return;
  const { runs, uses, made } = window.ladderRuns;
  const TITLES = {
    static: "Static waves: each wait for the longest of their wave",
    padded: "Padded: finished rows leave at once, all are as wide as the longest",
    ragged: "Ragged: one row without padding",
    engine: "The engine: the same, with a paged cache",
  };
  const COLOURS = ["#2f7fe0", "#e8590c", "#2b9a45", "#ae3ec9", "#b97a00", "#0c8599", "#d6336c", "#7a6bdf", "#5c7a29", "#9c5221", "#43638f", "#8a3d7a"];
  const LANE = 18, GAP = 2;
  const names = (field) => [...new Set(runs.map((run) => run[field]))];
  const chosen = { slots: 4, lengths: "mixed", arrivals: "all at once", step: 0, timer: null };
  const made_ = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) name.startsWith("on") ? (element[name] = value) : element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const run = () => runs.find((each) => ["slots", "lengths", "arrivals"].every((field) => each[field] === chosen[field]));
  const numSteps = () => Math.max(...Object.values(run().methods).map((each) => each.tokens.length));

  const slider = (label, field) => {
    const values = names(field);
    const output = made_("output", {}, String(chosen[field]));
    const input = made_("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: values.indexOf(chosen[field]), "aria-label": label });
    input.oninput = () => {
      chosen[field] = values[Number(input.value)];
      output.textContent = String(chosen[field]);
      input.setAttribute("aria-valuetext", String(chosen[field]));
      chosen.step = 0;
      show();
    };
    return made_("label", {}, `${label} `, input, " ", output);
  };
  const stepSlider = made_("input", { type: "range", min: 0, value: 0, "aria-label": "Step" });
  stepSlider.oninput = () => { chosen.step = Number(stepSlider.value); stop(); show(); };
  const stepOutput = made_("output");
  const playButton = made_("button", { type: "button", class: "md-button" }, "Play");
  const stop = () => { clearInterval(chosen.timer); chosen.timer = null; playButton.textContent = "Play"; };
  playButton.onclick = () => {
    if (chosen.timer) return stop();
    if (chosen.step >= numSteps() - 1) chosen.step = 0;
    playButton.textContent = "Pause";
    chosen.timer = setInterval(() => {
      chosen.step += 1;
      if (chosen.step >= numSteps() - 1) stop();
      show();
    }, 120);
  };
  const move = (by) => () => { stop(); chosen.step = Math.max(0, Math.min(numSteps() - 1, chosen.step + by)); show(); };

  const panels = Object.fromEntries(Object.entries(TITLES).map(([name, title]) => {
    const canvas = made_("canvas", { role: "img" }), told = made_("p", { class: "ladder-told" });
    return [name, { canvas, told, element: made_("section", {}, made_("h4", {}, title), canvas, told) }];
  }));

  function draw(canvas, method, slots, all) {
    const width = canvas.clientWidth || 600, height = slots * LANE, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d"), one = width / all;
    context.scale(ratio, ratio);
    context.font = "11px system-ui";
    for (let slot = 0; slot < slots; slot++) {
      context.fillStyle = "#8883";
      context.fillRect(0, slot * LANE, one * method.tokens.length, LANE - GAP);
    }
    for (const [slot, request, use, first, last] of method.stretches) {
      if (first > chosen.step) continue;
      const x = first * one, w = (Math.min(last, chosen.step) - first + 1) * one, y = slot * LANE;
      context.globalAlpha = use === 2 ? 0.28 : 1;
      context.fillStyle = COLOURS[request % COLOURS.length];
      context.fillRect(x, y, w, LANE - GAP);
      context.globalAlpha = 1;
      if (use === 0) {
        context.fillStyle = "#0007";
        context.fillRect(x, y, Math.max(2, w), LANE - GAP);
      }
      if (use !== 0 && w > 14) {
        context.fillStyle = use === 2 ? "#888" : "#fff";
        context.fillText(String(request), x + 3, y + 12);
      }
    }
    context.fillStyle = "#888";
    context.fillRect((chosen.step + 1) * one - 1, 0, 1, height);
  }

  function tell(name, method, slots) {
    const now = chosen.step, total = method.tokens.length;
    const sum = (values) => values.slice(0, now + 1).reduce((all, each) => all + each, 0);
    const tokens = sum(method.tokens), padding = sum(method.padding);
    const busy = method.stretches.filter((each) => each[2] !== 2).reduce((all, [, , , first, last]) => all + Math.max(0, Math.min(last, now) - first + 1), 0);
    const steps = Math.min(now + 1, total);
    const here = now < total ? `This step: ${method.tokens[now]} tokens${method.padding[now] ? `, ${method.padding[now]} of them padding` : ""}.` : `Over after ${total} steps.`;
    return `${here} So far: slots ${Math.round((100 * busy) / (steps * slots))} % in use, ${tokens} tokens computed, ${tokens ? Math.round((100 * padding) / tokens) : 0} % of them padding. All: ${total} steps.`;
  }

  function show() {
    const shown = run(), all = numSteps();
    stepSlider.max = all - 1;
    stepSlider.value = chosen.step;
    stepOutput.textContent = `${chosen.step + 1} of ${all}`;
    for (const [name, { canvas, told }] of Object.entries(panels)) {
      const method = shown.methods[name];
      draw(canvas, method, shown.slots, all);
      told.textContent = tell(name, method, shown.slots);
      canvas.setAttribute("aria-label", `${TITLES[name]}. ${told.textContent}`);
    }
  }

  box.replaceChildren(
    made_("div", { class: "ladder-controls" }, slider("Slots", "slots"), slider("Lengths", "lengths"), slider("Arrivals", "arrivals")),
    made_("div", { class: "ladder-controls" }, playButton, made_("button", { type: "button", class: "md-button", onclick: move(-1), "aria-label": "One step back" }, "−1"),
      made_("button", { type: "button", class: "md-button", onclick: move(1), "aria-label": "One step on" }, "+1"), made_("label", {}, "Step ", stepSlider, " ", stepOutput)),
    ...Object.values(panels).map((each) => each.element),
    made_("p", { class: "ladder-told" }, `A colour and a number for each request; dark: its ${uses[0]}; pale: ${uses[2]}, work for nobody. Recorded from inflight ${made.version} (${made.commit}, ${made.date}).`),
  );
  chosen.step = numSteps() - 1;
  new ResizeObserver(show).observe(box);
  show();
})();
