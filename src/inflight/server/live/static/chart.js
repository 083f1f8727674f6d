// Lines over time, by uPlot.
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef } from "./html.js";
import { colours } from "./canvas.js";

// Possible distances of the time ticks, in seconds.
const MARKS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200];

const ago = (value) => (value > -1 ? "now" : value > -120 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`);

// `data` is [x, ...lines], where x is in seconds from now; `lines` has a label and the name of a colour for each; `value`
// writes a number.
export function Chart({ data, lines, value, height = 170, label }) {
  const box = useRef(null), chart = useRef(null);
  useEffect(() => {
    const element = box.current;
    const make = () => {
      chart.current?.destroy();
      const colour = colours();
      const axis = { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      chart.current = new uPlot({
        width: element.clientWidth || 300,
        height,
        legend: { live: true },
        cursor: { y: false },
        scales: { x: { time: false } },
        axes: [
          { ...axis, size: 28, incrs: MARKS, values: (_, ticks) => ticks.map(ago) },
          { ...axis, size: 62, values: (_, ticks) => ticks.map(value) },
        ],
        series: [
          { label: "at", value: (_, v) => (v === null ? "–" : ago(v)) },
          ...lines.map((line) => ({
            label: line.label,
            stroke: colour(line.colour),
            width: 1.5,
            points: { show: data[0].length < 30, size: 4 },
            value: (_, v) => (v === null ? "–" : value(v)),
          })),
        ],
      }, data, element);
    };
    make();
    const resized = new ResizeObserver(() => chart.current?.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    window.addEventListener("theme", make);
    return () => {
      resized.disconnect();
      window.removeEventListener("theme", make);
      chart.current?.destroy();
    };
  }, []);
  useEffect(() => chart.current?.setData(data), [data]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${box}></div>`;
}
