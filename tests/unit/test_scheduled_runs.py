"""The pages about scheduled runs: their files, checked by real programs and started as a scheduler would."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import papermill
import pytest
from local_server import serve
from places import ROOT
from typer.testing import CliRunner

from cookbook_npu.cli import app, find_notebook
from cookbook_npu.config import RunConfig
from cookbook_npu.plan.plan import make_plan
from cookbook_npu.recipes import find_recipe
from cookbook_npu.runs.folder import RunFolder, append_line
from cookbook_npu.stop import EXIT_STOPPED

pytestmark = pytest.mark.lane("schedulers")

PAGES = ROOT / ".docs" / "pages" / "howto"
FILE = re.compile(r"^```\{code-block\}.*?\n:caption: (\S+)\n\n(.*?)^```$", re.M | re.S)
CALL = '#!/bin/sh\necho "$@" >> "$HOME/calls"\n'


def text_of(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def files_of(name: str) -> dict[str, str]:
    "Name -> content of the files of a page"
    return {found[1]: found[2] for found in FILE.finditer(text_of(name))}


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755 if text.startswith("#!") else 0o644)


@pytest.fixture
def home(tmp_path) -> Path:
    "A home folder as the page describes it, with this package in place of an installed one"
    for name, text in files_of("schedule").items():
        if name != "notify.txt":
            script(tmp_path / "nightly" / name, text)
    python = f'PYTHONPATH="{ROOT}" exec "{sys.executable}"'
    binaries = tmp_path / "cookbook_npu" / ".venv" / "bin"
    script(binaries / "cookbook-npu", f'{CALL}{python} -m cookbook_npu.cli "$@"\n')
    return tmp_path


def cron(home: Path) -> int:
    "Run the line of the page as cron does; returns its exit code"
    line = crontab_line().split(maxsplit=5)[5].replace(r"\%", "%")
    bare = {"HOME": str(home), "PATH": "/usr/bin:/bin", "LOGNAME": "me", "SHELL": "/bin/sh"}
    return subprocess.run(["/bin/sh", "-c", line], env=bare, cwd=home).returncode


def crontab_line() -> str:
    (line,) = re.findall(r"^```text\n(\d.*)\n```$", text_of("schedule"), re.M)
    return line


def calls(home: Path) -> list[str]:
    file = home / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_the_line_of_cron_starts_the_run_in_its_bare_environment(home):
    parameters = {"prompt_data": "/no/such.jsonl"}
    (home / "nightly" / "parameters.json").write_text(json.dumps(parameters))
    assert cron(home) == 2
    (log,) = (home / "nightly").glob("log-2*.txt")
    assert "/no/such.jsonl does not exist" in log.read_text()
    assert calls(home) == ["run qwen3_4b_colocate -f parameters.json"]


def test_a_second_start_is_refused(home):
    lock = home / "nightly" / "lock"
    held = subprocess.Popen(
        ["flock", "-n", "-o", lock, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    held.stdin.write(b"locked\n")
    held.stdin.flush()
    assert held.stdout.readline() == b"locked\n"  # by now it has the lock
    assert cron(home) == 73
    assert calls(home) == []
    held.communicate()
    script(home / "cookbook_npu/.venv/bin/cookbook-npu", f"{CALL}exit 0\n")
    assert cron(home) == 0
    assert len(calls(home)) == 1


def test_the_exit_codes_are_those_of_the_program():
    rows = re.findall(r"^\| ([\d, ]+) \|", text_of("schedule"), re.M)
    codes = [int(code) for row in rows for code in row.split(", ")]
    assert codes == [0, 1, 2, 73, EXIT_STOPPED, 128 + 1, 128 + 2, 128 + 15, 128 + 9]
    assert "-E 73 " in crontab_line()
    assert f"SuccessExitStatus={EXIT_STOPPED}\n" in files_of("schedule")["nightly.service"]


def test_a_percent_sign_is_escaped_for_cron(tmp_path):
    line = crontab_line()
    assert not re.search(r"(?<!\\)%", line)
    assert re.fullmatch(r"\d+ \d+ \* \* \* .+", line)
    if not shutil.which("crontab"):
        pytest.skip(
            "Debian's cron is not installed: its own check of the line was left out"
        )
    (tmp_path / "tab").write_text(line + "\n")
    subprocess.run(["crontab", "-n", tmp_path / "tab"], check=True)


def test_systemd_accepts_the_units(home):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    units = ["nightly/nightly.service", "nightly/nightly.timer"]
    env = os.environ | {"HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *units],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


class Recorder(BaseHTTPRequestHandler):
    "Keeps what is posted"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append(json.loads(body))
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize(
    ("code", "kind"), [(0, "success"), (75, "warning"), (1, "failure")]
)
def test_apprise_tells_how_the_run_ended(home, code, kind):
    found = importlib.util.find_spec("apprise")
    if not found:
        pytest.skip("apprise is not installed: pip install apprise")
    place = Path(found.origin).parents[1]
    python = f'PYTHONPATH="{place}" exec "{sys.executable}"'
    binaries = home / "cookbook_npu" / ".venv" / "bin"
    script(binaries / "cookbook-npu", "#!/bin/sh\necho last line of the list\n")
    call = "from apprise.cli import main; main()"
    script(binaries / "apprise", f"#!/bin/sh\n{python} -c '{call}' \"$@\"\n")
    given = files_of("schedule")["notify.txt"]
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "EXIT_STATUS": str(code)}
    posted = []
    with serve(Recorder, posted=posted) as address:
        port = address.rpartition(":")[2]
        (home / "nightly" / "notify.txt").write_text(given.replace("8080", port))
        done = subprocess.run([home / "nightly" / "after.sh"], env=env, cwd="/")
    assert done.returncode == code
    (body,) = posted
    assert body["title"] == f"nightly run: exit code {code}"
    assert (body["message"], body["type"]) == ("last line of the list", kind)


@pytest.mark.parametrize(
    ("ended", "code"), [("0", 0), ("75", 75), ("KILL", 137), ("TERM", 143)]
)
def test_systemd_gives_a_signal_by_its_name(home, ended, code):
    binaries = home / "cookbook_npu" / ".venv" / "bin"
    script(binaries / "cookbook-npu", "#!/bin/sh\necho last line of the list\n")
    script(binaries / "apprise", CALL)
    (home / "nightly" / "notify.txt").write_text("json://127.0.0.1:9/")
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "EXIT_STATUS": ended}
    done = subprocess.run(
        [home / "nightly" / "after.sh"], env=env, cwd="/", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, "")
    (call,) = calls(home)
    assert call.endswith(f"--title nightly run: exit code {code}")


def test_old_runs_are_said_first_and_then_removed(tmp_path):
    for number in range(3):
        output = {"root": str(tmp_path / "runs"), "name": f"night-{number}"}
        config = RunConfig(recipe="qwen3_4b_colocate", num_steps=1, output=output)
        with RunFolder.create(config) as run:
            append_line(run.metrics_file, {"step": 1, "raw_reward": 0.5})
        os.utime(run.config_file, (1e9 + number,) * 2)
        os.utime(run.metrics_file, (1e9 + number,) * 2)
    words = ["runs", str(tmp_path / "runs"), "--keep", "1"]
    said = CliRunner().invoke(app, words)
    assert "2 of 3 runs would be removed; add --remove" in said.output
    assert len(list((tmp_path / "runs").iterdir())) == 3
    CliRunner().invoke(app, [*words, "--remove"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["night-2"]
    assert "Give --keep N" in str(
        CliRunner().invoke(app, [*words[:2], "--remove"]).exception
    )


def test_papermill_alone_refuses_a_parameter_that_the_notebook_does_not_have(tmp_path):
    "It only warns itself; the cell below the parameters ends the notebook before anything starts"
    recipe = ROOT / "recipes" / "qwen3_4b_colocate.ipynb"
    with pytest.raises(papermill.PapermillExecutionError, match="Did you mean 'num_steps'"):
        papermill.execute_notebook(
            recipe,
            tmp_path / "out.ipynb",
            {"num_step": 3},
            cwd=tmp_path,
            progress_bar=False,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]


def test_the_job_of_modelarts_names_what_the_page_has():
    files = files_of("schedule_modelarts")
    job = json.loads(files["job.json"])
    command = job["algorithm"]["command"]
    words = re.fullmatch(r"bash -ic 'cookbook-npu run (\S+) -f (\S+)'", command)
    assert find_notebook(words[1])
    folder = job["spec"]["volumes"][0]["nfs"]["local_path"]
    assert words[2] == f"{folder}/parameters.json"
    parameters = json.loads(files["parameters.json"])
    config = find_recipe(words[1])(**parameters)
    assert config.scale == "910b" and config.output.root.startswith(folder)
    assert parameters["model"].startswith(folder)


PAGES_WITH_A_LIMIT = [
    page for page in PAGES.parent.rglob("*.md") if '"auto_stop"' in page.read_text()
]


@pytest.mark.parametrize("page", PAGES_WITH_A_LIMIT, ids=lambda page: page.parent.name)
def test_a_night_fits_the_time_limit_of_its_job(page):
    "By the plan of the page's own parameters, with evaluations"
    files = dict(FILE.findall(page.read_text()))
    job = json.loads(files["job.json"])
    recipe = re.search(r"run (\S+) -f", job["algorithm"]["command"])[1]
    plan = make_plan(find_recipe(recipe)(**json.loads(files["parameters.json"])))
    limit = job["spec"]["auto_stop"]
    assert limit["time_unit"] == "HOURS"
    plan.check_hours(limit["duration"])
    assert plan.evaluation and plan.warnings == []
    assert f" {plan.run_seconds() / 3600:.1f} " in page.read_text()


def test_a_page_has_a_time_limit():
    assert {page.parent.name for page in PAGES_WITH_A_LIMIT} == {"howto", "zh"}


def test_huaweis_sdk_knows_the_job():
    models = pytest.importorskip(
        "huaweicloudsdkmodelarts.v1", reason="huaweicloudsdkmodelarts is not installed"
    )
    from modelarts_server import unknown_keys

    job = json.loads(files_of("schedule_modelarts")["job.json"])
    assert unknown_keys(models.Job, job) == []
    assert unknown_keys(models.Job, {"spec": {"resources": {}}}) == ["resources"]
