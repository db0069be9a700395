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

    table: its numbers. wide: whether it needs more than a phone's width, so that its box scrolls.
    """

    title: str
    caption: str
    markup: Markup
    table: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading, in this order.

    name: of its address in the page. missing: why something is absent, and the command that would make it. template:
    the file of template/ that writes what is neither table nor picture, from `content`.
    """

    name: str
    title: str
    introduction: str = ""
    missing: str = ""
    template: str = ""
    content: Any = None
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def number(value: object, digits: int = 4) -> str:
    """A number as a cell; whole ones in full, others with so many digits, and nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return str(value)


def image_element(image: Image.Image, alternative: str) -> Markup:
    """An img element that holds a figure's picture; its own size on a screen is that on paper."""
    width, height = (round(side * SCREEN_DPI / DPI) for side in image.size)
    if image.width > PICTURE_WIDTH:
        image = image.resize((PICTURE_WIDTH, round(image.height * PICTURE_WIDTH / image.width)), Image.LANCZOS)
    attributes = Markup('<img src="{}" alt="{}" width="{}" height="{}" style="--own: {}px">')
    return attributes.format(data_address(image), alternative, width, height, width)


def data_address(image: Image.Image, lossless: bool = False) -> str:
    """The image as an address that needs no network: WebP in base64."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", quality=WEBP_QUALITY, lossless=lossless, method=6)
    return "data:image/webp;base64," + encoded(buffer.getvalue())


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
