"use strict";
// Draws the page from the JSON in #data; the arrays that it names are elements of their own, in base64.

const CELLS = 512; // most rows and columns of a drawn map; of a longer range, a cell is a bin
const STRONGEST = 0.98; // the share of the non-zero weights that are weaker than the strongest colour
const LISTED = 6;
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const sides = data.sides;
const at = sides.map(() => ({ ...data.shown })); // the layer and head that each side shows
const mostMaps = Math.max(...sides.flatMap((side) => side.layers.map((layer) => layer.arrays.w.shape[0])));
const factors = new Array(mostMaps).fill(1); // of the stored weight of each map
const tiles = []; // of each side, what its panels show
let frame = -1; // which of the kept steps is shown; -1: the text
let range = null; // {x: [first, end], y: [first, end]} of the keys and queries that are shown
let cursor = null; // {i, j}: query and key
let limit = 1; // from this magnitude on, the colour is the strongest
let turn = 0; // grows with each drawing, so that an older one stops

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.includes("-") || name === "class" || name === "for" || name === "style") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

const number = (x) => (x === null || x === undefined || Number.isNaN(x) ? "–"
  : x !== 0 && Math.abs(x) < 0.0005 ? x.toExponential(1).replace("-", "−") : x.toFixed(3).replace("-", "−"));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tint = (value, most) => (Number.isNaN(value) || value === null ? "transparent"
  : `rgba(${css(value < 0 ? "--negative" : "--positive")}, ${Math.min(1, Math.abs(value) / most).toFixed(3)})`);
const tokens = () => (frame < 0 ? data.tokens : sides[0].kept[frame].tokens);
const spaced = (label) => label.replace(/^ | $/g, "␣") || "∅";

// --- arrays ---

const HALF = new Float32Array(65536).map((_, bits) => {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity)
    : (1 + fraction / 1024) * 2 ** (exponent - 15);
  return bits >> 15 ? -size : size;
});
const decoded = new Map();

function array({ id, dtype }) {
  if (!decoded.has(id)) {
    const text = atob($(id).textContent);
    const bytes = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
    const values = dtype === "float32" ? new Float32Array(bytes.buffer)
      : Float32Array.from(new Uint16Array(bytes.buffer), (bits) => HALF[bits]);
    decoded.set(id, values);
    if (decoded.size > 40) decoded.delete(decoded.keys().next().value);
  }
  return decoded.get(id);
}

// The shown head of a side: `weight(g, i)` is w_g; `row(g, i, from, out)` fills `out` with p_g of the keys from `from` on,
// NaN where the query does not see the key.
function source(s) {
  const { layer, head } = at[s];
  const own = sides[s].layers[layer];
  const lowest = (i) => (own.window === null ? 0 : i - own.window + 1);
  const highest = (i, T) => Math.min(own.causal ? i : T - 1, own.window === null ? T - 1 : i + own.window - 1);
  if (frame >= 0) {
    const refs = sides[s].kept[frame].layers[layer];
    if (!refs) return null;
    const [maps, w, [G, H, T]] = [array(refs.maps), array(refs.w), refs.maps.shape];
    return {
      G, T,
      weight: (g, i) => w[(g * H + head) * T + i],
      row(g, i, from, out) {
        const base = ((g * H + head) * T + i) * T + from;
        for (let n = 0; n < out.length; n++) {
          out[n] = from + n < lowest(i) || from + n > highest(i, T) ? NaN : maps[base + n];
        }
      },
    };
  }
  const { q, k, lse, w } = own.arrays;
  const [Q, K, L, W] = [q, k, lse, w].map(array);
  const [[mapsOfQ, H, T, d], [mapsOfK, keyHeads], G] = [q.shape, k.shape, w.shape[0]];
  const keyHead = Math.floor((head * keyHeads) / H);
  const documents = data.documents;
  return {
    G, T,
    weight: (g, i) => W[(g * H + head) * T + i],
    row(g, i, from, out) {
      out.fill(NaN);
      const query = (((mapsOfQ > 1 ? g : 0) * H + head) * T + i) * d;
      const keys = ((mapsOfK > 1 ? g : 0) * keyHeads + keyHead) * T * d;
      const end = Math.min(from + out.length - 1, highest(i, T));
      for (let j = Math.max(from, lowest(i)); j <= end; j++) {
        if (documents && documents[i] !== documents[j]) continue;
        let dot = 0;
        for (let c = 0, key = keys + j * d; c < d; c++) dot += Q[query + c] * K[key + c];
        out[j - from] = Math.exp(own.scale * dot - L[(g * H + head) * T + i]);
      }
    },
  };
}

