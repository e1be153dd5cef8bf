// The text sections of the page: names, problems, figures, the last plan, agents and past plans.
import { ago, at, bytes, clock, count, element, ratio, rebuild, tip } from "./dom.js";

const CHIPS = 8;
const ROWS = 12;
const SILENT_SECONDS = 15;

function stateOf(status) {
  if (status.problems.length) return ["bad", `${status.problems.length} problem${status.problems.length > 1 ? "s" : ""}`];
  if (status.paused) return ["warn", "paused"];
  if (status.observed) return ["good", "observed"];
  return status.plan_id ? ["busy", "switching"] : ["good", "healthy"];
}

export function showNames(deployments, current) {
  const key = deployments.map((status) => [status.deployment, stateOf(status), ratio(status.par)]);
  rebuild("deployments", [key, current], () => deployments.map((status) => {
    const [kind, text] = stateOf(status);
    const link = { href: `#${encodeURIComponent(status.deployment)}`, title: text, "aria-current": status.deployment === current ? "page" : null };
    return element("a", link, element("i", { class: kind }), status.deployment, element("b", {}, ratio(status.par)));
  }));
  document.querySelectorAll("nav i").forEach((dot) => { dot.style.color = `var(--${dot.className === "busy" ? "par" : dot.className})`; });
}

export function showTitle({ status }) {
  const [kind, text] = stateOf(status);
  document.title = `${status.deployment} ${ratio(status.par)} · eplb`;
  at("name").textContent = status.deployment;
  at("state").className = `pill ${kind}`;
  at("state").replaceChildren(element("i"), text);
  at("shape").textContent = `${status.layers} layers × ${status.experts} experts on ${status.ranks} ranks × ${status.slots} slot${status.slots === 1 ? "" : "s"}`;
}

export function showProblems(problems) {
  rebuild("problems", problems, () => problems.map((text) => element("li", {}, text)));
}

// The first row shows the effect of balancing, the second its cost.
export function showTiles({ status, figures, balance }) {
  const rows = [[...figures.balance, ...figures.gain], [...plannedFigures(status, balance), ...figures.cost]];
  rebuild("tiles", rows, () => rows.map((tiles) => element("div", { class: "tiles" }, ...tiles.map(({ name, value, note, tone }) =>
    element("div", { class: `tile ${tone ?? ""}` }, element("span", {}, name), element("b", {}, value), element("span", {}, note))))));
}

function plannedFigures(status, balance) {
  const decision = balance.last_decision;
  const newest = balance.points.at(-1);
  const floor = newest?.noise_floor;
  const avoidable = status.par && floor ? `; now ${(100 * Math.max(0, status.par - floor)).toFixed(1)} % above it` : "";
  return [
    { name: "noise floor", value: ratio(floor), note: `PAR from token sampling${avoidable}` },
    { name: "planned", value: ratio(newest?.par_planned), note: decision ? `decided ${ago(Date.now() / 1000 - decision.at)} ago` : "no decision yet" },
  ];
}

// Sources of the figures, shown on demand.
export function showExplanations(lines) {
  at("worth").hidden = !lines.length;
  rebuild("worth-details", lines, () => lines.map((text) => element("p", {}, text)));
}

// The last plan

export function showSwitch({ status, layers, balance }) {
  const plan = balance.last_plan;
  const decision = balance.last_decision;
  let lead = "No decision since this service started.";
  if (plan) lead = switchLead(plan, decision);
  else if (decision) lead = keptLead(decision);
  at("switch-lead").textContent = lead;
  const pars = plan ? layers.map((layer) => ratio(layer.par)) : [];
  rebuild("switch", [status.deployment, plan, pars], () => (plan ? switchRows(plan, layers) : []));
}

