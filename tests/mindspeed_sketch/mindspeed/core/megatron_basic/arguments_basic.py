"""Defect: every TransformerConfig starts from the arguments of the process."""

import inspect
from dataclasses import field, make_dataclass
from functools import wraps

from mindspeed.args_utils import get_full_args


def transformer_config_init_wrapper(fn):
    @wraps(fn)
    def wrapper(self, *args, **kwargs):
        values = {**vars(get_full_args()), **kwargs}
        known = {
            k: v for k, v in values.items() if k in inspect.signature(type(self)).parameters
        }
        unknown = {
            k: v for k, v in values.items() if k not in known and not hasattr(self, k)
        }
        fields = [(str(k), type(v), field(init=False)) for k, v in unknown.items()]
        self.__class__ = make_dataclass(
            type(self).__name__, fields=fields, bases=(type(self),)
        )
        for name, value in unknown.items():
            setattr(self, name, value)
        fn(self, *args, **known)

    return wrapper
