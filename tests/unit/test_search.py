"""The search for layouts finds what trying all of them finds."""

import itertools
import math

import pytest

from cookbook_npu.errors import ConfigError, DeviceError
from cookbook_npu.plan.memory import check_fits
from cookbook_npu.plan.search import (
    RECOMPUTATION,
    SHARES,
    DeviceLayout,
    case_of,
    layout_of,
    search_devices,
    search_layouts,
    search_text,
    with_layout,
)
from cookbook_npu.recipes import find_recipe
from cookbook_npu.terminal import fit

SOC = "Ascend910B1"
MODELS = {
    "qwen3_4b_colocate": "Qwen3-4B",
    "qwen3_5_9b_async": "Qwen3.5-9B",
    "qwen3_vl_8b_ppo": "Qwen3-VL-8B",
}


def config_of(recipe):
    return find_recipe(recipe)("910b", model=MODELS[recipe], prompt_data="(prompts)")


def everything(config, devices):
    "The seconds of every layout of some devices that is valid and fits"
    own = layout_of(config)
    sizes = [size for size in (1, 2, 4, 8) if size <= devices]
    shares = {own.share, *SHARES}
    depths = range(1, config.rollout.max_staleness + 1)
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    micros = {own.micro, longest}
    found = {}
    splits = [
        split for split in itertools.product(sizes, repeat=3) if math.prod(split) <= devices
    ]
    halves = itertools.product(splits, RECOMPUTATION, (False, True), micros)
    for split, *half in halves:
        for trainer, engine, share in itertools.product(
            (None, *range(1, devices)), sizes, shares
        ):
            for depth in depths if trainer else (own.depth,):
                layout = DeviceLayout(devices, trainer, engine, depth, share, *split, *half)
                try:
                    changed = with_layout(config, layout)
                    check_fits(changed, SOC)
                except (ConfigError, DeviceError):
                    continue
                key = trainer, engine, depth
                seconds = case_of(changed, SOC, None, 0.7).simulate().seconds
                found[key] = min(seconds, found.get(key, seconds))
    return sorted(found.values())


@pytest.mark.parametrize("recipe", MODELS)
@pytest.mark.parametrize("devices", [2, 4])
def test_the_search_finds_what_trying_everything_finds(recipe, devices):
    config = config_of(recipe)
    best = search_layouts(config, devices, SOC, top=4)
    assert [one.seconds for one in best] == pytest.approx(everything(config, devices)[:4])
    for one in best:
        check_fits(one.config, SOC)


def test_a_bound_is_never_above_the_simulation():
    config = config_of("qwen3_4b_colocate")
    for one in search_layouts(config, 8, SOC, top=30):
        case = case_of(one.config, SOC, None, 0.7)
        assert case.bound() <= case.simulate().seconds


def test_more_devices_never_make_the_best_step_longer():
    config = config_of("qwen3_5_9b_async")
    seconds = [search_layouts(config, n, SOC, top=1)[0].seconds for n in (4, 8, 16, 32)]
    assert seconds == sorted(seconds, reverse=True)


def test_the_text_fits_a_terminal_and_has_the_error_and_the_cost():
    found = search_devices(config_of("qwen3_vl_8b_ppo"), (8, 16), SOC, prompts=5000)
    text = fit(search_text(found), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "off by" in text and "epoch of 5000 prompts" in " ".join(text.split())
    best = found.layouts[8][0]
    steps = -(-5000 // best.config.rollout.prompts_per_step)
    assert best.npu_hours(5000) == pytest.approx(8 * steps * best.seconds / 3600)
    assert f"{best.npu_hours(5000):.1f}" in text
    assert found.more.layout.devices == 24
