"use strict";
// Lays out a report: one run, a saturation search, or two runs side by side. Text always enters as text nodes.

const report = JSON.parse(document.getElementById("report").textContent);
const page = document.getElementById("page");
const COLORS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
const METRICS = [
  ["ttft", "TTFT", "time to first token"],
  ["itl", "ITL", "inter-token latency"],
  ["tpot", "TPOT", "mean time per output token"],
  ["e2e", "E2E", "whole request"],
];

const percent = (v, digits = 1) => (v === null || v === undefined ? "–" : `${(v * 100).toFixed(digits)}%`);

function duration(ms) {
  if (ms === null || ms === undefined) return ["–", ""];
  return ms >= 10000 ? [formatNumber(ms / 1000), "s"] : [formatNumber(ms), "ms"];
}

function tile(label, value, unit, more) {
  const figure = node("div", { class: "value" }, value, " ", node("small", {}, unit || ""));
  const extra = node("div", { class: "more", title: more || "" }, more || "\u00a0");
  return node("div", { class: "card tile" }, node("div", { class: "label" }, label), figure, extra);
}

function table(head, rows) {
  const body = rows.map((cells) => {
    if (cells.group) return node("tr", { class: "group" }, node("td", { colspan: head.length }, cells.group));
    return node("tr", {}, ...cells.map((c) => (c instanceof Node ? c : node("td", {}, c))));
  });
  const top = node("thead", {}, node("tr", {}, ...head.map((h) => node("th", {}, h))));
  return node("div", { class: "card scroll" }, node("table", {}, top, node("tbody", {}, ...body)));
}

function section(title, ...content) {
  if (content.some(Boolean)) page.append(node("h2", {}, title), ...content.filter(Boolean));
}

const grid = (...charts) => node("div", { class: "grid2" }, ...charts.filter(Boolean));

function header(title, badge, lines) {
  const heading = node("h1", {}, title, badge ? node("span", { class: `badge ${badge[0]}` }, badge[1]) : null);
  const toggle = node("button", { type: "button", title: "light or dark" }, "Theme");
  toggle.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  const text = lines.filter(Boolean).map((line) => node("div", { class: "sub" }, line));
  page.append(node("header", {}, node("div", {}, heading, ...text), toggle));
}

function banners(validity, prefix = "") {
  for (const reason of validity.reasons)
    page.append(node("div", { class: "banner bad" }, `${prefix}Result invalid. ${reason}`));
  for (const note of validity.notes) page.append(node("div", { class: "banner note" }, prefix + note));
}

const machineLine = (m) => `${m.cpu} · ${m.cores} cores · ${m.memory_gib} GiB · ${m.system} · Python ${m.python}`;
const targetLine = (t) => `${t.url} · ${t.api === "grpc" ? "gRPC" : t.api} · ${t.model}`;

function arrivalText(a) {
  if (a.kind === "closed") return `closed loop, ${a.concurrency} users`;
  if (a.kind === "trace") return `trace times × ${formatNumber(1 / a.speed)}`;
  return `${a.kind}, ${formatNumber(a.rate)}/s${a.kind === "gamma" ? `, shape ${a.shape}` : ""}`;
}

function loadText(streams) {
  return streams.map((s) => `${streams.length > 1 ? s.name + ": " : ""}${s.workload.name}, ${arrivalText(s.arrival)}`).join(" · ");
}

function tiles(r) {
  const o = r.overall, l = o.latency_ms, out = [];
  for (const [key, label] of METRICS) {
    const [value, unit] = duration(l[key].p50);
    const [p95, p99] = [duration(l[key].p95), duration(l[key].p99)].map((d) => d.join(" "));
    out.push(tile(`${label} p50`, value, unit, `p95 ${p95} · p99 ${p99}`));
  }
  const t = o.throughput;
  out.push(tile("Requests", formatNumber(t.requests_per_s), "/s", `${o.requests.ok} of ${o.requests.sent} served`));
  out.push(tile("Output", formatNumber(t.output_tokens_per_s), "tok/s", `${o.tokens.output.toLocaleString("en-US")} tokens`));
  out.push(tile("Input", formatNumber(t.input_tokens_per_s), "tok/s",
    o.tokens.input === null ? "not told by the server" : `${o.tokens.input.toLocaleString("en-US")} tokens`));
  if (o.goodput) {
    const limits = Object.entries(o.goodput.slo).map(([k, v]) => `${k.replace("_ms", "")} ≤ ${v} ms`).join(", ");
    out.push(tile("Goodput", formatNumber(o.goodput.requests_per_s), "/s", `${percent(o.goodput.fraction)} within ${limits}`));
  }
  const failed = o.requests.failed;
  out.push(tile("Errors", String(failed), "", failed ? percent(failed / o.requests.sent) : "none"));
  if (o.cache) out.push(tile("Prefix cache hits", percent(o.cache.hit_ratio), "", `${o.cache.cached_tokens.toLocaleString("en-US")} tokens`));
  return node("div", { class: "tiles" }, ...out);
}