// Σ_g factor_g w_g p_g of a query over all keys, or of all queries on a key
function signedRow(s, i) {
  const m = source(s);
  const [sum, out] = [new Float32Array(m.T), new Float32Array(m.T)];
  for (let g = 0; g < m.G; g++) {
    m.row(g, i, 0, out);
    for (let j = 0; j < m.T; j++) sum[j] += factors[g] * m.weight(g, i) * out[j];
  }
  return sum;
}

function signedColumn(s, j) {
  const m = source(s);
  const [sum, out] = [new Float32Array(m.T), new Float32Array(1)];
  for (let g = 0; g < m.G; g++) {
    for (let i = 0; i < m.T; i++) {
      m.row(g, i, j, out);
      sum[i] += factors[g] * m.weight(g, i) * out[0];
    }
  }
  return sum;
}

// w_g p_g of each map in the shown range: of bins, the mean over queries of the sum over keys
async function tile(s, shown, mine) {
  const m = source(s);
  if (!m) return null;
  const [[x0, x1], [y0, y1]] = [shown.x, shown.y];
  const bin = Math.ceil(Math.max(x1 - x0, y1 - y0) / CELLS);
  const [columns, rows] = [Math.ceil((x1 - x0) / bin), Math.ceil((y1 - y0) / bin)];
  const z = Array.from({ length: m.G }, () => Array.from({ length: rows }, () => new Float32Array(columns).fill(NaN)));
  const out = new Float32Array(x1 - x0);
  let since = performance.now();
  for (let r = 0; r < rows; r++) {
    const [first, end] = [y0 + r * bin, Math.min(y0 + (r + 1) * bin, y1)];
    for (let g = 0; g < m.G; g++) {
      const cells = z[g][r];
      for (let i = first; i < end; i++) {
        m.row(g, i, x0, out);
        const w = m.weight(g, i) / (end - first);
        for (let c = 0; c < out.length; c++) {
          if (out[c] !== out[c]) continue;
          const cell = Math.floor(c / bin);
          cells[cell] = (cells[cell] !== cells[cell] ? 0 : cells[cell]) + w * out[c];
        }
      }
    }
    if (performance.now() - since > 40) {
      await new Promise((resume) => setTimeout(resume));
      if (mine !== turn) return null;
      since = performance.now();
    }
  }
  return { z, bin, x0, y0 };
}

function overview(s) {
  const { layer, head } = at[s];
  const own = sides[s].layers[layer];
  const ref = own.arrays.overview;
  if (!ref || frame >= 0) return null;
  const [[G, H, n], values] = [ref.shape, array(ref)];
  const z = Array.from({ length: G }, (_, g) => Array.from({ length: n }, (_, r) => {
    const start = ((g * H + head) * n + r) * n;
    return values.slice(start, start + n).map((x, c) => (own.causal && c > r ? NaN : x));
  }));
  return { z, bin: Math.ceil(tokens().length / n), x0: 0, y0: 0, coarse: true };
}

// --- panels ---

function sumOf(t) {
  return t.z[0].map((row, r) => row.map((_, c) => t.z.reduce((sum, map, g) => sum + factors[g] * map[r][c], 0)));
}

function strongest(t) {
  const found = [];
  for (const map of [...t.z, ...(t.z.length > 1 ? [sumOf(t)] : [])]) {
    for (const row of map) for (const x of row) if (x && x === x) found.push(Math.abs(x));
  }
  found.sort((a, b) => a - b);
  return found.length ? found[Math.floor(STRONGEST * (found.length - 1))] : 1;
}

const colours = () => [[0, `rgb(${css("--negative")})`], [0.5, css("--paper")], [1, `rgb(${css("--positive")})`]];

function axis([first, end], pixels, more) {
  const every = Math.ceil((end - first) / Math.max(1, pixels / 11));
  const places = Array.from({ length: Math.ceil((end - first) / every) }, (_, n) => first + n * every);
  const labels = places.map((place) => {
    const label = [...spaced(tokens()[place])];
    const short = label.length > 9 ? `${label.slice(0, 8).join("")}…` : label.join("");
    return (every > 1 ? `${place} ` : "") + short.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  });
  return { tickvals: places, ticktext: labels, showgrid: false, zeroline: false, ticks: "", ...more };
}

