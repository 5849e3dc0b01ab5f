"""The judge against servers that answer, refuse, break and hang."""

import ast
import http.server
import importlib.util
import json
import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from local_server import serve
from text_samples import text_sample

from cookbook_npu.config import JudgeConfig, RewardConfig
from cookbook_npu.data import judge as judge_module
from cookbook_npu.data.judge import Judge, check_judge
from cookbook_npu.data.rewards import RewardPool
from cookbook_npu.errors import BudgetSpent, ConfigError

pytestmark = pytest.mark.lane("runs")

KEY = "sk-a-secret-of-this-test"


class Endpoint(http.server.BaseHTTPRequestHandler):
    "A judge that follows the word in its message; the score is the number behind it"

    protocol_version = "HTTP/1.1"
    asked: Counter[str]
    lock: threading.Lock
    running: list[int]  # now, and at most
    keys: set[str]
    bodies: list[dict]
    released: threading.Event  # ends what hangs
    delay = 0.0
    meet = staticmethod(lambda: None)  # called within each request
    refuses: dict[str, str] = {}  # names of a request -> why
    lists = 200  # status of the list of models
    answers = "big"  # the model that a reply names

    def handle(self):
        with suppress(OSError):  # the judge has closed the connection
            super().handle()

    def reply(self, status, body):
        with suppress(OSError):  # the judge has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self):
        models = {"data": [{"id": "big"}]} if self.lists == 200 else {}
        self.reply(self.lists, json.dumps(models).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        with self.lock:
            self.asked[text] += 1
            self.keys.add(self.headers.get("Authorization", ""))
            self.bodies.append(body)
        for name in self.refuses.keys() & body.keys():
            return self.reply(400, self.refuses[name].encode())
        with self.lock:
            self.running[0] += 1
            self.running[1] = max(self.running)
        time.sleep(self.delay)
        self.meet()
        try:
            self.follow(text, self.asked[text])
        finally:
            with self.lock:
                self.running[0] -= 1

    def follow(self, text, times):
        word, _, number = text.partition(" ")
        if word == "flaky" and times == 1:
            return self.reply(503, b"starting")
        if word == "broken":
            return self.reply(500, b"out of memory")
        if word == "refused":
            return self.reply(400, f"no such model, key {KEY}".encode())
        if word == "hang":
            self.released.wait(60)
            return self.reply(200, b"{}")
        if word == "drip":
            self.send_response(200)
            self.end_headers()
            while not self.released.wait(0.01):
                self.wfile.write(b" ")
        if word == "garbled":
            return self.reply(200, b'{"choices": [')
        said = "I like it." if word == "vague" else f"Fine. Score: {number}"
        reason = "length" if word == "long" else "stop"
        content = {
            "choices": [{"message": {"content": said}, "finish_reason": reason}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5},
            "model": self.answers,
        }
        return self.reply(200, json.dumps(content).encode())


@pytest.fixture
def endpoint(monkeypatch):
    "The handler of a running server, with its `url`"
    monkeypatch.setattr(judge_module, "BACKOFF_S", 0.01)
    state = dict(asked=Counter(), lock=threading.Lock(), running=[0, 0], keys=set())
    state["bodies"] = []
    handler = type("Own", (Endpoint,), state | {"released": threading.Event()})
    with serve(handler) as address:
        handler.url = f"{address}/v1"
        yield handler
        handler.released.set()


@pytest.fixture
def opened(endpoint):
    "Opens judges of the endpoint, and closes them"
    judges = []

    def start(folder=None, **values):
        own = {"url": endpoint.url, "model": "big", "template": "{response}"} | values
        judges.append(Judge(JudgeConfig(**own), folder))
        judges[-1].open()
        return judges[-1]

    yield start
    for judge in judges:
        judge.close()


def test_every_failure_costs_its_own_response_alone(endpoint, opened, monkeypatch):
    monkeypatch.setattr(judge_module, "REQUEST_TIMEOUT_S", 3.0)
    monkeypatch.setattr(judge_module, "RETRIES", 1)
    judge = opened()
    failing = ["broken", "refused", "hang", "drip", "garbled", "vague", "wild 99", "long 7"]
    scores = judge.scores(["good 4", *failing, "flaky 6"])
    assert scores == [0.4, *[None] * len(failing), 0.6]
    # each was asked twice, but what a retry cannot help
    once = {"good 4": 1, "refused": 1}
    assert endpoint.asked == dict.fromkeys((*failing, "flaky 6"), 2) | once
    counts = judge.counts
    assert (counts.failures, counts.retries, counts.requests) == (8, 8, 18)
    # a truncated reply is paid for
    assert counts.output_tokens == 5 * 8


@pytest.mark.parametrize(
    ("message", "why"),
    {
        "refused": "status 400: no such model, key ***",
        "hang": "within 3 s",
        "drip": "within 3 s",
        "long 7": "truncated: raise max_tokens",
    }.items(),
)
def test_a_failure_says_why_and_no_key(opened, monkeypatch, message, why):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setattr(judge_module, "REQUEST_TIMEOUT_S", 3.0)
    monkeypatch.setattr(judge_module, "RETRIES", 0)
    judge = opened()
    assert judge.scores([message]) == [None]
    assert why in judge.failure and KEY not in judge.failure


def test_the_request_has_fields_that_vllm_knows(endpoint, opened):
    "The class of the installed vLLM, from its source: importing it takes seconds"
    opened().scores(["good 1"])
    more = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 600}
    opened(request_args=more).scores(["good 1"])
    plain, thoughtless = endpoint.bodies
    assert thoughtless == plain | more
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("vllm is not installed")
    openai = Path(vllm.submodule_search_locations[0], "entrypoints/openai")
    source = (openai / "chat_completion/protocol.py").read_text()
    (request,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "ChatCompletionRequest"
    )
    fields = {n.target.id for n in request.body if isinstance(n, ast.AnnAssign)}
    assert set(thoughtless) <= fields


