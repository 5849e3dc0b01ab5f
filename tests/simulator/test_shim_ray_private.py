"""The shims of `npu.shims.ray`: each check passes with its shim and fails without."""

from proof import each

# fmt: off
test_shim = each(
    # Without it `start_monitor` reads settings that this node does not have
    ("ray.unused_services", "AttributeError", """
        import ray
        from ray._private.node import Node
        import cookbook_npu.npu.shims.ray
        registry.apply("ray.unused_services")

        def check():
            node = object.__new__(Node)
            return node.start_monitor() is None
    """),
    # A raylet that registers at the third question
    ("ray.node_start", "RuntimeError", """
        import ray
        from ray._private import services
        import cookbook_npu.npu.shims.ray
        asked = []

        def get_node(address, node_id):
            asked.append(node_id)
            if len(asked) < 3:
                raise RuntimeError("no node")
            return {"node_id": node_id}

        services.get_node = get_node
        registry.apply("ray.node_start")

        def check():
            asked.clear()
            return services.get_node("", "n1") == {"node_id": "n1"} and len(asked) == 3
    """),
    # Ray's function starts a program that prints its argument
    ("ray.worker_command", "check() returned False", """
        import subprocess, sys, tempfile
        import ray
        from ray._private import services
        import cookbook_npu.npu.shims.ray
        registry.apply("ray.worker_command")

        def check():
            word = f"--python_worker_command={sys.executable} /ray/setup_worker.py /a.py"
            with tempfile.TemporaryFile("w+") as log:
                info = services.start_ray_process(["echo", word], "worker", False, stdout_file=log)
                info.process.wait()
                log.seek(0)
                return "simulator.preload" in log.read()
    """),
    # No agent of the dashboard starts; that of runtime environments answers on its port
    ("ray.agents", "check() returned False", """
        import psutil
        import ray
        import cookbook_npu.npu.shims.ray
        for name in ("unused_services", "worker_command", "agents"):
            registry.apply(f"ray.{name}")
        def check():
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
            try:
                words = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
                task = ray.remote(lambda: __import__("os").environ["A"])
                value = ray.get(task.options(runtime_env={"env_vars": {"A": "1"}}).remote())
            finally:
                ray.shutdown()
            return value == "1" and not any("dashboard/agent.py" in w for w in words)
    """),
    bootstrap=None,
)
# fmt: on
