"""What the page is made of: tables of text, and pictures with a caption, words for who cannot see them, and numbers."""

import base64
import io
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from PIL import Image

from runs.table import Table
from trainkit_gka.figures.sheet import DPI

PICTURE_WIDTH = 2400  # pixels that a picture keeps
SCREEN_DPI = 96  # of CSS's pixels
WEBP_QUALITY = 82


@dataclass(frozen=True)
class Picture:
    """A picture: `markup` is an svg or img element that has the alternative text already.

    table: its numbers. wide: whether it takes the whole width of the page.
    """

    title: str
    caption: str
    markup: Markup
    table: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Fold:
    """What is closed until somebody opens it."""

    title: str
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading, in this order.

    name: of its address in the page. missing: why something is absent, and the command that would make it. template:
    the file of template/ that writes what is neither table nor picture, from `content`. short: the title among the
    contents. folds: come last.
    """

    name: str
    title: str
    introduction: str = ""
    missing: str = ""
    template: str = ""
    content: Any = None
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    short: str = ""
    folds: list[Fold] = field(default_factory=list)


def number(value: object, digits: int = 4) -> str:
    """A number as a cell; whole ones in full, others with so many digits, and nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return str(value)


def image_element(light: Image.Image, dark: Image.Image, alternative: str) -> Markup:
    """A picture element of a figure drawn for a light and a dark page; its size on a screen is that on paper."""
    width, height = (round(side * SCREEN_DPI / DPI) for side in light.size)
    addresses = []
    for image in (dark, light):
        if image.width > PICTURE_WIDTH:
            image = image.resize((PICTURE_WIDTH, round(image.height * PICTURE_WIDTH / image.width)), Image.LANCZOS)
        addresses.append(data_address(image))
    markup = '<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{}">'
    markup += '<img src="{}" alt="{}" width="{}" height="{}" style="--own: {}px"></picture>'
    return Markup(markup).format(*addresses, alternative, width, height, width)


def data_address(image: Image.Image, lossless: bool = False) -> str:
    """The image as an address that needs no network: WebP in base64."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", quality=WEBP_QUALITY, lossless=lossless, method=6)
    return "data:image/webp;base64," + encoded(buffer.getvalue())


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
