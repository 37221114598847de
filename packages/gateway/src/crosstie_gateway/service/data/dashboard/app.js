// The page of operators. What comes from the gateway is only ever set as text: nothing in it becomes markup.

import { Charts, clock } from "./charts.js";

const ROOT = "/crosstie";
const LOOK_BACK_MS = 5000;
const MOST_DECISIONS = 100;
const by = (id) => document.getElementById(id);

let session = null;
let stream = null;
let latest = null;
let paused = false;
let retry = 0;
// What is looked back on, as the gateway has it.
let past = null;
let looking = 0;

// Elements. `children` are elements, or what is to stand there as text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "click") element.addEventListener("click", value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.map((one) => (one instanceof Node ? one : String(one))));
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Figures

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function significant(value, digits = 3) {
  return isNumber(value) ? value.toLocaleString("en-US", { maximumSignificantDigits: digits }) : NONE;
}

function seconds(value) {
  if (!isNumber(value)) return NONE;
  return value < 1 ? `${significant(value * 1000)} ms` : `${significant(value)} s`;
}

const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE);
const dollars = (value) => (isNumber(value) ? `$${significant(value)}` : NONE);
const sum = (rows, of) => rows.reduce((total, row) => total + (of(row) || 0), 0);

// Tables that are brought up to date cell by cell: rows by name, cells as text, or an element made once for a row.
// A column: {head, right, kind, text: (row) => string, mood: (row) => class, element: (row) => Node}.
// `empty`: why there is no row, where there is none. Roles are said since narrow pages show each row as a card.
class Table {
  constructor(table, caption, columns, nameOf, empty = "none") {
    this.columns = columns;
    this.nameOf = nameOf;
    this.rows = new Map();
    const heads = columns.map((one) => make("th", { scope: "col", role: "columnheader", class: one.right ? "right" : null }, one.head));
    this.body = make("tbody", { role: "rowgroup" });
    this.empty = make("p", { class: "note" }, empty);
    table.setAttribute("role", "table");
    table.replaceChildren(make("caption", {}, caption), make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)), this.body);
    table.after(this.empty);
  }

  show(rows) {
    this.empty.hidden = rows.length > 0;
    const seen = new Set();
    let before = null;
    for (const row of rows) {
      const name = this.nameOf(row);
      seen.add(name);
      let shown = this.rows.get(name);
      if (!shown) {
        const cells = this.columns.map((one, n) => make(n ? "td" : "th", { scope: n ? null : "row", role: n ? "cell" : "rowheader", "data-head": one.head }));
        shown = { line: make("tr", { role: "row" }, ...cells), cells, made: [] };
        this.rows.set(name, shown);
      }
      shown.row = row;
      this.columns.forEach((column, n) => this.fill(shown, column, n));
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== shown.line) this.body.insertBefore(shown.line, place);
      before = shown.line;
    }
    for (const [name, shown] of this.rows) {
      if (!seen.has(name)) {
        shown.line.remove();
        this.rows.delete(name);
      }
    }
  }

  fill(shown, column, n) {
    const cell = shown.cells[n];
    const kind = [column.right ? "right" : "", column.kind || "", column.mood ? column.mood(shown.row) : ""];
    const named = kind.filter(Boolean).join(" ");
    if (cell.className !== named) cell.className = named;
    if (!column.element) {
      say(cell, column.text(shown.row));
      return;
    }
    if (!shown.made[n]) {
      shown.made[n] = column.element(() => shown.row);
      cell.replaceChildren(shown.made[n].node);
    }
    shown.made[n].update(shown.row);
  }
}

const MOODS = { up: "good", down: "bad", draining: "caution", drained: "caution", mixed: "caution" };

// Changes

function askFor(question, meaning, verb, weight) {
  say(by("question"), question);
  say(by("meaning"), meaning);
  say(by("do"), verb);
  by("number").hidden = weight === undefined;
  by("weight").required = weight !== undefined;
  by("weight").value = weight === undefined || weight === null ? "" : weight;
  by("ask").returnValue = "";
  by("ask").showModal();
  return new Promise((answer) => {
    by("ask").addEventListener("close", () => answer(by("ask").returnValue === "yes"), { once: true });
  });
}

