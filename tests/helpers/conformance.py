"""Checks that every engine must pass, on every device, before a run uses it.

Each check takes a `Case`: an engine factory and Hugging Face folders, so one suite runs on the simulated
NPU and on the 910B stack. The reference is transformers on the CPU in float32, without cache or padding.
Each check leaves the engine awake with the weights of `case.folder`. Shapes: T tokens, V vocabulary.
"""

import functools
import io
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_values import response_logp
from torch import Tensor

from cookbook_npu.data.images import ImageProcessor, ImageSource, image_source
from cookbook_npu.data.sample import ImageInput, Sample
from cookbook_npu.data.tokenizer import find_tokenizer, unsampled_token_ids
from cookbook_npu.errors import CookbookError, EngineError, WeightUpdateError
from cookbook_npu.rollout.engine import (
    Engine,
    Request,
    SamplingParams,
    derive_seed,
    text_requests,
)
from cookbook_npu.rollout.transformers import model_class
from cookbook_npu.weights.manifest import checksum


@functools.lru_cache(maxsize=4)
def reference_model(folder: Path) -> Any:
    "Return the transformers model of a Hugging Face folder, on the CPU in float32"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind: Any = model_class(config)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def folder_weights(folder: Path) -> dict[str, Tensor]:
    "Return a copy of each weight of a Hugging Face folder by name, as a trainer would send them"
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: t.clone() for file in files for name, t in load_file(file).items()}


@torch.no_grad()
def teacher_forced(
    folder: Path,  # Hugging Face folder
    sample: Sample,
    temperature: float = 1.0,  # of sampling; 0 is compared at 1
    images: Sequence[ImageInput] = (),
) -> Tensor:  # [T]
    "Return the log-probability of each response token, from one pass over the whole sequence"
    return response_logp(reference_model(folder), sample, temperature or 1.0, images)[0]


@torch.no_grad()
def greedy_response(folder: Path, prompt: list[int], limit: int) -> list[int]:
    "Return the response of transformers' `generate` at temperature 0"
    ids_1T = torch.tensor([prompt])
    out_1T = reference_model(folder).generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=limit,
        do_sample=False,
    )
    return out_1T[0, len(prompt) :].tolist()


def image_prompts(folder: Path) -> list[tuple[list[int], tuple[ImageInput, ...]]]:
    "Return token ids and images of five prompts for the model of a folder"
    from PIL import Image
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    processor = ImageProcessor(folder)
    rng = np.random.default_rng(0)
    images = []
    for n, (width, height) in enumerate([(64, 96), (64, 96), (70, 33), (128, 32)]):
        noise = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        source = image_source(Image.fromarray(noise), "conformance", f"picture {n}")
        images.append(processor.image(source))
    chosen = [(0,), (1,), (2, 3), (), (0,)]
    prompts = []
    for p, numbers in enumerate(chosen):
        ids = [7, 8]
        for n in numbers:
            ids.append(config.vision_start_token_id)
            ids += [config.image_token_id] * processor.tokens(images[n].grid_thw)
            ids.append(config.vision_end_token_id)
        ids += [30 + max(p, 1), 31]
        prompts.append((ids, tuple(images[n] for n in numbers)))
    return prompts


PICTURE_KINDS = "RGB RGBA L CMYK palette transparent animated rotated".split()


def encoded_picture(kind: str, width: int, height: int, seed: int) -> bytes:
    "Return a file with random pixels: JPEG (CMYK, rotated by EXIF), GIF (animated) or PNG"
    from PIL import ExifTags, Image

    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
    content = io.BytesIO()
    if kind == "animated":
        second = Image.new("RGB", image.size)
        image.save(content, "GIF", save_all=True, append_images=[second])
    elif kind == "rotated":
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        image.save(content, "JPEG", exif=exif)
    elif kind == "CMYK":
        image.convert("CMYK").save(content, "JPEG")
    elif kind in ("palette", "transparent"):
        color = 0 if kind == "transparent" else None
        image.quantize(8).save(content, "PNG", transparency=color)
    else:
        image.convert(kind).save(content, "PNG")
    return content.getvalue()


