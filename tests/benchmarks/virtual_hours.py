"""What virtual hours of an asynchronous run cost:
`python tests/benchmarks/virtual_hours.py [--devices 512] [--hours 12] [--prompts 1024]`

The driver on a virtual clock (train.virtual_run): half of the devices for the trainer, two for each
engine, 8 responses to each prompt, a decode step of 30 ms, 80 s of training. One engine in a hundred is
slow, and each is lost once a week. Compared with the model of the schedule (plan.schedule), which has no
driver and no losses. Times are modelled: what is measured is the processor time of this program.
"""

import time

from options import option_parser

from cookbook_npu.plan.schedule import PhaseTimes, Workload, simulate_schedule
from cookbook_npu.recipes import qwen3_5_9b_async
from cookbook_npu.train.virtual_run import Disturbances, VirtualRun

TIMES = PhaseTimes(token=0.03, row=8e-5, train=80.0, update_weights=2.0, recompute=1e-5)
WEEK = 7 * 24.0


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--devices", type=int, default=512)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--prompts", type=int, default=1024)
    args = parser.parse_args()
    engines = args.devices // 4
    config = qwen3_5_9b_async(
        overrides={
            "placement.devices": 2 * engines,  # the engine of this scale has one device
            "placement.trainer_devices": engines,
            "rollout.prompts_per_step": args.prompts,
            "rollout.samples_per_prompt": 8,
            "rollout.decode_steps": 16,
            "train.global_batch_size": 8 * args.prompts,
            "train.save_every": 10,
            "faults.max_restarts": 1000,
        }
    )
    work = Workload(args.prompts, 8, 1500, 8192, engines=engines)
    disturbances = Disturbances(slow_engines=engines // 100, hours_between_losses=WEEK)
    began = time.process_time()
    result = VirtualRun(config, TIMES, work, disturbances).simulate(args.hours)
    seconds = time.process_time() - began
    responses = 8 * args.prompts * result.steps
    print(
        f"{result.hours:.1f} hours of {args.devices} devices: {result.steps} steps of "
        f"{result.seconds:.1f} s, {result.losses} losses, {responses:,} responses"
    )
    began = time.process_time()
    depth, staleness = config.rollout.depth, config.rollout.max_staleness
    model = simulate_schedule(TIMES, work, depth, staleness, steps=result.steps, skip=0)
    alone = time.process_time() - began
    print(
        f"the model without losses: {model.seconds:.1f} s a step, {alone:.1f} s of processor time"
    )
    print(f"processor time: {seconds:.1f} s, {1e6 * seconds / responses:.0f} us a response")


if __name__ == "__main__":
    main()
