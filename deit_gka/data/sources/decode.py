"""Any encoded image to RGB, or a one-line reason why not."""

import warnings
from io import BytesIO

import numpy as np
from PIL import Image

from trainkit.cli import reason_of

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # not all of Pillow's: for EPS it would run Ghostscript


class BrokenImage(Exception):
    """An image that cannot be decoded; the message is one short line."""


def decode(data: bytes | Image.Image) -> Image.Image:
    """An RGB image, loaded; the format is told by content. Transparency is dropped. Raises BrokenImage."""
    if isinstance(data, bytes) and not data:
        raise BrokenImage("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about EXIF, transparency and large images
            return _rgb(Image.open(BytesIO(data), formats=FORMATS) if isinstance(data, bytes) else data)
    except (MemoryError, BrokenImage):
        raise
    except Image.UnidentifiedImageError:
        raise BrokenImage("not a JPEG, PNG, PPM, BMP, TIFF, WebP or GIF image") from None
    except Exception as error:  # Pillow raises SyntaxError, ValueError, struct.error and more
        raise BrokenImage(reason_of(error)) from None


def _rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip at 255
        values = (np.clip(np.asarray(image).astype(np.int64), 0, 65535) + 128) // 257
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise BrokenImage("floating-point pixels, whose range is not known")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