def many_pictures() -> list[ImageSource]:
    "Return 50 images of up to 16 tokens: one pixel of every kind, long strips, odd sizes"
    rng = random.Random(0)
    sizes = [(1, 1)] * len(PICTURE_KINDS) + [(200, 1), (1, 200), (160, 5), (32, 32)]
    sizes += [(rng.randint(1, 128), rng.randint(1, 128)) for _ in range(50 - len(sizes))]
    found = []
    for n, (width, height) in enumerate(sizes):
        kind = PICTURE_KINDS[n % len(PICTURE_KINDS)]
        content = encoded_picture(kind, width, height, seed=n)
        found.append(image_source(content, "many", f"{n}: {kind} {width} x {height}"))
    return found


def seeing_ids(config: Any, tokens: int) -> list[int]:
    "Return the ids of a prompt with one image of `tokens` placeholders"
    shown = [config.image_token_id] * tokens
    return [7, config.vision_start_token_id, *shown, config.vision_end_token_id, 31]


@dataclass
class Case:
    "An engine and what the checks ask it"

    factory: Callable[..., Engine]  # factory(folder, stop_token_ids=(), ...), in float32
    folder: Path  # initial weights
    other: Path  # other weights of the same shape
    tolerance: float = 1e-4  # largest difference of log-probs
    limit: int = 12  # tokens of a response
    built: Engine | None = field(init=False, default=None)
    pictured: bool = False  # the prompts have images

    @property
    def engine(self) -> Engine:
        if self.built is None:
            self.built = self.factory(self.folder)
        return self.built

    def close(self) -> None:
        "Close the engine; the next use builds another (some allow only one in a process)"
        if self.built is not None:
            self.built.close()
        self.built = None

    @functools.cached_property
    def requests(self) -> list[Request]:
        "Five prompts with three samples each, of 3 to 11 tokens, or with images"
        if self.pictured:
            prompts = image_prompts(self.folder)
        else:
            prompts = [
                ([(7 * p + 3 * t) % 199 for t in range(3 + 2 * p)], ()) for p in range(5)
            ]
        return [
            Request(
                group_id=f"p{p}",
                index=i,
                prompt_ids=ids,
                seed=derive_seed(0, p, i),
                images=images,
            )
            for p, (ids, images) in enumerate(prompts)
            for i in range(3)
        ]

    def sampling(self, **changes: Any) -> SamplingParams:
        "Short responses at temperature 0.8; `changes` are fields of SamplingParams"
        fields = {"temperature": 0.8, "max_response_tokens": self.limit} | changes
        return SamplingParams(**fields)

    def ask(self, **changes: Any) -> list[Sample]:
        "Return the responses to all requests"
        return self.engine.generate(self.requests, self.sampling(**changes))

    def update_weights(self, folder: Path) -> None:
        "Update to the weights of a Hugging Face folder, as the next version"
        self.engine.update_weights(self.engine.version + 1, folder_weights(folder).items())


ENGINE_CHECKS: list[Callable[[Case], None]] = []
IMAGE_CHECKS: list[Callable[[Case], None]] = []  # for a `pictured` case


def engine_check(function: Callable[[Case], None]) -> Callable[[Case], None]:
    "Add a check to the suite"
    ENGINE_CHECKS.append(function)
    return function


def image_check(function: Callable[[Case], None]) -> Callable[[Case], None]:
    "Add a check to the suite of models with a vision tower"
    IMAGE_CHECKS.append(function)
    return function


class Nonconforming(CookbookError, AssertionError):
    "An engine fails a conformance check"


def require(condition: bool, message: str) -> None:
    "Raise `Nonconforming` unless `condition` holds"
    if not condition:
        raise Nonconforming(message, "Do not train with this engine.")


