"""The report and the page of all runs in a real browser, as wide as a screen and as a phone

Nothing sticks out, nothing is logged, nothing is fetched."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cookbook_npu.config import RunConfig
from cookbook_npu.data.tasks import generated_task
from cookbook_npu.recipes import qwen3_vl_8b_grpo
from cookbook_npu.runs.folder import RunFolder, append_line, write_json
from cookbook_npu.runs.listing import list_runs, runs_page
from cookbook_npu.runs.report import write_report

pytestmark = pytest.mark.lane("docs")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (1200, 420)
# at the page's end: what its own layout came to
PROBE = """<script>
const wide = [...document.querySelectorAll("section, header")].filter(
  (box) => box.getBoundingClientRect().right > innerWidth + 1);
const found = parent.document.createElement("pre");
found.textContent = JSON.stringify({
  width: innerWidth,
  content: document.documentElement.scrollWidth,
  wide: wide.map((box) => box.getAttribute("aria-labelledby")),
  fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
  scrolled: [...document.querySelectorAll(".scroll")].filter(
    (box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.innerText),
  dead: [...document.querySelectorAll("nav a")].filter(
    (link) => !document.getElementById(link.hash.slice(1))).map((link) => link.hash),
});
parent.document.body.append(found);
</script>"""
SHIM = {
    "name": "megatron.a_shim_with_a_long_name",
    "target": "megatron.core.tensor_parallel.random._set_cuda_rng_state." * 2,
    "state": "applied",
    "detail": "the sum of a uint32 view fails: " * 4,
    "reason": "a reason of some length, " * 8,
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "A run with all that a page can show, words of hostile length among it"
    config = RunConfig(
        recipe="demo", num_steps=200, output={"root": str(tmp_path_factory.mktemp("r"))}
    )
    record = {
        "group_id": "g",
        "loss_mask": [1, 0],
        "versions": [1, 2],
        "finish_reason": "stop",
        "text": "x" * 900,
        "reward": 0.5,
        "label": "L" * 300,
        "metadata": {"prompt": "<script>alert(1)</script>" + "p" * 400},
        "turns": [{"role": "policy"}, {"role": "observation"}],
    }
    with RunFolder.create(config) as run:
        run.save_stack(
            {"name": "simulated NPU", "count": 2, "simulated": True}, [SHIM] * 60
        )
        run.event("failure", error="e" * 500)
        run.save_settings(config)
        rows = [{"key": "data.prompt_data", "value": "v" * 300, "source": "s" * 200}]
        write_json(run.settings_file, [*run.settings(), *rows])
        for step in range(1, 201):
            row = {
                "step": step,
                "raw_reward": step / 200,
                "response_length_max": 9,
                "time/step": 1.0,
            }
            row |= {
                "response_length_mean": 3,
                "staleness/age_0_samples": 5,
                "time/rollout": 0.5,
            }
            append_line(run.metrics_file, row)
        run.save_samples(199, [record, record | {"reward": 0.0}, record | {"reward": 1.0}])
        return write_report(run)


def test_it_is_small_and_asks_nobody(page):
    text = page.read_text()
    assert len(text) < 2_000_000
    assert not re.search(r"<script|<link|@import|src=|url\(https?:", text)


def test_it_says_where_settings_came_from_and_whether_it_is_as_expected(page):
    text = page.read_text()
    assert re.search(r"num_steps</code></th>.*200</code>.*the notebook or program", text)
    assert "s" * 200 in text and "Everything else is at its default" in text
    # whether it is as expected is the first thing in the result
    result = text.index('<h2 id="result">')
    assert result < text.index("Not judged: no numbers are expected") < text.index("<dl")


def frames(page: str) -> str:
    "The page in frames of both widths: a window cannot be as narrow as a phone"
    content = html.escape(page.replace("</body>", PROBE + "</body>"))
    one = '<iframe style="width: {}px; height: 900px; border: 0" srcdoc="{}"></iframe>'
    return "<!doctype html><body>" + "".join(one.format(w, content) for w in WIDTHS)


def seen_in_a_browser(page: str, folder: Path, dark: bool) -> list[dict]:
    "What a browser makes of a page at each width; nothing sticks out, is fetched or complained of"
    probed = folder / "page.html"
    probed.write_text(frames(page))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1300,2000", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}"]
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(
        [*command, probed.as_uri()], capture_output=True, text=True, timeout=400, check=True
    )
    seen = [
        json.loads(html.unescape(t)) for t in re.findall(r"<pre>({.*?})</pre>", done.stdout)
    ]
    assert {s["width"] for s in seen} == set(WIDTHS), done.stdout[-500:]
    for s in seen:
        assert s["content"] <= s["width"], s
        assert s["wide"] == [] and s["fetched"] == [] and s["dead"] == [], s
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return seen


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: apt-get install chromium"
)
both_schemes = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@needs_browser
@both_schemes
def test_a_browser_shows_it(page, tmp_path, dark):
    seen_in_a_browser(page.read_text(), tmp_path, dark)


def run_with(root: Path, name: str, steps: int, end: str = "") -> None:
    "A run folder of 40 steps, some of which are done"
    output = {"root": str(root), "name": name}
    config = RunConfig(recipe="qwen3_4b_colocate", num_steps=40, output=output)
    with RunFolder.create(config) as run:
        for step in range(1, steps + 1):
            row = {"step": step, "raw_reward": -1e-5 * 7**step}
            append_line(run.metrics_file, row)
        if end:
            run.event(end)


@needs_browser
@both_schemes
def test_a_browser_shows_all_runs(tmp_path, dark):
    "Every state, a name and a reason of hostile length; nothing is cut, on a phone neither"
    root = tmp_path / "runs"
    for name, steps, end in (("a" * 200, 40, ""), ("b", 7, "stopped"), ("c", 12, "")):
        run_with(root, name, steps, end)
    run_with(root, "e", 1)
    (root / "e" / "config.json").write_text("{")
    config = RunConfig(recipe="demo", output={"root": str(root), "name": "d"})
    with RunFolder.create(config):
        page = runs_page(list_runs(root), root, root)
    for state in ("done", "stopped", "ended early", "running", "unreadable"):
        assert f">{state}</span>" in page
    for seen in seen_in_a_browser(page, tmp_path, dark):
        assert seen["scrolled"] == [], seen


def test_the_gallery_shows_the_pictures_that_a_sample_has_seen(tmp_path):
    "A drawn one is drawn again; one of an observation is in the record; both stand in the page"
    config = qwen3_vl_8b_grpo(overrides={"output.root": str(tmp_path)})
    problem = generated_task("triangles", config.data.task).train[3]
    shown = picture_url(problem.draw().crop((0, 0, 32, 32)))
    record = {
        "group_id": "g",
        "index": 0,
        "response_ids": [5, 6],
        "loss_mask": [1, 0],
        "versions": [0, 0],
        "finish_reason": "stop",
        "text": "3",
        "label": "3",
        "reward": 1.0,
        "turns": [{"role": "policy"}, {"role": "observation"}],
        "images": [f"triangles:{problem.name}", shown, "gone.png"],
        "metadata": {"prompt": "a="},
    }
    with RunFolder.create(config) as run:
        run.save_stack({"name": "simulated NPU", "count": 2, "simulated": True})
        run.save_samples(0, [record])
        text = write_report(run.path).read_text()
    sources = re.findall(r'<img src="(data:image/png;base64,[^"]+)"', text)
    assert sources == 2 * [picture_url(problem.draw().convert("RGB")), shown]
    assert "gone.png" in text and "without loss" in text


def picture_url(picture) -> str:
    "A picture as the page has it"
    content = io.BytesIO()
    picture.convert("RGB").save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
