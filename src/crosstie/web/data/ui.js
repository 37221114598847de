// The page of `crosstie ui`. The workload is an object of the same shape as the file; fields read and write it, and
// every change asks for a plan. Words of others only ever become text; the answer's markup is made, and escaped, by
// the program that serves this page.

const at = (id) => document.getElementById(id);
let choices, workload, answer, kept;
let asked = 0, wait = 0;

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((one) => one !== null));
  return element;
}

// Fields

const number = (text) => (text.trim() === "" ? undefined : Number.isNaN(Number(text)) ? text.trim() : Number(text));
const shown = (value) =>
  value === undefined || value === null ? "" : typeof value === "object" ? toml(value) : String(value);
const toml = (value) =>
  Array.isArray(value) ? `[${value.map(toml).join(", ")}]`
  : typeof value === "object" ? `{ ${Object.entries(value).map(([k, v]) => `${k} = ${toml(v)}`).join(", ")} }`
  : JSON.stringify(value);

function put(table, key, value) {
  if (value === undefined || value === "" || (typeof value === "object" && !Object.keys(value).length)) delete table[key];
  else table[key] = value;
  changed();
}

function field(label, table, key, options = {}) {
  const input = made("input", {
    type: "text", inputMode: options.text ? "text" : "decimal", value: shown(table[key]), placeholder: options.usual ?? "",
    oninput: (event) => put(table, key, options.text ? event.target.value : number(event.target.value)),
  });
  if (options.list) input.setAttribute("list", options.list);
  return made("label", {}, label, input);
}

function select(label, table, key, values, usual) {
  const empty = usual === undefined ? [] : [made("option", { value: "" }, usual)];
  const element = made("select", { onchange: (event) => { put(table, key, event.target.value); } },
    ...empty, ...values.map((one) => made("option", { value: one }, one)));
  element.value = table[key] ?? "";
  return made("label", {}, label, element);
}

function target(label, one, key) {
  const [percentile, ms] = Object.entries(one[key] ?? {})[0] ?? ["p95", undefined];
  const which = made("select", { "aria-label": `${label}, percentile` },
    ...choices.percentiles.map((name) => made("option", { value: name }, name)));
  which.value = percentile;
  const limit = made("input", { type: "text", inputMode: "decimal", value: shown(ms), placeholder: "none", "aria-label": `${label}, milliseconds` });
  const write = () => put(one, key, number(limit.value) === undefined ? undefined : { [which.value]: number(limit.value) });
  which.addEventListener("change", write);
  limit.addEventListener("input", write);
  return made("label", {}, label, made("span", { className: "pair" }, which, limit));
}

function classFields(one, index) {
  const traced = one.trace !== undefined;
  const lengths = traced
    ? [select("trace", one, "trace", [...new Set([...choices.traces, one.trace])])]
    : [field("tokens in", one, "input", { text: false }), field("tokens out", one, "output", { text: false })];
  const swap = made("button", { type: "button", onclick: () => {
    if (traced) { delete one.trace; one.input = 1000; one.output = 200; } else { delete one.input; delete one.output; one.trace = choices.traces[0]; }
    fields(); changed();
  } }, traced ? "Type lengths" : "Take a trace");
  const gone = workload.class.length > 1
    ? made("button", { type: "button", "aria-label": `Remove class ${one.name}`, onclick: () => { workload.class.splice(index, 1); fields(); changed(); } }, "Remove") : null;
  const rate = one.requests_per_s !== undefined ? field("requests/s", one, "requests_per_s") : field("share of requests", one, "share");
  return made("fieldset", {}, made("legend", {}, `Class ${one.name ?? index + 1}`),
    field("name", one, "name", { text: true }), field("model", one, "model", { text: true, list: "models" }), rate, ...lengths,
    target("TTFT, ms", one, "ttft_ms"), target("TPOT, ms", one, "tpot_ms"), made("p", { className: "buttons" }, swap, gone));
}

