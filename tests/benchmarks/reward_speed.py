"""How many answers a second the reward pool grades.

    python tests/benchmarks/reward_speed.py [--workers N] [--answers N] [--data FILE]

Prints one JSON line for each kind of answer. Without --data the answers look like GSM8K's: a few sentences of
reasoning with calculations, then `#### number` or a box; a tenth are wrong, a quarter have no marked answer.
With --data they are the answers of a GSM8K JSONL file. The aim is 200 a second on two cores.
"""

import json
import os
import random
import time
from collections.abc import Callable

from options import option_parser

from cookbook_npu.config import RewardConfig
from cookbook_npu.data.rewards import RewardPool
from cookbook_npu.data.sample import Sample

SENTENCE = (
    "She sells {a} clips in {m} and {b} in May, which makes "
    "{a}+{b} = <<{a}+{b}={c}>>{c} clips altogether. "
)


def sample(number: int, text: str, label: str) -> Sample:
    "A response as an engine returns it"
    return Sample(
        group_id=str(number),
        index=0,
        prompt_ids=[1],
        response_ids=[1],
        logprobs=[0.0],
        loss_mask=[1],
        versions=[0],
        finish_reason="stop",
        text=text,
        label=label,
    )


def integers(rng: random.Random) -> tuple[str, str]:
    "A GSM8K-like answer: an integer"
    a = rng.randrange(2000)
    b = rng.randrange(2000)
    months = ("March", "April", "June")
    text = "".join(SENTENCE.format(a=a, b=b, c=a + b, m=month) for month in months)
    said = a + b if rng.random() < 0.9 else a + b + 1
    ending = rng.choice(
        [
            f"\n#### {said:,}",
            rf"So \boxed{{{said}}}.",
            f"The answer is ${said}$.",
            "I do not know.",
        ]
    )
    return text + ending, str(a + b)


def expressions(rng: random.Random) -> tuple[str, str]:
    "A MATH-like answer: a fraction, a root, a pair"
    a = rng.randrange(2, 50)
    b = rng.randrange(2, 50)
    answer = rng.choice(
        [
            rf"\frac{{{a}}}{{{b}}}",
            rf"{a}\sqrt{{{b}}}",
            rf"({a},\frac{{{b}}}{{2}})",
            rf"{a}x^2+{b}",
            f"{a / b:.4f}",
        ]
    )
    return rf"After some work we find \boxed{{{answer}}}.", rf"\frac{{{2 * a}}}{{{2 * b}}}"


def from_file(path: str) -> Callable[[random.Random], tuple[str, str]]:
    "Answers of a GSM8K file, as if the policy had written them"
    with open(path, encoding="utf-8") as file:
        answers = [json.loads(line)["answer"] for line in file]

    def make(rng: random.Random) -> tuple[str, str]:
        text = rng.choice(answers)
        return text, text.rpartition("####")[2].strip().replace(",", "")

    return make


def rate(
    make: Callable[[random.Random], tuple[str, str]], workers: int, answers: int
) -> dict[str, float]:
    "Grade `answers` answers with the math scorer, after a warm-up"
    rng = random.Random(0)
    samples = [sample(i, *make(rng)) for i in range(answers)]
    with RewardPool(RewardConfig(scorers={"math": 1.0}, workers=workers)) as pool:
        pool.score(samples[:50])
        start = time.perf_counter()
        scores = pool.score(samples)
        seconds = time.perf_counter() - start
    return {
        "answers_per_s": round(answers / seconds, 1),
        "mean_reward": round(sum(scores) / answers, 3),
        "timed_out": pool.counts.timed_out,
    }


def main() -> None:
    "Measure and print"
    parser = option_parser(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="grading processes")
    parser.add_argument("--answers", type=int, default=2000, help="answers of each kind")
    parser.add_argument("--data", help="a GSM8K JSONL file")
    args = parser.parse_args()
    kinds = (
        {"gsm8k file": from_file(args.data)}
        if args.data
        else {"integers": integers, "expressions": expressions}
    )
    for name, make in kinds.items():
        row = {"kind": name, "workers": args.workers, "cores": os.cpu_count()}
        print(json.dumps(row | rate(make, args.workers, args.answers)))


if __name__ == "__main__":
    main()
