"""What each implementation of the operator serves, as they declare it."""

from gka.dispatch import IMPLEMENTATIONS
from gka.request import HIDING, Serves
from gka.validation import FLOATING
from runs.table import Table

ORDER = ("causal", "window", "lengths", "key_padding_mask", "attn_mask")
assert set(ORDER) == HIDING


def serves() -> list[Table]:
    """Masks and padding, forward-mode derivatives, dtypes and head sizes by implementation."""
    headings = ["`impl`", *(f"`{option}`" for option in ORDER), "forward mode", "dtypes", "head_dim", "eps"]
    rows = [[f"`{name}`", *_cells(one.SERVES)] for name, one in IMPLEMENTATIONS.items()]
    return [Table.of(headings, rows, words=len(headings))]


def _cells(serves: Serves) -> list[str]:
    masks = ["yes" if option in serves.options else "no" for option in ORDER]
    if masks[ORDER.index("lengths")] == "yes" and masks[ORDER.index("key_padding_mask")] == "no":
        masks[ORDER.index("key_padding_mask")] = "packed"
    missing = [str(dtype).removeprefix("torch.") for dtype in FLOATING if dtype not in serves.dtypes]
    limits = [f"{serves.min_head_dim} or more" if serves.min_head_dim > 1 else ""]
    limits += [f"up to {serves.max_head_dim}" if serves.max_head_dim else ""]
    dtypes = f"all but {', '.join(missing)}" if missing else "all"
    forward_mode = "yes" if "forward_mode" in serves.options else "no"
    return [
        *masks,
        forward_mode,
        dtypes,
        ", ".join(filter(None, limits)) or "any",
        "applied" if serves.applies_eps else "dropped",
    ]
