"""What this machine cannot run is refused by `run`, `plan` and `session` at once, and nothing is left"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cookbook_npu import qwen3_4b_colocate, session
from cookbook_npu.cli import main
from cookbook_npu.config import TinyConfig
from cookbook_npu.errors import ConfigError
from cookbook_npu.model import folder as folder_reader
from cookbook_npu.model.tiny import tiny_folder
from cookbook_npu.npu.device import probe_cuda, probe_npu
from cookbook_npu.runs.checkpoints import Checkpoints
from cookbook_npu.runs.folder import RunFolder

AT_MOST = (
    5.0  # times what `cookbook-npu config` takes, which imports the command and lists keys
)
IPC = '{"placement.transfer_backend": "ipc", "rollout.engine": "vllm"}'
NO_VLLM = (
    "import sys; from cookbook_npu.plan import preflight;"
    "preflight.has_package = lambda package: package != 'vllm';"
    "from cookbook_npu.cli import main; main()"
)
# Runs a command and prints the processor time that it and its children took: the test's own process
# has other children, whose time counts when they happen to end meanwhile.
METER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
sys.exit(code)
"""
no_gpu = pytest.mark.skipif(probe_cuda().usable, reason="this machine has a GPU")
no_npu = pytest.mark.skipif(probe_npu().state != "absent", reason="torch_npu is installed")


MAIN = "from cookbook_npu.cli import main; main()"


def metered(folder, *words, code=MAIN) -> tuple[subprocess.CompletedProcess[str], float]:
    "A command line that has ended, and the processor time that it and its children took"
    done = subprocess.run(
        [sys.executable, "-c", METER, sys.executable, "-c", code, *words],
        cwd=folder,
        env=os.environ | {"HOME": str(folder / "home")},
        capture_output=True,
        text=True,
    )
    return done, float(done.stdout.splitlines()[-1])


@functools.cache
def config_cpu_s() -> float:
    "Processor time of a command that only imports and prints"
    return metered(Path(__file__).parent, "config")[1]


def refused(tmp_path, *words, code=MAIN, left=frozenset()) -> str:
    "The error of a command line that must end with exit code 2, before it starts a run, and leave nothing"
    done, cpu_s = metered(tmp_path, *words, code=code)
    assert done.returncode == 2, done.stderr
    assert cpu_s < AT_MOST * config_cpu_s()
    there = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert there == left
    return done.stderr


@no_gpu
@pytest.mark.parametrize(
    "words",
    [
        ("run", "qwen3_4b_colocate", "-p", "scale", "cuda", "-p", "engine", "transformers"),
        ("plan", "qwen3_4b_colocate", "--scale", "cuda"),
        ("launch", "qwen3_4b_colocate", "--scale", "cuda", "--devices", "1"),
    ],
    ids=lambda words: words[0],
)
def test_scale_without_its_device(tmp_path, words):
    assert "scale is 'cuda', but this machine cannot run it" in refused(tmp_path, *words)


@no_npu
def test_910b_without_an_npu(tmp_path):
    folder = tiny_folder(TinyConfig())
    plain = {"data.apply_chat_template": False, "parallel.tensor": 1}
    plain |= {"sampling.max_response_tokens": 64, "rollout.eval_max_response_tokens": 64}
    config = qwen3_4b_colocate(
        "910b", model=str(folder), prompt_data="arithmetic", overrides=plain
    )
    with pytest.raises(ConfigError, match="torch_npu is not installed"), session(config):
        pass


