"use strict";
// Small SVG line charts: axes with round ticks, optional log x, a legend, and a read-out under the pointer.

const SVG = "http://www.w3.org/2000/svg";

function node(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

function svgNode(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return Math.round(value).toLocaleString("en-US");
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.1) return value.toFixed(2);
  return value.toPrecision(2);
}

function tickNumber(value) {
  return Math.abs(value) >= 1000 ? value.toLocaleString("en-US") : String(Number(value.toPrecision(6)));
}

function linearTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(t);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of [1, 2, 5]) ticks.push(m * 10 ** e);
  const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  return inside.length > 9 ? inside.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9) : inside;
}

// A scale maps data to pixels and knows its ticks.
function makeScale(low, high, from, to, log, count) {
  const f = log ? Math.log : (v) => v;
  const span = f(high) - f(low) || 1;
  const scale = (v) => from + ((f(v) - f(low)) / span) * (to - from);
  scale.ticks = log ? logTicks(low, high) : linearTicks(low, high, count);
  return scale;
}

// chart: {title, note, xLabel, yLabel, xLog, yMax, yPercent, height, series: [{name, color, dash, points: [[x, y|null]]}],
//         marks: [{y, label}]}
function lineChart(chart) {
  const series = chart.series.filter((s) => s.points.some((p) => p[1] !== null));
  const card = node("div", { class: "card" }, node("h3", {}, chart.title));
  if (!series.length) {
    card.append(node("div", { class: "soft" }, "no data"));
    return card;
  }
  const legend = node("div", { class: "legend" });
  for (const s of series) {
    const swatch = node("i", { style: `border-color: var(${s.color})`, class: s.dash ? "dash" : "" });
    if (series.length > 1 || chart.legend) legend.append(node("span", {}, swatch, s.name));
  }
  if (chart.note) legend.append(node("span", {}, chart.note));
  const width = 560, height = chart.height || 230;
  const box = { left: 56, right: width - 14, top: 10, bottom: height - 38 };
  const points = series.flatMap((s) => s.points.filter((p) => p[1] !== null));
  const xs = points.map((p) => p[0]);
  const xLow = chart.xLog ? Math.min(...xs.filter((x) => x > 0)) : Math.min(chart.xMin ?? Math.min(...xs), ...xs);
  const xHigh = Math.max(...xs) * (chart.cdf ? 1.03 : 1);
  const marks = chart.marks || [];
  const yTop = chart.yMax ?? Math.max(...points.map((p) => p[1]), ...marks.map((m) => m.y), 1e-9) * 1.06;
  const x = makeScale(xLow, xHigh === xLow ? xLow + 1 : xHigh, box.left, box.right, chart.xLog, 7);
  const y = makeScale(0, yTop, box.bottom, box.top, false, 5);
  const svg = svgNode("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  drawAxes(svg, chart, box, x, y);
  for (const mark of marks) {
    const at = y(mark.y);
    svg.append(svgNode("line", { class: "cursor", x1: box.left, x2: box.right, y1: at, y2: at }));
    svg.append(svgNode("text", { x: box.right, y: at - 4, "text-anchor": "end" }, mark.label));
  }
  for (const s of series) drawSeries(svg, s, chart, x, y);
  const plot = node("div", { class: "plot" }, svg);
  addReadout(plot, svg, chart, series, box, x, width);
  card.append(legend, plot);
  return card;
}

function drawAxes(svg, chart, box, x, y) {
  for (const t of y.ticks) {
    svg.append(svgNode("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(t), y2: y(t) }));
    const label = chart.yPercent ? `${Math.round(t * 100)}%` : tickNumber(t);
    svg.append(svgNode("text", { x: box.left - 7, y: y(t) + 4, "text-anchor": "end" }, label));
  }
  svg.append(svgNode("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  for (const t of x.ticks) {
    svg.append(svgNode("line", { class: "axis", x1: x(t), x2: x(t), y1: box.bottom, y2: box.bottom + 4 }));
    svg.append(svgNode("text", { x: x(t), y: box.bottom + 16, "text-anchor": "middle" }, tickNumber(t)));
  }
  svg.append(svgNode("text", { x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, chart.xLabel));
  const middle = (box.top + box.bottom) / 2;
  const turned = { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` };
  if (chart.yLabel) svg.append(svgNode("text", turned, chart.yLabel));
}

function drawSeries(svg, s, chart, x, y) {
  let path = "", pen = false;
  for (const [px, py] of s.points) {
    if (py === null || (chart.xLog && px <= 0)) { pen = false; continue; }
    path += `${pen ? "L" : "M"}${x(px).toFixed(1)},${y(Math.min(py, chart.yMax ?? py)).toFixed(1)}`;
    pen = true;
  }
  const style = `stroke: var(${s.color}); fill: none; stroke-width: 1.8; stroke-linejoin: round;`;
  svg.append(svgNode("path", { d: path, style: style + (s.dash ? "stroke-dasharray: 5 4;" : "") }));
  if (!s.dots) return;
  for (const [px, py] of s.points)
    if (py !== null) svg.append(svgNode("circle", { cx: x(px), cy: y(py), r: 3.2, style: `fill: var(${s.color})` }));
}

function addReadout(plot, svg, chart, series, box, x, width) {
  const cursor = svgNode("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  svg.append(cursor);
  let tip = null;
  const hide = () => { cursor.setAttribute("visibility", "hidden"); tip?.remove(); tip = null; };
  const nearest = (s, px) => s.points.filter((p) => p[1] !== null)
    .reduce((a, b) => (Math.abs(x(b[0]) - px) < Math.abs(x(a[0]) - px) ? b : a));
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const px = ((event.clientX - frame.left) / frame.width) * width;
    if (px < box.left || px > box.right) { hide(); return; }
    const at = nearest(series[0], px);
    cursor.setAttribute("x1", x(at[0])); cursor.setAttribute("x2", x(at[0]));
    cursor.setAttribute("visibility", "visible");
    tip ??= plot.appendChild(node("div", { class: "tip" }));
    const lines = series.map((s) => {
      const p = nearest(s, px);
      if (chart.cdf) return `${s.name}: ${(p[1] * 100).toFixed(1)}% ≤ ${formatNumber(p[0])} ms`;
      return `${s.name}: ${chart.yPercent ? (p[1] * 100).toFixed(1) + "%" : formatNumber(p[1])}`;
    });
    if (!chart.cdf) lines.unshift(`${chart.xLabel}: ${formatNumber(at[0])}`);
    tip.replaceChildren(...lines.map((line) => node("div", {}, line)));
    const left = (x(at[0]) / width) * frame.width;
    tip.style.top = "12px";
    tip.style.left = left > frame.width / 2 ? `${left - tip.offsetWidth - 10}px` : `${left + 10}px`;
  });
}