function switchLead(plan, decision) {
  const changed = plan.verdicts.filter((verdict) => verdict.changed);
  const moves = changed.reduce((sum, verdict) => sum + verdict.moves, 0);
  const sent = changed.reduce((sum, verdict) => sum + verdict.bytes, 0);
  const outcome = plan.outcome ? plan.outcome.replace("_", " ") : "under way";
  const later = decision && decision.at > plan.at ? ` ${keptLead(decision)}` : "";
  return `Plan ${plan.plan_id} at ${clock(plan.at, true)}, ${outcome}: ${plan.committed} of ${changed.length} layers switched, ` +
    `${count(moves)} experts moved${sent ? ` (${bytes(sent)})` : ""}, solved in ${count(1000 * plan.solve_seconds)} ms.` +
    `${plan.reason ? ` ${plan.reason}.` : ""}${later}`;
}

function keptLead(decision) {
  return decision.plan_id ? "" : `The decision ${ago(Date.now() / 1000 - decision.at)} ago kept every layer.`;
}

function switchRows(plan, layers) {
  const moves = new Map(plan.moves.map((entry) => [entry.layer, entry.moves]));
  const changed = plan.verdicts.filter((verdict) => verdict.changed)
    .sort((a, b) => b.par_seen - b.par_planned - (a.par_seen - a.par_planned));
  const kept = plan.verdicts.filter((verdict) => !verdict.changed);
  const head = element("div", { class: "row head" }, ...["layer", "PAR: measured → planned, now", "moves: expert, source → target rank", "reason"]
    .map((text) => element("span", {}, text)));
  const rows = changed.map((verdict) => switchRow(verdict, moves.get(verdict.layer) ?? [], layers[verdict.layer]));
  const content = [head, ...rows.slice(0, ROWS)];
  if (rows.length > ROWS) content.push(element("details", {}, element("summary", {}, `${rows.length - ROWS} more layers with smaller gains`), ...rows.slice(ROWS)));
  if (kept.length) content.push(element("details", {}, element("summary", {}, `${kept.length} layers kept`), ...kept.map((verdict) =>
    element("div", { class: "row" }, element("b", {}, `layer ${verdict.layer}`), element("span", {}, ratio(verdict.par_seen)),
      element("span", { class: "why" }, verdict.reason)))));
  return content;
}

function switchRow(verdict, moves, layer) {
  const gain = verdict.par_seen - verdict.par_planned;
  const ratios = element("span", {}, `${ratio(verdict.par_seen)} → `, element("b", {}, ratio(verdict.par_planned)),
    element("span", { class: "soft" }, `, ${ratio(layer?.par)}`));
  ratios.title = `gain ${gain.toFixed(3)}, noise floor ${ratio(verdict.noise_floor)}`;
  return element("div", { class: "row" }, element("b", {}, `layer ${verdict.layer}`), ratios, movesBox(moves), element("span", { class: "why" }, verdict.reason));
}

function movesBox(moves) {
  const chips = moves.map(([source, , destination, , expert]) =>
    element("span", { class: "chip" }, element("b", {}, `e${expert}`), ` ${source}→${destination}`));
  const box = element("div", { class: "chips" }, ...chips.slice(0, CHIPS));
  if (!moves.length) box.append(element("span", { class: "chip" }, "tables only"));
  if (chips.length > CHIPS) {
    const button = element("button", { class: "more", type: "button" }, `${chips.length - CHIPS} more`);
    button.addEventListener("click", () => box.replaceChildren(...chips));
    box.append(button);
  }
  return box;
}

// Agents

function troubleOf(agent) {
  if (!agent.connected) return ["bad", "not connected"];
  if (agent.error) return ["bad", agent.error];
  if (agent.silent_seconds !== null && agent.silent_seconds > SILENT_SECONDS) return ["warn", `silent for ${ago(agent.silent_seconds)}`];
  if (agent.dropped_steps) return ["warn", `${count(agent.dropped_steps)} steps dropped`];
  return null;
}

