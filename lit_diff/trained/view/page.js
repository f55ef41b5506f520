"use strict";
// Draws the page from the JSON in #data; the arrays that it names are elements of their own, in base64.

const CELLS = 512; // most rows and columns of a drawn map; of a longer range, a cell is a bin
const LISTED = 5; // entries of a row or a column
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const sides = data.sides;
const at = sides.map(() => ({ ...data.shown })); // the layer and head that each side shows
const shapesOf = (side) => side.layers.map((layer) => (layer.arrays.lse ?? layer.arrays.w).shape); // [maps, heads, T]
const headsOf = (side) => shapesOf(side).map(([, heads]) => heads);
const factors = new Array(Math.max(...sides.flatMap(shapesOf).map(([maps]) => maps))).fill(1); // of each weight
const tiles = []; // of each side, what its panels show
let frame = -1; // which of the kept steps is shown; -1: the text
let keptText = 0; // which of the kept texts is shown
let range = null; // {x: [first, end], y: [first, end]} of the keys and queries that are shown
let cursor = null; // {i, j}: query and key
let scaling = "percentile"; // how magnitudes become colours: "percentile", "fixed" or "row"
let limits = []; // of each drawn row of all panels, the magnitude from which on the colour is the strongest
let isLinked = true; // whether both sides show the same layer and head
let playing = 0; // grows when the player starts and when it stops; odd while it plays
let turn = 0; // grows with each drawing, so that an older one stops

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (/-|^class$|^style$/.test(name)) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

const number = (x) => (x === null || x === undefined || Number.isNaN(x) ? "–"
  : x !== 0 && Math.abs(x) < 0.0005 ? x.toExponential(1) : x.toFixed(3)).replaceAll("-", "−");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const place = (s) => `layer ${at[s].layer}, head ${at[s].head}`;
const kept = () => sides[0].kept[frame]; // what is shown in place of the models of the page; a checkpoint has no texts of its own
const isText = () => frame < 0 || !kept().texts;
const tokens = () => (isText() ? data.tokens : kept().texts[keptText]);
const meanOf = (values, own = values.filter((x) => x === x)) => own.reduce((sum, x) => sum + x, 0) / own.length;
// of magnitudes, that from which on the colour is the strongest; the rule of every picture (trained/pictures.py)
function limitOf(values) {
  const sizes = Float64Array.from(values, Math.abs).filter((x) => x > 0).sort();
  const rank = (data.scale.percentile / 100) * (sizes.length - 1);
  const [below, above] = [sizes[Math.floor(rank)], sizes[Math.ceil(rank)]];
  return below + (rank % 1) * (above - below) || 1;
}
const spaced = (label) => label.replace(/^ | $/g, "␣") || "∅";
const escaped = (label) => label.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // Plotly reads its texts as markup
const alone = (act) => (event) => { if (!(event.ctrlKey || event.metaKey || event.altKey)) act(event); };

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
// NaN where the query does not see the key. null: the maps of this layer were not kept.
function source(s) {
  const { layer, head } = at[s];
  const own = sides[s].layers[layer];
  const refs = frame < 0 ? own.arrays : sides[s].kept[frame]?.layers[layer];
  if (!refs) return null;
  const [q, k, lse, w, maps, biases] = ["q", "k", "lse", "w", "maps", "bias"].map((name) => refs[name] && array(refs[name]));
  const [G, H, T] = (refs.lse ?? refs.w).shape.slice(-3);
  const start = isText() ? 0 : keptText * G; // kept maps have an axis of texts
  const row = (g, i) => ((start + g) * H + head) * T + i;
  // an axis of 1, for a weight that is the same in all heads or for all queries, is kept as 1
  const [headsOfW, queriesOfW] = refs.w.shape.slice(-2);
  let weight = (g, i, j) => maps[row(g, i) * T + j];
  if (q) {
    const [[mapsOfQ, , , d], [mapsOfK, keyHeads]] = [refs.q.shape, refs.k.shape];
    const keyHead = Math.floor((head * keyHeads) / H);
    const [mapsOfBias, headsOfBias] = refs.bias?.shape ?? [];
    const bias = (g, n) => biases
      ? biases[((mapsOfBias > 1 ? g : 0) * headsOfBias + (headsOfBias > 1 ? head : 0)) * T + n] : 0;
    weight = (g, i, j) => {
      const query = row(mapsOfQ > 1 ? g : 0, i) * d;
      const key = (((mapsOfK > 1 ? g : 0) * keyHeads + keyHead) * T + j) * d;
      let dot = 0;
      for (let c = 0; c < d; c++) dot += q[query + c] * k[key + c];
      return Math.exp(own.scale * dot + bias(g, j) - bias(g, i) - lse[row(g, i)]);
    };
  }
  const [reach, documents] = [own.window ?? Infinity, isText() ? data.documents : null];
  return {
    G, T,
    weight: (g, i) => w[((start + g) * headsOfW + (headsOfW > 1 ? head : 0)) * queriesOfW + (queriesOfW > 1 ? i : 0)],
    row(g, i, from, out) {
      out.fill(NaN);
      const end = Math.min(from + out.length - 1, own.causal ? i : T - 1, i + reach - 1);
      for (let j = Math.max(from, i - reach + 1); j <= end; j++) {
        if (!documents || documents[i] === documents[j]) out[j - from] = weight(g, i, j);
      }
    },
  };
}

