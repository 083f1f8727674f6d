// Markup as tagged templates, for Preact. Whatever is put into a template is text or an attribute, never markup.
import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { render } from "./vendor/preact.js";
export { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);