@pytest.mark.parametrize("command", ["run", "plan"])
def test_transfer_backend_that_a_laptop_has_not(tmp_path, command):
    words = [command, "qwen3_4b_colocate", "-p", "overrides", IPC]
    if command == "plan":
        words += ["--scale", "laptop"]
    assert "placement.transfer_backend is 'ipc'" in refused(tmp_path, *words)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_engine_that_is_not_installed(tmp_path, command):
    words = [command, "qwen3_4b_colocate", "-p", "engine", "vllm"]
    if command == "plan":
        words += ["--scale", "laptop"]
    assert "but vllm is not installed" in refused(tmp_path, *words, code=NO_VLLM)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("eval", "run", "--engine", "vlm"), "rollout.engine is 'vlm'"),
        (("eval", "run", "--data", "no/such.jsonl"), "no/such.jsonl does not exist"),
        (("eval", "run", "--step", "7"), "It has those of step 3"),
        (("eval", "none"), "none"),
        (("eval", "run", "--samples", "4", "--temperature", "0"), "Greedy answers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_evaluation_is_refused(tmp_path, monkeypatch, capsys, words, told):
    run_with_a_checkpoint(tmp_path / "run")
    assert told in refused_here(monkeypatch, capsys, tmp_path, *words)
    assert not (tmp_path / "run" / "evaluations").exists()


def run_with_a_checkpoint(folder):
    "A run folder with a checkpoint of step 3 that no engine will ever read"
    output = {"output.root": str(folder.parent), "output.name": folder.name}
    with RunFolder.create(qwen3_4b_colocate(overrides=output)) as run:
        checkpoints = Checkpoints.of_run(run)
        partial = checkpoints.partial(3)
        (partial / "hf").mkdir(parents=True)
        (partial / "hf" / "config.json").write_text("{}")
        checkpoints.commit(partial, 3, {})


SCORERS = """def misspells(text, label, metadata):
    return lenght(text) if text else 0.0
def raises(*_): raise RuntimeError("no key")
def answers(*_): return "yes"
def lists(*_): return {1}
"""
MISTAKES = {
    "parameter": ("-p learning_rat 1e-3", "Did you mean 'learning_rate'?"),
    "size": ("-p prompts_per_step -4", "rollout.prompts_per_step is -4"),
    "truth for a number": (
        "-p num_steps true",
        "num_steps is 'True'. Input should be a valid integer",
    ),
    "no file": ("-p prompt_data /no/such.jsonl", "/no/such.jsonl does not exist"),
    "no model": ("-p scale 910b", "model is not given at scale 910b"),
    "remainder": ('-p overrides {"train.global_batch_size":100}', "does not divide"),
    "devices": ('-p overrides {"parallel.tensor":4}', "but the trainer has 2 devices"),
    "unknown scorer": (
        '-p overrides {"reward.scorers":{"exat":1.0}}',
        "Did you mean 'exact'?",
    ),
    "scorer that fails when it is imported": (
        '-p overrides {"reward.scorers":{"broken_scorer:score":1.0}}',
        "broken_scorer:score cannot be loaded: SyntaxError",
    ),
    "environment that fails when it is imported": (
        '-p overrides {"rollout.environment":"./broken_scorer.py:Game"}',
        "broken_scorer:Game cannot be loaded: SyntaxError",
    ),
    "file that cannot be a module": (
        '-p overrides {"reward.scorers":{"./my-rewards.py:score":1.0}}',
        "my-rewards.py cannot be imported: 'my-rewards' is no name of a module",
    ),
    **{
        f"scorer that {name}": (
            f'-p overrides {{"reward.scorers":{{"./scorers.py:{name}":1.0}}}}',
            told,
        )
        for name, told in {
            "misspells": "scorers.py, line 2)",
            "raises": "scorer scorers:raises raised RuntimeError: no key (",
            "answers": "scorers:answers returned 'yes'",
            "lists": "a scorer returned {1}, of type set",
        }.items()
    },
    "two labels": ("-p prompt_data labels.jsonl", "the same prompt before had '2'"),
    "no prompt": ("-p prompt_data empty.jsonl", "line 2: the prompt is empty"),
    "long prompts": (
        "-p prompt_data long.jsonl",
        "long.jsonl: plain (detected), 1 records, 0 kept",
    ),
    "unknown source": (
        '-p prompt_data mine.jsonl -p overrides {"reward.by_source":{"x":{"exact":1}}}',
        "reward.by_source has 'x', and no prompt is from there",
    ),
    "keys of other data": ("-p prompt_data other.jsonl", "line 1 has keys text, answer"),
    "broken line": ("-p prompt_data broken.jsonl", "broken.jsonl line 2 is not JSON"),
    "model without a chat template": (
        "-p model model -p prompt_data mine.jsonl",
        "model has no chat template",
    ),
    "name of a hub": (
        "-p model Qwen/Qwen3-4B",
        "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B",
    ),
    "overrides that are no JSON": (
        "-p overrides {num_steps:3}",
        "-p overrides: overrides '{num_steps:3}' is not JSON",
    ),
    "overrides that are no mapping": (
        "-p overrides [1]",
        "-p overrides: overrides is [1], which is no mapping",
    ),
    "key without its section": (
        '-p overrides {"max_staleness":2}',
        "Did you mean 'rollout.max_staleness'?",
    ),
    "place that cannot be written": (
        '-p overrides {"output.root":"/proc/runs"}',
        "cannot write to /proc",
    ),
    "two scales": ("--scale laptop -p scale cuda", "Give one of them"),
}


# as a process of its own, with its time; the others go the same way within this one
SEEN_WHOLE = ("scorer that fails when it is imported", "broken line")


def refused_here(monkeypatch, capsys, folder, *words) -> str:
    "The error of a command line that must end with exit code 2"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["cookbook-npu", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, name):
    words, told = MISTAKES[name]
    here = tmp_path / "given"
    (here / "model").mkdir(parents=True)
    (here / "model" / "config.json").write_text("{}")
    good = '{"prompt": "1+1=", "label": "2"}\n'
    (here / "mine.jsonl").write_text(good)
    (here / "broken.jsonl").write_text(good + '{"prompt": "2+')
    (here / "other.jsonl").write_text('{"text": "1+1=", "answer": "2"}\n')
    (here / "labels.jsonl").write_text(good + good.replace('"2"', '"3"'))
    (here / "empty.jsonl").write_text(good + good.replace("1+1=", ""))
    (here / "long.jsonl").write_text(good.replace("1+1=", "1+1=" * 500))
    (here / "scorers.py").write_text(SCORERS)
    for file in ("broken_scorer.py", "my-rewards.py"):
        (here / file).write_text("def score(:")
    before = {path.name for path in here.iterdir()}
    monkeypatch.delitem(sys.modules, "scorers", raising=False)
    words = ("run", "qwen3_4b_colocate", *words.split())
    if name in SEEN_WHOLE:
        assert told in refused(here, *words, left=before)
        return
    assert told in refused_here(monkeypatch, capsys, here, *words)
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == before


def quantized(folder):
    weights(folder, lambda content: content.replace(b'"F32"', b'"I32"', 1))


def weights(folder, change):
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))


