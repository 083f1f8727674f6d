// Requests to the server. An API key is kept only in this tab.
import { createParser } from "./vendor/eventsource-parser.js";

const KEY = "inflight-api-key";
const ROOT = new URL(".", document.baseURI);

// The displayed model of several; null if there is only one.
export const MODEL = new URLSearchParams(location.search).get("model");

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function address(path) {
  const url = new URL(path, ROOT);
  if (MODEL && path.startsWith("live/")) url.searchParams.set("model", MODEL);
  return url.href;
}

// A request for the model that the page shows.
export function forModel(body) {
  return MODEL ? { model: MODEL, ...body } : body;
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const response = await fetch(address(path), { ...options, headers });
  if (!response.ok) {
    const said = await response.json().catch(() => null);
    throw new ServerError(response.status, said?.error?.message ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

export async function get(path) {
  return (await ask(path)).json();
}

export async function post(path, body) {
  return (await ask(path, { method: "POST", body: JSON.stringify(body) })).json();
}

// Calls `onEvent` with the data of each server-sent event, until the stream ends. Throws `ServerError`.
export async function stream(path, { body, signal, onEvent, onOpen }) {
  const options = body ? { method: "POST", body: JSON.stringify(body), signal } : { signal };
  const response = await ask(path, options);
  onOpen?.(response);
  const parser = createParser({ onEvent: (event) => onEvent(event.data) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    parser.feed(value);
  }
}
