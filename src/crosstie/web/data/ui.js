// The page of `crosstie ui`. The workload is an object of the same shape as the file; fields read and write it, and
// every change asks for a plan. Words of others only ever become text; the answer's markup is made, and escaped, by
// the program that serves this page.

const at = (id) => document.getElementById(id);
let choices, workload, answer, kept;
let asked = 0, wait = 0;
// Parts of the form that are unfolded, by their names.
const unfolded = new Set(["Traffic"]);

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

function fold(name, summary, ...children) {
  const part = made("details", { open: unfolded.has(name), ontoggle: () => { part.open ? unfolded.add(name) : unfolded.delete(name); } },
    made("summary", {}, summary), ...children);
  return part;
}

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

const percent = (value) => (typeof value === "number" ? String(Number((100 * value).toFixed(6))) : shown(value));
const fraction = (text) => (typeof number(text) === "number" ? Number((number(text) / 100).toFixed(8)) : number(text));

function field(label, table, key, where, options = {}) {
  const [show, read] = options.percent ? [percent, fraction] : options.text ? [shown, (text) => text] : [shown, number];
  const input = made("input", {
    type: "text", inputMode: options.text ? "text" : "decimal", value: show(table[key]), placeholder: options.usual ?? "", "data-key": where + key,
    oninput: (event) => put(table, key, read(event.target.value)),
  });
  if (options.list) input.setAttribute("list", options.list);
  return made("label", {}, options.percent ? `${label}, %` : label, input);
}

function select(label, table, key, where, values, usual) {
  const empty = usual === undefined ? [] : [made("option", { value: "" }, usual)];
  const element = made("select", { "data-key": where + key, onchange: (event) => { put(table, key, event.target.value); } },
    ...empty, ...values.map((one) => made("option", { value: one }, one)));
  element.value = table[key] ?? "";
  return made("label", {}, label, element);
}

function target(label, one, key, where) {
  const [percentile, ms] = Object.entries(one[key] ?? {})[0] ?? ["p95", undefined];
  const which = made("select", { "aria-label": `${label}, percentile` },
    ...choices.percentiles.map((name) => made("option", { value: name }, name)));
  which.value = percentile;
  const limit = made("input", { type: "text", inputMode: "decimal", value: shown(ms), placeholder: "none", "data-key": where + key, "aria-label": `${label}, milliseconds` });
  const write = () => put(one, key, number(limit.value) === undefined ? undefined : { [which.value]: number(limit.value) });
  which.addEventListener("change", write);
  limit.addEventListener("input", write);
  return made("label", {}, label, made("span", { className: "pair" }, which, limit));
}

function classFields(one, index) {
  const traced = one.trace !== undefined, where = `class[${index}].`;
  const lengths = traced
    ? [select("trace", one, "trace", where, [...new Set([...choices.traces, one.trace])])]
    : [field("tokens in", one, "input", where), field("tokens out", one, "output", where)];
  const swap = made("button", { type: "button", onclick: () => {
    if (traced) { delete one.trace; one.input = 1000; one.output = 200; } else { delete one.input; delete one.output; one.trace = choices.traces[0]; }
    fields(); changed();
  } }, traced ? "Type lengths" : "Take a trace");
  const gone = workload.class.length > 1
    ? made("button", { type: "button", "aria-label": `Remove class ${one.name}`, onclick: () => { workload.class.splice(index, 1); fields(); changed(); } }, "Remove") : null;
  const rate = one.requests_per_s !== undefined ? field("requests/s", one, "requests_per_s", where)
    : field("share of requests", one, "share", where, { percent: true });
  return fold(where, `Class ${one.name ?? index + 1}: ${one.model ?? ""}`,
    field("name", one, "name", where, { text: true }), field("model", one, "model", where, { text: true, list: "models" }), rate, ...lengths,
    target("TTFT, ms", one, "ttft_ms", where), target("TPOT, ms", one, "tpot_ms", where), made("p", { className: "buttons" }, swap, gone));
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
      placeholder: one.usd === null ? "no price" : one.usd.toFixed(2), "data-key": `prices.usd_per_gpu_hour.${one.id}`, "aria-label": `${one.id}, dollars a GPU-hour`,
      oninput: (event) => {
        const own = { ...prices.usd_per_gpu_hour };
        const value = number(event.target.value);
        if (value === undefined) delete own[one.id]; else own[one.id] = value;
        put(prices, "usd_per_gpu_hour", own);
      } });
    return made("div", {}, made("label", { className: "check" }, box, `${one.id} (${one.vendor})`), usd);
  });
  return fold("Accelerators", "Accelerators, $ a GPU-hour", made("div", { className: "accelerators", "data-key": "constraints.accelerators" }, ...rows));
}

function discounts() {
  const prices = workload.prices, vendors = [...new Set(choices.accelerators.map((one) => one.vendor))];
  const rows = vendors.map((vendor) => made("label", {}, `discount of ${vendor}, %`, made("input", {
    type: "text", inputMode: "decimal", value: percent(prices.discount?.[vendor]), placeholder: "0", "data-key": `prices.discount.${vendor}`,
    oninput: (event) => {
      const off = { ...prices.discount }, value = fraction(event.target.value);
      if (value === undefined) delete off[vendor]; else off[vendor] = value;
      put(prices, "discount", off);
    } })));
  return fold("Prices", "Prices", select("kind", prices, "kind", "prices.", choices.kinds, "on-demand"), ...rows);
}

