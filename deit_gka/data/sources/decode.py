"""Any encoded image to RGB, or a one-line reason why not."""

import contextlib
import os
import warnings
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, features

from trainkit_gka.cli import reason_of

Image.init()  # Pillow's formats; not all of them are taken: for EPS it would run Ghostscript
FORMATS = tuple(form for form in ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF", "AVIF") if form in Image.OPEN)
FORMATS += ("JPEG2000",) * features.check("jpg_2000")
# Of image files; their format is told by content. Pixels of .pfm have no known range.
EXTENSIONS = frozenset(end for end, form in Image.registered_extensions().items() if form in FORMATS) - {".pfm"}
# What file servers, file systems and archives make beside users' files.
SYSTEM_FOLDERS = {"@eaDir", "@tmp", "@Recycle", "#recycle", "#snapshot", "lost+found", "__MACOSX", "$RECYCLE.BIN"}


class BrokenImage(Exception):
    """An image that cannot be decoded; the message is one short line."""


def is_image(path: str) -> bool:
    """Whether a file's name is an image's."""
    return os.path.splitext(path)[1].lower() in EXTENSIONS


def is_system_folder(name: str) -> bool:
    """Whether a folder of this name is hidden or of a system: nothing in it is a class or an image."""
    return name in SYSTEM_FOLDERS or (name.startswith(".") and name.strip(".") != "")


def decode(data: bytes | Image.Image, upright: bool = False) -> Image.Image:
    """An RGB image, loaded; the format is told by content. Transparency is dropped. Raises BrokenImage.

    upright: turned as its camera says, for people to look at. Models see images as they are stored, as in torchvision.
    """
    if isinstance(data, bytes) and not data:
        raise BrokenImage("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about EXIF, transparency and large images
            image = Image.open(BytesIO(data), formats=FORMATS) if isinstance(data, bytes) else data
            image.load()
            with contextlib.suppress(Exception):  # damaged EXIF is ignored
                image = ImageOps.exif_transpose(image) if upright else image
            return _rgb(image)
    except (MemoryError, BrokenImage):
        raise
    except Image.UnidentifiedImageError:
        raise BrokenImage("not a JPEG, JPEG 2000, PNG, PPM, BMP, TIFF, WebP, GIF or AVIF image") from None
    except Exception as error:  # Pillow raises SyntaxError, ValueError, struct.error and more
        raise BrokenImage(reason_of(error)) from None


def _rgb(image: Image.Image) -> Image.Image:
    if not all(image.size):
        raise BrokenImage("it has no pixels")
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip at 255
        values = (np.clip(np.asarray(image).astype(np.int64), 0, 65535) + 128) // 257
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise BrokenImage("floating-point pixels, whose range is not known")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
