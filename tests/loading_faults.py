"""The faults of tests/mutants.py in mixtures of experts, and in how weights are read from files:
layouts, FP8 and Int4 codes with their scales. What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

EXPERTS, CHECKPOINT, WEIGHTS = "parallel/experts.py", "model/checkpoint.py", "model/weights.py"
CONFIG = "model/config.py"


def prefill(case: str) -> str:
    return f"tests/model/test_mixtures.py::test_prefill_equals_transformers[{case}]"


def codes(case: str) -> str:
    return (
        "tests/model/test_quantised.py::"
        f"test_logits_and_drafts_are_those_of_the_dequantised_weights[{case}]"
    )


LOADING_FAULTS = (
    Fault(
        "weights of the chosen experts do not add up to one",
        EXPERTS,
        "if normalised:",
        "if not normalised:",
        prefill("mixture-1-False"),
    ),
    Fault(
        "norm_topk_prob of config.json not read",
        CONFIG,
        'normalised=bool(text.get("norm_topk_prob", True))',
        "normalised=True",
        prefill("next, one layer dense-1-False"),
    ),
    Fault(
        "shared expert without its gate",
        EXPERTS,
        "(total + gate * shared.float())",
        "(total + shared.float())",
        prefill("mixture-1-False"),
    ),
    Fault(
        "every rank's experts counted from the first",
        "model/blocks.py",
        "first_expert=device.tp.rank * per_rank",
        "first_expert=0 * per_rank",
        prefill("mixture-2-True"),
    ),
    Fault(
        "gate and up of fused experts swapped",
        CHECKPOINT,
        '("gate_proj", "up_proj") if',
        '("up_proj", "gate_proj") if',
        prefill("mixture-1-False"),
    ),
    Fault(
        "z read in the place of values in packed projections",
        CHECKPOINT,
        '"in_proj_z": [(v + values * dv, values * dv)]',
        '"in_proj_z": [(v, values * dv)]',
        prefill("next-1-False"),
    ),
    Fault(
        "b and a of packed projections swapped",
        CHECKPOINT,
        '"in_proj_b": [(0, values)], "in_proj_a": [(values, values)]',
        '"in_proj_a": [(0, values)], "in_proj_b": [(values, values)]',
        prefill("next-1-False"),
    ),
    Fault(
        "scales of the first columns for every rank's columns",
        CHECKPOINT,
        "wanted = torch.tensor(columns) // block_columns",
        "wanted = (torch.tensor(columns) - columns[0]) // block_columns",
        codes("fp8-4"),
    ),
    Fault(
        "scales of the first rows for every rank's rows",
        CHECKPOINT,
        "at = (own + run.at - run.first) // block_rows",
        "at = (own - rows[0]) // block_rows",
        codes("fp8-4"),
    ),
    Fault(
        "blocks made at load begin at each rank's own columns",
        WEIGHTS,
        "(start // blocks[0] * blocks[0], min",
        "(start, min",
        codes("fp8 at load-4"),
    ),
    Fault(
        "Int4 codes of neighbouring columns swapped",
        WEIGHTS,
        "codes[:, ::2] | codes[:, 1::2] << 4",
        "codes[:, 1::2] | codes[:, ::2] << 4",
        codes("int4-1"),
    ),
    Fault(
        "Int4 code of zero taken for the one that the files hold",
        "parallel/formats.py",
        "((codes - INT4_ZERO)",
        "((codes - INT4_ZERO + 1)",
        codes("int4-1"),
    ),
)