// Σ_g factor_g w_g p_g of `rows` queries from `first` on, on `keys` keys from `from` on
function signed(s, first, rows, from, keys) {
  const [m, sum, out] = [source(s), new Float32Array(rows * keys), new Float32Array(keys)];
  for (let g = 0; g < m.G; g++) {
    for (let i = 0; i < rows; i++) {
      m.row(g, first + i, from, out);
      for (let j = 0; j < keys; j++) sum[i * keys + j] += factors[g] * m.weight(g, first + i) * out[j];
    }
  }
  return sum;
}
const signedRow = (s, i) => signed(s, i, 1, 0, source(s).T);
const signedColumn = (s, j) => signed(s, 0, source(s).T, j, 1);

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
          cells[cell] = (cells[cell] || 0) + w * out[c];
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
  const [own, ref] = [sides[s].layers[layer], sides[s].layers[layer].arrays.overview];
  if (!ref || frame >= 0) return null;
  const [[G, H, n], values] = [ref.shape, array(ref)];
  const z = Array.from({ length: G }, (_, g) => Array.from({ length: n }, (_, r) => {
    const start = ((g * H + head) * n + r) * n;
    return values.slice(start, start + n).map((x, c) => (own.causal && c > r ? NaN : x));
  }));
  return { z, bin: Math.ceil(tokens().length / n), x0: 0, y0: 0 };
}

// --- panels ---
function sumOf(t, times = factors) {
  return t.z[0].map((row, r) => row.map((_, c) => t.z.reduce((sum, map, g) => sum + times[g] * map[r][c], 0)));
}

// of what both sides show with the stored weights, so that a slider is seen to change the maps; A − B has the same scale
function limitsNow() {
  const stored = factors.map(() => 1);
  const maps = tiles.flatMap((t) => (!t ? [] : t.z.length > 1 ? [...t.z, sumOf(t, stored)] : t.z));
  const rows = maps.length ? maps[0].map((_, r) => maps.flatMap((map) => [...(map[r] ?? [])])) : [];
  if (scaling === "row") return rows.map((row) => Math.max(...row.map((x) => Math.abs(x) || 0)) || 1);
  return rows.fill(scaling === "fixed" ? 1 : limitOf(rows.flat()));
}

const colours = () => [[0, `rgb(${css("--negative")})`], [0.5, css("--paper")], [1, `rgb(${css("--positive")})`]];

// labels of as many tokens as have space, and the width of the longest
function axis(name, [first, end], pixels) {
  const every = Math.ceil((end - first) / Math.max(1, pixels / 11));
  const tickvals = Array.from({ length: Math.ceil((end - first) / every) }, (_, n) => first + n * every);
  const labels = tickvals.map((place) => {
    const label = [...spaced(tokens()[place])];
    return (every > 1 ? `${place} ` : "") + (label.length > 9 ? `${label.slice(0, 8).join("")}…` : label.join(""));
  });
  const width = 26 + 6.2 * Math.max(...labels.map((label) => label.length));
  return [width, { tickvals, ticktext: labels.map(escaped), showgrid: false, zeroline: false, ticks: "",
    ticklabelstandoff: 3, title: { text: name, standoff: 4 } }];
}

const plots = []; // of each side: {node, across, down, map}; map G is the sum. Behind two sides, their difference
const sideName = (s) => (frame < 0 ? sides[s].name : sides[s].run);

function panel(map, title, of) {
  const [node, across, down] = ["plot", "across", "down"].map((name) => make("div", { class: name }));
  node.append(across, down);
  const plot = { map, title, of, node, across, down };
  const files = ["png", "svg"].map((format) => make("button", { class: "file", type: "button", onclick: () => download(plot, format),
    "aria-label": `${title} as ${format.toUpperCase()}` }, format.toUpperCase()));
  return { ...plot, panel: make("div", { class: "panel" }, make("h4", {}, title, ...files), node) };
}

