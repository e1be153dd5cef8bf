// Polls the service every two seconds and updates all sections of the page.
import { drawLoads, drawPar } from "./charts.js";
import { showAgents, showExplanations, showNames, showPlans, showProblems, showSwitch, showTiles, showTitle } from "./parts.js";

const POLL_MS = 2000;
const at = (id) => document.getElementById(id);
let token = sessionStorage.getItem("eplb-token") ?? "";
let timer = 0;
let lastResponse = 0;
let latest = null;
let plansKey = "";

class AccessDenied extends Error {}

async function request(path) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const response = await fetch(`api/v1/${path}`, { headers, cache: "no-store", signal: AbortSignal.timeout(15000) });
  const content = await response.json();
  if (response.status === 401 || response.status === 403) throw new AccessDenied(content.error);
  if (!response.ok) throw new Error(content.error);
  return content;
}

function selectDeployment(deployments) {
  const name = decodeURIComponent(location.hash.slice(1));
  const selected = deployments.find((status) => status.deployment === name);
  if (selected) return selected;
  // By default, show a deployment with problems if there is one, and otherwise the largest.
  const key = (status) => [status.problems.length && status.agents_connected ? 1 : 0, status.agents_connected, status.ranks];
  return [...deployments].sort((a, b) => key(b).reduce((order, value, index) => order || value - key(a)[index], 0))[0];
}

async function update() {
  clearTimeout(timer);
  try {
    const service = await request("service");
    if (service.token_required) throw new AccessDenied("");
    const { deployments } = await request("deployments");
    at("version").textContent = `eplb-service ${service.version}`;
    at("login").hidden = true;
    const status = selectDeployment(deployments);
    showNames(deployments, status?.deployment);
    at("deployment").hidden = !status;
    at("empty").hidden = Boolean(status);
    at("empty").textContent = "No deployments yet: no agent has connected.\nStart an agent with EPLB_AGENT_SERVICE, or try `eplb demo`.";
    if (status) await showDeployment(status);
    lastResponse = Date.now();
    document.body.classList.remove("stale");
    const live = !status || status.agents_connected > 0;
    at("live").className = live ? "" : "lost";
    at("live").textContent = live ? "live" : "no rank connected";
  } catch (error) {
    failed(error);
  }
  if (at("login").hidden) timer = setTimeout(update, POLL_MS);
  document.body.dataset.ready = "yes";
}

async function showDeployment(status) {
  const path = `deployments/${encodeURIComponent(status.deployment)}`;
  const [details, figures, balance] = await Promise.all([request(path), request(`${path}/figures`), request(`${path}/balance`)]);
  latest = { status: details.status, layers: details.layers, agents: details.agents, figures, balance };
  showTitle(latest);
  showProblems(latest.status.problems);
  showTiles(latest);
  showExplanations(latest.figures.explanations);
  showAgents(latest);
  showSwitch(latest);
  draw();
  const key = `${status.deployment} ${balance.last_plan?.plan_id} ${balance.last_plan?.outcome}`;
  if (key !== plansKey) {
    plansKey = key;
    showPlans((await request(`${path}/history`)).plans);
  }
}

function draw() {
  if (!latest) return;
  drawPar(latest);
  drawLoads(latest);
}

function failed(error) {
  if (error instanceof AccessDenied) {
    if (at("login").hidden) at("refusal").textContent = token ? error.message : "";
    at("login").hidden = false;
    at("deployment").hidden = true;
    at("live").textContent = "";
    return;
  }
  document.body.classList.add("stale");
  at("live").className = "lost";
  const seconds = Math.round((Date.now() - lastResponse) / 1000);
  at("live").textContent = lastResponse ? `no response for ${seconds} s` : "the service does not respond";
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
addEventListener("hashchange", () => { plansKey = ""; update(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(() => requestAnimationFrame(draw)).observe(at("par"));
update();
