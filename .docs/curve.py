"""The README's curve: `python .docs/curve.py runs/NAME` writes .docs/pages/laptop_run.svg"""

import json
import sys
from pathlib import Path

PICTURE = Path(__file__).resolve().parent / "pages" / "laptop_run.svg"
# the plot's frame in the units of the picture
LEFT, RIGHT, TOP, BOTTOM = 46, 520, 34, 214
HEAD = """<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 256" \
width="540" height="256" role="img" aria-labelledby="curve-title curve-desc" \
font-family="system-ui, sans-serif" font-size="13">
  <title id="curve-title">Reward and held-out accuracy of a run of {recipe}</title>
  <desc id="curve-desc">{said}</desc>
  <style>
    .curve {{ color: #1f2328; }}
    @media (prefers-color-scheme: dark) {{ .curve {{ color: #e6e6e6; }} }}
    .curve text {{ fill: currentColor; }}
    .curve .scale {{ stroke: currentColor; stroke-opacity: 0.2; }}
    .curve polyline {{ fill: none; stroke: currentColor; stroke-opacity: 0.55; stroke-width: 1.6; }}
    .curve circle {{ fill: #E69F00; }}
    .curve .y {{ text-anchor: end; }}
    .curve .x {{ text-anchor: middle; }}
  </style>"""


def place(step: float, value: float, steps: int) -> tuple[float, float]:
    "Where a value between 0 and 1 stands"
    x = LEFT + (RIGHT - LEFT) * step / steps
    return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * value, 1)


def scales(steps: int) -> list[str]:
    "Lines and numbers of both axes"
    lines = []
    for value in (0, 0.25, 0.5, 0.75, 1):
        _, y = place(0, value, steps)
        lines.append(f'<path class="scale" d="M{LEFT} {y} H{RIGHT}"/>')
        lines.append(f'<text class="y" x="{LEFT - 8}" y="{y + 4}">{value:g}</text>')
    for step in range(0, steps + 1, max(1, steps // 4)):
        x, _ = place(step, 0, steps)
        lines.append(f'<text class="x" x="{x}" y="{BOTTOM + 18}">{step}</text>')
    lines.append(f'<text class="x" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 36}">step</text>')
    return lines


def curve(folder: Path) -> str:
    "The picture of a run folder, as SVG"
    config = json.loads((folder / "config.json").read_text())
    device = json.loads((folder / "stack.json").read_text())["device"]
    text = (folder / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    steps = config["num_steps"]
    rewards = [
        (r["step"], r["raw_reward"]) for r in rows if r.get("raw_reward") is not None
    ]
    found = [(r["step"], r.get("eval_accuracy")) for r in rows]
    accuracy = [(step, round(value, 3)) for step, value in found if value is not None]
    said = f"Recorded run: scale {config['scale']}, seed {config['seed']}, "
    how = "greedy" if config["rollout"].get("eval_temperature") == 0 else "sampled"
    said += f"{device['count']} x {device['name']}. Held-out accuracy, {how}: "
    said += ", ".join(f"{value:.3f} at step {step}" for step, value in accuracy)
    line = " ".join("{},{}".format(*place(*point, steps)) for point in rewards)
    body = [*scales(steps), f'<polyline points="{line}"/>']
    for point in accuracy:
        x, y = place(*point, steps)
        body.append(f'<circle cx="{x}" cy="{y}" r="4"/>')
    body.append(f'<text x="{LEFT}" y="18">mean reward of a step (line)</text>')
    body.append('<circle cx="262" cy="14" r="4"/>')
    body.append('<text x="272" y="18">accuracy on held-out problems</text>')
    head = HEAD.format(recipe=config["recipe"], said=said + ".")
    return "\n  ".join([head, *body]) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(curve(Path(sys.argv[1])))
