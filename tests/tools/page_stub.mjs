// Runs the page's script without a browser: a document that is just enough for it. Reads the answers of /api/view as a
// JSON array from standard input, has the page draw each, and writes what it then shows as JSON.
import { readFileSync } from "node:fs";

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, dataset: {}, hidden: false, className: "", clientWidth: 1000, value: "" });
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  prepend(...parts) { this.children.unshift(...parts); }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = [...parts]; }
  remove() {}
  get style() { return { setProperty: (name, value) => (this.attributes[name] = value) }; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  get textContent() { return this.children.map((each) => (each instanceof Element ? each.textContent : each)).join(""); }
  set textContent(text) { this.children = [String(text)]; }
  get options() { return this.children; }
  all(tag) { return this.children.filter((each) => each instanceof Element).flatMap((each) => [...(each.tag === tag ? [each] : []), ...each.all(tag)]); }
}

const [script, hash] = process.argv.slice(2);
const views = JSON.parse(readFileSync(0, "utf8"));
const places = new Map();
const place = (id) => places.get(id) ?? places.set(id, new Element("div")).get(id);
const drawnCurves = {};
const drawnOptions = {};
const EVENING = [Date.UTC(2027, 0, 15, 20, 5) / 1000];

globalThis.Node = Element;
globalThis.document = {
  title: "",
  body: new Element("body"),
  documentElement: new Element("html"),
  getElementById: place,
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
};
globalThis.location = { hash: hash ?? "" };
globalThis.history = { replaceState: (_, __, address) => (globalThis.location.hash = address) };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
globalThis.matchMedia = () => new Element("media");
globalThis.ResizeObserver = class { observe() {} };
globalThis.uPlot = class {
  constructor(options, data, at) {
    [this.title, this.at] = [at.children[0].textContent, at];
    drawnOptions[this.title] = { log: options.scales.y.distr === 3, bands: options.bands.length, lines: options.series.slice(1).map((each) => each.label), dashes: options.series.slice(1).map((each) => each.dash ?? null), hours: options.axes[0].values(null, EVENING), place: at };
    this.setData(data);
  }
  setData(data) { drawnCurves[this.title] = data; }
  destroy() { delete drawnCurves[this.title]; }
  setSize() {}
  redraw() {}
};
globalThis.setTimeout = () => 0;
const asked = [];
let answered;
globalThis.fetch = async (address) => {
  asked.push(address);
  return { ok: true, json: async () => views.shift() };
};
const shown = [];
const settle = () => new Promise((resolve) => setImmediate(() => setImmediate(resolve)));
globalThis.setTimeout = (next) => { answered = next; return 0; };

function chart(title) {
  const { place: at, ...options } = drawnOptions[title];
  const [, button] = at.children;
  return { ...options, row: at.attributes.class === "row", button: button.hidden ? "" : button.textContent };
}

const wanted = views.length;
await import(script);
await settle();
for (let count = 0; count < wanted; count++) {
  shown.push({
    title: place("title").textContent,
    diagnosis: place("diagnosis").textContent,
    trouble: place("trouble").hidden ? "" : place("trouble").textContent,
    figures: place("figures").children.map((each) => each.children.map((part) => part.textContent)),
    race: place("race").all("circle").length,
    columns: place("figures").attributes["grid-template-columns"],
    raceNote: place("race-note").textContent,
    raceHeight: Number(place("race").children[0]?.attributes.height ?? 0),
    raceTexts: place("race").all("text").map((each) => each.textContent),
    workers: (place("workers").children[1]?.children ?? []).map((row) => row.children.map((cell) => cell.textContent)),
    phases: place("workers").all("svg").map((bar) => ({ ...bar.attributes, parts: bar.children.map((part) => [part.attributes.class, Number(part.attributes.x), Number(part.attributes.width)]) })),
    relays: (place("relays").children[1]?.children ?? []).map((row) => row.children.map((cell) => cell.textContent)),
    relaysNote: place("relays-note").textContent,
    events: (place("events").children[1]?.children ?? []).map((row) => row.children.map((cell) => cell.textContent)),
    footer: place("footer").textContent,
    button: place("all").hidden ? "" : place("all").textContent,
    jobs: place("jobs").children.map((each) => each.textContent),
    hidden: [...places].filter(([, each]) => each.hidden).map(([id]) => id),
    curves: structuredClone(drawnCurves),
    charts: Object.fromEntries(Object.keys(drawnCurves).map((title) => [title, chart(title)])),
  });
  if (count + 1 < wanted) {
    answered();
    await settle();
  }
}
const afterScale = {};
for (const [title, { place: at }] of Object.entries(drawnOptions)) {
  if (!at.children[1].hidden) at.children[1].listeners.click();
  afterScale[title] = chart(title);
}
place("all").listeners.click();
const afterClick = { race: place("race").all("circle").length, button: place("all").textContent };
process.stdout.write(JSON.stringify({ shown, afterScale, afterClick, asked }));
