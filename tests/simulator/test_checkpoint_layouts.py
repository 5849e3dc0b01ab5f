"""A resumed run repeats the steps: bit for bit at the same layout, within rounding at another one.

Two ranks train two steps and save; the run continues for two more."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_trainers

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny

MOE = "qwen3_moe"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    "Tiny models, and folders for checkpoints"
    root = tmp_path_factory.mktemp("layouts")
    for family in ("qwen3", "qwen3_5", "qwen3_vl", MOE):
        small = TinyConfig(family=family, hidden_size=64, num_layers=2, ffn_size=128)
        build_tiny(small, build_tokenizer(), root / family, seed=0)
    for folder in ("a", "b", "c", "d", "e", "empty"):
        (root / folder).mkdir()
    return root


def jobs(root: Path, ranks: int, *work):
    "(job, family, folder, TP, dtype, EP), all in the same processes; what rank 0 found"
    paths = [
        (name, str(root / family), str(root / folder), *layout)
        for name, family, folder, *layout in work
    ]
    return run_trainers("layout_jobs:several", ranks, work=paths)[0]


@pytest.fixture(scope="module")
def two_ranks(root):
    return jobs(
        root,
        2,
        ("save", "qwen3", "a", 2, "float32"),
        ("resume", "qwen3", "a", 2, "float32"),
        ("resume", "qwen3", "a", 1, "float32"),  # DP 2
        ("save", "qwen3_5", "b", 2, "float32"),  # gated delta net
        ("save", "qwen3_vl", "c", 2, "bfloat16"),
        ("resume", "qwen3_vl", "c", 2, "bfloat16"),
        ("save", "qwen3", "d", 1, "offload"),  # DP 2: the ranks share the moments
        ("resume", "qwen3", "d", 1, "offload"),
        ("resume", "qwen3", "d", 2, "offload"),
        ("resume", "qwen3", "d", 1, "bfloat16"),
        ("save", MOE, "e", 2, "float32", 2),
        ("resume", MOE, "e", 2, "float32", 2),
        ("resume", MOE, "e", 1, "float32", 2),  # DP 2, EP 2
        ("resume_error", MOE, "e", 2, "float32"),  # without expert parallelism
    )


@pytest.fixture(scope="module")
def one_rank(root, two_ranks):
    return jobs(
        root,
        1,
        ("resume", "qwen3_5", "b", 1, "float32"),
        ("weights", "qwen3", "a", 1, "float32"),  # of a trainer at TP 2, after two steps
        ("policy", MOE, "e", 1, "float32"),  # of a trainer at TP 2 and EP 2
    )


@pytest.mark.parametrize(("saved", "resumed"), [(0, 1), (4, 5), (6, 7), (10, 11)])
def test_the_same_layout_continues_bit_for_bit(two_ranks, saved, resumed):
    "float32; bfloat16 with its float32 copies; the optimizer on the host; a mixture of experts"
    want, got = two_ranks[saved], two_ranks[resumed]
    assert got[:3] == want[:3]
    assert torch.equal(got[3], want[3])


@pytest.mark.parametrize(("saved", "resumed"), [(0, 2), (10, 12)])
def test_another_layout_continues_within_rounding(two_ranks, saved, resumed):
    assert_close(two_ranks[resumed], two_ranks[saved])


def test_a_gated_delta_net_continues_on_one_rank(two_ranks, one_rank):
    assert_close(one_rank[0], two_ranks[3])


def assert_close(got, want):
    norms, lr, _, logits = got[:4]
    assert (logits - want[3]).abs().max() < 1e-5
    assert lr == want[1]
    assert norms == pytest.approx(want[0], abs=1e-5)


@pytest.mark.parametrize("resumed", [8, 9])
def test_an_optimizer_on_the_host_continues_elsewhere(two_ranks, resumed):
    "At another layout, and on the device; a rounding error of float32 may flip the last of bfloat16's 8 bits"
    want = two_ranks[6]
    norms, lr, _, logits = two_ranks[resumed]
    assert lr == want[1]
    assert norms == pytest.approx(want[0], abs=1e-3)
    torch.testing.assert_close(logits.float(), want[3].float(), rtol=0, atol=1e-2)


def test_without_its_expert_parallelism_a_mixture_is_refused(two_ranks):
    "There it has one optimizer, not two"
    assert "Resume with parallel.expert 2" in two_ranks[13]


def test_the_weights_alone_are_read_in_any_layout(two_ranks, one_rank):
    alone, whole = one_rank[1]
    assert torch.equal(alone, whole)
    assert (one_rank[2] - two_ranks[10][4]).abs().max() < 1e-5


def test_what_cannot_be_saved_or_loaded(root, two_ranks):
    "No checkpoint, a missing part, a disk that accepts 1 kB or 100 kB per file; the next save succeeds"
    shutil.copytree(root / "a", root / "cut")
    next((root / "cut").glob("*.distcp")).unlink()
    (found,) = run_trainers("layout_jobs:refusals", root=str(root))
    archive, shards, after, empty, cut = found
    for text in (archive, shards):
        start = f"StorageError: the checkpoint {root}/small could not be written: "
        assert text.startswith(start), text
    assert "GB are free there" in shards
    # depends on the tensor that reaches the limit
    assert "File too large" in shards or "unexpected pos" in shards
    assert after == "fine"
    assert "is not a trainer checkpoint" in empty
    assert "cut cannot be read: " in cut and "distcp" in cut