async function send(method, path, body) {
  const headers = { "content-type": "application/json" };
  if (session) headers["x-crosstie-csrf"] = session.csrf;
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetch(`${ROOT}/${path}`, { method, headers, body: sent });
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 401 && path !== "session") signedOut("You were signed out.");
  if (!answer.ok) throw new Error(said.error ? said.error.message : `status ${answer.status}`);
  return said;
}

async function change(action, body) {
  try {
    const done = await send("POST", action, body);
    const more = [...done.warnings, ...done.refused_by.map((why) => `a process refused: ${why}`)];
    say(by("said"), [`${done.what}: ${done.changed ? "done" : "nothing to change"}`, ...more].join(". "));
  } catch (error) {
    say(by("said"), `${action} refused: ${error.message}`);
  }
}

const MEANING = {
  drain: "Nothing new is sent there; what is in flight finishes.",
  undrain: "It gets requests again.",
};

// A button that drains, or takes that back; for administrators only.
function drainButton(rowOf, nameOf, bodyOf) {
  const button = make("button", { type: "button" });
  button.addEventListener("click", async () => {
    const row = rowOf();
    const action = row.draining ? "undrain" : "drain";
    const verb = row.draining ? "Undrain" : "Drain";
    if (await askFor(`${verb} ${nameOf(row)}?`, MEANING[action], verb)) await change(action, bodyOf(row));
  });
  return {
    node: button,
    update(row) {
      button.hidden = session === null || session.role !== "administrator";
      say(button, row.draining ? "Undrain" : "Drain");
      button.setAttribute("aria-label", `${row.draining ? "Undrain" : "Drain"} ${nameOf(row)}`);
    },
  };
}

function poolButtons(rowOf) {
  const drain = drainButton(rowOf, (row) => `pool ${row.pool}`, (row) => ({ pool: row.pool }));
  const weight = make("button", { type: "button" }, "Weight");
  weight.addEventListener("click", async () => {
    const row = rowOf();
    const meaning = "Its part of the traffic, beside the others' weights, under the weighted policy.";
    if (await askFor(`Weight of pool ${row.pool}`, meaning, "Set", row.weight)) {
      await change("weight", { weights: { [row.pool]: Number(by("weight").value) } });
    }
  });
  return {
    node: make("span", {}, drain.node, weight),
    update(row) {
      drain.update(row);
      drain.node.hidden = weight.hidden = row.again || session === null || session.role !== "administrator";
      weight.setAttribute("aria-label", `Weight of pool ${row.pool}`);
    },
  };
}

// What is shown

const served = (row) => latest.served.find((one) => one.pool === row.pool);
// What pools cost since midnight, over their tokens.
function perMillion(pools) {
  const tokens = sum(pools, (one) => one.today.input_tokens + one.today.output_tokens);
  return tokens ? (1e6 * sum(pools, (one) => one.today_usd)) / tokens : null;
}
const minute = (row) => (past ? minuteOf((one) => one.pool === row.pool) : {});
// What is counted of those series in the last minute, and what the pools of them cost.
function minuteOf(wanted) {
  const { seconds: long, series, pools: costs } = past.minute;
  if (!long) return {};
  const own = series.filter(wanted);
  const tokens = sum(own, (one) => one.input_tokens + one.output_tokens);
  const usd = sum(costs.filter(wanted), (one) => one.usd) + sum(own, (one) => (past.bought.includes(one.pool) ? one.charged_usd : 0));
  const rate = (value) => value / long;
  return { requests: rate(sum(own, (one) => one.requests)), tokens: rate(tokens), perMillion: tokens ? (1e6 * usd) / tokens : null };
}

