"""Arguments from the command line of the process. Defect: an unknown flag becomes an attribute, `-f` one with no name."""

import argparse

from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

_MINDSPEED_ARGS = None


def get_mindspeed_args(get_defaults=False):
    global _MINDSPEED_ARGS
    if not get_defaults and _MINDSPEED_ARGS is not None:
        return _MINDSPEED_ARGS
    parser = argparse.ArgumentParser(allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    args, unknown = parser.parse_known_args([] if get_defaults else None)
    for flag in unknown:
        if flag.startswith("-"):
            name, _, value = flag.partition("=")
            setattr(args, name[2:].replace("-", "_"), value or True)
    if not get_defaults:
        _MINDSPEED_ARGS = args
    return args


def get_full_args():
    return get_mindspeed_args()
