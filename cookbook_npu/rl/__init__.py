"""The algorithm, without devices or processes: pure functions of tensors

`advantages` (GRPO, RLOO, GDPO, GAE), `losses` (PPO's clip and its relatives, KL estimates, weights of the
tokens, importance sampling, distillation), `sequences` (responses of context-parallel and packed rows),
`filters` (dynamic sampling, staleness), and `algorithms`, which joins them as a configuration says.
Shapes are in the names: `logp_BT` has a row for each response and a column for each token.
"""