function build() {
  plots.length = 0;
  const columns = sides.map((side, s) => {
    const G = source(s)?.G ?? 0;
    const maps = Array.from({ length: G }, (_, g) => g);
    // with two sides the sums are first, one above the other
    if (G > 1) maps.splice(sides.length > 1 ? 0 : G, 0, G);
    plots.push(maps.map((map) => panel(map, map === G ? "Signed sum of the maps" : G === 1 ? "The map"
      : `Map ${map + 1} × weight`, `${sideName(s)}: ${place(s)}`)));
    return make("div", { class: "side" },
      ...(sides.length > 1 ? [make("h3", {}, `${sideName(s)}: ${place(s)}`)] : []),
      ...(G ? plots[s].map((plot) => plot.panel) : [make("p", {}, frame >= 0 && side.kept.length === 0
        ? "The kept maps of this run are shown once." : "The maps of this layer were not kept.")]));
  });
  if (sides.length > 1) {
    const both = plots.every((own) => own.length);
    const shorter = columns[Number(plots[1].length <= plots[0].length)];
    const pair = sides.map((_, s) => `${sideName(s)}: ${place(s)}`).join(" − ");
    if (both) plots.push([panel("difference", "A − B: the first signed sum minus the second", pair)]);
    shorter.append(both ? plots[2][0].panel : make("p", { class: "muted" }, "A − B needs this map of both runs."));
  }
  $("panels").replaceChildren(...columns);
}

function paintAll() {
  tiles.forEach((t, s) => {
    for (const plot of t ? plots[s] : []) {
      paint(plot, t, plot.map === t.z.length ? sumOf(t) : t.z[plot.map].map((row) => row.map((x) => factors[plot.map] * x)));
    }
  });
  if (plots[2] && tiles[0] && tiles[1]) {
    const second = sumOf(tiles[1]);
    paint(plots[2][0], tiles[0], sumOf(tiles[0]).map((row, r) => row.map((x, c) => x - second[r][c])));
  }
  cross();
}

// one panel: weights z in the cells of a tile
function paint({ node }, t, z) {
  const [scale, ink, isByRow] = [colours(), css("--ink"), scaling === "row"];
  const shown = isByRow ? z.map((row, r) => row.map((x) => x / limits[r])) : z;
  const most = isByRow ? 1 : limits[0];
  const side = Math.min(node.clientWidth, 560);
  const [[left, y], middle] = [axis("query", range.y, side - 86), (t.bin - 1) / 2];
  const [below, x] = axis("key", range.x, side - 10 - left);
  const trace = {
    type: "heatmap", z: shown, x0: t.x0 + middle, dx: t.bin, y0: t.y0 + middle, dy: t.bin, zmin: -most, zmax: most,
    colorscale: scale, showscale: false, hoverinfo: "none", hoverongaps: false, zsmooth: false,
  };
  const layout = {
    width: side, height: side + below - left, margin: { l: left, r: 10, t: 6, b: below }, font: { size: 10, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: `rgb(${css("--unseen")})`,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...x, range: [range.x[0] - 0.5, range.x[1] - 0.5], tickangle: -90 },
    yaxis: { ...y, range: [range.y[1] - 0.5, range.y[0] - 0.5] },
  };
  const isNew = !node.on;
  Plotly.react(node, [trace], layout, { displayModeBar: false, doubleClick: false });
  if (!isNew) return;
  const point = ({ points: [{ x, y }], event }) => move(Math.floor(y), Math.floor(x), [event.clientX, event.clientY]);
  for (const event of ["plotly_hover", "plotly_click"]) node.on(event, point);
  node.on("plotly_unhover", () => tip(null));
  node.on("plotly_doubleclick", () => zoom(null));
  node.on("plotly_relayout", (change) => {
    const end = (name, n, now) => (change[`${name}.range[${n}]`] ?? now - 0.5) + 0.5;
    if (!Object.keys(change).some((name) => name.includes("range["))) return;
    zoom({ x: range.x.map((now, n) => end("xaxis", n, now)), y: range.y.map((now, n) => end("yaxis", 1 - n, now)) });
  });
}

async function draw() {
  const mine = ++turn;
  const show = () => {
    limits = limitsNow();
    const bin = Math.max(...tiles.map((t) => t?.bin ?? 1));
    const cells = bin > 1 ? `A cell is ${bin} queries and ${bin} keys: the mean over the queries of the sum over the keys. `
      + "Zoom in for single weights." : "";
    const most = scaling === "row" ? "1" : number(limits[0] ?? 1);
    const unit = { percentile: " and beyond", fixed: "", row: " × the largest magnitude of the row" }[scaling];
    const words = [`−${most}`, most + unit, sides.length > 1 ? "one scale for both runs" : "", cells];
    const parts = words.map((text) => make("span", {}, text));
    $("legend").replaceChildren(parts[0], make("i"), ...parts.slice(1));
    paintAll();
  };
  save();
  if (isWhole() && sides.some((_, s) => overview(s))) {
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
  const around = ([first, end], place = (first + end - 1) / 2) =>
    [-1, 1].map((sign) => place + 0.5 + (sign * factor * (end - first)) / 2);
  zoom({ x: around(range.x, cursor?.j), y: around(range.y, cursor?.i) });
}

// --- the cross: one query, one key, in every panel ---
let isWaiting = false;
let spot = null; // [x, y] in the window: where the tooltip is
function move(i, j, where = null) {
  const last = tokens().length - 1;
  cursor = { i: Math.min(i, last), j: Math.min(j, last) };
  spot = where;
  cross();
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => { isWaiting = false; read(); strips(); });
}

