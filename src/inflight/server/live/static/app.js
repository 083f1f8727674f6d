// The page: its head, its tabs, and the key that a server may ask for.
import { html, render, useEffect, useState } from "./html.js";
import { live, useLive } from "./live.js";
import { MODEL, get, setKey } from "./server.js";
import { Now } from "./now.js";
import { Step } from "./step.js";
import { Playground } from "./playground.js";
import { Load } from "./load.js";
import { Simulate } from "./simulate.js";
import { Endpoints } from "./endpoints.js";

const TABS = [
  ["now", "Now", Now],
  ["step", "Step", Step],
  ["playground", "Playground", Playground],
  ["load", "Load", Load],
  ["simulate", "Simulate", Simulate],
  ["api", "API", Endpoints],
];

const chosen = () => {
  const name = location.hash.slice(1) || (location.pathname.endsWith("/docs") ? "api" : "now");
  return TABS.some(([each]) => each === name) ? name : "now";
};

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("inflight-theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("inflight-theme", theme);
    window.dispatchEvent(new Event("theme"));
    live.tell({});
  }, [theme]);
  return html`<label class="theme">
    <span class="hidden">Colours</span>
    <select value=${theme} onChange=${(event) => setTheme(event.target.value)}>
      <option value="auto">auto</option>
      <option value="light">light</option>
      <option value="dark">dark</option>
    </select>
  </label>`;
}

function Status({ status, error }) {
  const words = { open: "live", connecting: "connecting …", waiting: "not connected, trying again", "needs a key": "needs a key" };
  return html`<span class="status ${status.replaceAll(" ", "-")}" role="status" title=${error}>${words[status] ?? status}</span>`;
}

// The model that is shown, where there are several: a page for each of them.
function Models({ status }) {
  const [cards, setCards] = useState([]);
  useEffect(() => {
    get("v1/models").then((list) => setCards(list.data), () => {});
  }, [status]);
  const show = (event) => (location.search = new URLSearchParams({ model: event.target.value }));
  return html`<label class="model">
    <span class="hidden">Model</span>
    <select value=${MODEL} onChange=${show}>
      ${cards.map((card) => html`<option key=${card.id} value=${card.id}>${card.id} (${card.status.value})</option>`)}
    </select>
  </label>`;
}

function Key({ onKey, error }) {
  const [text, setText] = useState("");
  const send = (event) => {
    event.preventDefault();
    onKey(text.trim());
  };
  return html`<form class="card key" onSubmit=${send}>
    <h2>This server asks for an API key</h2>
    <p>${error}</p>
    <label>API key <input type="password" autocomplete="off" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <button type="submit">Use it</button>
    <p class="faint">It stays in this tab, and goes to this server alone.</p>
  </form>`;
}

function App() {
  const { status, error } = useLive();
  const [tab, setTab] = useState(chosen());
  const [about, setAbout] = useState(null);
  useEffect(() => {
    const follow = () => setTab(chosen());
    window.addEventListener("hashchange", follow);
    live.start();
    return () => window.removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    if (status === "open") get("live/about").then(setAbout, () => {});
  }, [status]);
  useEffect(() => {
    document.title = about ? `${about.model} · inflight` : "inflight";
  }, [about]);
  const useKey = (key) => {
    setKey(key);
    live.restart();
  };
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = TABS[(TABS.findIndex(([name]) => name === tab) + by + TABS.length) % TABS.length][0];
    location.hash = next;
    document.getElementById(`tab-${next}`)?.focus();
  };
  const View = TABS.find(([name]) => name === tab)[2];
  return html`
    <header>
      <h1><img src="ui/icon.svg" alt="" width="26" height="26" /> inflight</h1>
      ${MODEL ? html`<${Models} status=${status} />` : html`<span class="model">${about?.model ?? ""}</span>`}
      <${Status} status=${status} error=${error} />
      <${Theme} />
      <nav role="tablist" aria-label="Views" onKeyDown=${move}>
        ${TABS.map(([name, label]) => html`<a key=${name} id="tab-${name}" role="tab" href="#${name}"
          aria-selected=${tab === name ? "true" : "false"} aria-controls="view" tabindex=${tab === name ? 0 : -1}>${label}</a>`)}
      </nav>
    </header>
    <main id="view" role="tabpanel" aria-labelledby="tab-${tab}">
      ${status === "needs a key" ? html`<${Key} onKey=${useKey} error=${error} />` : html`<${View} about=${about} />`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