const COLUMNS = ["mean", "p50", "p90", "p95", "p99", "p99_9", "max"];

function latencyTable(o) {
  const rows = [...METRICS, ["ttft_from_send", "TTFT from the actual send", "without the client's lateness"]];
  return table(["ms", ...COLUMNS.map((c) => c.replace("_", ".")), "samples"], rows.map(([key, label, what]) => {
    const s = o.latency_ms[key];
    const name = node("td", {}, label, " ", node("span", { class: "soft" }, what));
    return [name, ...COLUMNS.map((c) => formatNumber(s[c])), s.count.toLocaleString("en-US")];
  }));
}

// runs: [[name, report]]
function cdfCharts(runs) {
  return grid(...METRICS.map(([key, label, what]) => {
    const series = runs.map(([name, r], i) => ({ name, color: COLORS[i], points: r.curves_ms[key], dash: false }));
    const summaries = runs.map(([, r]) => r.overall.latency_ms[key]);
    const log = summaries.some((s) => s.max && s.p50 && s.max > 12 * s.p50);
    return lineChart({
      title: `${label}: ${what}`, xLabel: log ? "ms (log)" : "ms", yLabel: "share of samples", series, xLog: log, xMin: 0,
      yMax: 1, yPercent: true, cdf: true, legend: runs.length > 1,
    });
  }));
}

function timelineCharts(r) {
  const t = r.timeline, zip = (values) => t.t.map((x, i) => [x, values[i]]);
  const g = t.server, gauge = (values) => (values ? g.t.map((x, i) => [x, values[i]]) : []);
  const x = { xLabel: "seconds", xMin: 0 };
  const flight = [{ name: "in flight (client)", color: "--s1", points: zip(t.in_flight) }];
  if (g) flight.push({ name: "running (server)", color: "--s3", points: gauge(g.running) },
    { name: "waiting (server)", color: "--s2", points: gauge(g.waiting) });
  return grid(
    lineChart({ ...x, title: "Requests per second", yLabel: "1/s", series: [
      { name: "due", color: "--s6", points: zip(t.due_per_s), dash: true },
      { name: "served", color: "--s1", points: zip(t.finished_per_s) },
      ...(t.failed_per_s.some((v) => v) ? [{ name: "failed", color: "--s4", points: zip(t.failed_per_s) }] : []),
    ] }),
    lineChart({ ...x, title: "Requests in flight", yLabel: "requests", series: flight }),
    lineChart({ ...x, title: "Output tokens per second", yLabel: "tokens/s", series: [{ name: "tokens/s", color: "--s1", points: zip(t.output_tokens_per_s) }] }),
    lineChart({ ...x, title: "TTFT over time", note: "median of the requests due in each bin", yLabel: "ms", series: [{ name: "TTFT p50", color: "--s1", points: zip(t.ttft_p50_ms).filter((p) => p[1] !== null) }] }),
    g && g.kv_use ? lineChart({ ...x, title: "KV cache use", note: "of the fullest worker", yLabel: "share of blocks", yPercent: true, yMax: 1, series: [{ name: "KV use", color: "--s5", points: gauge(g.kv_use) }] }) : null,
  );
}

function groupTable(groups, label) {
  const head = [label, "served", "failed", "req/s", "out tok/s", "TTFT p50", "p95", "ITL p50", "p95", "E2E p95", "goodput", "cache hits"];
  return table(head, Object.entries(groups).map(([name, o]) => {
    const l = o.latency_ms;
    return [name, String(o.requests.ok), String(o.requests.failed), formatNumber(o.throughput.requests_per_s),
      formatNumber(o.throughput.output_tokens_per_s), ...[l.ttft.p50, l.ttft.p95, l.itl.p50, l.itl.p95, l.e2e.p95].map(formatNumber),
      o.goodput ? percent(o.goodput.fraction) : "–", o.cache ? percent(o.cache.hit_ratio) : "–"];
  }));
}

