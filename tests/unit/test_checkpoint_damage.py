"""Damaged run folders: every bit of what a run goes on from, every cut, and links where files should be."""

import json
import os
import random
import shutil
from contextlib import contextmanager

import pytest

from cookbook_npu.config import RunConfig
from cookbook_npu.data.prompts import EpochOrder, PromptDataset
from cookbook_npu.data.sample import Prompt
from cookbook_npu.errors import DataError
from cookbook_npu.runs.checkpoints import Checkpoint, Checkpoints, read_checkpoint
from cookbook_npu.runs.folder import RunFolder, append_line, read_lines
from cookbook_npu.runs.metrics import load_metrics
from cookbook_npu.train.recovery import open_folder

CONTENT = {
    "empty": b"",
    "an object": b"{}",
    "a list": b"[]",
    "null": b"null",
    "zeros": bytes(600),
    "nested": b"[" * 100_000,
    "digits": b'{"step": ' + b"9" * 5000 + b"}",
    "surrogate": b'{"step": "\\ud800"}',
}


def driver_state() -> dict:
    "That of a run under way: some prompts are done, others in flight"
    order = EpochOrder([Prompt(prompt_id=f"p:{i}", ids=[i], text=str(i)) for i in range(9)])
    prompts = PromptDataset(order)
    prompts.next_draws(7)
    for number, outcome in {0: "trained", 1: "trained", 3: "dropped", 4: "dropped"}.items():
        prompts.end_draw(number, outcome)
    return {"version": 8, "prompts": prompts.state()}


def configure(root, name="run", **more) -> RunConfig:
    output = {"root": str(root), "name": name, **more}
    return RunConfig(recipe="demo", output=output)


@pytest.fixture
def run(tmp_path):
    "A run folder with the checkpoints 7 and 8"
    with RunFolder.create(configure(tmp_path)) as folder:
        store = Checkpoints.of_run(folder)
        for step in range(3):
            append_line(folder.metrics_file, {"step": step, "raw_reward": 0.5})
            folder.save_samples(step, [{"text": "42"}] * 2)
        for step in (7, 8):
            partial = store.partial(step)
            (partial / "state").mkdir()
            for rank in range(2):
                file = partial / "state" / f"__{rank}_0.distcp"
                file.write_bytes(bytes([step, rank] * 50))
            store.commit(partial, step, driver_state())
    return RunFolder.open(folder.path)


def flips(data: bytes, every: int = 1):
    "The data with one bit changed, for every bit"
    for bit in range(0, 8 * len(data), every):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@contextmanager
def rewriting(file):
    "A function that gives a file another content, without the flush that emptying it first would cost"
    with open(file, "r+b", buffering=0) as stream:

        def rewrite(data: bytes) -> None:
            os.pwrite(stream.fileno(), data, 0)
            stream.truncate(len(data))

        yield rewrite


def same(content, other) -> bool:
    "Equal as JSON, where 1, 1.0 and true differ"
    return json.dumps(content, sort_keys=True) == json.dumps(other, sort_keys=True)


def contents(checkpoint: Checkpoint) -> list:
    return [checkpoint.step, checkpoint.driver_state, checkpoint.files]


def read_newest(run: RunFolder):
    "(newest good checkpoint, what was skipped and why)"
    skipped = []
    newest = Checkpoints.of_run(run).newest_valid(
        lambda path, why: skipped.append((path, why))
    )
    return newest, skipped


