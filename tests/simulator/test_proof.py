"""What `prove` and `host_reads` refuse and find: tools of the tests of this folder."""

import pytest
from proof import SIMULATED_CUDA, prove, run_check

from cookbook_npu.errors import ShimError

MARKED = """
    import types
    from cookbook_npu.npu.shims.registry import Shim
    project = types.SimpleNamespace(answer=lambda: 1)
    def repaired(): return 2
    repaired.mark = True

    @registry.register
    class Answer(Shim):
        name = target = "project.answer"
        reason = link = "-"
        phase = "device"

        def needed(self):
            return True, "it answers 1"

        def install(self, patch):
            patch.setattr(project, "answer", repaired)

        def verify(self):
            return VERIFY

    registry.apply("project.answer")
    def check(): return project.answer() == 2
"""


def test_a_check_that_does_not_need_its_shim_is_refused():
    idle = "def check(): return True"
    with pytest.raises(ShimError, match="returned True"):
        prove("torch.tensor_type_names", idle, "False", bootstrap=SIMULATED_CUDA)


def test_a_check_that_fails_is_refused():
    with pytest.raises(ShimError, match="did not return True"):
        run_check("def check(): return rank < 0", bootstrap=None)


def test_a_verify_that_looks_for_a_marker_is_refused():
    "The original with the marker passes it"

    def prove_marked(verify):
        code = MARKED.replace("VERIFY", verify)
        prove("project.answer", code, "check() returned False", bootstrap=None)

    with pytest.raises(ShimError, match="with the original functions restored"):
        prove_marked("getattr(project.answer, 'mark', False)")
    prove_marked("project.answer() == 2")


def test_host_reads_are_recorded_with_their_place():
    "The backward pass included; reading host tensors and writing to the device are not"
    run_check(
        """
        import torch
        from host_reads import host_reads
        class ReadsGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, grad):
                assert grad.sum().item() > 0
                return grad
        def check():
            x = torch.arange(4.0, device="npu", requires_grad=True)
            with host_reads() as reads:
                (x * 2).sum().backward()
                torch.tensor([3, 4]).to("npu")
                torch.tensor([3, 4]).tolist()
            assert reads == [], reads
            with host_reads() as reads:
                x.sum().item()
                x.tolist()
                x[x > 1]
                x.detach().cpu()
                ReadsGradient.apply(x).sum().backward()
            one = "_local_scalar_dense"
            assert reads[-1].place.endswith("backward"), reads
            return [read.operator for read in reads] == [one, "_to_copy", "index", "_to_copy", one]
        """,
        bootstrap="simulator",
    )