def require_error(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    "Require that `call` raises `error` with a message that contains `text`"
    try:
        call()
    except error as e:
        require(text in str(e), f"the error does not say {text!r}: {e}")
    else:
        require(False, f"not refused: expected an {error.__name__} that says {text!r}")


def response_tokens(samples: list[Sample]) -> list[list[int]]:
    return [s.response_ids for s in samples]


def require_tokens(samples: list[Sample], want: list[list[int]], message: str) -> None:
    "Require these response tokens"
    require(response_tokens(samples) == want, message)


def logprob_gap(
    case: Case,
    folder: Path,
    s: Sample,
    temperature: float,
    images: Sequence[ImageInput] | None = None,
    first: int = 0,
) -> float:
    "Return the largest difference of log-probs from a teacher-forced pass"
    if images is None:
        images = next((r.images for r in case.requests if r.group_id == s.group_id), ())
    want_T = teacher_forced(folder, s, temperature, images)
    gap_T = (want_T - torch.tensor(s.logprobs)).abs()[first:]
    return max(gap_T.tolist(), default=0.0)


def require_logprobs(
    case: Case,
    folder: Path,
    samples: Iterable[Sample],
    temperature: float = 0.8,
    images: Sequence[ImageInput] | None = None,
) -> None:
    "Require the log-probs of a teacher-forced pass"
    for s in samples:
        gap = logprob_gap(case, folder, s, temperature, images)
        require(
            gap < case.tolerance,
            f"{s.group_id}/{s.index}: log-probs differ by {gap:.1e} "
            f"from a teacher-forced pass at temperature {temperature}",
        )


@engine_check
def greedy_equals_generate(case: Case) -> None:
    "Greedy tokens equal transformers' `generate`"
    for s in case.engine.generate(case.requests[::3], case.sampling(temperature=0)):
        want = greedy_response(case.folder, s.prompt_ids, case.limit)
        require_tokens([s], [want], f"greedy response {s.response_ids}, expected {want}")


@engine_check
def logprobs_are_teacher_forced(case: Case) -> None:
    "Log-probs are those of the sampled distribution"
    for temperature in (0.0, 0.7, 1.0, 1.5):
        samples = case.ask(temperature=temperature)
        require_logprobs(case, case.folder, samples, temperature)


@engine_check
def records_are_complete(case: Case) -> None:
    "One sample for each request, in order; every token has log-prob, mask and version"
    samples = case.ask()
    require(
        [(s.group_id, s.index, s.prompt_ids) for s in samples]
        == [(r.group_id, r.index, r.prompt_ids) for r in case.requests],
        "samples do not come in the order of the requests",
    )
    for s in samples:
        n = len(s.response_ids)
        complete = s.loss_mask == [1] * n and s.versions == [case.engine.version] * n
        require(0 < n <= case.limit and complete, f"incomplete sample {s}")
        require(
            s.finish_reason == "stop" or n == case.limit,
            f"{n} tokens, limit {case.limit}, finish_reason {s.finish_reason}",
        )
    nothing = case.engine.generate([], case.sampling())
    require(nothing == [], "no requests must give no samples")


@engine_check
def group_is_diverse(case: Case) -> None:
    "The samples of one prompt differ, because their seeds do"
    group = case.engine.generate(case.requests[:3], case.sampling(temperature=1.5))
    got = response_tokens(group)
    require(len(set(map(tuple, got))) == 3, f"three seeds gave {got}")


@engine_check
def text_equals_generate(case: Case) -> None:
    "n texts for each text prompt, equal to the same requests in tokens"
    prompts = ["12+30=", "7*8="]
    engine = case.engine
    texts = engine.generate_text(prompts, 2, max_response_tokens=case.limit, seed=5)
    requests = text_requests(prompts, 2, 5, engine.tokenizer)
    samples = engine.generate(requests, case.sampling(temperature=1.0))
    want = [
        engine.tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in samples
    ]
    require(texts == want, f"generate_text returned {texts}, generate {want}")


@engine_check
def seeds_reproduce(case: Case) -> None:
    "Equal requests give equal samples"
    first = case.ask()
    again = case.ask()
    require_tokens(again, response_tokens(first), "the same seeds gave other tokens")
    same = [s.logprobs for s in first] == [s.logprobs for s in again]
    require(same, "the same seeds gave other log-probs")


@engine_check
def batch_mates_do_not_matter(case: Case) -> None:
    "A request gives the same response alone, in reverse order, and among others"
    want = case.ask()
    reverse = case.engine.generate(case.requests[::-1], case.sampling())
    message = "the order of the requests changed responses"
    require_tokens(reverse[::-1], response_tokens(want), message)
    for r, s in list(zip(case.requests, want, strict=True))[::4]:
        alone = case.engine.generate([r], case.sampling())[0]
        pairs = zip(alone.logprobs, s.logprobs, strict=False)
        gap = max(abs(p - q) for p, q in pairs)
        require(
            alone.response_ids == s.response_ids and gap < case.tolerance,
            f"{r.group_id}/{r.index} alone: {alone.response_ids}, among others: {s.response_ids}",
        )


@engine_check
def truncation_renormalises(case: Case) -> None:
    "top_k 1 is greedy with log-prob 0; top_p keeps likely tokens and renormalises"
    one = case.engine.generate(case.requests[::3], case.sampling(top_k=1))
    greedy = case.engine.generate(case.requests[::3], case.sampling(temperature=0))
    require(response_tokens(one) == response_tokens(greedy), "top_k=1 is not greedy")
    logprobs = [p for s in one for p in s.logprobs]
    require(all(abs(p) < 1e-5 for p in logprobs), "top_k=1 must give log-prob 0")
    low = -case.tolerance
    high = math.log(2) + case.tolerance  # at least half of the mass is kept
    for s in case.ask(top_p=0.5):
        rise_T = torch.tensor(s.logprobs) - teacher_forced(case.folder, s, 0.8)
        require(
            bool(((rise_T > low) & (rise_T < high)).all()),
            f"top_p=0.5 changed log-probs by {rise_T.tolist()}",
        )


@engine_check
def update_equals_a_fresh_engine(case: Case) -> None:
    "After an update, outputs and checksums are those of the new weights, and the engine has its own copy"
    old = response_tokens(case.ask())
    weights = folder_weights(case.other)
    want = {name: checksum(t) for name, t in weights.items()}
    case.engine.update_weights(case.engine.version + 1, weights.items())
    for t in weights.values():
        t.zero_()  # the trainer reuses its tensors
    got = case.engine.checksums()
    wrong = [n for n in want if got.get(n) != want[n]]
    require(got == want, f"checksums differ after a weight update: {wrong[:3]}")
    samples = case.ask()
    require(response_tokens(samples) != old, "new weights did not change any response")
    require_logprobs(case, case.other, samples)
    case.close()
    case.built = case.factory(case.other)
    message = "a fresh engine with the same weights gives other responses"
    require_tokens(case.ask(), response_tokens(samples), message)
    case.update_weights(case.folder)
    require_tokens(case.ask(), old, "the old weights do not restore the old responses")


def invalid_updates(weights: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], str]]:
    "Yield invalid weight updates, and the name that the error must contain"
    last = list(weights)[-1]
    yield {n: t for n, t in weights.items() if n != last}, last
    yield weights | {"no.such.weight": torch.ones(2)}, "no.such.weight"
    yield weights | {last: torch.ones(3)}, last


