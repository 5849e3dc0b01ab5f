"""What others bring: messages, chat templates, labels, text files, numbers and paths of every shape."""

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cookbook_npu.cli import app
from cookbook_npu.config import DataConfig, override
from cookbook_npu.data.datasets import read_records
from cookbook_npu.data.graders import call_mode, load_function
from cookbook_npu.data.inputs import read_inputs
from cookbook_npu.data.messages import ChatFormat, TurnEnd, TurnFormat, end_token_ids
from cookbook_npu.data.prompts import PromptReader, load_prompts
from cookbook_npu.data.rewards import check_prompts
from cookbook_npu.data.tokenizer import END, PAD, build_tokenizer
from cookbook_npu.errors import ConfigError, CookbookError, DataError
from cookbook_npu.parameters import read_parameter_file
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------ messages
QUESTION = "What is 2+3?"
TEXT_ONLY = (  # like Qwen3's: other roles and contents that are no string vanish
    "{% for m in messages %}{% if m.role in ('user', 'system', 'assistant') %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(template: str = TEXT_ONLY):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.bos_token = PAD  # some templates begin with it
    return tokenizer


def rendered(folder: Path, content, chat: bool, template: str = TEXT_ONLY) -> str:
    file = folder / "d.jsonl"
    file.write_text(json.dumps({"prompt": content, "label": "5"}) + "\n")
    config = DataConfig(prompt_data=str(file), apply_chat_template=chat)
    return PromptReader(config, tokenizer_with(template)).read(file).prompts[0].text


def part(text: str) -> dict:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "content",
    [[part(QUESTION)], [part("What is"), part(" 2+3?")], [part(QUESTION), part("")]],
)
def test_text_parts_are_read_by_a_text_only_template(tmp_path, content, chat):
    assert QUESTION in rendered(tmp_path, [{"role": "user", "content": content}], chat)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "content",
    [None, 5, 2.5, True, {"text": QUESTION}, [QUESTION], [["a"]], [{"type": "text"}]]
    + [[{"type": "input_audio"}], [part(QUESTION), None], [{"text": QUESTION}]],
)
def test_other_contents_are_refused_with_file_and_line(tmp_path, content, chat):
    with pytest.raises(DataError, match="d.jsonl line 1: message 1"):
        rendered(tmp_path, [{"role": "user", "content": content}], chat)


@pytest.mark.parametrize("text", ["Use digits.", "user", "2+3", QUESTION, "<|im_end|>"])
@pytest.mark.parametrize("role", ["developer", "tool", "User", "human", "observation"])
def test_a_role_that_the_template_skips_is_refused(tmp_path, role, text):
    user = {"role": "user", "content": QUESTION}
    for messages in (
        [{"role": role, "content": text}, user],
        [user, {"role": role, "content": text}],
    ):
        with pytest.raises(
            DataError, match=f"d.jsonl line 1: the chat template leaves out .* '{role}'"
        ):
            rendered(tmp_path, messages, True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('No user query found') }}", "No user query found"),
        ("{{ messages[0].missing.name }}", "has no attribute"),
        ("{{ messages[0].content + 5 }}", "can only concatenate"),
        ("{{ messages[7].content }}", "has no element 7|has no attribute|undefined"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "leaves out message 1"),
        ("nothing of the messages", "leaves out message 1"),
    ],
)
def test_exceptions_and_losses_of_a_template_name_file_and_line(tmp_path, template, words):
    with pytest.raises(DataError, match=f"d.jsonl line 1: .*({words})"):
        rendered(tmp_path, QUESTION, True, template)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "llama3"]
)
def test_published_templates_write_text_parts_and_refuse_nothing_of_a_conversation(
    tmp_path, name
):
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    messages = [
        {"role": "system", "content": [part("Be short.")]},
        {"role": "user", "content": [part(QUESTION)]},
        {"role": "assistant", "content": "5."},
        {"role": "user", "content": "And twice that?"},
    ]
    text = rendered(tmp_path, messages, True, template)
    for own in ("Be short.", QUESTION, "5.", "And twice that?"):
        assert own in text


THINKS = TEXT_ONLY + "{% if enable_thinking is false %}<think></think>{% endif %}"