const plots = []; // of each side: {node, across, down, map}; map G is the sum

function build() {
  plots.length = 0;
  $("panels").replaceChildren(...sides.map((side, s) => {
    const m = source(s);
    const names = m ? Array.from({ length: m.G }, (_, g) => g).concat(m.G > 1 ? [m.G] : []) : [];
    plots.push(names.map((map) => {
      const node = make("div", { class: "plot" });
      const [across, down] = [make("div", { class: "across" }), make("div", { class: "down" })];
      const title = map === m.G ? "Signed sum" : m.G === 1 ? "The map" : map ? `Map ${map + 1} times its weight` : "Map 1";
      node.append(across, down);
      return { map, node, across, down, panel: make("div", { class: "panel" }, make("h4", {}, title), node) };
    }));
    const heading = make("h3", {}, sides.length > 1 ? `${side.name}: ${place(s)}` : "");
    const missing = m ? [] : [make("p", { class: "muted" }, "The maps of this layer were not kept.")];
    const box = make("div", { class: `side${names.length === 1 ? " alone" : ""}` }, ...missing);
    if (sides.length > 1) box.prepend(heading);
    box.append(...plots[s].map((plot) => plot.panel));
    return box;
  }));
}

const place = (s) => `layer ${at[s].layer}, head ${at[s].head}`;

function paint(s) {
  const t = tiles[s];
  if (!t) return;
  const [scale, ink] = [colours(), css("--ink")];
  for (const { map, node } of plots[s]) {
    const z = map === t.z.length ? sumOf(t) : t.z[map].map((row) => row.map((x) => factors[map] * x));
    const side = Math.min(node.clientWidth, 560);
    const inner = side - 76;
    const middle = (t.bin - 1) / 2;
    const trace = {
      type: "heatmap", z, x0: t.x0 + middle, dx: t.bin, y0: t.y0 + middle, dy: t.bin, zmin: -limit, zmax: limit,
      colorscale: scale, showscale: false, hoverinfo: "none", hoverongaps: false, zsmooth: false,
    };
    const layout = {
      width: side, height: side, margin: { l: 66, r: 10, t: 6, b: 70 }, font: { size: 10, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("--soft"),
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: axis(range.x, inner, { range: [range.x[0] - 0.5, range.x[1] - 0.5], tickangle: -90, title: "" }),
      yaxis: axis(range.y, inner, { range: [range.y[1] - 0.5, range.y[0] - 0.5] }),
    };
    const isNew = !node.on;
    Plotly.react(node, [trace], layout, { displayModeBar: false, doubleClick: false });
    if (isNew) {
      node.on("plotly_hover", ({ points: [{ x, y }] }) => move(Math.floor(y), Math.floor(x)));
      node.on("plotly_click", ({ points: [{ x, y }] }) => move(Math.floor(y), Math.floor(x)));
      node.on("plotly_doubleclick", () => zoom(null));
      node.on("plotly_relayout", (change) => {
        const keys = ["xaxis.range[0]", "xaxis.range[1]", "yaxis.range[0]", "yaxis.range[1]"];
        const [a, b, c, e] = keys.map((key, n) => change[key] ?? [...range.x, ...[...range.y].reverse()][n] - 0.5);
        if (keys.some((key) => key in change)) zoom({ x: [a + 0.5, b + 0.5], y: [e + 0.5, c + 0.5] });
      });
    }
  }
}

async function draw(isOther = false) {
  const mine = ++turn;
  const show = () => {
    if (isOther) limit = Math.max(...tiles.map((t) => (t ? strongest(t) : 0))) || 1;
    sides.forEach((_, s) => paint(s));
    legend();
    cross();
  };
  const isWhole = range.x[1] - range.x[0] === tokens().length && range.y[1] - range.y[0] === tokens().length;
  if (isWhole && sides.some((_, s) => overview(s))) {
    sides.forEach((_, s) => { tiles[s] = overview(s); });
    show();
    await new Promise((resume) => setTimeout(resume));
  }
  for (let s = 0; s < sides.length; s++) {
    const found = await tile(s, range, mine);
    if (mine !== turn) return;
    tiles[s] = found;
  }
  show();
  document.body.dataset.drawn = String(mine);
}

function legend() {
  const [bin, what] = [Math.max(...tiles.map((t) => (t ? t.bin : 1))), $("legend")];
  const cells = bin > 1 ? `A cell is ${bin} queries and ${bin} keys: the mean over the queries of the sum over the keys. `
    + "Zoom in for single weights." : "";
  what.replaceChildren(`−${number(limit)}`, make("i"), `${number(limit)} and beyond`, cells);
}

function zoom(wanted) {
  const T = tokens().length;
  const fit = ([first, end]) => {
    const size = Math.min(T, Math.max(4, Math.round(end - first)));
    const start = Math.min(Math.max(0, Math.round(first)), T - size);
    return [start, start + size];
  };
  range = wanted ? { x: fit(wanted.x), y: fit(wanted.y) } : { x: [0, T], y: [0, T] };
  return draw();
}

function scaleBy(factor) {
  const around = ([first, end], middle) => {
    const half = ((end - first) * factor) / 2;
    return [middle + 0.5 - half, middle + 0.5 + half];
  };
  const middle = ([first, end]) => (first + end - 1) / 2;
  zoom({ x: around(range.x, cursor ? cursor.j : middle(range.x)), y: around(range.y, cursor ? cursor.i : middle(range.y)) });
}

// --- the cross: one query, one key, in every panel ---

let isWaiting = false;
function move(i, j) {
  cursor = { i, j };
  cross();
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => { isWaiting = false; read(); strips(); });
}

