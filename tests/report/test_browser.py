"""In a real browser, without a network, a report draws every chart and its console stays empty, in light and dark."""

import json
import re
import shutil
import subprocess

import pytest

from tests.report.reports import small_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian package: chromium)")

# Runs in the page after its own script: catches errors, moves a mouse over each chart, and writes down what it sees.
EARLY = """<script>
window.problems = [];
window.addEventListener("error", (event) => window.problems.push(String(event.message)));
for (const kind of ["error", "warn"]) console[kind] = (...parts) => window.problems.push(parts.join(" "));
</script>"""
LATE = """<script>
window.addEventListener("load", () => {
  const seen = { problems: window.problems, charts: {}, tips: {}, ready: document.body.dataset.ready };
  for (const svg of document.querySelectorAll("svg.chart")) {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll("path, rect, circle")].filter((mark) => {
      const size = mark.getBoundingClientRect();
      return (size.width > 0 || size.height > 0) && getComputedStyle(mark).visibility === "visible";
    });
    seen.charts[svg.id] = [box.width, box.height, marks.length];
    const target = svg.querySelector(".cells") ?? svg;
    const at = target.getBoundingClientRect();
    const place = { clientX: at.left + at.width / 2, clientY: at.top + at.height / 2, bubbles: true };
    target.dispatchEvent(new MouseEvent("mousemove", place));
    const tip = document.getElementById("tip");
    if (tip.style.visibility === "visible") seen.tips[svg.id] = tip.textContent;
    target.dispatchEvent(new MouseEvent("mouseleave", place));
  }
  const button = document.querySelector('.legend button[data-series="flashlb"]');
  button.click();
  seen.hidden = document.querySelector('path[data-series="flashlb"]').style.display;
  button.click();
  seen.shown = document.querySelector('path[data-series="flashlb"]').style.display;
  seen.ground = getComputedStyle(document.body).backgroundColor;
  seen.wide = document.documentElement.scrollWidth - window.innerWidth;
  const out = document.createElement("output");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>"""


def visit(path, *flags, size="1200,900"):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *flags]
    command += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--window-size={size}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r'<output id="seen">(.*?)</output>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.parametrize(
    ("flags", "ground"),
    [
        (["--blink-settings=preferredColorScheme=1"], "rgb(255, 255, 255)"),
        (["--blink-settings=preferredColorScheme=0"], "rgb(23, 24, 27)"),
    ],
    ids=["light", "dark"],
)
def test_every_chart_is_drawn_and_the_console_is_empty(tmp_path, flags, ground):
    path = tmp_path / "report.html"
    html = small_report()
    path.write_text(html.replace("<title>", EARLY + "<title>").replace("</body>", LATE + "</body>"))
    seen = visit(path, f"--user-data-dir={tmp_path / 'profile'}", *flags)
    assert seen["problems"] == []
    assert seen["ready"] == "yes"
    assert set(seen["charts"]) == {
        "par",
        "colours",
        "before",
        "after",
        "alone",
        "balanced",
        "moves",
        "pareto",
    }
    for name, (width, height, marks) in seen["charts"].items():
        assert width > 200, name
        assert height > 20, name
        assert marks >= 2, name
    assert re.fullmatch(r"step \d+\n(\d\.\d{3}  .+\n?){5}", seen["tips"]["par"])
    for name in ("before", "after"):
        assert re.fullmatch(r"layer \d+, rank \d\n\d\.\d\dx the mean", seen["tips"][name])
    assert (seen["hidden"], seen["shown"]) == ("none", "")
    assert seen["ground"] == ground
    assert seen["wide"] <= 0


def test_on_a_phone_nothing_sticks_out_and_wide_charts_stay_readable(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(small_report().replace("<title>", EARLY + "<title>").replace("</body>", LATE + "</body>"))
    seen = visit(path, f"--user-data-dir={tmp_path / 'profile'}", size="500,900")
    assert seen["problems"] == []
    assert seen["wide"] <= 0
    for name in ("par", "moves", "pareto"):
        assert seen["charts"][name][0] >= 600, name