@engine_check
def refused_update_changes_nothing(case: Case) -> None:
    "A missing, unknown or mis-shaped tensor is refused; version and outputs stay"
    before = [(s.response_ids, s.logprobs) for s in case.ask()]
    version = case.engine.version
    for bad, name in invalid_updates(folder_weights(case.other)):
        update = functools.partial(case.engine.update_weights, version + 1, bad.items())
        require_error(update, WeightUpdateError, name)
    require(case.engine.version == version, "a refused update changed the version")
    after = [(s.response_ids, s.logprobs) for s in case.ask()]
    require(after == before, "a refused update changed the outputs")


@engine_check
def altered_update_serves_nothing(case: Case) -> None:
    "A corrupted tensor is named in the error; the engine samples nothing until an update succeeds"
    before = response_tokens(case.ask())
    version = case.engine.version
    weights = folder_weights(case.folder)
    sums = {n: checksum(t) for n, t in weights.items()}
    name = list(weights)[1]
    for compared in (sums, {name: sums[name]}):  # every tensor, or a part
        wrong = compared | {name: sums[name] ^ 1}
        update = functools.partial(
            case.engine.update_weights, version + 1, weights.items(), wrong
        )
        require_error(update, WeightUpdateError, name)
        require_error(case.ask, EngineError, "update_weights")
        require(case.engine.version == version, "a failed update changed the version")
    case.engine.update_weights(version + 1, weights.items(), sums)
    message = "responses changed over a failed update and a good one"
    require_tokens(case.ask(), before, message)