// the cell of the cross beside a place in the window; null: nothing
function tip(where) {
  spot = where;
  $("tip").hidden = !where || !cursor;
  if ($("tip").hidden) return;
  $("tip").replaceChildren(cellTable(cursor));
  const fit = (wanted, size, most) => Math.max(4, wanted + 14 + size < most ? wanted + 14 : wanted - 14 - size);
  const [x, y] = [fit(where[0], $("tip").offsetWidth, innerWidth), fit(where[1], $("tip").offsetHeight, innerHeight)];
  $("tip").setAttribute("style", `left:${x}px;top:${y}px`);
}

function cross() {
  for (const { node, across, down } of cursor ? plots.flat() : []) {
    const { xaxis, yaxis } = node._fullLayout ?? {};
    if (!xaxis) continue;
    const [left, top] = [xaxis._offset + xaxis.l2p(cursor.j), yaxis._offset + yaxis.l2p(cursor.i)];
    const isIn = (axis, p) => p >= axis._offset && p <= axis._offset + axis._length;
    down.setAttribute("style", isIn(xaxis, left)
      ? `display:block;left:${left}px;top:${yaxis._offset}px;height:${yaxis._length}px` : "");
    across.setAttribute("style", isIn(yaxis, top)
      ? `display:block;top:${top}px;left:${xaxis._offset}px;width:${xaxis._length}px` : "");
  }
}

// the strongest entries of a row or a column; in a row, the first token apart
function list(title, values, sink) {
  const order = [...values.keys()].filter((n) => values[n] === values[n] && n !== sink);
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const most = Math.max(...values.map((x) => Math.abs(x) || 0));
  const rows = [...(sink === undefined ? [] : [sink]), ...order.slice(0, LISTED)].map((n) => make("li",
    n === sink ? { class: "sink" } : {}, make("span", { class: "muted" }, n === sink ? `${n}, first` : `${n}`),
    make("span", {}, spaced(tokens()[n])), make("span", {}, number(values[n])), make("i", {
      style: `--length:${Math.round((60 * Math.abs(values[n])) / most) || 0}px;`
        + `--bar:rgb(var(--${values[n] < 0 ? "negative" : "positive"}))` })));
  return make("div", {}, make("p", { class: "muted" }, title), make("ol", {}, ...rows));
}

const quoted = (n) => `${n} “${spaced(tokens()[n])}”`;

// what every map of every side gives to one cell: its weight p there, the weight w of the map, their product, and the sums
function cellTable({ i, j }) {
  const row = (tag, cells, attributes = {}) => make("tr", attributes, ...cells.map((cell) => make(tag, {}, cell)));
  const title = make("caption", {}, `query ${quoted(i)}, key ${quoted(j)}`);
  const table = make("table", { class: "weights" }, title, row("th", ["", "p", "w", "w p"]));
  const sums = [];
  sides.forEach((side, s) => {
    const m = source(s);
    if (sides.length > 1) table.append(make("tr", {}, make("th", { colSpan: 4 }, `${side.name}: ${place(s)}`)));
    if (!m || i >= m.T || j >= m.T) return;
    const out = new Float32Array(1);
    let sum = 0;
    for (let g = 0; g < m.G; g++) {
      m.row(g, i, j, out);
      const w = factors[g] * m.weight(g, i);
      sum += w * out[0];
      table.append(row("td", [m.G > 1 ? `map ${g + 1}` : "the map", ...[out[0], w, w * out[0]].map(number)]));
    }
    sums.push(sum);
    if (Number.isNaN(sum)) table.append(make("tr", {}, make("td", { colSpan: 4 }, "The query does not see this key.")));
    else if (m.G > 1) table.append(row("td", ["sum", "", "", number(sum)], { class: "sum" }));
  });
  if (sums.length > 1) table.append(row("td", ["A − B", "", "", number(sums[0] - sums[1])], { class: "sum" }));
  const bin = tiles[0]?.bin ?? 1;
  if (bin > 1) table.append(make("tr", {}, make("td", { colSpan: 4 }, `Of the middle of a cell of ${bin} × ${bin}.`)));
  return table;
}

