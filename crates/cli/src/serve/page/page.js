// Asks the server once a second and shows the answer. Names come from clients: they are set as text only.
"use strict";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000,
  KEPT = 300;
const history = { read: [], written: [], requests: [] };

function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let n = 0;
  while (bytes >= 1024 && n < units.length - 1) {
    bytes /= 1024;
    n++;
  }
  return `${n === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[n]}`;
}
const rate = (bytes) => `${size(bytes)}/s`;
const number = (n) =>
  n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : n >= 1e4 ? `${(n / 1e3).toFixed(1)} k` : String(Math.round(n));
const percent = (share) => `${(share * 100).toFixed(1)} %`;
function time(ns) {
  if (!ns) return "-";
  return ns < 1e6
    ? `${Math.round(ns / 1e3)} us`
    : ns < 1e9
      ? `${Math.round(ns / 1e6)} ms`
      : `${(ns / 1e9).toFixed(1)} s`;
}
function ago(ms) {
  const s = Math.floor(ms / 1000);
  return s < 120
    ? `${s} s`
    : s < 7200
      ? `${Math.floor(s / 60)} min`
      : s < 172800
        ? `${Math.floor(s / 3600)} h`
        : `${Math.floor(s / 86400)} days`;
}

function element(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value) made.setAttribute(name, value);
  made.append(...content);
  return made;
}

// columns: [head, of(row), "text" for words, alarm(row)]
function table(section, columns, rows) {
  const head = element(
    "tr",
    {},
    ...columns.map(([name, , kind]) => element("th", { scope: "col", class: kind }, name)),
  );
  const body = rows.map((row) =>
    element(
      "tr",
      {},
      ...columns.map(([, of, kind, alarm]) => element("td", { class: alarm?.(row) ? "bad" : kind }, of(row))),
    ),
  );
  section
    .querySelector("table")
    .replaceChildren(...(rows.length ? [element("thead", {}, head), element("tbody", {}, ...body)] : []));
  const none = section.querySelector(".none");
  if (none) none.hidden = rows.length > 0;
  else section.hidden = rows.length === 0;
}

function chart(name, value, shown) {
  const values = history[name];
  values.push(value);
  if (values.length > KEPT) values.shift();
  $(`${name}-now`).textContent = shown;
  const most = Math.max(...values, 1),
    step = 100 / (KEPT - 1),
    first = 100 - (values.length - 1) * step;
  const line = values
    .map((v, n) => `${n ? "L" : "M"}${(first + n * step).toFixed(2)} ${(39 - (38 * v) / most).toFixed(2)}`)
    .join("");
  const svg = $(name),
    make = (kind, d) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", kind);
      path.setAttribute("d", d);
      return path;
    };
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(make("area", `${line}L100 40L${first.toFixed(2)} 40Z`), make("line", line));
}