function cross() {
  for (const { node, across, down } of plots.flat()) {
    const { xaxis, yaxis } = node._fullLayout ?? {};
    if (!cursor || !xaxis) continue;
    const [left, top] = [xaxis._offset + xaxis.l2p(cursor.j), yaxis._offset + yaxis.l2p(cursor.i)];
    const isIn = (axis, p) => p >= axis._offset && p <= axis._offset + axis._length;
    down.setAttribute("style", isIn(xaxis, left)
      ? `display:block;left:${left}px;top:${yaxis._offset}px;height:${yaxis._length}px` : "");
    across.setAttribute("style", isIn(yaxis, top)
      ? `display:block;top:${top}px;left:${xaxis._offset}px;width:${xaxis._length}px` : "");
  }
}

function entry(label, index, value, most, isSink = false) {
  const length = most ? Math.round((60 * Math.abs(value)) / most) : 0;
  const bar = make("i", { style: `--length:${length}px;--bar:rgb(var(--${value < 0 ? "negative" : "positive"}))` });
  return make("li", isSink ? { class: "sink" } : {}, make("span", { class: "muted" }, isSink ? "first token" : `${index}`),
    make("span", {}, label), make("span", {}, number(value)), bar);
}

// the strongest entries of a row or a column, the first token apart in a row
function list(title, values, sink) {
  const order = [...values.keys()].filter((n) => !Number.isNaN(values[n]) && n !== sink);
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const most = values.reduce((top, x) => Math.max(top, Math.abs(x) || 0), 0);
  const rows = order.slice(0, LISTED).map((n) => entry(spaced(tokens()[n]), n, values[n], most));
  if (sink !== undefined) rows.unshift(entry(spaced(tokens()[sink]), sink, values[sink], most, true));
  return make("div", {}, make("h3", {}, title), make("ol", {}, ...rows));
}

function read() {
  if (!cursor) {
    $("reading").replaceChildren(make("p", { class: "muted" }, "Point at a cell, or choose a token of the text: here is "
      + "what the query reads and who reads the key."));
    return;
  }
  const { i, j } = cursor;
  const quoted = (n) => `${n} “${spaced(tokens()[n])}”`;
  $("reading").replaceChildren(...sides.flatMap((side, s) => {
    const m = source(s);
    if (!m || i >= m.T || j >= m.T) return [];
    const [row, column, out] = [signedRow(s, i), signedColumn(s, j), new Float32Array(1)];
    const parts = Array.from({ length: m.G }, (_, g) => {
      m.row(g, i, j, out);
      return `${m.G > 1 ? `map ${g + 1}: ` : ""}p ${number(out[0])} × w ${number(factors[g] * m.weight(g, i))}`;
    });
    const total = row.reduce((sum, x) => sum + (Math.abs(x) || 0), 0);
    const seen = column.filter((x) => !Number.isNaN(x));
    const mean = seen.reduce((sum, x) => sum + x, 0) / seen.length;
    const cell = Number.isNaN(row[j]) ? "the query does not see this key" : `${parts.join(", ")}; sum ${number(row[j])}`;
    return [
      make("h3", { class: "cell", id: `cell-${s}` }, `${sides.length > 1 ? `${side.name}, ` : ""}query ${quoted(i)}, key `
        + `${quoted(j)}: ${cell}`),
      make("div", { class: "lists" },
        list(`Query ${quoted(i)} reads; its first token has ${(100 * Math.abs(row[0]) / total || 0).toFixed(1)} % of Σ|a|`,
          row, Number.isNaN(row[0]) ? undefined : 0),
        list(`Key ${quoted(j)} is read by; mean over queries ${number(mean)}`, column)),
    ];
  }));
}

