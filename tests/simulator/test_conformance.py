"""The conformance suite finds faulty engines; test_engines.py runs all of it on both real ones."""

from ranks import run_ranks


def test_faulty_engines_are_found(tmp_path):
    target = "conformance_jobs:faulty"
    (found,) = run_ranks(
        target, 1, dict(folder=str(tmp_path)), bootstrap="rollout", timeout=300
    )
    assert len(found) == 7
    for engine, words in {
        "KeepsItsHead": "differ after a weight update: ['model.embed_tokens.weight']",
        "IgnoresTemperature": "temperature 0.7",
        "KeepsItsCache": "after an update log-probs",
        "ChangesItsSeed": "alone",
        "OneText": "generate_text returned",
        "IgnoresPictures": "",
        "SamplesAnything": "sampled the placeholder",
    }.items():
        assert words in found[engine] and found[engine] != "passed", (engine, found)
