// Asks the service every two seconds and hands each part of the page what it shows.
import { drawLoads, drawPar } from "./charts.js";
import { showAgents, showNames, showPlans, showProblems, showSwitch, showTiles, showTitle, showWorth } from "./parts.js";

const EVERY_MS = 2000;
const at = (id) => document.getElementById(id);
let token = sessionStorage.getItem("eplb-token") ?? "";
let timer = 0;
let answered = 0;
let latest = null;
let plansOf = "";

class Refused extends Error {}

async function ask(path) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(`api/v1/${path}`, { headers, cache: "no-store", signal: AbortSignal.timeout(15000) });
  const found = await answer.json();
  if (answer.status === 401 || answer.status === 403) throw new Refused(found.error);
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function chosen(deployments) {
  const name = decodeURIComponent(location.hash.slice(1));
  const found = deployments.find((one) => one.deployment === name);
  if (found) return found;
  // The one with problems first, then the largest: what somebody who just looks in would want to see.
  const order = (one) => [one.problems.length && one.agents_connected ? 1 : 0, one.agents_connected, one.ranks];
  return [...deployments].sort((a, b) => order(b).reduce((so, x, i) => so || x - order(a)[i], 0))[0];
}

async function update() {
  clearTimeout(timer);
  try {
    const service = await ask("service");
    if (service.token_required) throw new Refused("");
    const { deployments } = await ask("deployments");
    at("version").textContent = `eplb-service ${service.version}`;
    at("login").hidden = true;
    const status = chosen(deployments);
    showNames(deployments, status?.deployment);
    at("deployment").hidden = !status;
    at("empty").hidden = Boolean(status);
    at("empty").textContent = "No deployments yet: no agent has connected.\nStart one with EPLB_AGENT_SERVICE, or try `eplb demo`.";
    if (status) await showDeployment(status);
    answered = Date.now();
    document.body.classList.remove("stale");
    const served = !status || status.agents_connected > 0;
    at("live").className = served ? "" : "lost";
    at("live").textContent = served ? "live" : "no rank connected";
  } catch (error) {
    failed(error);
  }
  if (at("login").hidden) timer = setTimeout(update, EVERY_MS);
  document.body.dataset.ready = "yes";
}

async function showDeployment(status) {
  const path = `deployments/${encodeURIComponent(status.deployment)}`;
  const [whole, balance] = await Promise.all([ask(path), ask(`${path}/balance`)]);
  latest = { status: whole.status, layers: whole.layers, agents: whole.agents, balance };
  showTitle(latest);
  showProblems(latest.status.problems);
  showTiles(latest);
  showWorth(latest);
  showAgents(latest);
  showSwitch(latest);
  draw();
  const now = `${status.deployment} ${balance.last_plan?.plan_id} ${balance.last_plan?.outcome}`;
  if (now !== plansOf) {
    plansOf = now;
    showPlans((await ask(`${path}/history`)).plans);
  }
}

function draw() {
  if (!latest) return;
  drawPar(latest);
  drawLoads(latest);
}

function failed(error) {
  if (error instanceof Refused) {
    if (at("login").hidden) at("refusal").textContent = token ? error.message : "";
    at("login").hidden = false;
    at("deployment").hidden = true;
    at("live").textContent = "";
    return;
  }
  document.body.classList.add("stale");
  at("live").className = "lost";
  const seconds = Math.round((Date.now() - answered) / 1000);
  at("live").textContent = answered ? `no answer for ${seconds} s` : "the service does not answer";
  at("live").title = error.message;
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = new FormData(event.target).get("token").trim();
  sessionStorage.setItem("eplb-token", token);
  at("login").hidden = true;
  event.target.reset();
  update();
});
addEventListener("hashchange", () => { plansOf = ""; update(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(() => requestAnimationFrame(draw)).observe(at("par"));
update();