function acceleratorFields() {
  const rules = (workload.constraints ??= {}), prices = (workload.prices ??= {});
  const rows = choices.accelerators.map((one) => {
    const all = !rules.accelerators?.length;
    const box = made("input", { type: "checkbox", checked: all ? one.usd !== null : rules.accelerators.includes(one.id), onchange: () => {
      const boxes = [...document.querySelectorAll(".accelerators input[type=checkbox]")];
      const chosen = boxes.filter((other) => other.checked).map((other) => other.value);
      const usual = choices.accelerators.filter((other) => other.usd !== null).map((other) => other.id);
      const same = chosen.length === usual.length && usual.every((name) => chosen.includes(name));
      put(rules, "accelerators", same ? undefined : chosen.length ? chosen : ["none chosen"]);
    }, value: one.id });
    const usd = made("input", { type: "text", inputMode: "decimal", value: shown(prices.usd_per_gpu_hour?.[one.id]),
      placeholder: one.usd === null ? "no price" : one.usd.toFixed(2), "aria-label": `${one.id}, dollars a GPU-hour`,
      oninput: (event) => {
        const own = { ...prices.usd_per_gpu_hour };
        const value = number(event.target.value);
        if (value === undefined) delete own[one.id]; else own[one.id] = value;
        put(prices, "usd_per_gpu_hour", own);
      } });
    return made("div", {}, made("label", { className: "check" }, box, `${one.id} (${one.vendor})`), usd);
  });
  return made("fieldset", {}, made("legend", {}, "Accelerators, $ a GPU-hour"), made("div", { className: "accelerators" }, ...rows));
}

function discounts() {
  const prices = workload.prices, vendors = [...new Set(choices.accelerators.map((one) => one.vendor))];
  const rows = vendors.map((vendor) => made("label", {}, `discount of ${vendor}, %`, made("input", {
    type: "text", inputMode: "decimal", value: prices.discount?.[vendor] === undefined ? "" : String(100 * prices.discount[vendor]), placeholder: "0",
    oninput: (event) => {
      const off = { ...prices.discount }, value = number(event.target.value);
      if (value === undefined) delete off[vendor]; else off[vendor] = typeof value === "number" ? value / 100 : value;
      put(prices, "discount", off);
    } })));
  return made("fieldset", {}, made("legend", {}, "Prices"), select("kind", prices, "kind", choices.kinds, "on-demand"), ...rows);
}

function fields() {
  const traffic = (workload.traffic ??= {}), rules = (workload.constraints ??= {});
  workload.prices ??= {};
  const nodes = made("input", { type: "checkbox", checked: rules.whole_nodes !== false, onchange: (event) => put(rules, "whole_nodes", event.target.checked ? undefined : false) });
  const models = made("datalist", { id: "models" }, ...choices.models.map((name) => made("option", { value: name })));
  at("fields").replaceChildren(models,
    made("fieldset", {}, made("legend", {}, "Traffic"), field("name", workload, "name", { text: true }),
      field("requests/s at the peak", traffic, "requests_per_s"), field("mean over peak", traffic, "mean_over_peak", { usual: "0.5" }),
      field("growth a year", traffic, "growth_per_year", { usual: "0" }), field("how sure, %", workload, "sure", { usual: "80" }),
      field("spare capacity", rules, "spare", { usual: "0" }), made("label", { className: "check" }, nodes, "GPUs in whole nodes")),
    ...workload.class.map(classFields),
    made("p", { className: "buttons" }, made("button", { type: "button", onclick: () => {
      workload.class.push({ name: `class-${workload.class.length + 1}`, model: workload.class[0].model, share: 0.1, input: 1000, output: 200 });
      fields(); changed();
    } }, "Add a class")),
    acceleratorFields(), discounts());
}

// Asking

