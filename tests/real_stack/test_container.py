"""Each RUN line of the container's Dockerfile, as docker runs it: in order, in a root file system that is
thrown away. The published image is replaced by the lane's environment, which has its packages from the index.
"""

import re
import shlex
import subprocess

import pytest
from conftest import MINDSPEED
from places import ROOT
from real_stack import environment

DOCKERFILE = ROOT / ".devcontainer/910b/Dockerfile"
# instructions that no line below executes, and why
NOT_EXECUTED = {
    "FROM ${IMAGE}": "no image registry can be reached: no digest of an image is known here",
    "SHELL": "its words run the lines after it",
    "CMD": "what `docker run` starts",
    "USER": "docker's own; the user is made by a RUN line",
}
CHROOT = r"""
set -e
mount -t tmpfs -o size=2g tmpfs {scratch}
mkdir {scratch}/upper {scratch}/work {scratch}/root
mount -t overlay overlay -o lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work {scratch}/root
mount --rbind /dev {scratch}/root/dev
mount -t proc proc {scratch}/root/proc
cp -r {copy} {scratch}/root/opt/cookbook_npu
# the image has torch's build for CPUs, which asks for none of these
sed -i '/^Requires-Dist: \(nvidia\|triton\|cuda\)/d' {scratch}/root/{site}/torch-*.dist-info/METADATA
exec chroot {scratch}/root /bin/bash {script}
"""


def instructions() -> list[tuple[str, str]]:
    "(word, rest) of each instruction"
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (w, rest.strip())
        for w, _, rest in (x.partition(" ") for x in joined.splitlines() if x)
    ]


def script(values: dict[str, str]) -> str:
    "A shell script of the Dockerfile; `values` are build arguments"
    # the image has no user 1000; this machine may have one
    taken = "user=$(getent passwd 1000 | cut -d: -f1); test -z $user || userdel $user"
    found, shell = ["set -ex", taken], ["/bin/sh", "-c"]
    for word, rest in instructions():
        name, _, default = rest.partition("=")
        if word == "ARG" and (name in values or default):
            found.append(f"export {name}={values.get(name, default)}")
        elif word == "WORKDIR":
            found.append(f"mkdir -p {rest} && cd {rest}")
        elif word == "SHELL":
            shell = eval(rest)
        elif word == "RUN":
            found.append(shlex.join([*shell, rest]))
        elif word == "FROM":
            shell = shell if rest.startswith("cookbook") else ["/bin/sh", "-c"]
    return "\n".join(
        [*found, "set +x", "getent passwd ma-user", "tail -n 1 /etc/bash.bashrc"]
    )


def test_every_instruction_is_executed_or_listed():
    words = {word for word, _ in instructions()} - {"ARG", "WORKDIR", "RUN", "COPY", "FROM"}
    assert words == {key for key in NOT_EXECUTED if " " not in key}


def test_run_lines_of_the_container(with_mindspeed, tmp_path):
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"])
    if probe.returncode:
        pytest.skip("this user may not mount file systems of its own")
    (tmp_path / "scratch").mkdir()
    copy, source = tmp_path / "copy", tmp_path / "MindSpeed.git"
    subprocess.run(["git", "clone", "-q", ROOT, copy], check=True)
    upstream = f"{with_mindspeed.environment()['COOKBOOK_UPSTREAM']}/{MINDSPEED}"
    subprocess.run(["git", "clone", "-q", "--bare", upstream, source], check=True)
    git = ["git", "-C", source, "branch", "-f", "core_r0.16.0", "HEAD"]
    subprocess.run(git, check=True)
    (tmp_path / "build.sh").write_text(script({"MINDSPEED_URL": f"file://{source}"}))
    outer = CHROOT.format(
        scratch=tmp_path / "scratch",
        copy=copy,
        script=tmp_path / "build.sh",
        site=environment.site(environment.DEFAULT),
    )
    python = environment.venv(environment.DEFAULT) / "bin"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "/bin/bash", "-c", outer],
        env={"PATH": f"{python}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "Successfully installed cookbook-npu" in done.stdout
    assert "Successfully installed mindspeed" in done.stdout
    user, bashrc = done.stdout.splitlines()[-2:]
    assert user.startswith("ma-user:x:1000:100:") and "atb/set_env.sh" in bashrc
    assert not (ROOT / "cookbook_npu.egg-info").exists()
