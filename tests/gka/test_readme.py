"""The table of gka/README.md that says what each implementation serves."""

import re

import pytest

from gka.dispatch import IMPLEMENTATIONS
from gka.validation import FLOATING
from sources import ROOT

ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in (ROOT / "gka/README.md").read_text().splitlines()
    if re.match(r"\| `(impl|reference|triton|cpu|flex|sdpa)` \|", line)
]
TABLE = {row[0]: dict(zip(ROWS[0], row)) for row in ROWS if len(row) == len(ROWS[0])}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_page_says_what_an_implementation_serves(name):
    row, serves = TABLE[name], IMPLEMENTATIONS[name].SERVES
    for option in ("causal", "window", "lengths", "attn_mask"):
        assert (row[option] == "yes") == (option in serves.options), option
    padding = "yes" if "key_padding_mask" in serves.options else "packed" if "lengths" in serves.options else "no"
    assert row["key_padding_mask"] == padding
    assert (row["forward mode"] == "yes") == ("forward_mode" in serves.options)
    missing = [str(dtype).removeprefix("torch.") for dtype in FLOATING if dtype not in serves.dtypes]
    assert row["dtypes"] == (f"all but {', '.join(missing)}" if missing else "all")
    most, least = serves.max_head_dim, serves.min_head_dim
    assert row["head_dim"] == (f"up to {most}" if most else f"{least} or more" if least > 1 else "any")
    assert row["eps"] == ("applied" if serves.applies_eps else "dropped")
