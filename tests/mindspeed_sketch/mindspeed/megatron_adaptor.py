"""Patches when it is imported. Defects: replaces the handlers of the root logger; `repatch` drops what others wrapped."""

from logging.config import dictConfig

from torch_npu.contrib import transfer_to_npu  # noqa: F401

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

dictConfig(
    {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {
            "console": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
        },
        "root": {"handlers": ["console"], "level": "INFO"},
    }
)


def patch_features(args):
    MindSpeedFeaturesManager.apply_features_pre_patches(args)
    MindSpeedFeaturesManager.apply_features_patches(args)


def repatch(args):
    MindSpeedFeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    patch_features(full_args)


patch_features(get_mindspeed_args())