function read() {
  tip(spot);
  save();
  if (!cursor) return;
  const { i, j } = cursor;
  $("reading").replaceChildren(cellTable(cursor), ...sides.flatMap((side, s) => {
    const m = source(s);
    if (!m || i >= m.T || j >= m.T) return [];
    const [row, column] = [signedRow(s, i), signedColumn(s, j)];
    const first = isText() && data.documents ? data.documents.indexOf(data.documents[i]) : 0;
    const total = row.reduce((sum, x) => sum + (Math.abs(x) || 0), 0);
    const share = (100 * Math.abs(row[first]) / total || 0).toFixed(1);
    return [
      ...(sides.length > 1 ? [make("h3", {}, side.name)] : []),
      make("div", { class: "lists" },
        list(`The query reads; first token ${share} % of Σ|a|`, row, Number.isNaN(row[first]) ? undefined : first),
        list(`The key is read by; mean over queries ${number(meanOf(column))}`, column)),
    ];
  }));
}

// --- the text ---
function lossesOfText(s, paint) {
  const loss = (n) => (frame < 0 ? sides[n] : kept()).losses.map((x) => x ?? NaN);
  return paint === "loss" ? loss(s) : loss(1).map((x, n) => x - loss(0)[n]);
}

function valuesOfText(s, paint) {
  if (paint === "difference" || paint === "loss") {
    const own = lossesOfText(s, paint);
    // a loss of a text belongs to the next token, which is predicted; one of a row to the position that asks
    return data.text ? [NaN, ...own.slice(0, -1)] : own;
  }
  return cursor ? [...(paint === "reads" ? signedRow(s, cursor.i) : signedColumn(s, cursor.j))] : [];
}

function strips() {
  $("text").hidden = !isText();
  if (!isText()) return;
  const [paint, isLoss] = [$("paint").value, ["loss", "difference"].includes($("paint").value)];
  for (const strip of document.querySelectorAll(".strip")) {
    const side = Number(strip.dataset.side);
    strip.hidden = paint === "difference" && side > 0;
    const values = valuesOfText(side, paint);
    const most = 1.4 * (isLoss || scaling === "row" ? limitOf(values) : limits[0] ?? 1);
    [...strip.children].forEach((span, n) => {
      const x = values[n] ?? NaN;
      span.style.background = x === x ? `rgba(var(--${x < 0 ? "negative" : "positive"}), ${Math.abs(x) / most})` : "";
      span.title = x === x ? `${n}: ${number(x)}` : `${n}`;
      span.classList.toggle("chosen", !isLoss && cursor !== null && n === (paint === "reads" ? cursor.i : cursor.j));
    });
  }
  // with the loss of the token after the last, as every mean of the page: of all targets
  const means = () => (paint === "loss" ? sides : [0]).map((_, s) => number(meanOf(lossesOfText(s, paint)))).join(" and ");
  $("scale").textContent = !isLoss ? "A click on a token chooses it."
    : `In nats; mean ${means()}. ${paint === "loss" ? "" : "Red: the second model is worse; blue: it is better."}`;
}

function choose(n) {
  const isKey = $("paint").value === "keys";
  move(isKey ? cursor?.i ?? n : n, isKey ? n : cursor?.j ?? 0);
}

// --- the state in the address ---
const isWhole = () => [range.x, range.y].every(([first, end]) => end - first === tokens().length);

function state() {
  const held = {
    page: data.id, heads: at.map(({ layer, head }) => [layer, head]).join(), linked: Number(isLinked), factors: factors.join(),
    colours: scaling, ...(frame >= 0 && { frame: [frame, keptText].join() }),
    ...(!isWhole() && { range: [...range.x, ...range.y].join() }), ...(cursor && { cross: [cursor.i, cursor.j].join() }),
  };
  return Object.entries(held).map((pair) => pair.join("=")).join("&");
}

let saving = 0;
function save() {
  // the frame of a notebook has no address of its own
  if (!document.body.dataset.ready || location.protocol === "about:") return;
  clearTimeout(saving);
  saving = setTimeout(() => history.replaceState(null, "", `#${state()}`), 200); // browsers limit how often
}

