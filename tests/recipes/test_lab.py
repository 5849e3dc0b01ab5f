"""The recipe as a person runs it: JupyterLab in a real browser, the stop button, and what is to be seen then

Pictures of the screen lie in the folder of the test, which pytest keeps."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import nbformat
import pytest
from browser import missing_browser, open_browser
from places import ROOT

from cookbook_npu.config import RunConfig
from cookbook_npu.runs.folder import RunFolder, append_line

pytestmark = pytest.mark.lane("docs")

PAGE = ROOT / ".docs" / "pages" / "howto" / "resume.md"
# rewards that differ
SETTINGS = {
    "data.eval_prompts": 16,
    "algorithm.overlong_buffer_share": 0.9,
    "output.name": "lab",
}
# what only workers import
HEAVY = {"torch_npu", "mindspeed", "megatron", "vllm"}
LOADED = f"import sys\nprint('loaded:', sorted({HEAVY} & set(sys.modules)))"
NO_LAB = None if importlib.util.find_spec("jupyterlab") else "no JupyterLab: make lab"


def cells_of_the_page() -> list[str]:
    "What the how-to page has one type into cells"
    return re.findall(r"^```python notebook\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.fixture
def recipe(tmp_path) -> Path:
    "The recipe as it stands, but for fewer held-out prompts and the cells of the page"
    notebook = nbformat.read(ROOT / "recipes" / "qwen3_4b_colocate.ipynb", 4)
    parameters = next(
        c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())
    )
    line = "overrides: Optional[dict] = None"
    assert line in parameters.source
    parameters.source = parameters.source.replace(line, f"overrides = {SETTINGS}")
    path = tmp_path / "work" / "qwen3_4b_colocate.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    return path


@contextmanager
def jupyter_lab(folder: Path, tmp_path: Path) -> Iterator[str]:
    "The address of a JupyterLab that knows nothing of this user's settings, with a place for a file"
    folders = {
        f"JUPYTER_{name}_DIR": str(tmp_path / name)
        for name in ("CONFIG", "DATA", "RUNTIME")
    }
    folders |= {
        f"JUPYTERLAB_{name}_DIR": str(tmp_path / name)
        for name in ("SETTINGS", "WORKSPACES")
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | folders | {"PYTHONPATH": path, "JUPYTER_PREFER_ENV_PATH": "1"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--LabApp.news_url="]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += re.findall(r"--ContentsManager\S+", (ROOT / "Makefile").read_text())
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            yield address(server, tmp_path / "RUNTIME")
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture
def lab(recipe, tmp_path):
    with jupyter_lab(recipe.parent, tmp_path) as place:
        yield place.format(recipe.name)


@pytest.mark.skipif(bool(NO_LAB), reason=NO_LAB or "")
def test_the_pages_that_readme_names_open_in_make_lab(tmp_path):
    pages = re.findall(r"\]\((\.docs/[^)#]+)", (ROOT / "README.md").read_text())
    assert len(pages) > 3
    with jupyter_lab(ROOT, tmp_path) as place:
        for page in pages:
            url = place.format(page).replace("/lab/tree/", "/api/contents/")
            assert json.loads(urlopen(url).read())["type"] == "file", page


def address(server: subprocess.Popen, runtime: Path) -> str:
    "Where a server listens, as it writes it down itself"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended: see server.log"
        for file in runtime.glob("jpserver-*.json"):
            told = json.loads(file.read_text() or "{}")
            if told:
                return f"{told['url']}lab/tree/{{}}?token={told['token']}"
        time.sleep(0.1)
    raise AssertionError("no server within two minutes")


class Person:
    "Who looks at a notebook in JupyterLab, types and clicks"

    def __init__(self, driver, folder: Path):
        self.driver = driver
        self.folder = folder  # of the screenshots

    def find(self, selector: str, text: str = ""):
        "The first element of a selector whose text holds a text; none: there is none"
        elements = self.driver.find_elements("css selector", selector)
        return next((e for e in elements if text in e.text), None)

    def wait(self, what, timeout: float = 240):
        "Look until there is something to see, and return it"
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        # JupyterLab draws again while it is looked at
        again = [StaleElementReferenceException]
        wait = WebDriverWait(self.driver, timeout, 0.02, ignored_exceptions=again)
        return wait.until(lambda _: what())

    def see(self, text: str, timeout: float = 240) -> None:
        "Wait for a text among the outputs"
        self.wait(lambda: text in self.outputs(), timeout)

    def outputs(self) -> str:
        "All outputs, also those out of sight, whose innerText is empty"
        script = (
            "return [...document.querySelectorAll('.jp-OutputArea-output')]"
            ".map((o) => o.textContent).join('\\n')"
        )
        return self.driver.execute_script(script)

    def idle(self) -> None:
        "Wait until the kernel has nothing to do"
        idle = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
        self.wait(lambda: self.find(idle))

    def click(self, selector: str, text: str = "") -> None:
        "Click on what is there"

        def clicked() -> bool:
            found = self.find(selector, text)
            if found is not None:
                found.click()
            return found is not None

        self.wait(clicked, 60)

    def press(self, *keys: str) -> None:
        "Press keys, one after another"
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def paste(self, text: str) -> None:
        "Put a text where the cursor is"
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})

    def change_line(self, beginning: str, text: str) -> None:
        "Write something else in a line of code"
        from selenium.webdriver import ActionChains, Keys

        self.click(".cm-line", beginning)
        ActionChains(self.driver).send_keys(Keys.HOME).key_down(Keys.SHIFT).send_keys(
            Keys.END
        ).key_up(Keys.SHIFT).perform()
        self.paste(text)

    def run_all(self) -> None:
        "The menu's Run, Run All Cells"
        self.click(".lm-MenuBar-item", "Run")
        self.click(".lm-Menu-item", "Run All Cells")

    def run_below(self, code: str) -> None:
        "A new cell with some code, executed"
        from selenium.webdriver import Keys

        self.press(Keys.ESCAPE, "b", Keys.ENTER)
        self.paste(code)
        self.run()

    def run(self) -> None:
        "Execute the cell with the cursor, which stays there"
        from selenium.webdriver import ActionChains, Keys

        held = ActionChains(self.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER)
        held.key_up(Keys.CONTROL).perform()

    def stop(self) -> None:
        "The stop button of the toolbar"
        self.click("[data-command='notebook:interrupt-kernel']")

    def show(self, text: str) -> None:
        "Scroll to an output"
        script = (
            "[...document.querySelectorAll('.jp-OutputArea-output')]"
            ".find((o) => o.textContent.includes(arguments[0])).scrollIntoView()"
        )
        self.driver.execute_script(script, text)

    def go_to_the_end(self) -> None:
        "The last cell of the notebook"
        self.driver.find_elements("css selector", ".jp-Notebook .jp-Cell")[-1].click()

    def errors(self) -> str:
        "What cells say that ended with an exception"
        selector = "[data-mime-type='application/vnd.jupyter.stderr']"
        found = self.driver.find_elements("css selector", selector)
        return "\n".join(e.get_property("textContent") for e in found)

    def curves(self) -> int:
        "How many figures there are"
        return len(self.driver.find_elements("css selector", ".jp-RenderedImage img"))

    def take_picture(self, name: str) -> None:
        self.driver.save_screenshot(str(self.folder / f"{name}.png"))


@pytest.fixture
def person(lab, tmp_path):
    with open_browser(tmp_path / "profile") as driver:
        driver.get(lab)
        yield Person(driver, tmp_path)


@pytest.mark.lane("runs")
@pytest.mark.skipif(bool(NO_LAB), reason=NO_LAB or "")
@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "")
def test_the_recipe_is_run_stopped_and_gone_on_with(person, recipe):
    opening, stepping, closing = cells_of_the_page()
    person.idle()
    person.change_line("num_steps: Optional[int]", "num_steps: Optional[int] = 3")
    # a step that is long enough for a click
    person.change_line(
        "prompts_per_step: Optional[int]", "prompts_per_step: Optional[int] = 128"
    )
    person.run_all()
    person.see("step 1 of 3")
    person.stop()
    person.idle()
    stopped = re.search(r"RunStopped: stopped at step (\d) of 3; .*", person.outputs())
    assert stopped and int(stopped[1]) < 3
    assert "resume with: cookbook-npu run --resume" in stopped[0]
    assert "(ended early)" in person.outputs() and "Traceback" not in person.outputs()
    person.show("(ended early)")
    person.take_picture("curves")
    person.show("RunStopped")
    person.take_picture("stopped")
    # a line of IPython's, and two of ours
    assert len([line for line in person.errors().splitlines() if line]) == 3
    assert "or in this notebook: session(config, resume=" in person.errors()
    assert person.curves() == 1

    person.click(".cm-line", "for _ in run.steps()")  # the cell of the run, once more
    person.run()
    person.see("session(config, fresh=True)")
    person.idle()

    person.go_to_the_end()
    person.run_below(opening)
    person.see(f"resuming {recipe.parent / 'runs' / 'lab'} from step {stopped[1]}")
    person.idle()
    person.run_below(stepping)
    first = int(stopped[1]) + 1
    person.see(f"step {first}: reward")
    person.stop()
    person.idle()
    again = re.search(r"RunStopped: stopped at step (\d+) of 12", person.outputs())
    assert again and first <= int(again[1]) < 12
    # the bar stands where the run does
    assert f"step {again[1]} of 12, " in person.outputs()
    person.take_picture("stopped_again")

    person.click(".cm-line", "for row in run.steps()")  # the same cell
    person.run()
    person.see("step 12: reward")
    person.idle()
    person.run_below(closing)
    person.run_below(LOADED)
    person.see("loaded: []")
    person.take_picture("end")
    rows = (recipe.parent / "runs" / "lab" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert [step for step in steps if step] == list(range(1, 13)), "each step once"


HEADING = "return document.getElementById(arguments[0]).getBoundingClientRect().top"
FRAME_HEIGHT = 640  # px


def result_of_a_run(folder: Path) -> Path:
    "A notebook in recipes/ that shows the result of a run beside it"
    config = RunConfig(recipe="demo", output={"root": str(folder / "runs"), "name": "demo"})
    record = {"group_id": "g", "loss_mask": [1], "versions": [1], "finish_reason": "stop"}
    record |= {"text": "5", "reward": 0.5, "label": "5", "metadata": {"prompt": "2+3="}}
    with RunFolder.create(config) as run:
        run.save_stack({"name": "simulated NPU", "count": 2, "simulated": True}, [])
        run.save_settings(config)
        for step in (1, 2):
            append_line(
                run.metrics_file, {"step": step, "raw_reward": 0.5, "time/step": 1.0}
            )
        run.save_samples(1, [record, record | {"reward": 0.0}])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    code = "from cookbook_npu import show_result\n\nshow_result('demo')"
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    path = folder / "recipes" / "links.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    return path


@pytest.mark.skipif(bool(NO_LAB), reason=NO_LAB or "")
@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "")
def test_every_link_of_a_result_leads_somewhere(tmp_path):
    "The report opens, and its own links scroll in the frame; a page of a notebook server opens no other file"
    work = tmp_path / "work"
    work.mkdir()
    result_of_a_run(work)
    with jupyter_lab(work, tmp_path) as lab, open_browser(tmp_path / "profile") as driver:
        driver.get(lab.format("recipes/links.ipynb"))
        person = Person(driver, tmp_path)
        person.idle()
        person.run_all()
        person.see("not judged")
        person.take_picture("result")

        def frame_links() -> list:
            driver.switch_to.default_content()
            driver.switch_to.frame(driver.find_element("css selector", "iframe[srcdoc]"))
            return driver.find_elements("css selector", "a[href]")

        for number in range(len(frame_links())):
            link = frame_links()[number]
            target = link.get_dom_attribute("href").partition("#")[2]
            link.click()
            top = driver.execute_script(HEADING, target)
            assert target and -1 < top < FRAME_HEIGHT, f"{target}: {top}"
        driver.switch_to.default_content()
        person.click(".jp-OutputArea-output a", "report.html")
        person.wait(lambda: person.find(".jp-HTMLViewer iframe"), 60)
        driver.switch_to.frame(person.find(".jp-HTMLViewer iframe"))
        person.wait(lambda: person.find("p.kind", "run report"), 60)


@pytest.mark.skipif(bool(NO_LAB), reason=NO_LAB or "")
@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "")
def test_opening_and_saving_changes_nothing(tmp_path):
    "All but the version of Python, the kernel's; JupyterLab saves only what was touched"
    work = tmp_path / "work"
    shutil.copytree(ROOT / "recipes", work / "recipes")
    copy = work / "recipes" / "qwen3_4b_colocate.ipynb"
    before = copy.read_text(encoding="utf-8")
    os.utime(copy, (0, 0))
    with jupyter_lab(work, tmp_path) as lab, open_browser(tmp_path / "profile") as driver:
        driver.get(lab.format(f"recipes/{copy.name}"))
        person = Person(driver, tmp_path)
        person.idle()
        for name in ("notebook:insert-cell-below", "notebook:cut-cell", "docmanager:save"):
            person.click(f"[data-command='{name}']")
        person.wait(lambda: copy.stat().st_mtime > 0, 60)
        person.wait(lambda: not person.find(".jp-mod-dirty"), 60)
    version = re.compile(r'(?<="version": ")3\.\d+\.\d+(?=")')
    after = copy.read_text(encoding="utf-8")
    assert version.sub("", after) == version.sub("", before)
