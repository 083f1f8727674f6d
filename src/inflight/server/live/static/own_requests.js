// The requests that this page has sent: their texts are the viewer's own, and are kept here, not on the server.
const MOST = 200;
const requests = new Map(); // by id: { prompt, texts }

export function remember(id, prompt) {
  requests.set(id, { prompt, texts: [] });
  if (requests.size > MOST) requests.delete(requests.keys().next().value);
}

export function addText(id, index, text) {
  const request = requests.get(id);
  if (request) request.texts[index] = (request.texts[index] ?? "") + text;
}

// A request with several prompts has an id of its own for each.
export const textOf = (id) => requests.get(id) ?? null;