function changed() {
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(workload))}`);
  clearTimeout(wait);
  wait = setTimeout(() => ask("/plan"), 150);
}

async function ask(path) {
  const turn = ++asked, begun = performance.now();
  const slow = path === "/simulate";
  at("now").setAttribute("aria-busy", "true");
  at("state").textContent = slow ? "simulating…" : "planning…";
  at("simulate").disabled = slow;
  let status, found;
  try {
    const reply = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(workload) });
    [status, found] = [reply.status, await reply.json()];
  } catch {
    [status, found] = [0, { error: "crosstie ui does not answer: has it ended?" }];
  }
  if (turn !== asked || status === 409) return;
  at("simulate").disabled = false;
  at("now").removeAttribute("aria-busy");
  at("error").hidden = !found.error;
  at("error").textContent = found.error ?? "";
  const took = ((performance.now() - begun) / 1000).toFixed(1);
  const fleet = found.document?.fleet, cost = fleet ? `$${fleet.usd_per_hour.toFixed(2)} an hour, ` : "";
  at("state").textContent = found.error ? "not planned" : `${cost}${found.simulated ? "confirmed by simulation" : "by closed forms; Simulate confirms it"}, ${took} s`;
  // The last answer stays while something is mistyped, but cannot be saved as if it were of this workload.
  for (const id of ["keep", "save-workload", "save-fleet", "simulate"]) at(id).disabled = Boolean(found.error);
  if (found.error) return;
  answer = found;
  at("save-fleet").disabled = !found.fleet;
  show(at("now"), answer, kept);
}

// Showing

function show(pane, one, other) {
  const facts = made("dl", { className: "facts" }, ...one.facts.map((fact) => made("div", {}, made("dt", {}, fact.name),
    made("dd", {}, fact.value, fact.beside ? made("small", {}, fact.beside) : null))));
  const words = document.createElement("div");
  words.innerHTML = one.html;
  const plan = one.document, title = made("h2", {}, `${plan.workload.name}${pane.id === "kept" ? ", kept" : ""}`);
  pane.replaceChildren(title, facts, ...(plan.fleet ? [bars(plan, other?.document)] : []), words);
}

function bars(plan, other) {
  const rows = [["this plan", plan.fleet.usd_per_hour]];
  if (other?.fleet) rows.push(["the kept one", other.fleet.usd_per_hour]);
  for (const [vendor, one] of Object.entries(plan.single_vendor)) if (one && one.usd_per_hour < 5 * plan.fleet.usd_per_hour) rows.push([`${vendor} alone`, one.usd_per_hour]);
  if (plan.runner_up && plan.runner_up.usd_per_hour < 5 * plan.fleet.usd_per_hour) rows.push([`without ${plan.runner_up.without}`, plan.runner_up.usd_per_hour]);
  const most = Math.max(...rows.map(([, usd]) => usd));
  const lines = rows.map(([name, usd]) => {
    const bar = made("i");
    bar.style.width = `${(100 * usd) / most}%`;
    return made("div", {}, made("span", {}, `${name}: $${usd.toFixed(2)}`), bar);
  });
  const said = rows.map(([name, usd]) => `${name} $${usd.toFixed(2)}`).join(", ");
  return made("div", { className: "bars", role: "img", "aria-label": `dollars an hour: ${said}` }, ...lines);
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/toml" }));
  const link = made("a", { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}

at("simulate").addEventListener("click", () => { clearTimeout(wait); ask("/simulate"); });
at("keep").addEventListener("click", () => {
  kept = answer;
  at("kept").hidden = at("drop").hidden = false;
  show(at("kept"), kept);
  show(at("now"), answer, kept);
});
at("drop").addEventListener("click", () => {
  kept = undefined;
  at("kept").hidden = at("drop").hidden = true;
  at("keep").focus();
  show(at("now"), answer);
});
at("save-workload").addEventListener("click", () => download("workload.toml", answer.workload));
at("save-fleet").addEventListener("click", () => download("fleet.toml", answer.fleet));
at("link").addEventListener("click", async () => {
  await navigator.clipboard?.writeText(location.href);
  at("state").textContent = "link copied: the address holds the whole workload";
});
at("workload").addEventListener("submit", (event) => event.preventDefault());

function begin() {
  try {
    workload = location.hash.length > 1 ? JSON.parse(decodeURIComponent(location.hash.slice(1))) : structuredClone(choices.workload);
    if (!Array.isArray(workload.class) || !workload.class.length) throw new Error();
  } catch {
    workload = structuredClone(choices.workload);
    at("error").hidden = false;
    at("error").textContent = "the address holds no workload: this is the one that crosstie ui was started with";
  }
  fields();
  ask("/plan");
}

// The token is in a cookie by now; an address that is copied must not have it.
history.replaceState(null, "", location.pathname + location.hash);
choices = await (await fetch("/start")).json();
begin();
window.addEventListener("hashchange", begin);