function errorTable(o) {
  if (!o.requests.failed) return null;
  return table(["kind", "requests", "first example"], Object.entries(o.errors).map(([kind, count]) =>
    [kind, String(count), node("td", { class: "text" }, o.error_examples[kind] || "")]));
}

function definitions(pairs) {
  const items = pairs.filter(([, v]) => v !== null && v !== undefined && v !== "");
  return node("div", { class: "card" }, node("dl", {}, ...items.flatMap(([k, v]) => [node("dt", {}, k), node("dd", {}, String(v))])));
}

function settings(r) {
  const c = r.config, lag = r.client.send_lag_ms, loop = r.client.loop_lag_ms, cpu = r.client.cpu_ratio;
  return definitions([
    ...c.streams.map((s) => [`stream ${s.name}`, `${arrivalText(s.arrival)}; ${Object.entries(s.workload).map(([k, v]) => (k === "name" ? v : `${k}=${v}`)).join(" ")}`]),
    ["end", [c.requests && `${c.requests} requests`, c.duration_s && `${formatNumber(c.duration_s)} s`].filter(Boolean).join(" or ")],
    ["warm-up", c.warmup_s ? `${c.warmup_s} s, not measured` : null],
    ["seed", c.seed],
    ["measured over", `${formatNumber(r.span_s)} s`],
    ["client", `sent ${formatNumber(lag.p50)} / ${formatNumber(lag.p99)} ms late (p50 / p99), loop ${formatNumber(loop.p99)} ms late (p99), ${percent(cpu.mean, 0)} of a core`],
    ["machine", machineLine(r.machine)],
    ["command", r.command],
  ]);
}

function runBody(r) {
  page.append(tiles(r));
  section("Latency", latencyTable(r.overall));
  section("Distributions", cdfCharts([["all requests", r]]));
  section("Over time", timelineCharts(r));
  if (Object.keys(r.tenants).length > 1) section("Tenants", groupTable(r.tenants, "tenant"));
  if (Object.keys(r.classes).length > 1) section("Classes", groupTable(r.classes, "class"));
  if (r.fairness) section("Fairness", definitions([
    ["Jain index, share of demand served", formatNumber(r.fairness.jain_demand_met)],
    ["Jain index, weighted tokens by weight", formatNumber(r.fairness.jain_service)],
  ]));
  section("Errors", errorTable(r.overall));
  section("Run", settings(r));
}

function showRun(r) {
  header("Load test", r.validity.valid ? ["good", "valid"] : ["bad", "invalid"],
    [targetLine(r.target), loadText(r.config.streams), `${r.started_at.replace("T", " ").replace("+00:00", " UTC")} · ${machineLine(r.machine)}`]);
  banners(r.validity);
  runBody(r);
}