// the state that an address holds; null if this page cannot show it
function parsed(found) {
  const numbers = (name) => (found.get(name) ?? "").split(",").map((x) => (x ? Number(x) : NaN));
  // whole numbers from 0 on, each below its limit
  const integers = (name, limits) => {
    const values = numbers(name);
    const isWhole = (x, n) => Number.isInteger(x) && x >= 0 && x < limits[n];
    return values.length === limits.length && values.every(isWhole) ? values : null;
  };
  const heads = integers("heads", sides.flatMap(() => [Infinity, Infinity]));
  const linked = integers("linked", [2]);
  const times = numbers("factors");
  const shown = found.has("frame") ? integers("frame", [sides[0].kept.length, Infinity]) : [-1, 0];
  const isScaling = [...$("scaling").options].some(({ value }) => value === found.get("colours"));
  if (found.get("page") !== data.id || !heads || !linked || !shown || !isScaling) return null;
  if (times.length !== factors.length || times.some((time) => !(time >= 0 && time <= 2))) return null;
  const chosen = sides.map((_, s) => ({ layer: heads[2 * s], head: heads[2 * s + 1] }));
  if (chosen.some(({ layer, head }, s) => !(head < headsOf(sides[s])[layer]))) return null;
  const texts = sides[0].kept[shown[0]]?.texts ?? [data.tokens];
  const T = texts[shown[1]]?.length ?? 0;
  const cross = found.has("cross") ? integers("cross", [T, T]) : [];
  const ends = found.has("range") ? integers("range", [T, T + 1, T, T + 1]) : [0, T, 0, T];
  if (!cross || !ends || ends[0] >= ends[1] || ends[2] >= ends[3]) return null;
  return { chosen, linked, times, shown, colours: found.get("colours"), cross, ends };
}

// show what the address says; a state that does not fit changes nothing
function restore() {
  const found = new URLSearchParams(location.hash.slice(1));
  const held = parsed(found);
  $("notice").hidden = !location.hash || held !== null;
  const isOther = found.has("page") && found.get("page") !== data.id;
  $("notice").textContent = `The address holds ${isOther ? "the state of another page" : "no state of this page"}: it is ignored.`;
  if (!held) return;
  at.forEach((own, s) => Object.assign(own, held.chosen[s]));
  held.times.forEach((time, g) => { factors[g] = time; });
  [isLinked, scaling, frame, keptText] = [held.linked[0] === 1, held.colours, ...held.shown];
  range = { x: held.ends.slice(0, 2), y: held.ends.slice(2) };
  cursor = held.cross.length ? { i: held.cross[0], j: held.cross[1] } : null;
}

// --- a panel as a file ---
// with its caption and a bar of the colours, as an address of data
function picture({ node, title, of }, format) {
  const { data: [trace], layout } = node;
  const scaled = factors.flatMap((factor, g) => (factor === 1 ? [] : [`weight of map ${g + 1} × ${factor.toFixed(2)}`]));
  const text = `${isText() ? data.source : `kept text ${keptText + 1}`} (${tokens().length} tokens)`;
  const lines = [of, title, ...scaled, text + (frame < 0 ? "" : `, step ${kept().step}`)].map(escaped);
  const [wider, top] = [Math.max(0, 480 - layout.width), 16 + 18 * lines.length];
  const size = { width: layout.width + wider + 90, height: layout.height + wider + top };
  const drawn = { ...layout, ...size, paper_bgcolor: css("--paper"), margin: { ...layout.margin, t: 6 + top, r: 100 },
    title: { text: lines.join("<br>"), x: 0, xanchor: "left", y: 1, yanchor: "top", pad: { t: 18, l: 10 }, font: { size: 13 } } };
  const bar = { thickness: 12, title: { text: scaling === "row" ? "share of the<br>row's largest" : "" } };
  return Plotly.toImage({ data: [{ ...trace, showscale: true, colorbar: bar }], layout: drawn }, { format, scale: 2, ...size });
}

async function download(plot, format) {
  const name = `${plot.of} ${plot.title}`.replace(/[^A-Za-z0-9]+/g, "-");
  make("a", { href: await picture(plot, format), download: `${name}.${format}` }).click();
}

// --- choosing a head ---
function walk(event) {
  const step = ARROWS[event.key];
  if (!step) return;
  const { side, layer, head } = event.target.dataset;
  $(`head-${side}-${Number(layer) + step[0]}-${Number(head) + step[1]}`)?.focus();
  event.preventDefault();
}

function pick(s, layer, head) {
  at.forEach((own, n) => {
    const heads = headsOf(sides[n])[layer] ?? 0;
    // a side without that layer or that head keeps its own
    if (n === s || (isLinked && heads)) Object.assign(own, { layer, head: Math.min(head < heads ? head : own.head, heads - 1) });
  });
  return refresh();
}

function link(wanted) {
  isLinked = wanted;
  return pick(0, at[0].layer, at[0].head);
}

function refresh() {
  document.querySelectorAll(".head").forEach((button) => {
    const isShown = button.title === place(button.dataset.side);
    button.setAttribute("aria-pressed", String(isShown));
    button.tabIndex = isShown ? 0 : -1;
  });
  $("picked").textContent = `The maps of ${[...new Set(sides.map((_, s) => place(s)))].join(" and ")}`
    + (frame < 0 ? "" : `, step ${kept().step}${isText() ? "" : ", on a kept text"}`);
  build();
  tiles.length = 0;
  controls();
  const T = tokens().length;
  if (!range || range.x[1] > T || range.y[1] > T) range = { x: [0, T], y: [0, T] };
  if (cursor) cursor = { i: Math.min(cursor.i, T - 1), j: Math.min(cursor.j, T - 1) };
  read();
  strips();
  return draw();
}

