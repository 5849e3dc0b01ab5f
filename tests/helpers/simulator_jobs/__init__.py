"""Checks that run inside processes with the simulated NPU; the tests next to this folder start them."""

import traceback


def run_checks(checks):
    "Run each check; returns {name: traceback or ''}, so that one process serves many tests"
    results = {}
    for check in checks:
        try:
            check()
        except Exception:
            results[check.__name__] = traceback.format_exc()
        else:
            results[check.__name__] = ""
    return results


def names(namespace):
    "The checks of a module, in order of definition"
    return [name for name in namespace if name.startswith("check_")]