@engine_check
def half_awake_sleeps(case: Case) -> None:
    "An engine without cache can sleep, with or without valid weights, and then accepts any version"
    before = response_tokens(case.ask())
    engine = case.engine
    version = engine.version
    engine.sleep(2)
    engine.wake(["weights"])
    engine.sleep(2)
    engine.wake(["weights"])
    case.update_weights(case.folder)
    engine.sleep(2)
    require(engine.state == "asleep", f"the engine is {engine.state}")
    engine.wake(["weights"])
    engine.update_weights(version, folder_weights(case.folder).items())
    engine.wake(["kv_cache"])
    require(engine.version == version, "an asleep engine refused an older version")
    require_tokens(case.ask(), before, "responses changed over a return to older weights")


@engine_check
def sleep_wake_update(case: Case) -> None:
    "The colocated order: sleep(2), wake weights, update, wake cache; until then generate is refused"
    before = response_tokens(case.ask())
    awake = case.engine.health().get("memory_bytes")
    case.engine.sleep(2)
    require_error(case.ask, EngineError, "asleep")
    if awake is not None:
        freed = awake - case.engine.health()["memory_bytes"]
        size = sum(t.nbytes for t in folder_weights(case.folder).values())
        message = f"sleep(2) freed {freed} bytes of device memory, the weights are {size}"
        require(freed >= size, message)
    case.engine.wake(["weights"])
    require_error(case.ask, EngineError, "update_weights")
    case.update_weights(case.folder)
    require_error(case.ask, EngineError, "kv_cache")
    case.engine.wake(["kv_cache"])
    message = "responses changed over sleep, wake and weight update"
    require_tokens(case.ask(), before, message)


@engine_check
def sleep_level_1_keeps_weights(case: Case) -> None:
    "sleep(1) and wake need no weight update"
    before = response_tokens(case.ask())
    case.engine.sleep(1)
    case.engine.wake()
    require_tokens(case.ask(), before, "responses changed over sleep(1) and wake")


@engine_check
def pause_refuses_generate(case: Case) -> None:
    "While paused, generate is refused and a weight update is allowed"
    case.engine.pause()
    require_error(case.ask, EngineError, "paused")
    case.update_weights(case.folder)
    case.engine.resume()
    require(len(case.ask()) == len(case.requests), "no samples after resume")


def while_generating(case: Case, action: Callable[[], Any]) -> list[Sample]:
    "Run `action` while 40 tokens are generated in another thread; return the samples"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            case.engine.generate, case.requests, case.sampling(max_response_tokens=40)
        )
        while not (case.engine.health()["running"] or job.done()):
            time.sleep(1e-3)
        action()
        return job.result()


@engine_check
def pause_keep_continues_with_new_weights(case: Case) -> None:
    "A paused generation continues after resume; its tokens carry the version that sampled them"

    def update() -> None:
        case.engine.pause("keep")
        case.update_weights(case.other)
        case.engine.resume()

    samples = while_generating(case, update)
    version = case.engine.version
    for s in samples:
        finished = s.finish_reason == "stop" or len(s.response_ids) == 40
        require(finished, "a paused generation did not finish")
        require(
            s.versions == sorted(s.versions) and set(s.versions) <= {version - 1, version},
            "versions must not decrease along a response",
        )
    updated = any(version in s.versions for s in samples)
    require(updated, "no token was sampled after the weight update")
    require_logprobs(case, case.other, case.ask())  # no cache of the old weights
    case.update_weights(case.folder)


@engine_check
def pause_abort_returns_partial_responses(case: Case) -> None:
    "An aborted generation returns at once and leaves nothing in flight"
    samples = while_generating(case, lambda: case.engine.pause("abort"))
    require(any(s.finish_reason == "abort" for s in samples), "no response was aborted")
    require_error(case.ask, EngineError, "paused")
    case.engine.resume()
    require_logprobs(case, case.folder, case.ask())


def sample_keys(samples: Iterable[Sample]) -> list[tuple[str, int]]:
    "Return group and index of each sample"
    return [(s.group_id, s.index) for s in samples]


def collect_all(engine: Engine, decode_steps: int | None = None) -> list[list[Sample]]:
    "Collect until nothing is in flight; return the result of each collect"
    pieces = []
    while engine.in_flight:
        pieces.append(engine.collect(decode_steps=decode_steps))
    return pieces