// Memory of the rank that uses the most; empty if no agent reports it.
function memoryOf(agents) {
  const maximum = (field) => Math.max(-1, ...agents.filter((agent) => agent.connected).map((agent) => agent[field] ?? -1));
  const uses = [[maximum("staging_bytes"), "for staging"], [maximum("ring_bytes"), "for heat"]].filter(([size]) => size >= 0);
  return uses.length ? `; at most ${uses.map(([size, use]) => `${bytes(size)} ${use}`).join(" and ")} per rank` : "";
}

export function showAgents({ status, agents }) {
  const reported = new Map(agents.map((agent) => [agent.rank, agent]));
  const all = Array.from({ length: status.ranks }, (_, rank) => reported.get(rank) ?? { rank, node: "never connected", connected: false, error: "", epoch: 0, step: 0 });
  const nodes = new Map();
  for (const agent of all) nodes.set(agent.node, [...(nodes.get(agent.node) ?? []), agent]);
  const steps = agents.filter((agent) => agent.connected).map((agent) => agent.step);
  const versions = [...new Set(agents.map((agent) => agent.agent_version))].join(", ");
  at("agents-lead").textContent = `${status.agents_connected} of ${status.ranks} ranks connected, on ${nodes.size} ` +
    `node${nodes.size === 1 ? "" : "s"}${versions ? `; agent ${versions}` : ""}${steps.length ? `; at step ${count(Math.max(...steps))}` : ""}${memoryOf(agents)}.`;
  rebuild("agents", all.map((agent) => [agent.node, troubleOf(agent)]), () => [...nodes].map(([node, ranks]) =>
    element("div", { class: "node" }, element("small", { title: node }, node), element("div", { class: "ranks" }, ...ranks.map(square)))));
  const troubled = all.map((agent) => [agent, troubleOf(agent)]).filter(([, trouble]) => trouble);
  rebuild("troubled", troubled.map(([agent, trouble]) => [agent.rank, trouble]), () => (troubled.length ? [troubledTable(troubled)] : []));
}

function square(agent) {
  const trouble = troubleOf(agent);
  const dot = element("i", { class: trouble?.[0] ?? "good" });
  dot.addEventListener("mousemove", (event) => tip(event, `rank ${agent.rank} on ${agent.node}\n${trouble?.[1] ?? "healthy"}`));
  dot.addEventListener("mouseleave", (event) => tip(event, null));
  return dot;
}

function troubledTable(troubled) {
  const rows = troubled.map(([agent, [kind, text]]) => [agent.rank, agent.node, element("span", { class: kind }, text)]);
  return element("div", { class: "scroll" }, table(["rank", "node", "problem"], rows, ["number", "", "text"]));
}

// Plans

function kindOf(outcome) {
  if (!outcome) return "busy";
  return outcome === "done" ? "good" : "bad";
}

export function showPlans(plans) {
  const mean = (plan, field) => {
    const values = plan.verdicts.map((verdict) => verdict[field]).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const rows = plans.map((plan) => {
    const changed = plan.verdicts.filter((verdict) => verdict.changed);
    const kind = kindOf(plan.outcome);
    const text = `${(plan.outcome || "under way").replace("_", " ")}${plan.reason ? `: ${plan.reason}` : ""}`;
    return [plan.plan_id, clock(plan.at, true), `${ratio(mean(plan, "par_seen"))} → ${ratio(mean(plan, "par_planned"))}`,
      `${plan.committed} of ${changed.length}`, count(changed.reduce((sum, verdict) => sum + verdict.moves, 0)), element("span", { class: kind }, text)];
  });
  const kinds = ["number", "time", "number", "number", "number", "text"];
  at("plans").replaceChildren(rows.length ? table(["plan", "offered", "PAR: measured → planned", "layers", "moves", "outcome"], rows, kinds)
    : element("p", { class: "soft" }, "No plan yet: all decisions so far have kept every layer."));
}

function table(heads, rows, kinds) {
  const cells = (name, values) => values.map((value, column) => element(name, { class: kinds[column] || null }, value instanceof Node ? value : String(value)));
  return element("table", {}, element("thead", {}, element("tr", {}, ...cells("th", heads))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))));
}
