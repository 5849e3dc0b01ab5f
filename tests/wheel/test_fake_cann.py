"""The fake CANN says no to everything that it does not do."""

from npu_wheel import build, cann


def test_every_stub_refuses_and_names_itself(lane):
    library = build.build()[0] / "lib" / "libascendcl.so"
    (answers,) = lane(
        "stubs", kwargs=dict(names=sorted(build.refusing()), library=str(library))
    )
    assert len(answers) > 40 and "aclopCompileAndExecute" in answers
    pointers = cann.returning_pointers(build.site())
    for name, (answer, message) in answers.items():
        assert answer in (500001, 0) and name in message
        assert answer or name in pointers, f"{name} reports success"


def test_collectives_of_hccl_are_not_there(lane):
    """The simulator's take their place; torch_npu's own process group cannot start one."""
    (error,) = lane("own_collective")
    assert error is not None and "Hccl" in error[1]


def test_computing_without_a_kernel_raises(lane):
    for error in lane("compute_without_a_kernel")[0]:
        assert error is not None and error[0] == "RuntimeError"