def require_same(case: Case, samples: list[Sample], wanted: list[Sample]) -> None:
    "Require equal tokens, and log-probs equal up to rounding, in any order"
    found = {(s.group_id, s.index): s for s in samples}
    require(
        sorted(found) == sorted(sample_keys(wanted)),
        f"{sorted(found)} returned, {sorted(sample_keys(wanted))} requested",
    )
    for want in wanted:
        s = found[want.group_id, want.index]
        name = f"{s.group_id}/{s.index}"
        require(
            (s.response_ids, s.finish_reason) == (want.response_ids, want.finish_reason),
            f"{name}: {s.response_ids} {s.finish_reason}, "
            f"alone {want.response_ids} {want.finish_reason}",
        )
        pairs = zip(s.logprobs, want.logprobs, strict=True)
        gap = max(abs(p - q) for p, q in pairs)
        require(gap < case.tolerance, f"{name}: log-probs differ by {gap:.1e}")


@engine_check
def streamed_equals_generate(case: Case) -> None:
    "Requests submitted one by one equal generate, in the same batches each time"
    want = case.ask()

    def stream() -> list[list[Sample]]:
        pieces = []
        for r in case.requests[::-1]:
            case.engine.submit([r], case.sampling())
            pieces.append(case.engine.collect(decode_steps=1))
        return pieces + collect_all(case.engine, 3)

    first, again = stream(), stream()
    require_same(case, [s for piece in first for s in piece], want)
    same = [*map(sample_keys, first)] == [*map(sample_keys, again)]
    require(same, "the same calls returned other pieces")


@engine_check
def collected_in_order(case: Case) -> None:
    "A collect returns finished responses in the order of submission"
    engine = case.engine
    asked = [replace(r, max_response_tokens=2 + r.index) for r in case.requests]
    engine.submit(asked[::-1], case.sampling())
    require(engine.in_flight == len(asked), f"{engine.in_flight} in flight")
    require(engine.health()["in_flight"] == len(asked), "health reports another number")
    pieces = collect_all(engine)
    order = sample_keys(case.engine.generate(asked[::-1], case.sampling()))
    for piece in pieces:
        require(len(piece) > 0, "a collect without a step count returned nothing")
        keys = sample_keys(piece)
        require(keys == sorted(keys, key=order.index), f"the order of a collect is {keys}")
    require(engine.collect() == [], "nothing is in flight, but collect returned samples")
    for r, s in zip(asked, engine.generate(asked, case.sampling()), strict=True):
        require(
            s.finish_reason == "stop" or len(s.response_ids) == r.max_response_tokens,
            f"limit {r.max_response_tokens}, got {s.response_ids}",
        )


@engine_check
def requests_join_while_others_run(case: Case) -> None:
    "A short response that is submitted later returns while the others run"
    engine = case.engine
    engine.submit(case.requests[:6], case.sampling(max_response_tokens=30))
    first = engine.collect(decode_steps=2)
    late = replace(case.requests[-1], max_response_tokens=2)
    other = case.sampling(temperature=0)
    engine.submit([late], other)
    pieces = engine.collect(decode_steps=4)
    require(late.group_id in {s.group_id for s in pieces}, "the late request had to wait")
    rest = [s for piece in collect_all(engine) for s in piece]
    joined = [s for s in pieces if s.group_id == late.group_id]
    require_same(case, joined, engine.generate([late], other))
    want = engine.generate(case.requests[:6], case.sampling(max_response_tokens=30))
    others = [s for s in [*first, *pieces, *rest] if s.group_id != late.group_id]
    require_same(case, others, want)


def interrupted(case: Case, sampling: SamplingParams) -> list[Sample]:
    "Return all responses, each aborted after four steps and continued"
    engine = case.engine
    engine.submit(case.requests, sampling)
    finished = engine.collect(decode_steps=4)
    chosen = case.requests[0].group_id
    aborted = engine.abort([chosen]) + engine.abort()
    require(engine.in_flight == 0, f"{engine.in_flight} in flight after abort")
    marked = all(s.finish_reason == "abort" for s in aborted)
    require(marked, "an aborted response has another finish_reason")
    parts = {(s.group_id, s.index): s for s in aborted}
    again = [r for r in case.requests if (r.group_id, r.index) in parts]
    again = [replace(r, partial=parts[r.group_id, r.index]) for r in again]
    engine.submit(again, sampling)
    for piece in collect_all(engine):
        for s in piece:
            part = parts[s.group_id, s.index]
            n = len(part.response_ids)
            require(
                (s.response_ids[:n], s.logprobs[:n]) == (part.response_ids, part.logprobs),
                f"{s.group_id}/{s.index} does not begin with its partial response",
            )
            require(len(s.response_ids) > n, f"{s.group_id}/{s.index} did not continue")
        finished += piece
    return finished


