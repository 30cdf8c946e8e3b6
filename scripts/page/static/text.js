// Texts and elements. What others wrote becomes text nodes only, clipped, isolated, with no invisible character in it.

const CLIP = 200; // Characters of a name or a reason: what is longer is not written for people.
const CLIP_SAMPLE = 4000;
const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const DASH = "–";

export const byId = (id) => document.getElementById(id);

// An element with properties (className, title …; attributes by `attributes`) and children: nodes or texts.
export function el(name, properties = {}, ...children) {
  const { attributes = {}, ...rest } = properties;
  const node = Object.assign(document.createElement(name), rest);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

// Control and format characters (escapes, bidirectional overrides, zero width) as their code points.
export function plain(text, clip = CLIP) {
  const start = String(text ?? "").slice(0, clip + 1);
  const clean = start.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/gu, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);
  return start.length > clip ? `${clean.slice(0, clip)}…` : clean;
}

export const plainLines = (text) =>
  String(text ?? "").slice(0, CLIP_SAMPLE).split("\n").map((line) => plain(line.replaceAll("\t", "    "), CLIP_SAMPLE)).join("\n");

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const number = (value) => (isNumber(value) ? whole.format(value) : DASH);
export const short = (value) => (isNumber(value) ? compact.format(value) : DASH);
export const loss = (value) => (isNumber(value) ? value.toFixed(3) : DASH);
export const bytes = (value) => (isNumber(value) ? `${compact.format(value)}B`.replace("KB", "kB").replace("BB", "GB") : DASH);
export const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
export const tail = (peer) => plain(peer).slice(-8);
export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// The two largest units: 2 h 10 min.
export function duration(seconds) {
  if (!isNumber(seconds) || seconds < 0) return DASH;
  const first = units.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, unit] = units[first];
  const count = Math.floor(seconds / size);
  const next = units[first + 1];
  const rest = next && count < 10 ? Math.floor((seconds % size) / next[0]) : 0;
  return rest ? `${count} ${unit} ${rest} ${next[1]}` : `${count} ${unit}`;
}

export function clock(seconds) {
  return isNumber(seconds) ? new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : DASH;
}