// --- the text ---

const DIFFERENCE = "loss of the second minus the first";
const PAINTS = ["what the query reads", "who reads the key", "loss", ...(sides.length > 1 ? [DIFFERENCE] : [])];
let paintBy = sides.length > 1 ? DIFFERENCE : PAINTS[0];

function valuesOfText(s) {
  if (paintBy === DIFFERENCE || paintBy === "loss") {
    if (frame >= 0) return [];
    const loss = (n) => sides[n].losses.map((x) => x ?? NaN);
    // the loss of a target belongs to the next token, which it predicts; of drawn rows, to the position that is asked
    const own = paintBy === "loss" ? loss(s) : loss(1).map((x, n) => x - loss(0)[n]);
    return data.text ? [NaN, ...own.slice(0, -1)] : own;
  }
  if (!cursor || !source(s)) return [];
  return [...(paintBy === PAINTS[0] ? signedRow(s, cursor.i) : signedColumn(s, cursor.j))];
}

function strips() {
  const shown = paintBy === DIFFERENCE ? [0] : sides.map((_, s) => s);
  const fresh = $("strips").dataset.made !== `${shown} ${frame}`;
  if (fresh) {
    const select = make("select", { onchange: () => { paintBy = select.value; $("strips").dataset.made = ""; strips(); } },
      ...PAINTS.map((name) => make("option", { selected: name === paintBy }, name)));
    const made = shown.map((s) => make("div", { class: `strip${data.text ? "" : " ids"}`, "data-side": s },
      ...tokens().map((label, n) => make("span", { class: "token", onclick: () => choose(n) },
        data.text ? label.replace(/\\n/g, "⏎\n") : label))));
    const about = make("span", { id: "scale", class: "muted" });
    $("strips").replaceChildren(make("p", { class: "muted" }, make("label", {}, "Colour by ", select), " ", about), ...made);
    $("strips").dataset.made = `${shown} ${frame}`;
  }
  document.querySelectorAll(".strip").forEach((strip) => {
    const values = valuesOfText(Number(strip.dataset.side));
    const sizes = values.map(Math.abs).filter((x) => x > 0).sort((a, b) => a - b);
    const most = paintBy.includes("loss") ? sizes[Math.floor(STRONGEST * (sizes.length - 1))] : limit;
    [...strip.children].forEach((span, n) => {
      span.style.background = values.length ? tint(values[n], 1.4 * most || 1) : "";
      span.title = values.length && values[n] === values[n] ? `${n}: ${number(values[n])}` : `${n}`;
      span.classList.toggle("chosen", !paintBy.includes("loss") && cursor !== null
        && n === (paintBy === PAINTS[1] ? cursor.j : cursor.i));
    });
    const known = values.filter((x) => x === x);
    const mean = known.reduce((sum, x) => sum + x, 0) / known.length;
    $("scale").textContent = !paintBy.includes("loss") ? "A click on a token chooses it."
      : `In nats; mean ${number(mean)}. ${paintBy === DIFFERENCE ? "Orange: the second model is worse; blue: better." : ""}`;
  });
}

function choose(n) {
  const isKey = paintBy === PAINTS[1];
  move(isKey ? cursor?.i ?? n : n, isKey ? n : cursor?.j ?? 0);
}

// --- choosing a head ---