function showSaturate(r) {
  const limits = Object.entries(r.search.slo).map(([k, v]) => `${k.replace("_ms", "")} ≤ ${v} ms`).join(", ");
  header("Saturation search", null, [targetLine(r.target), `objective: ${percent(r.search.fraction, 0)} of requests within ${limits}`,
    `${r.started_at.replace("T", " ").replace("+00:00", " UTC")} · ${machineLine(r.machine)}`]);
  page.append(node("div", { class: "tiles" },
    tile("Highest passing rate", formatNumber(r.best_rate_per_s), "/s", r.search.ended),
    tile("Lowest missing rate", formatNumber(r.failed_rate_per_s), "/s", `${r.probes.length} probes`),
    ...(r.best ? [tile("Output at that rate", formatNumber(r.best.overall.throughput.output_tokens_per_s), "tok/s", ""),
      tile("TTFT p95 at that rate", ...duration(r.best.overall.latency_ms.ttft.p95), "")] : [])));
  // Repeated probes of one rate count by their mean; those in which the client was the limit say nothing of the server.
  const valid = r.probes.filter((p) => p.valid);
  const rates = [...new Set(valid.map((p) => p.rate_per_s))];
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const points = (key) => rates.map((rate) =>
    [rate, mean(valid.filter((p) => p.rate_per_s === rate && p[key] !== null).map((p) => p[key]))]);
  const x = { xLabel: "offered rate, 1/s", xMin: 0 };
  section("Against the offered rate", grid(
    lineChart({ ...x, title: "Goodput", yLabel: "1/s", series: [
      { name: "within the objective", color: "--s1", points: points("goodput_per_s"), dots: true },
      { name: "all served", color: "--s2", points: points("throughput_per_s"), dots: true },
      { name: "offered", color: "--s6", points: rates.map((rate) => [rate, rate]), dash: true }] }),
    lineChart({ ...x, title: "Requests within the objective", yLabel: "share", yPercent: true, yMax: 1.05, marks: [{ y: r.search.fraction, label: "required" }],
      series: [{ name: "share", color: "--s1", points: points("fraction"), dots: true }] }),
    lineChart({ ...x, title: "TTFT p95", yLabel: "ms", marks: r.search.slo.ttft_ms ? [{ y: r.search.slo.ttft_ms, label: "limit" }] : [],
      series: [{ name: "TTFT p95", color: "--s1", points: points("ttft_p95_ms"), dots: true }] }),
    lineChart({ ...x, title: "ITL p95", yLabel: "ms", marks: r.search.slo.itl_ms ? [{ y: r.search.slo.itl_ms, label: "limit" }] : [],
      series: [{ name: "ITL p95", color: "--s1", points: points("itl_p95_ms"), dots: true }] })));
  const head = ["rate, 1/s", "verdict", "within objective", "goodput, 1/s", "served, 1/s", "out tok/s", "TTFT p95, ms", "ITL p95, ms", "E2E p95, ms", "sent", "failed"];
  section("Probes", table(head, r.probes.map((p) => {
    const verdict = !p.valid ? ["down", "client saturated"] : p.passed ? ["up", "passed"] : ["down", "missed"];
    return [formatNumber(p.rate_per_s), node("td", { class: verdict[0] }, verdict[1]), percent(p.fraction),
      ...[p.goodput_per_s, p.throughput_per_s, p.output_tokens_per_s, p.ttft_p95_ms, p.itl_p95_ms, p.e2e_p95_ms].map(formatNumber), String(p.sent), String(p.failed)];
  })));
  if (r.best) { section("The best rate's run", node("div", { class: "soft" }, loadText(r.best.config.streams))); runBody(r.best); }
}

function showCompare(r) {
  const [a, b] = r.runs;
  header("Two runs side by side", null, [`A: ${a.name} · ${targetLine(a.report.target)} · ${loadText(a.report.config.streams)}`,
    `B: ${b.name} · ${targetLine(b.report.target)} · ${loadText(b.report.config.streams)}`]);
  for (const warning of r.warnings) page.append(node("div", { class: "banner note" }, warning));
  banners(a.report.validity, "A: "); banners(b.report.validity, "B: ");
  const rows = [];
  let group = "";
  for (const row of r.rows) {
    if (row.group !== group) { group = row.group; rows.push({ group }); }
    const change = row.change === null ? "–" : `${row.change > 0 ? "+" : ""}${(row.change * 100).toFixed(1)}%`;
    rows.push([`${row.name}${row.unit ? ", " + row.unit : ""}`, formatNumber(row.a), formatNumber(row.b),
      node("td", { class: row.verdict === "better" ? "up" : row.verdict === "worse" ? "down" : "" }, change),
      node("td", { class: row.verdict === "better" ? "up" : row.verdict === "worse" ? "down" : "soft" }, row.verdict === "same" ? "" : `B ${row.verdict}`)]);
  }
  section("Figures", table(["", "A", "B", "B against A", ""], rows));
  const runs = [[`A: ${a.name}`, a.report], [`B: ${b.name}`, b.report]];
  section("Distributions", cdfCharts(runs));
  const over = (key) => runs.map(([name, x], i) => ({ name, color: COLORS[i], points: x.timeline.t.map((t, j) => [t, x.timeline[key][j]]) }));
  const x = { xLabel: "seconds", xMin: 0 };
  section("Over time", grid(lineChart({ ...x, title: "Output tokens per second", yLabel: "tokens/s", series: over("output_tokens_per_s") }),
    lineChart({ ...x, title: "Requests in flight", yLabel: "requests", series: over("in_flight") })));
  section("Run A", settings(a.report));
  section("Run B", settings(b.report));
}

if (report.schema.startsWith("baton.bench.run/")) showRun(report);
else if (report.schema.startsWith("baton.bench.saturate/")) showSaturate(report);
else showCompare(report);