def test_a_request_is_adapted_to_what_the_endpoint_takes(
    endpoint, opened, monkeypatch, capsys
):
    "OpenAI's reasoning models refuse two names; that is no retry, and every request goes through"
    endpoint.refuses = {
        "max_tokens": "'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
        "temperature": "'temperature' does not support 0.0 with this model.",
    }
    monkeypatch.setattr(judge_module, "RETRIES", 0)
    judge = opened()
    assert judge.scores([f"good {n}" for n in range(6)]) == [n / 10 for n in range(6)]
    assert judge.scores(["good 7"]) == [0.7]
    last = endpoint.bodies[-1]
    assert last.keys() == {"model", "messages", "max_completion_tokens"}
    assert judge.counts.retries == judge.counts.failures == 0
    assert not capsys.readouterr().out.endswith("for big\n")
    endpoint.lists, endpoint.answers = 404, "small"  # a gateway without a list of models
    assert judge.scores(["good 8", "good 9"]) == [0.8, 0.9]
    assert capsys.readouterr().out.endswith("small answers for big\n")
    check_judge(judge.config)


def test_requests_run_concurrently_up_to_the_limit(endpoint, opened, monkeypatch):
    monkeypatch.setattr(judge_module, "CONCURRENCY", 3)
    endpoint.meet = threading.Barrier(3).wait
    opened().scores([f"good {n / 10}" for n in range(12)])
    assert endpoint.running[1] == 3


def test_a_budget_of_requests_is_never_exceeded(endpoint, opened, tmp_path):
    judge = opened(tmp_path, max_requests=5)
    with pytest.raises(BudgetSpent, match="5 of reward.judge.max_requests 5"):
        judge.scores([f"good {n}" for n in range(9)])
    assert sum(endpoint.asked.values()) == 5
    judge.close()
    # what was paid for is in the cache, and the sums are those of the run
    with pytest.raises(BudgetSpent):
        opened(tmp_path, max_requests=5).scores([f"good {n}" for n in range(9)])
    more = opened(tmp_path, max_requests=9)
    assert more.scores([f"good {n}" for n in range(9)]) == [n / 10 for n in range(9)]
    assert sum(endpoint.asked.values()) == 9 and set(endpoint.asked.values()) == {1}


def test_the_key_is_sent_and_never_stored(endpoint, opened, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    judge = opened(tmp_path)
    judge.scores(["good 1"])
    judge.close()
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert KEY not in judge.config.model_dump_json()
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


def test_an_interrupt_cancels_the_requests(endpoint, opened):
    judge = opened()

    def interrupt():
        while not endpoint.asked["hang"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        judge.scores(["hang"])
    assert not endpoint.released.is_set()


def test_scores_become_rewards_and_verdicts(endpoint):
    settings = {"url": endpoint.url, "model": "big", "template": "{answer}"}
    config = RewardConfig(
        scorers={"judge": 2.0, "length": 1.0},
        arguments={"length": {"max_tokens": 0, "buffer": 0}},
        judge=settings,
    )
    samples = [text_sample(t) for t in ("<think>vague</think>good 8", "good 2", "vague")]
    with RewardPool(config) as pool:
        grades = pool.grade(samples)
        assert [g.reward for g in grades] == [pytest.approx(0.6), pytest.approx(-0.6), None]
        assert [g.correct for g in grades] == [True, False, None]
        assert "the judge gave no score: no score in the reply" in pool.failure


class Silent(http.server.BaseHTTPRequestHandler):
    "Accepts a connection and says nothing, or refuses the key"

    status = 0

    def do_GET(self):
        if not self.status:
            time.sleep(2.0)
            return
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize(
    ("status", "model", "why"),
    [
        (0, "big", "did not answer within"),
        (401, "big", "refuses the API key"),
        (404, "big", "answers a request with 501"),
        (None, "bigg", "Did you mean 'big'"),
        (None, "big", ""),
    ],
)
def test_an_unusable_endpoint_is_refused_before_a_run(
    endpoint, monkeypatch, status, model, why
):
    monkeypatch.setattr(judge_module, "CHECK_TIMEOUT_S", 1.0 if status == 0 else 20.0)
    with serve(Silent, status=status or 0) as address:
        url = endpoint.url if status is None else f"{address}/v1"
        config = JudgeConfig(url=url, model=model)
        if not why:
            return check_judge(config)
        with pytest.raises(ConfigError) as found:
            check_judge(config)
    assert url in str(found.value) and why in str(found.value)