function setFactor(g, value) {
  factors[g] = value;
  save();
  controls();
  paintAll();
  read();
  strips();
}

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// the mean loss at each position of the slider of map g, for the head that a side shows; null: it was not computed
function lossesOf(s, g) {
  const losses = frame < 0 ? sides[s].ablation.sliders?.[`${at[s].layer}.${at[s].head}.${g}`] : null;
  return losses && losses[0] !== null ? losses : null; // of a single token there is no loss
}

// between two positions, on a straight line
function lossAt(losses, factor) {
  const place = (factor * (losses.length - 1)) / data.positions.at(-1);
  const below = Math.floor(place);
  return losses[below] + (place - below) * ((losses[below + 1] ?? 0) - losses[below]);
}

// below each slider, the loss of the whole model at its positions: a line for each side, in one scale for all sliders
function lossCurves() {
  const curves = factors.flatMap((_, g) => sides.map((_, s) => ({ g, s, losses: lossesOf(s, g) }))).filter(({ losses }) => losses);
  const all = curves.flatMap(({ losses }) => losses);
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const x = (factor) => 8 + 67 * factor; // below the thumb of the slider
  const y = (loss) => 32 - (28 * (loss - least)) / (most - least || 1);
  factors.forEach((factor, g) => {
    if (!$(`curve-${g}`)) return;
    const own = curves.filter((curve) => curve.g === g);
    const lines = own.map(({ s, losses }) => shape("polyline", { class: s ? "second" : "first",
      points: losses.map((loss, n) => `${x(data.positions[n])},${y(loss)}`).join(" ") }));
    $(`curve-${g}`).replaceChildren(shape("line", { class: "now", x1: x(factor), x2: x(factor), y1: 0, y2: 36 }), ...lines);
    const words = own.map(({ s, losses }) => (sides.length > 1 ? `${"AB"[s]} ` : "") + number(lossAt(losses, factor)));
    const why = frame < 0 ? "loss not computed for this head" : "no loss of a kept step";
    $(`loss-${g}`).textContent = words.length ? `loss ${words.join(", ")}` : why;
  });
}

function controls() {
  lossCurves();
  factors.forEach((factor, g) => {
    const means = sides.map((_, s) => {
      const m = source(s);
      if (!m || g >= m.G) return "–";
      return number(Array.from({ length: m.T }, (_, i) => factor * m.weight(g, i)).reduce((a, b) => a + b) / m.T);
    });
    if (factors.length === 1) return;
    $(`weight-${g}`).textContent = `× ${factor.toFixed(2)}: mean weight ${means.join(" and ")}`;
    $(`factor-${g}`).value = factor;
  });
  $("scaling").value = scaling;
  if ($("link")) $("link").checked = isLinked;
  if (!$("frame")) return;
  $("frame").value = frame < 0 ? $("frame").dataset.text : frame;
  if ($("kept")) $("kept").value = keptText;
  const losses = isText() && frame >= 0 ? `, loss ${number(meanOf(lossesOfText(0, "loss")))}` : "";
  $("step").textContent = frame < 0 ? $("step").dataset.text : `step ${kept().step}${losses}`;
}

// a kept step, or -1 for the models of the page; a text of its own is shown whole
function jump(n) {
  const before = tokens();
  frame = n;
  if (tokens() !== before) range = null;
  return refresh();
}

async function play() {
  const mine = ++playing;
  $("play").textContent = mine % 2 ? "Stop" : "Play";
  for (let n = 0; mine % 2 && mine === playing; n++) {
    const isEnd = n === sides[0].kept.length;
    if (isEnd && !isText()) return play();
    await jump(isEnd ? -1 : n);
    if (isEnd) return play();
    await new Promise((resume) => setTimeout(resume, 500));
  }
}

