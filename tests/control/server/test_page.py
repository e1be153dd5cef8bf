"""In a real browser, the page shows its figures at any size, in light and dark mode, and never runs text as code."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.control.server.pictured import HOSTILE, PAGE_FILES, documents, documents_of, messages, pictured

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian package: chromium)")

EARLY = b"""
window.problems = [];
addEventListener("error", (event) => window.problems.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => window.problems.push(event.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = (...values) => window.problems.push(values.join(" "));
"""
# Once the page is ready, this script records its content, tooltips and any horizontal overflow.
LATE = b"""
function look() {
  if (document.body.dataset.ready !== "yes") { setTimeout(look, 50); return; }
  const text = (id) => document.getElementById(id).innerText;
  const seen = { complaints: window.problems, hacked: window.hacked ?? 0, text: document.body.innerText, tips: {} };
  for (const id of ["name", "state", "tiles", "switch", "agents-lead", "plans", "live"]) seen[id] = text(id);
  seen.hidden = ["login", "empty", "deployment"].filter((id) => document.getElementById(id).hidden);
  seen.wide = document.documentElement.scrollWidth - innerWidth;
  seen.ground = getComputedStyle(document.body).backgroundColor;
  seen.lines = [...document.querySelectorAll("#par path.line")].map((path) => path.getBoundingClientRect().width);
  const bar = document.getElementById("deployments").getBoundingClientRect();
  const room = (link) => bar.right - link.getBoundingClientRect().right;
  seen.names = [...document.querySelectorAll("#deployments a")].map(room);
  seen.squares = document.querySelectorAll("#agents i").length;
  seen.troubled = document.querySelectorAll("#agents i.bad, #agents i.warn").length;
  const map = document.getElementById("loads");
  seen.map = [map.clientWidth, map.clientHeight, map.clientWidth && shades(map)];
  for (const chart of [map, document.querySelector("#par svg")].filter((chart) => chart?.clientWidth)) {
    const box = chart.getBoundingClientRect();
    const position = { clientX: box.left + box.width / 3, clientY: box.top + box.height / 2, bubbles: true };
    chart.dispatchEvent(new MouseEvent("mousemove", position));
    const tip = document.getElementById("tip");
    seen.tips[chart.id || "par"] = tip.hidden ? null : tip.textContent;
    chart.dispatchEvent(new MouseEvent("mouseleave", position));
  }
  const out = document.createElement("output");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
}
function shades(map) {
  const pixels = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
  const colours = new Set();
  for (let at = 0; at < pixels.length; at += 4 * 97) if (pixels[at + 3]) colours.add(pixels.slice(at, at + 3).join());
  return colours.size;
}
look();
"""
PROBED = (
    PAGE_FILES["/"][1]
    .replace(b"<title>", b'<script src="early.js"></script><title>')
    .replace(b"</body>", b'<script src="late.js"></script></body>')
)
EXTRA = {
    "/": ("text/html; charset=utf-8", PROBED),
    "/early.js": ("text/javascript", EARLY),
    "/late.js": ("text/javascript", LATE),
}


def visit(answers: dict[str, Any], folder: Path, size: str = "1200,1000", *flags: str) -> dict[str, Any]:
    with pictured(answers, EXTRA) as url:
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", *flags]
        command += ["--disable-dev-shm-usage", f"--user-data-dir={folder}", f"--window-size={size}"]
        command += ["--virtual-time-budget=5000", "--dump-dom", url]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    output = re.search(r'<output id="seen">(.*?)</output>', result.stdout, re.DOTALL)
    assert output, result.stderr
    seen: dict[str, Any] = json.loads(html.unescape(output[1]))
    assert seen["complaints"] == []
    assert seen["wide"] <= 0
    return seen


@in_browser
@pytest.mark.parametrize(
    ("size", "scheme", "ground"),
    [("1200,1000", 1, "rgb(255, 255, 255)"), ("500,900", 0, "rgb(19, 21, 24)")],
    ids=["wide and light", "narrow and dark"],
)
def test_a_large_deployment_is_legible(tmp_path: Path, size: str, scheme: int, ground: str) -> None:
    missing = "319 of 320 ranks connected, missing rank 77"
    answers = documents(320, 61, problems=(missing,), missing=(77,))
    seen = visit(answers, tmp_path, size, f"--blink-settings=preferredColorScheme={scheme}")
    assert (seen["name"], seen["state"], seen["live"]) == ("decode", "1 problem", "live")
    assert missing in seen["text"]
    assert seen["ground"] == ground
    assert len(seen["lines"]) == 4
    assert min(seen["lines"]) > 250
    width, height, shades = seen["map"]
    assert width > 400
    assert height > 400
    assert shades > 100
    par = answers["deployments/decode"]["status"]["par"]
    assert f"PAR now\n{par:.3f}" in seen["tiles"]
    assert (seen["squares"], seen["troubled"]) == (320, 2)
    assert seen["agents-lead"].endswith("; at most 84 MB for staging and 1.5 MB for heat per rank.")
    assert re.match(
        r"rank \d+ on node-\d\d: \d\.\d\d × the mean\nlayer \d+: PAR \d\.\d{3}", seen["tips"]["loads"]
    )
    assert re.fullmatch(r".*:\d\d\n(\d\.\d{3}  .+\n?){4}", seen["tips"]["par"])
    first = answers["deployments/decode/balance"]["last_plan"]["moves"][0]["moves"][0]
    assert f"e{first[4]} {first[0]}→{first[2]}" in seen["switch"]
    assert "40 layers kept" in seen["switch"]
    assert "aborted: rank 3: the transfer took longer than 30 s" in seen["plans"]


@in_browser
def test_text_from_the_service_is_never_rendered_as_html(tmp_path: Path) -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(content) for key, content in value.items()}
        if isinstance(value, list):
            return [hostile(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    answers = documents(4, 2, problems=("a problem",))
    hostile_answers = {path: hostile(answer) for path, answer in answers.items()}
    for status in (
        *hostile_answers["deployments"]["deployments"],
        hostile_answers["deployments/decode"]["status"],
    ):
        status["deployment"] = "decode"
    seen = visit(hostile_answers, tmp_path)
    assert (seen["hacked"], seen["live"]) == (0, "live")
    assert seen["text"].count(HOSTILE) >= 6


@in_browser
def test_eight_deployments_of_64_ranks_and_58_layers_fit_on_one_page(tmp_path: Path) -> None:
    look = messages(64, 58)
    look.whole.status.worth.tokens_per_second_won = 3750.0
    look.whole.status.worth.gain_percent = 12345.6
    answers = documents_of(look)
    (first, *_) = answers["deployments"]["deployments"]
    answers["deployments"]["deployments"] = [
        first,
        *(
            {**first, "deployment": f"deepseek-v3-decode-{number}", "agents_connected": 8}
            for number in range(7)
        ),
    ]
    seen = visit(answers, tmp_path, "1400,1100")
    assert seen["name"] == "decode"
    assert len(seen["names"]) == 8
    assert min(seen["names"]) > 0
    for figures in answers["deployments/decode/figures"].values():
        for figure in filter(lambda shown: isinstance(shown, dict), figures):
            assert f"{figure['name']}\n{figure['value']}\n{figure['note']}" in seen["tiles"]
    assert "+3,750 tokens/s" in seen["tiles"]
    assert "12,300 % of a step" in seen["tiles"]
    assert "initial layout 1.7" in seen["text"]
    assert not re.search(r"\de[+-]?\d", seen["text"])
    # The basis of the figures is collapsed, because a paragraph of ten lines would distract from them.
    assert "About these figures" in seen["text"]
    assert answers["deployments/decode/figures"]["explanations"][0] not in seen["text"]
    assert seen["squares"] == 64


@in_browser
def test_a_page_without_a_token_shows_only_the_login(tmp_path: Path) -> None:
    seen = visit({"service": {"token_required": True}}, tmp_path)
    assert set(seen["hidden"]) == {"empty", "deployment"}
    assert seen["live"] == ""


@in_browser
def test_the_page_says_that_no_rank_is_connected(tmp_path: Path) -> None:
    answers = documents(4, 2, missing=(0, 1, 2, 3))
    del answers["deployments"]["deployments"][1:]
    assert visit(answers, tmp_path)["live"] == "no rank connected"


@in_browser
def test_a_deployment_without_measurements_shows_placeholders(tmp_path: Path) -> None:
    look = messages(2, 2)
    look.whole.status.par = 0
    answers = documents_of(look)
    del answers["deployments"]["deployments"][1:]
    balance = answers["deployments/decode/balance"]
    answers["deployments/decode/balance"] = {**dict.fromkeys(balance), "points": [], "load_steps": 0}
    answers["deployments/decode"]["layers"] = []
    answers["deployments/decode/history"] = {"plans": []}
    seen = visit(answers, tmp_path)
    assert "PAR now\n-\nno measurements" in seen["tiles"]
    assert "No decision since this service started." in seen["text"]
    assert "No load measurements yet." in seen["text"]


@in_browser
def test_the_page_reports_missing_deployments_and_an_unreachable_service(tmp_path: Path) -> None:
    seen = visit({"service": {"version": "1"}, "deployments": {"deployments": []}}, tmp_path / "empty")
    assert set(seen["hidden"]) == {"login", "deployment"}
    assert "No deployments yet" in seen["text"]
    assert visit({}, tmp_path / "broken")["live"] == "the service does not respond"


def test_the_page_loads_nothing_from_other_hosts() -> None:
    text = b"".join(body for path, (_, body) in PAGE_FILES.items() if path != "/icon.svg").decode()
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert "innerHTML" not in text
    assert not re.search(r"\sstyle=|\son\w+=\"|<style|<script>", PAGE_FILES["/"][1].decode())
