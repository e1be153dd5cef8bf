// The charts of the page: balance over time as lines, and the load of each rank in each layer as a heat map.
import { at, clock, count, svgElement, element, ratio, rebuild, tip } from "./dom.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LINES = [["par", "par", ""], ["par_left_alone", "alone", ""], ["par_planned", "planned", "dashed"], ["noise_floor", "floor", "dotted"]];
const NAMES = { par: "realised", par_left_alone: "initial layout", par_planned: "planned", noise_floor: "noise floor" };
// A line is interrupted between two points that are further apart than this time and than this multiple of the mean
// distance.
const GAP_SECONDS = 10;
const GAP_TIMES = 4;

// Balance over time

export function drawPar({ balance }) {
  const points = balance.points;
  const box = at("par");
  const width = Math.max(280, box.clientWidth);
  const height = width < 600 ? 220 : 280;
  const frame = { left: 46, right: width - 10, top: 10, bottom: height - 26 };
  const newest = points.at(-1);
  rebuild("par-legend", newest ?? null, () => [
    ...LINES.map(([field, name, dash]) => element("span", { class: name }, element("i", { class: dash }), element("em", {}, `${NAMES[field]} ${ratio(newest?.[field])}`))),
    element("span", { class: "good" }, element("i", { class: "mark" }), element("em", {}, "layers switched"))]);
  if (points.length < 2) {
    box.replaceChildren(element("p", { class: "soft" }, "No measurements yet. The chart begins with the first steps that all ranks report."));
    return;
  }
  const [first, last] = [points[0].at, newest.at];
  const values = points.flatMap((point) => LINES.map(([field]) => point[field])).filter((value) => value !== null);
  const ticks = niceTicks(Math.min(1, ...values), Math.max(1.05, ...values), 5);
  const [low, high] = [ticks[0], ticks.at(-1)];
  const x = (time) => frame.left + ((time - first) / (last - first || 1)) * (frame.right - frame.left);
  const y = (value) => frame.bottom - ((value - low) / (high - low)) * (frame.bottom - frame.top);
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Peak-to-average ratio over time, last ${ratio(newest.par)}, initial layout ${ratio(newest.par_left_alone)}` });
  for (const value of ticks) {
    svg.append(svgElement("line", { class: "gridline", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }),
      svgElement("text", { x: frame.left - 8, y: y(value) + 4, "text-anchor": "end" }, String(+value.toFixed(4))));
  }
  const intervals = Math.max(2, Math.min(6, Math.floor(width / 160)));
  const anchors = ["start", ...new Array(intervals - 1).fill("middle"), "end"];
  for (const [index, anchor] of anchors.entries()) {
    const time = first + ((last - first) * index) / intervals;
    svg.append(svgElement("text", { x: x(time), y: height - 6, "text-anchor": anchor }, clock(time, last - first < 1800)));
  }
  points.forEach((point, index) => {
    if (index && point.layers_switched > points[index - 1].layers_switched) {
      svg.append(svgElement("line", { class: "switched", x1: x(point.at), x2: x(point.at), y1: frame.bottom, y2: frame.bottom - 9 }));
    }
  });
  svg.append(svgElement("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
  svg.append(svgElement("path", { class: "area", d: between(points, x, y) }));
  for (const [field, name] of [...LINES].reverse()) svg.append(svgElement("path", { class: `line ${name}`, d: path(points, field, x, y) }));
  const cross = svgElement("line", { class: "cross", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("mousemove", (event) => {
    const time = first + ((event.offsetX - frame.left) / (frame.right - frame.left)) * (last - first);
    const nearest = points.reduce((best, point) => (Math.abs(point.at - time) < Math.abs(best.at - time) ? point : best));
    cross.setAttribute("x1", x(nearest.at));
    cross.setAttribute("x2", x(nearest.at));
    cross.setAttribute("visibility", "visible");
    tip(event, [clock(nearest.at, true), ...LINES.map(([field]) => `${ratio(nearest[field])}  ${NAMES[field]}`)].join("\n"));
  });
  svg.addEventListener("mouseleave", (event) => { cross.setAttribute("visibility", "hidden"); tip(event, null); });
  box.replaceChildren(svg);
}

function path(points, field, x, y) {
  let open = false;
  const meanDistance = (points.at(-1).at - points[0].at) / Math.max(1, points.length - 1);
  const gap = Math.max(GAP_SECONDS, GAP_TIMES * meanDistance);
  return points.map((point, index) => {
    const present = point[field] !== null;
    if (index && point.at - points[index - 1].at > gap) open = false;
    const command = present ? `${open ? "L" : "M"}${x(point.at).toFixed(1)} ${y(point[field]).toFixed(1)}` : "";
    open = present;
    return command;
  }).join("");
}

// Outline of the avoidable imbalance, the area between the realised PAR and the noise floor.
function between(points, x, y) {
  const complete = points.filter((point) => point.par !== null && point.noise_floor !== null);
  const upper = complete.map((point) => `${x(point.at).toFixed(1)} ${y(Math.max(point.par, point.noise_floor)).toFixed(1)}`);
  const lower = complete.map((point) => `${x(point.at).toFixed(1)} ${y(point.noise_floor).toFixed(1)}`).reverse();
  return complete.length ? `M${[...upper, ...lower].join("L")}Z` : "";
}

function niceTicks(low, high, limit) {
  const rough = (high - low) / limit;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

// Ranks and layers

const LIGHT = [[49, 104, 178], [160, 190, 226], [244, 242, 238], [242, 168, 92], [205, 62, 34], [110, 10, 20]];
const DARK = [[96, 152, 240], [48, 74, 116], [34, 37, 42], [150, 84, 34], [236, 98, 54], [255, 206, 170]];
const STOPS = [0, 0.5, 1, 1.33, 1.67, 2];

// Returns a function from relative load to colour. A load of 1 has a neutral colour, and the scale ends at `limit`.
function colours(limit) {
  const shades = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  const scaled = STOPS.map((stop) => (stop <= 1 ? stop : 1 + (stop - 1) * (limit - 1)));
  return (load) => {
    const above = Math.max(1, scaled.findIndex((stop) => load <= stop));
    const index = load > scaled.at(-1) ? scaled.length - 1 : above;
    const share = Math.min(1, (load - scaled[index - 1]) / (scaled[index] - scaled[index - 1]));
    return shades[index].map((to, channel) => shades[index - 1][channel] + (to - shades[index - 1][channel]) * share);
  };
}

export function drawLoads({ status, layers, agents, balance }) {
  const loads = balance.rank_loads ?? [];
  const canvas = at("loads");
  canvas.hidden = !loads.length;
  at("loads-lead").textContent = loads.length
    ? `Load of each rank relative to the mean of the layer, over the newest ${balance.load_steps} steps. Right: PAR of each layer, ` +
      "planned PAR (orange) and noise floor (grey). Top: number of layers in which a rank is the most loaded."
    : "No load measurements yet.";
  if (!loads.length) { at("loads-legend").replaceChildren(); return; }
  const limit = Math.max(1.5, Math.ceil(Math.max(...loads.map((row) => Math.max(...row))) / 250) / 4);
  const colour = colours(limit);
  legend(colour, limit, loads);
  const frame = layout(canvas, loads);
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  drawCells(pen, frame, loads, colour);
  pen.setTransform(frame.dense, 0, 0, frame.dense, 0, 0);
  drawAxes(pen, frame, loads, agents);
  drawRanks(pen, frame, loads);
  drawLayers(pen, frame, layers, balance.last_decision);
  canvas.setAttribute("aria-label", `Load of ${loads[0].length} ranks in ${loads.length} layers`);
  canvas.onmousemove = (event) => hover(event, frame, loads, layers, agents);
  canvas.onmouseleave = (event) => tip(event, null);
}

function layout(canvas, loads) {
  const width = Math.max(280, canvas.parentElement.clientWidth);
  const narrow = width < 600;
  const row = Math.max(3, Math.min(22, 440 / loads.length));
  const left = 30;
  const top = 40;
  const side = narrow ? 66 : 150;
  const height = top + Math.round(row * loads.length) + 24;
  const dense = devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.height = `${height}px`;
  const right = width - side - 14;
  return { width, height, left, top, right, bottom: height - 24, row, column: (right - left) / loads[0].length, dense, side };
}

function drawCells(pen, frame, loads, colour) {
  const { dense } = frame;
  const x0 = Math.round(frame.left * dense);
  const y0 = Math.round(frame.top * dense);
  const width = Math.round(frame.right * dense) - x0;
  const height = Math.round(frame.bottom * dense) - y0;
  const image = pen.createImageData(width, height);
  const ranks = loads[0].length;
  const [gapX, gapY] = [frame.column >= 9 ? Math.round(dense) : 0, frame.row >= 7 ? Math.round(dense) : 0];
  let painted = -1;
  for (let y = 0; y < height; y += 1) {
    const layer = Math.min(loads.length - 1, Math.floor((y * loads.length) / height));
    const start = y * width * 4;
    if (gapY && Math.floor(((y + gapY) * loads.length) / height) > layer) continue;
    if (layer === painted) { image.data.copyWithin(start, start - width * 4, start); continue; }
    painted = layer;
    for (let x = 0; x < width; x += 1) {
      const from = Math.floor((x * ranks) / width);
      const to = Math.max(from + 1, Math.floor(((x + 1) * ranks) / width));
      if (gapX && Math.floor(((x + gapX) * ranks) / width) > from) continue;
      // A pixel that covers several ranks shows the most loaded one, so that no hot rank disappears on a small screen.
      let load = 0;
      for (let rank = from; rank < to; rank += 1) load = Math.max(load, loads[layer][rank]);
      const shade = colour(load / 1000);
      image.data.set([shade[0], shade[1], shade[2], 255], start + 4 * x);
    }
  }
  pen.putImageData(image, x0, y0);
}

function drawAxes(pen, frame, loads, agents) {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.fillStyle = style("--soft");
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const every = spacing(loads.length, frame.row, 17);
  for (let layer = 0; layer < loads.length; layer += every) pen.fillText(String(layer), frame.left - 6, frame.top + (layer + 0.5) * frame.row);
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  const ranks = loads[0].length;
  const step = spacing(ranks, frame.column, 34);
  for (let rank = 0; rank < ranks; rank += step) pen.fillText(String(rank), frame.left + (rank + 0.5) * frame.column, frame.bottom + 16);
  pen.textAlign = "left";
  pen.fillText("PAR", frame.right + 14, frame.top - 8);
  const nodes = agents.filter((agent, index) => index && agent.node !== agents[index - 1].node).map((agent) => agent.rank);
  if ((frame.right - frame.left) / (nodes.length + 1) < 8) return;
  pen.fillStyle = style("--soft");
  for (const rank of nodes) pen.fillRect(frame.left + rank * frame.column - 0.5, frame.bottom, 1, 5);
}

function spacing(items, size, room) {
  return [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 500, 512, 1024].find((every) => every * size >= room) ?? items;
}

// Number of layers in which each rank is the most loaded. A rank that is far above the others is not a coincidence.
function drawRanks(pen, frame, loads) {
  const hottest = new Array(loads[0].length).fill(0);
  for (const row of loads) {
    const peak = Math.max(...row);
    if (peak) hottest[row.indexOf(peak)] += 1;
  }
  const high = Math.max(4, ...hottest);
  pen.fillStyle = style("--par");
  hottest.forEach((layers, rank) => {
    const tall = (layers / high) * (frame.top - 12);
    const gap = frame.column >= 9 ? 1 : 0;
    if (layers) pen.fillRect(frame.left + rank * frame.column, frame.top - 4 - tall, Math.max(1, frame.column - gap), tall);
  });
}

function drawLayers(pen, frame, layers, decision) {
  const pars = layers.map((layer) => layer.par);
  const high = Math.max(1.1, ...pars, ...layers.map((layer) => layer.planned_par));
  const x = (value) => frame.right + 14 + ((value - 1) / (high - 1)) * (frame.side - (frame.side > 100 ? 44 : 8));
  const thick = Math.max(1.5, frame.row - (frame.row >= 7 ? 2 : 0.5));
  layers.forEach((layer, index) => {
    if (!layer.par) return;
    const y = frame.top + index * frame.row;
    pen.fillStyle = style("--par");
    pen.fillRect(x(1), y, Math.max(1, x(layer.par) - x(1)), thick);
    const floor = decision?.verdicts[index]?.noise_floor;
    if (floor) { pen.fillStyle = style("--floor"); pen.fillRect(x(Math.min(floor, high)) - 1, y, 2, thick); }
    if (layer.planned_par) { pen.fillStyle = style("--planned"); pen.fillRect(x(layer.planned_par) - 1, y, 2, thick); }
    if (frame.row >= 13 && frame.side > 100) {
      pen.fillStyle = style("--soft");
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      pen.fillText(layer.par.toFixed(2), frame.width - 2, y + frame.row / 2);
    }
  });
  pen.textBaseline = "alphabetic";
  pen.fillStyle = style("--soft");
  pen.textAlign = "left";
  pen.fillText("1", x(1), frame.bottom + 16);
  pen.textAlign = "right";
  pen.fillText(high.toFixed(2), x(high), frame.bottom + 16);
}

function legend(colour, limit, loads) {
  const hottest = Math.max(...loads.map((row) => Math.max(...row))) / 1000;
  rebuild("loads-legend", [limit, hottest, matchMedia("(prefers-color-scheme: dark)").matches], () => {
    const bar = element("canvas", { width: 180, height: 12 });
    const pen = bar.getContext("2d");
    for (let x = 0; x < 180; x += 1) {
      pen.fillStyle = `rgb(${colour((x / 179) * limit).map(Math.round).join(" ")})`;
      pen.fillRect(x, 0, 1, 12);
    }
    return [element("span", { class: "soft" }, "0", bar, `${limit} × the mean`), element("span", { class: "soft" }, `hottest now ${hottest.toFixed(2)}`)];
  });
}

function hover(event, frame, loads, layers, agents) {
  const layer = Math.floor((event.offsetY - frame.top) / frame.row);
  const rank = Math.floor((event.offsetX - frame.left) / frame.column);
  if (layer < 0 || layer >= loads.length || rank < 0) { tip(event, null); return; }
  const lines = [`layer ${layer}: PAR ${ratio(layers[layer]?.par)}`];
  if (layers[layer]?.planned_par) lines.push(`planned ${ratio(layers[layer].planned_par)}`);
  if (rank < loads[0].length) {
    const node = agents.find((agent) => agent.rank === rank)?.node;
    lines.unshift(`rank ${rank}${node ? ` on ${node}` : ""}: ${(loads[layer][rank] / 1000).toFixed(2)} × the mean`);
  } else {
    const worst = loads[layer].indexOf(Math.max(...loads[layer]));
    lines.push(`most loaded: rank ${count(worst)}`);
  }
  tip(event, lines.join("\n"));
}
