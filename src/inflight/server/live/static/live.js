// The engines' states from the server: the current one, and a history of the last steps.
import { ServerError, stream } from "./server.js";
import { useEffect, useState } from "./html.js";

const MOST_STEPS = 400;
const MOST_SAMPLES = 300; // a minute at five a second
const SECONDS_BETWEEN_TRIES = [0.5, 1, 2, 4, 8];

// The order of the fields of a sequence, of a lane's work and of a span in messages.
export const SEQUENCE = { id: 0, index: 1, slot: 2, prompt: 3, tokens: 4, computed: 5, cached: 6, proposed: 7, accepted: 8, preemptions: 9, blocks: 10, priority: 11 };
const WORK = { slot: 0, id: 1, index: 2, prefilled: 3, decoded: 4, accepted: 5, rejected: 6 };
export const SPAN = { slot: 0, id: 1, index: 2, start: 3, length: 4, kind: 5, proposed: 6, accepted: 7 };

export const keyOf = (id, index) => `${id}/${index}`;

// A sequence's computed tokens, as pairs of a kind and a number, in order.
class Lane {
  constructor(sequence) {
    this.id = sequence[SEQUENCE.id];
    this.index = sequence[SEQUENCE.index];
    this.sequence = sequence;
    this.outputs = [];
    this.numOutputs = 0; // tokens in them and in those that were dropped
    this.version = 0; // grows with what is drawn
  }

  add(kind, number) {
    if (!number) return;
    if (kind !== "rejected") this.numOutputs += number;
    const last = this.outputs.at(-1);
    if (last && last[0] === kind) last[1] += number;
    else this.outputs.push([kind, number]);
    if (this.outputs.length > 2000) this.outputs.splice(0, 1000);
  }

  see(sequence, work) {
    if (!this.outputs.length && !work) this.add("decode", sequence[SEQUENCE.tokens] - sequence[SEQUENCE.prompt]);
    if (work) {
      // A state has as many new tokens as the sequence grew by; other computed tokens are prompt or rejected drafts.
      const grown = Math.max(0, sequence[SEQUENCE.tokens] - sequence[SEQUENCE.prompt] - this.numOutputs);
      const accepted = Math.min(work[WORK.accepted], grown);
      this.add("decode", grown - accepted);
      this.add("accepted", accepted);
      this.add("rejected", work[WORK.rejected]);
    }
    const [tokens, computed] = [SEQUENCE.tokens, SEQUENCE.computed];
    if (work || sequence[tokens] !== this.sequence[tokens] || sequence[computed] !== this.sequence[computed]) this.version += 1;
    this.sequence = sequence;
  }
}

class Engine {
  constructor(number) {
    this.number = number;
    this.lanes = new Map(); // by slot
    this.steps = [];
    this.blocks = null;
    this.blocksVersion = 0;
    this.samples = []; // [time, generated tokens/s, prefilled tokens/s]
    this.state = null;
  }

  see(state) {
    const before = this.state;
    this.state = state;
    if (state.blocks !== null) {
      this.blocks = Uint8Array.from(atob(state.blocks), (char) => char.charCodeAt(0));
      this.blocksVersion += 1;
    }
    const work = new Map(state.work.map((each) => [keyOf(each[WORK.id], each[WORK.index]), each]));
    const lanes = new Map();
    for (const sequence of state.running) {
      const id = sequence[SEQUENCE.id], index = sequence[SEQUENCE.index], slot = sequence[SEQUENCE.slot];
      let lane = this.lanes.get(slot);
      if (!lane || lane.id !== id || lane.index !== index) lane = new Lane(sequence);
      lane.see(sequence, work.get(keyOf(id, index)) ?? null);
      lanes.set(slot, lane);
    }
    this.lanes = lanes;
    this.steps.push(...state.steps);
    if (this.steps.length > MOST_STEPS) this.steps.splice(0, this.steps.length - MOST_STEPS);
    if (before && state.stats.num_steps < before.stats.num_steps) {
      this.samples = []; // it is a new engine
      this.steps = [...state.steps];
    } else if (before && state.time > before.time) {
      const gone = state.time - before.time;
      const prefilled = state.work.reduce((sum, each) => sum + each[WORK.prefilled], 0);
      this.samples.push([
        state.time,
        (state.stats.num_generated_tokens - before.stats.num_generated_tokens) / gone,
        prefilled / gone,
      ]);
      if (this.samples.length > MOST_SAMPLES) this.samples.shift();
    }
  }

  // Generated tokens per second, in the last few seconds.
  tokensPerSecond(seconds) {
    const samples = this.samples, end = samples.at(-1)?.[0] ?? 0;
    let sum = 0, time = 0;
    for (let i = samples.length - 1; i > 0 && samples[i][0] > end - seconds; i--) {
      const gone = samples[i][0] - samples[i - 1][0];
      sum += samples[i][1] * gone;
      time += gone;
    }
    return time ? sum / time : 0;
  }
}

class Live {
  constructor() {
    this.status = "connecting"; // then "open", "waiting" or "needs a key"
    this.error = "";
    this.engines = new Map();
    this.message = null;
    this.isPaused = false;
    this.num = 0;
    this.listeners = new Set();
    this.stopped = null;
  }

  start() {
    if (this.stopped) return;
    this.stopped = new AbortController();
    this.run(this.stopped.signal);
  }

  restart() {
    this.stopped?.abort();
    this.stopped = null;
    this.start();
  }

  async run(signal) {
    for (let tries = 0; !signal.aborted; ) {
      try {
        await stream("live/events", {
          signal,
          onOpen: () => { tries = 0; this.tell({ status: "open", error: "" }); },
          onEvent: (data) => this.see(JSON.parse(data)),
        });
        this.tell({ status: "waiting", error: "the server has ended the stream" });
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ServerError && error.status === 401) {
          this.tell({ status: "needs a key", error: error.message });
          return;
        }
        this.tell({ status: "waiting", error: error.message });
      }
      const pause = SECONDS_BETWEEN_TRIES[Math.min(tries++, SECONDS_BETWEEN_TRIES.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    }
  }

  see(message) {
    if (this.isPaused) return;
    this.message = message;
    for (const [name, state] of Object.entries(message.engines)) {
      const number = Number(name);
      if (!this.engines.has(number)) this.engines.set(number, new Engine(number));
      this.engines.get(number).see(state);
    }
    if (!document.hidden) this.tell({}); // a browser may share its cores with the engine
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    if (!isPaused) for (const engine of this.engines.values()) engine.samples = [];
    this.tell({});
  }

  tell(change) {
    Object.assign(this, change);
    this.num += 1;
    for (const listener of this.listeners) listener(this.num);
  }
}

export const live = new Live();

// Rerenders a component on new data.
export function useLive() {
  const [, setNum] = useState(0);
  useEffect(() => {
    live.listeners.add(setNum);
    return () => live.listeners.delete(setNum);
  }, []);
  return live;
}
