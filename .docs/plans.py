"""The front page's table of plans: model, devices and response length, with the origin of each number"""

import html
from collections.abc import Iterator

from cookbook_npu.errors import CookbookError
from cookbook_npu.npu.device import find_soc
from cookbook_npu.plan.plan import make_plan, model_name
from cookbook_npu.plan.time import error_text
from cookbook_npu.recipes import RECIPES, find_recipe
from cookbook_npu.runs.metrics import format_number

COLOCATED = ("qwen3_4b_colocate", "qwen3_5_9b_colocate", "qwen3_vl_8b_grpo")
CHIPS = ("Ascend910B1", "Ascend910B3", "Ascend910B4", "Ascend910_9391")
DEVICES = (4, 8, 16)
LENGTHS = (2048, 4096, 8192, 16384)
HEAD = ("model", "devices", "response tokens", "memory of a device", "s per step", "origin")
Row = tuple[str, ...]


def planned(recipe: str, chip: str, devices: int, length: int) -> Row:
    "The prediction for one layout, or what does not fit"
    soc = find_soc(chip)
    name = model_name(recipe)
    where = f"{devices} x {'A3 (' + chip + ')' if soc.unverified else chip.removeprefix('Ascend')}"
    origin = "predicted, A3 unverified" if soc.unverified else "predicted"
    overrides = {"placement.devices": devices, "sampling.max_response_tokens": length}
    config = find_recipe(recipe)(
        scale="910b", model=name, prompt_data="(prompts)", overrides=overrides
    )
    try:
        plan = make_plan(config, chip)
    except CookbookError as error:
        what = error.what.partition("; its")[0]
        return (
            str(name),
            where,
            str(length),
            f"does not fit: {what}. {error.remedy}",
            "",
            origin,
        )
    largest = max(plan.phases, key=lambda phase: phase.nbytes)
    low = max(phase.low for phase in plan.phases)
    needed = f"{low / 2**30:.0f} to {largest.nbytes / 2**30:.0f}"
    gib = f"{needed} of {plan.capacity / 2**30:.0f} GiB ({largest.name})"
    if largest.nbytes > plan.capacity:
        gib += ": only the lower end fits"
    seconds = format_number(round(plan.step_seconds))
    return str(name), where, str(length), gib, seconds, origin


def known() -> Iterator[Row]:
    "What others reported of these models"
    for name in COLOCATED:
        recipe = RECIPES[name]
        step = recipe.reference.phases.get("step") if recipe.reference else None
        if step:
            where, _, _ = recipe.reference.label.partition(",")
            link = f'reported, <a href="{recipe.reference.link}">source</a>'
            yield str(model_name(name)), where, "up to 8192", "", format_number(step), link


def rows() -> list[Row]:
    "All rows; reported ones first"
    found = list(known())
    for recipe in COLOCATED:
        for chip in CHIPS:
            for devices in DEVICES:
                found += [planned(recipe, chip, devices, length) for length in LENGTHS]
    return found


SCRIPT = """
for (const box of document.querySelectorAll(".plans")) {
  const chosen = [...box.querySelectorAll("select")];
  const show = () => {
    for (const row of box.querySelectorAll("tbody tr")) {
      const cells = [...row.cells].map((cell) => cell.textContent);
      row.hidden = chosen.some((choice, column) => choice.value && cells[column] !== choice.value);
    }
  };
  box.querySelector("form").hidden = false;
  chosen.forEach((choice) => choice.addEventListener("change", show));
  show();
}
"""
CHOSEN = ("Qwen3-4B", "8 x 910B1", "")  # at first


def choice(label: str, values: list[str], chosen: str) -> str:
    "One selector; its empty value shows all rows"
    options = ['<option value="">all</option>']
    for value in dict.fromkeys(values):
        mark = " selected" if value == chosen else ""
        options.append(f"<option{mark}>{html.escape(value)}</option>")
    return f"<label>{label} <select>{''.join(options)}</select></label>"


def page_part() -> str:
    "The table with its selectors as HTML; without a script all rows are shown"
    found = rows()
    values = [[row[column] for row in found if row[column]] for column in range(3)]
    values[2] = [str(length) for length in LENGTHS]
    choices = map(choice, HEAD, values, CHOSEN)
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    lines = []
    for row in found:
        cells = [*map(html.escape, row[:-1]), row[-1]]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    body = "\n".join(lines)
    return f"""<div class="plans"><form hidden>{" ".join(choices)}</form>
<div class="table-wrapper"><table class="docutils"><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
<p>Predicted steps are {error_text("step")}.</p>
</div><script>{SCRIPT}</script>"""