@engine_check
def aborted_responses_continue(case: Case) -> None:
    "An aborted and continued response equals the uninterrupted one; the limit counts all of it"
    greedy = case.sampling(temperature=0)
    require_same(case, interrupted(case, greedy), case.ask(temperature=0))
    samples = interrupted(case, case.sampling())
    require_logprobs(case, case.folder, samples)
    if case.engine.continues_noise:
        require_same(case, samples, case.ask())
    require_same(case, interrupted(case, case.sampling()), samples)


def updated_gap(case: Case) -> float:
    "Update to `case.other` in flight; return the largest log-prob difference from its weights"
    engine = case.engine
    before = engine.version
    engine.submit(case.requests, case.sampling())
    samples = engine.collect(decode_steps=4)
    case.update_weights(case.other)
    for piece in collect_all(engine):
        samples += piece
    for s in samples:
        n = len(s.response_ids)
        want = ([before] * 4 + [before + 1] * n)[:n]
        require(s.versions == want, f"{s.group_id}/{s.index} has versions {s.versions}")
    require(any(len(s.response_ids) > 5 for s in samples), "no response continued")
    return max(logprob_gap(case, case.other, s, 0.8, first=4) for s in samples)


@engine_check
def update_in_flight_recomputes(case: Case) -> None:
    "After an update the next token depends on the new weights alone"
    gap = updated_gap(case)
    require(gap < case.tolerance, f"after an update log-probs differ by {gap:.1e}")
    require_logprobs(case, case.other, case.ask())
    case.update_weights(case.folder)


@engine_check
def invalid_calls_are_refused(case: Case) -> None:
    "Invalid streaming calls are refused and leave requests in flight unchanged"
    engine = case.engine
    one = case.requests[:1]
    sampling = case.sampling()
    engine.submit(one, sampling)
    for call, words in (
        (lambda: engine.submit(one, sampling), "p0/0 is in flight already"),
        (lambda: engine.submit(case.requests[3:4] * 2, sampling), "p1/0 comes twice"),
        (case.ask, "generate with 1 responses in flight"),
        (engine.sleep, "collect() or abort() them first"),
        (lambda: engine.collect(decode_steps=0), "decode_steps 0"),
    ):
        require_error(call, EngineError, words)
    samples = [s for piece in collect_all(engine) for s in piece]
    require_same(case, samples, engine.generate(one, sampling))
    too_long = [replace(one[0], partial=samples[0], max_response_tokens=1)]
    stopped = samples[0].finish_reason == "stop"
    words = "ended with an end token" if stopped else "the limit is 1"
    require_error(lambda: engine.submit(too_long, sampling), EngineError, words)
    engine.sleep(1)
    require_error(lambda: engine.submit(one, sampling), EngineError, "asleep")
    require_error(engine.collect, EngineError, "asleep")
    engine.wake()


@engine_check
def limits_are_enforced(case: Case) -> None:
    "A response ends at its limit; a prompt that does not fit is refused by name"
    for s in case.ask(max_response_tokens=1):
        require(len(s.response_ids) == 1, f"limit 1, got {s.response_ids}")
    long = [Request(group_id="long", index=0, prompt_ids=[1] * 100_000, seed=0)]
    sampling = case.sampling()
    require_error(lambda: case.engine.generate(long, sampling), EngineError, "long/0")


