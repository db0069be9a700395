"""The images of the page: the ones that come with scikit-learn, and what somebody uploads."""

import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageOps

from deit_gka.data.sources import decode, open_source
from deit_gka.figures.subjects import photographs
from trainkit_gka.cli import UserError

FORMATS, SUFFIXES = ("JPEG", "PNG", "WEBP"), (".jpg", ".jpeg", ".png", ".webp")
MAX_BYTES, MAX_PIXELS = 8 * 2**20, 25 * 10**6
SIDE = 1024  # pixels; a session keeps its image no larger


@dataclass(frozen=True)
class Photo:
    """An RGB image that can be compared and hashed. size: (width, height)."""

    name: str
    size: tuple[int, int]
    rgb: bytes

    @classmethod
    def of(cls, name: str, image: Image.Image) -> "Photo":
        return cls(name, image.size, image.tobytes())

    @property
    def image(self) -> Image.Image:
        return Image.frombytes("RGB", self.size, self.rgb)


def bundled() -> dict[str, Photo]:
    """Two photographs and a handwritten digit of each class, by name."""
    return {photo.name: photo for photo in (*_digits(), *(Photo.of(*item) for item in photographs().items()))}


def _digits() -> Iterator[Photo]:
    source = open_source("digits", "val")
    first: dict[int, int] = {}
    for index in range(len(source)):
        first.setdefault(source.read(index)[1], index)
    for digit, index in sorted(first.items()):
        yield Photo.of(f"digit {source.classes[digit]}", decode(source.read(index)[0]).convert("RGB"))


def read_upload(data: bytes, name: str) -> Photo:
    """An uploaded image under its name, turned as its camera says and made smaller if need be.

    What it is is decided by its content; nothing is decoded before its size is known.
    Raises UserError for files that are too large or are not JPEG, PNG or WebP images.
    """
    if len(data) > MAX_BYTES:
        raise UserError(f"the file has {len(data) / 2**20:.1f} MiB; give one of at most {MAX_BYTES // 2**20} MiB")
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                most = f"at most {MAX_PIXELS // 10**6} million pixels"
                raise UserError(f"the image has {image.width:,} × {image.height:,} pixels; give one of {most}")
            image.draft("RGB", (SIDE, SIDE))
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # greys of 16 bits, which convert would cut off at 255
                image = image.point(lambda grey: grey * (1 / 256)).convert("L")
            image = image.convert("RGB")
            image.thumbnail((SIDE, SIDE))
            return Photo.of(name, image)
    except Image.DecompressionBombError:
        raise UserError(f"the image is too large; give one of at most {MAX_PIXELS // 10**6} million pixels") from None
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for files that are damaged or of another kind
        raise UserError("the file is not a JPEG, PNG or WebP image, or it is damaged; give another one") from None