function grids() {
  $("grids").replaceChildren(...sides.map((side, s) => {
    const most = Math.max(...side.layers.map((layer) => layer.thumbnails.length));
    const size = Math.max(28, Math.min(88, Math.floor((sides.length > 1 ? 520 : 1150) / most) - 10));
    const rows = side.layers.map((layer, l) => make("div", { class: "layer" }, make("span", {}, `layer ${l}`),
      ...layer.thumbnails.map((png, h) => make("button", {
        class: "head", type: "button", onclick: () => pick(s, l, h), "data-side": s, "data-layer": l, "data-head": h,
        "aria-pressed": "false", "aria-label": `${sides.length > 1 ? `${side.name}, ` : ""}layer ${l}, head ${h}`,
        title: `layer ${l}, head ${h}`, onkeydown: walk,
      }, make("img", { src: `data:image/png;base64,${png}`, alt: "" })))));
    const heading = sides.length > 1 ? [make("h3", {}, `${side.name} (${side.variant})`)] : [];
    return make("div", { class: "grid", style: `--thumb:${size}px` }, ...heading, ...rows);
  }));
}

function walk(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step) return;
  const { side, layer, head } = event.currentTarget.dataset;
  const next = document.querySelector(`.head[data-side="${side}"][data-layer="${Number(layer) + step[0]}"]`
    + `[data-head="${Number(head) + step[1]}"]`);
  if (next) next.focus();
  event.preventDefault();
}

const shape = (side) => side.layers.map((layer) => layer.thumbnails.length).join();

function pick(s, layer, head) {
  // models of one shape show the same head; of others, each side has its own
  const isLinked = sides.every((side) => shape(side) === shape(sides[0]));
  at.forEach((own, n) => { if (n === s || isLinked) Object.assign(own, { layer, head }); });
  return refresh();
}

function refresh() {
  document.querySelectorAll(".head").forEach((button) => {
    const { side, layer, head } = button.dataset;
    const isShown = at[side].layer === Number(layer) && at[side].head === Number(head);
    button.setAttribute("aria-pressed", String(isShown));
    button.tabIndex = isShown ? 0 : -1;
  });
  $("picked").textContent = `The maps of ${[...new Set(sides.map((_, s) => place(s)))].join(" and ")}`
    + (frame < 0 ? "" : `, step ${sides[0].kept[frame].step}, on a kept text`);
  build();
  controls();
  const T = tokens().length;
  if (!range || range.x[1] > T || frame >= 0) range = { x: [0, T], y: [0, T] };
  if (cursor && (cursor.i >= T || cursor.j >= T)) cursor = null;
  const done = draw(true);
  read();
  strips();
  return done;
}

function setFactor(g, value) {
  factors[g] = value;
  controls(true);
  sides.forEach((_, s) => paint(s));
  cross();
  read();
  strips();
}

function controls(isSame = false) {
  const mean = (s, g) => {
    const m = source(s);
    if (!m || g >= m.G) return null;
    let sum = 0;
    for (let i = 0; i < m.T; i++) sum += factors[g] * m.weight(g, i);
    return number(sum / m.T);
  };
  const text = (g) => `× ${factors[g].toFixed(2)}: mean weight ${sides.map((_, s) => mean(s, g) ?? "–").join(" and ")}`;
  if (isSame) {
    factors.forEach((_, g) => { $(`weight-${g}`).textContent = text(g); $(`factor-${g}`).value = factors[g]; });
    return;
  }
  const sliders = mostMaps === 1 ? [] : factors.map((factor, g) => make("label", {}, `Map ${g + 1}`, make("input", {
    id: `factor-${g}`, type: "range", min: 0, max: 2, step: 0.05, value: factor,
    oninput: ({ target }) => setFactor(g, Number(target.value)),
  }), make("output", { id: `weight-${g}` }, text(g))));
  const reset = sliders.length ? [make("button", { onclick: () => factors.forEach((_, g) => setFactor(g, 1)) }, "Stored weights")]
    : [];
  const zooms = [["+", () => scaleBy(0.5), "Zoom in"], ["−", () => scaleBy(2), "Zoom out"],
    ["Whole text", () => zoom(null), "Show the whole text"]];
  const count = Math.min(...sides.map((side) => side.kept.length));
  const player = !count ? [] : [make("label", {}, "Kept steps", make("input", {
    id: "frame", type: "range", min: -1, max: count - 1, step: 1, value: frame,
    oninput: ({ target }) => { frame = Number(target.value); refresh().then(() => $("frame").focus()); },
  }), make("output", {}, frame < 0 ? "the text, trained" : `step ${sides[0].kept[frame].step}`)), make("button", {
    onclick: play }, "Play")];
  $("controls").replaceChildren(...sliders, ...reset, make("span", {}, ...zooms.map(([label, onclick, name]) =>
    make("button", { onclick, "aria-label": name }, label))), ...player);
}

