"""Rows of W as the text itself, every token on the colour of its weight."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import PowerNorm

from nanochat_gka.figures.subjects import FONT, TextSubject, caption
from trainkit_gka.figures.measures import effective_tokens
from trainkit_gka.figures.sheet import bare, coloured, name_above, scale, sheet
from trainkit_gka.plots import Figure

LINE_CHARACTERS = 110
FONT_SIZE = 6.5  # points
CHARACTER = FONT_SIZE / 72 * 1233 / 2048  # inches; the font's width of every character over its height
LINE = 0.13  # inches
MOST_LINES = 96  # of one query, if the layers are not named
TOKENS = 64  # of the text that are drawn
AFTER = 10  # tokens after the last query, which no row weights
CMAP, EDGE, HIDDEN = "gist_heat_r", "tab:blue", "0.72"  # weight 0 has the colour of the page
STRONG = 0.15  # words on tokens of a larger weight are white


def draw_rows(
    subjects: Sequence[TextSubject],
    folder: Path,
    queries: Sequence[int] = (),
    layers: Sequence[int] = (),
    tokens: int = TOKENS,
    talk: bool = False,
) -> list[Figure]:
    """Draw rows of W as the text: a block for every query, models side by side; of one query, one below another.

    queries: tokens from 0; without any three are chosen. layers: from 0; without any all, or as many as fit. tokens:
    how many of the text are drawn, -1 = all. talk: without the caption, for a slide.
    """
    first = subjects[0]
    words = first.words if tokens < 0 else first.words[:tokens]
    queries = queries or choose(words)
    words = words[: max(queries) + 1 + AFTER]
    places, depth = place_words(words), max(len(subject.layers) for subject in subjects)
    lines, width = 1 + places[-1][0], max(column + len(word) for word, (_, column) in zip(words, places))
    fitting = min(depth, max(1, MOST_LINES // (lines * first.num_heads)))
    chosen = layers or sorted(set(np.linspace(depth - 1, 0, fitting).round().astype(int).tolist()))
    names = ", ".join(f'"{words[query].strip()}" (token {query + 1})' for query in queries)
    text = caption(
        subjects,
        f"Rows of W of {names}, framed, by layer and head: the colour behind a token is its weight. Tokens in grey are "
        "hidden by the causal mask, the window or an offset. Right: effective tokens, exp(entropy of the row).",
        "" if len(chosen) == depth else f"Layers {', '.join(str(layer + 1) for layer in chosen)} of {depth}.",
    )
    layers_of = {subject: [layer for layer in chosen if layer < len(subject.layers)] for subject in subjects}
    # Half a line follows every layer.
    height = max(len(having) * (lines * subject.num_heads + 0.5) for subject, having in layers_of.items())
    cell = (max(width * CHARACTER, 2.0), height * LINE)
    title = "What the heads read"
    grid, gap = (len(queries), len(subjects)), 0.3
    if len(queries) == 1:
        grid, gap = (len(subjects), 1), 0.55  # the name of a model is in the gap
    save, axes = sheet(*grid, cell, title, "" if talk else text, (1.1, 0.95, 0.85, 0.1), (1.75, gap))
    axes = axes.reshape(len(queries), len(subjects))
    bare(axes)
    norm, table = PowerNorm(0.5, 0, 1, clip=True), []
    for row, query in zip(axes, queries):
        for axis, (subject, having) in zip(row, layers_of.items()):
            axis.set(xlim=(0, cell[0] / CHARACTER), ylim=(height, 0))
            axis.set_title(f'row of "{words[query].strip()}"', fontsize=8, loc="left", pad=3, parse_math=False)
            axis.set_title("effective\ntokens", fontsize=7, x=1.0 + 0.35 / cell[0], pad=3)
            table += _draw_block(axis, subject, having, words, places, query, norm)
    for axis, subject in zip(axes[0], subjects if len(subjects) > 1 else ()):  # one model is named in the caption
        name_above(axis, subject.model)
    bar = scale(norm, axes[0, -1], (1 + 0.55 / cell[0], 0.1, 0.1 / cell[0], 0.8), cmap=CMAP)
    bar.set_ticks([0, 0.05, 0.2, 0.5, 1])
    return [save(folder / "rows.png", table)]


def place_words(words: Sequence[str], width: int = LINE_CHARACTERS) -> list[tuple[int, int]]:
    """The (line, column) where every word begins, in characters; a word goes to the next line if it does not fit."""
    places, line, column = [], 0, 0
    for word in words:
        if column and column + len(word) > width:
            line, column = line + 1, 0
        places.append((line, column))
        column += len(word)
    return places


def choose(words: Sequence[str], most: int = 3) -> list[int]:
    """Tokens whose rows tell something: the longest words that came before in the text, else evenly spread tokens."""
    stripped = [word.strip() for word in words]
    last = {word: place for place, word in enumerate(stripped)}
    repeated = [place for word, place in last.items() if word.isalpha() and stripped.index(word) < place]
    chosen = sorted(repeated, key=lambda place: (-len(words[place]), -place))[:most]
    spread = np.linspace(len(words) - 1, 0, most, endpoint=False).round().astype(int).tolist()
    chosen += [place for place in dict.fromkeys(spread) if place not in chosen][: most - len(chosen)]
    return sorted(chosen)


def _draw_block(axis, subject: TextSubject, layers: Sequence[int], words, places, query: int, norm) -> list[dict]:
    """The row of one query in every head of some layers of one model. Returns its numbers."""
    lines, top, right, table = 1 + places[-1][0], 0.0, axis.get_xlim()[1] + 1, []
    font = dict(family=FONT, fontsize=FONT_SIZE, va="center", parse_math=False)
    for number in layers:
        layer = subject.layers[number]
        for head, name in enumerate(subject.head_names(layer)):
            row, offset = layer.reads[head, query], int(layer.value_offsets[head])
            visible = range(max(0, query - layer.window - offset), max(1, query + 1 - offset))
            effective, most = float(effective_tokens(row[None])), int(row.argmax())
            axis.text(-1, top + 0.5, f"layer {number + 1} head {name}", ha="right", **font)
            axis.text(right, top + 0.5, f"{effective:5.1f}", **font)
            for token, (word, (line, column)) in enumerate(zip(words, places)):
                colour = HIDDEN if token not in visible else "white" if row[token] > STRONG else "black"
                axis.text(column, top + line + 0.5, word, color=colour, **font)
            boxes = [_corners(word, place, top) for word, place in zip(words, places)]
            colours = coloured(row[visible.start : visible.stop], norm, CMAP) / 255
            axis.add_collection(PolyCollection([boxes[i] for i in visible], facecolors=colours, linewidths=0))
            frame = dict(facecolors="none", edgecolors=EDGE, linewidths=0.8, zorder=5)
            axis.add_collection(PolyCollection([boxes[query]], **frame))
            table.append(
                {"model": subject.model, "token": words[query].strip(), "layer": number + 1, "head": name,
                 "effective tokens": effective, "largest weight": float(row[most]), "on": words[most].strip()}
            )  # fmt: skip
            top += lines
        top += 0.5
    return table


def _corners(word: str, place: tuple[int, int], top: float) -> list[tuple[float, float]]:
    """The box of a word, (x, y) in characters and lines."""
    line, first = place
    low, high = top + line + 0.04, top + line + 0.96
    return [(first, low), (first + len(word), low), (first + len(word), high), (first, high)]