def settings(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def shards(folder):
    "The second of two files is missing"
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_head(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors")


POLICY = ("qwen3_4b_colocate", "-p", "model", "model")
TEACHER = ("qwen3_4b_opd", "-p", "overrides", '{"distill.teacher": "model"}')
TP4 = '{"parallel.tensor": 4, "placement.devices": 4}'
LONG = '{"data.max_prompt_tokens": 4090}'
FOLDERS = {
    "adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        POLICY,
        "is a LoRA adapter, not a model",
    ),
    "FP8": (
        lambda folder: settings(folder, quantization_config={"quant_method": "fp8"}),
        TEACHER,
        "is quantized (fp8). Give the folder in bfloat16",
    ),
    "quantized weights": (quantized, POLICY, "is quantized (I32)"),
    "another family": (
        lambda folder: settings(folder, model_type="gemma"),
        POLICY,
        "'gemma'",
    ),
    "biases": (
        lambda folder: settings(folder, attention_bias=True),
        POLICY,
        "attention_bias",
    ),
    "no safetensors": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        POLICY,
        "in .bin files only. Convert them",
    ),
    "pointer": (
        lambda folder: weights(
            folder, lambda _: b"version https://git-lfs.github.com/spec/v1"
        ),
        POLICY,
        "model.safetensors is a pointer of Git LFS",
    ),
    "missing shard": (shards, POLICY, "model-2.safetensors is missing"),
    "incomplete": (
        lambda folder: weights(folder, lambda content: content[:-1]),
        TEACHER,
        "model.safetensors has",
    ),
    "another head": (other_head, POLICY, "has a separate lm_head.weight"),
    "no head": (
        lambda folder: settings(folder, tie_word_embeddings=False),
        POLICY,
        "has no lm_head.weight",
    ),
    "heads": (None, (*POLICY, "-p", "overrides", TP4), "num_key_value_heads of"),
    "positions": (None, (*POLICY, "-p", "overrides", LONG), "4122, and"),
    "transformers 4": (None, POLICY, "was saved by transformers 5"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_folder_is_refused_by_each_command(tmp_path, monkeypatch, capsys, name):
    "plan, doctor and run have one text"
    change, words, told = FOLDERS[name]
    shape = TinyConfig(hidden_size=64, num_layers=2, ffn_size=192)
    shutil.copytree(tiny_folder(shape), tmp_path / "model")
    if name == "transformers 4":
        monkeypatch.setattr(folder_reader, "version", lambda package: "4.57.6")
    elif change is not None:
        change(tmp_path / "model")
    errors = set()
    for command in ("plan", "doctor", "run"):
        scale = () if command == "run" else ("--scale", "laptop")
        said = refused_here(monkeypatch, capsys, tmp_path, command, *words, *scale)
        errors.add(said[said.index("error") :])
    assert len(errors) == 1 and told in errors.pop()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
