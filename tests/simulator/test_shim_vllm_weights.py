"""The worker of vllm-ascend up to 0.23 reloads with vLLM's configuration set."""

from proof import run_check


def test_a_reload_sets_the_configuration():
    run_check(
        """
        import contextlib, sys, types
        from cookbook_npu.npu.shims import vllm_weights
        inside = []
        @contextlib.contextmanager
        def set_current_vllm_config(config):
            inside.append(config)
            yield
            inside.clear()
        sys.modules["vllm"] = types.ModuleType("vllm")
        sys.modules["vllm.config"] = types.ModuleType("vllm.config")
        sys.modules["vllm.config"].set_current_vllm_config = set_current_vllm_config
        class Runner:
            def reload_weights(self, weights_iterator=None):
                self.got = (list(weights_iterator), list(inside))
        def check():
            worker = types.SimpleNamespace(model_runner=Runner(), vllm_config="config")
            vllm_weights.reload_function(worker)(weights_iterator=iter([("w", 1)]))
            return worker.model_runner.got == ([("w", 1)], ["config"]) and not inside
        """,
        bootstrap=None,
    )
