"""Prove that a shim works and is needed: a check passes with it and fails without.

A shim changes its process, so `prove` runs code that defines `check()` in new processes with the simulated
NPU: with the shim it must pass, after `undo` it must fail in the expected way. With the original functions
restored but carrying all attributes of their replacements, `verify()` must return False.
"""

import textwrap
import traceback
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from ranks import run_ranks

from cookbook_npu.config.sections import shims_environment
from cookbook_npu.errors import ShimError
from cookbook_npu.npu.shims.registry import registry

# for `bootstrap`: the simulated NPU with CUDA names redirected to it, without Megatron
SIMULATED_CUDA = "cookbook_npu.npu.shims.torch.device_api:simulated_cuda"


class _CheckRaised(Exception):
    "An error of a check; its text is the traceback"


def failure_of(check: Callable[[], Any]) -> str:
    "Return the traceback of a check that is expected to fail, or what it returned"

    def call() -> str:
        try:
            return f"check() returned {check()!r}"
        except Exception as error:
            raise _CheckRaised(traceback.format_exc()) from error

    try:
        return call()
    except _CheckRaised as raised:
        return str(raised)


def look_alike(original: Any, replacement: Any) -> Any:
    "Return a copy of the original with the attributes of its replacement"
    if isinstance(original, property) and isinstance(replacement, property):
        return property(original.fget, look_alike(original.fset, replacement.fset))
    if not isinstance(original, FunctionType):
        return original
    copy = FunctionType(
        original.__code__,
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__annotations__ = original.__annotations__
    vars(copy).update(vars(original))
    for name, value in getattr(replacement, "__dict__", {}).items():
        if not name.startswith("__"):  # __wrapped__ and __signature__ change the call
            vars(copy)[name] = value
    return copy


def verifies_originals(shim: str) -> bool:
    "Whether `verify()` of an applied shim accepts the originals; the shim stays applied"
    patch = registry[shim].patch
    changes = [change for change in patch.changes if patch.holds(change)]
    for change in reversed(changes):
        change.place.put(look_alike(change.old, change.new))
    try:
        return registry[shim].verify()
    finally:
        for change in changes:
            change.place.put(change.new)


def proof_in_rank(
    rank: int,
    world_size: int,
    code: str,  # defines check(); sees rank, world_size and registry
    shim: str,  # name of the shim to undo; "": run the check once
) -> tuple[bool, bool, str]:  # passed; verify() accepts the originals; failure without it
    "Run a proof in one process"
    names: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "registry": registry,
    }
    exec(compile(textwrap.dedent(code), f"<proof of {shim}>", "exec"), names)
    check = names["check"]
    passed = check() is True
    if not shim:
        return passed, False, ""
    accepts = verifies_originals(shim)
    registry.undo(shim)
    return passed, accepts, failure_of(check)


def prove(
    shim: str,
    code: str,  # defines check(), which returns True on success
    without: str,  # expected in the traceback (or "check() returned ...") without the shim
    ranks: int = 1,
    bootstrap: str | None = "trainer",  # as in `run_ranks`
    timeout: float = 180,  # s
    preload: Sequence[str] = (),  # as in `run_ranks`
    shims: Sequence[str] = (),  # your own, files or modules, as the configuration key
) -> None:
    "Raise `ShimError` unless `check` passes only with the shim, and `verify()` rejects the originals"
    results = run_ranks(
        "proof:proof_in_rank",
        ranks,
        kwargs={"code": code, "shim": shim},
        env=dict(shims_environment(shims)),
        bootstrap=bootstrap,
        timeout=timeout,
        preload=preload,
    )
    for passed, accepts, failure in results:
        if not passed:
            raise ShimError(
                f"the check of {shim} did not return True with the shim",
                "Fix the shim or the check.",
            )
        if accepts:
            raise ShimError(
                f"verify() of {shim} returned True with the original functions restored",
                "Test what the function does, not an attribute.",
            )
        if without not in failure:
            raise ShimError(
                f"without {shim} the check ended unexpectedly:\n{failure}",
                f"It should mention {without!r}.",
            )


def each(*rows: tuple, fixture: str = "", **common: Any) -> Callable[..., None]:
    """Return a test of rows (shim, what its check says without it, code, options of `prove`)

    Where the second is None the code is a check without a shim, and the first is its name. A
    fixture gives what stands before the code of each row."""
    import pytest  # processes of tests have no use for it

    @pytest.mark.parametrize("row", rows, ids=lambda row: row[0])
    def test(row: tuple, request: Any) -> None:
        name, without, code, *options = row
        code = (request.getfixturevalue(fixture) if fixture else "") + code
        chosen = common | dict(*options)
        if without is None:
            run_check(code, **chosen)
        else:
            prove(name, code, without, **chosen)

    return test


def run_check(
    code: str,
    ranks: int = 1,
    bootstrap: str | None = "trainer",
    fresh: bool = False,
    preload: Sequence[str] = (),
) -> None:
    "Run a check once; raise `ShimError` unless it returns True"
    results = run_ranks(
        "proof:proof_in_rank",
        ranks,
        kwargs={"code": code, "shim": ""},
        bootstrap=bootstrap,
        timeout=180,
        fresh=fresh,
        preload=preload,
    )
    if not all(passed for passed, *_ in results):
        raise ShimError("a check did not return True", "Fix what it checks.")