def test_no_changed_bit_and_no_cut_of_a_manifest_is_read_as_something_else(run):
    manifest = run.checkpoints / "step_000008" / "manifest.json"
    written = manifest.read_bytes()
    identity = run.identity()
    want = read_checkpoint(manifest.parent, identity)
    assert want.step == 8 and same(want.driver_state, driver_state())
    assert len(written) > 600  # a real one
    damaged = [*flips(written), *(written[:size] for size in range(len(written)))]
    refused = []
    with rewriting(manifest) as rewrite:
        for data in damaged:
            rewrite(data)
            try:
                found = read_checkpoint(manifest.parent, identity)
                assert same(contents(found), contents(want)), data
            except DataError as error:
                assert error.what.startswith(f"{manifest} "), error
                refused.append(data)
    # the rest are spaces that became other spaces
    assert refused and len(refused) > 0.98 * len(damaged)
    for data in refused[:: len(refused) // 40]:
        manifest.write_bytes(data)
        newest, skipped = read_newest(run)
        assert newest.step == 7
        assert [path for path, _ in skipped] == [manifest.parent]


@pytest.mark.parametrize("content", CONTENT.values(), ids=CONTENT)
def test_a_run_goes_on_from_the_older_checkpoint_and_says_why(run, tmp_path, content):
    manifest = run.checkpoints / "step_000008" / "manifest.json"
    manifest.write_bytes(content)
    folder, checkpoint = open_folder(configure(tmp_path, resume=True))
    with folder:
        assert checkpoint.step == 7
        events = read_lines(folder.events_file)
        found = [e for e in events if e["kind"] == "checkpoint_skipped"]
        assert [e["path"] for e in found] == [str(manifest.parent)]
        assert found[0]["why"].startswith(f"{manifest} ")


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def dangling(path):
    path.unlink()
    path.symlink_to("nothing")


def linked(path):
    "The same content, through a link"
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


@pytest.mark.parametrize("damage", [fifo, folder, dangling, linked, os.unlink])
@pytest.mark.parametrize("name", ["manifest.json", "state/__0_0.distcp"])
def test_what_is_no_file_is_skipped(run, damage, name):
    file = run.checkpoints / "step_000008" / name
    damage(file)
    newest, skipped = read_newest(run)
    assert newest.step == 7
    assert str(run.checkpoints / "step_000008") in skipped[0][1]


@pytest.mark.parametrize("name", ["step_000008", "step_000008/state"])
def test_a_link_to_a_folder_is_never_followed(run, name):
    linked(run.checkpoints / name)
    newest, skipped = read_newest(run)
    assert newest.step == 7
    assert f"{name} is a link" in skipped[0][1]


def test_a_checkpoint_of_another_run_is_refused_by_name(run, tmp_path):
    with RunFolder.create(configure(tmp_path, "other")) as other:
        shutil.copytree(run.checkpoints / "step_000008", other.checkpoints / "step_000008")
        newest, skipped = read_newest(other)
        assert newest is None
        ids = f"of run {run.identity().run}, not of run {other.identity().run}"
        assert ids in skipped[0][1]
        assert Checkpoints.of_run(other).prune(keep_last=1) == []


@pytest.mark.parametrize("name, every", [("config.json", 37), ("run.json", 3)])
def test_no_changed_bit_of_the_configuration_is_read_as_another(run, name, every):
    want = run.config()
    file = run.path / name
    written = file.read_bytes()
    refused = 0
    with rewriting(file) as rewrite:
        for data in [*flips(written, every), *CONTENT.values(), written[:-9]]:
            rewrite(data)
            try:
                assert run.config() == want, data
            except DataError as error:
                assert name in error.what
                refused += 1
    assert refused > 8 * len(written) // every * 0.75


def test_nothing_is_written_through_a_link(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    mine = outside / "mine"
    with RunFolder.open(run.path, write=True) as writing:
        # put there while the run is under way
        for file in (writing.metrics_file, writing.events_file, writing.stack_file):
            mine.write_text("mine")
            file.unlink(missing_ok=True)
            file.symlink_to(mine)
        shutil.move(writing.samples, outside / "samples")
        writing.samples.symlink_to(outside / "samples")
        for write in (
            lambda: append_line(writing.metrics_file, {"step": 9}),
            lambda: writing.event("late"),
            lambda: writing.save_stack({"name": "simulated NPU"}),
            lambda: writing.save_samples(9, [{"text": "42"}]),
        ):
            with pytest.raises(DataError, match="is a link"):
                write()
        assert mine.read_text() == "mine"
        assert len(list((outside / "samples").iterdir())) == 3
    for opened in (
        lambda: RunFolder.open(run.path, write=True),
        lambda: load_metrics(run.path),
        lambda: run.load_samples(0),
    ):
        with pytest.raises(DataError, match="is a link"):
            opened()


def test_a_damaged_layout_is_told(tmp_path):
    "Single bits and cuts of Megatron's two small files: the right layout, or an error that names the folder"
    pytest.importorskip("megatron.core")
    import torch

    from cookbook_npu.model.checkpoint import saved_layout

    saved = {"tensor": 2, "data": 2}  # as written before expert and pipeline parallelism
    layout = {**saved, "context": 1, "pipeline": 1, "expert": 1, "expert_tensor": 2}
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in backends}
    (tmp_path / "metadata.json").write_text(json.dumps(backends | versions))
    torch.save({"layout": saved}, tmp_path / "common.pt")
    assert saved_layout(tmp_path) == layout
    choose = random.Random(0)
    told = 0
    for name in ("common.pt", "metadata.json"):
        whole = (tmp_path / name).read_bytes()
        for number in range(200):
            damaged = bytearray(whole)
            if number % 2:
                del damaged[choose.randrange(len(whole)) :]
            else:
                damaged[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
            (tmp_path / name).write_bytes(damaged)
            try:
                assert saved_layout(tmp_path) == layout
            except DataError as error:
                assert f"{tmp_path} is not a trainer checkpoint" in str(error)
                told += 1
        (tmp_path / name).write_bytes(whole)
    assert told > 200
