"""Pictures: figures drawn without a display. Matplotlib is imported when the first one is begun."""

from pathlib import Path


def subplots(rows: int = 1, columns: int = 1, figsize: tuple[float, float] | None = None, squeeze: bool = True):
    """A figure of `figsize` inches and its axes, as pyplot's function of this name gives them."""
    from matplotlib.figure import Figure  # pyplot would need a backend chosen and every figure closed

    figure = Figure(figsize=figsize)
    return figure, figure.subplots(rows, columns, squeeze=squeeze)


def save(figure, path: Path, dpi: int = 120) -> Path:
    """Write `figure`, its parts moved so that none overlap, to `path`. Returns the path."""
    figure.tight_layout()
    figure.savefig(path, dpi=dpi)
    return path
