"""Count functions that are handed the configuration before the first step: `stays.py RECIPE [RECORDS]`."""

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from places import PACKAGE

from cookbook_npu.config import Config
from cookbook_npu.recipes import find_recipe


class Stays:
    "Calls of functions of the package with a configuration, or a section of one, as argument"

    def __init__(self):
        self.calls = Counter()  # (module, function) -> calls
        self.opens = Counter()  # (file, function that opens it) -> times
        self.climbs = 0  # calls from a module that is handed it later than the called one
        self.rooms = {}  # module -> order of its first stay
        self.last = None  # the module of the newest stay
        self.files = ()
        self.on = False
        sys.addaudithook(self._audit)

    def _profile(self, frame, event, arg):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [
            v for n in names if n != "self" and (v := frame.f_locals.get(n)) is not None
        ]
        if any(isinstance(value, Config) for value in given):
            module = str(Path(code.co_filename).relative_to(PACKAGE).with_suffix(""))
            self.calls[module, code.co_qualname] += 1
            room = self.rooms.setdefault(module, len(self.rooms))
            self.climbs += self.last is not None and room < self.rooms[self.last]
            self.last = module

    def _audit(self, event, args):
        if self.on and event == "open" and str(args[0]) in self.files:
            frame = sys._getframe(1)
            while frame and not frame.f_code.co_filename.startswith(str(PACKAGE)):
                frame = frame.f_back
            self.opens[Path(args[0]).name, frame.f_code.co_name if frame else "?"] += 1

    @contextmanager
    def counted(self, files=()):
        self.files, self.on = tuple(map(str, files)), True
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            self.stop()

    def stop(self):
        sys.setprofile(None)
        threading.setprofile(None)
        self.on = False


def write_records(path, count):
    "Write prompts of additions with their labels"
    lines = [json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


def main(name, records=0):
    from cookbook_npu import session

    with tempfile.TemporaryDirectory() as folder:
        overrides = {"output.root": folder, "num_steps": 1, "rollout.eval_every": 0}
        files = []
        if records:
            files = [Path(folder, "prompts.jsonl"), Path(folder, "held_out.jsonl")]
            write_records(files[0], int(records))
            files[1].write_text(json.dumps({"prompt": "1-1=", "label": "0"}) + "\n")
            overrides |= {
                "data.prompt_data": str(files[0]),
                "data.eval_data": str(files[1]),
            }
        config = find_recipe(name)(overrides=overrides)
        stays = Stays()
        began = time.process_time()
        with stays.counted(files), session(config):
            stays.stop()
            seconds = time.process_time() - began
    functions, rooms = len(stays.calls), len(stays.rooms)
    print(
        f"{name}: {functions} functions in {rooms} modules, {stays.calls.total()} calls, "
        f"{stays.climbs} climbs, {seconds:.2f} s of CPU (traced)"
    )
    for module, count in Counter(m for m, _ in stays.calls).most_common():
        inner = ", ".join(f"{f} {n}" for (m, f), n in stays.calls.items() if m == module)
        print(f"  {module} {count}: {inner}")
    for (file, function), count in sorted(stays.opens.items()):
        print(f"  {file} opened {count} times by {function}")


if __name__ == "__main__":
    main(*sys.argv[1:])