function show({ status, rows }) {
  const own = rows.servers[0];
  document.title = `rampool ${own.name}`;
  $("where").textContent = `${own.name}, version ${status.version}, up ${ago(status.uptime_ms)}`;
  const alarms = [];
  if (status.draining) alarms.push("stopping: it waits for its clients to leave");
  if (status.short_of_memory) alarms.push("its machine is short of memory: no new leases");
  if (status.unlocked) alarms.push("memory may be swapped out");
  state(alarms.join("; ") || "serving", alarms.length > 0);

  const of = (bytes) => (status.memory_bytes ? bytes / status.memory_bytes : 0);
  const parts = [
    ["used", status.used_bytes],
    ["held", Math.max(0, status.held_bytes - status.used_bytes)],
    ["leased", Math.max(0, status.lent_bytes - status.held_bytes)],
  ];
  $("bar").replaceChildren(
    ...parts.map(([kind, bytes]) => {
      const part = element("i", { class: kind });
      part.style.width = `${Math.min(100, of(bytes) * 100)}%`;
      return part;
    }),
  );
  $("bar").setAttribute(
    "aria-label",
    `${percent(of(status.lent_bytes))} leased, ${percent(of(status.used_bytes))} in use`,
  );
  const tiles = [
    ["lends", size(status.memory_bytes)],
    ["in use", size(status.used_bytes), "--used"],
    ["held", size(status.held_bytes), "--held"],
    ["leased", size(status.lent_bytes), "--leased"],
    ["free to lease", size(status.free_bytes)],
    ["clients", number(status.connections)],
  ];
  $("tiles").replaceChildren(
    ...tiles.map(([name, value, colour]) => {
      const term = element("dt", { class: colour && "swatch" }, name);
      if (colour) term.style.setProperty("--swatch", `var(${colour})`);
      return element("div", {}, term, element("dd", {}, value));
    }),
  );

  chart("read", own.rates.read_bytes_per_s, rate(own.rates.read_bytes_per_s));
  chart("written", own.rates.written_bytes_per_s, rate(own.rates.written_bytes_per_s));
  chart("requests", own.rates.requests_per_s, `${number(own.rates.requests_per_s)}/s`);

  const used = (tenant) => {
    const own = status.leases.filter((lease) => lease.tenant === tenant.name);
    return own.reduce((sum, lease) => sum + lease.used_bytes, 0);
  };
  const named = status.tenants.filter((tenant) => tenant.name);
  table(
    $("tenants"),
    [
      ["tenant", (t) => t.name || "master key", "text"],
      ["weight", (t) => number(t.weight)],
      ["leased", (t) => size(t.lent_bytes)],
      ["in use", (t) => size(used(t))],
      ["quota", (t) => (t.quota_bytes == null ? "-" : size(t.quota_bytes))],
      [
        "of quota",
        (t) =>
          t.quota_bytes
            ? element("meter", { value: String(Math.min(1, t.lent_bytes / t.quota_bytes)), high: "0.9" })
            : "-",
      ],
      ["connections", (t) => number(t.connections)],
      ["served for", (t) => time(t.served_us * 1000)],
    ],
    named.length ? status.tenants : [],
  );
  table(
    $("leases"),
    [
      ["program", (c) => `${c.name} on ${c.host}`, "text"],
      ["processes", (c) => number(c.processes)],
      ["leased", (c) => size(c.leased_bytes)],
      ["in use", (c) => size(c.used_bytes)],
      ["requests/s", (c) => number(c.rates.requests_per_s)],
      ["read/s", (c) => size(c.rates.read_bytes_per_s)],
      ["written/s", (c) => size(c.rates.written_bytes_per_s)],
      ["p50", (c) => time(c.latency_ns[0])],
      ["p99", (c) => time(c.latency_ns[1])],
    ],
    own.clients,
  );
  const more = ({ name, pid, waiting, with_more: choices }) =>
    `${name} (${pid}) waits ${percent(waiting)} of the time for pages; ` +
    (choices.length
      ? choices.map(([local, then]) => `with --local ${size(local)} about ${percent(then)}`).join(", ")
      : "more --local would hardly help");
  const lines = [...rows.lacking, ...rows.processes.filter((p) => p.with_more).map(more)];
  $("copies").replaceChildren(...lines.map((line) => element("li", {}, line)));
  table(
    $("runs"),
    [
      ["program", (p) => p.name, "text"],
      ["run", (p) => String(p.run)],
      ["pid", (p) => String(p.pid)],
      ["resident", (p) => size(p.resident_bytes), "", (p) => p.resident_bytes > p.local_bytes * 1.125],
      ["local", (p) => size(p.local_bytes)],
      ["faults/s", (p) => number(p.faults_per_s)],
      ["hit", (p) => (p.hit_rate == null ? "-" : percent(p.hit_rate))],
      ["wait", (p) => percent(p.waiting)],
      ["in/s", (p) => size(p.in_bytes_per_s)],
      ["out/s", (p) => size(p.out_bytes_per_s)],
      ["p50", (p) => time(p.latency_ns[0])],
      ["p99", (p) => time(p.latency_ns[1])],
      ["p99.9", (p) => time(p.latency_ns[2])],
    ],
    rows.processes,
  );
  table(
    $("exports"),
    [
      ["device", (e) => e.name, "text"],
      ["size", (e) => size(e.bytes)],
      ["in use", (e) => size(e.used_bytes)],
      ["clients", (e) => number(e.clients)],
      ["read", (e) => size(e.read_bytes)],
      ["written", (e) => size(e.written_bytes)],
      ["failures", (e) => number(e.failures), "", (e) => e.failures > 0],
    ],
    status.exports,
  );
}

function state(text, bad) {
  $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}

async function ask() {
  try {
    const answer = await fetch("rows.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    state(`no answer from the server (${error.message}): what is below is old`, true);
  }
  setTimeout(ask, EVERY_MS);
}
ask();
