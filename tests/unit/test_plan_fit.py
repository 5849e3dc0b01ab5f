"""The fit to published runs: a prediction never sees the row that it predicts."""

from dataclasses import asdict

from cookbook_npu.plan.fit import (
    CONSTANTS,
    chip_speeds,
    fit_constants,
    leave_one_out,
    predicted_seconds,
)
from cookbook_npu.plan.published import published_runs
from cookbook_npu.plan.time import speeds_of

COUNTED = [run for run in published_runs() if not run.excluded]


def test_the_default_speeds_are_those_of_the_fit():
    fitted, default = asdict(fit_constants(COUNTED)), asdict(speeds_of())
    for constant in CONSTANTS:
        assert abs(default[constant] / fitted[constant] - 1) < 0.005, constant


def test_the_prediction_of_a_row_does_not_depend_on_its_own_times():
    before = {(e.run, e.phase): e.predicted for e in leave_one_out(COUNTED)}
    for i, run in enumerate(COUNTED):
        seconds = {name: 3 * value for name, value in run.seconds.items()}
        changed = run.model_copy(update={"seconds": seconds})
        after = leave_one_out([*COUNTED[:i], changed, *COUNTED[i + 1 :]])
        own = [e for e in after if e.run == run.name]
        assert own and all(e.predicted == before[e.run, e.phase] for e in own)


def test_excluded_rows_do_not_move_the_fit():
    assert fit_constants(published_runs()) == fit_constants(COUNTED)
    assert {e.run for e in leave_one_out(published_runs())} == {run.name for run in COUNTED}


def test_each_row_is_predicted_with_its_own_chip():
    run = next(run for run in COUNTED if run.soc == "Ascend910B1")
    slow = run.model_copy(update={"soc": "Ascend910B3"})
    fast, slower = (
        predicted_seconds(r, chip_speeds(r, speeds_of()))["actor_train"]
        for r in (run, slow)
    )
    assert abs(slower / fast - 24 / 20) < 1e-9
