// A canvas that is redrawn when its data or size changes, sharp on every screen.
import { html, useEffect, useRef } from "./html.js";

export const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
};

// `draw(context, width, height, colour)`; everything in pixels of the page. With a `version` it is redrawn only when
// that changes (or its size, or the colours), else each time.
export function Canvas({ draw, height, label, version, ...rest }) {
  const ref = useRef(null);
  const latest = useRef(draw);
  latest.current = draw;
  const paint = () => {
    const canvas = ref.current;
    if (!canvas) return;
    const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    latest.current(context, width, height, colours());
  };
  useEffect(paint, version === undefined ? undefined : [version]);
  useEffect(() => {
    const observer = new ResizeObserver(paint);
    observer.observe(ref.current);
    window.addEventListener("theme", paint);
    return () => {
      observer.disconnect();
      window.removeEventListener("theme", paint);
    };
  }, []);
  const described = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  return html`<canvas ref=${ref} style=${{ height: `${height}px` }} ...${described} ...${rest}></canvas>`;
}