function fields() {
  const traffic = (workload.traffic ??= {}), rules = (workload.constraints ??= {});
  workload.prices ??= {};
  const nodes = made("input", { type: "checkbox", checked: rules.whole_nodes !== false, onchange: (event) => put(rules, "whole_nodes", event.target.checked ? undefined : false) });
  const models = made("datalist", { id: "models" }, ...choices.models.map((name) => made("option", { value: name })));
  const parts = [
    fold("Traffic", "Traffic", field("name", workload, "name", "", { text: true }),
      field("requests/s at the peak", traffic, "requests_per_s", "traffic."), field("mean over peak", traffic, "mean_over_peak", "traffic.", { usual: "50", percent: true }),
      field("growth a year", traffic, "growth_per_year", "traffic.", { usual: "0", percent: true }), field("how sure, %", workload, "sure", "", { usual: "80" }),
      field("spare capacity", rules, "spare", "constraints.", { usual: "0", percent: true }), made("label", { className: "check" }, nodes, "GPUs in whole nodes")),
    ...workload.class.map(classFields),
    made("p", { className: "buttons" }, made("button", { type: "button", onclick: () => {
      workload.class.push({ name: `class-${workload.class.length + 1}`, model: workload.class[0].model, share: 0.1, input: 1000, output: 200 });
      fields(); changed();
    } }, "Add a class")),
    acceleratorFields(), discounts(),
  ];
  // On a phone the answer comes first: the whole form is one line until somebody wants it.
  const narrow = matchMedia("(max-width: 60rem)").matches;
  at("fields").replaceChildren(models, ...(narrow ? [fold("Workload", "Change the workload", ...parts)] : parts));
}

// Asking

function changed() {
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(workload))}`);
  clearTimeout(wait);
  wait = setTimeout(() => ask("/plan"), 150);
}

// How far the program is, and after a second or two the first fleet that it has found.
async function follow(path, turn, begun) {
  while (turn === asked && at("now").hasAttribute("aria-busy")) {
    const told = await fetch("/progress").then((reply) => reply.json()).catch(() => ({}));
    if (turn !== asked || !at("now").hasAttribute("aria-busy")) return;
    const what = `${path === "/simulate" ? "simulating" : "planning"}… ${told[path] ?? ""}`;
    if (at("state").textContent !== what) at("state").textContent = what;
    at("clock").textContent = `(${((performance.now() - begun) / 1000).toFixed(0)} s)`;
    if (!answer) at("now").replaceChildren(made("p", { className: "first" }, told[path] || "reading the catalog"));
    await new Promise((done) => setTimeout(done, 250));
  }
}

async function ask(path) {
  const turn = ++asked, begun = performance.now();
  at("now").setAttribute("aria-busy", "true");
  at("simulate").disabled = path === "/simulate";
  follow(path, turn, begun);
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
  refuse(found.error, found.key);
  at("clock").textContent = `(${((performance.now() - begun) / 1000).toFixed(1)} s)`;
  const fleet = found.document?.fleet, cost = fleet ? `$${fleet.usd_per_hour.toFixed(2)} an hour, ` : "";
  at("state").textContent = found.error ? "not planned" : `${cost}${found.simulated ? "simulated" : "NOT simulated: by closed forms"}`;
  // The last answer stays while something is mistyped, but cannot be saved as if it were of this workload.
  for (const id of ["keep", "save-workload", "save-fleet", "simulate"]) at(id).disabled = Boolean(found.error);
  if (found.error) return;
  answer = found;
  at("save-fleet").disabled = !found.fleet;
  show(at("now"), answer, kept);
}

// What is wrong, above the answer and at the field that it is about.
function refuse(why, key) {
  at("error").hidden = !why;
  at("error").textContent = why ?? "";
  document.querySelectorAll("[aria-invalid]").forEach((one) => { one.removeAttribute("aria-invalid"); one.removeAttribute("aria-describedby"); });
  at("wrong")?.remove();
  const about = [...document.querySelectorAll("[data-key]")].filter((one) => key && (key === one.dataset.key || key.startsWith(`${one.dataset.key}.`)))
    .sort((a, b) => b.dataset.key.length - a.dataset.key.length)[0];
  if (!about) return;
  if (about.matches("input, select")) { about.setAttribute("aria-invalid", "true"); about.setAttribute("aria-describedby", "wrong"); }
  (about.closest("label") ?? about).after(made("p", { id: "wrong", className: "bad" }, why.slice(key.length + 2)));
  for (let part = about.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
}

// Showing

function show(pane, one, other) {
  const facts = [...one.facts], usd = (answer) => answer?.document.fleet?.usd_per_hour;
  if (usd(one) && usd(other)) {
    const more = usd(one) / usd(other) - 1;
    facts.push({ name: "against the kept one", value: `${more < 0 ? "-" : "+"}${Math.abs(100 * more).toFixed(1)}%`, beside: `$${usd(other).toFixed(2)} an hour` });
  }
  const cards = made("dl", { className: "facts" }, ...facts.map((fact) => made("div", {}, made("dt", {}, fact.name),
    made("dd", {}, fact.value, fact.beside ? made("small", {}, fact.beside) : null))));
  const words = document.createElement("div");
  words.innerHTML = one.html;
  pane.replaceChildren(made("h2", {}, `${one.document.workload.name}${pane.id === "kept" ? ", kept" : ""}`), cards, words);
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