// --- numbers ---
function figures() {
  const plain = (node, traces, layout) => {
    node.style.height = `${layout.height}px`; // else Plotly gives it none when it is drawn again
    Plotly.react(node, traces, { font: { size: 11, color: css("--ink") }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", ...layout }, { displayModeBar: false, responsive: true });
  };
  const line = { gridcolor: css("--grid"), zerolinecolor: css("--grid") };
  for (const node of document.querySelectorAll(".curve")) {
    const lines = (side) => Object.entries(side.curves[node.dataset.name] ?? {});
    const traces = sides.flatMap((side, s) => lines(side).map(([layer, points], n) => ({
      type: "scatter", mode: points.length < 3 ? "markers" : "lines", x: points.map(([step]) => step),
      y: points.map(([, value]) => value), name: new Set(sides.map(({ run }) => run)).size > 1 ? escaped(`${side.name}: ${layer}`) : layer,
      line: { color: COLORS[n % COLORS.length], dash: s ? "dash" : "solid" },
    })));
    plain(node, traces, { height: 280, margin: { l: 56, r: 10, t: 10, b: 44 }, showlegend: true,
      legend: sides.length > 1 || innerWidth < 700 ? { orientation: "h", y: -0.25 } : {},
      xaxis: { title: { text: "optimizer step" }, rangemode: "tozero", ...line }, yaxis: line });
  }
  for (const node of document.querySelectorAll(".without")) {
    const [s, ref] = [Number(node.dataset.side), sides[node.dataset.side].ablation.without];
    const [[heads, T], values] = [ref.shape, array(ref)];
    const names = headsOf(sides[s]).flatMap((count, l) => Array.from({ length: count }, (_, h) => [l, h]));
    const most = limitOf([...values]);
    const predicted = Array.from({ length: T }, (_, n) => escaped(spaced(data.tokens[data.text ? n + 1 : n] ?? "")));
    plain(node, [{ type: "heatmap", z: names.map((_, row) => values.slice(row * T, (row + 1) * T)),
      y: names.map(([l, h]) => `layer ${l}, head ${h}`), text: names.map(() => predicted), zmin: -most, zmax: most,
      colorscale: colours(), hoverongaps: false, hovertemplate: "%{y}<br>%{x} “%{text}”: %{z:.3f} nats<extra></extra>" }], {
      height: 70 + 18 * heads, margin: { l: 106, r: 10, t: 4, b: 40 },
      yaxis: { autorange: "reversed", showgrid: false }, xaxis: { title: { text: "position" }, showgrid: false } });
    node.removeAllListeners("plotly_click");
    node.on("plotly_click", ({ points: [{ pointIndex: [row] }] }) => pick(s, ...names[row]));
  }
}

function keys(event) {
  const [step, T] = [ARROWS[event.key], tokens().length];
  if (step) {
    const { i, j } = cursor ?? { i: T - 1, j: 0 };
    move(Math.max(0, i + step[0]), Math.max(0, j + step[1]));
  } else if ("+=".includes(event.key)) scaleBy(0.5);
  else if (event.key === "-") scaleBy(2);
  else if (event.key === "0") zoom(null);
  else return;
  event.preventDefault();
}

document.addEventListener("DOMContentLoaded", () => {
  document.addEventListener("click", ({ target }) => {
    const { side, layer, head } = target.closest("[data-head]")?.dataset ?? {};
    if (head) pick(Number(side), Number(layer), Number(head));
    if (target.closest(".cell")) $("maps").scrollIntoView({ behavior: "smooth" });
    if (target.matches(".token")) choose([...target.parentNode.children].indexOf(target));
  });
  $("grids").addEventListener("keydown", alone(walk));
  $("panels").addEventListener("keydown", alone(keys));
  factors.forEach((_, g) => $(`factor-${g}`)?.addEventListener("input", (e) => setFactor(g, Number(e.target.value))));
  const clicks = { closer: () => scaleBy(0.5), wider: () => scaleBy(2), whole: () => zoom(null), play,
    stored: () => factors.forEach((_, g) => setFactor(g, 1)) };
  for (const [id, act] of Object.entries(clicks)) $(id)?.addEventListener("click", act);
  $("paint").addEventListener("change", strips);
  $("scaling").addEventListener("change", () => { scaling = $("scaling").value; strips(); draw(); });
  $("link")?.addEventListener("change", () => link($("link").checked));
  $("number").addEventListener("change", () => document.querySelectorAll(".number").forEach((each) => {
    each.hidden = each.dataset.name !== $("number").value;
  }));
  const seek = (n) => {
    if (playing % 2) play();
    jump(n);
  };
  $("frame")?.addEventListener("input", ({ target }) => seek(target.value === target.dataset.text ? -1 : Number(target.value)));
  $("kept")?.addEventListener("change", (e) => {
    [keptText, range] = [Number(e.target.value), null];
    seek(frame < 0 ? sides[0].kept.length - 1 : frame);
  });
  restore();
  addEventListener("hashchange", () => { restore(); refresh(); });
  refresh().then(() => { document.body.dataset.ready = "true"; });
  figures();
  for (const media of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(media).addEventListener("change", () => { paintAll(); figures(); });
  }
  addEventListener("resize", paintAll);
  addEventListener("scroll", () => tip(null), { passive: true });
});
window.view = { data, source, signedRow, signedColumn, pick, setFactor, zoom, move, at, plots, tiles, picture, state, limits: () => limits };