def test_template_arguments_are_used_in_prompts_and_turns(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"prompt": QUESTION, "label": "5"}) + "\n")
    arguments = {"enable_thinking": False}
    config = DataConfig(
        prompt_data=str(file),
        eval_data=str(file),
        apply_chat_template=True,
        chat_template_kwargs=arguments,
    )
    tokenizer = tokenizer_with(THINKS)
    assert (
        PromptReader(config, tokenizer)
        .read(file)
        .prompts[0]
        .text.endswith("<think></think>")
    )
    turns = TurnFormat(tokenizer, True, template_kwargs=arguments)
    told = turns.observation_ids(
        [{"role": "user", "content": "No."}], tokenizer.eos_token_id
    )
    assert tokenizer.decode(told).endswith("<think></think>")


@pytest.mark.parametrize(
    "name", ["enable_thinkin", "tools", "tokenize", "thinking", "add_generation_prompt"]
)
def test_an_argument_that_the_template_does_not_read_is_refused(name):
    with pytest.raises(
        ConfigError, match=f"data.chat_template_kwargs.{name} is no argument"
    ):
        ChatFormat(tokenizer_with(THINKS), True, {name: True})


# --------------------------------------------------------------------------------- end of turn
def base_tokenizer():
    "As in the folder of a base model: generation ends with another token than a turn"
    tokenizer = build_tokenizer()
    tokenizer.eos_token = PAD
    return tokenizer


