"""Patches by dotted path, applied wherever the old value is held. Defect: `hasattr` wakes every lazy module in the process."""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec


class Patch:
    def __init__(self, path, new, create_dummy):
        self.module_name, self.name = path.rsplit(".", 1)
        self.owner = self.original = self.final = self.replacement = None
        self.wrappers, self.create_dummy = [], create_dummy
        self.set_patch_func(new)

    def set_patch_func(self, new, force_patch=False):
        if new is not None and new.__name__.endswith(("wrapper", "decorator")):
            self.wrappers += [new] if new not in self.wrappers else []
        elif self.replacement is not None and not force_patch:
            raise RuntimeError(f"the patch of {self.name} exist !")
        else:
            self.replacement = new

    def _replace(self, old, new, spare="-"):
        for name, module in list(sys.modules.items()):
            if (
                spare not in name
                and hasattr(module, self.name)
                and getattr(module, self.name) is old
            ):
                setattr(module, self.name, new)

    def apply_patch(self):
        owner = self._resolve()
        now = getattr(owner, self.name, None)
        if self.owner is None:
            self.owner, self.original = owner, now
        final = self.replacement if self.replacement is not None else self.original
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.owner, self.name, final)
        self._replace(now, final)
        self.final = final

    def remove_patch(self):
        self._replace(self.final, self.original, spare="mindspeed")
        if isinstance(self.owner, type) and getattr(self.owner, self.name) is self.final:
            setattr(self.owner, self.name, self.original)
        self.replacement, self.wrappers = None, []

    def _resolve(self):
        found, names = None, self.module_name.split(".")
        for i in range(1, len(names) + 1):
            path = ".".join(names[:i])
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                if found is not None and hasattr(found, names[i - 1]):
                    return getattr(found, names[i - 1])
                if not self.create_dummy:
                    raise
                dummy = sys.modules[path] = types.ModuleType(path)
                dummy.__spec__, dummy.__path__ = ModuleSpec(path, None), []
                if found is not None:
                    setattr(found, names[i - 1], dummy)
                found = dummy
        return found


class MindSpeedPatchesManager:
    patches_info = {}

    @staticmethod
    def register_patch(path, new=None, force_patch=False, create_dummy=False):
        known = MindSpeedPatchesManager.patches_info
        if path in known:
            known[path].set_patch_func(new, force_patch)
        else:
            known[path] = Patch(path, new, create_dummy)

    @staticmethod
    def remove_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()

    @staticmethod
    def apply_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()