@engine_check
def stop_tokens_end_a_response(case: Case) -> None:
    "An end token is part of the response and its last token"
    plain = case.ask()
    stops = set(range(0, 264, 3))
    case.close()
    case.built = case.factory(case.folder, stop_token_ids=sorted(stops))
    stopped = case.ask()
    case.close()
    for p, s in zip(plain, stopped, strict=True):
        ends = [i + 1 for i, token in enumerate(p.response_ids) if token in stops]
        want = p.response_ids[: ends[0]] if ends else p.response_ids
        message = (
            f"{s.response_ids} does not end at the first end token of {p.response_ids}"
        )
        require_tokens([s], [want], message)
        ended = s.response_ids[-1] in stops or p.finish_reason == "stop"
        require((s.finish_reason == "stop") == ended, f"finish_reason {s.finish_reason}")


for _check in (
    logprobs_are_teacher_forced,
    seeds_reproduce,
    batch_mates_do_not_matter,
    update_equals_a_fresh_engine,
    requests_join_while_others_run,
    aborted_responses_continue,
    update_in_flight_recomputes,
):
    image_check(_check)


@image_check
def pictures_are_distinguished(case: Case) -> None:
    "Prompts with equal ids and different images share nothing; with equal images they agree"
    greedy = case.sampling(temperature=0)
    first, other = case.requests[0], case.requests[3]
    require(first.prompt_ids == other.prompt_ids, "the prompts differ")
    together = case.engine.generate([first, other], greedy)
    alone = [case.engine.generate([r], greedy)[0] for r in (first, other)]
    require_same(case, together, alone)
    require(together[0].logprobs != together[1].logprobs, "the picture makes no difference")
    repeated = replace(first, group_id="again")
    again = case.engine.generate([first, repeated], greedy)
    require(again[0].logprobs == again[1].logprobs, "one picture, two answers")
    images = [image.reference for image in first.images]
    require(again[0].images == images, f"the sample names {again[0].images}")


@image_check
def placeholders_are_never_sampled(case: Case) -> None:
    "Even if their logits are the largest"
    weights = folder_weights(case.folder)
    config = reference_model(case.folder).config
    never = unsampled_token_ids(config, find_tokenizer(case.folder))
    for token in never:
        weights["lm_head.weight"][token] = 100 * weights["lm_head.weight"][32 + token % 2]
    case.engine.update_weights(case.engine.version + 1, weights.items())
    requests = [
        replace(request, index=1000 * k + request.index, seed=derive_seed(k, 0, n))
        for k in range(4)
        for n, request in enumerate(case.requests)
    ]
    for temperature in (0.0, 1.5):
        sampling = case.sampling(temperature=temperature, max_response_tokens=8)
        for s in case.engine.generate(requests, sampling):
            sampled = set(s.response_ids) & set(never)
            require(not sampled, f"sampled the placeholder {sampled}")
            require(min(s.logprobs) > -50, "log-probs are not renormalised")
    case.update_weights(case.folder)


@image_check
def every_picture_takes_its_tokens(case: Case) -> None:
    "50 sizes and kinds of files: token counts and log-probs agree with our processor"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(case.folder, trust_remote_code=False)
    processor = ImageProcessor(case.folder)
    images = [processor.image(source) for source in many_pictures()]
    requests = [
        Request(
            group_id=image.reference,
            index=0,
            prompt_ids=seeing_ids(config, processor.tokens(image.grid_thw)),
            seed=0,
            images=(image,),
        )
        for image in images
    ]
    samples = case.engine.generate(requests, case.sampling(max_response_tokens=2))
    for sample, image in zip(samples, images, strict=True):
        require_logprobs(case, case.folder, [sample], images=[image])


@image_check
def wrong_placeholders_are_refused(case: Case) -> None:
    "Ids and images that do not match are refused by name"
    first, text = case.requests[0], case.requests[9]
    for wrong in (replace(first, images=()), replace(text, images=first.images)):
        call = functools.partial(case.engine.generate, [wrong], case.sampling())
        require_error(call, EngineError, f"{wrong.group_id}/0 has")


def sharpen_model(folder: Path, factor: float = 4.0, dtype: str = "float32") -> Path:
    "Scale the matrices in the folder of a random model, so that its distributions are peaked"
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, t in weights.items():
            scale = factor if t.ndim > 1 and "embed" not in name else 1.0
            weights[name] = (t * scale).to(getattr(torch, dtype))
            if name.endswith("A_log"):  # vLLM holds the rounded values in float32
                weights[name] = weights[name].float()
        save_file(weights, file, metadata={"format": "pt"})
    return folder