@pytest.mark.parametrize("eos", [256, [256], 257, None, [], "absent"])
def test_end_tokens_are_those_of_settings_tokenizer_and_template(tmp_path, eos):
    if eos != "absent":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert end_token_ids(tmp_path, base_tokenizer()) == {256, 257}
    assert end_token_ids(tmp_path, base_tokenizer(), [3]) == {3, 256, 257}
    without = base_tokenizer()
    without.chat_template = None
    assert 256 in end_token_ids(tmp_path, without)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEXT_ONLY, TurnEnd(END, 257)),
        (
            "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}",
            TurnEnd("<|eot|>", None),
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", TurnEnd("", None)),
        (
            "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}",
            TurnEnd(PAD, 256),
        ),
        ("{{ raise_exception('no') }}", TurnEnd()),
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes(template, end):
    assert ChatFormat(tokenizer_with(template), True).turn_end == end


def test_a_label_that_the_scorer_cannot_use_is_refused_with_file_and_line(tmp_path):
    file = tmp_path / "d.jsonl"
    rows = [{"prompt": "1+1=", "label": "2"}, {"prompt": "1+2=", "label": "NaN"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = qwen3_4b_colocate(
        prompt_data=str(file), overrides={"reward.scorers": {"math": 1.0}}
    )
    prompts = load_prompts(config.data, build_tokenizer()).prompts
    with pytest.raises(DataError, match="d.jsonl line 2: scorer math"):
        check_prompts(config.reward, prompts)


# --------------------------------------------------------------------------------- text files
LINES = '{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label": "3"}\n'


WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32"]  # of which ASCII is not a part


@pytest.mark.parametrize(
    ("encoding", "question", "model"),
    [(e, "1+1", "tiny") for e in WIDE]
    + [(e, "一加一", "模型") for e in (*WIDE, "gb18030")],
)
def test_another_encoding_is_refused_by_name(tmp_path, encoding, question, model):
    shown = "not UTF-8" if encoding == "gb18030" else f"is {encoding.upper()}, not UTF-8"
    (tmp_path / "d.jsonl").write_bytes(LINES.replace("1+1", question).encode(encoding))
    with pytest.raises(DataError, match=f"d.jsonl line 1 .*{shown}"):
        list(read_records(tmp_path / "d.jsonl"))
    for name, text in (
        ("p.json", json.dumps({"model": model}, ensure_ascii=False)),
        ("p.yaml", f"model: {model}\n"),
    ):
        (tmp_path / name).write_bytes(text.encode(encoding))
        with pytest.raises(DataError, match=f"{name} .*{shown}"):
            read_parameter_file(tmp_path / name)


@pytest.mark.parametrize("content", ["", "\n", "\r\n\r\n", "\ufeff", "\ufeff\n"])
def test_an_empty_file_is_refused_before_anything_starts(tmp_path, monkeypatch, content):
    file = tmp_path / "empty.jsonl"
    file.write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["run", "qwen3_4b_colocate", "-p", "prompt_data=empty.jsonl"]
    with pytest.raises(CookbookError, match=f"{file} holds no record"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (tmp_path / "runs").exists()


def test_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text(LINES)
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.py").touch()
    given = {
        "data.eval_data": "d.jsonl",
        "reward.scorers": {"mine:grade": 1.0},
        "data.mixture": {"./d.jsonl": 1.0, "arithmetic": 1.0},
    }
    config = qwen3_4b_colocate(
        model="model", prompt_data="../" + tmp_path.name + "/d.jsonl", overrides=given
    )
    here = str(tmp_path)
    assert config.data.prompt_data == config.data.eval_data == f"{here}/d.jsonl"
    assert list(config.data.mixture) == [f"{here}/d.jsonl", "arithmetic"]
    assert (config.model.path, config.code_folder) == (f"{here}/model", here)
    monkeypatch.chdir("/")
    assert override(config, {}) == config
    for name in ("arithmetic", "hf://openai/gsm8k", "nowhere.jsonl"):
        assert qwen3_4b_colocate(prompt_data=name).data.prompt_data == name


# --------------------------------------------------------------------------------- code_folder
GRADE = "def grade(text, label, metadata):\n    return {}\n"
MODULES = {  # name of a scorer -> files that define it, each with a place for its score
    "mine:grade": {"mine.py": GRADE},
    "pack:grade": {"pack/__init__.py": GRADE},
    "pack.sub:grade": {"pack/__init__.py": "", "pack/sub.py": GRADE},
    "spaced.sub:grade": {"spaced/sub.py": GRADE},
    "mine:grade by its neighbour": {
        "mine.py": "from neighbour import grade\n",
        "neighbour.py": GRADE,
    },
    "rewards:grade": {"rewards.py": GRADE, "test_inputs.py": ""},
}
GRADES = """
import sys
from cookbook_npu.data.rewards import RewardPool
from cookbook_npu.data.sample import Sample
from cookbook_npu.data.inputs import read_inputs
from cookbook_npu.recipes import qwen3_4b_colocate
from cookbook_npu.runs.folder import RunFolder

config = qwen3_4b_colocate(
    overrides={"code_folder": sys.argv[1], "reward.scorers": {sys.argv[2]: 1.0}}
)
read_inputs(config, files=False)
sample = Sample(
    group_id="g", index=0, prompt_ids=[1], response_ids=[5], logprobs=[0.0], loss_mask=[1],
    versions=[0], finish_reason="stop", text="5", label="5",
)
with RewardPool(config.reward) as pool:
    print(pool.score([sample]))
"""


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_code_folder_is_the_one_that_grades(tmp_path, name):
    "With the working folder first on Python's path, as in a kernel, and on PYTHONPATH"
    for folder, score in (("here", 0.25), ("code", 0.75)):
        for file, text in MODULES[name].items():
            path = tmp_path / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(score))
    words = [sys.executable, "-c", GRADES, str(tmp_path / "code"), name.split()[0]]
    env = os.environ | {"PYTHONPATH": f"{tmp_path / 'here'}:{ROOT}"}
    done = subprocess.run(
        words, cwd=tmp_path / "here", env=env, capture_output=True, text=True
    )
    assert done.stdout == "[0.75]\n", done.stderr


# -------------------------------------------------------------------- functions of a notebook
CELLS = """
import functools, math, re
from math import isfinite as finite
from cookbook_npu.data.graders import batched
FACTOR = 2
try:
    import absent_package as lost
    from numpy import array
    found = True
except ImportError:
    lost, found = None, False
class Grader:
    def method(self, text, label, metadata): return 1.0
"""
OWN = {  # a cell that defines `mine` -> its score of "5 5" where it takes one, or why it is refused
    "def mine(text, label, metadata): return float(len(text))": 3.0,
    "def mine(text: Missing, *_) -> Missing:\n  import re\n  return len(re.sub(' ', '', text))": 2.0,
    "def mine(text, *_): return re.sub(' ', '', text) == '55' and finite(math.pi)": 1.0,
    "@batched\ndef mine(texts, *_): return [len(text) for text in texts]": 3.0,
    "async def mine(text, *_): return 0.5": 0.5,
    "def mine(text, *_):\n  def f(n): return f(n - 1) if n else text\n  return len(f(3))": 3.0,
    "if True:\n  def mine(text, *_):\n    return 4.0": 4.0,
    "def mine(text, *_):\n  class Inside:\n    one = 1\n    two = one\n  return Inside.two": 1.0,
    "def mine(*_): return 0.5 if lost is None and not found else array(1)": 0.5,
    "def mine(*_):\n  try: import absent as own\n  except ImportError: own = None\n  return own or 1": 1.0,
    "def mine(*_): return FACTOR": "mine uses FACTOR, which its source neither defines nor imports",
    "def mine(text, *_, f=FACTOR): return f": "mine uses FACTOR, which",
    "@functools.partial\ndef mine(*_): return 1.0": "is a partial, not a function",
    "def mine(*_): return never + 1": "mine uses never, which is defined nowhere. Correct the name.",
    "def make(n):\n  def mine(*_): return n\n  return mine\nmine = make(3)": "mine uses n of the function",
    "mine = lambda *_: 1.0": "<lambda> is a lambda",
    "mine = Grader().method": "Grader.method is a method, not a function",
    "mine = Grader.method": "Grader.method is a method",
    "mine = len": "len is a builtin_function_or_method, not a function",
    "mine = Grader": "Grader is a type, not a function",
    "exec('def mine(*_): return 1.0')": "mine has no source of its own",
}


def in_a_cell(source: str, names: dict) -> None:
    "Run a cell as IPython does: its source is kept where `inspect` looks for it"
    file = f"<cell {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)


@pytest.mark.parametrize("cell", OWN)
def test_a_function_of_a_notebook_is_a_file_of_the_run(cell, tmp_path, monkeypatch):
    "Its source, found again by any process; what has none of its own is refused within the call"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = {"__name__": "__main__", "Missing": None, "In": ["%magic", CELLS]}
    in_a_cell(CELLS, names)
    in_a_cell(cell, names)
    mine, expected = names["mine"], OWN[cell]
    place = {"output.root": str(tmp_path / "runs"), "reward.arguments": {mine: {}}}
    given = {"reward.scorers": {mine: 1.0, "exact": 0.0}, **place}
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as refused:
            qwen3_4b_colocate(overrides=given)
        assert expected in str(refused.value)
        words = r"%%writefile (\w+)\.py\ndef \1\(text, label, metadata\): \.\.\.\n"
        words += r'overrides = \{"reward.scorers": \{"./\1.py:\1"'
        assert "Correct" in expected or re.search(words, str(refused.value))
        return
    config = qwen3_4b_colocate(overrides=given)
    name = next(iter(config.reward.scorers))
    assert re.fullmatch(r"mine_[0-9a-f]{8}:mine", name) and name in config.reward.arguments
    assert config.code_folder == str(tmp_path / "runs" / "code")
    assert qwen3_4b_colocate(overrides=given) == config == override(config, {})
    read_inputs(config, files=False)
    function = load_function(name)
    mode = {"@": "batch", "a": "async"}.get(cell[0], "each")
    assert call_mode(function) == mode
    assert mode != "each" or function("5 5", "5", {}) == expected


def test_a_function_of_a_notebook_and_a_file_grade_one_run(tmp_path, monkeypatch):
    "A file of any folder, or a module of the working folder; the run folder has both"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    in_a_cell("def mine(*_): return 0.5", names := {"__name__": "__main__"})
    (tmp_path / "theirs").mkdir()
    for other in ("theirs/filed.py", "local.py"):
        (tmp_path / other).write_text(GRADE.format(1.0))
    for other, name in (("theirs/filed.py:grade", "filed"), ("local:grade", "local")):
        scorers = {other: 1.0, names["mine"]: 1.0}
        config = qwen3_4b_colocate(
            overrides={"output.root": "runs", "reward.scorers": scorers}
        )
        read_inputs(config, files=False)
        with RunFolder.create(config) as run:
            assert {p.name[:5] for p in run.code.iterdir()} == {"mine_", name}
            assert run.config().code_folder == config.code_folder
            shutil.rmtree(tmp_path / "runs" / "code")
            assert run.config().code_folder == str(run.code)
