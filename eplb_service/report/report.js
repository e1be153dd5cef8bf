"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function show(event, words) {
  tip.textContent = words;
  tip.style.visibility = "visible";
  const right = event.clientX + 18 + tip.offsetWidth > window.innerWidth;
  tip.style.left = `${right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
}

function hide() {
  tip.style.visibility = "hidden";
  document.querySelectorAll(".cross").forEach((line) => { line.style.visibility = "hidden"; });
}

function place(svg, event) {
  const box = svg.getBoundingClientRect();
  const view = svg.viewBox.baseVal;
  return [(event.clientX - box.left) * view.width / box.width, (event.clientY - box.top) * view.height / box.height];
}

const hidden = new Set();
const chart = document.getElementById("par");
const cross = chart.querySelector(".cross");
chart.addEventListener("mousemove", (event) => {
  const [x] = place(chart, event);
  const { left, right, first, last } = data.par;
  if (x < left || x > right) { hide(); return; }
  const step = first + (x - left) / (right - left) * (last - first);
  const rows = data.par.lines.filter((line) => !hidden.has(line.name)).map((line) => {
    let at = line.steps.findIndex((begin) => begin > step);
    at = (at < 0 ? line.steps.length : at) - 1;
    return [line.name, line.values[Math.max(0, at)]];
  });
  rows.sort((one, other) => other[1] - one[1]);
  cross.setAttribute("x1", x);
  cross.setAttribute("x2", x);
  cross.style.visibility = "visible";
  show(event, [`step ${Math.floor(step).toLocaleString("en")}`, ...rows.map(([name, par]) => `${par.toFixed(3)}  ${name}`)].join("\n"));
});
chart.addEventListener("mouseleave", hide);

document.querySelectorAll(".legend button").forEach((button) => {
  button.addEventListener("click", () => {
    const name = button.dataset.series;
    const off = !hidden.has(name);
    if (off) hidden.add(name); else hidden.delete(name);
    button.setAttribute("aria-pressed", String(!off));
    document.querySelectorAll("[data-series]").forEach((mark) => {
      if (mark !== button && mark.dataset.series === name) mark.style.display = off ? "none" : "";
    });
  });
});

for (const [name, map] of Object.entries(data.maps)) {
  const svg = document.getElementById(name);
  const cells = svg.querySelector(".cells");
  cells.addEventListener("mousemove", (event) => {
    const box = cells.getBoundingClientRect();
    const row = Math.min(map.values.length - 1, Math.floor((event.clientY - box.top) / box.height * map.values.length));
    const columns = map.values[0].length;
    const column = Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns));
    show(event, `layer ${row}, ${map.column} ${column}\n${map.values[Math.max(0, row)][Math.max(0, column)].toFixed(2)}x the mean`);
  });
  cells.addEventListener("mouseleave", hide);
}
document.body.dataset.ready = "yes";