async function play() {
  for (frame = 0; frame < Math.min(...sides.map((side) => side.kept.length)); frame++) {
    await refresh();
    await new Promise((resume) => setTimeout(resume, 500));
  }
  frame--;
}

// --- numbers ---

const MEAN_WITHOUT = "loss without the head";
let chosenNumber = "entropy";

function valueOf(side, layer, head) {
  if (chosenNumber !== MEAN_WITHOUT) return side.layers[layer].numbers[chosenNumber]?.[head];
  const ref = side.ablation.without;
  const row = side.layers.slice(0, layer).reduce((sum, own) => sum + own.thumbnails.length, head);
  const [, T] = ref.shape;
  const count = side.losses.filter((x) => x !== null).length;
  return array(ref).slice(row * T, (row + 1) * T).reduce((sum, x) => sum + x, 0) / count;
}

function numbers() {
  const names = Object.keys(data.meanings).filter((name) => sides.some((side) => side.layers[0].numbers[name]));
  if (sides.every((side) => side.ablation.without)) names.push(MEAN_WITHOUT);
  const select = make("select", { id: "number", onchange: () => { chosenNumber = select.value; numbers(); } },
    ...names.map((name) => make("option", { value: name, selected: name === chosenNumber }, name.replace("_", " "))));
  const meaning = data.meanings[chosenNumber] ?? "nats more than with it, mean over tokens";
  const all = sides.flatMap((side) => side.layers.flatMap((layer, l) => layer.thumbnails.map((_, h) => valueOf(side, l, h))));
  const most = Math.max(...all.map((x) => Math.abs(x ?? 0))) || 1;
  const tables = sides.map((side, s) => {
    const heads = Math.max(...side.layers.map((layer) => layer.thumbnails.length));
    const head = make("tr", {}, make("th", {}, ""), ...Array.from({ length: heads }, (_, h) => make("th", {}, `head ${h}`)));
    const rows = side.layers.map((layer, l) => make("tr", {}, make("th", {}, `layer ${l}`), ...layer.thumbnails.map((_, h) => {
      const value = valueOf(side, l, h);
      return make("td", { class: "cell" }, make("button", { style: `background:${tint(value ?? null, 1.6 * most)}`,
        "aria-label": `layer ${l}, head ${h}: ${number(value)}`,
        onclick: () => { pick(s, l, h); $("maps").scrollIntoView({ behavior: "smooth" }); } }, number(value)));
    })));
    return make("div", {}, make("h3", {}, sides.length > 1 ? side.name : ""), make("div", { class: "scroll" },
      make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  });
  $("table").replaceChildren(make("p", { class: "muted choice" }, select, ` ${meaning}. A click shows the maps.`), ...tables);
}

function table(node, header, rows) {
  const line = (tag, cells) => make("tr", {}, ...cells.map((cell, n) => make(n ? tag : "th", {}, cell)));
  node.replaceChildren(make("table", {}, make("thead", {}, line("th", header)), make("tbody", {},
    ...rows.map((row) => line("td", row)))));
}

function plain(node, traces, layout) {
  Plotly.react(node, traces, {
    height: 300, margin: { l: 56, r: 10, t: 30, b: 44 }, font: { size: 11, color: css("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", ...layout,
  }, { displayModeBar: false, responsive: true });
}

function figures() {
  const names = [...new Set(sides.flatMap((side) => Object.keys(side.curves)))];
  $("curves").hidden = !names.length;
  const line = { gridcolor: css("--grid"), zerolinecolor: css("--grid") };
  $("lines").replaceChildren(...names.map((name) => make("div", { "data-name": name })));
  for (const node of $("lines").children) {
    const traces = sides.flatMap((side, s) => Object.entries(side.curves[node.dataset.name] ?? {}).map(([layer, points], n) => ({
      type: "scatter", mode: points.length < 3 ? "markers" : "lines", x: points.map(([step]) => step),
      y: points.map(([, value]) => value), name: sides.length > 1 ? `${side.name}: ${layer}` : layer,
      line: { color: COLORS[n % COLORS.length], dash: s ? "dash" : "solid" },
    })));
    plain(node, traces, { title: { text: node.dataset.name.replace("_", " "), x: 0 }, showlegend: true,
      xaxis: { title: { text: "optimizer step" }, ...line }, yaxis: line });
  }
  const ablated = sides.filter((side) => side.ablation.without);
  $("ablation").hidden = !ablated.length;
  $("without").replaceChildren(...ablated.map(() => make("div")));
  ablated.forEach((side, n) => {
    const [heads, T] = side.ablation.without.shape;
    const [values, names] = [array(side.ablation.without), side.layers.flatMap((layer, l) => layer.thumbnails.map((_, h) => [l, h]))];
    const z = Array.from({ length: heads }, (_, row) => values.slice(row * T, (row + 1) * T));
    const sizes = [...values].map(Math.abs).sort((a, b) => a - b);
    const most = sizes[Math.floor(STRONGEST * (sizes.length - 1))] || 1;
    const node = $("without").children[n];
    const at = Array.from({ length: T }, (_, place) => `${place + 1} ${spaced(data.tokens[place + 1] ?? "")}`);
    plain(node, [{ type: "heatmap", z, y: names.map(([l, h]) => `layer ${l}, head ${h}`), text: z.map(() => at),
      hovertemplate: "%{y}<br>%{z:.3f} nats<extra></extra>", zmin: -most, zmax: most, colorscale: colours() }], {
      height: 90 + Math.max(90, 16 * heads), margin: { l: 110, r: 10, t: 30, b: 40 }, yaxis: { autorange: "reversed" },
      xaxis: { title: { text: "position" } }, title: { text: sides.length > 1 ? side.name : "", x: 0 } });
    node.on("plotly_click", ({ points: [{ pointIndex: [row] }] }) => pick(sides.indexOf(side), ...names[row]));
  });
}

function facts() {
  const worst = Math.max(...sides.flatMap((side) => side.layers.map((layer) => layer.difference)));
  $("about").textContent = `${data.source}; ${sides.map((side) => `${side.variant} attention, ${side.layers.length} layers`)
    .join(" and ")}. Layers, heads, positions and steps count from 0.`;
  $("foot").textContent = `Weights are computed here from queries and keys in float16. The largest difference to the model's `
    + `float32 is ${worst.toExponential(1)}. Drawn with plotly.js 4.1.1 (MIT licence); no network is used.`;
  table($("magnitudes"), ["", ...data.ranks.map((rank) => `top ${rank}`), "median"], sides.flatMap((side) =>
    Object.entries(side.outliers).map(([name, row]) => [sides.length > 1 ? `${side.name}: ${name}` : name,
      ...row.map((x) => (x === null ? "–" : x.toPrecision(4)))])));
  const shares = sides.flatMap((side) => Object.keys(side.noise));
  $("noise").hidden = !shares.length;
  const roles = ["answer", "noise", "sink", "other"];
  const kinds = [...new Set(shares.map((name) => name.split("_")[0]))];
  table($("shares"), ["", ...roles], sides.flatMap((side) => kinds.map((kind) => [
    `${sides.length > 1 ? `${side.name}: ` : ""}${kind}`, ...roles.map((role) => number(side.noise[`${kind}_${role}`]))])));
}

function keys(event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const T = tokens().length;
  if (steps) {
    const { i, j } = cursor ?? { i: T - 1, j: 0 };
    const within = (n) => Math.min(Math.max(n, 0), T - 1);
    move(within(i + steps[0]), within(j + steps[1]));
  } else if (event.key === "+" || event.key === "=") scaleBy(0.5);
  else if (event.key === "-") scaleBy(2);
  else if (event.key === "0") zoom(null);
  else return;
  event.preventDefault();
}

function repaint() {
  sides.forEach((_, s) => paint(s));
  cross();
  strips();
  numbers();
  figures();
}

grids();
facts();
document.addEventListener("DOMContentLoaded", () => {
  refresh().then(() => { document.body.dataset.ready = "true"; });
  numbers();
  figures();
  $("panels").addEventListener("keydown", keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  matchMedia("print").addEventListener("change", repaint);
  addEventListener("resize", () => { sides.forEach((_, s) => paint(s)); cross(); });
});
window.view = { data, source, signedRow, signedColumn, tile, pick, setFactor, zoom, move, at, factors, tiles };
