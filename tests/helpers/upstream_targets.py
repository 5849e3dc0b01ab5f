"""What the processes of test_upstream.py run: every record against the checkouts on their PYTHONPATH."""

import importlib

from shims_targets import train

from cookbook_npu.errors import ShimError
from cookbook_npu.npu.shims.registry import registry


def back(shim):
    "Undo a shim: whether every place holds the previous value again, and what the probe sees then"
    changes = [change for change in shim.patch.changes if shim.patch.holds(change)]
    # MindSpeed may have replaced it since: its value is kept
    left = shim.undo(keep_foreign=True).detail
    # of several changes to one place the first one has the original value
    first = {str(change.place): change for change in reversed(changes)}
    restored = all(change.place.get() is change.old for change in first.values())
    try:
        needed, seen = shim.needed()
    except ShimError as error:  # some can only be probed before megatron is imported
        needed, seen = True, str(error)
    return {"restored": restored, "needed_again": needed, "seen_again": seen, "left": left}


def contract(rank, world_size, tensor):
    "A training step on these sources, the report of every record, and each of them undone in reverse order"
    history, _ = train(rank, world_size, tensor=tensor, sequence=tensor > 1, steps=2)
    report = registry.report()
    undone = {name: back(registry[name]) for name in reversed(registry.applied())}
    sources = {
        name: importlib.import_module(name).__path__[0] for name in ("megatron.core",)
    }
    return {"history": history, "report": report, "undone": undone, "sources": sources}
