"""The environment and the shell of a reader: what README's first command installs, and nothing of the tests.

`make setup` installs `.[laptop]`. Installing that again for each session would take minutes and gigabytes, so
the packages of this environment that belong to it, and no others, are linked into a new one.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from places import ROOT

from cookbook_npu.npu.simulator.fork_server import SERVERS_ENV

BLOCK = re.compile(r"^```(?P<head>.*?)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CAPTION = re.compile(r":caption: (\S+)\n\n")


SHOWN = (
    "json",
    "text",
    "python notebook",
)  # what a reader looks at, or types into a notebook


def command_lines(head: str, body: str) -> list[str]:
    "What is typed at once: a line, a loop, or a line and those that continue it"
    if head == "console":
        return [line[2:] for line in body.splitlines() if line.startswith("$ ")]
    return [line for line in re.split(r"\n(?! |done\b)", body) if line.strip()]


def blocks(page: Path) -> list[tuple[str, str]]:
    "(language or directive, text) of each fenced block"
    return [(m["head"].strip(), m["body"]) for m in BLOCK.finditer(page.read_text("utf-8"))]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def asked_packages(*extras: str) -> list[Requirement]:
    "What this package asks for; an extra may name others of its own"
    lines = [*PROJECT["dependencies"]]
    lines += [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    asked = [Requirement(line) for line in lines]
    own = {extra for r in asked if r.name == PROJECT["name"] for extra in r.extras}
    if own - set(extras):
        return asked_packages(*extras, *own - set(extras))
    return [r for r in asked if r.name != PROJECT["name"]]


def installed(*extras: str) -> list[Distribution]:
    "The distributions that `pip install -e '.[extras]'` installs"
    waiting = asked_packages(*extras)
    found: dict[str, tuple[Distribution, set[str]]] = {}
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        try:
            known, extras = found.setdefault(name, (distribution(name), {"none"}))
        except PackageNotFoundError:
            continue  # of another platform, or a CUDA library of a GPU build
        new = ({""} | wanted.extras) - extras
        extras |= new
        for line in known.requires or ():
            inner = Requirement(line)
            if any(not inner.marker or inner.marker.evaluate({"extra": e}) for e in new):
                waiting.append(inner)
    return [known for known, _ in found.values()]


def link_packages(folder: Path, *extras: str) -> Path:
    "A virtual environment with what this package and its extras ask for; returns its site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    links: dict[Path, Path] = {}  # each once: the packages have 60,000 files
    for known in installed(*extras):
        files = [file.parts for file in known.files or ()]
        for name in {parts[0] for parts in files} - {".."}:
            links.setdefault(site / name, Path(str(known.locate_file(name))))
        for parts in files:
            if parts[0] == ".." and "jupyter" in parts:  # kernel specifications
                link = folder.joinpath(*[part for part in parts if part != ".."])
                links[link] = Path(str(known.locate_file(Path(*parts)))).resolve()
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            link.symlink_to(target)
    return site


def make_environment(folder: Path) -> Path:
    "A virtual environment as README's first command leaves it; returns its folder"
    site = link_packages(folder, "laptop")
    (site / "cookbook_npu.pth").write_text(f"{ROOT}\n")
    script = folder / "bin" / "cookbook-npu"
    script.write_text(
        f"#!{folder}/bin/python\n"
        "import sys\nfrom cookbook_npu.__main__ import command\nsys.exit(command())\n"
    )
    script.chmod(0o755)
    return folder


class Reader:
    "Somebody who follows a page in a folder of their own"

    def __init__(self, environment: Path, folder: Path):
        self.folder = folder
        ours = ("PYTHON", "PYTEST", "COOKBOOK", "VIRTUAL_ENV", "JUPYTER", "RAY_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.env |= {
            "PATH": f"{environment}/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": str(environment),
            "COLUMNS": "100",
            # the runs of a session fork their workers from one server
            SERVERS_ENV: os.environ[SERVERS_ENV],
        }

    def type(self, line: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        "Run a line, or the text of a block, in the shell"
        words = ["bash", "-c", line]
        where = {"cwd": self.folder, "env": self.env}
        return subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, **where
        )

    def follow(
        self,
        page: Path,
        codes: dict[str, int] | None = None,
        left_out: tuple[str, ...] = (),
    ) -> list[str]:
        """Write the files, run the Python and type the commands of a page, in the order of its text

        `codes`: line -> exit code where it is not 0; `left_out`: how lines begin that are not typed.
        Returns the output of each line."""
        wanted = codes or {}
        shown = []
        for head, body in blocks(page):
            caption = CAPTION.match(body)
            if head.startswith("{code-block}"):
                assert caption, f"{page.name}: a file without a name"
                (self.folder / caption[1]).write_text(body[caption.end() :])
            elif head == "python":
                (self.folder / "typed.py").write_text(body)
                shown.append(self.check("python typed.py", 0))
            elif head in ("bash", "sh", "console"):
                lines = command_lines(head, body)
                for line in [one for one in lines if not one.startswith(left_out)]:
                    shown.append(self.check(line, wanted.get(line, 0)))
            else:
                assert head in SHOWN, f"{page.name}: a block {head!r} that nobody types"
        return shown

    def check(self, line: str, code: int) -> str:
        "The output of a line, NAME being the newest run and ID the newest job; fails at another exit code"
        for place, word in (("runs", "runs/NAME"), ("jobs", "launch ID")):
            known = [f for f in (self.folder / place).glob("*") if f.name[0] != "."]
            if known:
                newest = max(known, key=lambda run: run.stat().st_mtime).name
                line = line.replace(
                    word, word.replace("NAME", newest).replace("ID", newest)
                )
        done = self.type(line)
        text = done.stdout + done.stderr
        assert done.returncode == code, (
            f"{line}: exit code {done.returncode}\n{text[-4000:]}"
        )
        return text
