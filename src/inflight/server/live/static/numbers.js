// Numbers as people read them.

export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return value >= 100 ? whole(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  return `${Math.floor(value / 60)} min`;
}

export function bytes(value) {
  if (!value) return "–";
  return value < 2 ** 30 ? `${(value / 2 ** 20).toFixed(0)} MiB` : `${(value / 2 ** 30).toFixed(1)} GiB`;
}

export function share(part, all) {
  return all ? `${Math.round((100 * part) / all)} %` : "–";
}