// Of the replicas that are up, what they take over what the model predicts: the same figures that stand in their rows.
function ratio(row, name) {
  const values = row.backends.filter((one) => one.state === "up").map((one) => one[name]);
  const [least, most] = [Math.min(...values), Math.max(...values)].map((one) => significant(one));
  return !values.length ? NONE : least === most ? least : `${least} to ${most}`;
}

function poolName(rowOf) {
  const button = make("button", { type: "button", class: "link" });
  button.addEventListener("click", () => {
    by("find").value = rowOf().pool;
    showReplicas();
    by("find").scrollIntoView({ block: "center" });
    by("find").focus();
  });
  return {
    node: button,
    update(row) {
      say(button, row.pool);
      button.title = "show its replicas";
    },
  };
}

// A shared pool has a row for each of its models; what is counted for the whole pool stands in the first.
const once = (text) => (row) => (row.again ? "as above" : text(row));
const isEmulated = (one) => one.engine === "emulated";
const where = (address) => address.replace(/^https?:\/\//, "").replace(/\/v1$/, "");

const pools = new Table(by("pools"), "Each pool, as all processes of the gateway have it", [
  { head: "pool", element: poolName },
  { head: "model", kind: "wrap", text: (row) => row.model },
  { head: "accelerator", text: (row) => (row.accelerator || "any") + (row.backends.some(isEmulated) ? " (emulated)" : "") },
  { head: "state", text: (row) => row.state, mood: (row) => MOODS[row.state] },
  { head: "up", right: true, text: (row) => `${row.backends.filter((one) => one.state === "up").length} of ${row.backends.length}` },
  { head: "in flight", right: true, text: (row) => whole(row.in_flight) },
  { head: "requests/s", right: true, text: once((row) => significant(minute(row).requests)) },
  { head: "TTFT over the model's", right: true, text: (row) => ratio(row, "ttft_correction") },
  { head: "TPOT over the model's", right: true, text: (row) => ratio(row, "tpot_correction") },
  { head: "$/M last minute", right: true, text: once((row) => dollars(minute(row).perMillion)) },
  { head: "$/M today", right: true, text: once((row) => dollars(perMillion([served(row)]))) },
  { head: "weight", right: true, text: once((row) => significant(row.weight)) },
  { head: "change", element: poolButtons },
], (row) => `${row.pool} ${row.model}`, "The fleet file has no pools.");

const replicas = new Table(by("replicas"), "Each replica", [
  { head: "replica", text: (row) => where(row.backend) },
  { head: "pool", text: (row) => row.pool + (row.side ? `, ${row.side}` : "") },
  { head: "state", kind: "wrap", text: (row) => row.state + (row.why_down ? `: ${row.why_down}` : ""), mood: (row) => MOODS[row.state] },
  { head: "breaker", text: (row) => row.breaker, mood: (row) => (row.breaker === "closed" ? "" : "bad") },
  { head: "in flight", right: true, text: load },
  { head: "KV used", right: true, text: (row) => (row.reported && isNumber(row.reported.kv_used_fraction) ? `${Math.round(100 * row.reported.kv_used_fraction)}%` : NONE) },
  { head: "TTFT over the model's", right: true, text: (row) => significant(row.ttft_correction) },
  { head: "TPOT over the model's", right: true, text: (row) => significant(row.tpot_correction) },
  { head: "model there", text: (row) => (row.residency ? `${row.model}: ${row.residency}` : NONE) },
  { head: "engine", text: (row) => (isEmulated(row) ? "emulated, no GPU" : row.engine || "not known"), mood: (row) => (isEmulated(row) ? "caution" : "") },
  { head: "change", element: (rowOf) => drainButton(rowOf, (row) => `replica ${where(row.backend)}`, (row) => ({ backend: row.backend })) },
], (row) => row.backend, "No replica is shown: none of them has what is looked for, or no pool has an address yet.");

function load(row) {
  return whole(row.in_flight) + (row.reported ? ` (${whole(row.reported.running)} + ${whole(row.reported.waiting)})` : "");
}

function budget(spent, most) {
  const meter = make("meter", { min: 0 });
  const text = make("span");
  return {
    node: make("span", {}, meter, " ", text),
    update(row) {
      meter.hidden = !most(row);
      meter.max = most(row) || 1;
      meter.high = 0.9 * (most(row) || 1);
      meter.value = spent(row) || 0;
      meter.setAttribute("aria-label", `spent by ${row.team}`);
      say(text, most(row) ? `${dollars(spent(row))} of ${dollars(most(row))}` : "no budget");
    },
  };
}

const teams = new Table(by("teams"), "What each team's keys have used since the gateway started, and of its budgets (UTC)", [
  { head: "team", text: (row) => row.team },
  { head: "requests", right: true, text: (row) => whole(row.requests) },
  { head: "tokens", right: true, text: (row) => whole(row.tokens) },
  { head: "charged", right: true, text: (row) => dollars(row.usd) },
  { head: "today", element: () => budget((row) => row.today_usd, (row) => row.usd_per_day) },
  { head: "this month", element: () => budget((row) => row.month_usd, (row) => row.usd_per_month) },
], (row) => row.team, "No teams: they come with keys (crosstie keys team), and this gateway has none.");

const targets = new Table(by("targets"), "Requests that kept their targets", [
  { head: "class", text: (row) => row.class || "no class" },
  { head: "target", text: (row) => row.target.toUpperCase() },
  { head: "kept", right: true, text: (row) => whole(row.kept) },
  { head: "missed", right: true, text: (row) => whole(row.missed) },
  { head: "share", right: true, text: (row) => `${significant((100 * row.kept) / Math.max(row.kept + row.missed, 1))}%` },
], (row) => `${row.class} ${row.target}`, "No class of the fleet file has a target, so there is none to keep.");

const share = (row, count) => `${significant((100 * count) / Math.max(row.home + row.moved + row.evicted, 1))}%`;
const sessions = new Table(by("sessions"), "Sessions that went on with a second turn, by class", [
  { head: "class", text: (row) => row.class },
  { head: "answered now", right: true, text: (row) => whole(row.answered) },
  { head: "warm", right: true, text: (row) => whole(row.warm) },
  { head: "waiting", right: true, text: (row) => whole(row.waiting), mood: (row) => (row.waiting ? "bad" : "") },
  { head: "begun", right: true, text: (row) => whole(row.begun) },
  { head: "found at home", right: true, text: (row) => share(row, row.home) },
  { head: "moved", right: true, text: (row) => share(row, row.moved) },
  { head: "evicted", right: true, text: (row) => share(row, row.evicted) },
  { head: "each", right: true, text: (row) => dollars(row.usd / Math.max(row.begun, 1)) },
], (row) => row.class, "No session has had a second turn yet: a prompt that begins with an earlier one and its answer.");

function promised(target) {
  return target ? `${seconds(target.seconds)} at p${significant(100 * target.percentile, 4)}` : "no target";
}

function seen(value, target, usual) {
  return isNumber(value) ? `${seconds(value)} at p${significant(100 * (target ? target.percentile : usual), 4)}` : NONE;
}

const mood = (value, target) => (target && isNumber(value) ? (value <= target.seconds ? "good" : "bad") : "");
const latencies = new Table(by("latency"), "Requests that ended in the last minute, by class and pool", [
  { head: "class", text: (row) => row.class || "no class" },
  { head: "pool", text: (row) => row.pool },
  { head: "requests", right: true, text: (row) => whole(row.requests) },
  { head: "not served", right: true, text: (row) => whole(row.unserved), mood: (row) => (row.unserved ? "bad" : "") },
  { head: "TTFT", right: true, text: (row) => seen(row.ttft_s, row.ttft, row.usual), mood: (row) => mood(row.ttft_s, row.ttft) },
  { head: "TTFT target", right: true, text: (row) => promised(row.ttft) },
  { head: "TPOT", right: true, text: (row) => seen(row.tpot_s, row.tpot, row.usual), mood: (row) => mood(row.tpot_s, row.tpot) },
  { head: "TPOT target", right: true, text: (row) => promised(row.tpot) },
], (row) => `${row.class} ${row.pool}`, "No request has ended in the last minute.");

const faults = new Table(by("faults"), "What went wrong since the gateway started", [
  { head: "where", text: (row) => row.where },
  { head: "what", text: (row) => row.what },
  { head: "times", right: true, text: (row) => whole(row.times) },
], (row) => `${row.where} ${row.what}`, "Nothing has gone wrong since the gateway started.");

function faultRows(fleet) {
  const rows = [];
  for (const one of fleet.served) {
    const counts = [["faults of its backends", "faults"], ["attempts repeated elsewhere", "retries"], ["streams resumed here", "resumed"]];
    for (const [what, name] of counts) if (one.total[name]) rows.push({ where: `pool ${one.pool}`, what, times: one.total[name] });
  }
  for (const [code, times] of Object.entries(fleet.refused)) rows.push({ where: "refused", what: code, times });
  return rows;
}

function facts(fleet) {
  const all = fleet.pools.flatMap((pool) => pool.backends);
  const now = past ? minuteOf(() => true) : {};
  return [
    ["requests/s", significant(now.requests)],
    ["tokens/s", significant(now.tokens)],
    ["in flight", whole(fleet.exchanges)],
    ["queued", whole(fleet.queued)],
    ["replicas up", `${all.filter((one) => one.state === "up").length} of ${all.length}`],
    ["breakers open", whole(all.filter((one) => one.breaker === "open").length)],
    ["faults today", whole(sum(fleet.served, (one) => one.today.faults))],
    ["$/M tokens last minute", dollars(now.perMillion)],
    ["$/M tokens today", dollars(perMillion(fleet.served))],
  ];
}

function showFacts(fleet) {
  const list = by("facts");
  facts(fleet).forEach(([name, value], n) => {
    if (!list.children[n]) list.append(make("div", {}, make("dt", {}, name), make("dd")));
    say(list.children[n].lastChild, value);
  });
}

function showReplicas() {
  if (!latest) return;
  const wanted = by("find").value.trim().toLowerCase();
  const all = latest.pools.flatMap((pool) => pool.backends.map((one) => ({ ...one, pool: pool.pool, model: pool.model })));
  const shown = all.filter((row) => !wanted || JSON.stringify(row).toLowerCase().includes(wanted));
  replicas.show(shown);
  say(by("found"), `${shown.length} of ${all.length}`);
}

// Decisions

function decision(row) {
  const at = new Date(row.at * 1000).toLocaleTimeString("en-GB");
  const went = row.pool ? `→ ${row.pool} (${where(row.backend)})` : row.outcome;
  const shape = `${whole(row.input_tokens)} in, ${whole(row.expected_output_tokens)} out expected`;
  const missed = row.pool && row.meets_target === false ? make("span", { class: "caution" }, " expected to miss its target") : "";
  const more = row.ended ? make("span", { class: "note" }, ` ${ending(row.ended)}`) : "";
  const inside = make("div");
  const details = make("details", {}, make("summary", {}, `${at} ${row.model}, ${shape} ${went}`, missed, more), inside);
  details.addEventListener("toggle", () => details.open && !inside.childNodes.length && explain(row, inside));
  return make("li", {}, details);
}

function ending({ how, output_tokens, ttft_s, tpot_s }) {
  const times = [isNumber(ttft_s) ? `TTFT ${seconds(ttft_s)}` : "", isNumber(tpot_s) ? `TPOT ${seconds(tpot_s)}` : ""];
  return [how, `${whole(output_tokens)} out`, ...times].filter(Boolean).join(", ");
}

function showConsidered(inside, caption, considered) {
  const box = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Alternatives" }, make("table"));
  inside.append(box);
  new Table(box.firstChild, caption, [
    { head: "pool", text: (one) => one.pool },
    { head: "replica", text: (one) => (one.backend ? where(one.backend) : NONE) },
    { head: "score, lowest wins", right: true, text: (one) => significant(one.score) },
    { head: "why not", kind: "wrap", text: (one) => one.dropped || "" },
  ], (one) => `${one.pool} ${one.backend}`).show(considered);
}

async function explain(row, inside) {
  const target = [row.ttft_target_s ? `TTFT ${seconds(row.ttft_target_s)}` : "", row.tpot_target_s ? `TPOT ${seconds(row.tpot_target_s)}` : ""];
  inside.append(make("p", {}, `Why: ${row.reason || "no reason was given"}`));
  if (row.predicted) {
    const { ttft_s, tpot_s, usd, cached_tokens } = row.predicted;
    inside.append(make("p", {}, `Predicted TTFT ${seconds(ttft_s)}, TPOT ${seconds(tpot_s)}, ${dollars(usd)}, ${whole(cached_tokens)} tokens cached.`));
  }
  inside.append(make("p", { class: "note" }, `Request ${row.request_id}, class ${row.class || "none"}, priority ${row.priority}, attempt ${row.attempt}, target ${target.filter(Boolean).join(", ") || "none"}.`));
  if (row.ended) inside.append(make("p", {}, `It came to: ${ending(row.ended)}.`));
  if (row.considered.length) {
    showConsidered(inside, "The pools as they were when it was decided", row.considered);
    return;
  }
  try {
    const now = await send("GET", `why?request=${encodeURIComponent(row.request_id)}`);
    showConsidered(inside, "The same request, if it were decided now", now.considered);
  } catch (error) {
    inside.append(make("p", { class: "note" }, `Alternatives: ${error.message}.`));
  }
}

// Over time

const COLOURS = 8;
const known = (value, looks) => (looks ? value : null);

// One number for each point, of the series of a pool together; nothing where there was no gateway.
function added(pool, of, wanted = () => true) {
  const own = past.series.filter((one) => one.pool === pool && wanted(one));
  const there = past.pools.find((one) => one.pool === "") || { looks: [] };
  return Array.from({ length: past.points }, (_, n) => known(sum(own, (one) => of(one, n)), there.looks[n]));
}

function lines(of) {
  const named = latest.pools.map((one) => one.pool).filter((name, n, all) => all.indexOf(name) === n);
  return named.map((name, n) => ({ name, colour: `c${n % COLOURS}`, values: of(name) }));
}

// TTFT or TPOT of a class; where that runs on no pool, nowhere.
function latency(name, target, wanted) {
  const at = 100 * (target ? target.percentile : past.usual_percentile);
  const of = (pool) => past.series.find((one) => one.pool === pool && one.class === wanted);
  return {
    name: `${name.slice(0, 4).toUpperCase()} at p${significant(at, 4)}${wanted ? `, ${wanted}` : ""}`, format: seconds,
    target: target && target.seconds, promised: promised(target),
    lines: lines((pool) => (of(pool) ? of(pool)[name] : Array(past.points).fill(null))),
  };
}

function shownCharts() {
  const long = past.point_s * past.speed;
  const wanted = by("class").value;
  const found = past.classes.find((one) => one.class === wanted) || {};
  const gauges = (pool) => past.pools.find((one) => one.pool === pool) || { looks: [], usd: [], in_flight: [], queued: [] };
  const gauge = (pool, name) => Array.from({ length: past.points }, (_, n) => known(gauges(pool)[name][n], gauges(pool).looks[n]));
  const tokens = (pool) => added(pool, (one, n) => one.input_tokens[n] + one.output_tokens[n]);
  const usd = (pool) => (past.bought.includes(pool) ? added(pool, (one, n) => one.charged_usd[n]) : gauge(pool, "usd"));
  const over = (parts, wholes, scale) => parts.map((part, n) => (wholes[n] ? (scale * part) / wholes[n] : null));
  const rate = (values) => values.map((value) => (value === null ? null : value / long));
  const unserved = rate(Array.from({ length: past.points }, (_, n) => known(sum(past.series, (one) => one.unserved[n]), gauge("", "queued")[n] !== null)));
  const none = "The gateway has just begun.";
  return [
    { name: "Requests/s", format: significant, empty: none, lines: [
      ...lines((pool) => rate(added(pool, (one, n) => one.requests[n]))),
      ...(unserved.some(Boolean) ? [{ name: "not served", colour: "wrong", values: unserved }] : [])] },
    { name: "Tokens/s, prompts and answers", format: significant, empty: none, lines: lines((pool) => rate(tokens(pool))) },
    latency("ttft_s", found.ttft, wanted),
    latency("tpot_s", found.tpot, wanted),
    { name: "In flight, and queued", format: significant, empty: none, lines: [
      ...lines((pool) => gauge(pool, "in_flight")), { name: "queued", colour: "wrong", values: gauge("", "queued") }] },
    { name: "Cost, $/M tokens", format: dollars, lines: lines((pool) => over(usd(pool), tokens(pool), 1e6)) },
    { name: "Cache hits, % of prompts", format: (value) => (isNumber(value) ? `${significant(value)}%` : NONE),
      lines: lines((pool) => over(added(pool, (one, n) => one.cached_tokens[n]), added(pool, (one, n) => one.input_tokens[n]), 100)) },
  ];
}

const charts = new Charts(by("charts"), (from, to) => showMoment(from, to), (point) => {
  if (point !== null) by("point").value = point;
  say(by("at"), point === null ? "" : pointTime(point).map((at) => clock(at, past.point_s)).join(" to "));
});

function pointTime(point) {
  const from = past.ends_at - (past.points - point) * past.point_s;
  return [from, from + past.point_s];
}

function showPast() {
  if (!past || !latest) return;
  const names = past.classes.length ? past.classes.map((one) => one.class) : [""];
  if ([...by("class").options].map((one) => one.value).join("\n") !== names.join("\n")) {
    by("class").replaceChildren(...names.map((name) => make("option", { value: name }, name || "requests without a class")));
  }
  by("point").max = past.points - 1;
  charts.show({ points: past.points, pointS: past.point_s, endsAt: past.ends_at }, shownCharts());
  const classes = new Map(past.classes.map((one) => [one.class, one]));
  latencies.show(past.minute.series.filter((one) => one.requests).map((one) => {
    const { ttft, tpot } = classes.get(one.class) || {};
    return { ...one, pool: one.pool || "none: refused", ttft, tpot, usual: past.usual_percentile };
  }));
}

async function lookBack() {
  clearTimeout(looking);
  if (!session) return;
  const window = by("window").value;
  try {
    const found = await send("GET", `history?window=${window}`);
    if (window !== by("window").value) return;
    past = found;
    showPast();
  } catch (error) {
    say(by("at"), `Over time: ${error.message}`);
  }
  clearTimeout(looking);
  looking = setTimeout(lookBack, LOOK_BACK_MS);
}

async function showMoment(from, to) {
  const found = await send("GET", `moment?from=${from}&to=${to}`).catch((error) => ({ error }));
  by("moment").hidden = false;
  say(by("h-moment"), `Requests of ${clock(from, 1)} to ${clock(to, 1)}`);
  const rows = found.decisions || [];
  const few = "Of every five seconds the first few decisions are kept, for half an hour.";
  say(by("kept"), found.error ? found.error.message : rows.length ? few : `No decision is kept of this time. ${few}`);
  by("moments").replaceChildren(...rows.map(decision));
}

function showDecisions(said) {
  if (paused) return;
  const list = by("decisions");
  for (const row of said.decisions) list.prepend(decision(row));
  while (list.children.length > MOST_DECISIONS) list.lastChild.remove();
  say(by("skipped"), said.skipped ? `${whole(said.skipped)} more in the last second are not listed` : "");
}

function show(said) {
  const fleet = (latest = said.fleet);
  document.title = `${fleet.fleet} – Crosstie`;
  say(by("name"), fleet.fleet);
  const processes = fleet.processes > 1 ? `, ${fleet.processes} processes` : "";
  say(by("about"), `${fleet.policy}${processes}`);
  by("emulated").hidden = !fleet.emulated;
  const all = fleet.pools.flatMap((pool) => pool.backends).length;
  const faster = fleet.speed === 1 ? "" : ` Times are the fleet's own, which runs ${significant(fleet.speed)} times as fast as the clock.`;
  say(by("emulated"), `EMULATED: ${fleet.emulated} of ${all} replicas are emulated. No GPU runs there; their times are the performance model's.${faster}`);
  showFacts(fleet);
  const named = fleet.pools.map((one) => one.pool);
  pools.show(fleet.pools.map((one, n) => ({ ...one, again: named.indexOf(one.pool) < n })));
  showReplicas();
  showDecisions(said);
  teams.show(fleet.teams);
  targets.show(fleet.targets);
  sessions.show(fleet.sessions);
  faults.show(faultRows(fleet));
  const changes = [...fleet.changes, ...fleet.dropped.map((one) => `dropped: ${one.change}: ${one.why}`)];
  const words = changes.length ? changes : ["None: the fleet is as its file has it."];
  const list = by("changes");
  if ([...list.children].map((one) => one.textContent).join("\n") !== words.join("\n")) {
    list.replaceChildren(...words.map((one) => make("li", {}, one)));
  }
}

// Who is there

function follow() {
  if (stream) stream.close();
  stream = new EventSource(`${ROOT}/live`);
  stream.addEventListener("fleet", (event) => {
    retry = 0;
    say(by("state"), "live");
    by("state").className = "good";
    show(JSON.parse(event.data));
    if (!past) lookBack();
  });
  stream.addEventListener("error", () => {
    stream.close();
    say(by("state"), latest ? "not connected: these figures are old" : "not connected");
    by("state").className = "bad";
    retry = Math.min(retry + 1, 10);
    setTimeout(look, 500 * retry);
  });
}

function signedOut(why = "") {
  if (stream) stream.close();
  stream = session = latest = past = null;
  by("board").hidden = by("leave").hidden = true;
  by("enter").hidden = false;
  by("decisions").replaceChildren();
  by("moment").hidden = true;
  for (const id of ["state", "role", "about", "said"]) say(by(id), "");
  say(by("name"), "Crosstie");
  say(by("wrong"), why);
  by("key").focus();
}

function signedIn(found) {
  session = found;
  by("enter").hidden = true;
  by("board").hidden = by("leave").hidden = false;
  say(by("role"), found.role === "administrator" ? "administrator" : "operator, read-only");
  follow();
}

// An address may bring a key behind #, where no server and no log sees it: `crosstie demo` prints such a one.
async function signInByAddress() {
  const [, key] = location.hash.match(/^#key=(.+)$/) || [];
  if (!key) return;
  history.replaceState(null, "", location.pathname);
  await send("POST", "session", { key: decodeURIComponent(key) }).catch(() => null);
}

async function look() {
  const answer = await fetch(`${ROOT}/session`).catch(() => null);
  if (answer && answer.ok) signedIn(await answer.json());
  else if (answer && answer.status === 401) signedOut();
  else setTimeout(look, 500 * (retry = Math.min(retry + 1, 10)));
}

by("enter").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = by("key").value;
  by("key").value = "";
  say(by("wrong"), "");
  try {
    signedIn(await send("POST", "session", { key }));
  } catch (error) {
    say(by("wrong"), error.message === "no such key" ? "This is not a key of operators or administrators." : error.message);
    by("key").focus();
  }
});
by("leave").addEventListener("click", async () => {
  await send("DELETE", "session").catch(() => null);
  signedOut();
});
by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
});
by("find").addEventListener("input", showReplicas);
by("window").addEventListener("change", lookBack);
by("class").addEventListener("change", showPast);
by("point").addEventListener("input", () => past && charts.point(Number(by("point").value)));
by("look").addEventListener("click", () => {
  if (!past) return;
  charts.choose(Number(by("point").value), Number(by("point").value));
  by("h-moment").focus();
});
signInByAddress().then(look);
